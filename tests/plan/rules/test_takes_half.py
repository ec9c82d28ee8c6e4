"""A norm that hands on half precision takes what it normalises in half."""

import contextlib

import jax.numpy as jnp

import jmp_amp as amp
from jmp_amp.plan.program.scope_text import policy_noted
from tests.plan.rules import BF16, F32, W, X, needed, planned, stored

NORM = amp.Policy("float32", "float32", "bfloat16")


@needed(of="add", gets=[BF16], nearest=[F32])
def test_takes_half(needs, x, w):
    h = x @ w + x @ w.T
    with policy_noted(NORM) if needs else contextlib.nullcontext():
        return jnp.exp(h) @ w


def test_takes_the_digits_of_a_dear_value_that_joins_no_stream():
    def norm(x, w):
        sums = jnp.cumsum(x @ w, axis=0)
        with policy_noted(NORM):
            return jnp.exp(sums) @ w

    def stream(x, w):
        h = x @ w
        h = h + jnp.cumsum(jnp.exp(h), axis=0)
        with policy_noted(NORM):
            return jnp.exp(h) @ w

    def moved(x, w):
        h = x @ w
        h = 0.5 * (h + jnp.cumsum(jnp.exp(h), axis=0)).reshape(4, 2, 16)
        with policy_noted(NORM):
            return jnp.exp(h).reshape(8, 16) @ w

    assert stored(norm, X, W, of="cumsum") == [F32]
    for fn in (stream, moved):
        assert planned(fn, X, W, of="add") == [BF16]
        assert planned(fn, X, W, of="add", without="takes_half") == [F32]
