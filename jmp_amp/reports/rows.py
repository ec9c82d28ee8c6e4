"""The rows of a report as plain data, and their sums."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jmp_amp.policies.dtypes import F32, is_fp8, is_half, parse_dtype


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast that the plan inserts.

    Attributes:
      source: the dtype of the value.
      target: the dtype that it is cast to.
      elements: the number of elements, over all runs of the cast.
      where: "operand" or "result" of the equation.
    """

    source: str
    target: str
    elements: int
    where: str


@dataclasses.dataclass(frozen=True)
class Equation:
    """One equation of a program, and its place in the plan.

    Attributes:
      module: the path of the module or jitted function around it; "" outside.
      operation: the name of the primitive.
      calls: the name of the function that it calls; "" if it calls none.
      source: `file:line` of the user's code; None if there is none.
      shapes: of the results, as in `((8, 16),)`.
      dtype: the short name of the dtype that it computes in; "" for a planned call.
      is_floating: it has operands or results that a plan may cast.
      op_class: "low", "full", "follow" or "keep".
      decided_by: the name of the rule.
      from_policy: the rule is in the user's policy.
      reason: why it computes in this dtype.
      casts: the casts that the plan inserts for it.
      matmuls: 1 for a matrix product or a convolution; those inside, if it is opaque.
      matmuls_in_half: those with half-precision operands.
      flops: of its matrix products, over all runs.
      flops_in_half: of those with half-precision operands.
      fp8_matmuls: 1 for a matrix product of 8-bit floats, which is one in half too.
      fp8_flops: of its 8-bit products, over all runs.
      smallest_side: of a product of 8-bit floats: the least of its rows, columns and
        terms; 0 for all else.
      quantisations: the arrays that become 8-bit floats for it. XLA makes those that
        several products read once.
      elements: of its results, over all runs.
      times: the number of runs, as far as the program tells.
      depth: the number of calls around it.
      is_opaque: a call that the plan does not look into: it runs as traced.
      identity: the way to it through the bodies of the program: `4.0.2` is equation 2
        in body 0 of equation 4. Two traces of a program agree on it.
      asked_by: "the program itself" if it is in half whatever the policy says; else "".
      recomputed: the backward pass makes it again, in place of what it would keep.
      f32_gradients: the number of its operands whose gradients leave it in f32, as
        `Policy.reduce_dtype` asks.
    """

    module: str
    operation: str
    calls: str
    source: str | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    is_floating: bool
    op_class: str
    decided_by: str
    from_policy: bool
    reason: str
    casts: tuple[Cast, ...] = ()
    matmuls: int = 0
    matmuls_in_half: int = 0
    flops: int = 0
    flops_in_half: int = 0
    fp8_matmuls: int = 0
    fp8_flops: int = 0
    smallest_side: int = 0
    quantisations: int = 0
    elements: int = 0
    times: int = 1
    depth: int = 0
    is_opaque: bool = False
    identity: str = ""
    asked_by: str = ""
    recomputed: bool = False
    f32_gradients: int = 0

    @property
    def is_in_half(self) -> bool:
        dtype = parse_dtype(self.dtype)
        return self.is_floating and (is_half(dtype) or is_fp8(dtype))

    @property
    def runs_in_half(self) -> bool:
        """Whether it, or a product inside of a call that runs as traced, is in half."""
        return self.is_in_half or self.matmuls_in_half > 0

    @property
    def stays_full(self) -> bool:
        return self.is_floating and parse_dtype(self.dtype) == F32


@dataclasses.dataclass(frozen=True)
class Saved:
    """The bytes that a module keeps for the backward pass.

    Attributes:
      module: its path.
      size: bytes under autocast, of what the program computes.
      size_without: bytes without autocast.
      copies: of `size`, those of arguments in another dtype: half-precision weights.
      copies_without: of `size_without`, likewise.
    """

    module: str
    size: int
    size_without: int
    copies: int = 0
    copies_without: int = 0


