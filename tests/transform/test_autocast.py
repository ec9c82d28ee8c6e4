"""What `autocast` promises of a function: its signature and its derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jmp_amp as amp
from tests.measures import compiled
from tests.programs import dtypes_of, equations, results_of
from tests.rounding import (
    BF16,
    F16,
    KEY,
    POLICIES,
    W,
    X,
    assert_only_rounded,
    eps,
    mean_square,
    relative_error,
)

# Programs, each a scalar function of the weights


@jax.custom_jvp
def scaled_sine(x, y):
    return jnp.sin(x) * y


@scaled_sine.defjvp
def _scaled_sine_jvp(primals, tangents):
    x, y = primals
    # Five times the true derivative: it shows whether the user's rule is used.
    return scaled_sine(x, y), 5 * tangents[0] * jnp.cos(x) * y + tangents[1]


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def power(x, n):
    return x**n


@power.defjvp
def _power_jvp(n, primals, tangents):
    return power(*primals, n), 7 * tangents[0] * primals[0]


@jax.custom_jvp
def times_integer(x, i):
    return x * i.astype(x.dtype), i + 1


@times_integer.defjvp
def _times_integer_jvp(primals, tangents):
    zero = np.zeros(primals[1].shape, jax.dtypes.float0)
    return times_integer(*primals), (
        2 * tangents[0] * primals[1].astype(tangents[0].dtype),
        zero,
    )


dense_tanh = jax.jit(lambda x, w: jnp.tanh(x @ w))


PROGRAMS = {
    "products": lambda w: mean_square(jnp.tanh(X @ w) @ w),
    "jit": lambda w: mean_square(dense_tanh(dense_tanh(X, w), w)),
    "nested_jit": lambda w: mean_square(jax.jit(lambda x: dense_tanh(x, w) @ w)(X)),
    "custom_jvp": lambda w: mean_square(scaled_sine(X @ w, X) @ w),
    "custom_jvp_static": lambda w: mean_square(power(X @ w, 2) @ w),
    "custom_jvp_integer": lambda w: mean_square(
        times_integer(X @ w, jnp.arange(16)[None])[0] @ w
    ),
    "custom_vjp": lambda w: mean_square(tripled(X @ w) @ w),
    "checkpoint": lambda w: mean_square(
        jax.checkpoint(lambda h: jnp.tanh(h @ w))(X @ w) @ w
    ),
    "checkpoint_policy": lambda w: mean_square(
        jax.checkpoint(
            lambda h: jnp.tanh(h @ w), policy=jax.checkpoint_policies.dots_saveable
        )(X @ w)
    ),
    "scan": lambda w: mean_square(
        lax.scan(lambda h, _: (jnp.tanh(h @ w), None), X @ w, None, length=3)[0]
    ),
    "fori": lambda w: mean_square(
        lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w), X @ w)
    ),
    "cond": lambda w: mean_square(
        lax.cond(w[0, 0] > 0, lambda h: jnp.tanh(h @ w), lambda h: h, X @ w)
    ),
    "vmap": lambda w: mean_square(jax.vmap(lambda row: jnp.tanh(row @ w) @ w)(X)),
    "softmax": lambda w: mean_square(jax.nn.softmax(X @ w) @ w),
    "relu": lambda w: mean_square(jax.nn.relu(X @ w) @ w),
    "gelu": lambda w: mean_square(jax.nn.gelu(X @ w) @ w),
    "silu": lambda w: mean_square(jax.nn.silu(X @ w) @ w),
    "softplus": lambda w: mean_square(jax.nn.softplus(X @ w) @ w),
    "logsumexp": lambda w: mean_square(jax.nn.logsumexp(X @ w, axis=-1)),
    "norm": lambda w: jnp.linalg.norm(X @ w),
    "svd": lambda w: mean_square(jnp.linalg.svd(X @ w, compute_uv=False)),
    "solve": lambda w: mean_square(jnp.linalg.solve(w @ w.T + jnp.eye(16), (X @ w).T)),
    "fft": lambda w: mean_square(jnp.abs(jnp.fft.fft(X @ w))),
    "complex": lambda w: mean_square(
        jnp.abs((X @ w).astype(jnp.complex64) @ lax.complex(w, 2 * w))
    ),
    "sort": lambda w: mean_square(jnp.sort(X @ w, axis=-1)),
    "top_k": lambda w: mean_square(lax.top_k(X @ w, 16)[0]),
    "cumsum": lambda w: mean_square(jnp.cumsum(X @ w, axis=0)),
    "segment_sum": lambda w: mean_square(
        jax.ops.segment_sum(X @ w, jnp.arange(8) // 2, 4) @ w
    ),
    "indexed_set": lambda w: mean_square((X @ w).at[0].set(1.0) @ w),
    "gather": lambda w: mean_square(w[jnp.arange(4)] @ w),
    "convolution": lambda w: mean_square(
        lax.conv_general_dilated(
            (X @ w).reshape(1, 2, 8, 8), w[:3, :6].reshape(1, 2, 3, 3), (1, 1), "SAME"
        )
    ),
    "max_pool": lambda w: mean_square(
        nn.max_pool((X @ w).reshape(1, 8, 16, 1), (2, 2), (2, 2))
    ),
    "dropout": lambda w: mean_square(
        jnp.where(jax.random.bernoulli(KEY, 0.5, (8, 16)), X @ w / 0.5, 0.0) @ w
    ),
    "associative_scan": lambda w: mean_square(lax.associative_scan(jnp.add, X @ w)),
    "attention": lambda w: mean_square(
        jax.nn.dot_product_attention(
            *[(X @ w).reshape(1, 8, 4, 4)] * 3, is_causal=True
        ).reshape(8, 16)
        @ w
    ),
    "gradient_penalty": lambda w: mean_square(
        jax.grad(lambda h: jnp.sum(jnp.tanh(h @ w)))(X)
    ),
    "resize": lambda w: mean_square(jax.image.resize(X @ w, (4, 8), "bilinear")),
}
# Reverse-mode differentiation of these is JAX's own refusal or the user's.
FORWARD_ONLY_REFUSED = ("custom_vjp",)

# How far the gradient of one rounding per operation moves, over what eps says: none of
# the programs has more than ten rounded operations in a row.
ROUNDINGS = 10


@pytest.mark.parametrize("name", PROGRAMS)
def test_value_and_derivatives_are_those_of_the_function(name):
    fn = PROGRAMS[name]

    def results(transform, w):
        found = [
            jax.value_and_grad(transform(fn))(w),
            transform(jax.value_and_grad(fn))(w),
        ]
        if name not in FORWARD_ONLY_REFUSED:
            found.append(jax.jvp(transform(fn), (w,), (w,)))
        return found

    assert_only_rounded(results, roundings=ROUNDINGS)


@pytest.mark.parametrize("name", ["products", "jit", "custom_jvp", "softmax", "relu"])
def test_it_works_under_vmap_and_linearize(name):
    fn = PROGRAMS[name]
    mixed = amp.autocast(fn, F16)
    stack = jnp.stack([W, 2 * W])
    expected = jnp.stack([compiled(fn)(w) for w in stack])
    found = compiled(jax.vmap(mixed))(stack)
    assert relative_error(found, expected) < ROUNDINGS * eps(F16)
    value, linear = jax.linearize(mixed, W)
    np.testing.assert_allclose(value, mixed(W), rtol=ROUNDINGS * eps(F16))
    tangent = jax.jvp(fn, (W,), (W,))[1]
    assert relative_error(linear(W), tangent) < ROUNDINGS * eps(F16)


def test_it_works_under_jacfwd_jacrev_and_hessian():
    w = W[:4, :4]
    x = X[:, :4]

    def fn(w):
        return jnp.mean(jnp.tanh(x @ w) ** 2, axis=0)

    mixed = amp.autocast(fn, F16)
    for transform in (jax.jacfwd, jax.jacrev):
        found, expected = (compiled(transform(f))(w) for f in (mixed, fn))
        error = relative_error(found, expected)
        assert error < ROUNDINGS * eps(F16)
    scalar, mixed_scalar = (lambda w, f=f: jnp.sum(f(w)) for f in (fn, mixed))
    found, expected = (compiled(jax.hessian(f))(w) for f in (mixed_scalar, scalar))
    error = relative_error(found, expected)
    assert error < ROUNDINGS * eps(F16)


@pytest.mark.parametrize("name", ["products", "jit", "custom_jvp", "attention"])
def test_twice_is_once(name):
    once = amp.autocast(PROGRAMS[name], F16)
    twice = amp.autocast(once, F16)
    assert str(jax.make_jaxpr(twice)(W)) == str(jax.make_jaxpr(once)(W))


def test_the_inner_policy_wins():
    full = amp.autocast(lambda w: jnp.tanh(X @ w), "float32")
    outer = amp.autocast(lambda w: full(w) @ w, BF16)
    rows = dtypes_of(outer, W, primitive="dot_general")
    assert rows == [("float32",) * 3, ("bfloat16",) * 3]
    half = amp.autocast(lambda w: jnp.tanh(X @ w) @ w, F16)
    outer = amp.autocast(lambda w: half(w) @ w, BF16)
    rows = dtypes_of(outer, W, primitive="dot_general")
    assert rows == [("float16",) * 3] * 2 + [("bfloat16",) * 3]


# Custom rules


@pytest.mark.parametrize("policy", POLICIES)
def test_a_custom_jvp_keeps_its_rule_and_runs_it_low(policy):
    half = policy.removeprefix("mixed_")
    fn = amp.autocast(lambda w: jnp.sum(scaled_sine(X @ w, X) @ w), policy)
    # In f16 an argument that scales an activation keeps it in f32 up to the product.
    sine = "float32" if policy == F16 else half
    assert results_of(fn, W, primitive="sin") == [sine]
    assert set(results_of(jax.grad(fn), W, primitive="cos")) == {sine}


def test_a_custom_jvp_keeps_its_rule_in_second_order():
    @jax.custom_jvp
    def cube(x):
        return x**3

    # Wrong on purpose: the derivative of the derivative is 20 x, not 6 x.
    cube.defjvp(lambda p, t: (cube(*p), 10 * p[0] ** 2 * t[0]))
    x = jnp.float32(0.5)
    fn = amp.autocast(lambda x: cube(x * jnp.float32(1)), F16)
    np.testing.assert_allclose(jax.grad(fn)(x), 2.5, rtol=4 * eps(F16))
    np.testing.assert_allclose(jax.grad(jax.grad(fn))(x), 10.0, rtol=4 * eps(F16))


def test_a_relu_saves_no_f32_for_its_backward_pass():
    _, backward = jax.vjp(amp.autocast(lambda w: jax.nn.relu(X @ w) @ w, BF16), W)
    saved = [x for x in jax.tree.leaves(backward) if x.shape == (8, 16)]
    assert saved and all(x.dtype != jnp.float32 for x in saved)


def test_a_checkpoint_stays_one_with_its_policy_and_names():
    def block(h, w):
        h = checkpoint_name(h @ w, "kept")
        return jnp.tanh(jnp.tanh(h) @ w)

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    fn = amp.autocast(
        lambda w: jnp.sum(jax.checkpoint(block, policy=policy)(X @ w, w)), BF16
    )
    (eqn,) = (
        e
        for e in equations(jax.make_jaxpr(fn)(W))
        if e.primitive.name in ("checkpoint", "remat2", "remat")
    )
    assert eqn.params["policy"] is policy
    assert results_of(fn, W, primitive="name") == ["bfloat16"]
    plain = amp.autocast(lambda w: jnp.sum(block(X @ w, w)), BF16)
    saved, saved_without = (
        [x for x in jax.tree.leaves(jax.vjp(f, W)[1]) if x.shape == (8, 16)]
        for f in (fn, plain)
    )
    assert len(saved) < len(saved_without)
    assert {x.dtype.name for x in saved} == {"bfloat16"}


def test_the_name_of_a_custom_function_and_of_a_jit_survives():
    def my_block(x, w):
        return jnp.tanh(x @ w)

    fn = amp.autocast(lambda w: scaled_sine(jax.jit(my_block)(X, w), X) @ w, BF16)
    text = str(jax.make_jaxpr(fn)(W))
    assert "name=my_block" in text and "name=scaled_sine" in text
    assert "my_block" in jax.jit(fn).lower(W).as_text(debug_info=True)


def test_name_scopes_survive():
    def fn(w):
        with jax.named_scope("encoder"):
            return X @ w

    text = jax.jit(amp.autocast(fn)).lower(W).as_text(debug_info=True)
    assert "encoder/dot_general" in text


# Signatures


def test_structure_shapes_and_dtypes_are_those_of_the_function():
    def fn(tree, ids, key, flag, *, scale, name):
        assert isinstance(flag, bool) and isinstance(scale, float) and name == "mean"
        h = tree["w"] @ tree["w"]
        noise = jax.random.normal(key, h.shape)
        return {
            "out": (h + noise, None, name),
            "half": h.astype(jnp.bfloat16),
            "ids": ids + 1,
            "key": key,
            "count": 3,
            "complex": h.astype(jnp.complex64),
            "flag": h > 0,
        }

    args = ({"w": W, "unused": None}, jnp.arange(3), KEY, True)
    expected = fn(*args, scale=2.0, name="mean")
    found = amp.autocast(fn)(*args, scale=2.0, name="mean")
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if hasattr(b, "dtype"):
            assert a.dtype == b.dtype and a.shape == b.shape
        else:
            assert a == b and type(a) is type(b)


def test_integers_and_keys_pass_bit_for_bit():
    def fn(ids, key):
        return ids @ ids.T, jax.random.bits(key, (4,)), jax.random.normal(key, (4,))

    ids = jnp.arange(2**24 + 1, 2**24 + 5).reshape(2, 2)
    jax.tree.map(
        np.testing.assert_array_equal, amp.autocast(fn, F16)(ids, KEY), fn(ids, KEY)
    )


def test_float64_is_never_touched():
    with jax.enable_x64(True):
        x = jnp.full((4, 4), 1 + 2.0**-40, jnp.float64)
        fn = lambda x: jnp.tanh(x @ x)  # noqa: E731
        found = amp.autocast(fn, F16)(x)
        assert found.dtype == jnp.float64
        np.testing.assert_array_equal(found, fn(x))


def test_fp8_weights_are_not_cast_without_their_scale():
    def fn(w8, scale, x):
        return x @ (w8.astype(jnp.float32) * scale)

    w8 = W.astype(jnp.float8_e4m3fn)
    found = amp.autocast(fn, BF16)(w8, jnp.float32(0.5), X)
    assert relative_error(found, fn(w8, jnp.float32(0.5), X)) < 2 * eps(BF16)
    rows = dtypes_of(
        amp.autocast(lambda a: lax.dot(a, a), BF16), w8, primitive="dot_general"
    )
    assert rows == [("float8_e4m3fn",) * 3]


def test_numpy_arguments_and_closed_over_arrays_work():
    table = np.asarray(W)
    found = amp.autocast(lambda x: x @ table, BF16)(np.asarray(X))
    assert relative_error(found, X @ W) < 2 * eps(BF16)


def test_gradients_flow_to_what_is_closed_over():
    def outer(w):
        return amp.autocast(lambda x: mean_square(x @ w), F16)(X)

    expected = jax.grad(lambda w: mean_square(X @ w))(W)
    assert relative_error(jax.grad(outer)(W), expected) < 4 * eps(F16)


def test_outputs_come_back_in_the_output_dtype():
    policy = amp.Policy(compute_dtype="bf16", output_dtype="bf16")
    fn = amp.autocast(lambda w: (X @ w, w, jnp.exp(X @ w)), policy)
    assert {out.dtype.name for out in fn(W)} == {"bfloat16"}
    assert amp.autocast(lambda w: w.astype("float16"), policy)(W).dtype == "float16"


def test_disabled_it_is_the_function():
    fn = lambda x: x  # noqa: E731
    assert amp.autocast(fn, enabled=False) is fn


def test_it_is_a_decorator():
    @amp.autocast(policy=F16)
    def product(x, w):
        "Multiplies."
        return x @ w

    assert product.__name__ == "product" and product.__doc__ == "Multiplies."
    assert results_of(product, X, W, primitive="dot_general") == ["float16"]


def test_effects_happen_once():
    seen = []

    def fn(x):
        h = x @ W
        jax.debug.callback(lambda v: seen.append(v.dtype), h)
        return h

    jax.block_until_ready(amp.autocast(fn, BF16)(X))
    jax.effects_barrier()
    assert seen == [np.dtype("float32")]


# What runs as traced


def test_a_custom_vjp_runs_as_traced_and_its_surroundings_in_half():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(
        lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
    )
    fn = amp.autocast(lambda w: mean_square(product(X @ w, w)), BF16)
    assert dtypes_of(jax.grad(fn), W, primitive="dot_general") == [
        ("bfloat16",) * 3,
        *[("float32",) * 3] * 3,
        ("bfloat16",) * 3,
    ]


def test_it_works_inside_scan_and_shard_map():
    def body(h, _):
        return amp.autocast(lambda h: jnp.tanh(h @ W), BF16)(h), None

    out, _ = lax.scan(body, X, None, length=3)
    expected = X
    for _ in range(3):
        expected = jnp.tanh(expected @ W)
    assert relative_error(out, expected) < ROUNDINGS * eps(BF16)

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    spec = jax.sharding.PartitionSpec("data")

    def loss(w, x):
        h = amp.autocast(lambda w, x: jnp.tanh(x @ w), BF16)(w, x)
        return lax.pmean(jnp.mean(h**2), "data")

    sharded = jax.shard_map(
        loss,
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), spec),
        out_specs=jax.sharding.PartitionSpec(),
    )
    found = jax.jit(jax.grad(sharded))(W, X)
    expected = jax.grad(lambda w: jnp.mean(jnp.tanh(X @ w) ** 2))(W)
    assert relative_error(found, expected) < ROUNDINGS * eps(BF16)
    outside = amp.autocast(sharded, BF16)
    np.testing.assert_allclose(outside(W, X), sharded(W, X), rtol=4 * eps(BF16))


# Nothing leaks


def test_a_jitted_helper_does_not_carry_autocast_to_plain_callers():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(nn.Dense(16)(x))

    net = Net()
    variables = net.init(KEY, X)
    helper = jax.jit(net.apply)
    plain = str(jax.make_jaxpr(helper)(variables, X))
    mixed = str(jax.make_jaxpr(amp.autocast(helper, BF16))(variables, X))
    assert "bf16" in mixed and "bf16" not in plain
    assert str(jax.make_jaxpr(helper)(variables, X)) == plain
    # and the norm's scope is there although the helper was traced before:
    assert results_of(
        amp.autocast(lambda v, x: jnp.tanh(helper(v, x)) @ W, BF16),
        variables,
        X,
        primitive="tanh",
    ) == ["bfloat16"]


def test_an_inner_function_used_often_is_staged_once():
    block = jax.jit(lambda x, w: jnp.tanh(x @ w) + jnp.exp(x @ w) * x)

    def bodies(calls):
        def fn(w):
            h = X
            for _ in range(calls):
                h = block(h, w)
            return h

        return {
            id(e.params["jaxpr"])
            for e in jax.make_jaxpr(amp.autocast(fn, BF16))(W).eqns
            if e.params.get("name") == "<lambda>"
        }

    # The first calls have free inputs, the last ones feed an f32 output.
    assert len(bodies(6)) == len(bodies(24)) <= 4


def test_attributes_go_along_but_those_that_compile_the_function_as_it_was():
    def fn(x):
        return x @ x

    fn.tag = "mine"
    for transform in (amp.autocast, amp.full_precision, amp.cast_inputs):
        assert transform(fn).tag == "mine"
        assert not hasattr(transform(jax.pmap(fn)), "lower")


# Bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: amp.autocast(F16), TypeError, "autocast(fn, 'mixed_float16')"),
        (lambda: amp.autocast(3), TypeError, "found int"),
        (lambda: amp.autocast(abs, "mixed_float17"), ValueError, "mixed_float16"),
        (lambda: amp.autocast(abs, 16), TypeError, "16"),
        (lambda: amp.autocast(abs, "c=f8_e4m3"), ValueError, "float8_e4m3fn"),
        (lambda: amp.autocast(abs, "c=f64"), ValueError, "float64"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


def test_an_error_of_the_function_is_the_functions():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        amp.autocast(lambda x: x @ x)(X)


def test_an_nnx_module_reaches_the_function_unchanged():
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

    def apply(model, x):
        assert isinstance(model, nnx.Linear)
        return model(x)

    found = amp.autocast(apply, BF16)(model, X)
    assert relative_error(found, model(X)) < 4 * eps(BF16)
    gradient = nnx.grad(lambda m: mean_square(amp.autocast(apply, BF16)(m, X)))(model)
    expected = nnx.grad(lambda m: mean_square(apply(m, X)))(model)
    error = relative_error(gradient.kernel[...], expected.kernel[...])
    assert error < 4 * eps(BF16)
