"""What more edges than nodes look up for f32 readers is written in half."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import BF16, F32, W, X, planned


def messages(edges):
    def fn(x, w):
        nodes = x @ w
        return jnp.exp(nodes[edges]), jnp.exp(nodes)

    return fn


def test_grows():
    many, few = messages(np.arange(32) % 8), messages(np.arange(8))
    assert planned(many, X, W, of="gather") == [BF16]
    assert planned(many, X, W, of="gather", without="grows") == [F32]
    assert planned(few, X, W, of="gather") == [F32]
