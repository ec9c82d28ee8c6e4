"""Updates of low-precision moments, compiled: in few bytes, in few kernels."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jmp_amp as amp
from examples.benchmarks import low_precision_update, roofline
from jmp_amp.training.low_precision_state import (
    decoded,
    encoded_like,
    is_code,
)
from tests import h100

KEY = jax.random.key(0)
WAYS: dict[str, Any] = {
    "f32": lambda tx: tx,
    "bfloat16": amp.with_low_precision_state,
    "bfloat16, key": functools.partial(amp.with_low_precision_state, key=KEY),
    "float8": functools.partial(amp.with_low_precision_state, dtype="float8"),
}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
    "muon": lambda: optax.contrib.muon(1e-2),
}
# Bytes moved, of those with float32 moments: the contract.
BOUNDS = {"bfloat16": 0.75, "bfloat16, key": 0.75, "float8": 0.80}
pytestmark = pytest.mark.usefixtures("optax_promotion")


def parameters() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"w": (64, 128), "odd": (37, 145)}
    return {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for name, shape in shapes.items()
    }


# The program of an H100

SHAPES: Any = {
    "GPT": low_precision_update.parameters(1024, 2),
    # No multiple of 256, few and many elements.
    "odd": {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in {"few": (1000, 1001), "many": (32769, 1025)}.items()
    },
}


@functools.cache
def figures(way: str, masters: bool, of: str = "GPT") -> dict[str, Any]:
    tx, shapes = WAYS[way](optax.adamw(1e-3)), SHAPES[of]
    if masters:
        tx = amp.with_master_weights(tx)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes
        )

    def read(program: Any) -> dict[str, Any]:
        work = roofline.totals(roofline.schedule(program.as_text()).kernels)
        moved = work["bytes_moved"]
        temp, kernels = h100.temp_bytes(program), work["kernels"]
        return {"temp": temp, "moved": moved, "kernels": kernels}

    args = (shapes, jax.eval_shape(tx.init, shapes), shapes)
    return h100.figures(
        low_precision_update.update_of(tx),
        *args,
        read=read,
        donate_argnums=(0, 1),
    )


@pytest.mark.breadth(2)
@h100.needs_compiler
@pytest.mark.parametrize("way", BOUNDS)
@pytest.mark.parametrize(
    ("masters", "of"), [(False, "GPT"), (True, "GPT"), (False, "odd")]
)
def test_an_update_moves_fewer_bytes_and_needs_no_memory(way, masters, of):
    found, exact = figures(way, masters, of), figures("f32", masters, of)
    sizes = [leaf.size for leaf in SHAPES[of].values()]
    assert found["moved"] <= BOUNDS[way] * exact["moved"]
    # Of float32 moments, 8 bytes a parameter, a 25th at most: scales, and maxima.
    assert found["temp"] - exact["temp"] <= 8 * sum(sizes) / 25
    # 4 for each moment.
    moments = 2 * sum(size >= 4096 for size in sizes)
    assert found["kernels"] - exact["kernels"] <= 4 * moments


# What it stores


def by_hand(inner: Any, grads: Any, state: Any, params: Any) -> Any:
    """The update with codes that are made of moments in float32."""
    updates, new = inner.update(grads, decoded(state.inner_state), params)
    nodes, structure = jax.tree.flatten(state.inner_state, is_leaf=is_code)
    leaves = [
        encoded_like(node, leaf) if is_code(node) else leaf
        for node, leaf in zip(nodes, jax.tree.leaves(new), strict=True)
    ]
    return updates, structure.unflatten(leaves)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_stores_the_codes_of_new_moments_bit_for_bit(name):
    inner, params = OPTIMIZERS[name](), parameters()
    tx = WAYS["float8"](inner)
    state = tx.init(params)
    step, expected_of = jax.jit(tx.update), jax.jit(functools.partial(by_hand, inner))
    for _ in range(3):
        grads = jax.tree.map(jnp.sin, params)
        expected = expected_of(grads, state, params)
        updates, state = step(grads, state, params)
        chex.assert_trees_all_equal((updates, state.inner_state), expected)


def test_a_first_state_is_the_same_under_jit():
    # And the compiler does not compute it: that would take minutes.
    tx = WAYS["float8"](optax.adamw(1e-2))
    for params in parameters().values():
        init = jax.jit(tx.init).lower(params).compile()
        chex.assert_trees_all_equal(init(params), tx.init(params))
        assert " reduce" in init.as_text()


def test_members_of_a_vmap_and_of_a_shard_map_have_their_own_codes():
    tx = WAYS["float8"](optax.adam(1e-2))
    weights = np.asarray(parameters()["w"])
    params = np.stack([weights, 2 * weights])
    states = jax.jit(jax.vmap(tx.init))(params)
    found = jax.jit(jax.vmap(tx.update))(params, states, params)
    update = jax.jit(tx.update)
    expected = [update(member, tx.init(member), member) for member in params]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
    chex.assert_trees_all_equal(found[1].inner_state, stacked[1].inner_state)
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def member(param: jax.Array) -> jax.Array:
        _, state = tx.update(param, tx.init(param), param)
        return state.inner_state[0].mu.codes

    spec = PartitionSpec("d")
    mapped = jax.shard_map(member, mesh=mesh, in_specs=spec, out_specs=spec)
    codes = jax.jit(mapped)(params.reshape(-1, 128))
    np.testing.assert_array_equal(
        codes.reshape(2, 64, 128), found[1].inner_state[0].mu.codes
    )
