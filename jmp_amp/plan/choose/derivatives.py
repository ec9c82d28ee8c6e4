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
from jmp_amp.policies.dtypes import F32, is_half


def derivatives(flow: Flow) -> Iterator[tuple[int, Derived]]:
    """Yields the products to which it matters what they are derived from.

    They are told by the identities of their equations. The first product that some
    calls have made is the one that others, made by the same calls, may be derived from.
    What multiplies the same dimensions is a product of another layer, or a tangent.
    """
    made = collections.defaultdict[Calls, list[tuple[Eqn, Step]]](list)
    for eqn, step in _products(flow, set()):
        made[users_calls(eqn)].append((eqn, step))
    made.pop((), None)
    for products in made.values():
        first, begun = products[0]
        pin = _decision(begun).pin
        layers = [each for each in products if _is_alike(each[0], first)]
        parameters = [all(_is_parameter(*each, i) for each in layers) for i in (0, 1)]
        for eqn, step in products:
            factor = _factor(first, eqn, step)
            reduces = step.region.asked.reduce_dtype is not None
            of_parameter = reduces and factor is not None and parameters[factor]
            is_tangent = pin is not None and _is_alike(eqn, first)
            is_f32 = is_tangent or (factor is not None and _computes_in_f32(begun))
            falls = is_f32 and _decision(step).dtype != F32
            if eqn is not first and (falls or of_parameter):
                yield id(eqn), Derived(is_f32, of_parameter)


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


def _computes_in_f32(step: Step) -> bool:
    """Whether a product computes in f32, and neither its policy nor a user says so."""
    decision, asked = _decision(step), step.region.asked
    is_said = decision.rule.from_user or not is_half(asked.compute_dtype)
    return decision.dtype == F32 and not is_said


def _is_alike(eqn: Eqn, first: Eqn) -> bool:
    """Whether two products multiply the same dimensions."""
    names = ("dimension_numbers", "ragged_dot_dimension_numbers")
    return eqn.primitive is first.primitive and all(
        eqn.params.get(name) == first.params.get(name) for name in names
    )


def _factor(first: Eqn, eqn: Eqn, step: Step) -> int | None:
    """Returns which factor of a product another one makes the cotangent of.

    None if it makes none. JAX multiplies the cotangent of the result by the other
    factor.
    """
    if eqn.primitive is not first.primitive or _is_alike(eqn, first):
        return None
    if eqn.primitive.name != "dot_general":
        # The cotangent of an image, or of rows, is made of the parameter.
        return int(step.views[1].origin != Origin.FREE)
    of, found = Dimensions.of(first), Dimensions.of(eqn)
    return next((i for i in (0, 1) if found.transposes(of, i)), None)


def _is_parameter(eqn: Eqn, step: Step, i: int) -> bool:
    """Whether a factor is made of arguments alone, and f32."""
    is_free = step.views[i].origin == Origin.FREE
    return is_free and aval_of(eqn.invars[i]).dtype == F32
