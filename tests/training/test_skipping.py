"""A step that is skipped: what is kept, and what masters cost on a CPU.

Memory is that of programs compiled for the CPU: a copy of old moments, masters or
parameters, which XLA makes where it cannot write in place, is temporary memory.
"""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("optax_promotion")

SHAPE = (256, 1024)
BYTES = 4 * 256 * 1024
BAD = jnp.full((3,), jnp.nan)


def scaled(inner: Any) -> optax.GradientTransformationExtraArgs:
    return amp.with_loss_scale(inner, amp.dynamic_loss_scale(4.0))


def temporary(tx: Any, dtype: Any = jnp.float32, by_hand: bool = False) -> int:
    """Bytes that an update needs besides its arguments and results, all donated."""
    params = {"w": jax.ShapeDtypeStruct(SHAPE, dtype)}
    grads = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    state = jax.eval_shape(tx.init, grads if by_hand else params)

    def update(params: Any, masters: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, masters if by_hand else params)
        if not by_hand:
            return optax.apply_updates(params, updates), masters, state
        masters = optax.apply_updates(masters, updates)
        return {"w": masters["w"].astype(dtype)}, masters, state

    masters = grads if by_hand else ()
    step = jax.jit(update, donate_argnums=(0, 1, 2))
    compiled = step.lower(params, masters, state, grads).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("order", ["alone", "scale inside"])
def test_masters_are_written_in_place_on_a_cpu(order, dtype):
    tx = optax.adamw(1e-3)
    wrapped = {
        "alone": lambda: amp.with_master_weights(tx),
        "scale inside": lambda: amp.with_master_weights(scaled(tx)),
    }[order]()
    by_hand = temporary(tx, dtype, by_hand=True)
    # The gradient that is checked, or the update, may be stored once.
    room = BYTES * (order != "alone")
    assert temporary(wrapped, dtype) < by_hand + room + BYTES / 8


def test_random_rounding_stores_no_random_bits_on_a_cpu():
    tx = optax.adamw(1e-3)
    rounded = amp.with_stochastic_rounding(tx, jax.random.key(0))
    room = temporary(tx, by_hand=True, dtype=jnp.bfloat16)
    assert temporary(rounded, jnp.bfloat16) < room + BYTES / 8


def odd(name: str) -> optax.GradientTransformation:
    """A transformation whose new state is unusual."""

    def init(params: Any) -> Any:
        del params
        return {"a": jnp.float32(1.0), "b": jnp.float32(2.0), "count": jnp.int32(0)}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        del params
        a, b, count = state["a"] + jnp.sum(grads), state["b"], state["count"] + 1
        new = {
            "one value twice": {"a": a, "b": a, "count": count},
            "exchanged": {"a": b, "b": state["a"], "count": count},
            "a constant": {"a": a, "b": jnp.float32(7.0), "count": jnp.int32(3)},
            "unchanged": state,
            "the gradient": {"a": grads[0], "b": b, "count": count},
            "from a loop": {
                "a": jax.lax.fori_loop(0, 3, lambda i, x: x + grads[i], a),
                "b": jax.jit(lambda x: jnp.sin(x + a))(b),
                "count": jax.lax.cond(count > 1, lambda: count, lambda: count * 2),
            },
            "from numpy": {"a": a, "b": np.float32(5.0), "count": count},
        }[name]
        return grads * new["a"] + new["b"], new

    return optax.GradientTransformation(init, update)


ODD = (
    "one value twice",
    "exchanged",
    "a constant",
    "unchanged",
    "the gradient",
    "from a loop",
    "from numpy",
)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", ODD)
def test_whatever_the_new_state_is_a_bad_step_keeps_the_old(name):
    tx, inner = scaled(odd(name)), odd(name)
    params, good = np.zeros(3, np.float32), np.float32([1.0, 2.0, -0.5])
    step, inner_step = jax.jit(tx.update), jax.jit(inner.update)
    first, expected = tx.init(params), inner.init(params)
    state = first
    for grads in (BAD, good, BAD, 2 * good, BAD, -good):
        updates, state = step(grads, state, params)
        if grads is BAD:
            assert (updates == 0).all()
        else:
            wanted, expected = inner_step(grads, expected)
            chex.assert_trees_all_close(updates, wanted, rtol=1e-6)
        chex.assert_trees_all_close(state.inner_state, expected, rtol=1e-6)
        chex.assert_trees_all_equal_shapes_and_dtypes(
            state.inner_state, first.inner_state
        )


