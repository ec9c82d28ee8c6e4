"""`jax.experimental.jet` of a function in mixed precision."""

import dataclasses
import enum
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

import jmp_amp as amp
from tests.rounding import KEY, POLICIES, eps

W = jax.random.normal(KEY, (8, 8)) / 4
V = jax.random.normal(jax.random.key(1), (8, 8)) / 4
X = jax.random.normal(jax.random.key(2), (4, 8))


def attention(w):
    """A softmax between products: a block, which is a checkpoint."""
    return jnp.sum((jax.nn.softmax(X @ w) @ w) ** 2)


def with_a_jitted_part(w):
    return jnp.sum(jax.jit(lambda h: jax.nn.softmax(h) @ w)(X @ w) ** 2)


def normalised(w):
    h = X @ w
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-3)
    return jnp.sum(jnp.tanh(h @ w))


FUNCTIONS = [attention, with_a_jitted_part, normalised]


def series(fn):
    """The value and the first three derivatives along `V`."""
    value, terms = jet(fn, (W,), ((V, jnp.zeros_like(V), jnp.zeros_like(V)),))
    return jnp.stack([value, *terms])


@pytest.mark.breadth(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_derivatives_of_higher_order_are_those_of_f32(fn, policy):
    half = amp.autocast(fn, policy)
    assert "prevent_cse" in str(jax.make_jaxpr(half)(W))
    expected = jax.jit(lambda: series(fn))()
    for found in (series(half), jax.jit(lambda: series(half))()):
        assert np.abs(found - expected).max() < 8 * eps(policy) * np.abs(expected).max()


class Kind(enum.Enum):
    checkpoint = 1


@dataclasses.dataclass(frozen=True)
class Layer:
    name: str


KEYS = [
    "mine",
    "remat",
    Kind.checkpoint,
    pathlib.Path("checkpoint_3"),
    Layer("remat_block"),
    Layer("remat2"),
]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_key_error_of_the_function_is_told_and_runs_nothing_again(key):
    runs = []

    @jax.custom_jvp
    def square(x):
        return x**2

    @square.defjvp
    def _(primals, tangents):
        runs.append(key)
        return {}[key]

    with pytest.raises(KeyError) as error:
        jax.grad(amp.autocast(lambda w: square(jnp.sum(w @ w))))(W)
    assert error.value.args == (key,) and len(runs) == 1
