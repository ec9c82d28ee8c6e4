"""What saturates the f32 results of a loop for half precision is half."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, W, X, planned


def running_mean(h):
    turn = lambda c, row: (0.5 * c + 0.5 * row, c)  # noqa: E731
    return lax.scan(turn, jnp.zeros(16), h)[1]


def test_saved_by_loops():
    def loop(x, w):
        return jnp.tanh(running_mean(x @ w)) @ w

    def nearest(x, w):
        return jnp.tanh(jnp.exp(x @ w)) @ w

    assert planned(loop, X, W, of="tanh") == [BF16]
    assert planned(loop, X, W, of="tanh", without="saved_by_loops") == [F32]
    assert planned(nearest, X, W, of="tanh") == [F32]

    def differs(x, w):
        sums = running_mean(x @ w)
        return (sums[1:] - sums[:-1]) @ w

    assert planned(differs, X, W, of="sub") == [F32]
