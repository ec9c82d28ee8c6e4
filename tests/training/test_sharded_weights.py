"""Half-precision weights on several devices: ZeRO's first stage, replicas."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jmp_amp as amp
from tests import h100
from tests.training.wrappers import BF16, F32, STORING, standard

each_wrapper = pytest.mark.parametrize("name", STORING)


def optimizer(name: str) -> Any:
    with standard():
        inner = optax.chain(optax.clip_by_global_norm(1e6), optax.adamw(1e-2))
        return amp.with_loss_scale(STORING[name](inner), amp.dynamic_loss_scale(4.0))


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def parameters() -> Any:
    whole = {
        "w": numbers(16, 32, seed=0).astype(BF16),
        "b": numbers(32, seed=1).astype(BF16),
        "norm": numbers(32, seed=2),
    }
    return jax.tree.map(jnp.asarray, whole)


def gradients(step: int) -> Any:
    return {
        "w": numbers(16, 32, seed=10 + step),
        "b": numbers(32, seed=20 + step),
        "norm": numbers(32, seed=30 + step) * F32.type(np.inf if step == 2 else 1),
    }


def split(tree: Any, mesh: Mesh) -> Any:
    """The shardings of a tree whose arrays are split over the devices."""
    return jax.tree.map(
        lambda leaf: NamedSharding(
            mesh, PartitionSpec("d") if leaf.ndim and leaf.size > 8 else PartitionSpec()
        ),
        tree,
    )


def mesh_of_eight() -> Mesh:
    return jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def step_of(tx: Any) -> Any:
    @standard()
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.breadth(1)
@each_wrapper
def test_with_the_state_sharded_and_parameters_replicated_the_bits_are_the_same(name):
    tx, mesh = optimizer(name), mesh_of_eight()
    params = parameters()
    with standard():
        state = tx.init(params)
    replicated = NamedSharding(mesh, PartitionSpec())
    out = jax.tree.map(lambda _: replicated, params), split(state, mesh)
    alone, sharded = jax.jit(step_of(tx)), jax.jit(step_of(tx), out_shardings=out)
    expected = params, state
    found = jax.device_put((params, state), out)
    for index in range(5):
        expected = alone(*expected, gradients(index))
        found = sharded(*found, jax.device_put(gradients(index), replicated))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert int(amp.metrics(found[1])["skipped_total"]) == 1
    kept = found[1].inner_state
    kept = {
        "masters": lambda: kept.masters,
        "kahan": lambda: kept.compensation,
        "stochastic": lambda: optax.tree.get(kept, "mu"),
    }[name]()
    assert kept["w"].addressable_shards[0].data.shape == (2, 32)
    for shard in found[0]["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[0]["w"])


@pytest.mark.breadth(1)
@each_wrapper
def test_replicas_in_shard_map_round_alike_and_skip_together(name):
    inner = STORING[name](optax.sgd(1e-2))
    tx = amp.with_loss_scale(inner, amp.dynamic_loss_scale(4.0), axis_name="d")
    mesh = mesh_of_eight()
    params = parameters()
    state = tx.init(params)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("d")),
        out_specs=PartitionSpec("d"),
        check_vma=False,
    )
    def step(params: Any, state: Any, bad: jax.Array) -> Any:
        grads = jax.tree.map(lambda g: g + bad[0], gradients(0))
        params, state = step_of(tx)(params, state, grads)
        return jax.tree.map(lambda leaf: leaf[None], (params, state))

    for bad in (np.zeros(8, F32), np.float32([*[0] * 5, np.nan, 0, 0])):
        found, after = step(params, state, bad)
        expected = params
        if np.isfinite(bad).all():
            alone = amp.with_loss_scale(inner, amp.dynamic_loss_scale(4.0))
            step_alone = jax.jit(step_of(alone))
            expected, _ = step_alone(params, alone.init(params), gradients(0))
        # Of all eight replicas.
        jax.tree.map(
            lambda leaf, like: np.testing.assert_array_equal(
                leaf, np.stack([np.asarray(like)] * 8)
            ),
            found,
            expected,
        )
        scales = after.loss_scale.value
        np.testing.assert_array_equal(scales, 4.0 if np.isfinite(bad).all() else 2.0)


# What eight GPUs would send each other


def collectives(name: str) -> list[tuple[str, str, int]]:
    """The collectives of a ZeRO-1 step compiled for 8 H100s: name, dtype, elements."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=h100.H100, topology="1x1x8"
    )
    mesh = Mesh(np.array(topology.devices), ("d",))
    tx = optimizer(name)
    params = {
        "w": jax.ShapeDtypeStruct((1024, 512), BF16),
        "b": jax.ShapeDtypeStruct((512,), BF16),
    }
    state = jax.eval_shape(tx.init, params)
    apply = amp.autocast(lambda p, x: x @ p["w"] + p["b"][None], "p=bf16,c=bf16,o=f32")

    @standard()
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss_fn = lambda p: jnp.mean(apply(p, x) ** 2)  # noqa: E731
        loss, grads = amp.value_and_grad(loss_fn)(params, loss_scale=state)
        return (*step_of(tx)(params, state, grads), loss)

    replicated = NamedSharding(mesh, PartitionSpec())
    whole = jax.tree.map(lambda _: replicated, params)
    parts = split(state, mesh)
    jitted = jax.jit(
        step,
        in_shardings=(whole, parts, NamedSharding(mesh, PartitionSpec("d"))),
        out_shardings=(whole, parts, replicated),
        donate_argnums=(0, 1),
    )
    x = jax.ShapeDtypeStruct((64, 1024), F32)
    text = jitted.lower(params, state, x).compile().as_text()
    found = []
    pattern = r"= (\S.*?) (all-gather|all-reduce|reduce-scatter)(?:-start)?\("
    for shapes, collective in re.findall(pattern, text):
        for dtype, sizes in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shapes):
            elements = int(np.prod([int(n) for n in sizes.split(",") if n]))
            found.append((collective, dtype, elements))
    return found


