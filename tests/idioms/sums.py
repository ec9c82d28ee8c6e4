"""Sums of two activations that nothing but f32 operations read."""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, normals, row, uniform, weights

TWO = weights(w=(8, 4), v=(8, 4))
X = normals(x=(32, 8))


def heads(p, inputs):
    return inputs["x"] @ p["w"], inputs["x"] @ p["v"]


@row(weights(w=(8, 12)), X)
def length_of_a_vector_in_parts(p, inputs):
    a, b, c = jnp.split((inputs["x"] @ p["w"]) * 300, 3, -1)
    return jnp.mean(jnp.sqrt(a * a + b * b + c * c))


@row(weights(w=(8, 4)), both(X, uniform(0.5, 2.0, v=(32, 4), y=(32, 4))))
def conic_surface_with_two_more_terms(p, inputs):
    r = 0.1 * jax.nn.sigmoid(inputs["x"] @ p["w"])
    v, y = inputs["v"], inputs["y"]
    return (v / (1 - jnp.sqrt(1 - r * r)) + r * y) + r


@row(weights(g=(8, 4), w=(8, 4), v=(8, 4)), normals(x=(32, 8), noise=(32, 4)))
def blend_of_two_experts_with_offsets(p, inputs):
    g = jax.nn.sigmoid(inputs["x"] @ p["g"])
    a, b = heads(p, inputs)
    y = 50 + 0.1 * inputs["noise"]
    return jnp.mean((g * (50 + 0.1 * a) + (1 - g) * (50 + 0.1 * b) - y) ** 2)


@row(TWO, X)
def log_power_of_a_spectrum(p, inputs):
    re, im = heads(p, inputs)
    re, im = 400 * re, 400 * im
    return jnp.log(re**2 + im**2 + 1e-6).mean()


@row(TWO, X)
def hypotenuse_in_a_jitted_helper(p, inputs):
    @jax.jit
    def hypotenuse(a, b):
        return jnp.sqrt(jnp.square(a) + jnp.square(b))

    a, b = heads(p, inputs)
    return hypotenuse(a * 1e3, b * 1e3) / 1e3


@row(TWO, normals(x=(6, 8, 8)))
def energy_added_up_in_a_scan(p, inputs):
    def turn(total, x):
        position, momentum = 500 * (x @ p["w"]), 500 * (x @ p["v"])
        energy = 0.5 * position**2 + 0.5 * momentum**2
        return total + jnp.mean(energy), None

    return jax.lax.scan(turn, 0.0, inputs["x"])[0] / 1e5


@row(TWO, X)
def side_opposite_of_an_angle(p, inputs):
    """The law of cosines: two sides are nearly equal and the angle is small."""
    a, b = (1 + 0.05 * jnp.tanh(h) for h in heads(p, inputs))
    return jnp.sqrt(a * a + b * b - 2 * a * b * jnp.cos(0.1))


@row(weights(w=(8, 16)), X)
def rotation_of_a_quaternion_under_vmap(p, inputs):
    def angle(x):
        a, b, c, d = jnp.split(300 * (x @ p["w"]), 4)
        return jnp.arctan2(jnp.sqrt(b * b + c * c + d * d), jnp.abs(a))

    return jax.vmap(angle)(inputs["x"])


@row(TWO, normals(x=(32, 8), noise=(32, 4)))
def mean_of_two_forecasts(p, inputs):
    a, b = (20 + 0.05 * jnp.tanh(h) for h in heads(p, inputs))
    y = 20 + 0.05 * inputs["noise"]
    return jnp.mean(((a + b) / 2 - y) ** 2)


@row(TWO, X)
def forecasts_combined_in_a_checkpoint(p, inputs):
    @jax.checkpoint
    def combined(a, b):
        mean = 0.3 * a + 0.7 * b
        return jnp.var(mean)

    a, b = (30 + 0.1 * jnp.tanh(h) for h in heads(p, inputs))
    return combined(a, b) * 1e3


@row(TWO, normals(x=(4, 8)))
def phases_in_a_fori_loop(p, inputs):
    a, b = heads(p, inputs)

    def turn(i, total):
        phase = (200 + jnp.tanh(a)) * 1.5 + (100 + jnp.tanh(b)) * 2.5
        return total + jnp.cos(phase + i.astype(jnp.float32))

    return jax.lax.fori_loop(0, 4, turn, jnp.zeros((4, 4)))


@row(TWO, X)
def ratio_of_totals(p, inputs):
    part, rest = (4e4 + 2e4 * jnp.tanh(h) for h in heads(p, inputs))
    return jnp.log(part / (part + rest)).mean()


@row(TWO, X)
def speed_beside_its_parts(p, inputs):
    """The parts are returned as well: two readers, and each of them is f32."""
    u, v = (250 * h for h in heads(p, inputs))
    return jnp.sqrt(u * u + v * v), u / 250, v / 250


@row(weights(w=(8, 8), v=(8, 8), out=(8, 4)), X)
def residual_stream_that_a_norm_reads(p, inputs):
    """A near miss: the products keep half precision, and the norm is f32."""
    h = inputs["x"] @ p["w"]
    h = h + jnp.tanh(h @ p["v"])
    scale = jax.lax.rsqrt(jnp.mean(h * h, axis=1, keepdims=True) + 1e-6)
    return (h * scale) @ p["out"]


@row(weights(w=(8, 8), v=(8, 8), out=(8, 4)), X)
def gated_sum_that_a_product_reads(p, inputs):
    """A near miss: what two heads add up to is an operand of a product."""
    a, b = inputs["x"] @ p["w"], inputs["x"] @ p["v"]
    g = jax.nn.sigmoid(a)
    return (g * a + (1 - g) * b) @ p["out"]


@row(TWO, both(X, normals(y=(32, 4))))
def gradient_of_running_products(p, inputs):
    """JAX differentiates a product of elements as a tree of multiplications."""

    def loss(p):
        a, b = map(jax.nn.sigmoid, heads(p, inputs))
        running = jnp.cumprod(a + 0.3, axis=0) * inputs["y"]
        return jnp.sum(running) + jnp.sum(jnp.prod(b + 0.3, axis=0))

    return jax.grad(loss)(p)
