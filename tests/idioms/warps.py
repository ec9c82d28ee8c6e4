"""Coordinates: grids plus predicted flows, positions that become indices, rendering."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates

from tests.idioms.row import both, constants, normals, row, uniform, weights

WIDE = 512


def signal(rng):
    waves = np.sin(np.arange(WIDE) * 0.9) + np.cos(np.arange(WIDE) * 0.31)
    return {"image": np.float32(waves + rng.normal(scale=0.1, size=WIDE))}


WARP = both(signal, normals(x=(64, 8)))
FLOW = weights(w=(8, 1))


def positions(p, inputs):
    """Where 64 pixels come from: anywhere in the signal, to a fraction of a pixel."""
    flow = 3.0 * (inputs["x"] @ p["w"])[:, 0]
    return jnp.linspace(8.0, 503.0, 64) + flow


def between(image, at):
    low = jnp.floor(at)
    i = low.astype(jnp.int32)
    return image[i] * (1 - (at - low)) + image[i + 1] * (at - low)


@row(FLOW, WARP)
def warp_by_floor(p, inputs):
    return between(inputs["image"], positions(p, inputs))


@row(FLOW, WARP)
def warp_by_floor_beside_a_smoothness_loss(p, inputs):
    at = positions(p, inputs)
    return between(inputs["image"], at), jnp.mean(jnp.diff(at) ** 2)


@row(FLOW, WARP)
def warp_by_clip_and_ceil(p, inputs):
    at = jnp.clip(positions(p, inputs), 0.0, WIDE - 1.0)
    high = jnp.ceil(at)
    i = high.astype(jnp.int32)
    image = inputs["image"]
    return image[i - 1] * (high - at) + image[i] * (1 - (high - at))


@row(FLOW, WARP)
def warp_by_map_coordinates(p, inputs):
    return map_coordinates(inputs["image"], [positions(p, inputs)], order=1)


@row(FLOW, WARP, grad=())
def nearest_pixel_by_round(p, inputs):
    i = jnp.round(positions(p, inputs)).astype(jnp.int32)
    return inputs["image"][i]


@row(FLOW, WARP, grad=())
def nearest_pixel_by_int(p, inputs):
    return inputs["image"][positions(p, inputs).astype(jnp.int32)]


@row(FLOW, both(WARP, constants(grid=np.linspace(8, 503, 64))))
def warp_of_a_grid_that_is_an_argument(p, inputs):
    flow = 3.0 * (inputs["x"] @ p["w"])[:, 0]
    return between(inputs["image"], inputs["grid"] + flow)


@row(FLOW, WARP)
def warp_of_an_arange(p, inputs):
    flow = 3.0 * (inputs["x"] @ p["w"])[:, 0]
    return between(inputs["image"], 7.5 * jnp.arange(64.0) + 10.0 + flow)


@row(FLOW, WARP)
def warp_of_an_iota(p, inputs):
    flow = 3.0 * (inputs["x"] @ p["w"])[:, 0]
    grid = jax.lax.iota(jnp.float32, 64) * 7.5 + 10.0
    return between(inputs["image"], grid + flow)


@row(FLOW, WARP)
def warp_in_unit_coordinates(p, inputs):
    """As `grid_sample` of torch: the flow and the grid are from -1 to 1."""
    flow = 0.01 * jnp.tanh(inputs["x"] @ p["w"])[:, 0]
    unit = jnp.linspace(-0.95, 0.95, 64) + flow
    return between(inputs["image"], (unit + 1) * 0.5 * (WIDE - 1))


@row(weights(w=(8, 2)), both(normals(x=(64, 8)), normals(image=(48, 48))))
def warp_of_an_image(p, inputs):
    flow = (inputs["x"] @ p["w"]).reshape(8, 8, 2)
    grid = jnp.stack(jnp.meshgrid(*[jnp.linspace(6.0, 40.0, 8)] * 2), -1)
    y, x = jnp.moveaxis(grid + flow, -1, 0)
    return map_coordinates(inputs["image"], [y, x], order=1)


@row(weights(w=(8, 6)), both(normals(x=(4, 8)), signal))
def spatial_transformer(p, inputs):
    theta = 0.1 * (inputs["x"] @ p["w"]).reshape(4, 2, 3) + jnp.eye(2, 3)[None]
    ones = jnp.ones(32)
    grid = jnp.stack([jnp.linspace(-0.8, 0.8, 32), jnp.linspace(-0.5, 0.5, 32), ones])
    at = (theta[:, 0] @ grid + 1) * 0.5 * 63
    return between(inputs["image"], jnp.clip(at, 0.0, 62.0))


@row(FLOW, WARP)
def interpolation_of_a_table(p, inputs):
    return jnp.interp(positions(p, inputs), jnp.arange(512.0), inputs["image"])


@row(FLOW, WARP)
def cubic_interpolation(p, inputs):
    at = positions(p, inputs)
    low = jnp.floor(at)
    i, t = low.astype(jnp.int32), at - low
    a, b, c, d = (inputs["image"][i + k] for k in (-1, 0, 1, 2))
    slope = 0.5 * (c - a), 0.5 * (d - b)
    cube = 2 * t**3 - 3 * t**2
    return (
        (cube + 1) * b
        + (t**3 - 2 * t**2 + t) * slope[0]
        - cube * c
        + (t**3 - t**2) * slope[1]
    )


@row(weights(w=(8, 8)), both(normals(x=(16, 8)), uniform(0.0, 300.0, t=(16,))))
def position_encoding_of_a_float(p, inputs):
    waves = 1e4 ** (-jnp.arange(4.0) / 4)
    angles = inputs["t"][:, None] * waves[None]
    code = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    return (inputs["x"] + code) @ p["w"]


@row(weights(w=(8, 1)), both(normals(x=(16, 8)), uniform(0.0, 300.0, t=(16,))))
def encoding_of_a_predicted_position(p, inputs):
    at = inputs["t"] + (inputs["x"] @ p["w"])[:, 0]
    angles = at[:, None] * (2.0 ** -jnp.arange(4.0))[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


@row(weights(w=(12, 16), v=(16, 2)), uniform(-1.0, 1.0, o=(8, 3), d=(8, 3)))
def ray_marching(p, inputs):
    """Mildenhall et al. 2020, arXiv:2003.08934, equation 3."""
    depths = jnp.linspace(1.0, 4.0, 64)
    at = inputs["o"][:, None] + depths[None, :, None] * inputs["d"][:, None]
    waves = jnp.concatenate([f(at * 2**k) for k in (0, 2) for f in (jnp.sin, jnp.cos)])
    code = jnp.moveaxis(waves.reshape(4, 8, 64, 3), 0, 2).reshape(8, 64, 12)
    density, color = jnp.moveaxis(jnp.tanh(code @ p["w"]) @ p["v"], -1, 0)
    alpha = 1 - jnp.exp(-jax.nn.softplus(density) * (3 / 63))
    clear = jnp.cumprod(1 - alpha + 1e-10, axis=1)
    clear = jnp.concatenate([jnp.ones((8, 1)), clear[:, :-1]], axis=1)
    weight = alpha * clear
    return (weight * color).sum(1), (weight * depths[None]).sum(1)


@row(weights(w=(8, 16)), normals(x=(8, 8)))
def alpha_compositing_in_a_scan(p, inputs):
    alpha = jax.nn.sigmoid(inputs["x"] @ p["w"] - 3.0)

    def turn(carry, a):
        color, clear = carry
        return (color + clear * a * 2.0, clear * (1 - a)), None

    start = (jnp.zeros(8), jnp.ones(8))
    return jax.lax.scan(turn, start, jnp.tile(alpha.T, (8, 1)))[0]


@row(weights(w=(3, 16), v=(16, 1)), normals(o=(8, 3), d=(8, 3)))
def sphere_tracing(p, inputs):
    def distance(x):
        return 0.05 * (jnp.tanh(x @ p["w"]) @ p["v"]) + 0.02

    def turn(depth, _):
        at = inputs["o"] + depth * inputs["d"]
        return depth + distance(at), None

    return jax.lax.scan(turn, jnp.zeros((8, 1)), None, length=64)[0]


@row(FLOW, both(normals(x=(64, 8)), normals(values=(64,))))
def splatting_by_scatter(p, inputs):
    at = positions(p, inputs)
    low = jnp.floor(at)
    i, part = low.astype(jnp.int32), at - low
    image = jnp.zeros(WIDE).at[i].add(inputs["values"] * (1 - part))
    return image.at[i + 1].add(inputs["values"] * part)