def test_keys_flags_and_labels_of_a_state_are_kept_by_a_bad_step():
    def init(params: Any) -> Any:
        del params
        key = jax.random.key(0)
        return {"key": key, "flag": jnp.asarray(False), "label": "text", "none": None}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        del params
        key, used = jax.random.split(state["key"])
        noise = jax.random.normal(used, grads.shape)
        return grads + noise, state | {"key": key, "flag": ~state["flag"]}

    tx = scaled(optax.GradientTransformation(init, update))
    state = tx.init(BAD)
    good = jnp.ones_like(BAD)
    _, expected = update(good, init(BAD))

    def arrays(grads: Any) -> Any:
        _, after = tx.update(grads, state)
        assert after.inner_state["label"] == "text"
        return after.inner_state["key"], after.inner_state["flag"]

    for run in (arrays, jax.jit(arrays)):
        assert run(good) == (expected["key"], True)
        assert run(BAD) == (state.inner_state["key"], False)


def test_an_update_is_traced_once_if_compiled_or_if_a_gradient_is_not_finite():
    calls = []

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        calls.append(isinstance(grads, jax.core.Tracer))
        return grads, state

    tx = scaled(optax.GradientTransformation(lambda _: optax.EmptyState(), update))
    state = tx.init(BAD)
    tx.update(BAD, state, BAD)
    assert calls == [True, False]
    tx.update(jnp.zeros_like(BAD), state, BAD)
    assert calls == [True, False, False]
    jax.jit(tx.update)(BAD, state, BAD)
    assert calls == [True, False, False, True]


def test_gradients_reach_through_an_update():
    # Learned learning rates differentiate training steps.
    tx = scaled(optax.sgd(0.5, momentum=0.9))

    def trained(start: jax.Array) -> jax.Array:
        state = tx.init(start)
        for _ in range(2):
            updates, state = tx.update(2 * start, state, start)
            start = start + updates
        return jnp.sum(start)

    # x -> 0 after a step; its trace, 0.9 * 2 x, takes it to -0.9 x.
    found = jax.jit(jax.grad(trained))(jnp.ones(3))
    np.testing.assert_allclose(found, -0.9, rtol=1e-6)


# The check


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


each_shape = pytest.mark.parametrize(
    "shape", [(64, 64), (4096, 16), (3, 3, 32, 64), (5, 4097), (8, 1024)], ids=str
)


@pytest.mark.breadth(2)
@each_shape
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
def test_one_bad_number_is_found_wherever_it_is_in_a_matrix(shape, value):
    check = jax.jit(amp.all_finite)
    good = numbers(shape)
    assert check({"w": good})
    rng = np.random.default_rng(1)
    for place in (0, good.size - 1, *rng.integers(0, good.size, 20)):
        bad = good.copy()
        bad.flat[place] = value
        assert not check({"w": bad}), place


@pytest.mark.breadth(2)
@each_shape
@pytest.mark.parametrize("precision", [None, "bfloat16", "highest"])
def test_the_largest_and_smallest_numbers_are_finite(shape, precision):
    info = np.finfo(np.float32)
    largest = np.where(numbers(shape) > 0, info.max, info.min)
    with jax.default_matmul_precision(precision):
        check = jax.jit(amp.all_finite)
        assert check({"w": largest})
        assert check({"w": np.abs(largest)})
        assert check({"w": np.full(shape, info.smallest_subnormal)})


def test_the_check_is_one_for_each_member_of_a_batch():
    stacked = np.stack([numbers((64, 64))] * 3)
    stacked[1, 5, 5] = np.inf
    found = jax.jit(jax.vmap(amp.all_finite))({"w": stacked})
    np.testing.assert_array_equal(found, [True, False, True])


def test_an_autocast_around_the_check_makes_nothing_infinite():
    large = {"w": np.full((64, 64), 1e5, np.float32)}
    check = amp.autocast(functools.partial(amp.all_finite), "mixed_float16")
    assert jax.jit(check)(large)
