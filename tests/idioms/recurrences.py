"""Carries that add up over turns: accumulators, dynamic programs, filters."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, constants, normals, row, uniform, weights

WEIGHT = weights(w=(8, 8))
# A total so large that half precision adds no term of 0.8: two numbers of float16 are
# 2.0 apart there, and those of bfloat16 more.
LARGE = 2100.0
LONG = both(normals(x=(300, 8)), constants(total=np.full(8, LARGE)))


def mean_of_turn(p, x):
    return 0.8 + 0.1 * jnp.tanh(x @ p["w"])


@row(WEIGHT, LONG)
def total_from_an_argument(p, inputs):
    def turn(total, x):
        return total + mean_of_turn(p, x), None

    return jax.lax.scan(turn, inputs["total"], inputs["x"])[0] - inputs["total"]


@row(WEIGHT, LONG)
def total_from_the_first_turn(p, inputs):
    def turn(total, x):
        return total + mean_of_turn(p, x), None

    start = LARGE * mean_of_turn(p, inputs["x"][0])
    return jax.lax.scan(turn, start, inputs["x"][1:])[0] - start


@row(WEIGHT, LONG)
def total_from_constants(p, inputs):
    def turn(total, x):
        return total + mean_of_turn(p, x), None

    return jax.lax.scan(turn, jnp.full(8, LARGE), inputs["x"])[0] - LARGE


@row(WEIGHT, LONG)
def total_in_a_fori_loop(p, inputs):
    def turn(i, total):
        return total + mean_of_turn(p, inputs["x"][i])

    return jax.lax.fori_loop(0, 300, turn, inputs["total"]) - inputs["total"]


@row(WEIGHT, LONG, grad=())
def total_in_a_while_loop(p, inputs):
    def turn(carry):
        i, total = carry
        return i + 1, total + mean_of_turn(p, inputs["x"][i])

    start = inputs["total"]
    return jax.lax.while_loop(lambda c: c[0] < 300, turn, (0, start))[1] - start


@row(WEIGHT, both(normals(x=(30, 8)), constants(total=np.full(8, 2 * LARGE))))
def total_in_a_python_loop(p, inputs):
    total = inputs["total"]
    for x in inputs["x"]:
        total = total + (1.8 + 0.1 * jnp.tanh(x @ p["w"]))
    return total - inputs["total"]


@row(WEIGHT, normals(x=(300, 8)))
def total_of_a_cumulative_sum(p, inputs):
    return jnp.cumsum(mean_of_turn(p, inputs["x"]), axis=0)


@row(WEIGHT, normals(x=(300, 8)))
def total_in_a_dictionary_of_carries(p, inputs):
    def turn(carry, x):
        h = jnp.tanh(carry["h"] @ p["w"] + x)
        return {"h": h, "total": carry["total"] + (0.8 + 0.1 * h)}, None

    start = {"h": inputs["x"][0], "total": LARGE + inputs["x"][0]}
    total = jax.lax.scan(turn, start, inputs["x"][1:])[0]["total"]
    return total - start["total"]


@row(weights(w=(8, 5), a=(5, 5)), normals(x=(200, 8)))
def viterbi_scores(p, inputs):
    scores = inputs["x"] @ p["w"] + 2.0

    def turn(c, e):
        return jnp.max(c[:, None] + p["a"], axis=0) + e, None

    return jax.lax.scan(turn, scores[0], scores[1:])[0]


@row(weights(w=(8, 5), a=(5, 5)), both(normals(x=(200, 8)), normals(start=(5,))))
def viterbi_from_an_argument(p, inputs):
    scores = inputs["x"] @ p["w"] + 2.0

    def turn(c, e):
        return jnp.max(c[:, None] + p["a"], axis=0) + e, None

    return jax.lax.scan(turn, inputs["start"], scores)[0]


@row(weights(w=(8, 5), a=(5, 5)), normals(x=(60, 8)), grad=())
def viterbi_with_pointers(p, inputs):
    """The score of the best path, by its pointers and as an f32 reader sums it."""
    scores = 4.0 * (inputs["x"] @ p["w"])

    def forward(c, e):
        through = c[:, None] + p["a"]
        return through.max(0) + e, through.argmax(0)

    last, pointers = jax.lax.scan(forward, scores[0], scores[1:])

    def backward(state, pointer):
        return pointer[state], state

    end, path = jax.lax.scan(backward, last.argmax(), pointers, reverse=True)
    path = jnp.concatenate([end[None], path])
    return last.max(), jnp.take_along_axis(scores, path[:, None], axis=1).sum()


@row(weights(w=(8, 5), a=(5, 5)), normals(x=(200, 8)))
def forward_algorithm_in_logs(p, inputs):
    scores = inputs["x"] @ p["w"]

    def turn(c, e):
        return jax.nn.logsumexp(c[:, None] + p["a"], axis=0) + e, None

    return jax.nn.logsumexp(jax.lax.scan(turn, scores[0], scores[1:])[0])


@row(weights(w=(8, 5), a=(5, 5)), normals(x=(200, 8)))
def forward_algorithm_of_probabilities(p, inputs):
    """Rabiner 1989: each turn is normalized, and the logs of the norms add up."""
    emission = jax.nn.softmax(inputs["x"] @ p["w"])
    transition = jax.nn.softmax(p["a"])

    def turn(carry, e):
        alpha, total = carry
        alpha = (alpha @ transition) * e
        size = alpha.sum()
        return (alpha / size, total + jnp.log(size)), None

    start = (jnp.full(5, 0.2), jnp.float32(0.0))
    return jax.lax.scan(turn, start, emission)[0][1]


@row(weights(w=(8, 5), a=(5, 5)), normals(x=(100, 8)))
def conditional_random_field(p, inputs):
    scores = inputs["x"] @ p["w"]
    path = jnp.arange(100) % 5
    of_path = jnp.take_along_axis(scores, path[:, None], axis=1).sum()
    of_path = of_path + p["a"][path[:-1], path[1:]].sum()

    def turn(c, e):
        return jax.nn.logsumexp(c[:, None] + p["a"] + e[None, :], axis=0), None

    return jax.nn.logsumexp(jax.lax.scan(turn, scores[0], scores[1:])[0]) - of_path


@row(weights(w=(8, 8)), normals(x=(40, 8), y=(40, 8)))
def dynamic_time_warping(p, inputs):
    a, b = inputs["x"] @ p["w"], inputs["y"] @ p["w"]
    distances = ((a[:, None] - b[None]) ** 2).sum(-1)

    def along(before, column):
        def cell(left, both):
            above, diagonal, d = both
            best = d + jnp.minimum(jnp.minimum(above, diagonal), left)
            return best, best

        first = before[0] + column[0]
        _, now = jax.lax.scan(cell, first, (before[1:], before[:-1], column[1:]))
        return jnp.concatenate([first[None], now]), None

    start = jnp.cumsum(distances[0])
    return jax.lax.scan(along, start, distances[1:])[0][-1]


@row(weights(w=(8, 4)), normals(x=(30, 8), y=(30, 8)))
def edit_distance_of_soft_costs(p, inputs):
    a, b = inputs["x"] @ p["w"], inputs["y"] @ p["w"]
    costs = jax.nn.sigmoid(a @ b.T)

    def along(before, cost):
        def cell(left, both):
            above, diagonal, c = both
            options = -jnp.stack([above + 1.0, left + 1.0, diagonal + c])
            best = -jax.nn.logsumexp(options * 5.0) / 5.0
            return best, best

        first = before[0] + 1.0
        _, now = jax.lax.scan(cell, first, (before[1:], before[:-1], cost))
        return jnp.concatenate([first[None], now]), None

    return jax.lax.scan(along, jnp.arange(31.0), costs)[0][-1]


@row(weights(w=(8, 8)), both(normals(x=(300, 8)), uniform(0.98, 0.999, a=(8,))))
def exponential_smoothing(p, inputs):
    h = inputs["x"] @ p["w"] + 1.0

    def turn(s, h):
        s = inputs["a"] * s + (1 - inputs["a"]) * h
        return s, s

    return jax.lax.scan(turn, h[0], h[1:])[1]


@row(weights(w=(8, 8), v=(8, 8)), normals(x=(300, 8)))
def state_space_model_by_associative_scan(p, inputs):
    decay = jax.nn.sigmoid(inputs["x"] @ p["w"] + 4.0)
    drive = inputs["x"] @ p["v"]

    def combine(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    return jax.lax.associative_scan(combine, (decay, drive))[1]


@row(weights(w=(8, 8), v=(8, 8)), normals(x=(300, 8)))
def state_space_model_in_a_scan(p, inputs):
    decay = jax.nn.sigmoid(inputs["x"] @ p["w"] + 4.0)
    drive = inputs["x"] @ p["v"]

    def turn(h, both):
        h = both[0] * h + both[1]
        return h, h

    return jax.lax.scan(turn, drive[0], (decay[1:], drive[1:]))[1]


def filter_matrices(p):
    move = jnp.eye(4) + 0.05 * p["a"]
    return move, p["c"]


@row(weights(a=(4, 4), c=(4, 3)), normals(y=(60, 3)))
def kalman_filter(p, inputs):
    move, see = filter_matrices(p)

    def turn(carry, y):
        mean, cov, total = carry
        mean, cov = mean @ move, move.T @ cov @ move + 0.01 * jnp.eye(4)
        spread = see.T @ cov @ see + 0.5 * jnp.eye(3)
        gain = jnp.linalg.solve(spread, see.T @ cov).T
        wrong = y - mean @ see
        total = total + wrong @ jnp.linalg.solve(spread, wrong)
        return (mean + gain @ wrong, cov - gain @ see.T @ cov, total), mean

    start = (jnp.zeros(4), jnp.eye(4), jnp.float32(0.0))
    (mean, cov, total), means = jax.lax.scan(turn, start, inputs["y"])
    return mean, cov, total, means


@row(
    weights(a=(4, 4), c=(4, 3)),
    both(normals(y=(60, 3), mean=(4,)), constants(cov=np.eye(4))),
)
def kalman_filter_from_an_argument(p, inputs):
    move, see = filter_matrices(p)

    def turn(carry, y):
        mean, cov = carry
        mean, cov = mean @ move, move.T @ cov @ move + 0.01 * jnp.eye(4)
        spread = see.T @ cov @ see + 0.5 * jnp.eye(3)
        gain = jnp.linalg.solve(spread, see.T @ cov).T
        keep = jnp.eye(4) - gain @ see.T
        cov = keep @ cov @ keep.T + 0.5 * gain @ gain.T
        return (mean + gain @ (y - mean @ see), cov), mean

    return jax.lax.scan(turn, (inputs["mean"], inputs["cov"]), inputs["y"])
