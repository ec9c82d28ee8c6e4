"""What `jax.checkpoint` and its policies save of fp8 products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp

POLICIES = jax.checkpoint_policies
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((48, 64)), jnp.float32)
W = [jnp.asarray(RNG.standard_normal((64, 64)) / 8, jnp.float32) for _ in "ab"]


def loss(ws, x):
    first, second = ws
    # Products of one operand have barriers of their own.
    x = jax.nn.tanh(x @ first) * jnp.sin(x @ second)
    return jnp.mean(jax.nn.tanh(x @ second) ** 2)


def exactly(fn):
    """Compiles a gradient without excess precision, and runs it."""
    lowered = jax.jit(jax.grad(fn)).lower(W, X)
    options = {"xla_allow_excess_precision": False}
    return lowered.compile(compiler_options=options)(W, X)


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize(
    "policy",
    [
        POLICIES.everything_saveable,
        POLICIES.nothing_saveable,
        POLICIES.dots_saveable,
        POLICIES.save_only_these_names("fp8_lhs", "fp8_rhs"),
        POLICIES.save_anything_except_these_names("fp8_lhs", "fp8_rhs"),
        POLICIES.save_any_names_but_these("fp8_lhs"),
    ],
    ids=["all", "nothing", "dots", "names", "all but the names", "other names"],
)
def test_a_policy_changes_what_is_saved_and_no_number(policy, is_inside):
    # The largest magnitudes are between 240 and 448 times the scale.
    def saved(fn):
        return jax.checkpoint(fn, policy=policy, prevent_cse=False)

    plain = amp.autocast(loss, "fp8")
    checked = amp.autocast(saved(loss), "fp8") if is_inside else saved(plain)
    for found, expected in zip(exactly(checked), exactly(plain), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_operands_are_saved_in_8_bits_each_once():
    def shared(ws, x):
        return jnp.sum(jnp.tanh(x @ ws[0]) * jnp.tanh(x @ ws[1]))

    # Else a block is around one of the products, and its checkpoint hands them on.
    whole = amp.autocast(shared, "p=f32,c=bf16,o=f32,m=fp8,s=all")
    _, backward = jax.vjp(whole, W, X)
    saved = [x.shape for x in jax.tree.leaves(backward) if x.dtype == "float8_e4m3fn"]
    assert sorted(saved) == [(48, 64), (64, 64), (64, 64)]
    half = {x.shape for x in jax.tree.leaves(backward) if x.dtype == "bfloat16"}
    assert (64, 64) not in half  # of `ws` there is no copy
