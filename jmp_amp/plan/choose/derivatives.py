"""Products that are derivatives of others, where autocast is around a gradient.

JAX derives a product to products, which it makes by the calls that made the first one.
Where a gradient is around autocast they have the dtypes of the first. Here they are
other equations of the program, and what holds for the first has to hold for them.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jmp_amp.plan.choose.flows import Flow, Step
from jmp_amp.plan.dataflow.standing import Derived
from jmp_amp.plan.dataflow.values import Origin
from jmp_amp.plan.program.dimensions import Dimensions
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Jaxpr, Literal, Var, aval_of
from jmp_amp.plan.program.source_code import Calls, users_calls
from jmp_amp.plan.tables.operations import PRODUCTS
from jmp_amp.policies.dtypes import F32


class _Product(NamedTuple):
    """A product where it stands.

    Attributes:
      body: the body that it is in.
      eqn, step: the equation, and the forward pass over it.
      dimensions: of a `dot_general`, what it sums over.
    """

    body: Jaxpr
    eqn: Eqn
    step: Step
    dimensions: Dimensions | None

    @property
    def is_f32(self) -> bool:
        """Whether it computes in f32."""
        return self.step.decision is not None and self.step.decision.dtype == F32

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed in f32 where it is."""
        return self.step.region.asked.reduce_dtype is not None


def derivatives(flow: Flow) -> Iterator[tuple[int, Derived]]:
    """Yields the products to which it matters what they are derived from.

    They are told by the identities of their equations. A product is derived from one
    that the same calls have made before.
    """
    made, values = collections.defaultdict[Calls, list[_Product]](list), _Values()
    for each in _products(flow, values, set()):
        made[users_calls(each.eqn)].append(each)
    made.pop((), None)
    for products in made.values():
        if not any(each.is_f32 or each.reduces for each in products):
            continue
        for number, each in enumerate(products):
            of = _derived_from(each, products[:number], values)
            is_f32 = any(one.is_f32 for one, _ in of)
            falls = is_f32 and not each.is_f32
            # Layers that one line makes may be one product in two places.
            of_parameter = all(_is_parameter(one, i) for one, i in of) and bool(of)
            of_parameter = of_parameter and each.reduces
            if falls or of_parameter:
                yield id(each.eqn), Derived(is_f32, of_parameter)


class _Values(dict[Var, Var]):
    """Variables of bodies that are one value: each points to another one of them."""

    def of(self, atom: Atom) -> Atom:
        """Returns the variable that stands for all that are the value."""
        while not isinstance(atom, Literal) and atom in self:
            atom = self[atom]
        return atom

    def link(self, atoms: Sequence[Atom], others: Sequence[Atom]) -> None:
        """Notes that variables are those of the same places."""
        for one, other in zip(map(self.of, atoms), map(self.of, others), strict=True):
            if one is not other and not isinstance(one, Literal):
                self[one] = other  # type: ignore[assignment]


def _products(flow: Flow, values: _Values, seen: set[Flow]) -> Iterator[_Product]:
    """Yields the products of a body, and of its inner bodies.

    Notes in `values` what a call hands to its bodies, and what it gets from them.
    """
    seen.add(flow)
    for eqn, step in zip(flow.body.jaxpr.eqns, flow.steps, strict=True):
        if eqn.primitive.name in PRODUCTS and step.decision is not None:
            is_dot = eqn.primitive.name == "dot_general"
            dimensions = Dimensions.of(eqn) if is_dot else None
            yield _Product(flow.body.jaxpr, eqn, step, dimensions)
        for (_, operands), inner in zip(step.inner, step.flows, strict=True):
            if inner not in seen:
                yield from _products(inner, values, seen)
            jaxpr = inner.body.jaxpr
            values.link(jaxpr.invars, [eqn.invars[i] for i in operands])
            if len(jaxpr.outvars) == len(eqn.outvars):
                values.link(eqn.outvars, jaxpr.outvars)


def _derived_from(
    product: _Product, before: Sequence[_Product], values: _Values
) -> list[tuple[_Product, int]]:
    """Returns what a product makes the cotangent of: products, and which factors.

    It multiplies the cotangent of the result by the other factor, if that is found: a
    checkpoint may compute it again.
    """
    others = [each for each in before if each.eqn.primitive is product.eqn.primitive]
    if product.dimensions is None:
        # The cotangent of an image, or of rows, is made of the parameter.
        i = int(product.step.views[1].origin != Origin.FREE)
        return [(each, i) for each in others if not _is_alike(product.eqn, each.eqn)]
    found = [
        (each, i)
        for each in others
        if each.dimensions is not None
        for i in _transposed(product.dimensions, each.dimensions)
    ]
    factor = values.of(product.eqn.invars[1])
    shared = [
        (each, i) for each, i in found if values.of(each.eqn.invars[1 - i]) is factor
    ]
    return shared or [(each, i) for each, i in found if each.body is not product.body]


# Of a model there are a handful of these.
@functools.lru_cache(maxsize=1024)
def _transposed(dimensions: Dimensions, of: Dimensions) -> tuple[int, ...]:
    """Returns the factors whose cotangent a product makes, told by what it sums."""
    return tuple([i for i in (0, 1) if dimensions.transposes(of, i)])


def _is_alike(eqn: Eqn, first: Eqn) -> bool:
    """Whether two products of one primitive multiply the same dimensions."""
    names = ("dimension_numbers", "ragged_dot_dimension_numbers")
    return all(eqn.params.get(name) == first.params.get(name) for name in names)


def _is_parameter(product: _Product, i: int) -> bool:
    """Whether a factor is made of arguments alone, and f32."""
    is_free = product.step.views[i].origin == Origin.FREE
    return is_free and aval_of(product.eqn.invars[i]).dtype == F32
