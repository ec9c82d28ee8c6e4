"""Lookups of rows that repeat thousands of times: their gradient is a long sum.

A sum of n equal values in half precision stops at 2 / eps of them: at 256 in bfloat16,
and at 2048 in float16.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, constants, drawn, normals, row, weights

TABLE = normals(scale=0.5, table=(2, 4))
MODEL = both(TABLE, weights(w=(4, 4)))

# Indices of two rows: nearly all are 0, as most words of a text are its padding.
indices = drawn(lambda rng, shape: np.int32(rng.random(shape) < 1 / 16))
IDS = indices(ids=(8192,))


@row(constants(table=np.full((4, 8), 0.5)), constants(eye=np.eye(8)))
def one_row_of_a_table(p, inputs):
    ids = jnp.zeros(8192, jnp.int32)
    return (p["table"][ids] @ inputs["eye"]).mean() * 8


@row(MODEL, IDS)
def take_before_a_layer(p, inputs):
    h = jnp.take(p["table"], inputs["ids"], axis=0) @ p["w"]
    return jnp.mean(h + 0.1 * jnp.tanh(h), axis=0)


@row(MODEL, IDS)
def rows_by_at_and_get(p, inputs):
    rows = p["table"].at[inputs["ids"]].get(mode="fill", fill_value=0.0)
    return jnp.mean(jax.nn.gelu(rows @ p["w"] + 1.0), axis=0)


@row(MODEL, indices(ids=(1024,)))
def dynamic_slice_in_a_scan(p, inputs):
    def turn(total, i):
        each = jax.lax.dynamic_slice(p["table"], (i, 0), (1, 4))
        return total + each @ p["w"], None

    return jax.lax.scan(turn, jnp.zeros((1, 4)), inputs["ids"])[0] / 1024


@row(MODEL, IDS)
def lookup_of_one_word_under_vmap(p, inputs):
    def of_one(i):
        return p["table"][i] @ p["w"]

    return jnp.mean(jax.vmap(of_one)(inputs["ids"]), axis=0)


@row(MODEL, IDS)
def windows_by_dynamic_slice_under_vmap(p, inputs):
    def of_one(i):
        return jax.lax.dynamic_slice(p["table"], (i, 0), (1, 3)) @ p["w"][:3]

    return jnp.mean(jax.vmap(of_one)(inputs["ids"]), axis=(0, 1))


@row(MODEL, indices(ids=(8192, 4)))
def take_along_an_axis(p, inputs):
    rows = jnp.take_along_axis(p["table"], inputs["ids"], axis=0)
    return jnp.mean(rows @ p["w"], axis=0)


@row(MODEL, indices(ids=(2, 8192)))
def lookup_in_the_body_of_a_scan(p, inputs):
    def turn(total, ids):
        return total + jnp.mean(p["table"][ids] @ p["w"], axis=0), None

    return jax.lax.scan(turn, jnp.zeros(4), inputs["ids"])[0]


@row(both(TABLE, weights(w=(16, 4))), indices(ids=(8192, 4)))
def words_side_by_side(p, inputs):
    rows = p["table"][inputs["ids"]].reshape(8192, 16)
    return jnp.mean(rows @ p["w"], axis=0)


@row(
    both(normals(users=(2, 4), items=(2, 4)), weights(w=(4, 4), v=(4, 4))),
    indices(user=(8192,), item=(8192,)),
)
def two_towers(p, inputs):
    user = p["users"][inputs["user"]] @ p["w"]
    item = p["items"][inputs["item"]] @ p["v"]
    return jax.nn.softplus(jnp.sum(user * item, axis=1)).mean()


@row(
    both(normals(classes=(2, 4)), weights(w=(4, 4), v=(4, 4))),
    both(normals(x=(8192, 4)), indices(label=(8192,))),
)
def class_embedding_added_to_activations(p, inputs):
    h = inputs["x"] @ p["w"] + p["classes"][inputs["label"]]
    return jnp.mean(h @ p["v"] + 1.0, axis=0)


@row(MODEL, indices(ids=(16, 512)))
def words_in_a_checkpoint(p, inputs):
    @jax.checkpoint
    def layer(table, ids):
        return jax.nn.relu(table[ids] @ p["w"] + 2.0)

    return layer(p["table"], inputs["ids"]).mean(1).mean(0)


@row(MODEL, IDS)
def table_that_begins_and_ends_a_model(p, inputs):
    h = p["table"][inputs["ids"]] @ p["w"]
    logits = h @ p["table"].T
    return jnp.mean(logits + 0.1 * jax.nn.log_softmax(logits), axis=0)


@row(both(TABLE, weights(w=(3, 4, 4))), indices(ids=(16, 512)))
def words_before_a_convolution(p, inputs):
    @jax.jit
    def embedded(table):
        return jnp.take(table, inputs["ids"], axis=0)

    h = jax.lax.conv_general_dilated(
        embedded(p["table"]),
        p["w"] / 3,
        (1,),
        "SAME",
        None,
        None,
        ("NWC", "WIO", "NWC"),
    )
    return jnp.mean(h, axis=(0, 1))


@row(both(TABLE, weights(w=(4, 4))), indices(ids=(2, 8192)))
def lookup_in_a_fori_loop(p, inputs):
    def turn(i, total):
        return total + jnp.mean(p["table"][inputs["ids"][i]] @ p["w"], axis=0)

    return jax.lax.fori_loop(0, 2, turn, jnp.zeros(4)) / 2


@row(both(normals(bias=(2, 2)), weights(q=(4, 4), k=(4, 4))), normals(x=(64, 16, 4)))
def bias_by_relative_position(p, inputs):
    """Raffel et al. 2020, arXiv:1910.10683, section 2.1, with two buckets."""
    q, k = (inputs["x"] @ p[n] for n in "qk")
    q, k = (t.reshape(64, 16, 2, 2).swapaxes(1, 2) for t in (q, k))
    bucket = jnp.int32(jnp.abs(jnp.arange(16)[:, None] - jnp.arange(16)[None]) > 4)
    bias = jnp.moveaxis(p["bias"][bucket], 2, 0)[None]
    scores = q @ k.swapaxes(2, 3) + bias
    return jnp.mean(jax.nn.sigmoid(scores), axis=(0, 2, 3))


@row(weights(w=(4, 4)), normals(x=(16, 4)))
def hub_of_a_graph(p, inputs):
    """Of activations: an edge to the first node for each of 8192 messages."""
    h = inputs["x"] @ p["w"]
    messages = h[jnp.zeros(8192, jnp.int32)]
    return jnp.mean(messages + jnp.tanh(messages), axis=0)


@row(weights(w=(4, 4), v=(4, 4)), both(normals(x=(2, 4)), indices(sender=(8192,))))
def hub_before_a_layer(p, inputs):
    h = inputs["x"] @ p["w"]
    return jnp.mean(h[inputs["sender"]] @ p["v"] + 1.0, axis=0)


@row(MODEL, IDS)
def lookup_by_a_product(p, inputs):
    """A near miss: a product sums in f32, whatever its operands are."""
    rows = jax.nn.one_hot(inputs["ids"], 2) @ p["table"]
    return jnp.mean(rows @ p["w"], axis=0)


@row(both(normals(bias=(4,)), weights(w=(4, 4), v=(4, 4))), normals(x=(8192, 4)))
def bias_of_many_rows(p, inputs):
    """A near miss: the gradient of a bias is a sum, and no lookup."""
    h = inputs["x"] @ p["w"] + jnp.broadcast_to(p["bias"], (8192, 4))
    return jnp.mean(jnp.sin(h @ p["v"] + 1.0), axis=0)
