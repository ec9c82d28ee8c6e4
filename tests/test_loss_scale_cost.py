"""What loss scaling costs in a training step compiled for an H100.

The step is the hand-written f16 model's, its parameters and optimizer state donated;
the only difference is the scaler. No update is written before every gradient is known
to be finite, so gradients that would be consumed one by one have to wait for the last.
A step that clips by their global norm waits anyway.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import optax
import pytest

import jmp_amp as amp
from tests import h100, twins

pytestmark = h100.needs_compiler


class Cost(NamedTuple):
    temp_bytes: int
    donated_bytes: int


def with_clipping(case: twins.Case) -> twins.Case:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), case.optimizer)
    return dataclasses.replace(case, optimizer=optimizer)


# The parameters, their gradients and moments are nearly all that this step holds.
FEW_TOKENS = dataclasses.replace(
    twins.CASES["transformer", "large"], inputs=twins.random_tokens(4096, 1, 64)
)
CASES = {
    "mlp": twins.CASES["mlp", "large"],
    "cnn": twins.CASES["cnn", "large"],
    "transformer": twins.CASES["transformer", "large"],
    "few tokens": FEW_TOKENS,
}
PARAMETER_BYTES = sum(p.size * 4 for p in jax.tree.leaves(FEW_TOKENS.abstract()[0]))


@functools.cache
def cost(name: str, clipped: bool, scaled: bool) -> Cost:
    """Returns the memory of the step with or without a loss scale in its optimizer."""
    case = with_clipping(CASES[name]) if clipped else CASES[name]
    loss = case.twin_loss("float16")
    tx: Any = case.optimizer
    if scaled:
        tx = amp.with_loss_scale(tx, amp.dynamic_loss_scale())

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        gradient: Any = amp.value_and_grad if scaled else jax.value_and_grad
        scale = {"loss_scale": opt_state} if scaled else {}
        (value, state), grads = gradient(loss, has_aux=True)(params, batch, **scale)
        # Adam of optax raises a float to its integer step count.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, value

    params, batch = case.abstract()
    opt_state = jax.eval_shape(tx.init, params)
    program = h100.compile_for_gpu(
        step, params, opt_state, batch, donate_argnums=(0, 1)
    )
    return Cost(h100.temp_bytes(program), program.memory_analysis().alias_size_in_bytes)


@pytest.mark.parametrize("clipped", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        pytest.param("cnn", marks=pytest.mark.slow),
        pytest.param("transformer", marks=pytest.mark.slow),
    ],
)
def test_loss_scaling_adds_at_most_one_percent_of_temporary_memory(name, clipped):
    scaled, plain = cost(name, clipped, True), cost(name, clipped, False)
    assert scaled.temp_bytes <= 1.01 * plain.temp_bytes


@pytest.mark.slow
def test_loss_scaling_adds_no_buffer_to_a_step_that_clips_by_global_norm():
    scaled, plain = cost("few tokens", True, True), cost("few tokens", True, False)
    # A few scalars; the smallest kernel has a megabyte.
    assert scaled.temp_bytes - plain.temp_bytes < 16 * 1024


@pytest.mark.slow
def test_gradients_that_wait_for_the_last_are_no_copy_of_the_parameters():
    scaled, plain = cost("few tokens", False, True), cost("few tokens", False, False)
    # In the dtype that the backward pass left them in: f16.
    assert scaled.temp_bytes - plain.temp_bytes < PARAMETER_BYTES / 2


@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("few tokens", marks=pytest.mark.slow)]
)
def test_donated_parameters_and_state_are_updated_in_place(name):
    scaled, plain = cost(name, True, True), cost(name, True, False)
    state = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(
            jax.eval_shape(CASES[name].optimizer.init, CASES[name].abstract()[0])
        )
    )
    parameters = sum(p.size * 4 for p in jax.tree.leaves(CASES[name].abstract()[0]))
    assert scaled.donated_bytes >= plain.donated_bytes >= parameters + state
