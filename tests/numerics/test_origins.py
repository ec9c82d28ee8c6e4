"""Where NaN begins: out of infinities, in an argument, in the function as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_amp as amp
from jmp_amp.numerics.calls.inputs import nonfinite_inputs
from tests.numerics.counting import of
from tests.numerics.made import gradient, site
from tests.numerics.test_advice import INF, MADE, NAN, advice, backward

HERE = "test_origins.py"


def test_a_row_that_a_mask_covers_is_told_where_it_becomes_nan():
    allowed = np.ones((3, 4, 6), bool)
    allowed[1, 2], allowed[2, :2] = False, False
    covered = 6 * int(np.sum(~allowed.any(axis=-1)))
    assert covered == 18

    def loss(w, x, allowed):
        def turn(total, allowed):
            scores = jnp.where(allowed, x @ w, -jnp.inf)
            with jax.named_scope("attention"):
                weights = jax.nn.softmax(scores)
            return total + jnp.sum(weights), None

        # It has no gradient, so it returns no number.
        return jax.lax.scan(turn, jnp.float32(0), allowed)[0][None]

    w, x = np.ones((5, 6), np.float32), np.ones((4, 5), np.float32)
    d = amp.diagnose(loss, "mixed_float16")(w, x, allowed)
    # No operation makes the infinities of a mask.
    assert d.first_nonfinite is None and jnp.isnan(d.value)
    (sub,) = of(d.sites, "sub")
    assert (sub.makes_nan, sub.nans, sub.turn) == (True, covered, 1)
    assert sub.nonfinite == int(np.sum(~allowed))
    (exp,) = of(d.sites, "exp")
    assert (exp.makes_nan, exp.nans, exp.nonfinite) == (False, covered, covered)
    (told,) = d.advice
    assert told.startswith(f"sub in attention ({HERE}:")
    assert "made 18 of 72 values NaN (forward, f32, turn 1)" in told
    assert "no policy helps" in told and "such as -1e9" in told
    assert amp.Diagnosis.from_json(d.to_json()) == d


def test_nan_of_infinities_is_no_softmax_in_a_product():
    dot = site([NAN], dtype="f16", operation="dot_general", nans=1, makes_nan=True)
    (told,) = advice([dot], [site([1.0], operation="dot_general")], value=NAN)
    assert "dot_general (model.py:7) made 1 of 1 values NaN" in told
    assert "softmax" not in told and "no policy helps" not in told


def test_the_example_of_a_batch_that_is_nan_is_told():
    image = np.ones((8, 4), np.float32)
    image[5, 2] = np.nan
    batch = {"image": image, "label": np.arange(8)}

    def loss(w, batch):
        return jnp.sum(batch["image"] @ w)

    (told,) = amp.diagnose(loss, "mixed_float16")(jnp.ones((4, 4)), batch).advice
    assert told.startswith("No operation made the first value that is not finite.")
    assert told.endswith(
        "argument batch['image'] holds 1 NaN of 32 values, the first at [5, 2]."
    )


def test_arguments_are_named_as_the_function_names_them():
    def fn(params, *rest, scale):
        return params, rest, scale

    bad = {"w": jnp.asarray([[1.0, INF], [-INF, NAN]], jnp.bfloat16), "b": jnp.ones(2)}
    found = nonfinite_inputs(fn, (bad, 3, NAN), {"scale": np.float32(INF)})
    assert found == [
        "params['w'] holds 1 NaN and 2 infinite of 4 values, the first at [1, 1]",
        "rest[1] holds 1 NaN of 1 values",
        "scale holds 1 infinite of 1 values",
    ]
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.full((2, 2), INF)
    (told,) = nonfinite_inputs(lambda model: 0.0, (layer,), {})
    name = "model['kernel'].value holds 4 infinite of 4 values, the first at [0, 0]"
    assert told == name
    assert nonfinite_inputs(max, (1.0, NAN), {}) == ["args[1] holds 1 NaN of 1 values"]


def test_an_argument_on_several_devices_is_looked_at_too():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    x = np.ones((4, 8), np.float32)
    x[2, 6] = np.inf
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "d")))
    found = nonfinite_inputs(lambda x: x, (x,), {})
    assert found == ["x holds 1 infinite of 32 values, the first at [2, 6]"]


def test_a_constant_that_is_not_finite_is_told_from_arguments():
    constant = jnp.asarray([1.0, NAN])
    d = amp.diagnose(lambda x: jnp.sum(x + constant), "float32")(jnp.ones(2))
    (told,) = d.advice
    assert "the arguments are finite: an array that the function closes over" in told


@pytest.mark.parametrize(
    ("operation", "fields", "value", "told"),
    [
        ("acos", {}, NAN, "jnp.clip"),
        ("log", {}, 1.0, "The value is finite and a gradient is not: jnp.where"),
        ("log", {}, NAN, "an epsilon."),
        ("div", {"dtype": "f16"}, NAN, "an epsilon: f16 begins at 5.96e-08"),
        ("pow", {"direction": "backward"}, 1.0, "the derivative is infinite"),
        ("custom_vjp_call", {"direction": "backward"}, 1.0, "the backward rule"),
    ],
)
def test_a_function_that_is_not_finite_is_told_its_remedy(
    operation, fields, value, told
):
    made = site([INF, 1.0], operation=operation, **MADE, **fields)
    broken = {"['w']": gradient([NAN], NAN)}
    (found,) = advice([made], [made], value=value, gradients=broken)
    assert "itself is not finite, and no policy helps" in found and told in found


def test_what_the_policy_mends_is_not_called_beyond_help():
    # 400 * 300 = 120 000 is beyond f16, which the function itself casts to.
    def loss(x):
        total = jnp.sum(x.astype(jnp.float16), dtype=jnp.float16)
        return total.astype(jnp.float32)

    d = amp.diagnose(loss, "mixed_float16")(jnp.full(400, 300.0))
    assert d.value == 120_000 and d.first_nonfinite is None
    (told,) = d.advice
    assert told.startswith("Without the policy the function itself is not finite:")
    assert f"reduce_sum ({HERE}:" in told and "made 1 of 1 values" in told
    assert "Under the policy it is finite there, in f32" in told


def test_a_reference_that_is_not_finite_suggests_no_loss_scale():
    made = site([INF], operation="log", **MADE)
    tiny = [1e-12, 1.0]
    sites, reference = [made, backward(tiny)], [made, backward(tiny, "f32")]
    broken = {"['w']": gradient([NAN], NAN)}
    (told,) = advice(sites, reference, value=INF, gradients=broken)
    assert "no policy helps" in told


def test_a_line_of_the_user_is_told_for_what_a_library_jitted():
    # jnp.linalg.norm is jitted: nothing in it has a line of this file.
    d = amp.diagnose(lambda x: jnp.linalg.norm(x), "float32")(jnp.ones(3))
    assert d.sites and all(HERE in (each.source or "") for each in d.sites)


def test_an_overflow_beside_a_mask_of_infinities_is_told():
    def loss(w, x, allowed):
        h = jnp.where(allowed, x @ w, -jnp.inf)
        return jnp.mean(jnp.tanh((jnp.maximum(h * 300.0, -1e4) @ w) * 1e-9))

    # 4 * 100 * 300 = 120 000 is beyond f16.
    x, allowed = jnp.full((2, 4), 100.0), np.ones((2, 4), bool)
    allowed[:, 0] = False
    d = amp.diagnose(loss, "mixed_float16")(jnp.ones((4, 4)), x, allowed)
    assert d.gradients[""].nonfinite and d.first_nonfinite is None
    assert d.advice[0].startswith(f"max ({HERE}:")
    assert "made 6 of 8 values infinite or NaN (forward, f16), beside" in d.advice[0]
    assert "in f32 it reaches 1.2e+05, and f16 ends at 65504" in d.advice[0]
    assert not any("an argument" in each for each in d.advice)
