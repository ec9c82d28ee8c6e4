"""To add the negative of a value is to subtract the value."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed


@needed(X, W, X, of="add", gets=[F32, F32], nearest=[BF16, BF16])
def test_negated(needs, x, w, at):
    place = at + x @ w
    first = place[:1]
    return jnp.tanh((place + (-first if needs else first)) @ w)
