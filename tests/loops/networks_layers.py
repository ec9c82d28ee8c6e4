"""Networks whose turns are layers, blocks or refinements."""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, normals, row, weights
from tests.loops.samplers import graph

TOKENS = normals(x=(12, 8))


def norm(x):
    """A layer norm without parameters."""
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


def attention(p, x):
    """Attention with two heads."""
    q, k, v = (jnp.einsum("td,dhe->the", x, p[n]) for n in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("qhe,khe->hqk", q, k) / 2.0, axis=-1)
    return jnp.einsum("hqk,khe,hed->qd", scores, v, p["o"])


def block(p, x):
    """A layer of a transformer, normalised before."""
    x = x + attention(p, norm(x))
    return x + jax.nn.gelu(norm(x) @ p["w"]) @ p["u"]


def block_weights(*layers):
    """Sampler of the weights of a block, or of some layers of blocks."""
    return both(
        weights(scale=0.5, **{n: (*layers, 8, 2, 4) for n in "qkv"}),
        weights(scale=0.7, o=(*layers, 2, 4, 8)),
        weights(w=(*layers, 8, 16), u=(*layers, 16, 8)),
    )


@row(block_weights(4), TOKENS)
def transformer_layers_in_a_scan(p, inputs):
    def turn(x, layer):
        return block(layer, x), None

    return norm(jax.lax.scan(turn, inputs["x"], p)[0])


@row(block_weights(3), TOKENS)
def checkpointed_layers_in_a_scan(p, inputs):
    """Each layer is computed again in the backward pass."""

    @jax.checkpoint
    def turn(x, layer):
        return block(layer, x), x.mean(0)

    return jax.lax.scan(turn, inputs["x"], p)


@row(block_weights(), TOKENS)
def universal_transformer(p, inputs):
    """One block in all turns: Dehghani et al. 2019."""
    return jax.lax.fori_loop(0, 6, lambda _, x: block(p, x), inputs["x"])


@row(block_weights(3), normals(x=(3, 12, 8)))
def jitted_blocks_by_index_under_vmap(p, inputs):
    """The weights of a layer are looked up by the counter of the loop."""

    @jax.jit
    def layer(i, x):
        return block(jax.tree.map(lambda w: w[i], p), x)

    def encode(x):
        return jax.lax.fori_loop(0, 3, layer, x)

    return jax.vmap(encode)(inputs["x"])


@row(weights(w=(6, 8, 32), u=(6, 32, 8)), TOKENS)
def residual_perceptrons_in_a_scan(p, inputs):
    def turn(x, layer):
        return x + 0.5 * jax.nn.relu(x @ layer["w"]) @ layer["u"], None

    return jax.lax.scan(turn, inputs["x"], p)[0]


@row(weights(w=(8, 8, 8)), TOKENS)
def deep_linear_network(p, inputs):
    """Eight linear layers without activation (Saxe et al. 2014)."""

    def turn(x, w):
        return x @ w, None

    return jax.lax.scan(turn, inputs["x"], p["w"])[0]


@row(weights(time=(4, 12, 12), w=(4, 8, 16), u=(4, 16, 8)), TOKENS)
def mixer_layers(p, inputs):
    def turn(x, layer):
        x = x + jax.nn.gelu(layer["time"] @ norm(x))
        return x + jax.nn.gelu(norm(x) @ layer["w"]) @ layer["u"], None

    return jax.lax.scan(turn, inputs["x"], p)[0]


@row(weights(gate=(3, 8, 4), w=(3, 4, 8, 16), u=(3, 4, 16, 8)), TOKENS)
def layers_of_experts(p, inputs):
    """A soft mixture of four experts in each layer."""

    def turn(x, layer):
        share = jax.nn.softmax(norm(x) @ layer["gate"])
        h = jax.nn.silu(jnp.einsum("td,edf->etf", norm(x), layer["w"]))
        return x + jnp.einsum("te,etf,efd->td", share, h, layer["u"]), share.mean(0)

    return jax.lax.scan(turn, inputs["x"], p)


@row(weights(w=(8, 8), u=(8, 8), m=(8, 8)), both(normals(x=(16, 8)), graph(g=(16, 16))))
def messages_in_a_graph(p, inputs):
    """Shared weights, six turns: sums over neighbours by the adjacency."""
    links = inputs["g"] / inputs["g"].sum(1, keepdims=True)

    def turn(_, h):
        seen = links @ jax.nn.relu(h @ p["m"])
        return norm(h @ p["w"] + seen @ p["u"])

    return jax.lax.fori_loop(0, 6, turn, inputs["x"])


@row(weights(w=(3, 8, 8)), both(normals(x=(16, 8)), graph(g=(16, 16))))
def graph_convolutions_without_activation(p, inputs):
    """Simplified graph convolution, Wu et al. 2019: near to spreading labels."""
    links = inputs["g"] / inputs["g"].sum(1, keepdims=True)

    def turn(h, w):
        return links @ h @ w, None

    return jax.nn.log_softmax(jax.lax.scan(turn, inputs["x"], p["w"])[0])


