"""Updates of low-precision moments, compiled: in two passes, in few bytes."""

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
from jmp_amp.plan.program import jaxprs
from jmp_amp.training.state_codes import decoded, encoded_like, is_code
from tests import h100

KEY = jax.random.key(0)
WAYS: dict[str, Any] = {
    "f32": lambda tx: tx,
    "bfloat16": amp.with_low_precision_state,
    "bfloat16, key": functools.partial(amp.with_low_precision_state, key=KEY),
    "float8": functools.partial(amp.with_low_precision_state, dtype="float8"),
    "float8, key": functools.partial(
        amp.with_low_precision_state, dtype="float8", key=KEY
    ),
}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
    "muon": lambda: optax.contrib.muon(1e-2),
}
# Bytes moved, of those with float32 moments: the contract has 0.75 and 0.85.
BOUNDS = dict.fromkeys(("bfloat16", "bfloat16, key"), 0.75)
BOUNDS |= dict.fromkeys(("float8", "float8, key"), 0.85)
pytestmark = pytest.mark.usefixtures("optax_promotion")


def parameters() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"w": (64, 128), "odd": (37, 145)}
    return {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for name, shape in shapes.items()
    }


# The program of an H100


@functools.cache
def figures(way: str, masters: bool) -> dict[str, Any]:
    tx = WAYS[way](optax.adamw(1e-3))
    shapes: Any = low_precision_update.parameters(1024, 2)
    if masters:
        tx = amp.with_master_weights(tx)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes
        )

    def read(program: Any) -> dict[str, Any]:
        work = roofline.totals(roofline.schedule(program.as_text()).kernels)
        moved = work["bytes_moved"]
        return {"temp": h100.temp_bytes(program), "moved": moved}

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
@pytest.mark.parametrize("masters", [False, True])
def test_an_update_moves_fewer_bytes_and_needs_no_memory(way, masters):
    found, exact = figures(way, masters), figures("f32", masters)
    shapes = low_precision_update.parameters(1024, 2)
    size = sum(leaf.size for leaf in shapes.values())
    assert found["moved"] <= BOUNDS[way] * exact["moved"]
    # Of float32 moments, 8 bytes a parameter, a 25th at most: scales, and maxima.
    assert found["temp"] - exact["temp"] <= 8 * size / 25


# Two passes


def one_pass(inner: Any, grads: Any, state: Any, params: Any) -> Any:
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
def test_two_passes_return_what_one_does_bit_for_bit(name):
    inner, params = OPTIMIZERS[name](), parameters()
    tx = WAYS["float8"](inner)
    state = tx.init(params)
    step, expected_of = jax.jit(tx.update), jax.jit(functools.partial(one_pass, inner))
    for _ in range(3):
        grads = jax.tree.map(jnp.sin, params)
        expected = expected_of(grads, state, params)
        updates, state = step(grads, state, params)
        chex.assert_trees_all_equal((updates, state.inner_state), expected)


def counts(fn: Any, *args: Any) -> dict[str, int]:
    """How often each primitive is in a program, bodies of loops once."""
    found: dict[str, int] = {}

    def count(body: jaxprs.Body) -> None:
        for eqn in body.jaxpr.eqns:
            found[eqn.primitive.name] = found.get(eqn.primitive.name, 0) + 1
            for inner in jaxprs.inner_bodies(eqn):
                count(inner.body)

    with jax.numpy_rank_promotion("allow"):
        count(jaxprs.body_of(jax.make_jaxpr(fn)(*args)))
    return found


@pytest.mark.parametrize("name", ["clipped", "muon"])
def test_products_and_sums_are_not_computed_twice(name):
    inner, params = OPTIMIZERS[name](), parameters()
    tx = WAYS["float8"](inner)
    found = counts(jax.jit(tx.update), params, tx.init(params), params)
    expected = counts(jax.jit(inner.update), params, inner.init(params), params)
    for primitive in ("dot_general", "reduce_sum", "while", "scan"):
        assert found.get(primitive, 0) == expected.get(primitive, 0)
    # What is elementwise is.
    assert found["mul"] > 1.5 * expected["mul"]


def test_a_first_state_is_the_same_under_jit():
    # And the compiler does not compute it: that would take minutes.
    tx, params = WAYS["float8"](optax.adamw(1e-2)), parameters()
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
