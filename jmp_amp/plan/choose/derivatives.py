"""Products that are derivatives of others, where autocast is around a gradient.

JAX derives a product to products, which it makes by the calls that made the first one.
Where a gradient is around autocast they have the dtypes of the first. Here they are
other equations of the program, and what holds for the first has to hold for them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from jmp_amp.plan.choose.flows import Flow, Step
from jmp_amp.plan.choose.records import Decision
from jmp_amp.plan.dataflow.standing import Derived
from jmp_amp.plan.dataflow.values import Origin
from jmp_amp.plan.program.dimensions import Dimensions
from jmp_amp.plan.program.jaxprs import Eqn, aval_of
from jmp_amp.plan.program.source_code import Calls, users_calls
from jmp_amp.plan.tables.operations import PRODUCTS
from jmp_amp.policies.dtypes import F32


def derivatives(flow: Flow) -> Iterator[tuple[int, Derived]]:
    """Yields the products to which it matters what they are derived from.

    They are told by the identities of their equations. Of the products that the same
    calls have made all are derived from the first; those that sum over the same
    dimensions are the same product of another layer.
    """
    made = collections.defaultdict[Calls, list[tuple[Eqn, Step]]](list)
    for eqn, step in _products(flow, set()):
        made[users_calls(eqn)].append((eqn, step))
    made.pop((), None)
    for (first, begun), *others in made.values():
        pin, numbers = _decision(begun).pin, _numbers(first)
        layers = [
            (eqn, step)
            for eqn, step in ((first, begun), *others)
            if _numbers(eqn) == numbers
        ]
        left, right = (
            all(_is_parameter(eqn, step, i) for eqn, step in layers) for i in (0, 1)
        )
        dimensions = (
            Dimensions.of(first) if first.primitive.name == "dot_general" else None
        )
        of = Derived(first.primitive.name, pin, dimensions, (left, right))
        for eqn, step in others:
            reduces = step.region.asked.reduce_dtype is not None
            asks = pin is not None or (reduces and _numbers(eqn) != numbers)
            if asks and eqn is not first and _decision(step).pin is None:
                yield id(eqn), of


def _products(flow: Flow, seen: set[Flow]) -> Iterator[tuple[Eqn, Step]]:
    """Yields the products of a body, and of its inner bodies."""
    seen.add(flow)
    for eqn, step in zip(flow.body.jaxpr.eqns, flow.steps, strict=True):
        if eqn.primitive.name in PRODUCTS and step.decision is not None:
            yield eqn, step
        for inner in step.flows:
            if inner not in seen:
                yield from _products(inner, seen)


def _decision(step: Step) -> Decision:
    assert step.decision is not None
    return step.decision


def _numbers(eqn: Eqn) -> object:
    """Returns what tells a product from its derivatives."""
    names = ("dimension_numbers", "ragged_dot_dimension_numbers")
    return [eqn.params.get(name) for name in names]


def _is_parameter(eqn: Eqn, step: Step, i: int) -> bool:
    """Whether a factor is made of arguments alone, and f32."""
    is_free = step.views[i].origin == Origin.FREE
    return is_free and aval_of(eqn.invars[i]).dtype == F32
