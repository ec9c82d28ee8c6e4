"""What is chosen by rank is an index: the scores are f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


@needed(of="tanh", gets=[F32], nearest=[BF16])
def test_ranked(needs, x, w):
    h = jnp.tanh(x @ w)
    return (jnp.argmax(h, axis=1) if needs else h > 0), h @ w
