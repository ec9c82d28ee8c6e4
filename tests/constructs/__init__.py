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


def rows(*tags: str, slow: str | None = "slow") -> Any:
    """Parametrises a test by the rows with all of these tags.

    Those that are tagged `slow` are slow tests; None are none.
    """
    assert not {*tags, slow} - {*TAGS, None}
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.slow if slow in each.tags else ())
            for name, each in ROWS.items()
            if each.tags.issuperset(tags)
        ],
    )
