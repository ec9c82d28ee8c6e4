"""What is left of one, of a threshold, of a period or of a prediction, between layers.

Recurrent units with a decay, hyperbolic layers, sinusoidal networks, sparse codes and
guidance: a product, a remainder, a product.
"""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, integers, normals, row, uniform, weights

ROWS = normals(x=(24, 8))
MODEL = weights(w=(8, 16), v=(16, 4))
GATED = weights(w=(8, 16), g=(8, 16), v=(16, 4))
SEQUENCE = normals(x=(4, 12, 8))


@row(GATED, SEQUENCE)
def noise_of_a_real_gated_unit(p, inputs):
    """De et al. 2024, arXiv:2402.19427, equation 4: what a decay near one leaves."""
    decay = jax.nn.sigmoid(inputs["x"] @ p["g"] + 4.0) ** 0.5
    h = jnp.sqrt(1.0 - decay**2) * (inputs["x"] @ p["w"])
    return (10.0 * h) @ p["v"]


@row(GATED, SEQUENCE)
def real_gated_unit_with_its_scan(p, inputs):
    decay = jnp.exp(-0.05 * jax.nn.softplus(inputs["x"] @ p["g"]))
    pushed = jnp.sqrt(1.0 - decay**2) * (inputs["x"] @ p["w"])

    def turn(h, step):
        h = step[0] * h + step[1]
        return h, h

    steps = (decay.swapaxes(0, 1), pushed.swapaxes(0, 1))
    return jax.lax.scan(turn, jnp.zeros((4, 16)), steps)[1] @ p["v"]


@row(weights(z=(8, 16), w=(8, 16), v=(16, 4)), ROWS)
def minimal_gated_unit(p, inputs):
    z = jax.nn.sigmoid(inputs["x"] @ p["z"])
    return ((1 - z) * jnp.tanh(inputs["x"] @ p["w"])) @ p["v"]


@row(MODEL, ROWS)
def slope_of_an_activation_by_hand(p, inputs):
    """A backward pass as it is taught."""
    a = jnp.tanh(2.0 * (inputs["x"] @ p["w"]))
    error = a @ p["v"] - 1.0
    back = (error @ p["v"].T) * (1.0 - a**2)
    return inputs["x"].T @ back / 24, a.T @ error / 24


@row(MODEL, ROWS)
def slope_of_a_sigmoid_by_hand(p, inputs):
    a = jax.nn.sigmoid(inputs["x"] @ p["w"] + 5.0)
    error = a @ p["v"]
    return inputs["x"].T @ ((error @ p["v"].T) * a * (1.0 - a))


@row(weights(w=(8, 4), v=(4, 4)), ROWS)
def hyperbolic_layer(p, inputs):
    """Ganea et al. 2018, arXiv:1805.09112: there, a matrix, and back to the tangent."""
    h = inputs["x"] @ p["w"]
    size = jnp.sqrt((h**2).sum(1, keepdims=True) + 1e-6)
    ball = jnp.tanh(size) * h / size
    moved = ball @ p["v"]
    long = jnp.sqrt((moved**2).sum(1, keepdims=True) + 1e-6)
    factor = 2.0 / (1.0 - (ball**2).sum(1, keepdims=True))
    return jnp.arctanh(jnp.minimum(long, 0.99)) * moved / long, jnp.log(factor)


@row(weights(w=(8, 4), v=(4, 4)), normals(x=(24, 8), y=(24, 8)))
def moebius_addition_before_a_product(p, inputs):
    a, b = (0.4 * jnp.tanh(inputs[n] @ p["w"]) for n in "xy")
    a2, b2 = ((z**2).sum(1, keepdims=True) for z in (a, b))
    ab = (-a * b).sum(1, keepdims=True)
    apart = ((1 + 2 * ab + b2) * -a + (1 - a2) * b) / (1 + 2 * ab + a2 * b2)
    return apart @ p["v"]


@row(weights(w=(2, 16), u=(16, 16), v=(16, 1)), uniform(-1.0, 1.0, x=(48, 2)))
def sinusoidal_network(p, inputs):
    """Sitzmann et al. 2020, arXiv:2006.09661."""
    h = jnp.sin(10.0 * (inputs["x"] @ p["w"]))
    h = jnp.sin(3.0 * (h @ p["u"]))
    return h @ p["v"]


@row(
    weights(v=(32, 16), u=(16, 3)),
    both(uniform(0.0, 1.0, x=(48, 2)), normals(b=(2, 16))),
)
def random_fourier_features_of_pixels(p, inputs):
    angle = 2 * jnp.pi * (inputs["x"] @ (3.0 * inputs["b"]))
    h = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=1)
    return jax.nn.sigmoid(jax.nn.relu(h @ p["v"]) @ p["u"])


@row(weights(w=(8, 16), d=(16, 16)), ROWS)
def sparse_code_above_a_threshold(p, inputs):
    drive = 5.0 + inputs["x"] @ p["w"]
    code = jnp.sign(drive) * jnp.maximum(jnp.abs(drive) - 4.5, 0.0)
    return code @ p["d"], (code > 0).mean(1)


@row(MODEL, ROWS)
def spikes_over_a_membrane_threshold(p, inputs):
    u = 20.0 + inputs["x"] @ p["w"]
    soft = jax.nn.sigmoid(4.0 * (u - 20.0))
    return soft @ p["v"], (u - 20.0 * soft).mean(1)


@row(weights(w=(8, 6), v=(6, 4)), ROWS)
def radial_units_around_their_centres(p, inputs):
    h = 6.0 + inputs["x"] @ p["w"]
    centres = 6.0 + jnp.linspace(-1.0, 1.0, 6)[None]
    return jnp.exp(-2.0 * (h - centres) ** 2) @ p["v"]


