"""Programs that `autocast` once got wrong, each as small as it gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jmp_amp as amp
from tests.programs import results_of
from tests.rounding import BF16, F16, W, X, eps, relative_error

EPS = eps(F16)


# Outputs


@pytest.mark.parametrize(("make", "dtype"), [(jnp.int32, "int32"), (jnp.float32, "f4")])
def test_a_constant_result_is_an_array_of_its_dtype(make, dtype):
    found = amp.autocast(lambda: make(1), F16)()
    assert isinstance(found, jax.Array)
    assert found.dtype == dtype and int(found) == 1


@pytest.mark.parametrize("policy", ["float32", F16])
def test_a_weakly_typed_result_stays_weak(policy):
    scale = jnp.asarray(2.0)
    found = amp.autocast(lambda s: s * 3.0, policy)(scale)
    assert jax.typeof(found).weak_type and found == 6
    # and so does not widen what it is multiplied with:
    assert (found * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_strongly_typed_result_stays_strong():
    found = amp.autocast(lambda s: s * jnp.float32(3), F16)(jnp.asarray(2.0))
    assert not jax.typeof(found).weak_type


def test_numpy_arrays_of_text_reach_the_function_unchanged():
    names = np.array(["a", "b"])

    def fn(names, name, x):
        assert names.tolist() == ["a", "b"] and name == "a"
        return x @ W, names

    found, same = amp.autocast(fn, F16)(names, np.str_("a"), X)
    assert found.shape == (8, 16) and same is names


# Operations of several operands


@pytest.mark.parametrize(
    "pass_on", [lax.optimization_barrier, jax.device_put], ids=lambda f: f.__name__
)
def test_what_passes_a_parameter_on_with_an_activation_does_not_round_it(pass_on):
    def fn(x, w):
        h, w = pass_on((x @ w, w))
        return h @ w, w

    _, found = amp.autocast(fn, F16)(X, W)
    np.testing.assert_array_equal(found, W)
    # and the activation is not f32 for the parameter's sake:
    assert results_of(
        amp.autocast(lambda x, w: jnp.tanh(pass_on((x @ w, w))[0]) @ w, F16),
        X,
        W,
        primitive="tanh",
    ) == ["float16"]


def test_what_is_sorted_along_with_an_activation_is_not_rounded():
    times = 1e6 + jnp.arange(16.0).reshape(1, 16)  # above the largest f16

    def fn(x, w):
        keys = x @ w
        keys, found = lax.sort((keys, jnp.broadcast_to(times, keys.shape)), num_keys=1)
        return keys @ w, found

    _, found = amp.autocast(fn, F16)(X, W)
    np.testing.assert_array_equal(jnp.sort(found, axis=1)[:1], times)


# Constants


@pytest.mark.breadth(1)
@pytest.mark.parametrize("of_parameters", [False, True])
def test_a_fill_value_that_f16_cannot_hold_is_a_constant_that_does_not_fit(
    of_parameters,
):
    index = jnp.array([0, 100])

    def fn(w):
        table = w if of_parameters else X @ w
        rows = table.at[index].get(mode="fill", fill_value=-1e9)
        return (rows + (X @ w)[:2]) * 1e-3 * 1e-3 @ w

    found = amp.autocast(fn, F16)(W)
    assert relative_error(found, fn(W)) < 8 * EPS


# Range


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    ("function", "at"),
    [(jnp.arcsinh, 300.0), (lambda h: jnp.arctan2(h, 2.0), 300.0)],
    ids=["arcsinh", "arctan2"],
)
def test_a_derivative_whose_square_overflows_f16_is_that_of_f32(function, at):
    def fn(x):
        h = x @ jnp.eye(1)
        return jnp.sum(function(h) @ (1024 * jnp.eye(1)))

    x = jnp.full((1, 1), at)
    found = jax.grad(amp.autocast(fn, F16))(x)
    assert relative_error(found, jax.grad(fn)(x)) < 16 * EPS


@pytest.mark.xfail(
    strict=True, reason="gelu cubes its argument: above 148 the derivative is 0 * inf"
)
def test_a_gelu_of_large_activations_has_a_finite_gradient_in_f16():
    def fn(x):
        return jnp.sum(jax.nn.gelu(x @ jnp.eye(2)) @ jnp.eye(2))

    found = jax.grad(amp.autocast(fn, F16))(jnp.array([[200.0, 1.0]]))
    assert jnp.isfinite(found).all()


@pytest.mark.parametrize(
    "found_any",
    [
        lambda h: jnp.min(jnp.where(X > 99, h, 1e9), axis=1) < 1e8,
        lambda h: jnp.where(X > 99, h, -1e9) == -1e9,
    ],
    ids=["less", "equal"],
)
def test_a_comparison_with_a_sentinel_that_f16_cannot_hold_is_that_of_f32(found_any):
    def fn(w):
        return found_any(X @ w)

    np.testing.assert_array_equal(amp.autocast(fn, F16)(W), fn(W))


# Dtypes that are part of the meaning


@pytest.mark.breadth(2)
@pytest.mark.parametrize("policy", [F16, BF16])
@pytest.mark.parametrize(
    ("dtype", "value"), [(jnp.bfloat16, 1e10), (jnp.float16, 1 + 2.0**-10)]
)
def test_inputs_of_the_other_half_dtype_are_computed_with_in_it(dtype, value, policy):
    x = jnp.full((1, 4), value, dtype)

    def fn(x):
        return jax.jit(lambda x: (x + x, jnp.max(-x, axis=0)))(x.T)

    for found, expected in zip(amp.autocast(fn, policy)(x), fn(x), strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


def test_a_cast_to_the_other_half_dtype_does_not_pass_through_the_first():
    x = jnp.array([[1e10, 1 + 2.0**-10]])
    for policy, dtype in ((F16, jnp.bfloat16), (BF16, jnp.float16)):
        x = x.at[0, 0].set(1e10 if dtype == jnp.bfloat16 else 1e4)
        found = amp.autocast(lambda x, d=dtype: x.T.astype(d), policy)(x)
        np.testing.assert_array_equal(found, x.T.astype(dtype))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("op_class", ["low", "full"])
def test_the_bits_of_a_number_are_read_in_its_own_dtype(op_class, dtype):
    def flipped(h):
        return jnp.where(jnp.signbit(h), -h, 2 * h)

    policy = getattr(amp.get_policy(F16), f"with_{op_class}")("flipped")
    x = X.astype(dtype)
    found = amp.autocast(lambda x: flipped(x), policy)(x)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, flipped(x), rtol=2 * EPS)


def test_a_product_with_an_f32_result_is_as_traced_in_an_f32_policy():
    def fn(w):
        w = w.astype(jnp.bfloat16)
        x = X.astype(jnp.bfloat16)
        return jnp.sum(jnp.sin(lax.dot(x, w, preferred_element_type=jnp.float32)))

    found = jax.grad(amp.autocast(fn, "float32"))(W)
    np.testing.assert_array_equal(found, jax.grad(fn)(W))


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "fn",
    [
        # Two casts of one value, two readers of a cast, and the turns of a loop.
        lambda w: jnp.sin(rounded(h := X @ w)) + 3 * jnp.cos(rounded(h)),
        lambda w: lax.cond(w[0, 0] < 9, jnp.sin, jnp.cos, h := rounded(w)) + h**2,
        lambda w: lax.scan(lambda c, _: (c @ w, None), X @ (w := rounded(w)), None, 3)[
            0
        ],
    ],
)
def test_gradients_of_casts_are_summed_as_written_in_an_f32_policy(fn):
    def loss(w):
        return jnp.sum(jnp.square(fn(w)))

    found = jax.grad(amp.autocast(loss, "float32"))(W)
    assert relative_error(found, jax.grad(loss)(W)) < 8 * jnp.finfo(jnp.float32).eps


# Kinds of equations


def test_a_custom_jvp_sees_which_tangents_are_zero():
    @jax.custom_jvp
    def product(x, y):
        return x * y

    def rule(primals, tangents):
        x, y = primals
        tangent = tangents[0] * y
        if not isinstance(tangents[1], SymbolicZero):
            tangent = tangent + tangents[1] * jnp.nan
        return product(x, y), tangent

    product.defjvp(rule, symbolic_zeros=True)
    fn = amp.autocast(lambda w: product(X @ w, X), F16)
    expected = jax.jvp(lambda w: (X @ w) * X, (W,), (W,))[1]
    found = jax.jvp(fn, (W,), (W,))[1]
    assert relative_error(found, expected) < 8 * EPS
