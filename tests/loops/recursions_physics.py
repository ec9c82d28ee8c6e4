"""Recursions in time and space: physics, chemistry, biology, graphics, quantum."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, constants, normals, row, uniform, weights
from tests.loops.samplers import graph, laplacian, orthogonal, positive, stochastic

DIFFERENCES = constants(d=np.eye(23, 24, k=1) - np.eye(23, 24))


@row(normals(u=(24,)), constants(l=laplacian(24)))
def heat_by_explicit_steps(p, inputs):
    def turn(u, _):
        return u + 0.2 * (inputs["l"] @ u), u[12]

    return jax.lax.scan(turn, p["u"], None, length=150)


@row(normals(u=(24,)), constants(l=laplacian(24)))
def wave_by_leapfrog(p, inputs):
    def turn(carry, _):
        now, before = carry
        new = 2 * now - before + 0.16 * (inputs["l"] @ now)
        return (new, now), new[5]

    return jax.lax.scan(turn, (p["u"], p["u"]), None, length=150)


@row(both(normals(u=(23,)), uniform(0.5, 1.0, c=(23,))), DIFFERENCES)
def seismic_wave_on_a_staggered_grid(p, inputs):
    """Virieux 1986, in one dimension: velocity and stress by turns."""
    d = inputs["d"]

    def turn(_, carry):
        v, stress = carry
        v = v - 0.5 * (d.T @ stress)
        return v, stress + 0.5 * p["c"] * (d @ v)

    return jax.lax.fori_loop(0, 120, turn, (jnp.zeros(24), p["u"]))


@row(positive(0.2, 9.0, k=(8, 8)), normals(x=(8,), v=(8,)))
def coupled_springs_by_runge_kutta(p, inputs):
    def slope(x, v):
        return v, -(p["k"] @ x) - 0.02 * v

    def turn(carry, _):
        x, v = carry
        a, b = slope(x, v)
        c, d = slope(x + 0.05 * a, v + 0.05 * b)
        e, f = slope(x + 0.05 * c, v + 0.05 * d)
        g, h = slope(x + 0.1 * e, v + 0.1 * f)
        x = x + 0.1 / 6 * (a + 2 * c + 2 * e + g)
        return (x, v + 0.1 / 6 * (b + 2 * d + 2 * f + h)), x

    return jax.lax.scan(turn, (inputs["x"], inputs["v"]), None, length=100)


@row(positive(0.2, 4.0, k=(8, 8)), normals(f=(80, 8)))
def structure_under_a_load_by_newmark(p, inputs):
    """Newmark 1959: constant acceleration, a system in every turn."""
    left = jnp.eye(8) + 0.25 * 0.01 * p["k"] + 0.05 * 0.1 * jnp.eye(8)

    def turn(carry, force):
        x, v, a = carry
        ahead, speed = x + 0.1 * v + 0.0025 * a, v + 0.05 * a
        new = jnp.linalg.solve(left, force - p["k"] @ ahead - 0.1 * speed)
        return (ahead + 0.0025 * new, speed + 0.05 * new, new), ahead

    zero = jnp.zeros(8)
    return jax.lax.scan(turn, (zero, zero, zero), inputs["f"])[1]


@row(positive(0.2, 3.0, h=(12, 12)), normals(re=(12,), im=(12,)))
def schroedinger_equation_by_parts(p, inputs):
    """Visscher 1991: the real part and the imaginary part, by turns."""

    def turn(carry, _):
        re, im = carry
        re = re + 0.05 * (p["h"] @ im)
        return (re, im - 0.05 * (p["h"] @ re)), (re**2).sum()

    return jax.lax.scan(turn, (inputs["re"], inputs["im"]), None, length=200)


@row(positive(0.1, 3.0, h=(12, 12)), normals(psi=(12,)))
def ground_state_in_imaginary_time(p, inputs):
    def turn(psi, _):
        psi = psi - 0.2 * (p["h"] @ psi)
        psi = psi / jnp.linalg.norm(psi)
        return psi, psi @ (p["h"] @ psi)

    psi, energies = jax.lax.scan(turn, inputs["psi"], None, length=150)
    return energies[-1], psi**2


@row(both(positive(0.3, 3.0, h=(5, 5)), weights(scale=0.4, g=(5, 5, 5))), normals(x=()))
def self_consistent_field(p, inputs):
    """Hartree and Fock: the field of the electrons moves the electrons."""

    def turn(density, _):
        mean = jnp.einsum("kij,kl,lmn,mn->ij", p["g"], jnp.eye(5), p["g"], density)
        fock = p["h"] + 0.15 * (mean + mean.T)
        energies, orbitals = jnp.linalg.eigh(fock)
        filled = orbitals[:, :2]
        return 0.5 * density + 0.5 * (filled @ filled.T), energies[:2]

    density, energies = jax.lax.scan(turn, 0.4 * jnp.eye(5), None, length=20)
    return density, energies[-1]


@row(uniform(0.2, 1.0, k=(8,)), both(uniform(0.5, 1.5, c=(6,)), normals(s=(6, 8))))
def chemical_kinetics(p, inputs):
    """Rates of eight reactions of six species, mass conserved by the matrix."""
    change = 0.3 * (inputs["s"] - inputs["s"].mean(0, keepdims=True))

    def turn(c, _):
        first = c[jnp.arange(8) % 6]
        second = c[jnp.arange(8) * 5 % 6]
        rates = p["k"] * first * second / (1 + first + second)
        c = c + 0.01 * (change @ rates)
        return c, c - inputs["c"]

    return jax.lax.scan(turn, inputs["c"], None, length=100)


@row(uniform(0.5, 1.5, m=(8,)), normals(x=(8, 3), v=(8, 3)))
def bodies_under_gravity(p, inputs):
    """Distances by a product of the positions, forces by another."""

    def pull(x):
        size = (x**2).sum(1)
        far = size[:, None] + size[None] - 2 * x @ x.T
        w = p["m"][None] / (jnp.maximum(far, 0.0) + 0.5) ** 1.5
        return w @ x - w.sum(1)[:, None] * x

    def turn(carry, _):
        x, v, a = carry
        x = x + 0.03 * v + 0.00045 * a
        new = pull(x)
        return (x, v + 0.015 * (a + new), new), None

    start = (2 * inputs["x"], 0.5 * inputs["v"], pull(2 * inputs["x"]))
    return jax.lax.scan(turn, start, None, length=60)[0][:2]


@row(uniform(1.0, 3.0, k=(23,)), both(DIFFERENCES, normals(x=(24, 3))))
def hanging_rope_by_implicit_steps(p, inputs):
    """Baraff and Witkin 1998: nested loops, conjugate gradients in each step."""
    d = inputs["d"]

    def stiff(x):
        return jnp.einsum("ei,e,ej,jc->ic", d, p["k"], d, x)

    def solve(b):
        def turn(_, carry):
            x, r, s, size = carry
            step_of = s + 0.25 * stiff(s)
            step = size / (s * step_of).sum()
            r = r - step * step_of
            new = (r * r).sum()
            return x + step * s, r, r + new / size * s, new

        start = (jnp.zeros_like(b), b, b, (b * b).sum())
        return jax.lax.fori_loop(0, 6, turn, start)[0]

    def turn(carry, _):
        x, v = carry
        v = solve(v - 0.5 * stiff(x))
        return (x + 0.5 * v, v), None

    start = (inputs["x"], jnp.zeros((24, 3)))
    return jax.lax.scan(turn, start, None, length=12)[0]


MOMENTS = constants(
    m=[[1, 1, 1], [-1, 0, 1], [1, 0, 1]],
    back=np.linalg.inv([[1, 1, 1], [-1, 0, 1], [1, 0, 1]]),
)


@row(uniform(0.5, 1.5, rho=(24,)), MOMENTS)
def lattice_boltzmann_of_a_line(p, inputs):
    """Collide in moments, then stream to both sides."""

    def turn(f, _):
        m = inputs["m"] @ f
        rest = jnp.stack([m[0], m[1], m[0] / 3 + m[1] ** 2 / m[0]])
        f = inputs["back"] @ (m - jnp.array([0.0, 0.0, 1.2])[:, None] * (m - rest))
        return jnp.stack([jnp.roll(f[0], -1), f[1], jnp.roll(f[2], 1)]), m[1]

    start = jnp.stack([p["rho"] / 6, p["rho"] * 2 / 3, p["rho"] / 6])
    f, momenta = jax.lax.scan(turn, start, None, length=40)
    return f.sum(0), momenta


def fourier_derivative(size):
    """The derivative of functions on a circle of an odd number of points."""
    k = np.subtract.outer(np.arange(size), np.arange(size))
    with np.errstate(divide="ignore"):
        d = 0.5 * (-1.0) ** k / np.sin(np.pi * k / size)
    return np.where(k == 0, 0.0, d)


@row(normals(a=(3,)), constants(d=fourier_derivative(17)))
def burgers_equation_by_a_spectral_matrix(p, inputs):
    x = jnp.linspace(0.0, 2 * jnp.pi, 18)[:17]
    waves = jnp.sin(x[None] * jnp.arange(1.0, 4.0)[:, None])
    u = (p["a"][:, None] * waves).sum(0) / 2

    def slope(u):
        du = inputs["d"] @ u
        return 0.2 * (inputs["d"] @ du) - u * du

    def turn(u, _):
        half = u + 0.01 * slope(u)
        return u + 0.02 * slope(half), None

    return jax.lax.scan(turn, u, None, length=60)[0]


@row(positive(0.5, 2.0, w=(12, 12)), both(graph(g=(12, 12)), normals(v=(12,))))
def excitable_cells(p, inputs):
    """FitzHugh and Nagumo, coupled by a graph: neuroscience, not a network."""
    links = jnp.abs(p["w"]) * inputs["g"]

    def turn(carry, _):
        v, w = carry
        flow = links @ v - links.sum(1) * v
        v_new = v + 0.1 * (v - v**3 / 3 - w + 0.5 + 0.3 * flow)
        return (v_new, w + 0.1 * 0.08 * (v + 0.7 - 0.8 * w)), v

    start = (inputs["v"], jnp.zeros(12))
    return jax.lax.scan(turn, start, None, length=150)[1]


@row(both(normals(omega=(10,)), uniform(0.0, 0.2, k=(10, 10))), normals(theta=(10,)))
def phases_that_synchronise(p, inputs):
    """Kuramoto 1975: sines and cosines, coupled by a matrix."""

    def turn(theta, _):
        sine, cosine = jnp.sin(theta), jnp.cos(theta)
        pull = cosine * (p["k"] @ sine) - sine * (p["k"] @ cosine)
        return theta + 0.05 * (p["omega"] + pull), None

    return jax.lax.scan(turn, inputs["theta"], None, length=150)[0]


@row(
    both(uniform(0.5, 1.0, r=(6,)), uniform(0.0, 0.15, a=(6, 6))),
    uniform(0.2, 1.0, x=(6,)),
)
def species_that_compete(p, inputs):
    """Lotka and Volterra, generalised to six species."""

    def turn(x, _):
        return x + 0.05 * x * (p["r"] - x - p["a"] @ x), x

    end, path = jax.lax.scan(turn, inputs["x"], None, length=150)
    return end, path[1:] - path[:-1]


@row(
    both(uniform(0.4, 1.2, f=(8,)), uniform(0.6, 0.95, s=(7,))),
    uniform(1.0, 2.0, n=(8,)),
)
def ages_of_a_population(p, inputs):
    """Leslie 1945: births in the first row, survival below the diagonal."""
    leslie = jnp.zeros((8, 8)).at[0].set(0.35 * p["f"])
    leslie = leslie.at[jnp.arange(1, 8), jnp.arange(7)].set(p["s"])

    def turn(n, _):
        n = leslie @ n
        return n, n.sum()

    return jax.lax.scan(turn, inputs["n"], None, length=60)[1]


@row(uniform(0.05, 0.5, t=(20,)), both(stochastic(q=(4, 4)), stochastic(leaf=(20, 4))))
def likelihood_of_a_tree_by_pruning(p, inputs):
    """Felsenstein 1981, on a caterpillar tree, with logs of the norms."""
    identity = jnp.eye(4)

    def moved(t, x):
        decay = jnp.exp(-t)
        return (decay * identity + (1 - decay) * inputs["q"]) @ x

    def turn(carry, both):
        partial, total = carry
        t, leaf = both
        partial = moved(t, partial) * moved(2 * t, leaf)
        size = partial.sum()
        return (partial / size, total + jnp.log(size)), None

    start = (jnp.ones(4), jnp.zeros(()))
    return jax.lax.scan(turn, start, (p["t"], inputs["leaf"]))[0]


@row(normals(angle=(40,)), normals(x=(2,)))
def chain_of_rigid_motions(p, inputs):
    """A robot's dead reckoning: products of homogeneous matrices."""

    def turn(pose, angle):
        c, s = jnp.cos(0.5 * angle), jnp.sin(0.5 * angle)
        zero, one = jnp.zeros(()), jnp.ones(())
        rows = [c, -s, one, s, c, 0.1 * one, zero, zero, one]
        pose = pose @ jnp.stack(rows).reshape(3, 3)
        return pose, pose[:2, 2]

    return jax.lax.scan(turn, jnp.eye(3), p["angle"])


