"""What only comparisons read is f32, and asks nothing of what it is made of."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed, planned


@needed(of="abs", gets=[F32], nearest=[BF16])
def test_compared(needs, x, w):
    h = jnp.tanh(x @ w)
    return h @ w, (abs(h) < 0.5 if needs else abs(h) @ w)


def test_it_asks_nothing_of_what_it_is_made_of():
    def metric(x, w):
        h = jnp.tanh(x @ w)
        return h @ w, abs(h) < 0.5

    assert planned(metric, X, W, of="tanh") == [BF16]
