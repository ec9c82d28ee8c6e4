"""A training step whole inside autocast: parameters and moments keep their digits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp

X = jax.random.normal(jax.random.key(0), (8, 16))
W = jax.random.normal(jax.random.key(1), (16, 16)) * 0.2
TARGET = jnp.sin(X @ jax.random.normal(jax.random.key(2), (16, 16)))


@pytest.mark.breadth(1)
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(
    "tx",
    [optax.adamw(1e-4), optax.sgd(1e-4, momentum=0.9), optax.adafactor(1e-4)],
    ids="adamw momentum adafactor".split(),
)
def test_a_whole_training_step_inside_is_as_right_as_one_around(tx):
    start = {"w": W, "b": jnp.zeros(16), "v": W.T}

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"] - TARGET) ** 2)

    def step(params, state, loss):
        grads = jax.grad(loss)(params, X)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def moved(one_step):
        params, state = start, tx.init(start)
        one_step = jax.jit(one_step)
        for _ in range(50):
            params, state = one_step(params, state)
        steps = [np.ravel(np.asarray(params[k]) - np.asarray(start[k])) for k in start]
        return np.concatenate(steps)

    exact = moved(lambda p, s: step(p, s, loss))
    around = moved(lambda p, s: step(p, s, amp.autocast(loss)))
    inside = moved(amp.autocast(lambda p, s: step(p, s, loss)))
    errors = [np.linalg.norm(each - exact) for each in (inside, around)]
    assert errors[0] < 2 * errors[1] < 0.2 * np.linalg.norm(exact)