@row(normals(rate=(100, 3)), normals(x=(2,)))
def attitude_from_a_gyroscope(p, inputs):
    """Quaternions by a matrix of the rates, normalised in each turn."""

    def turn(q, w):
        x, y, z = 0.1 * w
        zero = jnp.zeros(())
        rows = [zero, -x, -y, -z, x, zero, z, -y, y, -z, zero, x, z, y, -x, zero]
        q = q + 0.5 * (jnp.stack(rows).reshape(4, 4) @ q)
        return q / jnp.linalg.norm(q), q

    return jax.lax.scan(turn, jnp.zeros(4).at[0].set(1.0), p["rate"])[1]


@row(uniform(-3.0, 3.0, angle=(30, 4)), normals(x=(2,)))
def quantum_circuit_of_rotations(p, inputs):
    """Four qubits, real amplitudes: a layer of turns and of controlled signs."""
    index = jnp.arange(16)
    both_set = ((index & (index >> 1)) & 7) > 0
    signs = jnp.where(both_set, -1.0, 1.0)

    def turn(state, angles):
        for qubit in range(4):
            c, s = jnp.cos(angles[qubit] / 2), jnp.sin(angles[qubit] / 2)
            gate = jnp.stack([c, -s, s, c]).reshape(2, 2)
            parts = state.reshape(2**qubit, 2, -1)
            state = jnp.einsum("ab,ibj->iaj", gate, parts).reshape(16)
        return state * signs, None

    start = jnp.zeros(16).at[0].set(1.0)
    state, _ = jax.lax.scan(turn, start, p["angle"])
    return (state**2).reshape(2, 8).sum(1), state


