"""What `tune` takes a module's products to cost: what they cost in the gradient."""

import jax
import jax.numpy as jnp
import pytest

import jmp_amp as amp
from jmp_amp.numerics.tune.trials import gradient_flops


@pytest.mark.parametrize("in_scan", [False, True])
def test_products_cost_what_their_gradients_cost(in_scan):
    """Three products for each, in a loop as often as it turns; two for the first."""
    weights = jax.random.normal(jax.random.key(2), (4, 16, 16)) / 4
    x = jnp.ones((8, 16))

    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(weights, x):
        if in_scan:
            return jnp.mean(jax.lax.scan(layer, x, weights)[0])
        for w in weights:
            x, _ = layer(x, w)
        return jnp.mean(x)

    rows = amp.explain(loss, "float32")(weights, x).equations
    gradient = jax.make_jaxpr(jax.grad(loss))(weights, x)
    found = sum(gradient_flops(rows, gradient).values())
    products = 3 * 4 if in_scan else 3 * 4 - 1
    assert found == products * 2 * 8 * 16 * 16
