"""What happens in a program, as plain data, and added up: what a report shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast that the plan inserts.

    Attributes:
      source: the dtype of the value.
      target: the dtype that it is cast to.
      elements: how many, in all the times that the cast runs.
      where: "operand" if the equation reads it, "result" if it is handed on.
    """

    source: str
    target: str
    elements: int
    where: str


@dataclasses.dataclass(frozen=True)
class Equation:
    """What happens in one equation.

    Attributes:
      module: the path of the module or jitted function that it is in; "" outside.
      operation: the primitive.
      calls: the function that it calls, if it calls one by name.
      source: `file:line` of the user's code, if there is any.
      shapes: of the results, as in `[8,16]`.
      dtype: what it computes in; "" for a call, whose body has equations of its own.
      is_floating: it has operands or results that a plan may cast.
      op_class: "low", "full", "follow" or "keep".
      decided_by: the name of the rule.
      from_policy: the rule is one of the policy's own.
      reason: why, in words.
      casts: what the plan inserts for it.
      matmuls: 1 for a matrix product or a convolution; those inside, if it is opaque.
      matmuls_in_half: those with half-precision operands.
      flops: of its matrix products, in all the times that it runs.
      flops_in_half: of those with half-precision operands.
      elements: of its results, in all the times that it runs.
      times: how often it runs, as far as the program tells.
      depth: how many calls it is inside of.
      is_opaque: a call that the plan does not look into: it runs as traced.
      identity: the way to it through the bodies of the program: `4.0.2` is equation 2
        in body 0 of equation 4. Two traces of a program agree on it.
    """

    module: str
    operation: str
    calls: str
    source: str | None
    shapes: tuple[str, ...]
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
    elements: int = 0
    times: int = 1
    depth: int = 0
    is_opaque: bool = False
    identity: str = ""

    @property
    def is_in_half(self) -> bool:
        return self.is_floating and self.dtype in ("f16", "bf16")

    @property
    def stays_full(self) -> bool:
        return self.is_floating and self.dtype == "f32"


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a module keeps for the backward pass, in bytes.

    Attributes:
      module: its path.
      size: under autocast.
      size_without: in the function as it is.
    """

    module: str
    size: int
    size_without: int


class Costs(NamedTuple):
    """Some equations, added up.

    Attributes:
      equations: those with floating-point operands or results, calls not counted.
      in_half: those of them that compute in half precision.
      matmuls: matrix products and convolutions.
      matmuls_in_half: those that read half precision.
      flops: the operations of all of them.
      flops_in_half: of those that read half precision.
      casts: the casts that the plan inserts.
      cast_elements: how many elements they cast.
      saved: bytes kept for the backward pass under autocast.
      saved_without: in the function as it is.
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


class Reason(NamedTuple):
    """The equations that stay in f32 for one reason."""

    reason: str
    equations: int
    elements: int
    operations: tuple[str, ...]


def added_up(equations: Iterable[Equation], saved: Iterable[Saved]) -> Costs:
    """Returns the sums over `equations` and what is `saved`."""
    equations, saved = list(equations), list(saved)
    casts = [cast for e in equations for cast in e.casts]
    return Costs(
        equations=sum(e.is_floating for e in equations),
        in_half=sum(e.is_in_half for e in equations),
        matmuls=sum(e.matmuls for e in equations),
        matmuls_in_half=sum(e.matmuls_in_half for e in equations),
        flops=sum(e.flops for e in equations),
        flops_in_half=sum(e.flops_in_half for e in equations),
        casts=len(casts),
        cast_elements=sum(cast.elements for cast in casts),
        saved=sum(each.size for each in saved),
        saved_without=sum(each.size_without for each in saved),
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


def by_reason(equations: Iterable[Equation]) -> tuple[Reason, ...]:
    """Returns why equations stay in f32, the most elements first."""
    groups: dict[str, list[Equation]] = {}
    for equation in equations:
        if equation.stays_full and not equation.is_opaque:
            groups.setdefault(equation.reason, []).append(equation)
    reasons = [
        Reason(
            reason,
            len(group),
            sum(e.elements for e in group),
            tuple(dict.fromkeys(e.operation for e in group)),
        )
        for reason, group in groups.items()
    ]
    return tuple(sorted(reasons, key=lambda reason: -reason.elements))


def by_dtypes(equations: Iterable[Equation]) -> dict[str, tuple[int, int]]:
    """Returns the number of casts and of their elements, of each pair of dtypes."""
    pairs: dict[str, tuple[int, int]] = {}
    for cast in (cast for e in equations for cast in e.casts):
        pair = f"{cast.source} to {cast.target}"
        count, elements = pairs.get(pair, (0, 0))
        pairs[pair] = count + 1, elements + cast.elements
    return pairs