@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that is kept for the backward pass.

    Attributes:
      module: the path of the module that makes it.
      operation: the name of the primitive that makes it, before casts.
      shape: of a loop, that of all its turns.
      dtype: its short name.
      size: its bytes.
    """

    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    size: int


class Costs(NamedTuple):
    """Sums over some equations.

    Attributes:
      equations: those with floating-point operands or results, calls not counted.
      in_half: those of them that compute in half precision.
      matmuls: matrix products and convolutions.
      matmuls_in_half: those that read half precision.
      flops: the operations of all of them.
      flops_in_half: of those that read half precision.
      casts: the casts that the plan inserts.
      cast_elements: the elements that they cast.
      saved: bytes kept for the backward pass under autocast.
      saved_without: bytes without autocast.
      copies, copies_without: of these, copies of arguments in another dtype.
      fp8_matmuls: matrix products of 8-bit floats.
      fp8_flops: the operations of these.
      quantisations: the arrays that become 8-bit floats.
      recomputed: the equations that the backward pass makes again.
      recomputed_elements: of their results, over all runs.
    """

    equations: int
    in_half: int
    matmuls: int
    matmuls_in_half: int
    flops: int
    flops_in_half: int
    casts: int
    cast_elements: int
    saved: int
    saved_without: int
    copies: int
    copies_without: int
    fp8_matmuls: int = 0
    fp8_flops: int = 0
    quantisations: int = 0
    recomputed: int = 0
    recomputed_elements: int = 0


class Reason(NamedTuple):
    """The equations that have their dtype for one reason, and what that costs.

    Attributes:
      reason: why, in words.
      equations: how many.
      elements: of their results, over all runs: 2 bytes each more than in half, where
        they are written to memory.
      operations: the names of their primitives.
      flops: of matrix products, over all runs; among those that stay in f32, of those
        that run in f32.
    """

    reason: str
    equations: int
    elements: int
    operations: tuple[str, ...]
    flops: int = 0


class Asked(NamedTuple):
    """The equations that are in half whatever the policy says, by who asks for it.

    Attributes:
      by: "the program itself".
      equations: how many.
      matmuls: of them, matrix products and convolutions.
      flops: of these, over all runs.
      modules: their paths; "" is outside of all modules.
      sources: their lines in the user's code.
    """

    by: str
    equations: int
    matmuls: int
    flops: int
    modules: tuple[str, ...]
    sources: tuple[str, ...]


def added_up(equations: Sequence[Equation], saved: Sequence[Saved]) -> Costs:
    """Returns the sums over `equations` and `saved`."""
    casts = [cast for e in equations for cast in e.casts]
    names = "matmuls matmuls_in_half flops flops_in_half fp8_matmuls fp8_flops"
    summed = (*names.split(), "quantisations", "recomputed")
    return Costs(
        equations=sum(e.is_floating for e in equations),
        in_half=sum(e.is_in_half for e in equations),
        casts=len(casts),
        cast_elements=sum(cast.elements for cast in casts),
        saved=sum(each.size for each in saved),
        saved_without=sum(each.size_without for each in saved),
        copies=sum(each.copies for each in saved),
        copies_without=sum(each.copies_without for each in saved),
        recomputed_elements=sum(e.elements for e in equations if e.recomputed),
        **{name: sum(getattr(e, name) for e in equations) for name in summed},
    )


def by_module(
    equations: Sequence[Equation], saved: Sequence[Saved]
) -> dict[str, Costs]:
    """Returns the sums of each module, in the order of the program."""
    groups: dict[str, tuple[list[Equation], list[Saved]]] = {}
    for equation in equations:
        groups.setdefault(equation.module, ([], []))[0].append(equation)
    for each in saved:
        groups.setdefault(each.module, ([], []))[1].append(each)
    return {path: added_up(*group) for path, group in groups.items()}


def by_reason(
    equations: Sequence[Equation],
    largest: str,
    flops: Callable[[Equation], int] = lambda equation: equation.flops,
) -> tuple[Reason, ...]:
    """Returns why equations have their dtype.

    Args:
      equations: which ones.
      largest: the field of a reason to sort by, the largest first.
      flops: what to add up of each.
    """
    groups: dict[str, list[Equation]] = {}
    for equation in equations:
        groups.setdefault(equation.reason, []).append(equation)
    reasons = [
        Reason(
            reason,
            len(group),
            sum(e.elements for e in group),
            tuple(dict.fromkeys(e.operation for e in group)),
            sum(map(flops, group)),
        )
        for reason, group in groups.items()
    ]
    return tuple(sorted(reasons, key=operator.attrgetter(largest), reverse=True))


def row_of(equations: Sequence[Equation], identity: object, call: str) -> Equation:
    """Returns the equation that a user asks for.

    Args:
      equations: those of the report.
      identity: as the user wrote it: text, numbers, or a row of the report.
      call: the call, for an error.

    Raises:
      TypeError: if it is none of these.
      ValueError: if no equation has it.
    """
    if isinstance(identity, Equation):
        if identity in equations and identity.identity:
            return identity
        fact = "the row is no equation of this report"
        if identity in equations:
            fact = "the row has the casts of what the program returns, no equation"
        raise ValueError(f"{call}: {fact}. Give one of its `equations`.")
    text = identity
    if isinstance(identity, tuple):
        text = ".".join(map(str, identity))
    if not isinstance(text, str):
        raise TypeError(
            f'{call}: the identity of an equation is text such as "4.0.2", a tuple of '
            "numbers, or a row of the report. Take one from Report.drill_down()."
        )
    rows = {e.identity: e for e in equations if e.identity}
    if text in rows:
        return rows[text]
    near = sorted(rows, key=lambda each: _distance(each, text))[:3]
    told = f" The nearest are {', '.join(near)}." if near else ""
    raise ValueError(
        f"{call}: no equation that runs has this identity.{told} Report.drill_down() "
        "shows all of them."
    )


def _distance(identity: str, wanted: str) -> tuple[int, int, int]:
    """Returns how far an identity is from what was asked for, to be compared."""
    ours, theirs = identity.split("."), wanted.split(".")
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
        shared += 1
    a, b = (each[shared] if shared < len(each) else "0" for each in (ours, theirs))
    gap = abs(int(a) - int(b)) if b.isdecimal() else 0
    return -shared, abs(len(ours) - len(theirs)), gap
