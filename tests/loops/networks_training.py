"""Training in a loop: the products of each turn are both passes of a network."""

import jax
import jax.numpy as jnp

from tests.idioms.row import normals, row, weights

MLP = weights(w=(8, 16), u=(16, 3))
DATA = normals(x=(10, 12, 8), y=(10, 12, 3))


def predict(p, x):
    return jnp.tanh(x @ p["w"]) @ p["u"]


def loss(p, x, y):
    return ((predict(p, x) - y) ** 2).mean()


def moved(p, g, rate):
    return jax.tree.map(lambda a, b: a - rate * b, p, g)


@row(MLP, DATA)
def gradient_descent_over_batches(p, inputs):
    """The parameters are the carry, batches are the inputs of the scan."""

    def turn(p, batch):
        value, g = jax.value_and_grad(loss)(p, batch["x"], batch["y"])
        return moved(p, g, 0.1), value

    return jax.lax.scan(turn, p, inputs)


@row(MLP, DATA)
def adam_on_one_batch(p, inputs):
    """A state of three trees, in a fori loop with the number of the step."""
    x, y = inputs["x"][0], inputs["y"][0]

    def turn(i, state):
        p, m, v = state
        g = jax.grad(loss)(p, x, y)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, v, g)
        t = (i + 1).astype(x.dtype)
        a, b = 1 - 0.9**t, 1 - 0.99**t

        def step(p, m, v):
            return p - 0.01 * (m / a) / (jnp.sqrt(v / b) + 1e-3)

        return jax.tree.map(step, p, m, v), m, v

    zeros = jax.tree.map(jnp.zeros_like, p)
    return jax.lax.fori_loop(0, 15, turn, (p, zeros, zeros))[0]


@row(MLP, DATA)
def adaptation_to_tasks(p, inputs):
    """MAML, Finn et al. 2017: a few inner steps, mapped over the tasks."""

    def adapted(x, y):
        def turn(q, _):
            return moved(q, jax.grad(loss)(q, x[:6], y[:6]), 0.1), None

        q, _ = jax.lax.scan(turn, p, None, length=3)
        return loss(q, x[6:], y[6:])

    return jax.vmap(adapted)(inputs["x"][:4], inputs["y"][:4])


@row(MLP, DATA)
def gradients_of_small_batches_added_up(p, inputs):
    def turn(total, batch):
        g = jax.grad(loss)(p, batch["x"], batch["y"])
        return jax.tree.map(jnp.add, total, g), None

    zeros = jax.tree.map(jnp.zeros_like, p)
    return jax.lax.scan(turn, zeros, inputs)[0]


@row(MLP, DATA)
def student_of_a_moving_mean(p, inputs):
    """A teacher follows its student: both are carries (Tarvainen and Valpola 2017)."""

    def turn(carry, x):
        student, teacher = carry
        aim = jax.lax.stop_gradient(predict(teacher, x))
        g = jax.grad(loss)(student, x, aim + 0.3)
        student = moved(student, g, 0.1)
        teacher = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, teacher, student)
        return (student, teacher), None

    return jax.lax.scan(turn, (p, p), inputs["x"])[0]


@row(weights(w=(8, 16), u=(16, 1), a=(3, 16), b=(16, 8)), DATA)
def generator_against_a_critic(p, inputs):
    """Two networks are trained by turns; the critic's weights are clipped."""

    def made(p, z):
        return jnp.tanh(z @ p["a"]) @ p["b"]

    def judged(p, x):
        return (jax.nn.relu(x @ p["w"]) @ p["u"]).mean()

    def of_critic(p, x, z):
        return judged(p, made(p, z)) - judged(p, x)

    def turn(p, batch):
        g = jax.grad(of_critic)(p, batch["x"], batch["y"])
        p = p | {n: jnp.clip(p[n] - 0.05 * g[n], -1.5, 1.5) for n in ("w", "u")}
        h = jax.grad(lambda p: -judged(p, made(p, batch["y"])))(p)
        return p | {n: p[n] - 0.05 * h[n] for n in ("a", "b")}, None

    return jax.lax.scan(turn, p, inputs)[0]


