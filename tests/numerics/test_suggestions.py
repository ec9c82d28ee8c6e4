"""Which loss scale and which policy the numbers of a run ask for."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_amp as amp
from jmp_amp.numerics.diagnose.suggestions import Runs, needs_of, suggested_policy
from tests.numerics.made import site

F16 = amp.PolicyMap("mixed_float16")


def backward(amax, *dtypes):
    """Backward sites of the dtypes, and the reference's, whose values are amax, ..."""
    sites = [
        site(direction="backward", dtype=dtype, identity=str(i))
        for i, dtype in enumerate(dtypes)
    ]
    reference = [
        site([value], direction="backward", identity=str(i))
        for i, value in enumerate(amax)
    ]
    return sites, reference


def suggested_loss_scale(sites, reference, **fields):
    return Runs(F16, sites, reference, None, {}, True, True, **fields).suggested_scale


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (8188.0, 1.0),
        (8188.5, 1.0),  # none fits
        (4094.0, 2.0),
        (4095.0, 1.0),
        (1.0, 4096.0),
        (3e-4, 2.0**24),
        (6e-4, 2.0**23),
        (0.0, 2.0**24),
        (1e30, 1.0),
    ],
)
def test_the_loss_scale_is_the_largest_that_leaves_an_eighth(amax, scale):
    sites, reference = backward([amax, 0.0], "f16", "f16")
    assert suggested_loss_scale(sites, reference) == scale


def test_only_backward_values_in_f16_bound_the_loss_scale():
    sites, reference = backward([1e-2, 1e4, 1e5], "f16", "f32", "bf16")
    # Forward, and an operation that the policy's run does not have backward.
    sites.append(site(dtype="f16", identity="7"))
    reference.append(site([1e6], identity="7"))
    reference.append(site([1e7], direction="backward", identity="8"))
    assert suggested_loss_scale(sites, reference) == 2.0**19
    assert 1e-2 * 2.0**19 <= 8188 < 1e-2 * 2.0**20


def test_without_f16_or_without_a_backward_pass_the_loss_scale_is_one():
    assert suggested_loss_scale(*backward([1e-6], "bf16")) == 1.0
    assert suggested_loss_scale(*backward([1e-6], "f32")) == 1.0
    assert suggested_loss_scale([site(dtype="f16")], [site()]) == 1.0


def test_what_the_run_casts_to_f16_has_to_fit_without_the_scale_that_it_had():
    sites, reference = backward([1e-3], "f16")
    assert suggested_loss_scale(sites, reference) == 2.0**22
    casts = [site([1.0 * 2.0**12], direction="backward")]
    scale = suggested_loss_scale(sites, reference, scale=2.0**12, casts=casts)
    assert scale == 2.0**15 and scale <= 65504 < 2 * scale


def pair(values, path, dtype="f16", **fields):
    """A forward site in half, and what the reference has of it."""
    fields = {"path": path, "module": path or "", **fields}
    return site(dtype=dtype, **fields), site(values, path=path, module=path or "")


def policy_for(sites, reference, given, **kwargs):
    return suggested_policy(needs_of(sites, reference, **kwargs), given)


def suggested(pairs, given=F16, **kwargs):
    sites, reference = zip(
        *(
            tuple(dataclasses.replace(each, identity=str(i)) for each in both)
            for i, both in enumerate(pairs)
        ),
        strict=True,
    )
    return policy_for(sites, reference, given, **kwargs)


def test_nothing_is_needed_of_what_fits():
    fits = [pair([6e4], "a"), pair([1e30], "b", "bf16"), pair([1e9], "c", "f32")]
    assert suggested(fits) is F16


def test_modules_whose_range_overflows_get_f32():
    policy = suggested(
        [pair([1e5], "a/up"), pair([1.0], "a"), pair([3e38], "b", "bf16")]
    )
    assert policy == amp.PolicyMap("mixed_float16", {"a/up": "float32"})


def test_who_makes_what_is_not_finite_gets_f32_if_f32_is_finite():
    made = {"makes_nonfinite": True, "nonfinite": 1}
    passed_on = {"makes_nonfinite": False, "nonfinite": 1}
    pairs = [
        pair([1.0], "makes", **made),
        pair([1.0], "passes_on", **passed_on),
        pair([1.0, float("inf")], "itself", **made),
    ]
    assert suggested(pairs) == amp.PolicyMap("mixed_float16", {"makes": "float32"})


