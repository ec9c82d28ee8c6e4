"""The figures of a call under a policy and without it, and what they ask for.

`Runs` is what advice is made of. The rest are pure functions of sites: those of the
policy's run, and those of the function as it is, the reference, which tell the ranges
that the numbers need. They suggest a loss scale and a policy.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jmp_amp.numerics.locate.sites import Gradient, Site, first_made
from jmp_amp.policies.dtypes import PyTree
from jmp_amp.policies.patterns import Pattern
from jmp_amp.policies.policy import get_policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports.rows import Equation

LARGEST_SCALE = 2.0**24
# An eighth of the largest f16: gradients of later steps may be larger.
_ROOM = 8.0
_HIGHEST = 65504.0 / _ROOM
_CAST = "convert_element_type"


def counterparts(
    sites: Sequence[Site], reference: Sequence[Site]
) -> Callable[[Site], Site | None]:
    """Returns a function of `sites`: the same equation of the reference, or None.

    An equation may have several derivatives of one operation, as a product has: they
    are told apart by their shape and their order, which the runs share.
    """
    known: defaultdict[tuple[Any, ...], list[Site]] = defaultdict(list)
    for site in reversed(reference):
        known[site.key, site.shape].append(site)
    found: dict[int, Site | None] = {}
    for site in sites:
        those = known[site.key, site.shape]
        # The last one stands for what only the policy's run has.
        found[id(site)] = those.pop() if len(those) > 1 else next(iter(those), None)
    return lambda site: found[id(site)]


def in_half(
    sites: Sequence[Site], reference: Sequence[Site], direction: str
) -> Iterator[tuple[Site, str]]:
    """Yields the reference's sites that run in half under the policy, and the dtype."""
    # Several derivatives of one equation may be of one operation: one in half will do.
    dtypes = {site.key: site.dtype for site in sites if site.is_in_half}
    for site in reference:
        if site.direction == direction and site.key in dtypes:
            yield site, dtypes[site.key]


class Need(NamedTuple):
    """A forward site that needs f32, and how to say it in a policy.

    Attributes:
      site: the site, of the run under the policy.
      path: the path of its module, for an entry; None if there is none.
      name: of the function or the operation, where there is no entry for a module.
    """

    site: Site
    path: str | None
    name: str | None


def needs_of(
    sites: Sequence[Site],
    reference: Sequence[Site],
    functions: Collection[str] | None = None,
) -> list[Need]:
    """Returns the forward sites that need f32, see `diagnose`.

    `functions` are the names of the jitted functions of the program; by default the
    last name of a site's module is taken for one.
    """
    known = {site.key: site for site in reference}
    forward = [site for site in sites if site.is_forward]
    failing = [site for site in forward if _fails(site, known)]
    found = [site for site in failing if site.is_in_half]
    if not found:
        # What underflowed in half may be divided by, or its logarithm taken, in f32.
        found = [s for s in failing if s.path or _function_of(s, functions) is not None]
    needs = []
    for site in found:
        reader = _reader(site, forward)
        if path := site.path or reader.path:
            needs.append(Need(site, path, None))
        else:
            name = None if site.path == "" else _function_of(site, functions)
            needs.append(Need(site, None, name or reader.operation))
    return needs


def suggested_policy(needs: Sequence[Need], given: PolicyMap) -> PolicyMap:
    """Returns a policy with f32 for what half precision cannot hold, see `diagnose`.

    `given` itself comes back if nothing is needed.
    """
    paths = {_pattern(need.path): None for need in needs if need.path is not None}
    names = {need.name.replace("-", "_") for need in needs if need.name is not None}
    if not (paths or names):
        return given
    full, default = get_policy("float32"), given.default
    entries = [(p, policy) for p, policy in given.entries if p not in paths]
    # Even if the user named them otherwise.
    low, follow = default.low - names, default.follow - names
    default = dataclasses.replace(default, low=low, follow=follow).with_full(*names)
    return PolicyMap(default, [*entries, *((path, full) for path in paths)])


def _fails(site: Site, known: dict[tuple[str, str, str], Site]) -> bool:
    """Whether a site needs f32: out of range, or infinite where f32 is finite."""
    reference = known.get(site.key)
    if reference is None:
        return site.makes_nonfinite  # a cast that the plan inserted
    if site.is_in_half and reference.overflow(site.dtype) > 0:
        return True
    return site.makes_nonfinite and not reference.nonfinite


def _function_of(site: Site, functions: Collection[str] | None) -> str | None:
    """Returns the name of the innermost jitted function around a site, if any."""
    for name in reversed(site.module.split("/")):
        if name.isidentifier() and (functions is None or name in functions):
            return name
    return None


def _reader(site: Site, forward: Sequence[Site]) -> Site:
    """Returns the site that needs f32: a cast is made for the one that reads.

    What a loop returns to a module is cast in the loop.
    """
    if site.operation != _CAST:
        return site
    here = site.module, site.source
    later = [x for x in forward[forward.index(site) :] if x.operation != _CAST]
    near = [x for x in later if (x.module, x.source) == here]
    return next(iter((*near, *later)), site)


def _pattern(path: str) -> Pattern:
    """Returns the pattern of one path: its text, or a regular expression if it must."""
    plain = re.fullmatch(r"[\w.-]+(/[\w.-]+)*", path) is not None
    return path if plain else re.compile(re.escape(path))


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
      arguments: those that are not finite, in words, if the run was not finite.
      rows: what `read_plan` tells of the equations.
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
    arguments: Sequence[str] = ()
    rows: Sequence[Equation] = ()

    @functools.cached_property
    def same(self) -> Callable[[Site], Site | None]:
        """A site of the policy's run -> the equation of the reference, if it has it."""
        return counterparts(self.sites, self.reference)

    def overflow(self, site: Site) -> float:
        """Returns the share of the reference's values that overflow a site's dtype."""
        known = self.same(site)
        return 0.0 if known is None else known.overflow(site.dtype)

    def underflow(self, site: Site) -> float:
        """Returns the share of the reference's values that underflow it."""
        known = self.same(site)
        return 0.0 if known is None else known.underflow(site.dtype)

    @property
    def first(self) -> Site | None:
        """The first site whose operands were all finite and a result was not."""
        return first_made(self.sites)

    @property
    def first_itself(self) -> Site | None:
        """The first such site of the reference."""
        return first_made(self.reference)

    @functools.cached_property
    def suggested_scale(self) -> float:
        """The loss scale that makes the best use of f16's range, see `diagnose`."""
        largest = [
            site.amax
            for site, dtype in in_half(self.sites, self.reference, "backward")
            if dtype == "f16" and site.scales
        ]
        if not largest:
            return 1.0
        # What is cast has to fit; the room above is for what computes in f16.
        casts = [each.amax / self.scale / _ROOM for each in self.casts]
        scale, highest = LARGEST_SCALE, max(largest + casts)
        while scale > 1.0 and highest * scale > _HIGHEST:
            scale /= 2
        return scale

    @functools.cached_property
    def needs(self) -> list[Need]:
        """What the suggested policy mends."""
        functions = {row.calls for row in self.rows if row.calls}
        return needs_of(self.sites, self.reference, functions)

    @functools.cached_property
    def policy(self) -> PolicyMap:
        """The suggested policy."""
        return suggested_policy(self.needs, self.given)
