"""Branches and loops that ran otherwise under the policy than without it.

A condition compares values, and may come out otherwise when they are rounded. How often
each body ran is measured, so that the two runs need not be side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jmp_amp.numerics.diagnose.wording import place
from jmp_amp.numerics.locate.frames import Path
from jmp_amp.numerics.locate.sites import Site
from jmp_amp.plan.plan import Identity
from jmp_amp.reports.rows import Equation


def ran_otherwise(
    sites: Sequence[Site], reference: Sequence[Site], rows: Sequence[Equation]
) -> Iterator[str]:
    """Yields what the first branch or loop did that ran otherwise; nothing if none did.

    What follows it may run otherwise for that reason.
    """
    known = {row.identity: row for row in rows}
    low, full = _runs(sites), _runs(reference)
    for path in sorted({*low, *full}):
        row = known.get(str(Identity(path[:-1])))
        of_low, of_full = low.get(path, (0, False)), full.get(path, (0, False))
        # A cast may be all that a body has under the policy.
        is_known = (of_low[0] and of_full[0]) or of_low[1] or of_full[1]
        if row is None or not is_known or of_low[0] == of_full[0]:
            continue
        told = _told(row.operation, path[-1], of_low[0], of_full[0])
        if told is not None:
            yield (
                f"{place(row)} {told}: its "
                "condition came out otherwise, and the values behind it differ by more "
                "than their rounding. Keep in f32 what the condition is computed from."
            )
            return


def _runs(sites: Sequence[Site]) -> dict[Path, tuple[int, bool]]:
    """Returns how often each body ran, and whether it computes more than casts."""
    found: dict[Path, tuple[int, bool]] = {}
    for site in sites:
        if site.is_forward and site.identity:
            identity = tuple(map(int, site.identity.split(".")))
            path = identity[: len(identity) // 2 * 2]
            times, computes = found.get(path, (0, False))
            # What every turn computes alike may stand before the loop.
            times = max(times, site.times)
            found[path] = times, computes or site.operation != "convert_element_type"
    return found


def _told(operation: str, number: int, low: int, full: int) -> str | None:
    if operation == "cond":
        return (
            f"took branch {number} {_times(low)} under the policy and {_times(full)} "
            "without it"
        )
    if operation == "while":
        if number == 0:
            # The condition is computed once more.
            low, full = max(low - 1, 0), max(full - 1, 0)
        return f"made {low} turns under the policy and {full} without it"
    return None  # It runs as often as what is around it.


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
