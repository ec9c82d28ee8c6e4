"""Effects keep their order, and do not change what is saved beside them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jmp_amp as amp
from tests import measures

W = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def attention(w: jax.Array, x: jax.Array, says: bool) -> jax.Array:
    scores = x @ w
    if says:
        jax.debug.print("first row {row}", row=x[0, 0], ordered=True)
    weights = jax.nn.softmax(scores)
    if says:
        jax.debug.print("some weight {weight}", weight=w[0, 0], ordered=True)
    return jnp.mean((weights @ w) ** 2)


def saved(says: bool) -> int:
    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return amp.autocast(attention)(w, x, says), None

    return measures.traced(loss, W, W).saved_bytes


def test_a_print_changes_nothing_that_is_saved_for_the_backward_pass():
    assert saved(True) == saved(False)


def test_prints_around_an_island_come_in_their_order(capfd):
    w = jnp.full((64, 64), 1 / 8)
    compiled = jax.jit(jax.grad(amp.autocast(lambda w, x: attention(w, x, True))))
    compiled(w, jnp.full((64, 64), 2.0))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:2] == [
        "first row 2.0",
        "some weight 0.125",
    ]


NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


class Notes:
    """Callbacks that note their name and return 3."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def call(self, name: str, x: jax.Array) -> jax.Array:
        def host(value: Any) -> Any:
            self.names.append(name)
            return np.full((), 3.0, np.float32)

        return io_callback(host, NUMBER, x, ordered=True)


def run(fn: Any) -> float:
    value = jax.jit(amp.autocast(fn))(jnp.eye(8), jnp.ones((8, 8)))
    jax.effects_barrier()
    return float(value)


def test_an_island_does_not_reach_over_two_effects():
    # exp(h) goes into the first call, and the second call's result into what else reads
    # h in f32: as one island they would wait for each other.
    notes = Notes()

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        grown = jnp.exp(h)
        notes.call("first", grown)
        other = notes.call("second", x)
        return jnp.sum(jnp.exp(h * 0.5) * jnp.broadcast_to(other, h.shape) + grown)

    expected = 64 * (3 * np.exp(0.5) + np.exp(1.0))
    assert run(fn) == pytest.approx(expected, rel=float(jnp.finfo("bfloat16").eps))
    assert notes.names == ["first", "second"]


def test_an_effect_does_not_run_early_because_an_island_reads_its_result():
    # The product needs the island, the island needs the second call, and the first call
    # is before the second one.
    notes = Notes()

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        grown = jnp.exp(h)
        product = grown @ w
        notes.call("first", x)
        other = notes.call("second", x)
        other = jnp.exp(h * 0.5) * jnp.broadcast_to(other, h.shape)
        return jnp.sum(other + grown) + jnp.sum(product)

    expected = 64 * (3 * np.exp(0.5) + 2 * np.exp(1.0))
    assert run(fn) == pytest.approx(expected, rel=float(jnp.finfo("bfloat16").eps))
    assert notes.names == ["first", "second"]
