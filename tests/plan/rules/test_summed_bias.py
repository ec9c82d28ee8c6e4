"""A bias is added in f32 where f32 alone reads it: its gradient is a sum."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, needed, planned


@needed(X, W, array(1, 16), of="add", gets=[F32], nearest=[BF16])
def test_summed_bias(needs, x, w, b):
    h = x @ w + b
    return jnp.exp(h) @ w, (x if needs else h) @ w


def test_a_function_of_a_biased_product_is_f32():
    of_both = lambda x, w, b: jnp.tanh(x @ w + b) @ w  # noqa: E731
    assert planned(of_both, X, W, array(1, 16), of="tanh") == [F32]
    assert planned(lambda x, w: jnp.tanh(x @ w) @ w, X, W, of="tanh") == [BF16]
