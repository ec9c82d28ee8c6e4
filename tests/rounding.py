"""How far half precision rounds: every program here is compared with itself in f32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests.measures import EXACTLY_AS_WRITTEN, relative_error

BF16, F16 = POLICIES = "mixed_bfloat16", "mixed_float16"
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 16))
W = jax.random.normal(jax.random.key(1), (16, 16)) * 0.2
# The programs are short and well-conditioned: a few roundings, one after the other.
ROUNDINGS = 8

# Nothing in a plan depends on which half it is but which constants fit in it: where
# only the trace is looked at, one does.
one_policy = pytest.mark.parametrize("policy", [BF16])


def half_of(policy):
    """Returns the name of the dtype that a policy computes in."""
    return amp.get_policy(policy).compute_dtype.name


def eps(policy):
    """Returns how far that dtype rounds, or one that is given by its name."""
    return float(jnp.finfo(half_of(policy)).eps)


def mean_square(x):
    return jnp.mean(jnp.square(x))


def assert_only_rounded(
    results, transform=amp.autocast, roundings=ROUNDINGS, args=W, policies=POLICIES
):
    """Compares the trees that `results(transform, *args)` gives with the f32 program's.

    All policies are compiled together: one compilation costs more than all that the
    programs compute.
    """
    args = args if isinstance(args, tuple) else (args,)

    def everything(*args):
        return {
            "plain": results(lambda fn: fn, *args),
            **{
                policy: results(functools.partial(transform, policy=policy), *args)
                for policy in policies
            },
        }

    found = jax.jit(everything, compiler_options=EXACTLY_AS_WRITTEN)(*args)
    for policy in policies:
        trees = found[policy], found["plain"]
        for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            if jnp.issubdtype(b.dtype, jnp.inexact):
                assert np.isfinite(a).all()
                assert relative_error(a, b) < roundings * eps(policy), policy
            else:
                np.testing.assert_array_equal(a, b)
