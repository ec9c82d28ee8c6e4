"""Networks that a loop calls: diffusion, policies, planning, rendering, search."""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, normals, row, uniform, weights

MLP = weights(w=(8, 24), u=(24, 8))
NOISE = normals(x=(6, 8), e=(12, 6, 8))


def denoiser(p, x, t):
    """The noise that a network sees, at a level."""
    return jax.nn.silu(x @ p["w"] + jnp.sin(3 * t)) @ p["u"]


def levels():
    """The shares of noise, falling."""
    return jnp.linspace(0.95, 0.05, 12)


@row(MLP, NOISE)
def diffusion_with_noise(p, inputs):
    """Ho et al. 2020: ancestral sampling."""

    def turn(x, both_inputs):
        t, e = both_inputs
        keep = jnp.sqrt(1 - 0.1 * t)
        x = (x - 0.1 * t / jnp.sqrt(t) * denoiser(p, x, t)) / keep
        return x + jnp.sqrt(0.1 * t) * e, None

    return jax.lax.scan(turn, inputs["x"], (levels(), inputs["e"]))[0]


@row(MLP, NOISE)
def diffusion_without_noise(p, inputs):
    """DDIM: a clean sample is guessed and clipped, then noised a little less."""

    def turn(i, x):
        t, later = levels()[i], levels()[i + 1]
        e = denoiser(p, x, t)
        clean = jnp.clip((x - jnp.sqrt(t) * e) / jnp.sqrt(1 - t), -3.0, 3.0)
        return jnp.sqrt(1 - later) * clean + jnp.sqrt(later) * e

    return jax.lax.fori_loop(0, 11, turn, inputs["x"])


@row(MLP, both(NOISE, normals(label=(8,))))
def guided_diffusion(p, inputs):
    """Ho and Salimans 2022: two calls of the network, one goes beyond the other."""

    def turn(x, t):
        free = denoiser(p, x, t)
        told = denoiser(p, x + inputs["label"][None], t)
        return x - 0.1 * (free + 2.0 * (told - free)), None

    return jax.lax.scan(turn, inputs["x"], levels())[0]


@row(MLP, NOISE)
def flow_matching_by_heun(p, inputs):
    def turn(x, t):
        a = denoiser(p, x, t)
        b = denoiser(p, x + 0.08 * a, t - 0.08)
        return x + 0.04 * (a + b), x.mean(0)

    return jax.lax.scan(turn, inputs["x"], levels())


@row(weights(w=(8, 24), u=(24, 1)), NOISE)
def langevin_steps_on_a_learned_energy(p, inputs):
    """The gradient of a network moves the sample."""

    def energy(x):
        return (jax.nn.softplus(x @ p["w"]) @ p["u"]).sum() + 0.5 * (x**2).sum()

    def turn(x, e):
        return x - 0.05 * jax.grad(energy)(x) + 0.1 * e, None

    return jax.lax.scan(turn, inputs["x"], inputs["e"])[0]


@row(weights(w=(4, 24), u=(24, 1)), normals(x=(4,)))
def policy_in_a_cart_and_pole(p, inputs):
    """A network pushes, physics without products answers."""

    def turn(s, _):
        force = 5.0 * jnp.tanh(jnp.tanh(s @ p["w"]) @ p["u"])[0]
        _, v, a, w = s
        pull = 9.8 * jnp.sin(a) - jnp.cos(a) * (force + 0.05 * w**2) / 1.1
        spin = pull / (0.5 * (4 / 3 - 0.1 * jnp.cos(a) ** 2 / 1.1))
        push = (force + 0.05 * (w**2 - spin)) / 1.1
        s = s + 0.02 * jnp.stack([v, push, w, spin])
        return s, force

    return jax.lax.scan(turn, 0.1 * inputs["x"], None, length=30)


@row(
    weights(w=(12, 16), h=(16, 16), prior=(16, 8), dec=(24, 8), act=(24, 4)),
    normals(e=(15, 8)),
)
def dreams_of_a_world_model(p, inputs):
    """Dreamer, Hafner et al. 2020: state, action and reward are imagined."""

    def turn(carry, e):
        h, z, action = carry
        h = jnp.tanh(jnp.concatenate([z, action]) @ p["w"] + h @ p["h"])
        z = h @ p["prior"] + 0.1 * e
        both_parts = jnp.concatenate([h, z])
        action = jnp.tanh(both_parts @ p["act"])
        return (h, z, action), jax.nn.elu(both_parts @ p["dec"])

    start = (jnp.zeros(16), inputs["e"][0], jnp.zeros(4))
    return jax.lax.scan(turn, start, inputs["e"])[1]


@row(weights(w=(10, 24), u=(24, 8), r=(8, 1)), normals(x=(8,), plans=(5, 10, 2)))
def plans_through_a_learned_model(p, inputs):
    """Each of five plans is rolled out, mapped over the loop; scored in the end."""

    def score(plan):
        def turn(s, a):
            h = jax.nn.relu(jnp.concatenate([s, a]) @ p["w"])
            s = s + 0.3 * (h @ p["u"])
            return s, (jnp.tanh(s) @ p["r"])[0]

        return jax.lax.scan(turn, inputs["x"], plan)[1].sum()

    scores = jax.vmap(score)(inputs["plans"])
    return jax.nn.softmax(scores), scores


