"""The derivative of a quotient in f16 squares nothing."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F16, W, X, rewritten


def test_quotient():
    def divided(x, w):
        return (x @ w) / jnp.cos(x @ w.T)

    def nearest(x, w):
        return (x @ w) / 3.0

    options = {"of": "div", "half": F16}
    assert rewritten(divided, X, W, **options) == [True]
    assert rewritten(divided, X, W, **options, without="quotient") == [False]
    assert rewritten(nearest, X, W, **options) == [False]
    assert rewritten(divided, X, W, of="div", half=BF16) == [False]
