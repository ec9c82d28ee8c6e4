"""Sizes that are told when a program runs, compared."""

import jax.export
import pytest

from jmp_amp.plan.program.dimensions import as_counted, as_number, is_larger

B, S = jax.export.symbolic_shape("b, s")
(BOUNDED,) = jax.export.symbolic_shape("c", constraints=["c >= 8"])


@pytest.mark.parametrize(
    "size, other, wanted",
    [
        *((8, 4, True), (4, 4, False), (4, 8, False)),
        # Only of a batch of one, the least that there is, both are equal.
        *((8 * B, 8, True), (B * S, 1, True), (8 * B + S, B, True)),
        *((8, 8 * B, False), (8 * B, B * 8, False), (B, 2 * B, False)),
        *((BOUNDED, 4, True), (4, BOUNDED, False)),
    ],
)
def test_a_size_is_larger_where_it_is_for_all_values_but_the_least(size, other, wanted):
    for unless_known in (False, True):
        assert is_larger(size, other, unless_known=unless_known) is wanted


@pytest.mark.parametrize("size, other", [(B, 2), (1000, B), (B, S), (B * S, B)])
@pytest.mark.parametrize("unless_known", [False, True])
def test_a_comparison_that_depends_on_the_values_is_the_callers(
    size, other, unless_known
):
    assert is_larger(size, other, unless_known=unless_known) is unless_known


def test_a_symbol_is_a_large_number_and_counts_as_one_example():
    assert as_number(7) == 7 and as_number(B) > 1e6
    assert as_counted((B, 8, 2 * S)) == (1, 8, 1)
