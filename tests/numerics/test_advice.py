"""What advice says of numbers that are known."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from jmp_amp.numerics.diagnose.advice import advise
from jmp_amp.numerics.diagnose.suggestions import Runs
from tests.numerics.counting import of
from tests.numerics.made import gradient, site

INF, NAN = math.inf, math.nan
F16 = amp.PolicyMap("mixed_float16")
ATTN = {"module": "GPT/attn", "path": "attn", "source": "/home/me/gpt.py:41"}
MADE = {"nonfinite": 1, "makes_nonfinite": True}


def advice(sites, reference, *, gradients=(), value=1.0, **fields):
    gradients = dict(gradients)
    values = [*gradients.values()]
    is_finite = is_all_finite(value) and not any(each.nonfinite for each in values)
    sites, reference = (
        tuple(
            dataclasses.replace(each, identity=str(i)) for i, each in enumerate(those)
        )
        for those in (sites, reference)
    )
    runs = Runs(F16, sites, reference, value, gradients, is_finite, is_finite, **fields)
    return tuple(each.text for each in advise(runs))


def is_all_finite(value):
    return all(np.all(np.isfinite(x)) for x in jax.tree.leaves(value))


def test_nothing_is_said_of_a_run_that_is_right():
    sites = [
        site([1.0, 0.0, -INF], dtype="f16", error=1e-3, amplification=3.0),
        site([1.0, 0.5], direction="backward", dtype="f16"),
    ]
    reference = [site([1.0, 0.0, -INF]), site([1.0, 0.5], direction="backward")]
    fine = {"['w']": gradient([1.0], 1e-3), "['unused']": gradient([0.0], 0.0)}
    assert advice(sites, reference, gradients=fine, scale=128.0) == ()


def test_an_overflow_names_the_place_the_range_and_the_remedy():
    sites = [site([1.0, INF], dtype="f16", turn=3, operation="exp", **MADE, **ATTN)]
    reference = [site([1.0, 2e5], operation="exp", **ATTN)]
    first, second = advice(sites, reference, value=NAN)
    for words in (
        "exp in GPT/attn (gpt.py:41) made 1 of 2 values infinite or NaN",
        "(forward, f16, turn 3)",
        "in f32 it reaches 2e+05, and f16 ends at 65504",
    ):
        assert words in first
    assert second == "amp.autocast(fn, d.policy) has the module attn in f32."


def test_a_cast_of_the_plan_and_a_function_outside_of_modules():
    cast = site([INF], dtype="f16", operation="convert_element_type", **MADE)
    dot = site([NAN], dtype="f16", operation="dot_general")
    other = site([1.0], operation="sin")
    first, second = advice([cast, dot], [other, other], value=NAN)
    assert "too large for the cast" in first
    assert second == "amp.autocast(fn, d.policy) has every dot_general in f32."


def test_a_function_that_is_not_finite_itself_is_told_so():
    log = site([-INF, 1.0], operation="log", **MADE)
    (told,) = advice([log], [log], value=INF)
    assert "function itself" in told and "no policy helps" in told
    assert "log (model.py:7) made 1 of 2 values" in told and "epsilon" in told
    (masked,) = advice([log], [log])
    assert "it is masked, or not read" in masked and "epsilon" not in masked
    assert masked.startswith("The value and the gradients of the function itself are f")
    back = site([INF], operation="div", direction="backward", **MADE)
    (told,) = advice([back], [back], gradients={"": gradient([NAN], NAN)})
    assert "derivative itself" in told and "jnp.where(ok, x, 1.0)" in told


@pytest.mark.parametrize(
    ("operation", "dtype", "told", "untold"),
    [
        ("convert_element_type", "f16", "f16 ends at 65504", "in f32 convert"),
        ("convert_element_type", "f8_e4m3", "f8_e4m3 ends at 448", "in f32 convert"),
        ("exp", "f32", "f32 ends at 3.4e+38. Make its operands smaller.", "epsilon"),
        ("integer_pow", "f16", "too large, or where it is not defined", "epsilon"),
    ],
)
def test_what_is_too_large_without_a_policy_is_told_so(operation, dtype, told, untold):
    large = site([INF], operation=operation, dtype=dtype, **MADE)
    (found,) = advice([large], [large], value=INF)
    assert "function itself" in found and told in found and untold not in found


def test_a_pair_may_be_a_loss_with_more_beside_it():
    pair = jnp.float32(1.0), {"count": 1}
    (told,) = advice([], [], value=pair)
    assert "has_aux=True" in told
    assert advice([], [], value=pair, gradients={"": gradient([1.0], 0.0)}) == ()
    assert advice([], [], value=(jnp.ones(2), 1)) == ()


def test_what_came_first_is_told_first():
    own = site([INF], operation="log", **MADE)
    half = site([INF], dtype="f16", operation="exp", **MADE, **ATTN)
    large = site([1e6], operation="exp", **ATTN)
    told = advice([own, half], [own, large], value=NAN)
    assert ["itself" in each for each in told] == [True, False, False]
    told = advice([half, own], [large, own], value=NAN)
    assert ["itself" in each for each in told] == [False, True, False]


def test_an_argument_that_is_not_finite_is_not_blamed_on_an_operation():
    sites, reference = [site([NAN], dtype="f16")], [site([NAN])]
    (told,) = advice(sites, reference, value=NAN, arguments=["x holds 1 NaN"])
    assert told.startswith("No operation made the first value that is not finite.")
    assert told.endswith("The argument x holds 1 NaN.")
    # Those that the function closes over are no arguments.
    (told,) = advice(sites, reference, value=NAN)
    assert told.startswith("No operation made the values that are not finite")
    assert "closes over, or a constant" in told


def backward(values, dtype="f16", **fields):
    return site(values, direction="backward", dtype=dtype, **fields)


def test_a_loss_scale_that_is_too_large_is_told_and_the_one_to_use():
    made = backward([INF], **MADE)
    broken = {"['w']": gradient([INF], INF)}
    (told,) = advice([made], [backward([3.0], "f32")], scale=2.0**16, gradients=broken)
    assert "loss scale 2**16 is too large" in told and "Use 2**11" in told
    # Without a scale, or where f32 is too large for f16 too, it is not the scale.
    first, *_ = advice([made], [backward([1e6], "f32")], gradients=broken)
    assert "mixed_bfloat16" in first and "loss scale" not in first


def test_underflow_is_told_without_and_with_the_scale():
    values = [2.0**-30, 2.0**-26, 2.0**-20, 0.5]
    sites, reference = [backward(values)], [backward(values, "f32")]
    (told,) = advice(sites, reference)
    # Scaled by 2^13, 0.5 is 4096: the eighth. 2^-26 and 2^-30 are 2^-13 and 2^-17.
    assert "50% of the backward values that run in f16 underflow" in told
    assert "none with 2**13: train with amp.dynamic_loss_scale(2**13)" in told
    (told,) = advice(sites, reference, scale=4.0)
    assert "50% of" in told and ", 25% with 2**2," in told
    assert advice(sites, reference, scale=8192.0) == ()


def test_the_share_that_underflows_has_the_casts_of_the_plan_in_it():
    # The cotangents reach the product through a cast to f16.
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(n).astype(np.float32) for n in ((32, 16), (16, 16)))
    slopes = 1e-9 * np.exp(np.linspace(-5, 5, 512)).reshape(32, 16).astype(np.float32)

    def loss(w):
        return jnp.sum((x @ w) * slopes)

    told = amp.diagnose(loss, "mixed_float16")(w).advice[0]
    cast, product = (a.astype(np.float16) for a in (slopes, x.T @ slopes))
    # The gradient is transposed too.
    lost = np.sum(cast == 0) + 2 * np.sum(product == 0)
    share = 100 * lost / (cast.size + 2 * product.size)
    assert told.startswith(f"{share:.0f}% of the backward values that run in f16")
    assert "and none with 2**24" in told


def test_a_range_that_no_scale_holds_asks_for_bfloat16():
    values = [1e-12, 1e3]
    (told,) = advice([backward(values)], [backward(values, "f32")])
    assert "mixed_bfloat16" in told


def test_values_that_do_not_run_in_f16_do_not_underflow():
    tiny = [1e-20]
    assert advice([backward(tiny, "bf16")], [backward(tiny, "f32")]) == ()
    assert advice([backward(tiny, "f32")], [backward(tiny, "f32")]) == ()


def test_parameters_that_do_not_learn_are_named():
    dead = {f"['{i}']": gradient([0.0, 0.0], 1.0) for i in range(5)}
    (told,) = advice([], [], gradients=dead)
    assert "gradients ['0'], ['1'], ['2'] and 2 more are 0" in told


@pytest.mark.parametrize(
    ("error", "amplification", "said"),
    [(0.5, 1000.0, True), (0.5, 1.5, False), (1e-3, 1000.0, False)],
)
def test_an_operation_that_makes_a_large_error_is_named(error, amplification, said):
    sub = site(
        [1.0],
        dtype="f16",
        operation="sub",
        error=error,
        amplification=amplification,
        **ATTN,
    )
    told = advice([sub], [site([1.0], operation="sub", **ATTN)])
    if not said:
        assert told == ()
        return
    (told,) = told
    assert "sub in GPT/attn (gpt.py:41) makes a relative error of 0.5" in told
    assert "1000 times" in told and "amp.tune" in told and "underflow" not in told
    (told,) = advice([sub], [site([1e-9], operation="sub", **ATTN)])
    assert "100% of it underflows f16" in told


@pytest.mark.parametrize(
    ("of_loss", "of_gradient", "said"),
    [(1e-3, 1e-3, False), (0.5, 1e-3, True), (1e-3, 0.5, True), (None, NAN, True)],
)
def test_an_error_that_reaches_no_result_is_not_told(of_loss, of_gradient, said):
    sub = site([1.0], dtype="f16", error=0.5, amplification=1000.0, **ATTN)
    sites = [sub, site([1.0], dtype="f16", error=of_loss)]
    gradients = {"['w']": gradient([1.0], of_gradient)}
    told = advice(sites, [site([1.0]), site([1.0])], gradients=gradients)
    assert (told != ()) is said


@pytest.mark.slow
def test_the_mean_of_centred_data_has_an_error_that_nobody_asks_for():
    def loss(w, x):
        y = x @ w
        return jnp.std(y - jnp.mean(y))

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal((32, 32)), jnp.float32) for _ in "wx")
    d = amp.diagnose(loss, "mixed_bfloat16")(w, x)
    assert max(site.error for site in d.sites if site.is_forward) > 0.5
    assert d.gradients[""].error < 0.01 and d.advice == ()


def test_each_derivative_of_a_product_is_compared_with_itself():
    w, x = jnp.full((4, 4), 1e-4), jnp.full((4, 4), 60.0)

    def loss(w, x):
        return 2e4 * jnp.sum(x @ w)

    d = amp.diagnose(loss, "mixed_float16", argnums=(0, 1))(w, x)
    products = of(d.reference, "dot_general", "backward")
    # That of w sums 4 of 60 * 2e4, that of x 4 of 1e-4 * 2e4.
    assert [s.amax for s in products] == pytest.approx([4.8e6, 8.0])
    assert "in f32 it reaches 4.8e+06, and f16 ends at 65504" in d.advice[0]


def test_a_decision_that_came_out_otherwise_is_told_as_one():
    # In bf16, 1 + 2**-9 is 1: which of two is larger is lost.
    x = jnp.asarray([[1.0, 1.0 + 2.0**-9]] * 64)

    def chosen(x):
        return jax.nn.one_hot(jnp.argmax(x @ jnp.eye(2), axis=-1), 2)

    d = amp.diagnose(chosen, "mixed_bfloat16")(x)
    np.testing.assert_array_equal(chosen(x)[0], [0.0, 1.0])
    np.testing.assert_array_equal(d.value[0], [1.0, 0.0])
    (told,) = d.advice
    assert told.startswith("convert_element_type")
    assert "error of 1.41, because a comparison or an index came out other" in told
    assert "operands" not in told


def test_vectors_of_a_decomposition_may_turn_their_sign():
    # As right with the other sign: jnp.linalg.pinv of bf16 has an error of 0.5 %.
    error = {"error": 1.0, "amplification": 256.0}
    for operation in ("svd", "eigh", "eig"):
        turned = [site([1.0], operation=operation, **error)]
        assert advice(turned, [site([1.0], operation=operation)]) == ()
    (told,) = advice([site([1.0], operation="lu", **error)], [site([1.0])])
    assert told.startswith("lu (model.py:7) makes a relative error of 1, 256 times")


def compares(y):
    # One of the branches computes nothing.
    return jax.lax.cond(y > 2048.5, lambda y: y / 2, lambda y: y, y)


def counts_up(y):
    # From the first power of two that is no less than y.
    return jax.lax.while_loop(lambda s: s < y, lambda s: s * 2, jnp.float32(1))


def counts(y):
    # Nothing but the condition computes with floats.
    below = lambda n: n.astype(jnp.float32) * 512 < y  # noqa: E731
    return jax.lax.while_loop(below, lambda n: n + 1, jnp.int32(0)).astype(jnp.float32)


def scans(y):
    turn = lambda y, x: (y, compares(y + x))  # noqa: E731
    return jnp.sum(jax.lax.scan(turn, y, jnp.zeros(3))[1])


def casts(y):
    half = lambda y: y.astype(jnp.float16).astype(jnp.float32)  # noqa: E731
    return jax.lax.cond(y > 0, half, lambda y: y, y)


OTHERWISE = {
    "branch": (scans, "cond", "took branch 1 never under the policy and 3 times"),
    "turns": (counts_up, "while", "made 11 turns under the policy and 12"),
    "condition": (counts, "while", "made 4 turns under the policy and 5"),
    "same": (casts, None, None),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", OTHERWISE)
def test_a_branch_or_a_loop_that_the_policy_changes_is_told(name):
    inner, operation, told = OTHERWISE[name]

    def fn(x, w):
        with jax.named_scope("head"):
            return inner((x @ w)[0, 0])[None]

    # 2049 in f16 is 2048.
    d = amp.diagnose(fn)(jnp.full((1, 1), 2049.0), jnp.ones((1, 1)))
    found = [each for each in d.advice if "its condition" in each]
    assert len(found) == (operation is not None)
    for each in found:
        assert each.startswith(f"{operation} in head (test_advice.py:")
        assert f"{told} without it: its condition came out otherwise" in each


def summed(dtype, error):
    sites = [site([1.0], dtype="bf16", operation="gather")]
    sites.append(
        site([1.0], direction="backward", dtype=dtype, operation="scatter-add")
    )
    reference = [dataclasses.replace(each, dtype="f32") for each in sites]
    found = advice(sites, reference, gradients={"['table']": gradient([1.0], error)})
    return [each for each in found if "sums the gradient of a lookup" in each]


def test_a_lookup_whose_gradient_is_summed_in_half_is_named_if_gradients_are_far_off():
    (told,) = summed("bf16", 0.97)
    assert "in bf16, and a gradient is 97% off" in told
    assert 'with_full("gather")' in told


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.004), ("f32", 0.97)])
def test_no_lookup_is_blamed_that_is_summed_in_f32_or_for_gradients_that_are_close(
    dtype, error
):
    assert summed(dtype, error) == []
