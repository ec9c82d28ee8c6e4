"""Everything else that a JAX program can hold: `autocast` only rounds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental import sparse, xla_metadata
from jax.experimental.ode import odeint

import jmp_amp as amp
from tests.programs import dtypes_of, equations, products, results_of
from tests.rounding import (
    BF16,
    F16,
    KEY,
    POLICIES,
    ROUNDINGS,
    W,
    X,
    assert_only_rounded,
    eps,
    half_of,
    mean_square,
    one_policy,
    relative_error,
)

# Custom rules, recognisable by a factor that is not the derivative's


@jax.custom_vjp
def tripled(x, w):
    return jnp.tanh(x @ w)


def tripled_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def tripled_backward(kept, g):
    x, w, y = kept
    g = 3 * g * (1 - y**2)
    return g @ w.T, x.T @ g


tripled.defvjp(tripled_forward, tripled_backward)


@jax.custom_vjp
def tripled_sine(x):
    return jnp.sin(x)


tripled_sine.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),), symbolic_zeros=False
)


@jax.custom_jvp
def quintupled(x, w):
    return jnp.sin(x @ w)


@quintupled.defjvp
def quintupled_derivative(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return quintupled(x, w), 5 * jnp.cos(x @ w) * (dx @ w + x @ dw)


@jax.custom_batching.custom_vmap
def batched_by_hand(x):
    return jnp.sin(x)


@batched_by_hand.def_vmap
def _batched_by_hand(axis_size, in_batched, x):
    assert x.dtype == jnp.float32
    return 2 * jnp.sin(x), True


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, n):
    return x * n


scaled.defvjp(lambda x, n: (x * n, None), lambda n, _, g: (7 * n * g,))


def pallas_double(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


@jax.custom_vjp
def kernel_double(x):
    return pallas_double(x)


kernel_double.defvjp(lambda x: (pallas_double(x), None), lambda _, g: (3 * g,))


def host_sine(x):
    assert x.dtype == np.float32
    return np.sin(x)


@jax.custom_jvp
def called_back(x):
    return jax.pure_callback(
        host_sine, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


called_back.defjvp(lambda p, t: (called_back(*p), t[0] * jnp.cos(p[0])))


def sparse_product(w):
    matrix = sparse.BCOO.fromdense(jnp.where(jnp.abs(X) > 1, X, 0), nse=128)
    return mean_square((matrix @ w) @ w)


def custom_solve(w):
    a = w @ w.T + 2 * jnp.eye(16)
    b = (X @ w).T

    def solve(matvec, b):
        return jnp.linalg.solve(a, b)

    x = lax.custom_linear_solve(lambda x: a @ x, b, solve, solve)
    return mean_square(x)


def custom_root(w):
    target = mean_square(X @ w) + 1.0

    def f(x):
        return x**2 - target

    def newton(f, x):
        return lax.fori_loop(0, 8, lambda _, x: x - f(x) / (2 * x), x)

    return lax.custom_root(f, target, newton, lambda g, y: y / g(jnp.float32(1)))


def ode(w):
    def field(y, t, w):
        return -y + jnp.tanh(y @ w) * jnp.cos(t)

    return mean_square(odeint(field, X @ w, jnp.array([0.0, 0.5]), w, rtol=1e-3)[-1])


def composite(w):
    @functools.partial(lax.composite, name="my.block")
    def block(x, w):
        return jnp.tanh(x @ w)

    return mean_square(block(X, w) @ w)


def conv(h, w, padding="SAME", **options):
    image, kernel = h.reshape(2, 4, 4, 4), w[:9, :].reshape(3, 3, 4, 4)
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        image, kernel, (1, 1), padding, dimension_numbers=numbers, **options
    )


def conv_transpose(w):
    return mean_square(
        lax.conv_transpose(
            (X @ w).reshape(2, 4, 4, 4), w[:9].reshape(3, 3, 4, 4), (2, 2), "SAME"
        )
    )


def depthwise(w):
    return mean_square(
        lax.conv_general_dilated(
            (X @ w).reshape(2, 4, 4, 4),
            w[:9, :4].reshape(3, 3, 1, 4),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=4,
        )
    )


def scatters(w):
    h = X @ w
    rows, columns = jnp.array([0, 3, 3]), jnp.array([1, 2, 5])
    h = h.at[rows, columns].add(2.0)
    h = h.at[rows].multiply(0.5)
    h = h.at[rows].min(0.3)
    h = h.at[:, columns].max(-0.2)
    h = h.at[jnp.array([1, 9])].set(7.0, mode="drop")
    h = h.at[2:4].power(2)
    return mean_square(h @ w)


def gathers(w):
    h = X @ w
    taken = jnp.take(h, jnp.array([0, 2, 2]), axis=0)
    along = jnp.take_along_axis(h, jnp.argsort(X, axis=1), axis=1)
    row = lax.dynamic_slice(h, (2, 1), (3, 7))
    item = lax.dynamic_index_in_dim(h, 5)
    updated = lax.dynamic_update_slice(along, row, (1, 1))
    return mean_square(taken) + mean_square(updated @ w) + mean_square(item)


def windows(w):
    h = (X @ w).reshape(2, 4, 4, 4)
    largest = lax.reduce_window(
        h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )
    total = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    return mean_square(largest) + mean_square(total)


def custom_reductions(w):
    h = X @ w
    product = lax.reduce(h, jnp.float32(0), lambda a, b: a + b, (1,))
    largest, index = lax.reduce(
        (h, lax.broadcasted_iota(jnp.int32, h.shape, 1)),
        (jnp.float32(-jnp.inf), jnp.int32(0)),
        lambda a, b: (
            jnp.maximum(a[0], b[0]),
            jnp.where(a[0] >= b[0], a[1], b[1]),
        ),
        (1,),
    )
    del index
    return mean_square(product), mean_square(largest)


def mutable(w):
    total = jax.new_ref(jnp.zeros((8, 16)))

    def body(i, h):
        h = jnp.tanh(h @ w)
        total[...] += h
        return h

    lax.fori_loop(0, 3, body, X @ w)
    return mean_square(total[...] @ w)


def random_layers(w):
    h = X @ w
    noise = jax.random.normal(KEY, h.shape)
    keep = jax.random.bernoulli(KEY, 0.8, h.shape)
    uniform = jax.random.uniform(KEY, h.shape, minval=0.5, maxval=1.0)
    permuted = jax.random.permutation(KEY, h)
    gamma = jax.random.gamma(KEY, 2.0 + jnp.abs(h))
    h = jnp.where(keep, h * uniform + noise, 0.0) + permuted + 0.1 * gamma
    return mean_square(h @ w)


def positive(w):
    return w @ w.T + jnp.eye(16)


@jax.custom_gradient
def seven_times(x):
    return x * x, lambda g: (7 * g * x,)


@jax.custom_vjp
def with_zeros(x, y):
    return x * y


with_zeros.defvjp(
    lambda x, y: (x.value * y.value, (x.value, y.value)),
    lambda kept, g: (3 * g * kept[1], 3 * g * kept[0]),
    symbolic_zeros=True,
)


@jax.custom_vjp
def rematerialised(x):
    return jnp.sin(x)


rematerialised.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),), optimize_remat=True
)


@jax.custom_vjp
def looked_up(x, table):
    return x * table[0]


def looked_up_backward(table, g):
    # What was traced as an array can be indexed by a traced number.
    at = lax.fori_loop(0, 1, lambda i, total: total + table[i], jnp.float32(0))
    return g * at, jnp.zeros_like(table)


looked_up.defvjp(lambda x, table: (looked_up(x, table), table), looked_up_backward)


def mutable_matrix(w):
    matrix = jax.new_ref(X @ w)
    matrix[0] = matrix[0] * 2.0
    return mean_square(matrix[...] @ w)


def ordered_effects(w):
    def body(h, i):
        jax.experimental.io_callback(lambda i: None, None, i, ordered=True)
        return jnp.tanh(h @ w), None

    return mean_square(lax.scan(body, X @ w, jnp.arange(3))[0])


PROGRAMS = {
    "custom_gradient": lambda w: mean_square(seven_times(X @ w) @ w),
    "custom_vjp_symbolic_zeros": lambda w: mean_square(with_zeros(X @ w, X) @ w),
    "custom_vjp_of_a_constant": lambda w: mean_square(
        looked_up(X @ w, jnp.array([2.0, 3.0])) @ w
    ),
    "custom_vjp_optimized": lambda w: mean_square(
        jax.checkpoint(lambda h: rematerialised(h @ w))(X @ w) @ w
    ),
    "checkpoint_static": lambda w: mean_square(
        jax.checkpoint(lambda h, n: jnp.tanh(h @ w) * n, static_argnums=1)(X @ w, 2)
    ),
    "mutable_matrix": mutable_matrix,
    "custom_vjp": lambda w: mean_square(tripled(X @ w, w) @ w),
    "custom_vjp_static": lambda w: mean_square(scaled(X @ w, 2) @ w),
    "custom_vjp_in_scan": lambda w: mean_square(
        lax.scan(lambda h, _: (tripled(h, w), None), X @ w, length=3)[0]
    ),
    "custom_vjp_in_cond": lambda w: mean_square(
        lax.cond(w[0, 0] < 9, lambda h: tripled(h, w), lambda h: h, X @ w) @ w
    ),
    "custom_vjp_in_vmap": lambda w: mean_square(
        jax.vmap(lambda x: tripled_sine(x @ w) @ w)(X)
    ),
    "custom_vjp_in_checkpoint": lambda w: mean_square(
        jax.checkpoint(lambda h: tripled(h @ w, w))(X @ w)
    ),
    "custom_vjp_in_custom_vjp": lambda w: mean_square(
        tripled(tripled_sine(X @ w), w) @ w
    ),
    "custom_vjp_in_jit_in_scan": lambda w: mean_square(
        lax.scan(lambda h, _: (jax.jit(tripled)(h, w), None), X @ w, length=2)[0]
    ),
    "custom_jvp_in_scan": lambda w: mean_square(
        lax.scan(lambda h, w: (quintupled(h, w), None), X @ w, jnp.stack([w] * 3))[0]
    ),
    "custom_jvp_in_cond": lambda w: mean_square(
        lax.cond(w[0, 0] < 9, lambda h: quintupled(h, w), lambda h: h, X @ w) @ w
    ),
    "custom_jvp_in_vmap": lambda w: mean_square(
        jax.vmap(lambda x: quintupled(x[None] @ w, w) @ w)(X)
    ),
    "custom_jvp_in_checkpoint": lambda w: mean_square(
        jax.checkpoint(lambda h: quintupled(h @ w, w))(X @ w)
    ),
    "relu_in_scan": lambda w: mean_square(
        lax.scan(
            lambda h, _: (h + jax.nn.gelu(jax.nn.silu(h) @ w), None), X @ w, length=3
        )[0]
    ),
    "named_call": lambda w: mean_square(
        jax.named_call(lambda x: jnp.tanh(x @ w), name="block")(X) @ w
    ),
    "pallas": lambda w: mean_square(kernel_double(X @ w) @ w),
    "pure_callback": lambda w: mean_square(called_back(X @ w) @ w),
    "callback_in_scan": lambda w: mean_square(
        lax.scan(lambda h, _: (called_back(h @ w), None), X @ w, length=2)[0]
    ),
    "sparse": sparse_product,
    "solve": lambda w: mean_square(jnp.linalg.solve(positive(w), (X @ w).T) * 1.0),
    "cholesky": lambda w: mean_square(jnp.linalg.cholesky(positive(w)) @ w),
    "inv": lambda w: mean_square(jnp.linalg.inv(positive(w)) @ w),
    "det": lambda w: jnp.log(jnp.linalg.det(positive(w))),
    "slogdet": lambda w: jnp.linalg.slogdet(positive(w))[1],
    "qr": lambda w: mean_square(jnp.linalg.qr((X @ w).T)[1]),
    "eigh": lambda w: mean_square(jnp.linalg.eigvalsh(positive(w)) + 1.0),
    "svd": lambda w: mean_square(jnp.linalg.svd(X @ w, compute_uv=False) @ w[:8]),
    "lstsq": lambda w: mean_square(jnp.linalg.lstsq(positive(w), (X @ w).T)[0]),
    "expm": lambda w: mean_square(jax.scipy.linalg.expm(0.1 * (w @ w)) @ w),
    "fft": lambda w: mean_square(jnp.fft.irfft(jnp.fft.rfft(X @ w) * 0.5) @ w),
    "sort": lambda w: mean_square(jnp.sort(X @ w, axis=1) * jnp.arange(16.0)[None]),
    "top_k": lambda w: mean_square(lax.top_k(X @ w + 2 * jnp.arange(16.0)[None], 3)[0]),
    "scatters": scatters,
    "gathers": gathers,
    "segment_sum": lambda w: mean_square(
        jax.ops.segment_sum(X @ w, jnp.arange(8) % 3, 3) @ w
    ),
    "segment_max": lambda w: mean_square(
        jax.ops.segment_max(X @ w, jnp.arange(8) % 3, 3) @ w
    ),
    "random": random_layers,
    "categorical": lambda w: mean_square(
        jax.nn.one_hot(jax.random.categorical(KEY, 5 * X), 16) @ w
    ),
    "einsum": lambda w: mean_square(jnp.einsum("ij,jk,kl,il->ij", X, w, w, X @ w)),
    "einsum_trace": lambda w: jnp.einsum("ij,jk,ki->", w, w, w @ w.T + jnp.eye(16)),
    "windows": windows,
    "max_pool": lambda w: mean_square(
        lax.reduce_window(X @ w, -jnp.inf, lax.max, (1, 4), (1, 4), "SAME") @ w[:4]
    ),
    "cummax": lambda w: mean_square(lax.cummax(X @ w, axis=1) @ w),
    "cumlogsumexp": lambda w: mean_square(lax.cumlogsumexp(X @ w, axis=1) @ w),
    "conv": lambda w: mean_square(conv(X @ w, w)),
    "conv_dilated": lambda w: mean_square(
        conv(X @ w, w, rhs_dilation=(2, 2), padding=((1, 2), (2, 1)))
    ),
    "conv_transpose": conv_transpose,
    "depthwise": depthwise,
    "ragged_dot": lambda w: mean_square(
        lax.ragged_dot(
            X @ w, jnp.stack([w, 2 * w, -w]), jnp.array([3, 1, 4], jnp.int32)
        )
    ),
    "platform": lambda w: mean_square(
        lax.platform_dependent(
            X @ w, cpu=lambda h: jnp.tanh(h @ w), default=lambda h: h
        )
    ),
    "barrier": lambda w: mean_square(
        functools.reduce(jnp.matmul, lax.optimization_barrier((X @ w, w)))
    ),
    "custom_linear_solve": custom_solve,
    "custom_root": custom_root,
    "odeint": ode,
    "complex": lambda w: mean_square(
        jnp.abs(1 + jnp.exp(jnp.complex64(1j) * lax.complex(X @ w, X @ w)))
    ),
    "interp": lambda w: mean_square(
        jnp.interp((X @ w).ravel(), jnp.linspace(-4, 4, 16), jnp.cumsum(jnp.abs(w[0])))
    ),
    "polyval": lambda w: mean_square(jnp.polyval(w[0], 0.1 * (X @ w))),
    "median": lambda w: mean_square(
        jnp.median(X @ w + 2 * jnp.arange(16.0)[None], axis=1)
    ),
    "erf": lambda w: mean_square(jax.scipy.special.erf(X @ w) @ w),
    "logsumexp": lambda w: mean_square(jax.scipy.special.logsumexp(X @ w, axis=1)),
    "attention": lambda w: mean_square(
        jax.nn.dot_product_attention(*[(X @ w).reshape(1, 8, 2, 8)] * 3, is_causal=True)
    ),
    "ldexp": lambda w: mean_square(jnp.ldexp(X @ w, jnp.arange(16)[None] % 3) @ w),
    "nan_to_num": lambda w: mean_square(jnp.nan_to_num(X @ w / 1.5) @ w),
    "roll": lambda w: mean_square(jnp.roll(X @ w, 3, axis=1) @ w),
    "stop_gradient": lambda w: mean_square(lax.stop_gradient(X @ w) * (X @ w) @ w),
    "reduce_precision": lambda w: mean_square(lax.reduce_precision(X @ w, 8, 5) @ w),
}
# Differentiable in forward mode only, or not at all.
VALUES_ONLY = {
    "custom_reductions": custom_reductions,
    "composite": composite,
    "custom_vmap": lambda w: mean_square(batched_by_hand(X @ w) @ w),
    "custom_vmap_batched": lambda w: mean_square(
        jax.vmap(lambda x: batched_by_hand(x @ w))(X)
    ),
    "mutable": mutable,
    "ordered_effects": ordered_effects,
    "linear_transpose": lambda w: mean_square(
        jax.linear_transpose(lambda x: (x @ w) * 2.0, X)(X)[0] @ w
    ),
    "argsort": lambda w: mean_square(
        jnp.take_along_axis(X @ w, jnp.argsort(-(X @ w), axis=1), axis=1)
    ),
    "pallas_alone": lambda w: mean_square(pallas_double(X @ w) @ w),
    "quantile": lambda w: mean_square(jnp.quantile(X @ w, 0.3, axis=1) + 1.0),
}


# They compile for seconds.
SLOW = (
    *("attention", "cumlogsumexp", "cummax", "custom_root", "eigh", "expm", "interp"),
    *("lstsq", "polyval", "random", "relu_in_scan", "slogdet", "windows"),
)


def slow_among(names, slow=SLOW):
    mark = pytest.mark.slow
    return [pytest.param(n, marks=mark) if n in slow else n for n in sorted(names)]


@pytest.mark.parametrize("name", slow_among(PROGRAMS))
def test_value_and_gradient_are_those_of_f32(name):
    fn = PROGRAMS[name]
    assert_only_rounded(lambda transform, w: jax.value_and_grad(transform(fn))(w))


@pytest.mark.parametrize("name", sorted(VALUES_ONLY))
def test_values_are_those_of_f32(name):
    fn = VALUES_ONLY[name]
    assert_only_rounded(lambda transform, w: transform(fn)(w))


# What stays as it was traced, and what does not


def primitives_of(fn, *args):
    return [e.primitive.name for e in equations(jax.make_jaxpr(fn)(*args))]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_custom_vjp_uses_the_users_rule_wherever_it_is(policy):
    for name in sorted(PROGRAMS):
        if name.startswith("custom_vjp"):
            fn = amp.autocast(PROGRAMS[name], policy)
            forward = [n for n in primitives_of(fn, W) if n.startswith("custom_vjp")]
            assert forward, name
    # Three times the true derivative shows that it is the rule that runs.
    x = jnp.linspace(-1, 1, 8)
    in_scan = lambda x: lax.scan(  # noqa: E731
        lambda h, _: (tripled_sine(h), None), x * 2.0, None, length=1
    )[0]
    in_cond = lambda x: lax.cond(True, tripled_sine, jnp.cos, x * 2.0)  # noqa: E731
    in_vmap = jax.vmap(lambda x: tripled_sine(x * 2.0))
    for fn in (in_scan, in_cond, in_vmap, jax.jit(in_vmap), jax.checkpoint(in_vmap)):
        found = jax.grad(lambda x, fn=fn: jnp.sum(amp.autocast(fn, policy)(x)))(x)
        expected = 6 * np.cos(2 * np.asarray(x, np.float64))
        np.testing.assert_allclose(found, expected, atol=8 * eps(policy))


@pytest.fixture(params=[False, True], ids=["constants", "literals"])
def where_constants_are(request):
    name = "jax_use_simplified_jaxpr_constants"
    before = getattr(jax.config, name)
    jax.config.update(name, request.param)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("where_constants_are")
def test_a_users_rule_can_do_with_a_constant_what_it_can_do_with_an_array():
    @jax.custom_vjp
    def scaled_by_first(x, table):
        return x * table[0]

    def backward(table, g):
        # Numpy refuses to be indexed by a traced number.
        at = lax.fori_loop(0, 1, lambda i, total: total + table[i], jnp.float32(0))
        return g * at, jnp.zeros_like(table)

    scaled_by_first.defvjp(lambda x, table: (x * table[0], table), backward)
    table = np.array([2.0, 3.0], np.float32)
    fn = amp.autocast(lambda x: jnp.sum(scaled_by_first(x @ jnp.eye(16), table)), F16)
    np.testing.assert_array_equal(jax.grad(fn)(X), 2.0)


@one_policy
@pytest.mark.parametrize(
    "name", ["custom_jvp_in_scan", "custom_jvp_in_cond", "custom_jvp_in_vmap"]
)
def test_a_custom_jvp_rule_runs_in_half_wherever_it_is(name, policy):
    gradient = jax.grad(amp.autocast(PROGRAMS[name], policy))
    rows = dtypes_of(gradient, W, primitive="dot_general")
    assert len(rows) >= 4 and set(rows) == {(half_of(policy),) * 3}
    assert set(results_of(gradient, W, primitive="cos")) == {half_of(policy)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "policy_name",
    [
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "checkpoint_dots",
        "dots_with_no_batch_dims_saveable",
        "checkpoint_dots_with_no_batch_dims",
    ],
)
def test_a_checkpoint_saves_what_its_policy_says(policy, policy_name):
    rule = getattr(jax.checkpoint_policies, policy_name)

    def fn(w, wrap=lambda f: jax.checkpoint(f, policy=rule)):
        def block(h):
            return jnp.tanh(jnp.tanh(jnp.tanh(h) @ w) @ w) @ w

        return mean_square(wrap(block)(X @ w))

    def saved(fn):
        _, backward = jax.vjp(fn, W)
        return [x for x in jax.tree.leaves(backward) if x.shape == X.shape]

    mixed = saved(amp.autocast(fn, policy))
    assert len(mixed) == len(saved(fn))
    # The last one is what the f32 mean square reads.
    assert sum(x.dtype == jnp.float32 for x in mixed) <= 1
    gradient = jax.grad(amp.autocast(fn, policy))(W)
    assert relative_error(gradient, jax.grad(fn)(W)) < ROUNDINGS * eps(policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_named_values_are_saved_in_half_inside_a_scan(policy):
    rule = jax.checkpoint_policies.save_only_these_names("kept")

    def fn(w):
        def body(h, w):
            kept = checkpoint_name(jnp.tanh(h @ w), "kept")
            return h + jnp.tanh(jnp.tanh(kept @ w) @ w), None

        body = jax.checkpoint(body, policy=rule, prevent_cse=False)
        return mean_square(lax.scan(body, X @ w, jnp.stack([w] * 3))[0])

    _, backward = jax.vjp(amp.autocast(fn, policy), W)
    saved = [x for x in jax.tree.leaves(backward) if x.shape == (3, 8, 16)]
    assert [x.dtype.name for x in saved] == [half_of(policy)] * 2
    gradient = jax.grad(amp.autocast(fn, policy))(W)
    assert relative_error(gradient, jax.grad(fn)(W)) < ROUNDINGS * eps(policy)


def test_an_offloading_checkpoint_stays_one():
    rule = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"],
        names_which_can_be_offloaded=["moved"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(h, w):
        h = checkpoint_name(jnp.tanh(h @ w), "moved")
        h = checkpoint_name(jnp.tanh(h @ w), "kept")
        return jnp.tanh(h @ w)

    def fn(w):
        return mean_square(jax.checkpoint(block, policy=rule)(X @ w, w))

    plain = primitives_of(jax.grad(fn), W).count("device_put")
    assert (
        plain
        and primitives_of(jax.grad(amp.autocast(fn)), W).count("device_put") == plain
    )
    found = dtypes_of(jax.grad(amp.autocast(fn)), W, primitive="device_put")
    assert {dtype for row in found for dtype in row} == {"bfloat16"}


def test_a_checkpoint_keeps_its_option():
    def fn(w):
        return jnp.sum(jax.checkpoint(jnp.tanh, prevent_cse=False)(X @ w))

    marks = [
        e
        for e in equations(jax.make_jaxpr(amp.autocast(fn))(W))
        if "prevent_cse" in e.params
    ]
    assert [e.params["prevent_cse"] for e in marks] == [False]


def test_callbacks_see_the_dtypes_they_were_traced_with():
    seen = []

    def note(*arrays):
        seen.extend((x.dtype.name, x.shape) for x in arrays)
        return np.float32(1)

    def fn(w):
        h = X @ w
        one = jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), h)
        two = jax.experimental.io_callback(
            note, jax.ShapeDtypeStruct((), jnp.float32), h, w, ordered=True
        )
        jax.debug.callback(note, h)
        jax.debug.print("{x}", x=h[0, 0])
        return (h * one * two) @ w

    jax.block_until_ready(jax.jit(amp.autocast(fn))(W))
    jax.effects_barrier()
    assert sorted(seen) == [("float32", (8, 16))] * 3 + [("float32", (16, 16))]


def test_a_kernel_sees_the_dtypes_it_was_traced_with():
    def fn(w):
        return kernel_double(X @ w) @ w

    (row,) = dtypes_of(amp.autocast(fn), W, primitive="pallas_call")
    assert row == ("float32", "float32")
    rows = dtypes_of(
        amp.autocast(lambda w: amp.cast_inputs(kernel_double)(X @ w) @ w),
        W,
        primitive="pallas_call",
    )
    assert rows == [("bfloat16", "bfloat16")]


@one_policy
def test_products_around_what_runs_as_traced_are_in_half(policy):
    for name in ("sparse", "pallas", "pure_callback", "custom_linear_solve", "odeint"):
        rows = dtypes_of(
            amp.autocast(PROGRAMS[name], policy), W, primitive="dot_general"
        )
        assert (half_of(policy),) * 3 in rows, name


@pytest.mark.parametrize(
    "name", ["solve", "cholesky", "inv", "det", "qr", "eigh", "svd", "fft", "expm"]
)
def test_linear_algebra_runs_in_f32(name):
    full = ("cholesky", "lu", "qr", "geqrf", "eigh", "svd", "triangular_solve", "fft")
    rows = [
        row
        for primitive in full
        for row in dtypes_of(amp.autocast(PROGRAMS[name], F16), W, primitive=primitive)
    ]
    assert rows
    assert {dtype for row in rows for dtype in row} <= {"float32", "complex64"}


def test_name_scopes_and_named_calls_survive_in_bodies():
    def block(h, w):
        with jax.named_scope("inner_scope"):
            return jnp.tanh(h @ w)

    def fn(w):
        with jax.named_scope("outer_scope"):
            return lax.scan(
                lambda h, _: (jax.named_call(block, name="my_block")(h, w), None),
                X @ w,
                None,
                length=2,
            )[0]

    text = jax.jit(amp.autocast(fn)).lower(W).as_text(debug_info=True)
    assert "outer_scope" in text and "my_block" in text and "inner_scope" in text


def test_a_mutable_array_that_is_closed_over_is_written():
    seen = jax.new_ref(jnp.zeros((8, 16)))

    def fn(w):
        seen[...] = X @ w
        return X @ w @ w

    found = amp.autocast(fn)(W)
    assert relative_error(found, X @ W @ W) < ROUNDINGS * eps(BF16)
    assert relative_error(seen[...], X @ W) < ROUNDINGS * eps(BF16)


def test_it_can_be_transposed():
    for policy in POLICIES:
        fn = amp.autocast(lambda x: (x @ W) * 2.0, policy)
        (found,) = jax.linear_transpose(fn, X)(X)
        assert found.dtype == jnp.float32
        assert relative_error(found, 2 * X @ W.T) < ROUNDINGS * eps(policy)


# Compiling ahead of time


def test_it_can_be_lowered_exported_and_evaluated_without_arrays():
    fn = amp.autocast(lambda w, *, n: {"y": X @ w * n}, F16)
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    assert jax.eval_shape(functools.partial(fn, n=2), shape)["y"].dtype == jnp.float32
    jitted = jax.jit(fn, static_argnames="n")
    compiled = jitted.lower(shape, n=2).compile()
    found = compiled(W)["y"]
    assert relative_error(found, 2 * X @ W) < ROUNDINGS * eps(F16)
    exported = jax.export.export(jitted)(shape, n=2)
    np.testing.assert_array_equal(exported.call(W)["y"], found)
    assert "f16" in exported.mlir_module()


def test_an_exported_function_can_be_called_under_autocast():
    shape = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    exported = jax.export.export(jax.jit(jnp.tanh))(shape)
    found = amp.autocast(lambda w: exported.call(X @ w) @ w, BF16)(W)
    assert relative_error(found, jnp.tanh(X @ W) @ W) < ROUNDINGS * eps(BF16)


def test_symbolic_shapes_can_be_exported():
    (rows,) = jax.export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    fn = amp.autocast(lambda x: jax.nn.softmax(jnp.tanh(x @ W)) @ W, BF16)
    exported = jax.export.export(jax.jit(fn))(shape)
    for x in (X, X[:3]):
        expected = jax.nn.softmax(jnp.tanh(x @ W)) @ W
        found = exported.call(x)
        assert relative_error(found, expected) < ROUNDINGS * eps(BF16)


def test_arguments_can_be_donated():
    fn = jax.jit(amp.autocast(lambda x, w: jnp.tanh(x @ w)), donate_argnums=0)
    x = jnp.array(X)
    found = fn(x, W)
    assert x.is_deleted()
    assert relative_error(found, jnp.tanh(X @ W)) < ROUNDINGS * eps(BF16)


def test_static_arguments_of_an_inner_jit_stay_static():
    @functools.partial(jax.jit, static_argnums=1, static_argnames="mode")
    def block(h, n, *, mode):
        assert isinstance(n, int) and mode == "tanh"
        for _ in range(n):
            h = jnp.tanh(h @ W)
        return h

    found = amp.autocast(lambda x: block(x, 2, mode="tanh"))(X)
    expected = jnp.tanh(jnp.tanh(X @ W) @ W)
    assert relative_error(found, expected) < ROUNDINGS * eps(BF16)


def test_metadata_survives():
    def fn(w):
        with xla_metadata.set_xla_metadata(my_key="my_value"):
            h = jnp.tanh(X @ w)
        return h @ w

    text = jax.jit(amp.autocast(fn)).lower(W).as_text()
    assert "my_key" in text
    assert (
        "my_key"
        in jax.jit(jax.grad(lambda w: jnp.sum(amp.autocast(fn)(w)))).lower(W).as_text()
    )


@pytest.mark.skipif(
    not hasattr(xla_metadata, "xla_metadata_call2"), reason="new in JAX 0.11"
)
def test_a_call_that_is_tagged_runs_in_half_and_stays_tagged():
    def fn(w):
        @xla_metadata.xla_metadata_call2({"group": "g1"}, ad_metadata={"group": "g2"})
        def tagged(x):
            return jax.nn.softmax(x @ w) @ w

        return mean_square(tagged(X))

    assert_only_rounded(lambda transform, w: jax.grad(transform(fn))(w))
    gradient = jax.grad(amp.autocast(fn))
    assert set(products(gradient, W)) == {half_of(BF16)}
    text = jax.jit(gradient).lower(W).as_text()
    assert text.count('group = "g1"') == text.count('group = "g2"') == 1


def test_the_precision_of_a_product_survives():
    def fn(w):
        return jnp.dot(X, w, precision=lax.Precision.HIGHEST) @ w

    eqns = equations(jax.make_jaxpr(amp.autocast(fn))(W))
    precisions = [e.params["precision"] for e in eqns if "precision" in e.params]
    assert precisions[0] == (lax.Precision.HIGHEST,) * 2
    with jax.default_matmul_precision("highest"):
        eqns = list(equations(jax.make_jaxpr(amp.autocast(lambda w: X @ w))(W)))
    precisions = [e.params["precision"] for e in eqns if "precision" in e.params]
    assert precisions == [(lax.Precision.HIGHEST,) * 2]


@pytest.mark.slow
def test_checks_for_nan_and_leaks_pass():
    def fn(w):
        h = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), X @ w, None, length=2)[0]
        return mean_square(jax.checkpoint(lambda h: quintupled(h, w))(h))

    with jax.checking_leaks(), jax.debug_nans(True):
        gradient = jax.grad(amp.autocast(fn))(W)
    assert relative_error(gradient, jax.grad(fn)(W)) < 2 * ROUNDINGS * eps(BF16)


def test_checkify_finds_what_it_finds_without():
    from jax.experimental import checkify

    def fn(w):
        h = X @ w
        checkify.check(jnp.all(h < 1e3), "too large: {m}", m=jnp.max(h))
        return h @ w

    checked = checkify.checkify(amp.autocast(fn))
    error, found = jax.jit(checked)(W)
    assert error.get() is None
    assert relative_error(found, X @ W @ W) < ROUNDINGS * eps(BF16)
    error, _ = jax.jit(checked)(1e6 * W)
    assert "too large" in error.get()


def test_without_jit_it_is_the_same():
    def fn(w):
        h = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), X @ w, None, length=2)[0]
        return mean_square(lax.cond(h[0, 0] < 9, jnp.sin, jnp.cos, h))

    with jax.disable_jit():
        found = amp.autocast(fn)(W)
    assert relative_error(found, fn(W)) < ROUNDINGS * eps(BF16)


# Several devices

AUTO = (jax.sharding.AxisType.Auto,)
P = jax.sharding.PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=AUTO)


def psum_block(x, w):
    return lax.psum(jnp.tanh(x @ w) @ w, "data")


def pmean_block(x, w):
    return lax.pmean(jnp.tanh(x @ w) @ w, "data")


def gathered_block(x, w):
    return lax.pmean(jnp.sum(lax.all_gather(jnp.tanh(x @ w), "data") @ w, 0), "data")


def permuted_block(x, w):
    h = lax.ppermute(jnp.tanh(x @ w), "data", [(i, (i + 1) % 8) for i in range(8)])
    return lax.pmean(h @ w, "data")


def scattered_block(x, w):
    h = lax.psum_scatter(jnp.tanh(x @ w).T, "data", tiled=True)
    return lax.psum(jnp.square(h.T) @ jnp.ones((2, 16)), "data")


def switched_block(x, w):
    h = lax.all_to_all(jnp.tanh(x @ w).reshape(8, 2), "data", 0, 0)
    return lax.psum(h.reshape(1, 16) @ w, "data")


def indexed_block(x, w):
    index = lax.axis_index("data").astype(jnp.float32)
    return lax.psum(jnp.tanh(x @ w) * (1 + index / 8) @ w, "data")


def highest_block(x, w):
    h = jnp.tanh(x @ w)
    return lax.psum(h, "data") + lax.stop_gradient(
        lax.pmax(lax.stop_gradient(h), "data")
    )


def scanning_block(x, w):
    h, _ = lax.scan(lambda h, _: (residual(h, w), None), x @ w, None, length=2)
    return lax.psum(h @ w, "data")


def residual(h, w):
    return h + 0.5 * jnp.tanh(h @ w)


BLOCKS = {
    "psum": psum_block,
    "pmean": pmean_block,
    "all_gather": gathered_block,
    "ppermute": permuted_block,
    "psum_scatter": scattered_block,
    "all_to_all": switched_block,
    "axis_index": indexed_block,
    "pmax": highest_block,
    "scan": scanning_block,
}


def sharded(block, mesh, check_vma=True):
    return jax.shard_map(
        block,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )


@pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_a_shard_map_is_that_of_f32(name, check_vma, mesh):
    fn = sharded(BLOCKS[name], mesh, check_vma)
    assert_only_rounded(
        lambda transform, w: jax.value_and_grad(
            lambda w: mean_square(transform(fn)(X, w))
        )(w)
    )


@one_policy
def test_the_products_of_a_shard_map_run_in_half(policy, mesh):
    fn = amp.autocast(sharded(psum_block, mesh), policy)
    gradient = jax.grad(lambda w: mean_square(fn(X, w)))
    rows = dtypes_of(gradient, W, primitive="dot_general")
    assert len(rows) >= 5 and set(rows) == {(half_of(policy),) * 3}


@one_policy
def test_what_moves_between_devices_is_half_and_what_is_summed_is_f32(policy, mesh):
    half = half_of(policy)
    fn = amp.autocast(sharded(gathered_block, mesh, False), policy)
    assert set(results_of(fn, X, W, primitive="all_gather")) == {half}
    fn = amp.autocast(sharded(permuted_block, mesh, False), policy)
    assert set(results_of(fn, X, W, primitive="ppermute")) == {half}
    for check_vma, primitive in ((False, "psum"), (True, "psum_invariant")):
        fn = amp.autocast(sharded(psum_block, mesh, check_vma), policy)
        assert results_of(fn, X, W, primitive=primitive) == ["float32"]


def test_a_shard_map_inside_a_scan_is_that_of_f32(mesh):
    def fn(w):
        block = sharded(
            lambda x, w: lax.all_gather(jnp.tanh(x @ w), "data", tiled=True),
            mesh,
            False,
        )
        return mean_square(
            lax.scan(lambda h, _: (block(h, w), None), X @ w, None, length=2)[0]
        )

    assert_only_rounded(lambda transform, w: jax.value_and_grad(transform(fn))(w))


def test_autocast_inside_a_shard_map_is_that_of_f32(mesh):
    assert_only_rounded(
        lambda transform, w: jax.value_and_grad(
            lambda w: mean_square(sharded(transform(scanning_block), mesh)(X, w))
        )(w)
    )


def test_a_shard_map_over_some_of_the_axes_is_that_of_f32():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=AUTO * 2)
    fn = jax.shard_map(
        lambda x, w: lax.psum(jnp.tanh(x @ w) @ w, "data"),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
        axis_names={"data"},
    )
    assert_only_rounded(
        lambda transform, w: jax.value_and_grad(
            lambda w: mean_square(transform(fn)(X, w))
        )(w)
    )


def test_nested_shard_maps_are_those_of_f32():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=AUTO * 2)

    def inner(x, w):
        return jax.shard_map(
            lambda x, w: lax.psum(jnp.tanh(x @ w), "model"),
            in_specs=(P(None, "model"), P("model")),
            out_specs=P(),
            axis_names={"model"},
        )(x, w)

    fn = jax.shard_map(
        lambda x, w: lax.psum(inner(x, w) @ w, "data"),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
        axis_names={"data"},
    )
    # JAX itself cannot compile the gradient of this one.
    assert_only_rounded(lambda transform, w: transform(fn)(X, w))


def test_a_vmap_of_a_shard_map_is_that_of_f32(mesh):
    fn = sharded(psum_block, mesh)

    def stacked(w):
        return mean_square(jax.vmap(lambda x: fn(x, w))(jnp.stack([X, 2 * X])))

    assert_only_rounded(lambda transform, w: jax.value_and_grad(transform(stacked))(w))


def test_an_axis_of_vmap_is_that_of_f32():
    def fn(w):
        def row(x):
            h = jnp.tanh(x @ w)
            return (h - lax.pmean(h, "batch")) / lax.psum(1.0, "batch") @ w

        return mean_square(jax.vmap(row, axis_name="batch")(X))

    assert_only_rounded(lambda transform, w: jax.value_and_grad(transform(fn))(w))

    def inside(transform, w):
        def loss(w):
            row = transform(lambda x: jnp.tanh(x @ w) - lax.pmean(x @ w, "batch"))
            return mean_square(jax.vmap(row, axis_name="batch")(X))

        return jax.value_and_grad(loss)(w)

    assert_only_rounded(inside)


def test_a_pmap_is_that_of_f32():
    def step(x, w):
        return lax.pmean(jnp.tanh(x @ w) @ w, "data")

    for policy in POLICIES:
        fn = jax.pmap(step, axis_name="data", in_axes=(0, None))
        outside = amp.autocast(fn, policy)(X[:, None], W)
        inside = jax.pmap(
            amp.autocast(step, policy), axis_name="data", in_axes=(0, None)
        )(X[:, None], W)
        for found in (outside, inside):
            expected = fn(X[:, None], W)
            assert relative_error(found, expected) < ROUNDINGS * eps(policy)


def test_a_sharding_constraint_survives(mesh):
    sharding = jax.sharding.NamedSharding(mesh, P("data"))

    def fn(w):
        h = lax.with_sharding_constraint(X @ w, sharding)
        return jnp.tanh(h) @ w

    mixed = amp.autocast(fn)
    eqns = [
        e
        for e in equations(jax.make_jaxpr(mixed)(W))
        if e.primitive.name == "sharding_constraint"
    ]
    assert [e.params["sharding"].spec for e in eqns] == [P("data")]
    assert results_of(mixed, W, primitive="sharding_constraint") == ["bfloat16"]
    gradient = jax.grad(lambda w: jnp.sum(mixed(w)))
    assert len(dtypes_of(gradient, W, primitive="sharding_constraint")) == 2


def test_shardings_of_arguments_and_results_survive(mesh):
    rows = jax.sharding.NamedSharding(mesh, P("data"))
    whole = jax.sharding.NamedSharding(mesh, P())
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w), out_shardings=rows)
    fn = jax.jit(amp.autocast(lambda x, w: inner(x, w)), in_shardings=(rows, whole))
    found = fn(X, W)
    assert found.sharding.is_equivalent_to(rows, 2)
    assert relative_error(found, jnp.tanh(X @ W)) < ROUNDINGS * eps(BF16)
    placed = jax.device_put(X, rows)
    without_jit = amp.autocast(lambda x: jnp.tanh(x @ W) * 2)(placed)
    assert without_jit.sharding.is_equivalent_to(rows, 2)


def test_explicit_shardings_survive():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data"))
        w = jax.device_put(W, P())

        def fn(w, x):
            h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x @ w, None, length=2)
            h = lax.cond(w[0, 0] < 9, jnp.sin, jnp.cos, h)
            return h @ w

        found = jax.jit(amp.autocast(fn))(w, x)
        assert jax.typeof(found).sharding.spec == P("data", None)
        assert relative_error(found, fn(w, x)) < ROUNDINGS * eps(BF16)
        gradient, expected = (
            jax.jit(jax.grad(lambda w, f=f: mean_square(f(w, x))))(w)
            for f in (amp.autocast(fn), fn)
        )
        assert relative_error(gradient, expected) < ROUNDINGS * eps(BF16)
        hidden = jax.reshard
        moved = jax.jit(amp.autocast(lambda x: hidden(x @ w, P()) @ w))(x)
        assert relative_error(moved, x @ w @ w) < ROUNDINGS * eps(BF16)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: w.at[jnp.arange(8)].get(out_sharding=P("data", None)) @ w,
        lambda w, x: jax.sharding.auto_axes(
            lambda w, x: jax.nn.softmax(x @ w) @ w, out_sharding=P("data", None)
        )(w, x),
    ],
)
def test_explicit_axes_may_be_left_to_the_compiler_inside(fn):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, P("data")), jax.device_put(W, P())
        assert_only_rounded(
            lambda transform, w, x: jax.value_and_grad(
                lambda w: mean_square(transform(fn)(w, x))
            )(w),
            args=(w, x),
        )


def test_sharded_parameters_are_gathered_in_half(mesh):
    rows = jax.sharding.NamedSharding(mesh, P("data"))

    def fn(w, x):
        w = lax.with_sharding_constraint(w, jax.sharding.NamedSharding(mesh, P()))
        return jnp.tanh(x @ w)

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows) for a in (W, X)]
    mixed = amp.autocast(fn)
    assert results_of(mixed, *shapes, primitive="sharding_constraint") == ["bfloat16"]
