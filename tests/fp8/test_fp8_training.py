"""fp8 with what training brings: loss scales, accumulation, half weights, resuming."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jmp_amp as amp
from tests.fp8.programs import numbers
from tests.fp8.reference import relative_error
from tests.measures import EXACTLY_AS_WRITTEN

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def standard_promotion():
    # optax.adam computes `decay**count` with an integer count.
    with jax.numpy_dtype_promotion("standard"):
        yield


X = numbers(32, 32)
TARGET = jnp.sin(X @ numbers(32, 16, seed=1, scale=0.3))
PARAMS = {
    "first": numbers(32, 64, seed=2, scale=0.2),
    "bias": jnp.zeros((1, 64)),
    "last": numbers(64, 16, seed=3, scale=0.2),
}


def model(params, x):
    return jax.nn.gelu(x @ params["first"] + params["bias"]) @ params["last"]


def loss(params, x, target):
    return jnp.mean((amp.autocast(model, "fp8")(params, x) - target) ** 2)


WRAPPERS = {
    "loss scale": lambda tx: amp.with_loss_scale(tx, amp.dynamic_loss_scale(2.0**10)),
    "kahan": lambda tx: amp.with_loss_scale(amp.with_kahan(tx), amp.no_loss_scale()),
    "masters": lambda tx: amp.with_loss_scale(
        amp.with_master_weights(tx), amp.static_loss_scale(8.0)
    ),
    "accumulation": lambda tx: amp.with_loss_scale(
        optax.MultiSteps(tx, 2), amp.no_loss_scale()
    ),
}


@functools.cache
def step_of(name):
    tx = WRAPPERS[name](optax.adam(1e-2))

    def step(params, state, x, target):
        value, grads = amp.value_and_grad(loss)(params, x, target, loss_scale=state)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return tx, jax.jit(step, compiler_options=EXACTLY_AS_WRITTEN)


def started(name):
    half = name in ("kahan", "masters")
    params = amp.cast_params(PARAMS, "bfloat16") if half else PARAMS
    return params, step_of(name)[0].init(params)


def trained(name, params, state, steps):
    losses = []
    for _ in range(steps):
        params, state, value = step_of(name)[1](params, state, X, TARGET)
        losses.append(float(value))
    return params, state, losses


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "kahan" else pytest.mark.slow)
        for name in WRAPPERS
    ],
)
def test_training_resumes_from_a_checkpoint_as_if_it_had_not_stopped(name):
    start = started(name)
    params, state, losses = trained(name, *start, 30)
    # It learns: fp8 is no obstacle.
    assert losses[-1] < losses[0] / 2
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(params)]
    assert dtypes == [leaf.dtype for leaf in jax.tree.leaves(start[0])]
    # fp8 has no state of its own.
    params, state, _ = trained(name, *start, 15)
    saved = serialization.to_bytes((params, state))
    restored = serialization.from_bytes(started(name), saved)
    *_, rest = trained(name, *jax.tree.map(jnp.asarray, restored), 15)
    assert rest == losses[15:]


def test_a_loss_scale_changes_no_digit_and_skips_what_overflows():
    plain = jax.jit(jax.grad(loss), compiler_options=EXACTLY_AS_WRITTEN)
    tx, _ = step_of("loss scale")
    state = tx.init(PARAMS)

    @functools.partial(jax.jit, compiler_options=EXACTLY_AS_WRITTEN)
    def scaled(params):
        return amp.grad(loss)(params, X, TARGET, loss_scale=state)

    # Scales of cotangents follow the loss scale, a power of two; grad takes it out.
    found, expected = scaled(PARAMS), plain(PARAMS, X, TARGET)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(a, b)
    _, step = step_of("loss scale")
    params, state, _ = step(PARAMS, state, X.at[0, 0].set(jnp.nan), TARGET)
    assert amp.loss_scale_of(state).value == 2.0**9
    for a, b in zip(*map(jax.tree.leaves, (params, PARAMS)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_accumulated_gradients_are_the_mean_of_those_of_micro_batches():
    grad = jax.jit(jax.grad(loss), compiler_options=EXACTLY_AS_WRITTEN)
    halves = [grad(PARAMS, X[i : i + 16], TARGET[i : i + 16]) for i in (0, 16)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    tx = optax.MultiSteps(optax.sgd(1.0), 2)
    state = tx.init(PARAMS)
    for each in halves:
        updates, state = tx.update(each, state, PARAMS)
    for name, update in updates.items():
        assert relative_error(-update, np.asarray(mean[name], np.float64)) < 1e-6
