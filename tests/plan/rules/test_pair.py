"""One sum of half values is half if half alone reads it."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed, planned


@needed(of="add", gets=[BF16], nearest=[F32])
def test_pair(needs, x, w):
    h = x @ w + x @ w.T
    return (h if needs else jnp.exp(h)) @ w


def test_a_quotient_and_an_argument_are_none():
    assert planned(lambda x, w: ((x @ w) / (x @ w.T)) @ w, X, W, of="div") == [F32]
    assert planned(lambda x, w: (x @ w - x) @ w, X, W, of="sub") == [F32]
    # Half does not hold 0.3.
    assert planned(lambda x, w: (x @ w * 0.3) @ w, X, W, of="mul") == [F32]
    assert planned(lambda x, w: (x @ w * 0.5) @ w, X, W, of="mul") == [BF16]
