"""The derivative of a quotient in f16 squares nothing."""

import jax.numpy as jnp

from tests.plan.rules import F16, needed, rewritten


@needed(
    of="div",
    gets=[True],
    nearest=[False],
    half=F16,
    other_half=[False],
    read=rewritten,
)
def test_quotient(needs, x, w):
    return (x @ w) / (jnp.cos(x @ w.T) if needs else 3.0)