@row(weights(w=(8, 6), k=(6, 8), v=(8, 4)), ROWS)
def triangles_of_a_hat_basis(p, inputs):
    at = 2.5 + 2.0 * jnp.tanh(inputs["x"] @ p["w"])
    hats = jnp.maximum(1.0 - jnp.abs(at[..., None] - jnp.arange(8.0)[None, None]), 0.0)
    return (hats * p["k"][None]).sum(-1), hats.sum(1) @ p["v"]


@row(weights(c=(8, 6), u=(8, 6), v=(6, 4)), ROWS)
def guidance_between_two_products(p, inputs):
    given, free = 4.0 + inputs["x"] @ p["c"], 4.0 + inputs["x"] @ p["u"]
    return (free + 3.0 * (given - free) - 4.0) @ p["v"]


@row(weights(c=(8, 12), u=(8, 12), v=(12, 4)), ROWS)
def contrastive_decoding(p, inputs):
    """Li et al. 2022, arXiv:2210.15097: an expert less an amateur."""
    expert = jax.nn.log_softmax(inputs["x"] @ p["c"])
    amateur = jax.nn.log_softmax(0.8 * (inputs["x"] @ p["u"]))
    allowed = expert > expert.max(1, keepdims=True) - 3.0
    share = jax.nn.softmax(jnp.where(allowed, 1.5 * expert - 0.5 * amateur, -1e9))
    return share @ p["v"], 1.5 * expert - 0.5 * amateur


@row(MODEL, SEQUENCE)
def pre_emphasis_between_two_layers(p, inputs):
    h = jax.nn.softplus(inputs["x"] @ p["w"] + 8.0)
    return (h[:, 1:] - 0.97 * h[:, :-1]) @ p["v"]


@row(MODEL, SEQUENCE)
def extrapolation_of_the_next_state(p, inputs):
    h = 12.0 + jnp.tanh(inputs["x"] @ p["w"])
    return (2.0 * h[:, 1:-1] - h[:, :-2] - h[:, 2:]) @ p["v"]


@row(MODEL, SEQUENCE)
def detrended_features_before_a_layer(p, inputs):
    h = 15.0 + jnp.tanh(inputs["x"] @ p["w"])
    slope = (h[:, -1:] - h[:, :1]) / 11.0
    line = h[:, :1] + slope * jnp.arange(12.0)[None, :, None]
    return (h - line) @ p["v"]


@row(weights(w=(8, 16), g=(8, 16), v=(16, 4)), ROWS)
def gain_of_a_filter_near_one(p, inputs):
    """The covariance after a measurement, in units of its noise."""
    before = jnp.exp(inputs["x"] @ p["g"] + 4.0)
    gain = before / (before + 1.0)
    after = (1.0 - gain) * before
    return (after * (inputs["x"] @ p["w"])) @ p["v"], 1.0 / (1.0 - gain)


@row(weights(w=(8, 16), v=(16, 4)), ROWS)
def horizon_of_a_discount(p, inputs):
    discount = jax.nn.sigmoid(inputs["x"] @ p["w"] + 4.0)
    return (0.02 / (1.0 - discount)) @ p["v"], discount @ p["v"]


@row(weights(w=(8, 16), v=(16, 4)), ROWS)
def complementary_log_log_units(p, inputs):
    on = 1.0 - jnp.exp(-jnp.exp(inputs["x"] @ p["w"] - 3.0))
    return (20.0 * on) @ p["v"], jnp.log(on)


@row(weights(w=(8, 16), v=(16, 4)), ROWS)
def tail_of_a_normal_between_layers(p, inputs):
    z = inputs["x"] @ p["w"] + 2.0
    tail = 1.0 - 0.5 * (1.0 + jax.lax.erf(z / jnp.sqrt(2.0)))
    return (20.0 * tail) @ p["v"]


@row(weights(w=(8, 16), v=(16, 4)), normals(x=(24, 8), y=(24, 8)))
def cosine_distances_of_groups(p, inputs):
    a = (inputs["x"] @ p["w"]).reshape(24, 4, 4)
    b = a + 0.3 * (inputs["y"] @ p["w"]).reshape(24, 4, 4)
    inner = (a * b).sum(-1)
    size = jnp.sqrt((a**2).sum(-1) * (b**2).sum(-1) + 1e-6)
    return (1.0 - inner / size) @ p["v"][:4]


@row(weights(w=(8, 6), v=(6, 4)), ROWS)
def fraction_of_a_cell(p, inputs):
    at = 9.5 + 0.3 * jnp.tanh(inputs["x"] @ p["w"])
    part = at - jnp.floor(at)
    return part @ p["v"], (part * (1.0 - part)) @ p["v"]


@row(weights(w=(8, 8), k=(3, 8, 8), v=(8, 4)), SEQUENCE)
def sharpened_signal_between_convolutions(p, inputs):
    h = jax.nn.softplus(inputs["x"] @ p["w"] + 5.0)
    blurred = 0.25 * jnp.roll(h, 1, 1) + 0.5 * h + 0.25 * jnp.roll(h, -1, 1)
    sharp = (h - blurred) * 2.0
    sharp = jax.lax.conv_general_dilated(
        sharp, p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jax.nn.silu(sharp) @ p["v"]


@row(weights(w=(8, 16), v=(16, 1)), both(ROWS, integers(24, i=(40,), j=(40,))))
def margin_between_two_candidates(p, inputs):
    value = 40.0 + jnp.tanh(inputs["x"] @ p["w"]) @ p["v"]
    gap = value[inputs["i"]] - 0.95 * value[inputs["j"]] - 2.0
    return jax.nn.softplus(4.0 * gap).mean(), gap
