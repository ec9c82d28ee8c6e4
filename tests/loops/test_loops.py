"""Loops: a recursion that needs f32 has it, a network keeps its products in half.

The tests by default trace and plan. The slow ones compile: that the table is right
about what needs f32, that f32 itself is right, and that the library is.
"""

import pytest

from tests.loops import measure
from tests.loops.measured import ALREADY, EXPECTED_TODAY, IN_F32_TODAY, NEEDS
from tests.loops.table import LOOPS

NETWORKS = [name for name, loop in LOOPS.items() if not loop.is_recursion]
# f32 itself, where a method adds up its roundings.
MOST_IN_F32 = 1e-3

WITHOUT_THE_RULE = pytest.mark.xfail(strict=True, reason="the library has no rule yet")


def recursions(names):
    """Parameters: names of recursions, with what is known to fail."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=[WITHOUT_THE_RULE] * (name in EXPECTED_TODAY))
            for name in names
        ],
    )


@recursions(NEEDS)
def test_recursion_that_needs_f32_has_it_in_its_loops(name):
    assert measure.products(LOOPS[name].idiom).half_in_loops == 0


@pytest.mark.parametrize("name", ALREADY)
def test_recursion_that_has_f32_without_a_rule_keeps_it(name):
    assert measure.products(LOOPS[name].idiom).half_in_loops == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_network_keeps_its_products_in_half(name):
    found = measure.products(LOOPS[name].idiom)
    assert found.full_in_loops + found.full <= IN_F32_TODAY.get(name, 0)


def test_names_of_the_measured_loops_are_those_of_recursions():
    assert not NEEDS.keys() & ALREADY.keys()
    assert NEEDS.keys() >= EXPECTED_TODAY
    assert all(LOOPS[name].is_recursion for name in (*NEEDS, *ALREADY))
    assert not any(LOOPS[name].is_recursion for name in IN_F32_TODAY)


@pytest.mark.slow
@recursions(NEEDS)
def test_recursion_that_needs_f32_is_as_right_as_with_all_products_in_f32(name):
    errors = measure.errors(LOOPS[name].idiom, "library", "full")
    assert measure.is_kept(errors["library"], errors["full"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NEEDS, *ALREADY])
def test_recursion_that_needs_f32_is_wrong_with_every_product_in_half(name):
    # What one version of XLA rounds, another may round the other way.
    errors = measure.errors(LOOPS[name].idiom, "half")
    assert errors["half"].worst > measure.MOST_IN_HALF / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loop_is_right_in_f32(name):
    assert measure.errors(LOOPS[name].idiom, "f32")["f32"].worst < MOST_IN_F32
