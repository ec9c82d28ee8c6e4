"""Where f32 would be written to memory for one reader's sake: half precision instead.

Each rule was found in the memory that a compiled step needs on an H100, see
`tests/zoo/test_shapes.py`; here each is seen in the dtypes of a traced program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jmp_amp as amp
from tests.programs import F16_IF_SLOW, dtypes_of, equations, results_of
from tests.rounding import W, X, assert_only_rounded, mean_square

NODES, WIDTH = X.shape
EDGES = jnp.arange(4 * NODES) % NODES
BIAS = jnp.linspace(-1.0, 1.0, WIDTH)[None]
TABLE = jax.random.normal(jax.random.key(2), (3, WIDTH))
BUCKETS = jnp.arange(NODES) % 3


@pytest.fixture(params=["bfloat16", F16_IF_SLOW])
def half(request):
    return request.param


def autocast(fn, half):
    return amp.autocast(fn, f"mixed_{half}")


def saved_of(fn, half):
    """Returns the shapes of what is saved for the derivative."""
    return jax.tree.leaves(
        jax.eval_shape(lambda w: jax.vjp(autocast(fn, half), w)[1], W)
    )


def assert_gradient_is_only_rounded(fn, *args):
    def gradient(transform, *args):
        return jax.grad(lambda *args: mean_square(transform(fn)(*args)))(*args)

    assert_only_rounded(gradient, args=args)


# A graph: its nodes send messages over its edges


def passed_on(w):
    nodes = X @ w + BIAS
    messages = nodes[EDGES] * 0.5
    return jax.ops.segment_sum(messages, EDGES, NODES) + nodes


def test_messages_of_more_edges_than_nodes_are_half(half):
    fn = autocast(passed_on, half)
    assert results_of(fn, W, primitive="gather") == [half]
    # They are added up in f32.
    (row,) = dtypes_of(fn, W, primitive="scatter-add")
    assert set(row) == {"float32"}
    assert_gradient_is_only_rounded(passed_on, W)


# A norm of a sum that is not computed again


def normalized(w, scale=1.0):
    norm = nn.LayerNorm(use_bias=False, use_scale=False)
    h = jnp.cumsum(X @ w * scale, axis=0) + X @ w
    return norm.apply({}, h) @ w


@pytest.mark.breadth(1)
@pytest.mark.parametrize(("half", "kept"), [("bfloat16", 2), ("float16", 4)])
def test_a_norm_keeps_a_costly_sum_in_bf16_but_not_in_f16(half, kept):
    saved = [leaf for leaf in saved_of(normalized, half) if leaf.shape == X.shape]
    assert max(leaf.dtype.itemsize for leaf in saved) == kept
    assert_gradient_is_only_rounded(normalized, W)


def test_a_norm_of_a_sum_that_overflows_f16_is_right():
    found = jax.jit(autocast(lambda w: normalized(w, 1e5), "float16"))(W)
    expected = np.asarray(normalized(W, 1e5))
    error = np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()
    assert error < 8 * float(jnp.finfo("float16").eps)


# Scores, and a bias for each of them that is looked up


@pytest.mark.breadth(2)
@pytest.mark.parametrize("move", [jnp.copy, lambda b: b.T.T, jax.jit(lambda b: b[:])])
def test_what_is_looked_up_is_added_to_scores_in_f32(move, half):
    def attention(w, table):
        return jax.nn.softmax(X @ w + move(table[BUCKETS])) @ w

    rows = dtypes_of(autocast(attention, half), W, TABLE, primitive="add")
    # Indices are added up too.
    assert list(filter(None, rows)) == [("float32",) * 3]
    assert_gradient_is_only_rounded(attention, W, TABLE)


# A gate of sums


def gated(w, sums):
    return (sums(jnp.exp(X @ w)) * jax.nn.silu(X @ w)) @ w


def pairs(h):
    return jnp.sum(jnp.stack([h, h[::-1]], axis=-1), axis=-1)


SUMS = {
    "sum and skip": lambda h: pairs(h) + 0.5 * h,
    "moved sum": lambda h: pairs(h)[::-1],
}


def gate_of(sums, half):
    fn = autocast(lambda w: gated(w, sums), half)
    return dtypes_of(fn, W, primitive="mul")[-1]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
def test_a_gate_of_sums_is_bf16_and_f32_where_sums_overflow_f16(sums):
    assert gate_of(sums, "bfloat16") == ("bfloat16",) * 3
    assert gate_of(sums, "float16") == ("float32",) * 3
    assert_gradient_is_only_rounded(lambda w: gated(w, sums), W)


def test_a_gate_of_a_sum_that_is_one_number_of_a_row_is_f32(half):
    """It is summed again."""

    def norm(h):
        return jnp.broadcast_to(jnp.sum(h, axis=1, keepdims=True), h.shape)

    assert gate_of(norm, half) == ("float32",) * 3


def test_two_sums_that_gate_each_other_are_f32(half):
    def fn(w):
        sums = pairs(jnp.exp(X @ w))
        return (sums * lax.rev(sums, (0,))) @ w

    assert dtypes_of(autocast(fn, half), W, primitive="mul")[-1] == ("float32",) * 3


# A norm that brings its own derivative


@jax.custom_jvp
def unit(h):
    return h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-3)


@unit.defjvp
def unit_derivative(primals, tangents):
    (h,), (tangent,) = primals, tangents
    factor = lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-3)
    found = h * factor
    along = found * jnp.mean(found * tangent, axis=-1, keepdims=True)
    return found, factor * (tangent - along)


@pytest.mark.breadth(1)
def test_a_rule_keeps_the_half_operand_that_others_read_too(half):
    def fn(w):
        h = X @ w
        return (h + unit(h) @ w) @ w

    saved = [leaf.dtype for leaf in saved_of(fn, half) if leaf.shape == X.shape]
    assert saved and set(map(str, saved)) == {half}
    assert_gradient_is_only_rounded(fn, W)


# What the backward pass computes again


def softmax_of(function):
    """On an H100, attention with the `tanh` of Gemma 2 needs 1.33x of by hand else."""

    def fn(w):
        scores = X @ w
        return jax.nn.softmax(function(scores)) @ w

    return fn


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("function", "apart"),
    [
        (lambda x: 30 * jnp.tanh(x / 30), True),
        (lambda x: jnp.where(BIAS > 0, -jnp.exp(x), -1e9), True),
        (lambda x: x / 30, False),
        (lambda x: jnp.where(BIAS > 0, x, -1e9), False),
    ],
)
def test_a_softmax_of_a_dear_function_is_computed_again_apart(function, apart, half):
    fn = autocast(softmax_of(function), half)
    (block,) = (
        eqn
        for eqn in equations(jax.make_jaxpr(fn)(W).jaxpr)
        if eqn.primitive.name in ("checkpoint", "remat2")
    )
    assert np.any(block.params["prevent_cse"]) == apart
    assert_gradient_is_only_rounded(softmax_of(function), W)
