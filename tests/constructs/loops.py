"""Loops: of known and unknown length, nested, differentiated, and what they carry."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.constructs.branches import layer
from tests.constructs.row import row
from tests.rounding import KEY, X, mean_square

LAYERS = jax.random.normal(jax.random.key(2), (4, 16, 16)) * 0.2


def residual(h, w):
    return h + 0.5 * jnp.tanh(h @ w)


def scan(body, init, xs=None, length=None, **options):
    return lax.scan(body, init, xs, length=length, **options)


def turned(w, length=3, turn=residual):
    """A stream through layers that share their weights."""
    return scan(lambda h, _: (turn(h, w), None), X @ w, length=length)[0]


def recurrent(w, **options):
    """The results of a cell, which adds its state to its input."""
    return scan(lambda h, x: (layer(h, w) + x, h), X[0] @ w, X, **options)[1]


def zeros_rnn(w):
    def cell(h, x):
        h = jnp.tanh(x @ w + h @ w)
        return h, h

    return scan(cell, jnp.zeros(16), X)


def rotating(w):
    # Each carry becomes the other: one of them starts as zeros.
    def body(carry, _):
        a, b = carry
        return (jnp.tanh(b @ w) + a, a), None

    return scan(body, (X @ w, jnp.zeros((8, 16))), length=3)[0]


def with_counters(w):
    def body(carry, x):
        h, count, flag, key, spectrum, nothing = carry
        key, inner = jax.random.split(key)
        noise = jax.random.normal(inner, h.shape)
        h = jnp.tanh(h @ w + 0.1 * noise * x)
        spectrum = spectrum + h.astype(jnp.complex64) * 1j
        return (h, count + 1, ~flag, key, spectrum, nothing), count

    start = (X @ w, 0, False, KEY, jnp.zeros((8, 16), jnp.complex64), None)
    (h, count, flag, _, spectrum, _), counts = scan(body, start, jnp.ones(3))
    factor = jnp.where(flag, 1.0, 2.0) * (count + counts[-1]).astype(jnp.float32)
    return mean_square(h) * factor + jnp.mean(jnp.abs(spectrum))


def named_block(w):
    def body(h, _):
        return jax.checkpoint(
            lambda h: residual(jax.nn.softmax(h), w),
            policy=jax.checkpoint_policies.dots_saveable,
        )(h), None

    return scan(body, X @ w, length=3)[0]


def tied_stack(w):
    # A stacked parameter, and a shared one, cast inside the body.
    def body(h, layer_w):
        return residual(h, layer_w + w), jnp.mean(h)

    h, means = scan(body, X, LAYERS)
    return mean_square(h) + jnp.sum(means)


def scan_of_differentiated(w):
    def body(h, _):
        return h - 0.1 * jax.grad(lambda h: jnp.sum(jnp.tanh(h @ w) ** 2))(h), None

    return scan(body, X, length=2)[0]


def updated_buffer(w):
    def body(i, buffer):
        return buffer.at[i].set(jnp.tanh(buffer[i - 1] @ w))

    return lax.fori_loop(1, 5, body, X @ w)


def online_softmax(w):
    def body(carry, block):
        highest, total, out = carry
        scores = (X @ w) @ block.T
        new = jnp.maximum(highest, jnp.max(scores, axis=1))
        shift = jnp.exp(highest - new)
        p = jnp.exp(scores - new[:, None])
        total = total * shift + jnp.sum(p, axis=1)
        return (new, total, out * shift[:, None] + p @ block), None

    start = jnp.full(8, -jnp.inf), jnp.zeros(8), jnp.zeros((8, 16))
    (_, total, out), _ = scan(body, start, (X @ w).reshape(4, 2, 16))
    return out / total[:, None]


def closed_over_activation(w):
    h = X @ w
    return turned(w, turn=lambda c, w: jnp.tanh(c @ w) + h)


def state_space(w):
    # A linear recurrence: gates and inputs are combined in pairs.
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    gates = jnp.exp(-jnp.abs(X @ w))
    return lax.associative_scan(combine, (gates, X @ w))[1] @ w


def literal_results(w):
    def body(h, _):
        return jnp.tanh(h @ w), (1.0, 2, True, h)

    h, (one, two, true, hs) = scan(body, X @ w, length=2)
    branches = lambda h: (h, 1.0, 3, h), lambda h: (h * 2, 2.0, 4, X)
    h, x, i, again = lax.cond(w[0, 0] < 9, *branches, h)
    numbers = jnp.sum(one) + jnp.sum(jnp.where(true, two, 0)).astype(x.dtype) + x + i
    return mean_square(h + again) * numbers + mean_square(hs)


def lowest_so_far(w):
    # 1e9 has no place in f16.
    def body(lowest, x):
        return jnp.minimum(lowest, x[None] @ w), None

    return scan(body, jnp.full((1, 16), 1e9), X)[0] @ w


def carried_parameter(w):
    def body(carry, _):
        h, w = carry
        return (jnp.tanh(h @ w), w), None

    return scan(body, (X @ w, w), length=2)[0]


def random_turns(w):
    def body(h, key):
        return jnp.tanh(h @ w + jax.random.normal(key, h.shape)), None

    return scan(body, X @ w, jax.random.split(KEY, 3))[0]


def growing_constant(w):
    # Nothing but constants goes into the first carry: 1e7 at the end.
    def body(carry, _):
        power, h = carry
        return (power * 10.0, h + (X @ w) * power * 1e-6), None

    return scan(body, (1.0, X @ w), length=7)[0][1]


def pytree(w):
    def turn(carry, x):
        total = (carry["sum"][0] + jnp.sum(carry["h"] * x),)
        return {"h": layer(carry["h"], w), "sum": total}, {"y": carry["h"] + x}

    return scan(turn, {"h": X @ w, "sum": (0.0,)}, jnp.ones(3))[1]["y"]


def counted_while(w):
    def turn(state):
        i, h = state
        return i + 1, residual(h, w)

    return lax.while_loop(lambda s: s[0] < 3, turn, (0, X @ w))[1]


def converging_while(w):
    def turn(state):
        h, _ = state
        new = 0.5 * jnp.tanh(h @ w)
        return new, jnp.max(jnp.abs(new - h))

    return 1 + lax.while_loop(lambda s: s[1] > 0.1, turn, (X @ w, jnp.float32(1)))[0]


def activations_while(w):
    def turn(state):
        h, c = state
        return 0.5 * jax.nn.gelu(jax.nn.silu(h @ w) + h), c * 2.0

    h, c = lax.while_loop(
        lambda s: (jnp.max(jnp.abs(s[0])) > 0.2) & (s[1] < 1e9), turn, (X @ w, 1.0)
    )
    return mean_square(1 + h) * jnp.log(c + 1.0)


def lowest_in_while(w):
    turns = 3 + (w[0, 0] > 9).astype(int)
    start = jnp.full((1, 16), 1e9)
    return lax.fori_loop(0, turns, lambda i, c: jnp.minimum(c, X[:1] @ w), start) @ w


def twice_in_while(turn):
    """Two turns of a `while`, which know their number."""
    return lambda w: lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, turn(*s, w)), (0, X @ w)
    )[1]


FROM_EITHER_SIDE = "transformed", "slow transformations"
ROWS = {
    "scan": row(turned, "half", "inside", "once", "transformed"),
    "scan_from_zeros": row(zeros_rnn, "once", *FROM_EITHER_SIDE),
    "scan_of_layers": tied_stack,
    "scan_backwards": lambda w: recurrent(w, reverse=True),
    "scan_unrolled": row(lambda w: recurrent(w, unroll=3), "slow"),
    "scan_wholly_unrolled": lambda w: recurrent(w, unroll=True),
    "scan_split_transpose": lambda w: scan(
        lambda h, x: (jnp.tanh((h + x) @ w), h), X[0] @ w, X, _split_transpose=True
    )[1],
    "scan_of_no_turns": lambda w: turned(w, 0, layer),
    "scan_of_scan": lambda w: scan(
        lambda h, _: scan(lambda h, x: (layer(h, w) + x, h), h, X[:2]),
        X[0] @ w,
        length=2,
    )[1],
    "scan_of_jit": lambda w: turned(w, turn=jax.jit(residual)),
    "scan_in_jit": row(lambda w: jax.jit(turned)(w), "slow"),
    "scan_of_checkpoint": named_block,
    "scan_in_checkpoint": jax.checkpoint(turned),
    "scan_of_gradients": scan_of_differentiated,
    "scan_rotates": rotating,
    "scan_counts": with_counters,
    "scan_meets_f32": lambda w: turned(w, turn=lambda h, w: h + jax.nn.softmax(h @ w)),
    "scan_of_trees": pytree,
    "scan_without_carry": lambda w: scan(lambda _, x: (None, layer(x, w)), None, X)[1],
    "scan_without_results": lambda w: scan(
        lambda h, _: (layer(h, w), ()), X @ w, length=2
    )[0],
    "scan_of_closure": closed_over_activation,
    "scan_of_literals": literal_results,
    "scan_of_a_parameter": carried_parameter,
    "scan_of_keys": random_turns,
    "scan_of_a_growing_constant": growing_constant,
    "lowest_so_far": lowest_so_far,
    "buffer": updated_buffer,
    "online_softmax": online_softmax,
    "vmap_of_scan": lambda w: jax.vmap(
        lambda x: scan(lambda h, _: (residual(h, w), None), x @ w, length=2)[0]
    )(X),
    "map": row(lambda w: lax.map(lambda x: layer(x, w) @ w, X), "half", "once"),
    "map_batched": row(
        lambda w: lax.map(lambda x: layer(x, w) @ w, X, batch_size=3), "slow"
    ),
    "associative": row(
        lambda w: lax.associative_scan(lambda a, b: a @ b, jnp.tanh(LAYERS @ w)), "half"
    ),
    "associative_backwards": row(
        lambda w: lax.associative_scan(jnp.add, X @ w, reverse=True) @ w,
        *("inside", "slow inside", *FROM_EITHER_SIDE),
    ),
    "state_space": state_space,
    "fori": row(
        lambda w: lax.fori_loop(0, 3, lambda i, h: residual(h, w) * (1.0 + i), X @ w),
        *("half", "inside", "slow inside", "once"),
    ),
    "fori_unrolled": row(
        lambda w: lax.fori_loop(0, 3, lambda i, h: residual(h, w), X @ w, unroll=True),
        "slow",
    ),
    "fori_of_a_number": lambda w: (
        lax.fori_loop(0, 3, lambda _, c: c * 2.0, 1.0) * (X @ w)
    ),
    "fori_of_unknown_length": row(
        lambda w: lax.fori_loop(
            0, 2 + (w[0, 0] < 9).astype(int), lambda _, h: residual(h, w), X @ w
        ),
        "forward",
    ),
    "while": row(counted_while, "forward", "half", "once"),
    "while_of_values": row(converging_while, "forward"),
    "while_of_activations": row(activations_while, "forward"),
    "lowest_in_while": row(lowest_in_while, "forward"),
    "while_of_a_number": row(
        lambda w: lax.while_loop(
            lambda c: c[0] < 10.0, lambda c: (c[0] * 2.0, c[1] @ w), (1.0, X)
        )[1],
        "forward",
    ),
    "vmap_of_while": row(
        lambda w: jax.vmap(
            lambda x, n: lax.while_loop(
                lambda s: s[0] < n, lambda s: (s[0] + 1, residual(s[1], w)), (0, x @ w)
            )[1]
        )(X, jnp.arange(8) % 3),
        "forward",
        "slow",
    ),
    "while_in_scan": row(
        lambda w: scan(
            lambda h, n: (lax.fori_loop(0, n, lambda _, h: residual(h, w), h), None),
            X @ w,
            jnp.arange(3),
        )[0],
        *("forward", "once"),
    ),
    "scan_in_while": row(
        twice_in_while(
            lambda _, h, w: scan(lambda h, _: (residual(h, w), None), h, length=2)[0]
        ),
        "forward",
        "slow",
    ),
    "cond_in_while": row(
        twice_in_while(
            lambda i, h, w: lax.cond(i == 0, lambda h: layer(h, w), lambda h: h, h)
        ),
        "forward",
    ),
}
