"""Networks whose turns are tokens or frames: cells, memories, decoders."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tests.idioms.row import both, normals, row, uniform, weights

FRAMES = normals(x=(24, 8))


@row(weights(w=(8, 16), u=(16, 16), out=(16, 4)), FRAMES)
def elman_network(p, inputs):
    """The plainest recurrent network, read at its end."""

    def turn(h, x):
        return jnp.tanh(x @ p["w"] + h @ p["u"]), None

    return jax.lax.scan(turn, jnp.zeros(16), inputs["x"])[0] @ p["out"]


def gru(p, h, x):
    """A gated recurrent unit: Cho et al. 2014."""
    z = jax.nn.sigmoid(x @ p["xz"] + h @ p["hz"])
    r = jax.nn.sigmoid(x @ p["xr"] + h @ p["hr"])
    new = jnp.tanh(x @ p["xn"] + (r * h) @ p["hn"])
    return (1 - z) * new + z * h


GRU = weights(
    xz=(8, 8), hz=(8, 8), xr=(8, 8), hr=(8, 8), xn=(8, 8), hn=(8, 8), out=(8, 8)
)


@row(GRU, FRAMES)
def gated_units_that_stack_their_states(p, inputs):
    def turn(h, x):
        h = gru(p, h, x)
        return h, h @ p["out"]

    return jax.lax.scan(turn, jnp.zeros(8), inputs["x"])[1]


@row(GRU, normals(x=(4, 20, 8)))
def gated_units_under_vmap(p, inputs):
    """The loop is written for one sequence and mapped over a batch."""

    def encode(x):
        return jax.lax.fori_loop(0, 20, lambda i, h: gru(p, h, x[i]), jnp.zeros(8))

    return jax.vmap(encode)(inputs["x"])


@row(GRU, FRAMES)
def gated_units_in_both_directions(p, inputs):
    def turn(h, x):
        h = gru(p, h, x)
        return h, h

    _, left = jax.lax.scan(turn, jnp.zeros(8), inputs["x"])
    _, right = jax.lax.scan(turn, jnp.zeros(8), inputs["x"], reverse=True)
    return (left + right) @ p["out"]


@row(weights(w=(2, 16, 32)), FRAMES)
def two_layers_of_lstm(p, inputs):
    """Hochreiter and Schmidhuber 1997: a dictionary of carries, two layers a turn."""

    def cell(w, h, c, x):
        i, f, g, o = jnp.split(jnp.concatenate([x, h]) @ w, 4)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def turn(carry, x):
        h, c = list(carry["h"]), list(carry["c"])
        for layer in range(2):
            x, c[layer] = cell(p["w"][layer], h[layer], c[layer], x)
            h[layer] = x
        return {"h": jnp.stack(h), "c": jnp.stack(c)}, x

    start = {"h": jnp.zeros((2, 8)), "c": jnp.zeros((2, 8))}
    return jax.lax.scan(turn, start, inputs["x"])[1]


class Reader(nn.Module):
    """An LSTM of flax over time, and a head."""

    @nn.compact
    def __call__(self, x):
        kind = x.dtype
        cell = nn.OptimizedLSTMCell(8, param_dtype=kind, name="cell")
        head = nn.Dense(4, param_dtype=kind, name="head")
        return nn.Sequential([nn.RNN(cell), nn.relu, head])(x)


def reader_params(rng):
    shapes = {"cell": {}, "head": {"kernel": (8, 4), "bias": (4,)}}
    for gate in "ifgo":
        shapes["cell"][f"i{gate}"] = {"kernel": (8, 8)}
        shapes["cell"][f"h{gate}"] = {"kernel": (8, 8), "bias": (8,)}
    return jax.tree.map(
        lambda shape: np.float32(rng.normal(scale=0.35, size=shape)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@row(reader_params, FRAMES)
def lstm_of_flax(p, inputs):
    return Reader().apply({"params": p}, inputs["x"][None])


@row(weights(w=(8, 32), u=(32, 32), out=(32, 3)), normals(x=(40, 8)))
def echo_state_reservoir(p, inputs):
    """Jaeger 2001: leaky units, random and fixed, and a trained readout."""

    def turn(h, x):
        h = 0.7 * h + 0.3 * jnp.tanh(x @ p["w"] + 0.9 * (h @ p["u"]))
        return h, h @ p["out"]

    return jax.lax.scan(turn, jnp.zeros(32), inputs["x"])[1]


QKV = weights(q=(8, 8), k=(8, 8), v=(8, 8), o=(8, 8))


@row(QKV, FRAMES)
def linear_attention_in_turns(p, inputs):
    """Katharopoulos et al. 2020: the state is a sum of outer products."""

    def turn(carry, x):
        state, norm = carry
        q, k = nn.elu(x @ p["q"]) + 1, nn.elu(x @ p["k"]) + 1
        state = state + jnp.einsum("i,j->ij", k, x @ p["v"])
        norm = norm + k
        return (state, norm), (q @ state) / (q * norm).sum() @ p["o"]

    start = (jnp.zeros((8, 8)), jnp.zeros(8))
    return jax.lax.scan(turn, start, inputs["x"])[1]


@row(QKV, FRAMES)
def retention_with_decay(p, inputs):
    """Sun et al. 2023: linear throughout, no activation in the loop."""

    def turn(state, x):
        q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
        state = 0.9 * state + k[:, None] * v[None]
        return state, (q @ state) @ p["o"]

    return jax.lax.scan(turn, jnp.zeros((8, 8)), inputs["x"])[1]


@row(both(QKV, weights(g=(8, 8))), FRAMES)
def gated_linear_attention(p, inputs):
    """Yang et al. 2024: decays by a gate of the token, keys stacked as they come."""

    def turn(state, x):
        gate = jax.nn.sigmoid(x @ p["g"] + 2.0)
        state = gate[:, None] * state + jnp.outer(x @ p["k"], x @ p["v"])
        return state, jnp.einsum("i,ij->j", x @ p["q"], state)

    return jax.lax.scan(turn, jnp.zeros((8, 8)), inputs["x"])[1] @ p["o"]


@row(both(QKV, weights(b=(8, 1))), FRAMES)
def delta_rule_of_fast_weights(p, inputs):
    """Schlag et al. 2021: what is read at a key is replaced, as recursions do."""

    def turn(state, x):
        k = jax.nn.softmax(x @ p["k"])
        beta = jax.nn.sigmoid(x @ p["b"])
        old = k @ state
        state = state + k[:, None] * (beta * (x @ p["v"] - old))[None]
        return state, jax.nn.softmax(x @ p["q"]) @ state @ p["o"]

    return jax.lax.scan(turn, jnp.zeros((8, 8)), inputs["x"])[1]


@row(
    both(weights(w=(8, 16), b=(16, 4), c=(16, 4), d=(16, 16), o=(16, 8))),
    both(FRAMES, uniform(0.5, 4.0, a=(16, 4))),
)
def selective_state_spaces(p, inputs):
    """Mamba, Gu and Dao 2023: step sizes and projections depend on the token."""

    def turn(h, x):
        u = jax.nn.silu(x @ p["w"])
        step = jax.nn.softplus(u @ p["d"] - 1.0)
        drive = jnp.outer(step * u, u @ p["b"])
        h = jnp.exp(-step[:, None] * inputs["a"]) * h + drive
        return h, (jnp.einsum("ds,s->d", h, u @ p["c"]) + u) @ p["o"]

    return jax.lax.scan(turn, jnp.zeros((16, 4)), inputs["x"])[1]


@row(weights(a=(8, 8), b=(8, 8), c=(8, 8)), FRAMES)
def linear_state_space_layer(p, inputs):
    """Three learned matrices and a gelu behind: near to a linear filter."""

    def turn(h, x):
        h = 0.8 * (p["a"] @ h) + p["b"] @ x
        return h, jax.nn.gelu(p["c"] @ h) + x

    return jax.lax.scan(turn, jnp.zeros(8), inputs["x"])[1]


@row(
    both(weights(b=(8, 16), c=(16, 8), g=(8, 8)), uniform(1.0, 4.0, a=(16,))),
    FRAMES,
)
def diagonal_linear_units(p, inputs):
    """LRU, Orvieto et al. 2023: decays by the exponential of a parameter."""
    decay = jnp.exp(-jnp.exp(-p["a"]))

    def turn(h, x):
        h = decay * h + jnp.sqrt(1 - decay**2) * (x @ p["b"])
        return h, jax.nn.gelu(h @ p["c"]) * jax.nn.sigmoid(x @ p["g"])

    return jax.lax.scan(turn, jnp.zeros(16), inputs["x"])[1]


@row(both(weights(k=(8, 8), v=(8, 8), r=(8, 8), o=(8, 8)), normals(w=(8,))), FRAMES)
def receptance_weighted_units(p, inputs):
    """RWKV, Peng et al. 2023: a running softmax with its largest exponent."""

    def turn(carry, x):
        above, below, top = carry
        k, v = x @ p["k"], x @ p["v"]
        most = jnp.maximum(top - jnp.exp(p["w"]), k)
        old, new = jnp.exp(top - jnp.exp(p["w"]) - most), jnp.exp(k - most)
        above, below = old * above + new * v, old * below + new
        read = jax.nn.sigmoid(x @ p["r"]) * above / below
        return (above, below, most), read @ p["o"]

    start = (jnp.zeros(8), jnp.zeros(8), jnp.full(8, -10.0))
    return jax.lax.scan(turn, start, inputs["x"])[1]


@row(both(QKV, weights(i=(8, 1), f=(8, 1))), FRAMES)
def matrix_memory_lstm(p, inputs):
    """xLSTM, Beck et al. 2024: exponential gates and a maximum that holds them."""

    def turn(c, x):
        q, k, v = x @ p["q"], (x @ p["k"]) / 8.0**0.5, x @ p["v"]
        i, f = (x @ p["i"])[0], jax.nn.log_sigmoid((x @ p["f"])[0] + 2.0)
        top = jnp.maximum(f + c["top"], i)
        old, new = jnp.exp(f + c["top"] - top), jnp.exp(i - top)
        memory = old * c["memory"] + new * k[:, None] * v[None]
        norm = old * c["norm"] + new * k
        read = (q @ memory) / jnp.maximum(jnp.abs((q * norm).sum()), 1.0)
        return {"memory": memory, "norm": norm, "top": top}, read @ p["o"]

    start = {"memory": jnp.zeros((8, 8)), "norm": jnp.zeros(8), "top": jnp.zeros(())}
    return jax.lax.scan(turn, start, inputs["x"])[1]


@row(weights(w=(16, 8), k=(8, 8), e=(8, 8), a=(8, 8)), FRAMES)
def memory_that_is_read_by_a_softmax(p, inputs):
    """A neural Turing machine: a controller reads, erases and writes rows."""

    def turn(carry, x):
        memory, read = carry
        h = jnp.tanh(jnp.concatenate([x, read]) @ p["w"])
        where = jax.nn.softmax(2.0 * (memory @ (h @ p["k"])))
        erase, add = jax.nn.sigmoid(h @ p["e"]), jnp.tanh(h @ p["a"])
        memory = memory * (1 - where[:, None] * erase[None])
        memory = memory + where[:, None] * add[None]
        read = where @ memory
        return (memory, read), read

    start = (0.5 * inputs["x"][:6], jnp.zeros(8))
    return jax.lax.scan(turn, start, inputs["x"])[1]


@row(both(GRU, weights(e=(12, 8), logits=(16, 12))), FRAMES)
def decoder_with_attention(p, inputs):
    """Bahdanau et al. 2015, fed with the targets: one word a turn."""

    def turn(h, word):
        h = gru(p, h, p["e"][word])
        looks = jax.nn.softmax(inputs["x"] @ (h @ p["out"]) / 8.0**0.5)
        seen = looks @ inputs["x"]
        return h, jax.nn.log_softmax(jnp.concatenate([h, seen]) @ p["logits"])

    words = jnp.arange(16) * 5 % 12
    return jax.lax.scan(turn, jnp.zeros(8), words)[1]


def attend(q, keys, values, mask):
    """Attention of one query to what is in a cache."""
    scores = jnp.where(mask, keys @ q / 8.0**0.5, -1e9)
    return jax.nn.softmax(scores) @ values


@row(both(QKV, weights(w=(8, 32), u=(32, 8), e=(12, 8))), normals(x=(8,)))
def greedy_decoding_with_a_cache(p, inputs):
    """A transformer writes twelve tokens; the tied logits choose the next one."""

    def turn(i, c):
        x = p["e"][c["token"]] + inputs["x"]
        keys = jax.lax.dynamic_update_slice(c["k"], (x @ p["k"])[None], (i, 0))
        values = jax.lax.dynamic_update_slice(c["v"], (x @ p["v"])[None], (i, 0))
        x = x + attend(x @ p["q"], keys, values, jnp.arange(12) <= i) @ p["o"]
        x = x + jax.nn.gelu(x @ p["w"]) @ p["u"]
        logits = p["e"] @ x
        out = c["out"].at[i].set(logits)
        # The token comes from the position: what rounding decides tells nothing.
        token = (c["token"] * 5 + i + 1) % 12
        return {"token": token, "k": keys, "v": values, "out": out}

    zero = jnp.zeros((12, 8))
    start = {"token": 0, "k": zero, "v": zero, "out": jnp.zeros((12, 12))}
    return jax.lax.fori_loop(0, 12, turn, start)["out"]


@row(both(QKV, weights(e=(12, 8))), normals(x=(8,)), grad=())
def decoding_until_a_token(p, inputs):
    """A while loop that ends with a token or after ten turns; carries a cache."""

    def turn(carry):
        i, token, cache, total = carry
        x = p["e"][token] + inputs["x"]
        cache = cache.at[i].set(x @ p["k"])
        x = x + attend(x @ p["q"], cache, cache, jnp.arange(10) <= i) @ p["v"] @ p["o"]
        logs = jax.nn.log_softmax(3.0 * (x @ p["e"].T))
        return i + 1, logs.argmax(), cache, total + logs.max()

    def goes_on(carry):
        return (carry[0] < 10) & (carry[1] != 11)

    start = (0, jnp.argmax(jnp.ones(2)), jnp.zeros((10, 8)), jnp.zeros(()))
    return jax.lax.while_loop(goes_on, turn, start)[3]


@row(both(QKV, weights(w=(8, 8))), normals(x=(6, 4, 8)))
def segments_with_a_memory(p, inputs):
    """Transformer-XL: each segment looks at itself and at the one before."""

    def turn(memory, x):
        seen = jnp.concatenate([memory, x])
        scores = (x @ p["q"]) @ (seen @ p["k"]).T / 8.0**0.5
        x = x + jax.nn.softmax(scores) @ (seen @ p["v"]) @ p["o"]
        x = x + jax.nn.relu(x @ p["w"])
        return x, x

    return jax.lax.scan(turn, jnp.zeros((4, 8)), inputs["x"])[1]


@row(weights(w=(8, 8), g=(8, 8), u=(8, 8)), FRAMES)
def recurrence_without_products_of_the_state(p, inputs):
    """SRU, Lei et al. 2018: the products of a turn read the frame alone."""

    def turn(c, x):
        f = jax.nn.sigmoid(x @ p["g"])
        c = f * c + (1 - f) * (x @ p["w"])
        r = jax.nn.sigmoid(x @ p["u"])
        return c, r * jnp.tanh(c) + (1 - r) * x

    return jax.lax.scan(turn, jnp.zeros(8), inputs["x"])[1]
