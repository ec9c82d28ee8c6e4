"""A sum of half values that is moved is what a norm takes in half."""

import jax
import jax.numpy as jnp

import jmp_amp as amp
from jmp_amp.plan.program.scope_text import policy_noted
from tests.plan.rules import BF16, F32, needed

NORM = amp.Policy("float32", "float32", "bfloat16")


@needed(of="rev", gets=[BF16], nearest=[F32])
def test_moves_stream(needs, x, w):
    h = x @ w + x @ w.T
    h = (h if needs else jnp.sin(h))[::-1]
    with policy_noted(NORM):
        return jax.nn.softmax(h) @ w
