"""Every idiom: a policy is at most twice as wrong as its products alone, and 4 eps.

By default each idiom runs in one dtype, every other one in bfloat16; the slow tests run
both. `python -m tests.idioms` prints the errors.
"""

import pytest

from tests.idioms import measure
from tests.idioms.expected import EXPECTED
from tests.idioms.row import Idiom
from tests.idioms.table import IDIOMS
from tests.measures import HALF


def wrong(idiom: Idiom, dtype: str) -> list[measure.Leaf]:
    return [leaf for leaf in measure.leaves(idiom, dtype) if not leaf.is_right]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            *(name, dtype),
            marks=[pytest.mark.xdist_group(name)]
            + [pytest.mark.slow] * (number % 2 != HALF.index(dtype)),
        )
        for number, name in enumerate(IDIOMS)
        for dtype in HALF
        if name not in EXPECTED
    ],
)
def test_idiom_is_at_most_twice_as_wrong_as_its_products_alone(name, dtype):
    assert not wrong(IDIOMS[name], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_idiom_that_is_expected_to_be_wrong_still_is(name):
    assert any(wrong(IDIOMS[name], dtype) for dtype in HALF), "take it off the list"
