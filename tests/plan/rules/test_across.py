"""A sum of half values that waits for a product in memory is half."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed, planned


@needed(of="add", gets=[BF16], nearest=[F32])
def test_across(needs, x, w):
    h = x @ w + x @ w.T
    return jnp.cos(jnp.exp(h) @ w - (h if needs else x @ w))


def test_so_is_one_that_a_branch_returns():
    def fn(x, w):
        sums = (lambda: x @ w + x @ w.T), (lambda: x @ w.T + x @ w)
        h = jax.lax.cond(jnp.sum(x) > 0, *sums)
        return jnp.cos(jnp.exp(h) @ w - h)

    assert planned(fn, X, W, of="add") == [BF16, BF16]
