"""Whole training runs against the same runs of torch: `oracle/convergence_torch.json`.

An MLP on 512 samples, 200 steps with fixed batches, in f32, under bf16 autocast, and
under f16 autocast with and without loss scaling. Tolerances: `oracle/README.md`.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from tests import measures

ORACLE = pathlib.Path(__file__).parent
RUNS = json.loads((ORACLE / "convergence_torch.json").read_text())["runs"]
MODES = {
    "fp32": (None, False),
    "bf16": ("mixed_bfloat16", False),
    "fp16": ("mixed_float16", True),
    "fp16_noscale": ("mixed_float16", False),
}


def network(params, x):
    h = jax.nn.relu(x @ params["w1"] + params["b1"][None])
    h = jax.nn.relu(h @ params["w2"] + params["b2"][None])
    return h @ params["w3"] + params["b3"][None]


def classification(params, x, data):
    logits = network(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, data["Y"]).mean()


def regression(params, x, data):
    return jnp.mean(jnp.square(network(params, x) - data["T"]))


def train(number):
    """Returns how far the losses are from torch's, the last one, and how it ended.

    Of a parameter it tells whether it moved.
    """
    (params, opt_state), (losses, apart), start = trained(number)
    scaled = amp.metrics(opt_state)
    return {
        "apart": float(np.max(apart)),
        "loss": float(losses[-1]),
        "moved": [name for name in params if np.any(params[name] != start[name])],
        "skipped": int(scaled["skipped_total"]),
        "scale": float(scaled["scale"]),
    }


def trained(number):
    run = RUNS[number]
    with np.load(ORACLE / "convergence_data.npz") as file:
        data = dict(file)
    policy, scaled = MODES[run["mode"]]
    params = {name: jnp.asarray(data[name]) for name in ("w1", "b1", "w2", "b2")}
    last = ("W3r", "b3r") if run["task"] == "reg" else ("w3", "b3")
    params |= {"w3": jnp.asarray(data[last[0]]), "b3": jnp.asarray(data[last[1]])}
    loss_of = regression if run["task"] == "reg" else classification
    if policy is not None:
        loss_of = amp.autocast(loss_of, policy)
    mult = run["loss_mult"]
    inner = optax.sgd if run["optimizer"] == "sgd" else optax.adam
    loss_scale = amp.no_loss_scale()
    if scaled:
        # torch has no cap: in the run with the tiny loss its scale climbs to 2^42.
        loss_scale = amp.dynamic_loss_scale(
            growth_interval=20 if mult == 1 else 5, max_scale=2.0**100
        )
    tx = amp.with_loss_scale(inner(run["lr"]), loss_scale)

    def step(carry, order_and_loss):
        params, opt_state = carry
        order, torch = order_and_loss
        batch = {"Y": jnp.asarray(data["Y"])[order], "T": jnp.asarray(data["T"])[order]}
        x = jnp.asarray(data["X"])[order]
        loss, grads = amp.value_and_grad(lambda p: mult * loss_of(p, x, batch))(
            params, loss_scale=opt_state
        )
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (loss / mult, abs(loss / mult - torch))

    carry = params, tx.init(params)
    run_all = jax.jit(
        functools.partial(jax.lax.scan, step),
        # Roundings as written: torch makes them all. A run goes far from its course.
        compiler_options=measures.EXACTLY_AS_WRITTEN | measures.OPTIMISED,
    )
    by_step = jnp.asarray(data["order"]), jnp.asarray(run["loss"], jnp.float32)
    return *run_all(carry, by_step), params


def run_id(run):
    return "-".join(str(run[k]) for k in ("mode", "optimizer", "task", "loss_mult"))


def torch_lost(run):
    """Returns how far the losses of torch in half are from its own in f32."""
    (f32,) = (each for each in RUNS if run_id(each) == run_id(run | {"mode": "fp32"}))
    return np.abs(np.subtract(run["loss"], f32["loss"])).max()


def is_stuck(run):
    return run["mode"] == "fp16_noscale" and run["loss_mult"] == 1e-6


@pytest.mark.parametrize(
    "run",
    [run for run in RUNS if run["mode"] in MODES and not is_stuck(run)],
    ids=run_id,
)
def test_a_training_run_is_that_of_torch(run):
    found = train(RUNS.index(run))
    assert found["apart"] <= (2e-4 if run["mode"] == "fp32" else torch_lost(run))
    if run["scale"] is not None:
        assert abs(found["skipped"] - run["skipped"]) <= 2
        assert 0.5 <= found["scale"] / run["scale"][-1] <= 2


def test_a_tiny_loss_trains_in_f16_only_with_loss_scaling():
    (without,) = (run for run in RUNS if is_stuck(run))
    scaled, full = (
        next(run for run in RUNS if (run["mode"], run["loss_mult"]) == (mode, 1e-6))
        for mode in ("fp16", "fp32")
    )
    found = train(RUNS.index(without))
    # Every gradient that went through f16 is zero. The last bias is added in f32, since
    # the loss alone reads the sum, and so it moves here; in torch it does not either.
    assert found["moved"] in (["b3"], [])
    with_scale = train(RUNS.index(scaled))
    assert found["loss"] > 10 * with_scale["loss"]
    assert {"w1", "w2", "w3"} <= set(with_scale["moved"])
    assert abs(with_scale["loss"] - full["loss"][-1]) <= 5e-3
    assert with_scale["scale"] > 2.0**30