@row(weights(w=(3, 24), u=(24, 24), o=(24, 4)), normals(x=(5, 3), d=(5, 3)))
def radiance_along_rays(p, inputs):
    """NeRF: a network at each sample of a ray, light gathered front to back."""

    def turn(carry, t):
        light, left = carry
        h = jnp.sin(3.0 * ((inputs["x"] + t * inputs["d"]) @ p["w"]))
        out = jax.nn.relu(h @ p["u"]) @ p["o"]
        alpha = 1 - jnp.exp(-0.2 * jax.nn.softplus(out[:, 3:]))
        light = light + left * alpha * jax.nn.sigmoid(out[:, :3])
        return (light, left * (1 - alpha)), None

    start = (jnp.zeros((5, 3)), jnp.ones((5, 1)))
    return jax.lax.scan(turn, start, jnp.linspace(0.0, 2.0, 16))[0]


@row(weights(w=(3, 24), u=(24, 1)), normals(x=(5, 3), d=(5, 3)))
def rays_to_a_learned_surface(p, inputs):
    """Sphere tracing: a network says how far the surface is."""

    def turn(_, t):
        where = inputs["x"] + t * inputs["d"]
        far = jax.nn.softplus(where @ p["w"]) @ p["u"]
        return t + 0.2 * jnp.clip(far, -1.0, 1.0)

    return jax.lax.fori_loop(0, 12, turn, jnp.zeros((5, 1)))


@row(weights(w=(10, 24), u=(24, 10)), uniform(-1.0, 1.0, noise=(10,)))
def density_sampled_in_order(p, inputs):
    """MADE: each number is drawn given the ones before it, by masked layers."""
    order, hidden = jnp.arange(10), jnp.arange(24) % 9
    w = jnp.where(order[:, None] <= hidden[None], p["w"], 0.0)
    u = jnp.where(hidden[:, None] < order[None], p["u"], 0.0)

    def turn(i, x):
        mean = jax.nn.relu(x @ w) @ u
        return x.at[i].set(mean[i] + inputs["noise"][i])

    return jax.lax.fori_loop(0, 10, turn, jnp.zeros(10))


@row(weights(q=(8, 8), k=(8, 8), h=(16, 8)), normals(x=(8, 8)))
def pointers_to_what_is_left(p, inputs):
    """Vinyals et al. 2015: a tour of soft choices, visited ones are masked."""
    keys = inputs["x"] @ p["k"]

    def turn(carry, _):
        h, left = carry
        share = jax.nn.softmax(keys @ (h @ p["q"]) / 3.0 + jnp.log(left + 1e-3))
        seen = share @ inputs["x"]
        h = jnp.tanh(jnp.concatenate([h, seen]) @ p["h"])
        return (h, left * (1 - share)), share

    return jax.lax.scan(turn, (jnp.zeros(8), jnp.ones(8)), None, length=8)[1]


@row(weights(w=(8, 24), u=(24, 8), v=(8, 4)), normals(x=(9, 4, 8)))
def chunks_of_a_batch(p, inputs):
    """`jax.lax.map` over chunks, to save memory: a loop without a carry."""

    def predict(x):
        return jax.nn.gelu(jax.nn.gelu(x @ p["w"]) @ p["u"]) @ p["v"]

    return jax.lax.map(predict, inputs["x"])


@row(weights(w=(8, 24), u=(24, 4)), normals(x=(6, 8), m=(10, 24)))
def predictions_under_dropout(p, inputs):
    """Gal and Ghahramani 2016: the mean and the spread of ten thinned networks."""

    def turn(carry, m):
        first, second = carry
        h = jax.nn.relu(inputs["x"] @ p["w"]) * jnp.where(m > -0.5, 1.4, 0.0)[None]
        y = jax.nn.softmax(h @ p["u"])
        return (first + y / 10.0, second + y**2 / 10.0), None

    start = (jnp.zeros((6, 4)), jnp.zeros((6, 4)))
    return jax.lax.scan(turn, start, inputs["m"])[0][0]


@row(both(MLP, weights(s=(8, 8))), normals(x=(8,), y=(20, 8)))
def learned_filter_of_a_sequence(p, inputs):
    """A filter whose prediction and gain are networks: KalmanNet's form."""

    def turn(h, y):
        ahead = h + 0.1 * (jnp.tanh(h @ p["w"]) @ p["u"])
        gain = jax.nn.sigmoid((y - ahead) @ p["s"])
        h = ahead + gain * (y - ahead)
        return h, h

    return jax.lax.scan(turn, inputs["x"], inputs["y"])[1]


@row(weights(w=(16, 24), u=(24, 8)), normals(x=(8,), y=(8,)))
def simulator_by_a_network(p, inputs):
    """A learned simulator, as GraphCast is: the network adds to two last states."""

    def turn(states, _):
        h = jax.nn.silu(states.reshape(16) @ p["w"])
        new = states[1] + 0.2 * (h @ p["u"])
        return jnp.stack([states[1], new]), new

    start = jnp.stack([inputs["x"], inputs["y"]])
    return jax.lax.scan(turn, start, None, length=15)[1]
