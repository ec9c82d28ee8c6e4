"""What `autocast` promises of a function: its signature and its derivatives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jmp_amp as amp
from tests.constructs.rules import scaled_sine
from tests.programs import dtypes_of, equations, results_of, saved
from tests.rounding import (
    BF16,
    F16,
    KEY,
    POLICIES,
    W,
    X,
    eps,
    mean_square,
    relative_error,
)


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
    assert results_of(fn, W, primitive="sin") == [half]
    assert set(results_of(jax.grad(fn), W, primitive="cos")) == {half}


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
    found = saved(amp.autocast(lambda w: jax.nn.relu(X @ w) @ w, BF16), W, (8, 16))
    assert found and "float32" not in found


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
    kept = saved(fn, W, (8, 16))
    assert len(kept) < len(saved(plain, W, (8, 16)))
    assert set(kept) == {"bfloat16"}


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


@pytest.mark.parametrize("mark", [lambda fn: fn, amp.with_policy("bf16")])
def test_integers_and_keys_pass_bit_for_bit(mark):
    def fn(ids, key):
        return ids @ ids.T, ids + 1, jax.random.split(key)[0], jax.random.bits(key)

    ids = jnp.arange(2**24 + 1, 2**24 + 5).reshape(2, 2)
    found, expected = amp.autocast(mark(fn), F16)(ids, KEY), fn(ids, KEY)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and jnp.all(a == b)
    found = amp.autocast(mark(jax.random.normal), F16)(KEY, (4,))
    np.testing.assert_array_equal(found, jax.random.normal(KEY, (4,)))


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


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("output_dtype", ["float32", "float16", "bfloat16"])
def test_twice_it_is_once_and_the_results_have_the_inner_output_dtype(
    param_dtype, output_dtype
):
    policy = amp.Policy(param_dtype, "float16", output_dtype)
    once = amp.autocast(lambda w: (jnp.tanh(X @ w) @ w, jnp.sum(w)), policy)
    twice = amp.autocast(lambda w: once(w), "mixed_bfloat16")
    w = W.astype(param_dtype)
    chex.assert_trees_all_equal(twice(w), once(w))
    chex.assert_trees_all_equal_dtypes(twice(w), once(w))
    assert {x.dtype.name for x in twice(w)} == {output_dtype}


def test_it_is_a_decorator():
    @amp.autocast(policy=F16)
    def product(x, w):
        "Multiplies."
        return x @ w

    assert product.__name__ == "product" and product.__doc__ == "Multiplies."
    assert results_of(product, X, W, primitive="dot_general") == ["float16"]


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


# Nothing leaks


def test_a_jitted_helper_does_not_carry_autocast_to_plain_callers():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(nn.Dense(16)(x))

    net = Net()
    variables = jax.eval_shape(net.init, KEY, X)
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


# Mistakes of the function


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
    gradient, expected = (
        nnx.jit(nnx.grad(lambda m, fn=fn: mean_square(fn(m, X))))(model)
        for fn in (amp.autocast(apply, BF16), apply)
    )
    error = relative_error(gradient.kernel[...], expected.kernel[...])
    assert error < 4 * eps(BF16)
