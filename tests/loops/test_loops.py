"""Loops: a recursion that needs f32 has it, a network keeps its products in half.

The tests by default trace and plan. The slow ones compile: that the table is right
about what needs f32, and that the library is. `python -m tests.loops` measures all.
"""

import pytest

from tests.loops import measure
from tests.loops.measured import (
    ALREADY,
    HALF_IN_LOOPS,
    IN_F32_TODAY,
    LINEAR,
    NEEDS,
)
from tests.loops.table import LOOPS

NETWORKS = [name for name, loop in LOOPS.items() if not loop.is_recursion]


def recursions(names):
    """Parameters: names of recursions, with what is known to fail."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=[known(HALF_IN_LOOPS[name])])
            if name in HALF_IN_LOOPS
            else name
            for name in names
        ],
    )


def known(reason):
    return pytest.mark.xfail(strict=True, reason=reason)


@pytest.mark.breadth(2)
@recursions(NEEDS)
def test_recursion_that_needs_f32_has_it_in_its_loops(name):
    assert measure.products(LOOPS[name].idiom).half_in_loops == 0


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ALREADY)
def test_recursion_that_has_f32_without_a_rule_keeps_it(name):
    assert measure.products(LOOPS[name].idiom).half_in_loops == 0


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[known("a linear recurrence")] * (name in LINEAR))
        for name in NETWORKS
    ],
)
def test_network_keeps_its_products_in_half(name):
    found = measure.products(LOOPS[name].idiom)
    assert found.full_in_loops + found.full <= IN_F32_TODAY.get(name, 0)


def test_names_of_the_measured_loops_are_those_of_recursions():
    assert not NEEDS.keys() & ALREADY.keys()
    assert NEEDS.keys() >= HALF_IN_LOOPS.keys()
    assert all(LOOPS[name].is_recursion for name in (*NEEDS, *ALREADY))
    assert not any(LOOPS[name].is_recursion for name in (*IN_F32_TODAY, *LINEAR))


@pytest.mark.slow
@recursions(NEEDS)
def test_recursion_that_needs_f32_is_as_right_as_with_all_products_in_f32(name):
    errors = measure.errors(LOOPS[name].idiom, "library", "full")
    assert measure.is_kept(errors["library"], errors["full"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_recursion_that_needs_f32_is_wrong_with_every_product_in_half(name):
    # What one version of XLA rounds, another may round the other way.
    errors = measure.errors(LOOPS[name].idiom, "half")
    assert errors["half"].worst > measure.MOST_IN_HALF / 2
