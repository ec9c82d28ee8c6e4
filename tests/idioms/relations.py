"""Pairs, neighbours, copies and paths of hidden rows, before and between products.

What reads them takes differences, logarithms of what is left of a probability, ratios
and running products, as decoders of graphs, trees and codes do.
"""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, integers, normals, row, uniform, weights

NODES = normals(x=(12, 8))
EDGES = both(NODES, integers(12, i=(40,), j=(40,)))
ONE = weights(w=(8, 1))
MODEL = weights(w=(8, 16), v=(16, 4))


def shares(p, inputs, offset=3.0):
    return jax.nn.sigmoid(inputs["x"] @ p["w"] + offset)


@row(ONE, NODES)
def pairs_that_are_not_both_on(p, inputs):
    on = shares(p, inputs, 5.0)[:, 0]
    return -jnp.log(1.0 - on[:, None] * on[None])


@row(weights(w=(8, 4)), NODES)
def probabilities_tiled_over_draws(p, inputs):
    on = jnp.tile(shares(p, inputs, 6.0), (5, 1))
    return -jnp.log(1.0 - on).reshape(5, 12, 4).mean(0)


@row(weights(w=(8, 4)), both(NODES, integers(2, y=(5, 12, 4))))
def probabilities_broadcast_to_annotators(p, inputs):
    on = jnp.broadcast_to(shares(p, inputs, 6.0)[None], (5, 12, 4))
    y = inputs["y"].astype(jnp.float32)
    return -(y * jnp.log(on) + (1 - y) * jnp.log(1.0 - on)).mean()


