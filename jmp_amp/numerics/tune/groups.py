"""Groups: the parts of a program that a policy can be chosen for, one by one.

A group is what one module computes itself, without the modules that it calls; that of a
module which calls others is one for each operation. What no module computes, and what
the outermost one computes itself, is grouped by the function that was jitted or has a
`custom_jvp`, and failing that by operation: `Policy.with_full` takes such names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jmp_amp.plan.choose.modes import Mode
from jmp_amp.plan.dataflow.values import traced_dtype
from jmp_amp.plan.plan import EquationPlan, Identity, Plan
from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.jaxprs import Atom, Eqn
from jmp_amp.plan.program.regions import Region, outermost, region_of
from jmp_amp.plan.tables.operations import OPERATIONS
from jmp_amp.policies.dtypes import F32, is_half
from jmp_amp.policies.policy import Policy
from jmp_amp.transform import scopes

# What they compute is rounded where it is read: they hand on what they get.
_EXACT = (Mode.PASSED_ON, Mode.AS_HELD, Mode.CONVERSION)
# Stands for all operations that a mark decides.
_MARKED = "with_policy()"


class Group(NamedTuple):
    """A part of a program.

    Attributes:
      path: the path of a module, as the patterns of a `PolicyMap` see it; "" for what
        is in no module but the outermost one.
      name: of an operation, or of a function if `path` is empty; "" for all operations
        of a module.
    """

    path: str
    name: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether a mark decides for it, which no map reaches."""
        return self.name == _MARKED


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the equations of a body are.

    Attributes:
      path: the path of the module that the body is called in.
      function: the name of the function that it belongs to, if one counts.
      identity: the way to the body.
      runs: whether every equation around it runs.
      is_marked: as `scopes.is_marked` tells of the equation that calls.
    """

    path: str = ""
    function: str = ""
    identity: tuple[int, ...] = ()
    runs: bool = True
    is_marked: bool = False

    def group(self, eqn: Eqn) -> Group:
        """Returns the group of an equation of the body, that of its operation."""
        path = self._path(eqn)
        if self._is_marked(eqn):
            return Group(path, _MARKED)
        function = "" if path else self._function(eqn)
        return Group(path, function or eqn.primitive.name)

    def inside(self, eqn: Eqn, index: int, number: int) -> Place:
        """Returns the place of body `number` of the equation `index` of this one."""
        identity = (*self.identity, index, number)
        runs = self.runs and jaxprs.runs(eqn)
        path, function = self._path(eqn), self._function(eqn)
        return Place(path, function, identity, runs, self._is_marked(eqn))

    def _is_marked(self, eqn: Eqn) -> bool:
        return scopes.is_marked(jaxprs.scope_text(eqn), self.is_marked)

    def _path(self, eqn: Eqn) -> str:
        # Inside a body the name stack begins afresh.
        found = scopes.module_of(jaxprs.scope_text(eqn))
        return self.path if found is None else found

    def _function(self, eqn: Eqn) -> str:
        name = source_code.jitted_name(eqn) or ""
        if jaxprs.is_custom_jvp(eqn) and not (
            self.function and source_code.is_of_library(eqn)
        ):
            name = source_code.function_name(eqn) or ""
        # The name of an operation is that of no function, see `rules.rule_for`.
        return self.function if not name or name in OPERATIONS else name


class Member(NamedTuple):
    """An equation that the plan runs in half; its identity is as in `explain`."""

    group: Group
    identity: str


# Where the body of a program is.
OUTSIDE = Place()


def equations(
    plan: Plan, place: Place = OUTSIDE
) -> Iterator[tuple[Place, Eqn, EquationPlan]]:
    """Yields all equations of a plan; each comes before those of its bodies."""
    for eqn, planned in zip(plan.body.jaxpr.eqns, plan.equations, strict=True):
        yield place, eqn, planned
        for number, inner in enumerate(planned.bodies):
            yield from equations(inner, place.inside(eqn, planned.index, number))


def members(plan: Plan) -> Iterator[Member]:
    """Yields the equations of a plan that round to half precision."""
    for where, eqn, planned in equations(plan):
        if where.runs and jaxprs.runs(eqn) and is_rounded(eqn, planned):
            identity = Identity((*where.identity, planned.index))
            yield Member(where.group(eqn), str(identity))


def module_paths(plan: Plan) -> set[str]:
    """Returns the paths of the modules of a program that compute something."""
    scoped = (jaxprs.scope_text(eqn) for _, eqn, _ in equations(plan))
    return {path for path in map(scopes.module_of, scoped) if path is not None}


def policies_in_force(plan: Plan, default: Policy) -> dict[str, Policy]:
    """Returns the policy of the region that each equation is in, by its identity."""
    regions: dict[tuple[int, ...], Region] = {}
    outer = outermost(default, None, plan.entries)
    for where, eqn, planned in equations(plan):
        around = regions.get(where.identity[:-1], outer)
        here = (*where.identity, planned.index)
        regions[here] = region_of(jaxprs.scope_text(eqn), around)
    return {str(Identity(here)): region.asked for here, region in regions.items()}


def is_rounded(eqn: Eqn, planned: EquationPlan) -> bool:
    """Whether an equation, as planned, rounds what it reads or what it computes."""
    if planned.bodies or planned.mode in _EXACT:
        return False
    reads = zip(planned.reads, eqn.invars, strict=True)
    results = zip(planned.yields, planned.writes, eqn.outvars, strict=True)
    return any(is_half(dtype) and _is_f32(v) for dtype, v in reads) or any(
        (is_half(made) or is_half(kept)) and _is_f32(v) for made, kept, v in results
    )


def _is_f32(atom: Atom) -> bool:
    return traced_dtype(atom) == F32
