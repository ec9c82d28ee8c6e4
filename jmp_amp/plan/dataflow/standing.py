"""An equation where it stands: what is known there, and what may pin it to f32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jmp_amp.plan.dataflow import constants
from jmp_amp.plan.dataflow.ends import End
from jmp_amp.plan.dataflow.facts import Fact
from jmp_amp.plan.dataflow.storage import Store
from jmp_amp.plan.dataflow.values import Known, Origin, castable
from jmp_amp.plan.program.jaxprs import Eqn, aval_of, is_floating
from jmp_amp.plan.program.regions import Region
from jmp_amp.plan.tables.rules import Rule
from jmp_amp.policies.dtypes import is_half


class Criterion(NamedTuple):
    """A reason to compute in another dtype than an operation would have.

    Attributes:
      id: its name, which does not change when the words do.
      words: the reason; `{half}` is the half dtype.
      holds: whether it holds for an operation.
    """

    id: str
    words: str
    holds: Callable[[Standing], bool]


class Derived(NamedTuple):
    """What a derivative of a product has to know of it.

    Attributes:
      is_f32: whether the derivative is f32, as the product is.
      of_parameter: whether the derivative is the gradient of an f32 parameter, and is
        to be summed in f32.
    """

    is_f32: bool
    of_parameter: bool


@dataclasses.dataclass(eq=False)
class Standing:
    """An equation that calls nothing, and what is known where it stands.

    Attributes:
      eqn: the equation.
      rule: its rule.
      region: the policy scope that it is in.
      views: what it sees of each of its operands.
      facts: what each of its operands is made of.
      is_related: whether its first two operands are made of one input.
      end: what becomes of the results, far on.
      is_recursive: whether it is a product of a loop that is a numerical method.
      derived_from: what it is a derivative of, if that matters to it.
      store: how its results are stored.
      pin: what pins it to f32, if anything does.
    """

    eqn: Eqn
    rule: Rule
    region: Region
    views: Sequence[Known]
    facts: Sequence[Fact]
    is_related: bool
    end: End
    is_recursive: bool
    derived_from: Derived | None
    store: Store
    pin: Criterion | None = None

    @functools.cached_property
    def name(self) -> str:
        """The name of the operation."""
        return self.eqn.primitive.name

    @functools.cached_property
    def operands(self) -> Sequence[Known]:
        """What is known of its floating operands, and of a fill value."""
        views = zip(self.views, self.eqn.invars, strict=True)
        found = [view for view, atom in views if is_floating(atom)]
        fill = constants.bounds_of_fill(self.eqn)
        if fill is not None:
            found.append(Known(Origin.FREE, fill, self.region))
        return found

    @functools.cached_property
    def origin(self) -> Origin:
        """The greatest origin of its operands."""
        return max((v.origin for v in self.operands), default=Origin.FREE)

    @property
    def half(self) -> np.dtype:
        """The dtype that the policy computes in."""
        return self.region.policy.compute_dtype

    @property
    def low(self) -> np.dtype:
        """The dtype of a low result: a program's own half dtype before the policy's."""
        traced = {aval_of(v).dtype for v in self.eqn.invars if castable(v)}
        if len(traced) == 1 and is_half(*traced):
            return traced.pop()
        return self.half
