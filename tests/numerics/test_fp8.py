"""`diagnose` and `tune` of products in 8-bit floats."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn

import jmp_amp as amp
from tests.numerics.counting import counted, counts, of, only

BF16 = ml_dtypes.bfloat16


def scale(x, largest):
    return 2.0 ** np.ceil(np.log2(np.abs(x).max() / largest))


def relative(a, b):
    return np.linalg.norm(np.float64(a) - b) / np.linalg.norm(np.float64(b))


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 16)).astype(np.float32)
    x[:, 0] *= 2.0**-20  # becomes 0 in 8 bits
    w = rng.standard_normal((16, 48)).astype(np.float32)
    return w, x


@pytest.fixture(scope="module")
def diagnosis(operands):
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    return amp.diagnose(loss, "fp8")(*map(jnp.asarray, operands))


def test_an_operand_is_a_site_with_the_numbers_that_it_had_before(diagnosis, operands):
    w, x = (each.astype(BF16).astype(np.float32) for each in operands)
    lhs, rhs, cotangent = diagnosis.quantised
    assert counted(lhs.site) == counts(x) and counted(rhs.site) == counts(w)
    assert [each.site.dtype for each in (lhs, rhs)] == ["e4m3", "e4m3"]
    assert cotangent.site.dtype == "e5m2" and not cotangent.site.is_forward
    assert (lhs.scales["e4m3"], lhs.scales["e5m2"]) == (scale(x, 448), scale(x, 57344))


def test_the_share_that_becomes_zero_is_that_of_a_cast(diagnosis, operands):
    _, x = operands
    x = x.astype(BF16).astype(np.float32)
    lhs, *_ = diagnosis.quantised
    for name, dtype in (
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
    ):
        largest = float(ml_dtypes.finfo(dtype).max)
        q = (x / scale(x, largest)).astype(dtype).astype(np.float32)
        assert lhs.underflowed[name] == np.mean((q == 0) & (x != 0))
        assert lhs.saturated[name] == 0.0
    assert lhs.underflowed["e4m3"] >= 1 / 16


def test_infinities_saturate_and_are_told(operands):
    w, x = map(jnp.asarray, operands)
    x = x.at[0, 0].set(jnp.inf)
    lhs, *_ = amp.diagnose(lambda w, x: x @ w, "fp8")(w, x).quantised
    assert lhs.saturated["e4m3"] == 1 / x.size


def test_the_error_of_an_operand_is_that_of_rounding_it_to_8_bits(diagnosis, operands):
    _, x = operands
    half = x.astype(BF16).astype(np.float32)
    s = scale(half, 448)
    q = (half / s).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * s
    lhs, *_ = diagnosis.quantised
    assert lhs.site.error == pytest.approx(relative(q, x), rel=1e-3)
    assert lhs.site in diagnosis.blame[:3]
    product = only(diagnosis.sites, "dot_general")
    # It reads the 8-bit operands, and rounds to bf16.
    assert product.amplification < 2


def test_what_a_product_is_made_of_is_no_site(diagnosis):
    forward = [site.operation for site in diagnosis.sites if site.is_forward]
    assert forward == [
        *["convert_element_type"] * 2,
        *["quantise"] * 2,
        "dot_general",
        "convert_element_type",
        "sin",
        "reduce_sum",
    ]
    backward = [s.operation for s in diagnosis.sites if not s.is_forward]
    assert backward.count("quantise") == 1  # of the cotangent, for both products
    assert backward.count("dot_general") == 1  # `x` is not differentiated
    assert not of(diagnosis.sites, "custom_linear_solve")


def test_a_diagnosis_of_fp8_is_read_and_read_back(diagnosis):
    assert amp.Diagnosis.from_json(diagnosis.to_json()) == diagnosis
    assert "In 8 bits" in str(diagnosis) and "0 in e4m3" in str(diagnosis)


@pytest.mark.slow
def test_a_product_in_a_loop_is_quantised_in_every_turn():
    def loss(w, x):
        turn = lambda c, w: (jnp.maximum(c @ w, 0.0), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(turn, x, w)[0])

    w, x = jnp.ones((3, 16, 16)) / 16, jnp.ones((16, 16))
    d = amp.diagnose(loss, "fp8")(w, x)
    assert [each.site.times for each in d.quantised] == [3, 3, 3]
    # All is exact: sums of powers of two.
    assert d.value == 256.0 and all(s.error in (0.0, None) for s in d.sites)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(32, name="first")(x))
        # What is left of a difference of two products has the digits of their errors.
        product = nn.Dense(32, name="cancels")
        x = x + (product(x) - product(0.98 * x)) * 50
        return nn.Dense(32, name="last")(x)


@pytest.fixture(scope="module")
def planted():
    rng = np.random.default_rng(1)
    x, y = (jnp.asarray(rng.standard_normal((64, 32)), jnp.float32) for _ in "xy")
    model = Model()
    params = jax.jit(model.init)(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean((model.apply(params, x) - y) ** 2)

    return loss, params, x


@pytest.mark.slow
def test_tune_moves_the_module_that_needs_more_than_8_bits(planted):
    loss, params, x = planted
    exact = jax.jit(jax.grad(loss))(params, x)

    def error(policy):
        found = jax.jit(jax.grad(amp.autocast(loss, policy)))(params, x)
        a, b = (
            np.concatenate([np.ravel(v) for v in jax.tree.leaves(t)])
            for t in (found, exact)
        )
        return relative(a, b)

    policy = amp.PolicyMap("fp8", {"cancels": "mixed_bfloat16"})
    bound = 1.25 * error(policy)
    assert error("fp8") > 1.2 * bound
    tuned = amp.tune(
        loss,
        "fp8",
        max_grad_error=bound,
        candidates=("mixed_bfloat16", "float32"),
    )(params, x)
    assert tuned.policy == policy
    assert tuned.is_minimal
    # Its flag alone makes the error that the real program makes when it alone is fp8.
    alone = amp.PolicyMap("fp8", {"first": "float32", "last": "float32"})
    sensitivity = tuned.modules["Model/cancels"].sensitivity
    assert sensitivity == pytest.approx(error(alone), rel=0.05)
