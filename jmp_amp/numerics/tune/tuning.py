"""The result of `tune`, as plain data: what every module got, and what it cost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from jmp_amp.numerics.locate.sites import or_infinite
from jmp_amp.policies.patterns import describe, text_of
from jmp_amp.policies.policy import Policy, get_policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports import plain_data, requests, tables
from jmp_amp.reports.report_tables import TOP_LEVEL
from jmp_amp.reports.tables import Table, quantity


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `tune` found out about a module.

    Attributes:
      policy: the policy that it got.
      sensitivity: the gradient error if it alone runs as the policy at the start says
        and everything else in f32, as the flagged program estimates it; inf if that
        gradient is not finite.
      flops: of its matrix products in a forward pass, as `explain` counts them.

    Example:
      >>> import jmp_amp as amp
      >>> amp.Tuned(amp.get_policy("float32"), 0.01, 1024).flops
      1024
    """

    policy: Policy
    sensitivity: float
    flops: int


# What modules are sorted by, and the figures of each.
SORTS: dict[str, Callable[[Tuned], float]] = {
    "error": lambda tuned: or_infinite(tuned.sensitivity),
    "flops": lambda tuned: tuned.flops,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One map of policies that `tune` compiled and measured.

    Attributes:
      policy: its text.
      error: the gradient error; inf if the gradient is not finite.
      cost: the share of the matmul FLOPs in half precision or less.

    Example:
      >>> import jmp_amp as amp
      >>> amp.Step("p=f32,c=f16,o=f32", 0.001, 1.0).cost
      1.0
    """

    policy: str
    error: float
    cost: float


@dataclasses.dataclass(frozen=True)
class Tuning(tables.Shown, plain_data.Written):
    """Policies by module that meet a bound on the gradient error; `tune` makes it.

    `str(tuning)` is a table, and so is a tuning at the end of a notebook's cell.

    Attributes:
      function: the name of the function.
      policy: the map to give to `autocast`.
      max_grad_error: the bound.
      error: the gradient error with `policy`, as its compiled program has it.
      error_before: that of the policy at the start; inf if a gradient is not finite.
      cost: the share of the gradient program's matmul FLOPs in half precision or less.
      cost_before: that of the policy at the start.
      modules: what each module got, by its path in `explain`; "" is outside of all.
      steps: every map that was measured, in order; the first is the start.
      compilations: how many programs were compiled.
      is_minimal: whether it was measured of each entry that it is needed. False if that
        would have taken too many compilations.
      notes: what is in half whatever the policy says, and what to do about it.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
      >>> w = x = jnp.ones((4, 4))
      >>> tuning = amp.tune(loss, max_grad_error=0.1)(w, x)
      >>> tuning.error <= 0.1, tuning.policy == amp.PolicyMap("mixed_float16")
      (True, True)
      >>> amp.Tuning.from_json(tuning.to_json()) == tuning
      True
    """

    function: str
    policy: PolicyMap
    max_grad_error: float
    error: float
    error_before: float
    cost: float
    cost_before: float
    modules: dict[str, Tuned]
    steps: tuple[Step, ...]
    compilations: int
    is_minimal: bool = True
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The errors, the costs and what the map has, in one sentence."""
        entries, names = len(self.policy.entries), len(self.policy.default.full)
        counts = f"{entries} {'entry' if entries == 1 else 'entries'}"
        if names:
            counts += f" and {names} {'name' if names == 1 else 'names'} in f32"
        return (
            f"{self.function}: gradient error {self.error:.3g}, bound "
            f"{self.max_grad_error:.3g}, before {self.error_before:.3g}; "
            f"{100 * self.cost:.0f}% of matmul FLOP in half, before "
            f"{100 * self.cost_before:.0f}%; {counts} in the map; "
            f"{self.compilations} compilations"
        )

    @property
    def _notes(self) -> tuple[str, ...]:
        return self.notes

    def table(self, *, sort: str | None = "error", width: int = 100) -> str:
        """Returns the table of all modules as text, sorted by one of its figures.

        Args:
          sort: "error" for the sensitivity, "flops", each the largest first, or None
            for the order of the program.
          width: of the table, in characters.

        Raises:
          TypeError: if `width` is no int.
          ValueError: if `sort` is none of these, or `width` below 1.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> tuning = amp.tune(jnp.vdot, max_grad_error=0.1)(jnp.ones(2), jnp.ones(2))
          >>> print(tuning.table(sort="flops", width=200).splitlines()[3].strip())
          module        policy              sensitivity   FLOP
        """
        requests.check_sort(sort, "Tuning.table", SORTS)
        requests.check_width(width, "Tuning.table", 100)
        return tables.as_text(self.summary, [self._modules(sort)], width)

    def _tables(self) -> list[Table]:
        rows = [("(default)", str(self.policy.default))]
        rows += [
            (text_of(pattern) or describe(pattern), str(policy))
            for pattern, policy in self.policy.entries
        ]
        note = "" if self.is_minimal else "Not every entry was shown to be needed."
        policy = Table("Policy", ("modules", "policy"), rows, (), note)
        return [policy, self._modules("error")]

    def _modules(self, sort: str | None) -> Table:
        numbers = ("sensitivity", "FLOP")
        rows = [
            (
                path or TOP_LEVEL,
                str(each.policy),
                f"{each.sensitivity:.2g}",
                quantity(each.flops) if each.flops else "",
            )
            for path, each in by_figure(self, sort)
        ]
        note = "sensitivity: the gradient error if nothing else runs in half precision."
        return Table("Modules", ("module", "policy", *numbers), rows, numbers, note)

    def to_dict(self) -> dict[str, Any]:
        """Returns the tuning as dictionaries, lists, numbers and text.

        Errors that are not finite are text, "inf".

        Raises:
          ValueError: if a pattern of the map at the start is a class or a function.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> tuning = amp.tune(jnp.vdot, max_grad_error=0.1)(jnp.ones(2), jnp.ones(2))
          >>> tuning.to_dict()["policy"]
          {'default': 'p=f32,c=f16,o=f32', 'policies': {}}
        """
        modules = {
            path: {**vars(each), "policy": str(each.policy)}
            for path, each in self.modules.items()
        }
        told = {
            **vars(self),
            "policy": self.policy.to_dict(),
            "modules": modules,
            "steps": list(map(vars, self.steps)),
        }
        return plain_data.written(told)

    def to_json(self, indent: int | None = None) -> str:
        """Returns the tuning as JSON text; `from_json` reads it back.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> tuning = amp.tune(jnp.vdot, max_grad_error=0.1)(jnp.ones(2), jnp.ones(2))
          >>> amp.Tuning.from_json(tuning.to_json()) == tuning
          True
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tuning:
        """Returns the tuning that `to_dict` wrote.

        Raises:
          TypeError: if `data` is not a mapping.
          ValueError: if it is not one that `to_dict` wrote.
        """
        data = plain_data.mapping(data, "Tuning")
        try:
            read = {field.name: data[field.name] for field in dataclasses.fields(cls)}
            read["policy"] = PolicyMap.from_dict(data["policy"])
            read["modules"] = {
                path: Tuned(
                    get_policy(row["policy"]), float(row["sensitivity"]), row["flops"]
                )
                for path, row in data["modules"].items()
            }
            read["steps"] = tuple(
                Step(row["policy"], float(row["error"]), float(row["cost"]))
                for row in data["steps"]
            )
            read["notes"] = tuple(data["notes"])
            for name in ("max_grad_error", "error", "error_before"):
                read[name] = float(data[name])
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(
                f"Tuning.from_dict: {error!r}. Give what to_dict() of a tuning "
                "returned; if it is of another version, tune again."
            ) from error
        return cls(**read)


def by_figure(tuning: Tuning, sort: str | None) -> list[tuple[str, Tuned]]:
    """Returns the paths of modules and what they got, as `Tuning.table` sorts them."""
    modules = list(tuning.modules.items())
    if sort is not None:
        modules.sort(key=lambda each: -SORTS[sort](each[1]))
    return modules
