"""The constructs of JAX, each in a program of a few lines: one table.

What is asked of the programs is in `tests/transform/test_every_construct.py`: under
autocast a program is the one that it was, up to the roundings of half precision, and so
are its derivatives.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.constructs import (
    algebra,
    arrays,
    branches,
    calls,
    devices,
    loops,
    regions,
    rules,
)
from tests.constructs.row import TAGS, Row

ROWS: dict[str, Row] = {}
for _file in (algebra, arrays, branches, calls, devices, loops, regions, rules):
    assert not ROWS.keys() & _file.ROWS.keys(), "a name is taken"
    ROWS |= {n: x if isinstance(x, Row) else Row(x) for n, x in _file.ROWS.items()}


def rows(*tags: str, slow: str | None = "slow", every: int = 1) -> Any:
    """Parametrises a test by the rows with all of these tags.

    Those that are tagged `slow` are slow tests; None are none. Of the others one in
    `every` runs by default.
    """
    assert not {*tags, slow} - {*TAGS, None}
    found = {n: each.tags for n, each in ROWS.items() if each.tags.issuperset(tags)}
    fast = [name for name, each in found.items() if slow not in each][::every]
    marks = [pytest.mark.slow]
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=marks * (n not in fast)) for n in found]
    )
