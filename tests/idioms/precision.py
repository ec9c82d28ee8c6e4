"""Products that ask for a precision, and random numbers."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, constants, normals, row, uniform, weights

HIGHEST = jax.lax.Precision.HIGHEST


def rotation(angles):
    c, s = jnp.cos(angles), jnp.sin(angles)
    one, zero = jnp.ones_like(c), jnp.zeros_like(c)
    entries = [[c, -s, zero], [s, c, zero], [zero, zero, one]]
    return jnp.stack([jnp.stack(line, -1) for line in entries], -2)


def orthogonal(rng):
    return {"r": np.float32(np.linalg.qr(rng.normal(size=(3, 3)))[0])}


POINTS = normals(scale=100.0, x=(16, 3))


@row(orthogonal, POINTS, grad=(0, 1), f32=True)
def rotation_by_dot(p, inputs):
    return jnp.dot(inputs["x"], p["r"], precision="highest")


@row(orthogonal, POINTS, grad=(0, 1), f32=True)
def rotation_by_einsum(p, inputs):
    return jnp.einsum("ni,ij->nj", inputs["x"], p["r"], precision=HIGHEST)


@row(orthogonal, POINTS, grad=(0, 1), f32=True)
def rotation_by_matmul(p, inputs):
    return jnp.matmul(inputs["x"], p["r"], precision=HIGHEST)


@row(orthogonal, POINTS, grad=(0, 1), f32=True)
def rotation_by_dot_general(p, inputs):
    numbers = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(inputs["x"], p["r"], numbers, precision=HIGHEST)


@row(orthogonal, POINTS, grad=(0, 1), f32=True)
def rotation_with_high_precision(p, inputs):
    return jnp.tensordot(inputs["x"], p["r"], 1, precision=jax.lax.Precision.HIGH)


@row(orthogonal, POINTS, grad=(0, 1), f32=True)
def rotation_with_an_algorithm(p, inputs):
    full = jax.lax.DotAlgorithmPreset.F32_F32_F32
    return jnp.matmul(inputs["x"], p["r"], precision=full)


@row(orthogonal, POINTS, f32=True)
def rotations_in_a_scan(p, inputs):
    def turn(x, _):
        return jnp.matmul(x, p["r"], precision=HIGHEST), None

    return jax.lax.scan(turn, inputs["x"], None, length=50)[0]


@row(normals(k=(5, 1, 1)), normals(x=(1, 32, 1)), f32=True)
def convolution_with_highest_precision(p, inputs):
    return jax.lax.conv_general_dilated(
        inputs["x"],
        p["k"],
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        precision=HIGHEST,
    )


@row(weights(w=(8, 3)), both(normals(x=(16, 8)), orthogonal))
def rotation_of_predicted_points(p, inputs):
    at = 100.0 * (inputs["x"] @ p["w"])
    return jnp.matmul(at, inputs["r"], precision=HIGHEST)


@row(weights(w=(8, 6)), normals(x=(16, 8), at=(16, 3)))
def frames_from_two_vectors(p, inputs):
    """Jumper et al. 2021, algorithm 21: Gram-Schmidt, then a rotation."""
    a, b = jnp.split(inputs["x"] @ p["w"], 2, axis=-1)
    a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
    b = b - a * jnp.sum(a * b, axis=-1, keepdims=True)
    b = b / (jnp.linalg.norm(b, axis=-1, keepdims=True) + 1e-3)
    frame = jnp.stack([a, b, jnp.cross(a, b)], -1)
    turned = jnp.einsum("nij,nj->ni", frame, inputs["at"], precision="highest")
    return turned, jnp.linalg.norm(turned, axis=-1)


@row(weights(w=(8, 12)), normals(x=(1, 8)))
def kinematic_chain(p, inputs):
    """Joint after joint: the place of the last one, 12 rotations away."""
    angles = jnp.tanh(inputs["x"] @ p["w"])[0]

    def joint(carry, angle):
        frame, at = carry
        frame = jnp.matmul(frame, rotation(angle), precision="highest")
        return (frame, at + frame[:, 0]), at

    (_, end), places = jax.lax.scan(joint, (jnp.eye(3), jnp.zeros(3)), angles)
    return end, places


@row(normals(scale=0.5, angles=(12,)), constants(one=1.0), f32=True)
def kinematic_chain_of_arguments(p, inputs):
    frame, at = jnp.eye(3), jnp.zeros(3)
    for angle in p["angles"]:
        frame = jnp.matmul(frame, rotation(angle), precision="highest")
        at = at + frame[:, 0]
    return at


# Random numbers.
KEY = 3


# Two results of one value: neither is the one that `clip` chose, and its gradient is 0.
@row(weights(w=(8, 16)), normals(x=(4, 8)), optimised=True)
def truncated_normal_between_predictions(p, inputs):
    low = jnp.tanh(inputs["x"] @ p["w"]) - 0.5
    return jax.random.truncated_normal(jax.random.key(KEY), low, low + 1.0)


@row(normals(low=(4, 16)), constants(one=1.0), f32=True)
def truncated_normal_between_arguments(p, inputs):
    low = p["low"]
    return jax.random.truncated_normal(jax.random.key(KEY), low, low + 1.0)


@row(weights(w=(8, 16)), normals(x=(4, 8)))
def gamma_with_a_predicted_shape(p, inputs):
    a = jax.nn.softplus(inputs["x"] @ p["w"]) + 1.0
    return jax.random.gamma(jax.random.key(KEY), a)


@row(weights(w=(8, 16)), normals(x=(4, 8)))
def uniform_with_predicted_bounds(p, inputs):
    high = jax.nn.softplus(inputs["x"] @ p["w"])
    return jax.random.uniform(jax.random.key(KEY), (4, 16), minval=0.0, maxval=high)


@row(weights(w=(8, 16)), normals(x=(4, 8)), grad=())
def categories_of_predicted_scores(p, inputs):
    scores = inputs["x"] @ p["w"]
    drawn = jax.random.categorical(jax.random.key(KEY), scores)
    return jnp.take_along_axis(scores, drawn[:, None], axis=1)


@row(weights(w=(8, 16)), normals(x=(4, 8)))
def gumbel_softmax(p, inputs):
    noise = jax.random.gumbel(jax.random.key(KEY), (4, 16))
    return jax.nn.softmax((inputs["x"] @ p["w"] + noise) / 0.5)


@row(weights(w=(8, 32)), both(normals(x=(4, 8)), uniform(0.1, 0.9, u=(4, 16))))
def inverse_of_a_logistic_distribution(p, inputs):
    mean, log_scale = jnp.split(inputs["x"] @ p["w"], 2, axis=1)
    u = inputs["u"]
    return mean + jnp.exp(log_scale) * (jnp.log(u) - jnp.log1p(-u))