@pytest.mark.breadth(1)
@h100.needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param("masters", marks=pytest.mark.slow), "kahan", "stochastic"]
)
def test_sharded_optimizer_state_moves_parameters_and_gradients_in_half(name):
    found = collectives(name)
    large = [each for each in found if each[2] >= 128 * 512]
    assert {collective for collective, _, _ in large} == {
        "all-gather",
        "reduce-scatter",
    }
    assert {dtype for _, dtype, _ in large} == {"bf16"}


def convolved(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in kernels:
        x = jax.lax.conv_general_dilated(
            jax.nn.relu(x),
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    return jnp.mean(x**2)


def sharded_convolutions(kind: AxisType) -> Any:
    """A step of half kernels that are split over 8 H100s, compiled."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=h100.H100, topology="1x1x8"
    )
    manual = kind == AxisType.Manual
    # Replicas under `shard_map`, else parts.
    spec = PartitionSpec() if manual else PartitionSpec(None, None, None, "d")
    mesh = Mesh(np.array(topology.devices), ("d",), axis_types=(AxisType.Auto,))
    tx = amp.with_loss_scale(
        amp.with_kahan(optax.adamw(1e-3)),
        amp.dynamic_loss_scale(),
        axis_name="d" if manual else None,
    )
    loss_fn = amp.autocast(convolved, "p=f16,c=f16,o=f32")

    @standard()
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = amp.grad(loss_fn)(params, x, loss_scale=state)
        if manual:
            grads = jax.lax.pmean(grads, "d")
        return step_of(tx)(params, state, grads)

    if manual:
        specs = (spec, spec, PartitionSpec("d"))
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(spec, spec))
    params = [jax.ShapeDtypeStruct((3, 3, 256, 256), jnp.float16)] * 3
    state = jax.eval_shape(tx.init, params)
    x = jax.ShapeDtypeStruct((16, 16, 16, 256), F32)

    def placed(leaf: Any, spec: PartitionSpec = spec) -> Any:
        spec = spec if leaf.ndim == 4 else PartitionSpec()
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )

    arguments = jax.tree.map(placed, (params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted.lower(*arguments, placed(x, PartitionSpec("d"))).compile()


@pytest.mark.slow
@h100.needs_compiler
def test_gradients_of_kernels_that_are_sharded_are_not_gathered():
    text = sharded_convolutions(AxisType.Auto).as_text()
    assert re.search(r" reduce-scatter(-start)?\(", text)
    gathers = re.findall(r" all-gather(?:-start)?\((.*?)\)", text)
    assert gathers
    assert not any("reduce-scatter" in operands for operands in gathers)


@pytest.mark.slow
@h100.needs_compiler
def test_moments_of_kernels_that_shard_map_replicates_are_not_transposed():
    program = sharded_convolutions(AxisType.Manual)
    kernels = 3 * 3 * 3 * 256 * 256
    # f32 gradients, before and after they are averaged. XLA made 23 bytes of these 8.
    assert h100.temp_bytes(program) < 9 * kernels
