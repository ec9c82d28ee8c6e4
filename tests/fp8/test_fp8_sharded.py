"""fp8 products on several devices: scales of shards, of whole arrays, and gathers."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp
from tests import h100
from tests.fp8 import on_h100, reference
from tests.fp8.models import aval, training_step
from tests.fp8.programs import numbers
from tests.fp8.reference import HALF_EPS, relative_error
from tests.measures import EXACTLY_AS_WRITTEN

DEVICES = 8
ROWS, K, N = 16, 32, 16
# Each device has rows of another size: the scales of shards differ.
SIZES = jnp.exp2(jnp.repeat(2.0 * jnp.arange(1.0 * DEVICES), ROWS))[:, None]
X, W = numbers(DEVICES * ROWS, K) * SIZES, numbers(K, N, seed=1)
TARGET = numbers(DEVICES * ROWS, N, seed=2)
compiled = functools.partial(jax.jit, compiler_options=EXACTLY_AS_WRITTEN)


def mesh_of_eight() -> Mesh:
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))


def loss(w, x, target):
    return jnp.sum((amp.autocast(jnp.dot, "fp8")(x, w) - target) ** 2)


def on_each_device(fn, check_vma, out_specs):
    return jax.shard_map(
        fn,
        mesh=mesh_of_eight(),
        in_specs=(P(), P("d"), P("d")),
        out_specs=out_specs,
        check_vma=check_vma,
    )


def shards():
    for i in range(DEVICES):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        yield X[rows], TARGET[rows]


@functools.cache
def gradients_of_shards():
    each = compiled(jax.grad(loss))
    return [np.asarray(each(W, *shard), np.float64) for shard in shards()]


@pytest.mark.breadth(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map_scales_are_those_of_shards(check_vma):
    forward = lambda w, x, _: amp.autocast(jnp.dot, "fp8")(x, w)  # noqa: E731
    found = compiled(on_each_device(forward, check_vma, P("d")))(W, X, TARGET)
    q = np.concatenate([reference.quantised(x).exact() for x, _ in shards()])
    expected = q @ reference.quantised(W).exact()
    np.testing.assert_allclose(found, expected, rtol=2 * HALF_EPS, atol=1e-4)
    # One scale for all is another result, in the rows of small numbers.
    whole = reference.quantised(X).exact() @ reference.quantised(W).exact()
    assert relative_error(found[:ROWS], whole[:ROWS]) > 4 * HALF_EPS


@pytest.mark.breadth(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_gradient_inside_a_shard_map_is_that_of_the_shard(check_vma):
    def gradient(w, x, target):
        own = jax.lax.pcast(w, "d", to="varying") if check_vma else w
        return jax.grad(loss)(own, x, target)[None]

    found = compiled(on_each_device(gradient, check_vma, P("d")))(W, X, TARGET)
    for shard, expected in zip(found, gradients_of_shards(), strict=True):
        assert relative_error(shard, expected) < 2 * HALF_EPS


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_gradient_through_a_shard_map_is_the_sum_of_those_of_shards(check_vma):
    def total(w, x, target):
        return jax.lax.psum(loss(w, x, target), "d")

    run = on_each_device(total, check_vma, P())
    value, found = compiled(jax.value_and_grad(run))(W, X, TARGET)
    expected = sum(gradients_of_shards())
    # Gradients of shards are added up in bf16 at the least.
    assert relative_error(found, expected) < DEVICES * HALF_EPS
    plain = sum(float(compiled(loss)(W, *shard)) for shard in shards())
    np.testing.assert_allclose(value, plain, rtol=1e-4)


# What the order of sums changes. Between devices it is one in bf16, and a number of the
# cotangent at a tie of e5m2 may go the other way: 0.25 of it.
SPECS = {
    "data": (P(), P("d"), 0.01),
    "fsdp": (P("d"), P("d"), 0.01),
    "columns": (P(None, "d"), P(), 0.01),
    "terms": (P("d"), P(None, "d"), 0.08),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize(("weights", "batch", "error"), SPECS.values(), ids=SPECS)
def test_under_jit_scales_are_those_of_whole_arrays(weights, batch, error):
    mesh = mesh_of_eight()
    run = compiled(jax.value_and_grad(loss, argnums=(0, 1)))
    x = X / SIZES
    expected = run(W, x, TARGET)
    arrays = (
        jax.device_put(W, NamedSharding(mesh, weights)),
        jax.device_put(x, NamedSharding(mesh, batch)),
        jax.device_put(TARGET, NamedSharding(mesh, P())),
    )
    found = run(*arrays)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert relative_error(a, np.asarray(b, np.float64)) < error


# What eight GPUs would send each other


ROWS_OF_BATCH = P("d")
# How the weights and the batch are sharded.
MESHES = {
    "data parallel": (P(), ROWS_OF_BATCH),
    "fsdp": (P("d"), ROWS_OF_BATCH),
    "tensor parallel": (P(None, "d"), P()),
}


@functools.cache
def program_of(mesh: str, policy: str) -> Any:
    """A training step of three layers, compiled for eight GPUs with default flags."""
    h100.skip_without_compiler()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=h100.H100, topology="1x1x8"
    )
    devices = Mesh(np.array(topology.devices), ("d",))
    weights, batch = (NamedSharding(devices, spec) for spec in MESHES[mesh])

    def model(params, x):
        for w in params:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    params, x = [aval(2048, 2048)] * 3, aval(4096, 2048)
    return (
        jax.jit(
            training_step(amp.autocast(model, policy)),
            in_shardings=([weights] * 3, batch),
            out_shardings=[weights] * 3,
            donate_argnums=0,
        )
        .lower(params, x)
        .compile()
    )


def gathered(mesh: str, policy: str) -> list[tuple[str, int]]:
    """The dtype and elements of the large arrays that a training step gathers."""
    text, found = program_of(mesh, policy).as_text(), []
    for shapes in re.findall(r"= (\S.*?) all-gather(?:-start)?\(", text):
        for dtype, sizes in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shapes):
            elements = int(np.prod([int(n) for n in sizes.split(",") if n]))
            if elements >= 2048 * 2048:
                found.append((dtype, elements))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_eight_gpus_multiply_every_product_in_8_bits(mesh):
    found = on_h100.read(program_of(mesh, "fp8"))
    # The gradient of the batch is not asked for.
    assert (found["f8"], found["others"]) == (3 * 3 - 1, 0)
    assert found["casts of f8"] == []


@pytest.mark.slow
def test_fsdp_gathers_every_weight_in_8_bits():
    mixed, fp8 = gathered("fsdp", "mixed_bfloat16"), gathered("fsdp", "fp8")
    assert {dtype for dtype, _ in mixed} == {"bf16"}
    assert {dtype for dtype, _ in fp8} <= {"f8e4m3fn", "u8"}
    # No activation is gathered.
    assert {elements for _, elements in fp8} == {2048 * 2048}
    assert len(fp8) >= 3


@pytest.mark.slow
def test_a_sharded_sequence_is_not_gathered():
    """As it would be if its dimensions were collapsed to those of a matrix."""
    h100.skip_without_compiler()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=h100.H100, topology="1x1x8"
    )
    devices = Mesh(np.array(topology.devices).reshape(2, 4), ("batch", "tokens"))
    weights, batch = (
        NamedSharding(devices, spec) for spec in (P(), P("batch", "tokens"))
    )

    def model(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    step = jax.jit(
        training_step(amp.autocast(model, "fp8")),
        in_shardings=(weights, batch),
        out_shardings=weights,
    )
    program = step.lower(aval(512, 512), aval(8, 512, 512)).compile()
    assert on_h100.read(program)["f8"] == 2
    assert "all-gather" not in program.as_text()
