"""Rows of a hidden layer that are looked up more often than there are rows.

A graph has more edges than nodes, so every row is read several times. Each program is a
lookup, `LOOKUPS`, times what reads the rows that it found, `READERS`. All begin with an
activation of a product.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, normals, row, weights

NODES, EACH = 8, 3


def graph(rng):
    """Every node has several neighbours, all different."""
    near = [rng.choice(NODES, EACH, replace=False) for _ in range(NODES)]
    again = rng.integers(NODES * EACH, size=2 * NODES * EACH)
    to = np.repeat(np.arange(NODES), EACH)
    return {
        "from": np.int32(np.concatenate(near)),
        "to": np.int32(to),
        "again": np.int32(again),
    }


def summed(values, to):
    return jax.ops.segment_sum(values, to, NODES)


def by_index(h, edges):
    return h[edges["from"]], h[edges["to"]]


def by_take(h, edges):
    return tuple(jnp.take(h, edges[end], axis=0) for end in ("from", "to"))


def by_repeat(h, edges):
    return tuple(jnp.repeat(r, EACH, axis=0) for r in (h, jnp.roll(h, 1, axis=0)))


def by_vmap(h, edges):
    each = jax.vmap(lambda i, j: (h[i], h[j]))
    return each(edges["from"], edges["to"])


@jax.jit
def by_jit(h, edges):
    return h[edges["from"]], h[edges["to"]]


def by_mean_of_neighbours(h, edges):
    mean = summed(h[edges["from"]], edges["to"]) / EACH
    return mean[edges["to"]], h[edges["from"]]


def by_softmax_of_neighbours(h, edges):
    a, to = h[edges["from"]], edges["to"]
    e = jnp.exp(a - jax.ops.segment_max(a, to, NODES)[to])
    return e / summed(e, to)[to], a


def logarithm(a, b, edges):
    return -jnp.log(1 - a)


def quotient(a, b, edges):
    return b / (1 - a)


def difference(a, b, edges):
    return a - b


def product(a, b, edges):
    return a * b


def another_lookup(a, b, edges):
    return jnp.log1p(-a[edges["again"]])


LOOKUPS = (
    by_index,
    by_take,
    by_repeat,
    by_vmap,
    by_jit,
    by_mean_of_neighbours,
    by_softmax_of_neighbours,
)
READERS = {
    logarithm: jax.nn.sigmoid,
    quotient: jax.nn.sigmoid,
    difference: lambda h: jax.nn.softplus(h + 6.0),
    product: jnp.tanh,
    another_lookup: jax.nn.sigmoid,
}


def program(lookup, read, total):
    """Returns the row of a lookup and what reads it; `total`: summed over each node."""
    activation = READERS[read]

    def fn(p, inputs):
        h = activation(inputs["x"] @ p["w"])
        out = read(*lookup(h, inputs), inputs)
        return summed(out, inputs["to"]) if total else out

    name = f"{read.__name__}_of_rows_{lookup.__name__}"
    fn.__name__ = f"sum_of_{name}" if total else name
    return row(weights(scale=2.5, w=(8, 4)), both(normals(x=(NODES, 8)), graph))(fn)


PROGRAMS = [program(lookup, read, False) for lookup in LOOKUPS for read in READERS]
PROGRAMS += [
    program(by_index, read, True) for read in READERS if read is not another_lookup
]
globals().update({each.name: each for each in PROGRAMS})