@row(weights(w=(8, 16), u=(16, 3)), normals(x=(12, 8), r=(12,)))
def q_learning_with_a_target(p, inputs):
    """A late copy of the network names the aim of each step."""

    def turn(i, carry):
        p, late = carry
        now = jnp.roll(inputs["x"], i, axis=0)
        best = predict(late, jnp.roll(now, -1, axis=0)).max(1)
        aim = jax.lax.stop_gradient(inputs["r"] + 0.9 * best)

        def error(p):
            return ((predict(p, now)[:, 0] - aim) ** 2).mean()

        p = moved(p, jax.grad(error)(p), 0.05)
        late = jax.tree.map(lambda a, b: jnp.where(i % 4 == 3, a, b), p, late)
        return p, late

    return jax.lax.fori_loop(0, 12, turn, (p, p))[0]


@row(weights(k=(8, 8), v=(8, 8), q=(8, 8), w=(8, 8)), normals(x=(16, 8)))
def layer_that_trains_at_test_time(p, inputs):
    """Sun et al. 2024: the state of a recurrent layer is a small network's weights."""

    def error(w, k, v):
        return ((jax.nn.gelu(k @ w) - v) ** 2).mean()

    def turn(w, x):
        w = w - 0.5 * jax.grad(error)(w, x @ p["k"], x @ p["v"])
        return w, jax.nn.gelu((x @ p["q"]) @ w)

    return jax.lax.scan(turn, p["w"], inputs["x"])[1]


@row(weights(w=(8, 16), u=(16, 3), s=(2, 8), t=(8, 1)), DATA)
def optimiser_that_is_a_network(p, inputs):
    """Andrychowicz et al. 2016: a network reads gradients and momenta, and steps."""

    def step(g, m):
        seen = jnp.stack([g, m], axis=-1)
        return (jnp.tanh(seen @ p["s"]) @ p["t"])[..., 0]

    def turn(carry, batch):
        q, m = carry
        value, g = jax.value_and_grad(loss)(q, batch["x"], batch["y"])
        m = jax.tree.map(lambda m, g: 0.8 * m + g, m, g)
        q = jax.tree.map(lambda a, g, m: a - 0.1 * step(g, m), q, g, m)
        return (q, m), value

    q = {"w": p["w"], "u": p["u"]}
    start = (q, jax.tree.map(jnp.zeros_like, q))
    return jax.lax.scan(turn, start, inputs)[1]


@row(weights(w=(3, 8, 16), u=(3, 16, 3)), DATA)
def ensemble_that_trains_together(p, inputs):
    """Three networks, mapped inside of the loop."""

    def turn(p, batch):
        g = jax.vmap(lambda q: jax.grad(loss)(q, batch["x"], batch["y"]))(p)
        return moved(p, g, 0.1), None

    p, _ = jax.lax.scan(turn, p, inputs)
    return jax.vmap(lambda q: predict(q, inputs["x"][0]))(p).mean(0)


@row(weights(w=(8, 16), u=(16, 8)), normals(x=(10, 16, 8)))
def contrastive_training(p, inputs):
    """Similarities of a batch to itself, a softmax over them, both in the loop."""

    def error(p, x):
        z = jax.nn.relu(x @ p["w"]) @ p["u"]
        z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
        return -jnp.diagonal(jax.nn.log_softmax(3.0 * (z @ z[::-1].T))).mean()

    def turn(p, x):
        value, g = jax.value_and_grad(error)(p, x)
        return moved(p, g, 0.1), value

    return jax.lax.scan(turn, p, inputs["x"])[1]


@row(weights(scale=0.3, w=(8, 3)), DATA)
def linear_probe_of_features(p, inputs):
    """Softmax regression by gradients: the smallest network that is trained."""

    def error(w, x, y):
        return -(jax.nn.log_softmax(x @ w) * jax.nn.softmax(y)).sum(1).mean()

    def turn(w, batch):
        return w - 0.3 * jax.grad(error)(w, batch["x"], batch["y"]), None

    return jax.lax.scan(turn, p["w"], inputs)[0]


@row(MLP, normals(x=(12, 8), y=(12, 3)), grad=())
def training_until_a_loss(p, inputs):
    """A while loop that stops early."""

    def turn(c):
        value, g = jax.value_and_grad(loss)(c["p"], inputs["x"], inputs["y"])
        return {"p": moved(c["p"], g, 0.1), "loss": value, "step": c["step"] + 1}

    def goes_on(c):
        return (c["loss"] > 0.05) & (c["step"] < 20)

    start = {"p": p, "loss": jnp.array(1e3), "step": 0}
    return jax.lax.while_loop(goes_on, turn, start)["p"]
