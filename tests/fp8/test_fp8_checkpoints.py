"""What `jax.checkpoint` and its policies save of fp8 products."""

import functools

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


@functools.cache
def without_checkpoint():
    return exactly(amp.autocast(loss, "fp8"))


NAMES = POLICIES.save_only_these_names("fp8_lhs", "fp8_rhs")
OUTSIDE = {
    "names": NAMES,
    "dots": POLICIES.dots_saveable,
    "other names": POLICIES.save_any_names_but_these("fp8_lhs"),
}
INSIDE = {
    "names": NAMES,
    "all": POLICIES.everything_saveable,
    "nothing": POLICIES.nothing_saveable,
    "others": POLICIES.save_anything_except_these_names("fp8_lhs", "fp8_rhs"),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("is_inside", "policy"),
    [
        *(pytest.param(False, each, id=f"{n}, outside") for n, each in OUTSIDE.items()),
        *(pytest.param(True, each, id=f"{n}, inside") for n, each in INSIDE.items()),
    ],
)
def test_a_policy_changes_what_is_saved_and_no_number(policy, is_inside):
    # The largest magnitudes are between 240 and 448 times the scale.
    def saved(fn):
        return jax.checkpoint(fn, policy=policy, prevent_cse=False)

    if is_inside:
        checked = amp.autocast(saved(loss), "fp8")
    else:
        checked = saved(amp.autocast(loss, "fp8"))
    for found, expected in zip(exactly(checked), without_checkpoint(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_operands_are_saved_in_8_bits_alone():
    def shared(ws, x):
        return jnp.sum(jnp.tanh(x @ ws[0]) * jnp.tanh(x @ ws[1]))

    def kept(policy):
        fn = amp.autocast(shared, policy)
        leaves = jax.tree.leaves(
            jax.eval_shape(lambda w, x: jax.vjp(fn, w, x)[1], W, X)
        )
        in_8_bits = [x.shape for x in leaves if x.dtype == "float8_e4m3fn"]
        return sorted(in_8_bits), {x.shape for x in leaves if x.dtype == "bfloat16"}

    in_8_bits, half = kept("p=f32,c=bf16,o=f32,m=fp8,s=all")
    # `x` for each of both.
    assert in_8_bits == [*[(48, 64)] * 2, *[(64, 64)] * 2]
    assert not half  # of `ws` there is no copy
    in_8_bits, half = kept("fp8")
    # A block is around the second product: its checkpoint hands its operands on.
    assert in_8_bits == [*[(48, 64)] * 2, *[(64, 64)] * 2]
    assert half == {(48, 64)}  # results of the products
