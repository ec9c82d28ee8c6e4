"""`Diagnosis`: what the numbers of a function did under a policy, to be read."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import jax

from jmp_amp.numerics.diagnose import diagnosis_tables, wording
from jmp_amp.numerics.diagnose.diagnosis_tables import is_rounding
from jmp_amp.numerics.locate import sites
from jmp_amp.numerics.locate.sites import EightBits, Gradient, Numbers, Site
from jmp_amp.policies.dtypes import PyTree
from jmp_amp.policies.policy_map import PolicyMap, as_policy_map
from jmp_amp.reports import plain_data, requests, tables


@dataclasses.dataclass(frozen=True, eq=False)
class Diagnosis(tables.Shown, plain_data.Written):
    """What the numbers of a function did under a policy; `diagnose` makes it.

    `str(diagnosis)` says what is wrong and what to do, then shows tables, and so does a
    diagnosis at the end of a notebook's cell. Two are equal if they show the same
    numbers; NaN is equal to NaN here.

    Attributes:
      function: the name of the function.
      given: the text of the policy that was diagnosed.
      value: what the function returned under the policy, without aux; read back from
        JSON, arrays are lists.
      sites: the floating-point equations that ran under the policy, forward and then
        backward, in the order of execution.
      reference: those of the function in f32: the ranges that the numbers need.
      gradients: by the key path of the parameter, unscaled.
      loss_scale: a suggestion, a power of two.
      policy: a suggestion: the policy, and f32 for what needs it.
      advice: sentences, the most important first; empty if nothing is wrong.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> loss = lambda w, x: jnp.sum(x @ w)
      >>> x = jnp.full((4, 4), 300.0)
      >>> d = amp.diagnose(loss, "mixed_float16")(x, x)
      >>> d.first_nonfinite.operation, d.first_nonfinite.dtype
      ('dot_general', 'f16')
      >>> print(d.policy)
      p=f32,c=f16,o=f32,full=dot_general
    """

    function: str
    given: str
    value: PyTree
    sites: tuple[Site, ...]
    reference: tuple[Site, ...]
    gradients: dict[str, Gradient]
    loss_scale: float
    policy: PolicyMap
    advice: tuple[str, ...]

    @functools.cached_property
    def modules(self) -> dict[str, Numbers]:
        """The sites of each module, both directions, added up; "" is outside of all."""
        groups: dict[str, list[Site]] = {}
        for site in self.sites:
            groups.setdefault(site.module, []).append(site)
        return {path: sites.added_up(group) for path, group in groups.items()}

    @property
    def first_nonfinite(self) -> Site | None:
        """The first site whose operands were all finite and a result was not."""
        return sites.first_made(self.sites)

    @property
    def blame(self) -> tuple[Site, ...]:
        """The forward sites that make the error larger, the largest factor first."""
        found = [x for x in self.sites if x.is_forward and x.error is not None]
        found.sort(key=lambda site: -sites.or_infinite(site.amplification))
        return tuple(found)

    @functools.cached_property
    def quantised(self) -> tuple[EightBits, ...]:
        """The arrays that became 8-bit floats, for the products of an fp8 policy."""
        return sites.quantised(self.sites)

    @property
    def is_finite(self) -> bool:
        """Whether the value and all gradients are finite, and no site made another."""
        return (
            plain_data.is_finite(self.value)
            and not any(each.nonfinite for each in self.gradients.values())
            and self.first_nonfinite is None
        )

    @property
    def summary(self) -> str:
        """What is finite and what is not, and where that began, in one sentence."""
        parts, gradients = [_value(self.value)], self.gradients
        if bad := sum(bool(each.nonfinite) for each in gradients.values()):
            parts.append(f"{bad} of {len(gradients)} gradients not finite")
        elif gradients:
            each = gradients.values()
            told = [x.error for x in each if not is_rounding(x, gradients)]
            worst = max(told, key=sites.or_infinite, default=0.0)
            parts.append(f"gradients finite, error up to {wording.number(worst)}")
        if (first := self.first_nonfinite) is not None:
            parts.append(f"first made by {wording.place(first)}, {wording.run(first)}")
        if gradients:
            parts.append(f"suggested loss scale {tables.scale_text(self.loss_scale)}")
        return f"{self.function} with {self.given}: {'; '.join(parts)}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Diagnosis):
            return NotImplemented
        return self.policy == other.policy and self._fields() == other._fields()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def _notes(self) -> tuple[str, ...]:
        return self.advice

    def table(self, *, sort: str | None = None, width: int = 100) -> str:
        """Returns the table of all modules as text, sorted by one of its figures.

        Args:
          sort: "error" of the worst operation, "nonfinite" for the number of
            values that are not finite, or None for the order of the program.
          width: of the table, in characters.

        Raises:
          TypeError: if `width` is no int.
          ValueError: if `sort` is none of these, or `width` below 1.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> @jax.jit
          ... def inside(x):
          ...     return x @ x
          >>> x = jnp.full((4, 4), 0.1)
          >>> d = amp.diagnose(lambda x: inside(x) + 1)(x)
          >>> lines = d.table(sort="error", width=200).splitlines()
          >>> [line.split("  ")[0].strip() for line in lines[5:7]]
          ['inside', '(top level)']
        """
        requests.check_sort(sort, "Diagnosis.table", diagnosis_tables.SORTS)
        requests.check_width(width, "Diagnosis.table", 100)
        shown = self._modules(sort=sort, is_whole=True)
        return tables.as_text(self.summary, [shown], width)

    def _modules(self, **options: Any) -> tables.Table:
        return diagnosis_tables.of_modules(
            self.modules, self.sites, self.reference, **options
        )

    def drill_down(self, module: str = "**", *, width: int = 140) -> str:
        """Returns a table of the sites of some modules.

        The column `#` is the identity of an equation: `4.0.2` is equation 2 in body 0
        of equation 4. `lost` is the share of the reference's values that underflow the
        site's half dtype, without a loss scale.

        Args:
          module: a glob of the whole path, `"encoder/*/attention"` or `"**/head"`: `*`
            stays inside one segment, `**` stands for any number of them; `""` is
            outside of all modules.
          width: of the table, in characters.

        Raises:
          TypeError: if `module` is not text, or `width` not an int.
          ValueError: if `width` is below 1.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> d = amp.diagnose(lambda x: jnp.exp(x) + 1.0, "float32")(jnp.ones(3))
          >>> print(d.drill_down("", width=120).splitlines()[0])
          2 of 2 sites
        """
        requests.check_module(module, "Diagnosis.drill_down")
        requests.check_width(width, "Diagnosis.drill_down", 140)
        chosen, heading = requests.of_modules(self.sites, self.modules, module, "sites")
        shown = diagnosis_tables.of_sites(chosen, self.reference)
        return tables.as_text(heading, shown, width)

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis as dictionaries, lists, numbers and text.

        Numbers that are not finite are "inf", "-inf" and "nan", as strict JSON has it.
        What follows from the sites is in it too, for other programs to read;
        `from_dict` does not need it.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> d = amp.diagnose(lambda x: 1 / x, "float32")(0.0)
          >>> d.to_dict()["value"], amp.Diagnosis.from_dict(d.to_dict()) == d
          ('inf', True)
        """
        first = self.first_nonfinite
        places = {id(site): number for number, site in enumerate(self.sites)}
        derived = {
            "summary": self.summary,
            "is_finite": self.is_finite,
            "first_nonfinite": None if first is None else vars(first),
            "blame": [places[id(site)] for site in self.blame],
            "modules": {path: vars(each) for path, each in self.modules.items()},
        }
        return self._fields() | plain_data.written(derived)

    def to_json(self, indent: int | None = None) -> str:
        """Returns the diagnosis as strict JSON; `from_json` reads it back.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> d = amp.diagnose(lambda x: jnp.exp(x), "float32")(jnp.ones(3))
          >>> amp.Diagnosis.from_json(d.to_json()) == d
          True
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Diagnosis:
        """Returns the diagnosis that `to_dict` wrote.

        Raises:
          TypeError: if `data` is not a mapping.
          ValueError: if it is not one that `to_dict` wrote, or if the policy has a
            pattern that is a class or a function, which no text can say.
        """
        data = plain_data.mapping(data, "Diagnosis")
        # Names and sentences are text, whatever words they are.
        read = plain_data.fields(cls, data)
        read["policy"] = _policy_from(data["policy"])
        with plain_data.reading_rows("Diagnosis"):
            read["value"] = plain_data.read(data["value"])
            read["sites"] = tuple(map(_site, data["sites"]))
            read["reference"] = tuple(map(_site, data["reference"]))
            read["gradients"] = {
                key: Gradient(**plain_data.read(row))
                for key, row in data["gradients"].items()
            }
            read["loss_scale"] = plain_data.read(data["loss_scale"])
            read["advice"] = tuple(data["advice"])
        return cls(**read)

    def _tables(self) -> list[tables.Table]:
        shown = [
            self._modules(),
            diagnosis_tables.of_blame(self.blame),
            diagnosis_tables.of_quantised(self.quantised),
            diagnosis_tables.of_gradients(self.gradients),
        ]
        return [table for table in shown if table.rows]

    def _fields(self) -> dict[str, Any]:
        found = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        found["sites"] = list(map(vars, self.sites))
        found["reference"] = list(map(vars, self.reference))
        found["gradients"] = {key: vars(each) for key, each in self.gradients.items()}
        found["policy"] = _policy_written(self.policy)
        return plain_data.written(found)


def _value(value: PyTree) -> str:
    leaves = jax.tree.leaves(plain_data.read(plain_data.written(value)))
    if len(leaves) == 1 and isinstance(leaves[0], float):
        return f"value {leaves[0]:.4g}"
    return f"value {'finite' if plain_data.is_finite(value) else 'not finite'}"


def _site(row: Mapping[str, Any]) -> Site:
    numbers = ("amax", "amin", "error", "amplification")
    exponents = {int(e): count for e, count in row["exponents"].items()}
    read = {name: plain_data.read(row[name]) for name in numbers}
    shape = plain_data.read_shape(row["shape"])
    return Site(**{**row, **read, "shape": shape, "exponents": exponents})


def _policy_written(policy: PolicyMap) -> dict[str, Any] | str:
    try:
        return policy.to_dict()
    except ValueError:
        return str(policy)  # a pattern is a class: to be looked at only


def _policy_from(data: object) -> PolicyMap:
    if isinstance(data, str):
        return as_policy_map(data, "Diagnosis.from_dict: the policy {}")
    try:
        return PolicyMap.from_dict(data)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise ValueError(f"Diagnosis.from_dict: the policy: {error}") from error
