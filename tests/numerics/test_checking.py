"""The policy that a diagnosis suggests is finite wherever the function is."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp

SMALL, LARGE = jnp.full((4, 4), 1e-5), jnp.full((4, 4), 300.0)
# A product of one of these and of LARGE fits f16, and a sum of four does not.
MASKED = jnp.full((4, 4), 200.0).at[0].set(0.0)
ONES = jnp.ones((4, 4))


def masked(w, x):
    """Overflows forward and backward; in f32 a logarithm of 0 is masked."""
    large = jnp.mean(x @ w) / 1e9
    steep = jnp.sum(x * w) / 1e-9
    return large + steep + jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0))


FINITE_ITSELF = {
    "masked": (masked, "p=f32,c=f16,o=f32,low=mul", (LARGE, MASKED)),
    "quotient": (lambda w, x: jnp.sum(1 / (x @ w)), "mixed_float16", (SMALL, SMALL)),
    "backward": (lambda w, x: jnp.sum(x @ w) * 1e9, "mixed_float16", (ONES, ONES)),
}


CAUSE = {
    "quotient": "100% of what dot_general (test_checking.py:",
    "backward": "It overflows in the backward pass, which mixed_bfloat16 has the range",
}


def assert_finite(fn, policy, *args, scale=1.0):
    step = jax.value_and_grad(lambda *args: amp.autocast(fn, policy)(*args) * scale)
    assert amp.all_finite(jax.jit(step)(*args))


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", FINITE_ITSELF)
def test_where_no_entry_keeps_it_finite_the_default_becomes_f32(name):
    fn, policy, args = FINITE_ITSELF[name]
    assert amp.all_finite(jax.jit(jax.value_and_grad(fn))(*args))
    d = amp.diagnose(fn, policy)(*args)
    assert not d.is_finite and d.policy == amp.PolicyMap("float32")
    assert "the default of d.policy is f32" in d.advice[-1]
    # 1e-5 * 1e-5 is 0 in f16, and 1e9 infinite.
    assert CAUSE.get(name, "") in d.advice[-1]
    assert_finite(fn, d.policy, *args)


class Quotient(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="other")(x)
        return nn.Dense(4, name="dense", kernel_init=nn.initializers.constant(1e-5))(x)


@pytest.mark.slow
def test_entries_stay_unless_they_are_what_is_not_finite():
    params = jax.jit(Quotient().init)(jax.random.key(0), SMALL)

    def loss(params, x):
        return jnp.sum(1 / Quotient().apply(params, x))

    given = amp.PolicyMap("mixed_float16", {"other": "mixed_bfloat16"})
    d = amp.diagnose(loss, given)(params, SMALL)
    assert d.policy == amp.PolicyMap("float32", {"other": "mixed_bfloat16"})
    given = amp.PolicyMap("float32", {"dense": "mixed_float16"})
    assert amp.diagnose(loss, given)(params, SMALL).policy == amp.PolicyMap("float32")


class BothPasses(nn.Module):
    """What `b` reads overflows f16 forward, the gradient that `a` reads backward."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(16, name="a")(x)) * 3e5
        return nn.Dense(16, name="b")(x)


# Of small inputs the kernel of `a` has a small gradient: f16 holds all that its product
# makes, and not the cotangent that the product reads.
@pytest.mark.slow
@pytest.mark.parametrize(("size", "entries"), [(1.0, {"b": "float32"}), (1e-4, {})])
def test_the_cause_is_that_of_the_policy_that_was_tried(size, entries):
    model, x = BothPasses(), size * jnp.ones((8, 16))
    params = jax.jit(model.init)(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    tried = amp.PolicyMap("mixed_float16", entries)
    value, gradients = jax.jit(jax.value_and_grad(amp.autocast(loss, tried)))(params, x)
    assert jnp.isfinite(value) and not amp.all_finite(gradients)
    d = amp.diagnose(loss, "mixed_float16")(params, x)
    assert d.policy == amp.PolicyMap("float32", entries)
    assert_finite(loss, d.policy, params, x)
    assert d.advice[-1].startswith(f"With {str(tried)!r} the run is not finite")
    assert "in the backward pass, which mixed_bfloat16 has the range" in d.advice[-1]
    assert "in BothPasses/a (test_checking.py:" in d.advice[-1]
    assert not any("autocast(fn, d.policy) has" in each for each in d.advice)
    # That policy's own diagnosis says the same.
    first = amp.diagnose(loss, tried)(params, x).first_nonfinite
    assert (first.module, first.direction) == ("BothPasses/a", "backward")


def test_a_loss_scale_that_is_too_large_is_no_matter_of_the_policy():
    def loss(w, x):
        return jnp.sum(x @ w)

    scale = amp.static_loss_scale(2.0**20)
    d = amp.diagnose(loss, "mixed_float16", loss_scale=scale)(ONES, ONES)
    assert d.gradients[""].nonfinite and d.policy == amp.PolicyMap("mixed_float16")
    # The largest gradient is 4, what is cast to f16 on its way to the product is 1.
    assert d.loss_scale == 2.0**10
    assert_finite(loss, d.policy, ONES, ONES, scale=d.loss_scale)


@pytest.mark.slow
def test_what_the_plan_casts_fits_f16_with_the_loss_scale():
    def loss(w, x):
        return jnp.sum(x @ w)

    # The cotangent that is cast is 1, and f16 ends below 2**16; the gradient is 4e-5.
    d = amp.diagnose(loss, "mixed_float16")(ONES, SMALL)
    assert d.loss_scale == 2.0**15
    assert_finite(loss, d.policy, ONES, SMALL, scale=d.loss_scale)
    scale = amp.static_loss_scale(2.0**20)
    d = amp.diagnose(loss, "mixed_float16", loss_scale=scale)(ONES, SMALL)
    assert d.gradients[""].nonfinite and d.loss_scale == 2.0**15


@amp.with_policy("mixed_float16")
def marked_product(x, w):
    return x @ w


@amp.with_policy("mixed_float16")
class MarkedDense(nnx.Module):
    def __init__(self, kernel):
        self.kernel = nnx.Param(kernel)

    def __call__(self, x):
        return x @ self.kernel[...]


class Outer(nnx.Module):
    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        return self.part(x)


def small(h):
    # 8 * 300 * 40 is 96000, and f16 ends at 65504; this is one small number.
    return jnp.sum(h) * 1e-6


@amp.with_policy("mixed_float16")
def marked_sum_and_product(x, w):
    return (x + x) @ (w / 2)


MARKED = {
    "function behind a sum": (
        lambda w, x: small(marked_sum_and_product(x, w)),
        jnp.full((8, 8), 300.0),
        "dot_general (test_checking.py:",
    ),
    "function": (
        lambda w, x: small(marked_product(x, w)),
        jnp.full((8, 8), 300.0),
        "dot_general (test_checking.py:",
    ),
    "module": (
        lambda module, x: small(module(x)),
        Outer(MarkedDense(jnp.full((8, 8), 300.0))),
        "dot_general in Outer/part (test_checking.py:",
    ),
}


# Whatever the policy, the marking is the same.
each_policy = pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)


