"""Which dtype every operation gets, read from the jaxpr of the transformed function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

import jmp_amp as amp
from tests.measures import compiled
from tests.programs import (
    BF16,
    F16,
    F16_IF_SLOW,
    F32,
    HALF,
    casts_of,
    check_plan,
    dtypes_of,
    each_plan,
    equations,
    plans,
    results_of,
)
from tests.rounding import half_of

# Names of one primitive in the versions of JAX.
REMAT = ("checkpoint", "remat", "remat2")
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
ROW, BIAS = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 16), (16,)))
LOWEST = float(jnp.finfo(jnp.float32).min)
MIXED_F16 = "mixed_float16"


@pytest.fixture(params=[BF16, F16_IF_SLOW])
def half(request):
    return request.param


def autocast(fn, half="bfloat16"):
    return amp.autocast(fn, f"mixed_{half}")


# What is bound to which dtype


def convolution(x, k):
    return lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def block(x, w, b):
    h = x @ w + b
    h = h + jnp.tanh(h) @ w
    return h @ w


def rotate(x, w):
    angle = jnp.outer(jnp.arange(8.0), 1e4 ** -(jnp.arange(16.0) / 16))
    return (x @ w * jnp.cos(angle)) @ w


def standardised(x, w):
    w = (w - jnp.mean(w)) / (jnp.std(w) + jnp.float32(1e-5))
    return x @ w


def variance(x, w):
    h = x @ w
    return jnp.sum(jnp.square(h * 2.0)), h @ w


def read_twice(x, w):
    h = jnp.tanh(x @ w)
    return jnp.sum(h), h @ w


def norm(h):
    return jnp.tanh(h)


def attend(scale):
    def fn(x, w):
        return jax.nn.softmax(scale(x @ w, x > 0)) @ w

    return fn


def of_segments(x, w):
    return jax.ops.segment_max(x @ w, jnp.arange(8) // 2, 4)


def compared(x, w):
    h = x @ w
    return jnp.sum(jnp.where(h > 0.5, h, 2 * h) @ w), h < h[::-1]


def plus(constant, **how):
    return plans(lambda x, w: (x @ w + constant) @ w, **how)


PLANNED = {
    "a matrix product runs in the compute dtype": plans(
        lambda x, w: x @ w, dot_general=[HALF]
    ),
    "a convolution runs in the compute dtype": plans(
        *(convolution, jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4))),
        conv_general_dilated=[HALF],
    ),
    "a bias after a product stays low, and so does the residual stream": plans(
        block, X, W, ROW, add=[HALF, HALF]
    ),
    "an f32 operand that activations make makes the result f32": plans(
        lambda x, w: (x @ w) * jnp.exp(x @ w) @ w, mul=[F32]
    ),
    "a table of constants keeps its digits": plans(rotate, cos=[F32], mul=[..., F32]),
    "what only parameters and inputs make is left untouched": plans(
        standardised, sub={F32}, dot_general=[HALF]
    ),
    # Early up-casts
    "what only feeds f32 operations runs in f32": plans(
        variance, square=[F32], mul=[F32]
    ),
    "an output in f32 is an f32 consumer": plans(lambda x, w: x @ w + 1.0, add=[F32]),
    "a second reader does not change what a value is computed in": plans(
        read_twice, tanh=[F32], why={"tanh": "f32 between products"}
    ),
    "the early up-cast passes through an inner jit": plans(
        lambda x, w: jnp.sum(jax.jit(lambda h: jax.jit(lambda h: h * 3.0)(h))(x @ w)),
        mul=[F32],
    ),
    "an exact operation that f32 alone reads is f32": plans(
        attend(lambda h, mask: jnp.where(mask, h, -1e4)), select_n=[..., F32]
    ),
    "with the product before it, that gains": plans(
        attend(lambda h, mask: jnp.where(mask, h * 0.3, 0.0)), select_n=[F32]
    ),
    **{
        f"an explicit up-cast of activations in {half} stays f32": plans(
            lambda x, w, d=half: (
                jnp.tanh((x.astype(d) @ w.astype(d)).astype(jnp.float32)) @ w
            ),
            half=half,
            tanh=[F32],
        )
        for half in (BF16, F16)
    },
    "a bias is cast before it is broadcast": plans(
        lambda x, w, b: (x @ w + jnp.broadcast_to(b, (8, 16))) @ w,
        *(X, W, BIAS),
        broadcast_in_dim=[HALF],
    ),
    # Bound otherwise
    "a function of the user called norm is nothing special": plans(
        lambda x, w: norm(x @ w) @ w, tanh=[HALF]
    ),
    "a product that names its algorithm keeps the dtypes that it names": plans(
        lambda x, w: lax.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32),
        dot_general=[F32],
    ),
    "explain says what an operation is bound to": plans(
        of_segments,
        why={
            "scatter-max": "bound to the dtypes that it was traced in",
            "iota": "nothing here may be cast",
        },
    ),
    "a comparison reads half activations as they are": plans(
        compared, gt=[HALF], lt=[HALF]
    ),
    "a comparison of two dtypes is made in f32": plans(
        lambda x, w: x @ w > jnp.exp(x @ w), gt=[F32]
    ),
    # Constants
    **{
        f"f16 has no place for {constant}": plus(constant, half=F16, add=[F32])
        for constant in (-1e9, LOWEST, 1e5, 1e-8)
    },
    **{
        f"{constant} fits in {dtype}": plus(constant, half=dtype, add=[dtype])
        for constant, dtype in ((-(2.0**30), BF16), (2.0**-27, BF16), (2.0**-10, F16))
    },
    "the smallest f32 does not fit bf16 either": plus(LOWEST, half=BF16, add=[F32]),
    "a misfit travels into a jit": plans(
        lambda x, w: jax.jit(lambda h, c: h + c)(x @ w, -1e9) @ w, half=F16, add=[F32]
    ),
}
MASKS = {
    "multiplied": lambda m: (1.0 - m) * -1e9,
    "selected": lambda m: jnp.where(m > 0, 0.0, -1e9),
    "broadcast": lambda m: jnp.broadcast_to(jnp.float32(-1e9), m.shape),
    "an array": lambda m: jnp.array([[-1e9] * 16], jnp.float32),
    "in a jit": lambda m: jax.jit(lambda m: m * -1e9)(m),
    "of integers": lambda m: jnp.where(m > 0, 0, -1_000_000_000).astype(jnp.float32),
    "a difference": lambda m: 1e9 - m,
}
PLANNED |= {
    f"a misfit travels through operations on free values, {name}": plans(
        lambda x, w, m, mask=mask: (x @ w + mask(m)) @ w,
        *(X, W, X),
        half=F16,
        add=[..., F32],
    )
    for name, mask in MASKS.items()
}


@each_plan(PLANNED)
def test_planned(row, half):
    check_plan(row, half)


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (jnp.exp, "exp"),
        (jnp.log, "log"),
        (jnp.expm1, "expm1"),
        (jax.lax.rsqrt, "rsqrt"),
        (lambda x: x**1.5, "pow"),
        (lambda x: 1 / x ** jnp.float32(2.5), "pow"),
        (jnp.reciprocal, "integer_pow"),
        (jnp.sum, "reduce_sum"),
        (jnp.prod, "reduce_prod"),
        (lambda x: jnp.cumsum(x, axis=0), "cumsum"),
        (jax.lax.erf_inv, "erf_inv"),
        (jnp.sinh, "sinh"),
    ],
)
def test_an_operation_without_range_in_half_runs_in_f32(function, primitive, half):
    check_plan(plans(lambda x, w: function(x @ w), **{primitive: {F32}}), half)


@pytest.mark.parametrize(
    ("function", "primitive"),
    [(jnp.tanh, "tanh"), (jax.nn.relu, "max"), (jax.nn.silu, "logistic")],
)
def test_an_elementwise_operation_between_products_stays_low(function, primitive, half):
    check_plan(plans(lambda x, w: function(x @ w) @ w, **{primitive: {HALF}}), half)


# Softmax, norms and losses


@pytest.mark.parametrize(
    "function", [jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp]
)
def test_a_softmax_is_f32_from_end_to_end(function, half):
    fn = autocast(lambda x, w: function(x @ w), half)
    for eqn in equations(jax.make_jaxpr(fn)(X, W)):
        if eqn.primitive.name in ("sub", "exp", "div", "log", "reduce_sum"):
            assert {v.aval.dtype.name for v in eqn.outvars} == {"float32"}


def test_a_softmax_over_more_entries_than_f16_counts_is_right():
    x, w = jnp.ones((1, 4)), jnp.zeros((4, 70_000))
    probabilities = amp.autocast(lambda x, w: jax.nn.softmax(x @ w), MIXED_F16)(x, w)
    np.testing.assert_allclose(probabilities, 1 / 70_000, rtol=1e-6)
    logs = amp.autocast(lambda x, w: jax.nn.log_softmax(x @ w), MIXED_F16)(x, w)
    np.testing.assert_allclose(logs, -np.log(70_000), rtol=1e-6)


def test_a_norm_of_large_activations_does_not_overflow_in_f16():
    x, w = jnp.full((1, 4), 100.0), jnp.full((4, 3), 1.0)
    norm = amp.autocast(lambda x, w: jnp.linalg.norm(x @ w), MIXED_F16)(x, w)
    np.testing.assert_allclose(norm, 400 * np.sqrt(3), rtol=1e-6)
    # Traced in f16, jnp squares in f16: 400 * 400 is inf there.
    half = jnp.asarray(x, jnp.float16), jnp.asarray(w, jnp.float16)
    norm = amp.autocast(lambda x, w: jnp.linalg.norm(x @ w), MIXED_F16)(*half)
    assert norm.dtype == jnp.float16
    np.testing.assert_allclose(float(norm), 400 * np.sqrt(3), rtol=2**-10)


def test_an_l2_loss_of_large_errors_does_not_overflow_in_f16():
    x, w = jnp.full((1, 4), 100.0), jnp.ones((4, 3))
    target = jnp.zeros((1, 3))

    def loss(x, w):
        return optax.l2_loss(x @ w, target), x @ w @ jnp.ones((3, 3))

    (losses, _) = amp.autocast(loss, MIXED_F16)(x, w)
    np.testing.assert_allclose(losses, 400.0**2 / 2, rtol=1e-6)


def test_a_target_that_f16_cannot_hold_is_not_cast():
    target = jnp.full((8, 16), 1e5)
    fn = amp.autocast(lambda x, w: jnp.mean((x @ w - target) ** 2), MIXED_F16)
    loss = fn(jnp.zeros((8, 16)), jnp.zeros((16, 16)))
    np.testing.assert_allclose(loss, 1e10, rtol=1e-6)


# The user's own classes


def test_a_user_moves_an_operation_to_another_class(half):
    base = amp.get_policy(f"mixed_{half}")
    fn = lambda x, w: jnp.exp(jnp.tanh(x @ w)) @ w  # noqa: E731
    low = amp.autocast(fn, base.with_low("exp"))
    assert dtypes_of(low, X, W, primitive="exp") == [(half, half)]
    full = amp.autocast(lambda x, w: jnp.tanh(x @ w) @ w, base.with_full("tanh"))
    assert dtypes_of(full, X, W, primitive="tanh") == [("float32", "float32")]
    follow = amp.autocast(lambda x, w: jnp.exp(x @ w) @ w, base.with_follow("exp"))
    assert dtypes_of(follow, X, W, primitive="exp") == [(half, half)]
    product = amp.autocast(fn, base.with_full("dot_general"))
    assert set(results_of(product, X, W, primitive="dot_general")) == {"float32"}


def test_a_user_names_a_function_of_their_own(half):
    def gate(h):
        return jnp.tanh(h * 2.0)

    jitted_gate = jax.jit(gate)
    policy = amp.get_policy(f"mixed_{half}").with_full("gate")
    for function in (gate, jitted_gate):
        fn = amp.autocast(lambda x, w, f=function: f(x @ w) @ w, policy)
        assert results_of(fn, X, W, primitive="tanh") == ["float32"]
        assert results_of(fn, X, W, primitive="mul") == ["float32"]
        assert results_of(fn, X, W, primitive="dot_general") == [half, half]


def test_a_helper_that_a_named_function_calls_is_in_its_class(half):
    helper = jax.jit(jnp.tanh)  # its trace knows nothing of its caller

    def gate(h):
        return helper(h)

    policy = amp.get_policy(f"mixed_{half}").with_full("gate")
    fn = amp.autocast(lambda x, w: (helper(x @ w) @ w, gate(x @ w) @ w), policy)
    assert results_of(fn, X, W, primitive="tanh") == [half, "float32"]


def test_a_user_lowers_a_built_in_function(half):
    policy = amp.get_policy(f"mixed_{half}").with_low("softmax")
    fn = amp.autocast(lambda x, w: jax.nn.softmax(x @ w) @ w, policy)
    assert set(results_of(fn, X, W, primitive="exp")) == {half}


# Constants


@pytest.mark.breadth(1)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_mask_in_a_selection_saturates_for_half_readers_alone(policy):
    lowest = float(jnp.finfo(jnp.float32).min)

    def masked_and_read(x, w):
        h = jnp.where(x > 0, x @ w, lowest)
        return h, jnp.max(h @ jnp.zeros((16, 16)))

    def compared(x, w):
        h = jnp.where(x > 0, x @ w, lowest)
        return h == lowest, jnp.max(h @ jnp.zeros((16, 16)))

    def read(x, w):
        return jnp.max(jnp.where(x > 0, x @ w, lowest) @ jnp.zeros((16, 16)))

    x, w = jnp.array([[1.0] * 8 + [-1.0] * 8] * 8), jnp.ones((16, 16))
    half = half_of(policy)
    for fn, dtype in (
        (masked_and_read, "float32"),
        (compared, "float32"),
        (read, half),
    ):
        transformed = amp.autocast(fn, policy)
        assert results_of(transformed, x, w, primitive="select_n")[-1] == dtype, fn
    masked, product = amp.autocast(masked_and_read, policy)(x, w)
    np.testing.assert_array_equal(masked[:, 8:], np.float32(lowest))
    is_masked, other = amp.autocast(compared, policy)(x, w)
    np.testing.assert_array_equal(is_masked, x <= 0)
    # Products read the largest finite value: -inf * 0 would be NaN.
    assert product == other == amp.autocast(read, policy)(x, w) == 0.0


def test_a_mask_that_saturates_may_be_a_number_and_keeps_what_is_infinite():
    def of_a_number(x, w):
        h = jnp.where(x[0, 0] > 0, (x @ w)[0, 0], -1e9)
        return jnp.broadcast_to(h, (8, 16)) @ jnp.zeros((16, 16))

    def read(mask):
        return lambda x, w: jnp.where(x > 0, x @ w, mask[None]) @ (w / 1024)

    x, w = -jnp.ones((8, 16)), jnp.ones((16, 16))
    found = amp.autocast(of_a_number, "mixed_float16")(x, w)
    np.testing.assert_array_equal(found, np.zeros((8, 16)))
    mask = np.full(16, -1e9, np.float32)
    finite = amp.autocast(read(mask), "mixed_float16")(x, w)
    np.testing.assert_array_equal(finite, np.full((8, 16), -65504 / 64, np.float16))
    mask[3] = -np.inf
    infinite = amp.autocast(read(mask), "mixed_float16")(x, w)
    np.testing.assert_array_equal(infinite, np.full((8, 16), -np.inf))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_fully_masked_row_has_no_nan(policy):
    lowest = float(jnp.finfo(jnp.float32).min)

    def attend(x, w):
        scores = jnp.where(x > 0, x @ w, lowest)
        return jax.nn.softmax(scores) @ w

    out = amp.autocast(attend, policy)(-jnp.ones((8, 16)), jnp.ones((16, 16)))
    np.testing.assert_allclose(out, 1.0, rtol=float(jnp.finfo(half_of(policy)).eps))


def test_a_small_denominator_keeps_its_epsilon_in_f16():
    x, w = jnp.zeros((8, 16)), jnp.ones((16, 16))
    fn = amp.autocast(lambda x, w: ((x @ w) / (x @ w + 1e-8)) @ w, MIXED_F16)
    assert np.isfinite(np.asarray(fn(x, w))).all()


# Explicit casts


def test_an_explicit_cast_is_obeyed(half):
    def fn(x, w):
        return jnp.tanh((x @ w).astype(jnp.bfloat16)) * jnp.bfloat16(2), x

    rows = dtypes_of(amp.autocast(fn, "float32"), X, W, primitive="tanh")
    assert rows == [("bfloat16", "bfloat16")]
    out = amp.autocast(fn, f"mixed_{half}")(jnp.ones((8, 16)), jnp.ones((16, 16)))[0]
    assert out.dtype == jnp.bfloat16


def test_a_cast_up_and_down_again_vanishes():
    def fn(x, w):
        h = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
        return h.astype(jnp.float16) @ w.astype(jnp.float16)

    casts = casts_of(amp.autocast(fn, MIXED_F16), X, W)
    assert not [c for c in casts if c[1:] == ("float16", "float32")]
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    np.testing.assert_array_equal(amp.autocast(fn, MIXED_F16)(x, w), fn(x, w))


def test_a_sum_of_f16_divided_by_its_count_is_finite():
    def mean(x):
        return jnp.sum(jnp.tanh(x) * 20, axis=0) / x.shape[0]

    x = jnp.full((8192, 2), 20.0, jnp.float16)
    assert np.isinf(np.asarray(mean(x))).all()  # 8192 * 20 > 65504
    out = amp.autocast(lambda x, w: mean(x @ w), MIXED_F16)(
        x, jnp.eye(2, dtype=jnp.float16)
    )
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(out, np.float64), 20.0, rtol=2**-10)


def test_a_standard_deviation_of_f16_does_not_overflow_in_its_variance():
    # jnp casts the variance, 160000, back to f16 and takes the root of inf.
    x = jnp.array([[-400.0], [400.0]] * 4, jnp.float16)
    assert np.isinf(float(jnp.std(x)))
    found = amp.autocast(lambda x, w: jnp.std(x @ w), MIXED_F16)(
        x, jnp.ones((1, 1), jnp.float16)
    )
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(float(found), 400.0, rtol=2**-10)


# Where the casts are


def test_an_activation_is_cast_once_for_all_its_consumers(half):
    def qkv(x, wq, wk, wv):
        h = jnp.exp(x @ wq)  # f32, from an activation
        return (h @ wq) + (h @ wk), h @ wv

    casts = casts_of(autocast(qkv, half), X, W, W, W)
    assert [c for c in casts if c[0] == "(8, 16)" and c[2] == half] == [
        ("(8, 16)", "float32", half),  # x
        ("(8, 16)", "float32", half),  # h, once
    ]


def test_a_parameter_is_cast_at_each_use_so_that_its_gradients_sum_in_f32(half):
    def tied(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    casts = casts_of(autocast(tied, half), W, X)
    assert casts.count(("(16, 16)", "float32", half)) == 2
    grad = jax.grad(autocast(tied, half))
    assert results_of(grad, W, X, primitive="add_any")[-1] == "float32"


def test_a_moved_parameter_that_is_used_twice_sums_its_gradients_in_f32(half):
    def fn(b, x, w):
        b = jnp.broadcast_to(b, (8, 16))
        return jnp.sum((jnp.tanh(x @ w + b) + b) @ w)

    b = jax.ShapeDtypeStruct((16,), jnp.float32)
    grad = jax.grad(autocast(fn, half))
    rows = dtypes_of(grad, b, X, W, primitive="add_any")
    assert ("float32",) * 3 in rows


def test_a_checkpoint_keeps_its_input_in_half(half):
    def fn(x, w):
        h = x @ w
        return jnp.sum(jnp.exp(h)) + jax.checkpoint(lambda h: jnp.sum(jnp.exp(h)))(h)

    x, w = jnp.ones((8, 16)), jnp.zeros((16, 16))
    _, backward = jax.vjp(autocast(fn, half), x, w)
    saved = [v for v in jax.tree.leaves(backward) if v.shape == (8, 16)]
    # x and h: the exponentials are computed again.
    assert [v.dtype.name for v in saved] == [half] * 2


def test_the_rows_of_an_embedding_are_cast_and_not_the_table(half):
    ids = jnp.arange(8)

    def fn(table, w):
        return jnp.tanh(table[ids] @ w) @ w

    table = jnp.ones((64, 16))
    assert results_of(autocast(fn, half), table, W, primitive="gather") == ["float32"]
    assert "(64, 16)" not in {c[0] for c in casts_of(autocast(fn, half), table, W)}


def test_the_gradients_of_f32_consumers_are_summed_in_f32(half):
    def loss(w, x, labels):
        logits = x @ w
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1)) - jnp.mean(
            jnp.take_along_axis(logits, labels, axis=-1)
        )

    labels = jnp.zeros((8, 1), jnp.int32)
    rows = results_of(jax.grad(autocast(loss, half)), W, X, labels, primitive="add_any")
    assert rows and set(rows) == {"float32"}


@pytest.mark.breadth(1)
def test_a_norm_takes_half_and_keeps_its_own_parameters_in_f32(half):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(8, 16)(tokens)
            x = x + self.param("position", nn.initializers.ones, (1, 1, 16))
            y = nn.Dense(16, use_bias=False)(nn.LayerNorm()(x))
            return nn.Dense(4)(x + y)

    tokens = jnp.zeros((2, 4), jnp.int32)
    net = Net()
    variables = jax.eval_shape(net.init, jax.random.key(0), tokens)
    casts = casts_of(autocast(lambda v: net.apply(v, tokens), half), variables)
    stream = [c for c in casts if c[0] == "(2, 4, 16)"]
    assert stream == [
        ("(2, 4, 16)", "float32", half),  # out of the table
        ("(2, 4, 16)", half, "float32"),  # into the norm
        ("(2, 4, 16)", "float32", half),  # out of the norm
    ]
    assert not [c for c in casts if c[0] == "(16,)"]  # scale and bias


# What f32 operations between half-precision values keep


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "function",
    [
        lambda h: jnp.sum(-jax.nn.softmax(h) * jax.nn.log_softmax(h)),
        lambda h: jnp.log1p(jnp.var(h)),
        lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
        lambda h: optax.softmax_cross_entropy_with_integer_labels(h, jnp.arange(8)),
        lambda h: jax.nn.softmax(h) ** 2,
    ],
    ids=["entropy", "variance", "unit", "loss", "softmax"],
)
def test_f32_operations_between_half_values_save_no_f32(half, function):
    def fn(x, w):
        return jnp.sum(function(x @ w))

    x = jax.random.normal(jax.random.key(0), (8, 16))
    w = jax.random.normal(jax.random.key(1), (16, 16))
    backward = jax.eval_shape(lambda *args: jax.vjp(autocast(fn, half), *args)[1], x, w)
    saved = [v for v in jax.tree.leaves(backward) if v.shape == (8, 16)]
    assert saved and {v.dtype.name for v in saved} == {half}
    expected, found = (
        compiled(jax.grad(f, argnums=1))(x, w) for f in (fn, autocast(fn, half))
    )
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 4 * float(jnp.finfo(half).eps)


def test_what_reads_one_activation_in_f32_is_differentiated_as_one(half):
    """Else each would round its gradient before they are summed."""

    def fn(x, w):
        h = x @ w
        return jnp.sum(jax.nn.softmax(h) @ w) + jnp.sum(jnp.exp(-h * h) @ w)

    jaxpr = jax.make_jaxpr(autocast(fn, half))(X, W)
    assert len([e for e in equations(jaxpr) if e.primitive.name in REMAT]) == 1
    sums = dtypes_of(jax.grad(autocast(fn, half)), X, W, primitive="add_any")
    assert sums and ("float32",) * 3 in sums and (half,) * 3 not in sums


def test_gradients_of_what_is_read_in_f32_are_added_up_in_f32(half):
    """Else its gradient would be rounded before it is added to the other one."""

    def fn(x, w):
        h = x @ w
        return jnp.sum(jax.nn.softmax(h) @ w) + jnp.sum(jnp.cumsum(h, axis=0))

    sums = dtypes_of(jax.grad(autocast(fn, half)), X, W, primitive="add_any")
    assert sums and ("float32",) * 3 in sums and (half,) * 3 not in sums


def test_an_f32_value_that_comes_back_through_half_does_not_wait_for_itself(half):
    def fn(x, w):
        a = jnp.exp(x @ w)  # f32, read by a product and by the sum after it
        b = jnp.exp(jnp.log1p(a) @ w)
        return jnp.sum(a * b * jnp.exp(a))

    x = 0.3 * jax.random.normal(jax.random.key(0), (8, 16))
    w = 0.3 * jax.random.normal(jax.random.key(1), (16, 16))
    expected, found = (jax.grad(f)(x, w) for f in (fn, autocast(fn, half)))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 8 * float(jnp.finfo(half).eps)


def test_what_is_inside_a_checkpoint_is_not_marked_again(half):
    def attend(x, w):
        return jax.checkpoint(lambda x: jax.nn.softmax(x @ w) @ w)(x)

    jaxpr = jax.make_jaxpr(autocast(attend, half))(X, W)
    marks = [e for e in equations(jaxpr) if e.primitive.name in REMAT]
    assert len(marks) == 1


def test_what_only_the_results_read_runs_in_the_order_of_what_it_reads(half):
    def fn(x, w, v):
        first = jnp.exp(x @ w).astype(half)
        begun = jnp.log(jnp.exp(jnp.exp(first.astype("float32"))))
        return begun * jnp.exp(x @ v)

    x = 0.1 * jnp.ones((8, 16))
    w, v = 0.1 * jnp.ones((16, 16)), 0.2 * jnp.ones((16, 16))
    found = autocast(fn, half)(x, w, v)
    expected = np.exp(np.exp(0.16)) * np.exp(0.32)
    np.testing.assert_allclose(found, expected, rtol=8 * float(jnp.finfo(half).eps))


# Half operands with an f32 result


@pytest.mark.parametrize("dtype", [BF16, F16_IF_SLOW])
def test_a_product_with_an_f32_result_has_half_products_in_its_backward_pass(dtype):
    def fn(x, w):
        x, w = x.astype(dtype), w.astype(dtype)
        return jnp.sum(jnp.dot(x, w, preferred_element_type=jnp.float32) ** 2)

    grad = jax.grad(autocast(fn, dtype), argnums=(0, 1))
    rows = dtypes_of(grad, X, W, primitive="dot_general")
    assert (dtype, dtype, "float32") in rows
    assert all(row[:2] == (dtype, dtype) for row in rows) and len(rows) >= 3
    x = jax.random.normal(jax.random.key(0), (8, 16)).astype(dtype)
    w = jax.random.normal(jax.random.key(1), (16, 16)).astype(dtype)
    dx, dw = grad(x.astype(jnp.float32), w.astype(jnp.float32))
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
    error = 8 * float(jnp.finfo(dtype).eps)
    scale = np.abs(2 * x64.T @ (x64 @ w64)).max()
    np.testing.assert_allclose(dw, 2 * x64.T @ (x64 @ w64), atol=error * scale)
    scale = np.abs(2 * (x64 @ w64) @ w64.T).max()
    np.testing.assert_allclose(dx, 2 * (x64 @ w64) @ w64.T, atol=error * scale)


def test_a_convolution_with_an_f32_result_is_differentiable():
    def fn(x, k):
        x, k = x.astype(jnp.bfloat16), k.astype(jnp.bfloat16)
        out = jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", preferred_element_type=jnp.float32
        )
        return jnp.sum(out)

    x, k = jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 3, 3))
    rows = dtypes_of(
        jax.grad(autocast(fn), (0, 1)), x, k, primitive="conv_general_dilated"
    )
    assert {row[:2] for row in rows} == {("bfloat16", "bfloat16")}
    # Each kernel element meets 16 - (border) ones: 4x4 at the centre, 3 at the edges.
    expected = np.outer([3, 4, 3], [3, 4, 3])[None, None]
    _, dk = jax.grad(autocast(fn), (0, 1))(x, k)
    np.testing.assert_array_equal(dk, np.broadcast_to(expected, dk.shape))


# Modules


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm(use_running_average=False),
        nn.BatchNorm(use_running_average=True),
        nn.LayerNorm(),
        nn.GroupNorm(num_groups=4),
        nn.RMSNorm(),
        nn.InstanceNorm(),
        nn.BatchNorm(use_running_average=False, name="a_name_of_my_own"),
    ],
    ids=lambda m: f"{type(m).__name__}{'' if m.name is None else '-named'}",
)
def test_a_norm_module_computes_in_f32_and_hands_on_half(norm, half):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(16)(x)
            x = norm.copy(parent=self, name=norm.name)(x)
            return nn.Dense(4)(jnp.tanh(x))

    net = Net()
    x = jnp.ones((2, 4, 16))
    variables = jax.eval_shape(net.init, jax.random.key(0), x)

    def apply(variables, x):
        return net.apply(variables, x, mutable=["batch_stats"])

    fn = autocast(apply, half)
    assert set(results_of(fn, variables, x, primitive="rsqrt")) == {"float32"}
    assert results_of(fn, variables, x, primitive="tanh") == [half]
    out, state = jax.eval_shape(fn, variables, x)
    assert out.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {jnp.dtype("float32")}


def test_the_layer_inside_weight_norm_is_not_a_norm(half):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.WeightNorm(nn.Dense(16))(x)
            return nn.Dense(4)(jnp.tanh(x))

    net = Net()
    x = jnp.ones((2, 16))
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    fn = autocast(net.apply, half)
    assert results_of(fn, variables, x, primitive="dot_general") == [half, half]
    # The gradient of the bias before it is not rounded.
    assert results_of(fn, variables, x, primitive="tanh") == ["float32"]


def test_statistics_of_a_norm_are_as_in_f32():
    net = nn.BatchNorm(use_running_average=False, momentum=0.5)
    x = jax.random.normal(jax.random.key(0), (64, 4)) + 100.0
    variables = jax.jit(net.init)(jax.random.key(0), x)
    apply = lambda v, x: net.apply(v, x, mutable=["batch_stats"])  # noqa: E731
    _, expected = jax.jit(apply)(variables, x)
    _, found = jax.jit(amp.autocast(apply, MIXED_F16))(variables, x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_a_product_that_is_not_of_castable_floats_runs_as_traced(dtype):
    dims = ((1,), (0,)), ((), ())

    def loss(w, x):
        operands = w.astype(dtype), x.astype(dtype)
        return lax.dot_general(*operands, dims, preferred_element_type=jnp.float32)[
            0, 0
        ]

    w, x = jnp.full((4, 4), 2.0), jnp.full((4, 4), 3.0)
    fn = amp.autocast(loss)
    jaxpr = jax.make_jaxpr(fn)(w, x)
    (product,) = (e for e in equations(jaxpr) if e.primitive.name == "dot_general")
    assert [v.aval.dtype.name for v in product.invars] == [dtype] * 2
    assert product.outvars[0].aval.dtype == jnp.float32
    assert fn(w, x) == 24.0
    expected = np.zeros((4, 4))
    if dtype != "int8":
        expected[0] = 3.0  # the gradient that JAX gives, of the first row of w
    np.testing.assert_array_equal(jax.grad(fn)(w, x), expected)


@pytest.mark.parametrize(
    "beside",
    [
        lambda x: lax.after_all(lax.create_token(x)),
        lambda x: lax.while_loop(lambda _: jnp.sum(x) < 0.0, lambda _: (), ()),
    ],
    ids=["a token", "a loop that carries nothing"],
)
def test_it_is_planned_beside(beside):
    def fn(w, x):
        beside(x)
        return jnp.sum(x @ w)

    assert amp.autocast(fn)(jnp.ones((4, 4)), jnp.ones((4, 4))) == 64.0


def test_a_lookup_of_labels_that_the_user_wants_low_has_no_scatter_in_its_derivative():
    labels = jnp.arange(4)[:, None]

    def loss(w):
        return jnp.sum(jnp.take_along_axis(w, labels, axis=1))

    for policy in (amp.Policy(), amp.Policy().with_low("gather")):
        jaxpr = jax.make_jaxpr(jax.grad(amp.autocast(loss, policy)))(jnp.ones((4, 8)))
        scatters = [e for e in equations(jaxpr) if "scatter" in e.primitive.name]
        assert bool(scatters) == (not policy.low)


def test_a_product_that_asks_for_f32_hands_on_f32():
    fn = lambda w, x: 1.5 * jnp.dot(x, w, preferred_element_type=F32)  # noqa: E731
    half = jnp.ones((4, 4), jnp.bfloat16)
    assert casts_of(amp.autocast(fn), half, half) == []