@row(weights(scale=0.5, w=(8, 8), u=(8, 8)), TOKENS)
def equilibrium_of_a_layer(p, inputs):
    """Bai et al. 2019, with a fixed number of turns."""
    drive = inputs["x"] @ p["u"]

    def turn(z, _):
        return jnp.tanh(z @ p["w"] + drive), None

    return jax.lax.scan(turn, jnp.zeros((12, 8)), None, length=30)[0]


@row(weights(scale=0.5, w=(8, 8), u=(8, 8)), TOKENS, grad=())
def equilibrium_until_it_rests(p, inputs):
    """As trained models run: to one percent, or for twenty turns."""
    drive = inputs["x"] @ p["u"]

    def layer(z):
        return norm(jax.nn.relu(z @ p["w"] + drive))

    def turn(carry):
        i, z, _ = carry
        new = 0.5 * z + 0.5 * layer(z)
        return i + 1, new, jnp.linalg.norm(new - z) / jnp.linalg.norm(new)

    def goes_on(carry):
        return (carry[0] < 20) & (carry[2] > 0.01)

    start = (0, jnp.zeros((12, 8)), jnp.array(1.0))
    return jax.lax.while_loop(goes_on, turn, start)[1]


@row(weights(w=(4, 8, 16), u=(4, 16, 8)), normals(x=(10, 16)))
def normalising_flow_of_couplings(p, inputs):
    """Dinh et al. 2017: halves in turn scale and shift each other."""

    def turn(carry, layer):
        a, b, total = carry
        h = jax.nn.relu(a @ layer["w"]) @ layer["u"]
        scale = 0.5 * jnp.tanh(h)
        b = b * jnp.exp(scale) + h
        return (b, a, total + scale.sum(-1)), None

    start = (inputs["x"][:, :8], inputs["x"][:, 8:], jnp.zeros(10))
    return jax.lax.scan(turn, start, p)[0]


def field(p, x, t):
    """A vector field by a network, that knows the time."""
    return jnp.tanh(x @ p["w"] + t) @ p["u"]


@row(weights(w=(8, 16), u=(16, 8)), TOKENS)
def neural_equation_by_runge_kutta(p, inputs):
    """Chen et al. 2018: the steps are numerics, the products are a network's."""

    def turn(x, t):
        a = field(p, x, t)
        b = field(p, x + 0.05 * a, t + 0.05)
        c = field(p, x + 0.05 * b, t + 0.05)
        d = field(p, x + 0.1 * c, t + 0.1)
        return x + 0.1 / 6 * (a + 2 * b + 2 * c + d), None

    return jax.lax.scan(turn, inputs["x"], jnp.linspace(0.0, 0.9, 10))[0]


@row(weights(w=(8, 24), b=(24, 24)), TOKENS)
def learned_shrinkage(p, inputs):
    """LISTA, Gregor and LeCun 2010: a solver's form, but learned weights."""
    code = inputs["x"] @ p["w"]

    def turn(z, _):
        pre = code + 0.5 * (z @ p["b"])
        return jnp.sign(pre) * jax.nn.relu(jnp.abs(pre) - 0.3), None

    return jax.lax.scan(turn, jnp.zeros((12, 24)), None, length=8)[0]


@row(weights(scale=2.0, x=(10, 8)), normals(q=(8,)))
def modern_hopfield_retrieval(p, inputs):
    """Ramsauer et al. 2021: attention to stored patterns, again and again."""

    def turn(_, q):
        return jax.nn.softmax(1.5 * (p["x"] @ q)) @ p["x"]

    return jax.lax.fori_loop(0, 5, turn, inputs["q"])


@row(
    weights(q=(8, 8), k=(8, 8), v=(8, 8), z=(16, 8), n=(16, 8)),
    both(TOKENS, normals(slots=(3, 8))),
)
def slots_that_compete(p, inputs):
    """Locatello et al. 2020: a softmax over slots, a mean, a gated update."""
    keys, values = norm(inputs["x"]) @ p["k"], norm(inputs["x"]) @ p["v"]

    def turn(slots, _):
        shares = jax.nn.softmax((norm(slots) @ p["q"]) @ keys.T / 8.0**0.5, axis=0)
        seen = (shares / shares.sum(1, keepdims=True)) @ values
        both_rows = jnp.concatenate([slots, seen], axis=1)
        z = jax.nn.sigmoid(both_rows @ p["z"])
        return (1 - z) * slots + z * jnp.tanh(both_rows @ p["n"]), None

    return jax.lax.scan(turn, inputs["slots"], None, length=3)[0]


