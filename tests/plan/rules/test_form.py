"""The `f @ p` of `f @ p @ f.T`, which linear algebra reads, is f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, planned


def test_form():
    def mapped(f, p, g):
        return jnp.linalg.cholesky(f @ p @ f.T)

    def nearest(f, p, g):
        return jnp.linalg.cholesky(f @ p @ g.T)

    args = (W, W, W)
    assert planned(mapped, *args, of="dot_general") == [F32, F32]
    assert planned(mapped, *args, of="dot_general", without="form")[0] == BF16
    assert planned(nearest, *args, of="dot_general")[0] == BF16
