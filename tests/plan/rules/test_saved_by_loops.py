"""What saturates the f32 results of a loop for half precision is half."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, W, X, needed, planned


def running_mean(h):
    turn = lambda c, row: (0.5 * c + 0.5 * row, c)  # noqa: E731
    return lax.scan(turn, jnp.zeros(16), h)[1]


@needed(of="tanh", gets=[BF16], nearest=[F32])
def test_saved_by_loops(needs, x, w):
    made = running_mean if needs else jnp.exp
    return jnp.tanh(made(x @ w)) @ w


def test_a_difference_of_the_results_is_f32():
    def differs(x, w):
        sums = running_mean(x @ w)
        return (sums[1:] - sums[:-1]) @ w

    assert planned(differs, X, W, of="sub") == [F32]
