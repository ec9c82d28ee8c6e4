"""Programs of 8 devices: sharded maps, and what the devices tell each other."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.constructs.loops import residual, turned
from tests.constructs.row import row
from tests.rounding import X

AUTO = (jax.sharding.AxisType.Auto,)
P = jax.sharding.PartitionSpec


@functools.cache
def mesh(shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=AUTO * len(names))


def psum_block(x, w):
    return lax.psum(jnp.tanh(x @ w) @ w, "data")


def pmean_block(x, w):
    return lax.pmean(jnp.tanh(x @ w) @ w, "data")


def gathered_block(x, w):
    return lax.pmean(jnp.sum(lax.all_gather(jnp.tanh(x @ w), "data") @ w, 0), "data")


def permuted_block(x, w):
    h = lax.ppermute(jnp.tanh(x @ w), "data", [(i, (i + 1) % 8) for i in range(8)])
    return lax.pmean(h @ w, "data")


def scattered_block(x, w):
    h = lax.psum_scatter(jnp.tanh(x @ w).T, "data", tiled=True)
    return lax.psum(jnp.square(h.T) @ jnp.ones((2, 16)), "data")


def switched_block(x, w):
    h = lax.all_to_all(jnp.tanh(x @ w).reshape(8, 2), "data", 0, 0)
    return lax.psum(h.reshape(1, 16) @ w, "data")


def indexed_block(x, w):
    index = lax.axis_index("data").astype(jnp.float32)
    return lax.psum(jnp.tanh(x @ w) * (1 + index / 8) @ w, "data")


def highest_block(x, w):
    h = jnp.tanh(x @ w)
    return lax.psum(h, "data") + lax.stop_gradient(
        lax.pmax(lax.stop_gradient(h), "data")
    )


def scanning_block(x, w):
    h, _ = lax.scan(lambda h, _: (residual(h, w), None), x @ w, None, length=2)
    return lax.psum(h @ w, "data")


def sharded(block, check_vma=True, **options):
    options = {"mesh": mesh(), "out_specs": P(), **options}
    return jax.shard_map(
        block, in_specs=(P("data"), P()), check_vma=check_vma, **options
    )


def of_rows(block, check_vma=True, **options):
    return lambda w: sharded(block, check_vma, **options)(X, w)


def nested(x, w):
    inner = jax.shard_map(
        lambda x, w: lax.psum(jnp.tanh(x @ w), "model"),
        in_specs=(P(None, "model"), P("model")),
        out_specs=P(),
        axis_names={"model"},
    )
    return lax.psum(inner(x, w) @ w, "data")


def in_scan(w):
    block = sharded(
        lambda x, w: lax.all_gather(jnp.tanh(x @ w), "data", tiled=True), False
    )
    return turned(w, 2, block)


def of_an_axis(w):
    def row(x):
        h = jnp.tanh(x @ w)
        return (h - lax.pmean(h, "batch")) / lax.psum(1.0, "batch") @ w

    return jax.vmap(row, axis_name="batch")(X)


BLOCKS = {
    "psum": psum_block,
    "pmean": pmean_block,
    "all_gather": gathered_block,
    "ppermute": permuted_block,
    "psum_scatter": scattered_block,
    "all_to_all": switched_block,
    "axis_index": indexed_block,
    "pmax": highest_block,
    "shard_map_of_scan": scanning_block,
}
TWO_AXES = (4, 2), ("data", "model")
ROWS = {
    **{name: of_rows(block) for name, block in BLOCKS.items()},
    "psum": row(of_rows(psum_block), "half"),
    "pmean": row(of_rows(pmean_block), "slow"),
    **{
        f"{name}_unchecked": row(of_rows(block, False), "slow")
        for name, block in BLOCKS.items()
    },
    "shard_map_in_scan": in_scan,
    "shard_map_of_an_axis": lambda w: of_rows(
        psum_block, mesh=mesh(*TWO_AXES), axis_names={"data"}
    )(w),
    # JAX itself cannot compile the gradient of this one.
    "shard_map_of_shard_map": row(
        lambda w: of_rows(nested, mesh=mesh(*TWO_AXES), axis_names={"data"})(w), "value"
    ),
    "vmap_of_shard_map": lambda w: jax.vmap(lambda x: sharded(psum_block)(x, w))(
        jnp.stack([X, 2 * X])
    ),
    "vmap_with_an_axis": of_an_axis,
}
