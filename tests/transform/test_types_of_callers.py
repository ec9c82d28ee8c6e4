"""The types of a function survive its transformation.

pyright checks this file with the package (see `pyproject.toml`): `assert_type` and
`reveal_type` cost nothing when it runs. Where a comment says `pyright: ignore`, a check
that finds no error there is an error itself.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error
from collections.abc import Callable, Mapping
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp

W, X = jnp.eye(2), jnp.ones((3, 2))


def loss(w: jax.Array, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return scale * jnp.sum(x @ w)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        return self.linear(x)

    @amp.autocast(policy="mixed_float16")
    def pair(self, x: jax.Array) -> tuple[jax.Array, int]:
        return self.linear(x), 1


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2)(x)


@amp.autocast
def decorated(w: jax.Array) -> dict[str, jax.Array]:
    return {"w": w @ w}


def test_a_function_keeps_its_arguments_and_its_result():
    half = amp.autocast(loss, "mixed_float16", enabled=True)
    assert_type(half(W, X, scale=2.0), jax.Array)
    assert_type(amp.autocast(enabled=False)(loss)(W, X), jax.Array)
    assert_type(amp.recipe("O1").autocast(loss)(W, X), jax.Array)
    assert_type(amp.cast_inputs(loss)(W, X), jax.Array)
    assert_type(amp.full_precision(loss)(W, X), jax.Array)
    assert_type(amp.with_policy("float32")(loss)(W, X), jax.Array)
    assert_type(decorated(W), dict[str, jax.Array])
    made: Callable[[jax.Array], Mapping[str, Any]] = decorated
    assert made(W)["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    "wrong",
    [
        lambda half: half(W),
        lambda half: half(W, X, 2.0),
        lambda half: half(W, X, scales=2.0),
    ],
)
def test_a_wrong_call_is_one_of_the_function(wrong: Callable[..., Any]):
    with pytest.raises(TypeError):
        wrong(amp.autocast(loss))


def misuses_for_pyright_alone() -> None:
    half = amp.autocast(loss)
    half(W)  # pyright: ignore[reportCallIssue]
    half(W, X, scales=2.0)  # pyright: ignore[reportCallIssue]
    half("w", X)  # pyright: ignore[reportArgumentType]
    half(W, X).no_such_attribute  # pyright: ignore  # noqa: B018
    amp.autocast(loss, 3)  # pyright: ignore
    amp.autocast(Layer(nnx.Rngs(0)))(X, detrministic=False)  # pyright: ignore
    amp.recipe("O1").autocast(loss)(W)  # pyright: ignore[reportCallIssue]


def test_a_module_keeps_the_types_of_its_call():
    model = Layer(nnx.Rngs(0))
    assert_type(amp.autocast(model)(X, deterministic=False), jax.Array)
    found, number = model.pair(X)
    assert_type(found, jax.Array)
    assert_type(number, int)
    assert number == 1
    block = Block()
    variables = block.init(jax.random.key(0), X)
    bound = block.bind(variables)
    assert_type(amp.autocast(bound)(X), jax.Array)
    # That of linen itself: `apply` says which keywords it takes.
    assert amp.autocast(block.apply)(variables, X, mutable=False) is not None


def names_that_the_package_does_not_have() -> None:
    amp.autocats  # pyright: ignore[reportAttributeAccessIssue] # noqa: B018
    from jmp_amp import autocst  # pyright: ignore[reportAttributeAccessIssue]

    del autocst


def test_a_loss_and_its_gradient_are_a_pair():
    assert_type(amp.value_and_grad(loss)(W, X), tuple[Any, Any])
    assert_type(amp.explain(loss)(W, X), amp.Report)
