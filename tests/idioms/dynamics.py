"""Small steps many times: differential equations, samplers, in every spelling."""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, normals, row, weights

STEPS = 400
DT = 1e-3
STATE = normals(y=(4, 8))
FIELD = weights(w=(8, 8))


def moved(y, start):
    """The end, and how far it is: of a small change only the second tells."""
    return {"end": y, "moved": y - start}


def down(p, y):
    return y - DT * (y @ p["w"])


@row(FIELD, STATE)
def one_step(p, inputs):
    return moved(down(p, inputs["y"]), inputs["y"])


@row(FIELD, STATE)
def euler_in_a_python_loop(p, inputs):
    y = inputs["y"]
    for _ in range(20):
        y = down(p, y)
    return moved(y, inputs["y"])


@row(FIELD, STATE)
def euler_in_a_scan(p, inputs):
    def turn(y, _):
        return down(p, y), None

    y, _ = jax.lax.scan(turn, inputs["y"], None, length=STEPS)
    return moved(y, inputs["y"])


@row(FIELD, STATE)
def euler_in_a_scan_that_stacks(p, inputs):
    def turn(y, _):
        y = down(p, y)
        return y, y

    _, path = jax.lax.scan(turn, inputs["y"], None, length=STEPS)
    return moved(path[-1], inputs["y"])


@row(FIELD, STATE)
def euler_in_a_fori_loop(p, inputs):
    y = jax.lax.fori_loop(0, STEPS, lambda _, y: down(p, y), inputs["y"])
    return moved(y, inputs["y"])


@row(FIELD, STATE, grad=())
def euler_in_a_while_loop(p, inputs):
    def turn(carry):
        i, y = carry
        return i + 1, down(p, y)

    _, y = jax.lax.while_loop(lambda c: c[0] < STEPS, turn, (0, inputs["y"]))
    return moved(y, inputs["y"])


@row(FIELD, STATE)
def euler_from_a_constant(p, inputs):
    start = jnp.ones((4, 8))
    y = jax.lax.fori_loop(0, STEPS, lambda _, y: down(p, y), start)
    return moved(y, start)


@row(both(FIELD, normals(y=(4, 8))), normals(force=(4, 8)))
def euler_from_a_parameter(p, inputs):
    def turn(y, _):
        return down(p, y) + DT * inputs["force"], None

    y, _ = jax.lax.scan(turn, p["y"], None, length=STEPS)
    return moved(y, p["y"])


@row(both(FIELD, weights(v=(8, 8))), STATE)
def euler_from_a_product(p, inputs):
    """The start is a half value: the steps must not be."""
    start = inputs["y"] @ p["v"]

    def turn(y, _):
        return down(p, y), None

    y, _ = jax.lax.scan(turn, start, None, length=STEPS)
    return y


@row(FIELD, STATE)
def euler_of_one_state_under_vmap(p, inputs):
    def solve(y):
        def turn(y, _):
            return y - DT * (y @ p["w"]), None

        return jax.lax.scan(turn, y, None, length=STEPS)[0]

    return moved(jax.vmap(solve)(inputs["y"]), inputs["y"])


@row(weights(w=(8, 16), v=(16, 8)), STATE)
def midpoint_of_a_small_network(p, inputs):
    def field(y):
        return jnp.tanh(y @ p["w"]) @ p["v"]

    def turn(y, _):
        half = y + 0.5 * DT * field(y)
        return y + DT * field(half), None

    y, _ = jax.lax.scan(turn, inputs["y"], None, length=STEPS)
    return moved(y, inputs["y"])


@row(weights(w=(8, 16), v=(16, 8)), STATE)
def runge_kutta_in_a_scan(p, inputs):
    def field(y):
        return jnp.tanh(y @ p["w"]) @ p["v"]

    def turn(y, _):
        a = field(y)
        b = field(y + DT / 2 * a)
        c = field(y + DT / 2 * b)
        d = field(y + DT * c)
        return y + DT / 6 * (a + 2 * b + 2 * c + d), None

    y, _ = jax.lax.scan(turn, inputs["y"], None, length=200)
    return moved(y, inputs["y"])


