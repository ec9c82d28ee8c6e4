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


def test_prints_around_a_softmax_come_in_their_order(capfd):
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


def test_a_block_does_not_reach_over_two_effects():
    # exp(h) goes into the first call, and the second call's result into what else reads
    # h in f32: as one block they would wait for each other.
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


def test_an_effect_does_not_run_early_because_a_block_reads_its_result():
    # The product needs the block, the block needs the second call, and the first call
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


def near_one(x: jax.Array) -> jax.Array:
    # The product is exact in half precision: only what follows it could round.
    return 1 + 0.001 * jax.nn.sigmoid(x @ jnp.eye(8))


SIXTEENTHS = np.float32(np.arange(128).reshape(16, 8) - 64) / 16
EXACT = 1 + 0.001 / (1 + np.exp(-np.float64(SIXTEENTHS)))


@pytest.mark.parametrize("writes", ["set", "added up"])
def test_state_in_a_mutable_array_keeps_its_digits_beside_a_half_reader(writes):
    def fn(x):
        value, state = near_one(x), jax.new_ref(jnp.zeros((16, 8)))
        if writes == "set":
            state[...] = value
        else:
            jax.ref.addupdate(state, ..., value)
        return state[...], jnp.tanh(value) @ jnp.eye(8)

    state, _ = amp.autocast(fn)(SIXTEENTHS)
    np.testing.assert_allclose(state, EXACT, rtol=2e-7)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_callback_keeps_has_its_digits_beside_a_half_reader(ordered):
    kept = []

    def fn(x):
        value = near_one(x)
        io_callback(lambda array: kept.append(array), None, value, ordered=ordered)
        return jnp.tanh(value) @ jnp.eye(8)

    amp.autocast(fn)(SIXTEENTHS)
    jax.effects_barrier()
    np.testing.assert_allclose(kept[0], EXACT, rtol=2e-7)