def test_a_cast_that_only_the_policy_has_counts():
    cast = site(
        dtype="f16", makes_nonfinite=True, operation="convert_element_type", path="up"
    )
    policy = policy_for([cast], [], F16)
    assert policy == amp.PolicyMap("mixed_float16", {"up": "float32"})


def test_outside_of_modules_the_default_names_the_operation_or_the_function():
    def full(*names):
        return amp.PolicyMap(F16.default.with_full(*names))

    both = site([1.0], dtype="f16", makes_nonfinite=True, operation="exp")
    assert policy_for([both], [], F16) == full("exp")
    inside = dataclasses.replace(both, module="MLP/block", path=None)
    assert policy_for([inside], [], F16) == full("block")
    assert policy_for([inside], [], F16, functions={"MLP"}) == full("MLP")
    assert policy_for([inside], [], F16, functions=()) == full("exp")
    outermost = dataclasses.replace(both, module="MLP", path="")
    assert policy_for([outermost], [], F16) == full("exp")
    # Even if the user wanted it in half.
    low = amp.PolicyMap(F16.default.with_low("exp"))
    assert policy_for([both], [], low) == full("exp")


def test_a_cast_outside_of_modules_names_the_operation_that_reads():
    cast = site(dtype="f16", makes_nonfinite=True, operation="convert_element_type")
    reads = site(dtype="f16", operation="dot_general", identity="1")
    before = site(dtype="f16", operation="exp", identity="2")
    other = site(dtype="f16", operation="sin", source="/elsewhere.py:1")
    policy = policy_for([before, cast, other, reads], [], F16)
    assert policy == amp.PolicyMap(F16.default.with_full("dot_general"))


def test_what_the_outermost_module_casts_for_another_names_that_one():
    cast = site(
        dtype="f16", makes_nonfinite=True, operation="convert_element_type", path=""
    )
    reads = site(dtype="f16", operation="dot_general", path="out", module="Net/out")
    policy = policy_for([cast, reads], [], F16)
    assert policy == amp.PolicyMap("mixed_float16", {"out": "float32"})


@pytest.mark.slow
def test_what_a_loop_casts_for_a_module_names_the_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, name="inner")(x)
            turn = lambda h, _: (h * 1.9, h * 1.9)  # noqa: E731
            _, states = jax.lax.scan(turn, x, None, 20)
            return nn.Dense(1, name="out")(states)

    # The states stay f32, 1.9**19 = 198 000 at the end, and `out` reads them in f16.
    x = jnp.ones((2, 4))
    params = Net().init(jax.random.key(0), x)
    loss = lambda params, x: jnp.mean(Net().apply(params, x)) * 1e-6  # noqa: E731
    d = amp.diagnose(loss, "mixed_float16")(params, x)
    first = d.first_nonfinite
    assert (first.path, first.operation) == ("", "convert_element_type")
    assert d.policy == amp.PolicyMap("mixed_float16", {"out": "float32"})


def test_the_operation_of_f32_that_fails_is_blamed_if_none_in_half_is():
    # The logarithm of what underflowed in half.
    log = pair([1.0], "head", "f32", makes_nonfinite=True, operation="log")
    assert suggested([log]) == amp.PolicyMap("mixed_float16", {"head": "float32"})
    up = pair([1e6], "up")
    assert suggested([log, up]) == amp.PolicyMap("mixed_float16", {"up": "float32"})


def test_entries_of_the_user_are_kept_and_the_new_one_wins():
    given = amp.PolicyMap(
        "mixed_bfloat16", {"**/up": "float16", "a": "mixed_float16", "b": "float32"}
    )
    policy = suggested([pair([1e6], "a"), pair([1e6], "c/up")], given)
    assert [pattern for pattern, _ in policy.entries] == ["**/up", "b", "a", "c/up"]
    assert policy.entries[2][1] == amp.get_policy("float32")
    assert policy.default == given.default


def test_a_path_with_signs_of_globs_matches_itself_only():
    policy = suggested([pair([1e6], "a[0]/b")])
    info = amp.ModuleInfo(("a[0]", "b"), object, "b")
    assert policy.match(info) is not None
    assert policy.match(info._replace(path=("a0", "b"))) is None