@row(weights(w=(8, 16), v=(16, 8)), STATE)
def runge_kutta_in_a_python_loop(p, inputs):
    def field(y):
        return jnp.tanh(y @ p["w"]) @ p["v"]

    y = inputs["y"]
    for _ in range(3):
        a = field(y)
        b = field(y + DT / 2 * a)
        c = field(y + DT / 2 * b)
        d = field(y + DT * c)
        y = y + DT / 6 * (a + 2 * b + 2 * c + d)
    return moved(y, inputs["y"])


@row(FIELD, normals(q=(4, 8), v=(4, 8)))
def leapfrog(p, inputs):
    stiff = p["w"] @ p["w"].T

    def turn(carry, _):
        q, v = carry
        v = v - 0.5 * DT * (q @ stiff)
        q = q + DT * v
        v = v - 0.5 * DT * (q @ stiff)
        return (q, v), None

    (q, v), _ = jax.lax.scan(turn, (inputs["q"], inputs["v"]), None, length=STEPS)
    return moved(q, inputs["q"]), moved(v, inputs["v"])


@row(weights(w=(8, 16), v=(16, 8)), normals(x=(4, 8), noise=(100, 4, 8)))
def langevin_sampler(p, inputs):
    def turn(x, noise):
        score = jnp.tanh(x @ p["w"]) @ p["v"] - x
        return x + DT * score + (2 * DT) ** 0.5 * noise, None

    x, _ = jax.lax.scan(turn, inputs["x"], inputs["noise"])
    return moved(x, inputs["x"])


def betas(steps):
    return jnp.linspace(1e-4, 0.02, steps)


@row(weights(w=(8, 16), v=(16, 8)), normals(x=(4, 8)))
def diffusion_without_noise(p, inputs):
    """Song et al. 2020, arXiv:2010.02502, equation 12."""
    alphas = jnp.cumprod(1 - betas(200))

    def turn(x, i):
        noise = jnp.tanh(x @ p["w"]) @ p["v"]
        a = alphas[i]
        before = jnp.where(i > 0, alphas[i - 1], 1.0)
        clean = (x - jnp.sqrt(1 - a) * noise) / jnp.sqrt(a)
        return jnp.sqrt(before) * clean + jnp.sqrt(1 - before) * noise, None

    x, _ = jax.lax.scan(turn, inputs["x"], jnp.arange(200)[::-1])
    return x


@row(weights(w=(8, 16), v=(16, 8)), normals(x=(4, 8)))
def flow_matching_in_a_fori_loop(p, inputs):
    def turn(i, x):
        t = jnp.full((4, 8), i.astype(jnp.float32) / 200)
        return x + 1 / 200 * (jnp.tanh((x + t) @ p["w"]) @ p["v"])

    x = jax.lax.fori_loop(0, 200, turn, inputs["x"])
    return moved(x, inputs["x"])


@row(FIELD, STATE)
def guided_steps_beside_the_loop(p, inputs):
    """Each turn adds a gradient that JAX takes inside."""

    def energy(y):
        return jnp.sum(jax.nn.softplus(y @ p["w"]))

    def turn(y, _):
        return y - DT * jax.grad(energy)(y), None

    y, _ = jax.lax.scan(turn, inputs["y"], None, length=STEPS)
    return moved(y, inputs["y"])


@row(weights(w=(8, 8), v=(8, 8)), normals(x=(4, 8), y=(4, 8)))
def force_that_a_product_predicted(p, inputs):
    """Every turn reads the same half value: its gradient is a sum over turns."""
    force = inputs["x"] @ p["v"]

    def turn(y, _):
        return y - DT * (y @ p["w"] - force), None

    y, _ = jax.lax.scan(turn, jnp.zeros((4, 8)), None, length=2000)
    return y