@row(weights(k=(3, 3, 2, 1)), both(normals(x=(2, 6, 6, 2)), integers(2, y=(2, 12, 12))))
def mask_enlarged_by_repetition(p, inputs):
    h = jax.lax.conv_general_dilated(
        inputs["x"], p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    q = jax.nn.sigmoid(h[..., 0] + 3.0)
    q = jnp.repeat(jnp.repeat(q, 2, axis=1), 2, axis=2)
    return -jnp.where(inputs["y"] > 0, jnp.log(q), jnp.log(1.0 - q)).mean((1, 2))


@row(weights(k=(3, 3, 2, 1)), both(normals(x=(2, 6, 6, 2)), integers(2, y=(2, 12, 12))))
def mask_enlarged_by_a_resize(p, inputs):
    h = jax.lax.conv_general_dilated(
        inputs["x"], p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    q = jax.image.resize(jax.nn.sigmoid(h[..., 0] + 3.0), (2, 12, 12), "nearest")
    return -jnp.where(inputs["y"] > 0, jnp.log(q), jnp.log(1.0 - q)).mean((1, 2))


@row(MODEL, NODES)
def log_ratios_of_all_classes(p, inputs):
    q = jax.nn.softmax(jnp.tanh(inputs["x"] @ p["w"]) @ p["v"])
    return jnp.log(q[:, :, None] / q[:, None, :]) ** 2


@row(weights(w=(8, 16), v=(32, 8)), NODES)
def edges_of_nearest_neighbours(p, inputs):
    """Wang et al. 2018, arXiv:1801.07829: each point and how its neighbours differ."""
    h = jax.nn.relu(inputs["x"] @ p["w"] + 4.0)
    far = ((inputs["x"][:, None] - inputs["x"][None]) ** 2).sum(-1)
    _, near = jax.lax.top_k(-far, 4)
    apart = h[near] - h[:, None]
    both_parts = jnp.concatenate([jnp.broadcast_to(h[:, None], (12, 4, 16)), apart], -1)
    return jax.nn.relu(both_parts @ p["v"]).max(1)


@row(weights(w=(8, 3), v=(3, 16)), both(EDGES, normals(at=(12, 3))))
def neighbours_relative_to_moved_centres(p, inputs):
    at = 10.0 * inputs["at"] + jnp.tanh(inputs["x"] @ p["w"])
    local = (at[inputs["j"]] - at[inputs["i"]]) / 5.0
    message = jax.nn.relu(local @ p["v"])
    return jnp.maximum(jax.ops.segment_max(message, inputs["i"], 12), 0.0)


@row(weights(w=(8, 4)), EDGES)
def links_with_negative_samples(p, inputs):
    h = jnp.tanh(inputs["x"] @ p["w"]) * 2.0
    score = (h[inputs["i"]] * h[inputs["j"]]).sum(1)
    on = jax.nn.sigmoid(score)
    return -jnp.log(on[:20]).mean() - jnp.log(1.0 - on[20:]).mean()


@row(weights(w=(8, 6), r=(5, 6)), both(EDGES, integers(5, k=(40,))))
def translations_of_a_knowledge_graph(p, inputs):
    """Bordes et al. 2013: a head plus a relation less a tail."""
    h = 3.0 + inputs["x"] @ p["w"]
    h = h / jnp.linalg.norm(h, axis=1, keepdims=True)
    apart = h[inputs["i"]] + 0.1 * p["r"][inputs["k"]] - h[inputs["j"]]
    far = jnp.sqrt((apart**2).sum(1) + 1e-6)
    return jax.nn.relu(1.0 + far[:20] - far[20:]).mean(), far


@row(weights(w=(8, 8), r=(5, 4)), both(EDGES, integers(5, k=(40,))))
def rotations_of_a_knowledge_graph(p, inputs):
    """Sun et al. 2019, arXiv:1902.10197."""
    a, b = jnp.split(jnp.tanh(inputs["x"] @ p["w"]), 2, axis=1)
    c, s = jnp.cos(p["r"]), jnp.sin(p["r"])
    i, j, k = inputs["i"], inputs["j"], inputs["k"]
    real = a[i] * c[k] - b[i] * s[k] - a[j]
    imaginary = a[i] * s[k] + b[i] * c[k] - b[j]
    return jnp.sqrt(real**2 + imaginary**2 + 1e-4).sum(1)


@row(weights(w=(8, 15)), both(normals(x=(16, 8)), integers(8, y=(16,))))
def path_through_a_tree_of_words(p, inputs):
    """A hierarchical softmax: a leaf is the product of the turns to it."""
    right = jax.nn.sigmoid(3.0 * (inputs["x"] @ p["w"]))
    leaf = inputs["y"][:, None] + 8
    above = leaf // jnp.array([[8, 4, 2]])
    bit = (leaf // jnp.array([[4, 2, 1]])) % 2
    turn = jnp.take_along_axis(right, above, axis=1)
    return -jnp.log(jnp.where(bit == 1, turn, 1.0 - turn)).sum(1)


@row(weights(w=(8, 7), v=(8, 4)), normals(x=(16, 8)))
def soft_decision_tree(p, inputs):
    right = jax.nn.sigmoid(2.0 * (inputs["x"] @ p["w"]))
    leaf = jnp.arange(8)
    reach = jnp.ones((16, 8))
    for depth in range(3):
        node = 2**depth - 1 + leaf // 2 ** (3 - depth)
        bit = leaf // 2 ** (2 - depth) % 2
        turn = right[:, node]
        reach = reach * jnp.where(bit == 1, turn, 1.0 - turn)
    return reach @ p["v"], -(reach * jnp.log(reach + 1e-9)).sum(1)


@row(weights(w=(8, 1)), both(normals(x=(16, 8)), integers(16, check=(10, 4))))
def messages_of_a_parity_check(p, inputs):
    """Belief propagation of a code: nearly certain bits, multiplied."""
    belief = 4.0 + 2.0 * (inputs["x"] @ p["w"])[:, 0]
    parts = jnp.tanh(belief / 2)[inputs["check"]]
    others = jnp.prod(parts, axis=1, keepdims=True) / parts
    message = 2 * jnp.arctanh(jnp.clip(others, -0.9999, 0.9999))
    return jax.ops.segment_sum(message.ravel(), inputs["check"].ravel(), 16) + belief


@row(weights(w=(8, 2), v=(2, 2)), EDGES)
def belief_without_the_message_of_its_reader(p, inputs):
    i, j = inputs["i"], inputs["j"]
    belief = inputs["x"] @ p["w"]
    message = jnp.zeros((40, 2))
    for _ in range(2):
        total = belief + jax.ops.segment_sum(message, j, 12)
        cavity = total[i] - jnp.roll(message, 1, axis=0)
        message = jnp.log(jnp.exp(jnp.tanh(cavity)) @ jnp.exp(p["v"]))
        message = message - message.mean(1, keepdims=True)
    return jax.nn.softmax(belief + jax.ops.segment_sum(message, j, 12))


@row(weights(w=(8, 1), v=(12, 4)), both(EDGES, uniform(0.5, 0.99, rate=(40,))))
def infection_by_any_neighbour(p, inputs):
    ill = shares(p, inputs, 2.0)[:, 0]
    escaped = jnp.log(1.0 - inputs["rate"] * ill[inputs["i"]])
    spared = jnp.exp(jax.ops.segment_sum(escaped, inputs["j"], 12))
    new = (1.0 - ill) * (1.0 - spared)
    return new @ p["v"], spared


@row(weights(w=(8, 1), f=(1, 8), v=(8, 4)), EDGES)
def time_since_the_last_event(p, inputs):
    time = 100.0 + jnp.cumsum(jax.nn.softplus(inputs["x"] @ p["w"]), axis=0)
    since = time[inputs["i"]] - time[inputs["j"]]
    return jnp.cos(since @ p["f"]) @ p["v"], jnp.exp(-jnp.abs(since))


@row(weights(w=(8, 1), v=(8, 1)), normals(x=(20, 8)))
def intensity_that_excites_itself(p, inputs):
    """Hawkes 1971: the likelihood of events at predicted times."""
    gap = jax.nn.softplus(inputs["x"] @ p["w"])[:, 0]
    size = jax.nn.softplus(inputs["x"] @ p["v"])[:, 0]
    time = 50.0 + jnp.cumsum(gap)
    apart = time[:, None] - time[None]
    kick = jnp.where(jnp.tril(jnp.ones((20, 20)), -1) > 0, jnp.exp(-apart), 0.0)
    rate = 0.2 + kick @ size
    whole = 0.2 * (time[-1] - time[0]) + (size * (1 - jnp.exp(time - time[-1]))).sum()
    return jnp.log(rate), whole


@row(MODEL, both(normals(x=(32, 8)), integers(6, group=(32,))))
def deviations_from_the_mean_of_a_group(p, inputs):
    h = jax.nn.relu(inputs["x"] @ p["w"] + 4.0)
    g = inputs["group"]
    count = jnp.maximum(jax.ops.segment_sum(jnp.ones(32), g, 6), 1.0)[:, None]
    mean = jax.ops.segment_sum(h, g, 6) / count
    apart = h - mean[g]
    var = jax.ops.segment_sum(apart**2, g, 6) / count
    return (apart / jnp.sqrt(var + 1e-2)[g]) @ p["v"]


@row(weights(w=(8, 6)), both(NODES, integers(6, at=(15,))))
def columns_looked_up_again(p, inputs):
    return -jnp.log(1.0 - shares(p, inputs, 5.0)[:, inputs["at"]]).mean(1)


@row(weights(w=(8, 6)), both(NODES, integers(6, at=(12, 15))))
def entries_taken_along_an_axis(p, inputs):
    on = jnp.take_along_axis(shares(p, inputs, 5.0), inputs["at"], axis=1)
    return on / (1.0 - on), -jnp.log(1.0 - on).sum(1)


@row(weights(w=(8, 4)), both(NODES, integers(12, i=(40,))))
def rows_by_a_product_with_one_hot_rows(p, inputs):
    on = jax.nn.one_hot(inputs["i"], 12) @ shares(p, inputs, 3.0)
    return on / (1.05 - on)


@row(ONE, EDGES)
def edges_read_one_by_one_in_a_scan(p, inputs):
    on = shares(p, inputs, 6.0)[:, 0]

    def turn(total, edge):
        left = jnp.log(1.0 - on[edge[0]]) - jnp.log(1.0 - on[edge[1]])
        return total + left**2, left

    edges = jnp.stack([inputs["i"], inputs["j"]], axis=1)
    return jax.lax.scan(turn, jnp.float32(0.0), edges)


@row(weights(w=(8, 4)), EDGES)
def edges_in_a_checkpoint(p, inputs):
    @jax.checkpoint
    def read(on):
        return -jnp.log(1.0 - on[inputs["i"]]) * on[inputs["j"]]

    return read(shares(p, inputs, 6.0))


@row(weights(w=(8, 4)), both(NODES, integers(8, start=(10,))))
def windows_that_overlap(p, inputs):
    on = shares(p, inputs, 6.0)
    cut = jax.vmap(lambda s: jax.lax.dynamic_slice_in_dim(on, s, 5))
    return jnp.log1p(-cut(inputs["start"])).sum(1)


@row(weights(w=(8, 4)), both(NODES, normals(y=(12, 4))))
def copies_side_by_side(p, inputs):
    on = shares(p, inputs, 6.0)
    twice = jnp.concatenate([on, on[::-1]], axis=1)
    return -jnp.log(1.0 - twice), jnp.stack([on, on, on]).sum(0) * inputs["y"]


@row(weights(w=(8, 6), v=(8, 6)), both(normals(x=(6, 8)), integers(6, path=(40,))))
def transitions_along_a_path(p, inputs):
    step = jax.nn.softmax(2.0 * (inputs["x"] @ p["w"]), axis=1)
    base = jax.nn.softmax(2.0 * (inputs["x"] @ p["v"]), axis=1)
    a, b = inputs["path"][:-1], inputs["path"][1:]
    return jnp.log(step[a, b]) - jnp.log(base[a, b]), -jnp.log(1.0 - step[a, b]).sum()


@row(weights(w=(8, 1), v=(20, 4)), both(normals(x=(30, 8)), integers(10, age=(12,))))
def survival_from_a_table_of_ages(p, inputs):
    hazard = shares(p, inputs, -3.0)[:, 0]
    at = inputs["age"][:, None] + jnp.arange(20)[None]
    alive = jnp.cumprod(1.0 - hazard[at], axis=1)
    return alive @ p["v"], jnp.log(1.0 - alive)


@row(weights(w=(8, 16), g=(8, 1), v=(16, 4)), EDGES)
def gates_looked_up_for_messages(p, inputs):
    gate = jax.nn.sigmoid(inputs["x"] @ p["g"] + 5.0)
    h = inputs["x"] @ p["w"]
    message = (1.0 - gate[inputs["i"]]) * h[inputs["j"]]
    return (100.0 * jax.ops.segment_sum(message, inputs["i"], 12)) @ p["v"]


@row(weights(w=(8, 16), v=(16, 4)), EDGES)
def laplacian_between_two_layers(p, inputs):
    h = jax.nn.softplus(inputs["x"] @ p["w"] + 5.0)
    flow = h[inputs["i"]] - h[inputs["j"]]
    return jax.ops.segment_sum(flow, inputs["i"], 12) @ p["v"]


@row(weights(w=(8, 16), v=(16, 4)), EDGES)
def normalised_laplacian_between_two_layers(p, inputs):
    h = jax.nn.relu(inputs["x"] @ p["w"] + 5.0)
    i, j = inputs["i"], inputs["j"]
    degree = jax.ops.segment_sum(jnp.ones(40), i, 12) + 1.0
    mean = jax.ops.segment_sum(h[j] / jnp.sqrt(degree[i] * degree[j])[:, None], i, 12)
    return jnp.tanh((h - mean) @ p["v"])


@row(weights(w=(8, 16), v=(16, 4)), normals(x=(3, 16, 8)))
def next_frame_less_this_one_for_a_product(p, inputs):
    h = jax.nn.softplus(inputs["x"] @ p["w"] + 6.0)
    return (h[:, 1:] - h[:, :-1]) @ p["v"]


@row(weights(w=(8, 16), v=(16, 4)), normals(x=(12, 8), y=(12, 16)))
def residual_of_a_reconstruction_for_a_product(p, inputs):
    target = 8.0 + 0.5 * inputs["y"]
    return (target - (8.0 + 0.5 * jnp.tanh(inputs["x"] @ p["w"]))) @ p["v"]


@row(weights(w=(8, 16), q=(16, 4), v=(16, 4)), normals(x=(12, 8)))
def predictive_coding_of_two_layers(p, inputs):
    """The error of a layer, explained by the layer above it, goes up."""
    h = jnp.tanh(inputs["x"] @ p["w"])
    for _ in range(2):
        above = jnp.tanh(h @ p["q"])
        error = h - above @ p["q"].T
        h = h - 0.1 * error
    return error @ p["v"], (error**2).sum(1)
