"""Bodies, springs, fields, signals and geometry."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, constants, normals, row, uniform, weights


@row(
    weights(w=(4, 8), v=(8, 1)),
    both(normals(scale=3.0, at=(6, 3)), normals(v=(6, 3), kind=(6, 4))),
)
def bodies_with_learned_masses(p, inputs):
    mass = jax.nn.softplus(jnp.tanh(inputs["kind"] @ p["w"]) @ p["v"])[:, 0]

    def turn(carry, _):
        at, v = carry
        apart = at[None] - at[:, None]
        far = ((apart**2).sum(-1) + 0.5) ** -1.5
        v = v + 1e-3 * (mass[None, :, None] * far[..., None] * apart).sum(1)
        return (at + 1e-3 * v, v), None

    start = (inputs["at"], inputs["v"])
    (at, v), _ = jax.lax.scan(turn, start, None, length=300)
    return at - inputs["at"], v - inputs["v"]


@row(weights(w=(3, 16), v=(16, 1)), normals(scale=3.0, at=(6, 3), v=(6, 3)))
def forces_of_a_learned_energy(p, inputs):
    def energy(at):
        return (jnp.tanh(at @ p["w"]) @ p["v"]).sum()

    def turn(carry, _):
        at, v = carry
        v = v - 1e-3 * jax.grad(energy)(at)
        return (at + 1e-3 * v, v), None

    start = (inputs["at"], inputs["v"])
    (at, v), _ = jax.lax.scan(turn, start, None, length=300)
    return at - inputs["at"], v - inputs["v"]


@row(weights(k=(8, 8)), normals(x=(8,), v=(8,)))
def springs_as_a_product(p, inputs):
    stiffness = p["k"] @ p["k"].T + jnp.eye(8)

    def turn(carry, _):
        x, v = carry
        v = v - 1e-3 * (stiffness @ x)
        return (x + 1e-3 * v, v), None

    start = (inputs["x"], inputs["v"])
    (x, v), _ = jax.lax.scan(turn, start, None, length=300)
    return x - inputs["x"], 0.5 * v @ v + 0.5 * x @ (stiffness @ x)


@row(weights(k=(8, 8)), normals(x=(8,), v=(8,)))
def springs_in_a_python_loop(p, inputs):
    x, v = inputs["x"], inputs["v"]
    for _ in range(15):
        v = v - 1e-3 * (p["k"] @ x)
        x = x + 1e-3 * v
    return x - inputs["x"], v - inputs["v"]


@row(weights(w=(8, 1)), normals(x=(64, 8), u=(64,)))
def heat_equation_with_learned_sources(p, inputs):
    source = (inputs["x"] @ p["w"])[:, 0]

    def turn(u, _):
        return u + 0.2 * (jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1)) + 1e-3 * source, u

    u, path = jax.lax.scan(turn, inputs["u"], None, length=300)
    return u, path.mean(1)


@row(weights(w=(8, 1)), normals(x=(64, 8), u=(64,)))
def wave_equation_from_a_learned_start(p, inputs):
    start = (inputs["x"] @ p["w"])[:, 0]

    def turn(carry, _):
        before, u = carry
        new = 2 * u - before + 0.1 * (jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1))
        return (u, new), None

    (_, u), _ = jax.lax.scan(turn, (start, start), None, length=100)
    return u


@row(weights(k=(3, 1, 1)), normals(u=(1, 64, 1)))
def diffusion_by_convolution(p, inputs):
    def turn(u, _):
        du = jax.lax.conv_general_dilated(
            u, p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return u + 1e-3 * du, None

    u, _ = jax.lax.scan(turn, inputs["u"], None, length=300)
    return u - inputs["u"]


@row(weights(w=(8, 64)), normals(x=(4, 8)))
def spectrum_of_a_predicted_signal(p, inputs):
    h = inputs["x"] @ p["w"]
    power = jnp.abs(jnp.fft.rfft(h)) ** 2
    return power, jnp.log(power.sum(1))


@row(weights(w=(64, 64)), normals(x=(4, 64)))
def filter_in_the_frequency_domain(p, inputs):
    h = inputs["x"] @ p["w"]
    kept = jnp.exp(-jnp.arange(33.0) / 10)[None]
    waves = jnp.fft.rfft(h) * kept.astype(jnp.complex64)
    return jnp.fft.irfft(waves, 64)


@row(weights(w=(8, 64)), normals(x=(4, 8)))
def fourier_basis_as_a_product(p, inputs):
    turns = jnp.arange(64.0)[:, None] * jnp.arange(16.0)[None] * (2 * jnp.pi / 64)
    h = inputs["x"] @ p["w"]
    real, imaginary = h @ jnp.cos(turns), h @ jnp.sin(turns)
    return jnp.sqrt(real**2 + imaginary**2 + 1e-6)


@row(weights(w=(8, 200)), normals(x=(4, 8)))
def phase_that_adds_up(p, inputs):
    """An oscillator whose frequency is predicted: its phase becomes large."""
    frequency = 1.0 + 0.1 * (inputs["x"] @ p["w"])
    phase = jnp.cumsum(frequency, axis=1)
    return jnp.sin(phase)


@row(weights(w=(8, 1)), both(normals(x=(200, 8)), constants(phase=0.0)))
def phase_in_a_scan(p, inputs):
    def turn(phase, x):
        phase = phase + 1.0 + 0.1 * (x @ p["w"])[0]
        return phase, jnp.sin(phase)

    return jax.lax.scan(turn, inputs["phase"], inputs["x"])[1]


@row(weights(w=(8, 64)), normals(x=(4, 8)))
def derivative_by_differences(p, inputs):
    h = jnp.sin(inputs["x"] @ p["w"])
    return jnp.diff(h, axis=1), (h[:, 2:] - 2 * h[:, 1:-1] + h[:, :-2]).sum(1)


@row(weights(w=(8, 16), v=(16, 1)), normals(x=(16, 8)))
def derivative_of_a_network_by_steps(p, inputs):
    """The difference of two passes: products in half have no digits for it."""

    def network(x):
        return jnp.tanh(x @ p["w"]) @ p["v"]

    step = 0.1 * jnp.ones((1, 8))
    return (network(inputs["x"] + step) - network(inputs["x"] - step)) / 0.2


@row(weights(w=(8, 16), v=(16, 1)), normals(x=(16, 8)))
def derivative_of_a_network_by_jvp(p, inputs):
    def network(x):
        return jnp.tanh(x @ p["w"]) @ p["v"]

    value, slope = jax.jvp(network, (inputs["x"],), (jnp.ones((16, 8)),))
    return value, slope


@row(weights(w=(1, 16), v=(16, 1)), uniform(-1.0, 1.0, x=(32, 1)))
def physics_informed_loss(p, inputs):
    """Raissi et al. 2017, arXiv:1711.10561: u'' = -u, with u(0) = 1."""

    def u(x):
        return (jnp.tanh(x[None] @ p["w"]) @ p["v"])[0, 0]

    def second(x):
        return jax.grad(lambda x: jax.grad(u)(x)[0])(x)[0]

    inside = jax.vmap(second)(inputs["x"]) + jax.vmap(u)(inputs["x"])
    return jnp.mean(inside**2), (u(jnp.zeros(1)) - 1.0) ** 2


@row(weights(w=(8, 101)), normals(x=(4, 8)))
def integral_by_trapezoids(p, inputs):
    h = jnp.exp(0.3 * (inputs["x"] @ p["w"]))
    t = jnp.linspace(0.0, 5.0, 101)
    return jnp.trapezoid(h, t[None], axis=1), jnp.cumsum(h, axis=1)[:, -1] * 0.05


@row(weights(w=(1, 16), v=(16, 1)), normals(x=(8,)))
def integral_of_a_network_by_quadrature(p, inputs):
    t, weight = np.polynomial.legendre.leggauss(16)
    at = jnp.float32(t + 1.0)[:, None] * inputs["x"][None]
    h = jnp.tanh(at[..., None] @ p["w"]) @ p["v"]
    return (jnp.float32(weight)[:, None] * h[..., 0]).sum(0) * inputs["x"]


@row(weights(w=(8, 6)), normals(x=(32, 8)))
def angles_between_predicted_vectors(p, inputs):
    a, b = jnp.split(inputs["x"] @ p["w"], 2, axis=1)
    normal = jnp.cross(a, b)
    inside = (a * b).sum(1)
    return jnp.arctan2(jnp.linalg.norm(normal, axis=1), inside), normal


@row(weights(w=(8, 4)), normals(x=(32, 8), at=(32, 3)))
def rotation_by_quaternions(p, inputs):
    q = inputs["x"] @ p["w"]
    q = q / jnp.linalg.norm(q, axis=1, keepdims=True)
    s, u = q[:, :1], q[:, 1:]
    t = 2 * jnp.cross(u, inputs["at"])
    return inputs["at"] + s * t + jnp.cross(u, t)


@row(weights(w=(8, 4)), normals(x=(100, 8)))
def quaternions_multiplied_in_a_scan(p, inputs):
    turns = jnp.array([1.0, 0, 0, 0])[None] + 0.05 * (inputs["x"] @ p["w"])

    def product(a, b):
        s = a[:1] * b[:1] - jnp.sum(a[1:] * b[1:])
        u = a[:1] * b[1:] + b[:1] * a[1:] + jnp.cross(a[1:], b[1:])
        return jnp.concatenate([s, u])

    def turn(q, by):
        q = product(q, by)
        return q / jnp.linalg.norm(q), None

    return jax.lax.scan(turn, jnp.array([1.0, 0, 0, 0]), turns)[0]


@row(weights(w=(8, 3)), normals(x=(32, 8), at=(32, 3)))
def distances_of_moved_points(p, inputs):
    at = 50.0 * inputs["at"] + inputs["x"] @ p["w"]
    apart = at[:, None] - at[None]
    far = jnp.sqrt((apart**2).sum(-1) + 1e-6)
    return far, (far < 40.0).sum(1)


@row(weights(w=(8, 3)), normals(x=(32, 8), at=(32, 3)))
def equivariant_layer(p, inputs):
    """Satorras et al. 2021, arXiv:2102.09844: coordinates move a little each layer."""
    at = 10.0 * inputs["at"]
    h = inputs["x"]
    for _ in range(3):
        apart = at[:, None] - at[None]
        far = (apart**2).sum(-1)
        pull = jnp.tanh((h @ p["w"]) @ (h @ p["w"]).T / 10) / (1 + far)
        at = at + 1e-2 * (apart * pull[..., None]).sum(1)
    return at - 10.0 * inputs["at"]


@row(weights(w=(8, 2)), normals(x=(16, 8)))
def projection_of_a_camera(p, inputs):
    depth = 2.0 + jax.nn.softplus((inputs["x"] @ p["w"])[:, 0])
    across = 300.0 * (inputs["x"] @ p["w"])[:, 1] / depth + 320.0
    return across, jnp.stack([across - jnp.floor(across), depth], 1)


@row(weights(w=(8, 4)), both(normals(x=(32, 8)), uniform(10.0, 500.0, box=(32, 2))))
def boxes_from_predicted_offsets(p, inputs):
    """Ren et al. 2015, arXiv:1506.01497, equation 2, and the overlap of boxes."""
    d = 0.1 * (inputs["x"] @ p["w"])
    middle = inputs["box"] + 20.0 * d[:, :2]
    size = 20.0 * jnp.exp(d[:, 2:])
    low, high = middle - size / 2, middle + size / 2
    inner_low = jnp.maximum(low[:, None], low[None])
    inner_high = jnp.minimum(high[:, None], high[None])
    inner = jnp.maximum(inner_high - inner_low, 0.0).prod(-1)
    area = size.prod(-1)
    return middle, inner / (area[:, None] + area[None] - inner)