@row(weights(w=(12, 4, 8, 6)), TOKENS)
def capsules_that_agree(p, inputs):
    """Sabour et al. 2017: three turns of routing by agreement."""
    votes = jnp.einsum("id,iodf->iof", inputs["x"], p["w"])

    def squash(s):
        size = (s**2).sum(-1, keepdims=True)
        return s * jnp.sqrt(size + 1e-6) / (1 + size)

    def turn(_, logits):
        v = squash(jnp.einsum("io,iof->of", jax.nn.softmax(logits, axis=1), votes))
        return logits + jnp.einsum("iof,of->io", votes, v)

    logits = jax.lax.fori_loop(0, 3, turn, jnp.zeros((12, 4)))
    return squash(jnp.einsum("io,iof->of", jax.nn.softmax(logits, axis=1), votes))


@row(block_weights(), both(normals(latent=(4, 8)), normals(x=(6, 5, 8))))
def latents_that_read_chunks(p, inputs):
    """A perceiver: few latents attend to a long input, chunk after chunk."""

    def turn(latent, chunk):
        seen = jnp.concatenate([latent, chunk])
        latent = (seen + attention(p, norm(seen)))[:4]
        return latent + jax.nn.gelu(norm(latent) @ p["w"]) @ p["u"], None

    return jax.lax.scan(turn, inputs["latent"], inputs["x"])[0]


@row(weights(q=(8, 8), k=(8, 8), v=(8, 8)), normals(x=(32, 8)))
def attention_in_blocks_of_keys(p, inputs):
    """Rabe and Staats 2021: a running maximum and sum, as FlashAttention has them."""
    q = inputs["x"] @ p["q"] / 8.0**0.5
    keys, values = ((inputs["x"] @ p[n]).reshape(4, 8, 8) for n in "kv")

    def turn(carry, both_blocks):
        total, norm_of, top = carry
        scores = q @ both_blocks[0].T
        most = jnp.maximum(top, scores.max(1))
        old, new = jnp.exp(top - most), jnp.exp(scores - most[:, None])
        total = old[:, None] * total + new @ both_blocks[1]
        return (total, old * norm_of + new.sum(1), most), None

    start = (jnp.zeros((32, 8)), jnp.zeros(32), jnp.full(32, -1e9))
    (total, size, _), _ = jax.lax.scan(turn, start, (keys, values))
    return total / size[:, None]


@row(weights(w=(8, 24)), TOKENS)
def logits_in_blocks_of_words(p, inputs):
    """A loss over a vocabulary in blocks: a running logsumexp of logits."""
    columns = p["w"].reshape(8, 4, 6).transpose(1, 0, 2)

    def turn(total, w):
        logits = inputs["x"] @ w
        return jnp.logaddexp(total, jax.nn.logsumexp(logits, axis=1)), logits.max(1)

    return jax.lax.scan(turn, jnp.full(12, -1e9), columns)


@row(weights(left=(8, 8), right=(8, 8), o=(8, 8), g=(8, 8)), normals(x=(6, 6, 8)))
def triangles_of_pairs(p, inputs):
    """AlphaFold: pairs of residues are updated over a third, and recycled."""

    def turn(_, z):
        h = norm(z)
        seen = jnp.einsum("ikc,jkc->ijc", h @ p["left"], h @ p["right"])
        return z + jax.nn.sigmoid(h @ p["g"]) * (norm(seen) @ p["o"])

    return jax.lax.fori_loop(0, 3, turn, inputs["x"])


@row(weights(w=(17, 16), m=(16, 1), h=(24, 8)), normals(x=(6, 3), f=(6, 8)))
def equivariant_graph_layers(p, inputs):
    """Satorras et al. 2021: features and positions move together."""

    def turn(carry, _):
        x, f = carry
        far = x[:, None] - x[None]
        d = (far**2).sum(-1, keepdims=True)
        pairs = [jnp.repeat(f[:, None], 6, 1), jnp.repeat(f[None], 6, 0), d]
        m = jax.nn.silu(jnp.concatenate(pairs, axis=-1) @ p["w"])
        x = x + 0.1 * (far * jnp.tanh(m @ p["m"])).mean(1)
        seen = jnp.concatenate([f, m.sum(1) / 6.0], axis=-1)
        return (x, f + jax.nn.silu(seen @ p["h"])), None

    return jax.lax.scan(turn, (inputs["x"], inputs["f"]), None, length=4)[0]


@row(weights(w=(24, 32), u=(32, 8)), normals(x=(16, 8)))
def cellular_automaton(p, inputs):
    """Mordvintsev et al. 2020, on a ring: neighbours, a network, a clip."""

    def turn(_, x):
        near = [x, jnp.roll(x, 1, axis=0), jnp.roll(x, -1, axis=0)]
        step = jax.nn.relu(jnp.concatenate(near, axis=1) @ p["w"]) @ p["u"]
        return jnp.clip(x + 0.1 * step, -2.0, 2.0)

    return jax.lax.fori_loop(0, 16, turn, inputs["x"])
