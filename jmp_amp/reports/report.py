"""`Report`: what autocast does to a function, as plain data and as tables."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from jmp_amp.reports import plain_data, report_tables, requests, rows, sentences, tables
from jmp_amp.reports.askers import by_asker
from jmp_amp.reports.rows import Asked, Cast, Costs, Equation, Kept, Reason, Saved
from jmp_amp.reports.ways import Frame
from jmp_amp.reports.why import Why


@dataclasses.dataclass(frozen=True)
class Report(tables.Shown, plain_data.Written):
    """The plan of a function under autocast, as plain data; `explain` makes it.

    `str(report)` is a table, and so is a report at the end of a notebook's cell. It is
    about the function as it is called: to see the equations of a backward pass, explain
    the function that computes the gradient.

    The body of a `scan` counts as often as it runs, that of a `while_loop` once, and
    every branch of a `cond` once. A symbolic size, as `jax.export` has for a batch,
    counts as 1: operations and bytes are those of one example.

    Attributes:
      function: the name of the function.
      policy: the text of the policy.
      equations: a row for every equation, in the order of the program.
      saved: the bytes that the modules keep for the backward pass, if all
        floating-point arguments are differentiated; None if the function cannot be.
      not_differentiable: why not; None if it can.
      unused_rules: the operations that the policy names and that decided no equation.
      arguments: the bytes of the arguments that the backward pass keeps as they are,
        besides `saved`.
      arguments_without: those without autocast: float32 weights.
      on_cpu: what the CPU that the plan is for runs, in words; None for a GPU or a
        TPU.
      largest_kept: the arrays that the program computes and keeps for the backward
        pass, the largest first; the table shows three.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> report = amp.explain(lambda w, x: jnp.exp(x @ w))(x, x)
      >>> [(e.operation, e.dtype) for e in report.equations]
      [('dot_general', 'bf16'), ('exp', 'f32')]
      >>> report.total.matmuls_in_half, report.total.flops
      (1, 1024)
    """

    function: str
    policy: str
    equations: tuple[Equation, ...]
    saved: tuple[Saved, ...] | None
    not_differentiable: str | None
    unused_rules: tuple[str, ...]
    arguments: int = 0
    arguments_without: int = 0
    on_cpu: str | None = None
    largest_kept: tuple[Kept, ...] = ()
    # The plan, which `why` reads: no data, and gone where the report is read from data.
    _program: Frame | None = dataclasses.field(default=None, repr=False, compare=False)

    @functools.cached_property
    def total(self) -> Costs:
        """All equations, added up."""
        return rows.added_up(self.equations, self.saved or ())

    @functools.cached_property
    def modules(self) -> dict[str, Costs]:
        """The equations of each module, added up; "" is outside of all modules."""
        return rows.by_module(self.equations, self.saved or ())

    @functools.cached_property
    def stays_full(self) -> tuple[Reason, ...]:
        """Why floating-point equations stay in f32, the most elements first."""
        full = [e for e in self.equations if e.stays_full and not e.is_opaque]
        return rows.by_reason(full, "elements", lambda e: e.flops - e.flops_in_half)

    @functools.cached_property
    def half_beside(self) -> tuple[Reason, ...]:
        """Why equations that are no products are in half, the most elements first."""
        half = [e for e in self.equations if e.is_in_half and not e.matmuls]
        return rows.by_reason(half, "elements")

    @functools.cached_property
    def asked(self) -> tuple[Asked, ...]:
        """What is in half whatever the policy says, by who asks for it.

        That is the program, by half arrays, `dtype=` and `astype`.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float16)
          >>> (asked,) = amp.explain(lambda x: jnp.tanh(x @ x))(x).asked
          >>> asked.by, asked.matmuls
          ('the program itself', 1)
        """
        return by_asker(self.equations)

    @property
    def asks_for_fp8(self) -> bool:
        """Whether the policy, or one of the map's, asks for products in 8 bits."""
        return "m=fp8" in self.policy

    @functools.cached_property
    def products(self) -> tuple[Reason, ...]:
        """Matrix products by the reason for their dtype, the most operations first.

        A product of 8-bit floats has its formats as its reason,
        `e4m3 x e4m3 -> bf16`.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> x = jax.ShapeDtypeStruct((32, 100), jnp.float32)
          >>> w = jax.ShapeDtypeStruct((100, 64), jnp.float32)
          >>> v = jax.ShapeDtypeStruct((64, 16), jnp.float32)
          >>> report = amp.explain(lambda x, w, v: x @ w @ v, "fp8")(x, w, v)
          >>> [each.reason for each in report.products]
          ['k = 100 is no multiple of 16', 'e4m3 x e4m3 -> bf16']
        """
        products = [e for e in self.equations if e.matmuls]
        return rows.by_reason(products, "flops")

    @property
    def hardly_pays(self) -> str | None:
        """Why fp8 will hardly make the program faster, in words; None if it may.

        Quantising reads and writes its operands once more. A product with a side below
        1024 is not slow enough to make up for that.
        """
        products = [e for e in self.equations if e.fp8_matmuls]
        total = sum(e.fp8_flops for e in products)
        small = sum(e.fp8_flops for e in products if e.smallest_side < 1024)
        if not total or small <= total / 2:
            return None
        return (
            f"fp8 will hardly pay: {100 * small / total:.0f}% of its operations are in "
            "products with a side below 1024."
        )

    @property
    def casts(self) -> dict[str, tuple[int, int]]:
        """The numbers of casts and of their elements, for each pair of dtypes."""
        pairs: dict[str, tuple[int, int]] = {}
        for cast in (cast for e in self.equations for cast in e.casts):
            pair = f"{cast.source} to {cast.target}"
            count, elements = pairs.get(pair, (0, 0))
            pairs[pair] = count + 1, elements + cast.elements
        return pairs

    @property
    def opaque(self) -> tuple[Equation, ...]:
        """The calls that the plan does not look into: they run as traced."""
        return tuple(e for e in self.equations if e.is_opaque)

    @property
    def summary(self) -> str:
        """The operations in half, the casts and the saved bytes, in one sentence."""
        parts = sentences.plan(self.total, self.asked, self.asks_for_fp8)
        if self.saved is None:
            parts.append(f"not differentiable: {self.not_differentiable}")
        else:
            held = self.arguments, self.arguments_without
            parts += sentences.saved(self.total, *held)
        where = "" if self.on_cpu is None else f" on this CPU ({self.on_cpu})"
        return f"{self.function} with {self.policy}{where}: {'; '.join(parts)}"

    def table(self, *, sort: str | None = None, width: int = 100) -> str:
        """Returns the table of all modules as text, sorted by one of its figures.

        Without `sort` a module stands below the one that it is in, in the order of the
        program. With it, whole paths stand in one list, the largest figure first.

        Args:
          sort: "flops", "saved" for the bytes kept for the backward pass, "casts" for
            the elements cast, or None.
          width: of the table, in characters.

        Raises:
          TypeError: if `width` is no int.
          ValueError: if `sort` is none of these, or `width` below 1.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> @jax.jit
          ... def small(w, x):
          ...     return x @ w
          >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
          >>> report = amp.explain(lambda w, x: small(w, x[:1]) + x @ w)(x, x)
          >>> lines = report.table(sort="flops", width=400).splitlines()
          >>> [line.split("  ")[0].strip() for line in lines[5:7]]
          ['(top level)', 'small']
        """
        requests.check_sort(sort, "Report.table", report_tables.SORTS)
        requests.check_width(width, "Report.table", 100)
        return tables.as_text(self.summary, [self._modules(sort)], width)

    def _modules(self, sort: str | None = None) -> tables.Table:
        saves = self.saved is not None
        return report_tables.of_modules(self.modules, self.total, saves, sort)

    def drill_down(self, module: str = "**", *, width: int = 140) -> str:
        """Returns a table of the equations of some modules.

        The column `#` is the identity of an equation: `4.0.2` is equation 2 in body 0
        of equation 4. `x3` says that it runs 3 times.

        Args:
          module: a glob of the whole path, `"encoder/*/attention"` or `"**/head"`: `*`
            stays inside one segment, `**` stands for any number of them; `""` is
            outside of all modules.
          width: of the table, in characters.

        Raises:
          TypeError: if `module` is not text, or `width` not an int.
          ValueError: if `width` is below 1.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
          >>> report = amp.explain(lambda w, x: jnp.exp(x @ w))(x, x)
          >>> print(report.drill_down("", width=100).splitlines()[0])
          2 of 2 equations
        """
        requests.check_module(module, "Report.drill_down")
        requests.check_width(width, "Report.drill_down", 140)
        chosen, heading = requests.of_modules(
            self.equations, self.modules, module, "equations"
        )
        shown = report_tables.of_equations(chosen)
        return tables.as_text(heading, shown, width)

    def why(self, identity: str | tuple[int, ...] | Equation) -> str:
        """Returns what decided the dtype of one equation, in words, line by line.

        The lines say what the equation reads and keeps, its class, what makes each
        operand, what reads the results, and whether a pin, the readers or the class
        decided; then the chain of causes, equation by equation; and how to overrule it.
        A pin is a reason of the plan to keep f32, whatever else could be. Of a call or
        a loop they say in which dtypes values go in, around and out.

        Args:
          identity: of the equation, as the column `#` of `drill_down` shows it:
            "4.0.2"; the same numbers as a tuple; or a row of `equations`.

        Raises:
          TypeError: if `identity` is none of these.
          ValueError: if no equation of the report has it, or if the report was read
            from data or from a pickle, which does not hold the plan.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
          >>> report = amp.explain(lambda x: jnp.linalg.cholesky(x @ x))(x)
          >>> lines = report.why("0").splitlines()
          >>> print(lines[1])
          It is f32: linear algebra reads it: an error grows by the condition number.
        """
        call = f"Report.why({getattr(identity, 'identity', identity)!r})"
        row = rows.row_of(self.equations, identity, call)
        if self._program is None:
            raise ValueError(
                f"{call}: the report was read from data, which does not hold the plan. "
                "Explain the function again, amp.explain(fn, policy)(*args), and ask "
                "the new report."
            )
        return Why(self._program, {e.identity: e for e in self.equations}).text(row)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dictionaries, lists, numbers and text.

        The sums over the equations are in it too, for other programs to read;
        `from_dict` does not need them.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> report = amp.explain(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2)))
          >>> amp.Report.from_dict(report.to_dict()) == report
          True
          >>> report.to_dict()["total"]["matmuls"]
          1
        """
        derived = {
            "summary": self.summary,
            "total": self.total._asdict(),
            "modules": {path: costs._asdict() for path, costs in self.modules.items()},
            "casts": self.casts,
            "stays_full": [reason._asdict() for reason in self.stays_full],
        }
        # Through JSON, which makes lists of all tuples.
        found = {**dataclasses.asdict(self), **derived}
        del found["_program"]
        # A size that `jax.export` leaves open is a symbol, and its text here.
        return json.loads(json.dumps(found, default=str))

    def to_json(self, indent: int | None = None) -> str:
        """Returns the report as JSON text; `from_json` reads it back.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> report = amp.explain(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2)))
          >>> amp.Report.from_json(report.to_json()) == report
          True
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Returns the report that `to_dict` wrote.

        Raises:
          TypeError: if `data` is not a mapping.
          ValueError: if it is not one that `to_dict` wrote.
        """
        data = plain_data.mapping(data, "Report")
        read = plain_data.fields(cls, data)
        with plain_data.reading_rows("Report"):
            read["equations"] = tuple(_equation(row) for row in data["equations"])
            if data["saved"] is not None:
                read["saved"] = tuple(Saved(**row) for row in data["saved"])
            read["largest_kept"] = tuple(map(_kept, data["largest_kept"]))
            read["unused_rules"] = tuple(data["unused_rules"])
        return cls(**read)

    def _tables(self) -> list[tables.Table]:
        in_f64 = [e for e in self.equations if e.dtype == "f64" and e.matmuls]
        shown = [
            self._modules(),
            report_tables.of_products(
                self.products if self.asks_for_fp8 else (), self.hardly_pays
            ),
            report_tables.of_asked(self.asked),
            report_tables.of_reasons(self.stays_full),
            report_tables.of_reasons(
                rows.by_reason(in_f64, "flops"), "What stays in f64"
            ),
            report_tables.of_reasons(self.half_beside, "What is half beside products"),
            report_tables.of_f32_gradients(self.equations),
            report_tables.of_casts(self.casts),
            report_tables.of_kept(self.largest_kept),
            report_tables.of_opaque(self.opaque, self.on_cpu is not None),
            report_tables.of_unused(self.unused_rules),
        ]
        return [table for table in shown if table.rows]


def _kept(row: Mapping[str, Any]) -> Kept:
    return Kept(**{**row, "shape": plain_data.read_shape(row["shape"])})


def _equation(row: Mapping[str, Any]) -> Equation:
    casts = tuple(Cast(**cast) for cast in row["casts"])
    shapes = tuple(map(plain_data.read_shape, row["shapes"]))
    return Equation(**{**row, "shapes": shapes, "casts": casts})
