"""The figures of a call under a policy and without it: what advice is made of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from jmp_amp.numerics.diagnose.suggestions import (
    Need,
    counterparts,
    needs_of,
    suggested_loss_scale,
    suggested_policy,
)
from jmp_amp.numerics.locate.sites import Gradient, Site
from jmp_amp.numerics.measure.own_dtypes import is_inside
from jmp_amp.policies.dtypes import PyTree
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports.rows import Equation


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """What the numbers of a call were under a policy and without it, the reference.

    Attributes:
      given: the policy of the run.
      sites, reference: of the runs with and without it.
      value: what the function returned under the policy.
      gradients: by parameter, unscaled.
      is_finite, is_finite_itself: whether the value and the gradients are finite, with
        the policy and in the reference. Sites may be infinite, and be masked.
      scale: of the loss; 1.0 without one.
      casts: what the backward pass of the run casts to f16, as it is before.
      arguments: those that are not finite, in words; None if that is not known.
      rows: what `read_plan` tells of the equations; None if that is not known.
    """

    given: PolicyMap
    sites: tuple[Site, ...]
    reference: tuple[Site, ...]
    value: PyTree
    gradients: Mapping[str, Gradient]
    is_finite: bool
    is_finite_itself: bool
    scale: float = 1.0
    casts: tuple[Site, ...] = ()
    arguments: Sequence[str] | None = None
    rows: Sequence[Equation] | None = None

    @functools.cached_property
    def same(self) -> Callable[[Site], Site | None]:
        """A site of the policy's run -> the equation of the reference, if it has it."""
        return counterparts(self.sites, self.reference)

    @property
    def first(self) -> Site | None:
        """The first site whose operands were all finite and a result was not."""
        return next((site for site in self.sites if site.makes_nonfinite), None)

    @property
    def first_itself(self) -> Site | None:
        """The first such site of the reference."""
        return next((site for site in self.reference if site.makes_nonfinite), None)

    @functools.cached_property
    def suggested_scale(self) -> float:
        largest = max((each.amax for each in self.casts), default=0.0) / self.scale
        return suggested_loss_scale(self.sites, self.reference, largest)

    @functools.cached_property
    def needs(self) -> list[Need]:
        """What the suggested policy mends: nothing inside of an autocast inside."""
        rows, functions = self.rows or (), None
        inside = {row.identity for row in rows if is_inside(row.asked_by)}
        mended = [site for site in self.sites if site.identity not in inside]
        if self.rows is not None:
            functions = {row.calls for row in rows if row.calls}
        return needs_of(mended, self.reference, functions)

    @functools.cached_property
    def policy(self) -> PolicyMap:
        """The suggested policy."""
        return suggested_policy(self.needs, self.given)