@row(weights(a=(2, 6, 6)), normals(x=(2,)))
def norm_of_a_matrix_product_state(p, inputs):
    """A tensor network, contracted from the left, with the logs of its norms."""

    def turn(carry, _):
        left, total = carry
        left = jnp.einsum("ab,sac,sbd->cd", left, p["a"], p["a"])
        size = jnp.trace(left)
        return (left / size, total + jnp.log(size)), None

    start = (jnp.eye(6), jnp.zeros(()))
    (left, total), _ = jax.lax.scan(turn, start, None, length=50)
    return left, total


@row(stochastic(f=(16, 16)), uniform(0.5, 0.9, rho=(16,)))
def radiosity_of_a_room(p, inputs):
    """Goral et al. 1984: light is gathered from all patches, again and again."""
    emitted = jnp.zeros(16).at[0].set(5.0)

    def gather(_, light):
        return emitted + inputs["rho"] * (p["f"] @ light)

    return jax.lax.fori_loop(0, 60, gather, emitted)


@row(both(stochastic(scatter=(10, 10)), uniform(0.2, 0.6, f=(10,))), normals(x=(2,)))
def criticality_of_a_reactor(p, inputs):
    """Fission by power iteration, scattering by an inner loop."""

    def scattered(source):
        return jax.lax.fori_loop(
            0, 20, lambda _, flux: source + 0.6 * (p["scatter"] @ flux), source
        )

    def turn(carry, _):
        flux, k = carry
        new = scattered(p["f"][::-1] * (p["f"] * flux).sum() / k + 0.1 * flux)
        k = k * new.sum() / flux.sum()
        return (new / new.sum(), k), None

    return jax.lax.scan(turn, (jnp.full(10, 0.1), jnp.ones(())), None, length=10)[0]


def rotations(rng):
    """A generator of turns: an antisymmetric matrix."""
    q = orthogonal(rng, 8)
    return {"a": np.float32(q - q.T)}


@row(rotations, normals(x=(8,)))
def adams_bashforth_of_a_rotation(p, inputs):
    """Two steps back: what was the slope is a carry."""

    def turn(carry, _):
        x, before = carry
        slope = p["a"] @ x
        x = x + 0.04 * (1.5 * slope - 0.5 * before)
        return (x, slope), (x * x).sum()

    return jax.lax.scan(turn, (inputs["x"], p["a"] @ inputs["x"]), None, length=150)