@pytest.mark.breadth(1)
@each_policy
@pytest.mark.parametrize("name", MARKED)
def test_advice_names_the_marking_that_no_map_mends(name, policy):
    fn, weights, where = MARKED[name]
    x = jnp.full((4, 8), 40.0)
    assert float(fn(weights, x)) == pytest.approx(4 * 8 * 96000e-6)
    d = amp.diagnose(fn, policy)(weights, x)
    assert d.policy == amp.PolicyMap("float32")
    assert not jnp.isfinite(amp.autocast(fn, d.policy)(weights, x))
    *others, last = d.advice
    assert f"{where}" in last and "is in f16 under every PolicyMap" in last
    assert "cast_inputs(fn, dtype)) wins over a map" in last
    assert "where it is used" not in last
    # What is not so.
    assert not any("autocast(fn, d.policy)" in each for each in others)


def test_an_entry_mends_a_module_inside_of_one_that_the_code_marks():
    marked = amp.with_policy("mixed_float16")(Outer)

    class Dense(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.full((8, 8), 300.0))

        def __call__(self, x):
            return x @ self.kernel[...]

    model, x = marked(Dense()), jnp.full((4, 8), 40.0)

    def loss(model, x):
        return small(model(x))

    d = amp.diagnose(loss, "mixed_bfloat16")(model, x)
    assert jnp.isfinite(amp.autocast(loss, d.policy)(model, x))


@each_policy
def test_what_cast_inputs_has_in_half_is_not_the_function_itself(policy):
    product = amp.cast_inputs(lambda x, w: x @ w, jnp.float16)

    def loss(w, x):
        return small(product(x, w))

    w, x = jnp.full((8, 8), 300.0), jnp.full((4, 8), 40.0)
    assert float(loss(w, x)) == pytest.approx(4 * 8 * 96000e-6)
    d = amp.diagnose(loss, policy)(w, x)
    assert d.policy == amp.PolicyMap("float32")
    assert not any("no policy helps" in each for each in d.advice)
    assert "the function is finite: cast_inputs has dot_general (" in d.advice[0]
    assert "is in f16 under every PolicyMap" in d.advice[-1]


@pytest.mark.slow
def test_what_cast_inputs_has_in_the_dtype_of_the_policy_is_mended_by_the_policy():
    product = amp.cast_inputs(lambda x, w: x @ w)

    def loss(w, x):
        return small(product(x, w))

    w, x = jnp.full((8, 8), 300.0), jnp.full((4, 8), 40.0)
    d = amp.diagnose(loss, "mixed_float16")(w, x)
    assert d.policy == amp.PolicyMap("float32")
    assert_finite(loss, d.policy, w, x)
    assert not any("no policy helps" in each for each in d.advice)

    def asks_for_it(w, x):
        return loss(w, x) + small((x.astype("f2") @ w.astype("f2")).astype("f4"))

    assert not jnp.isfinite(asks_for_it(w, x))
    found = amp.diagnose(asks_for_it, "mixed_float16")(w, x)
    assert any("no policy helps" in each for each in found.advice)


def test_a_function_may_return_keys_and_numbers_that_are_not_floats():
    def fn(x):
        return x @ x, jax.random.key(0), jnp.arange(3)

    d = amp.diagnose(fn, "mixed_float16")(LARGE)
    assert str(d.policy) == "p=f32,c=f16,o=f32,full=dot_general"
    assert jnp.isinf(d.value[0]).all() and (d.value[2] == jnp.arange(3)).all()
