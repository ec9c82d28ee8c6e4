"""Layers with `dtype=float32` of their own: autocast keeps them in float32."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests.measures import compiled
from tests.programs import products
from tests.transform.flax_models import in_linen, in_nnx, with_values

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)


@dataclasses.dataclass(frozen=True)
class Config:
    dtype: Any = jnp.float32
    width: int = 8


class Head(nn.Module):
    """A layer in half precision, and one with a dtype."""

    head: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, name="body")(x)
        return nn.Dense(8, dtype=self.head, name="head")(jnp.tanh(x))


class OfModel(nn.Module):
    """A model that hands its dtype on to its layers."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, dtype=self.dtype)(x)
        return nn.Dense(8, dtype=self.dtype)(jnp.tanh(x))


class OfConfig(nn.Module):
    """A model whose layers have the dtype of its configuration."""

    config: Config = Config()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.config.width, dtype=self.config.dtype)(x)


class Around(nn.Module):
    """Two models in a model."""

    first: nn.Module
    second: nn.Module

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


class InSetup(nn.Module):
    def setup(self) -> None:
        self.body = nn.Dense(8)
        self.layers = [nn.Dense(8), nn.Dense(8, dtype="float32")]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.body, *self.layers):
            x = jnp.tanh(layer(x))
        return x


class NnxHead(nnx.Module):
    def __init__(self, head: Any = jnp.float32):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(8, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, dtype=head, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[0](jnp.tanh(self.body(x)))


class NnxModel(nnx.Module):
    def __init__(self) -> None:
        self.config = Config()
        self.layer = nnx.Linear(8, 8, dtype=self.config.dtype, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def of_linen(model: nn.Module, policy: Any = "mixed_bfloat16") -> list[str]:
    built = in_linen(model, X)
    return products(built.under(policy), built.variables, X)


def of_nnx(make: Callable[[], nnx.Module], policy: Any = "mixed_bfloat16") -> list[str]:
    built = in_nnx(make)
    return products(built.under(policy), built.variables, X)


HALF, FULL = "bfloat16", "float32"


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [jnp.float32, "float32", jnp.dtype("float32")])
def test_layer_with_its_own_f32_computes_in_f32(dtype):
    assert of_linen(Head(dtype)) == [HALF, FULL]
    assert of_nnx(lambda: NnxHead(dtype)) == [HALF, FULL]


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_layer_without_one_follows_the_policy(dtype):
    assert of_linen(Head(dtype)) == [HALF, HALF]
    assert of_nnx(lambda: NnxHead(dtype)) == [HALF, HALF]


def test_layers_of_setup_and_of_lists():
    assert of_linen(InSetup()) == [HALF, HALF, FULL]


@pytest.mark.parametrize(
    "model",
    [
        *(OfModel(), OfModel(dtype=jnp.float32), OfConfig()),
        Around(OfModel(), OfConfig()),
    ],
)
def test_dtype_of_the_whole_model_is_handed_on(model):
    assert set(of_linen(model)) == {HALF}
    assert of_nnx(NnxModel) == [HALF]


def test_dtype_is_handed_on_through_a_part_that_has_none():
    class Part(nn.Module):
        given: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8, dtype=self.given)(x)

    class Whole(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Part(self.dtype)(x)

    assert of_linen(Whole(dtype=jnp.float32)) == [HALF]
    assert of_linen(Part(jnp.float32)) == [FULL]


def test_dtype_that_a_part_of_a_model_is_given_counts():
    around = Around(nn.Dense(8), OfModel(dtype=jnp.float32))
    # By itself f32 is the dtype of this class, so that nobody gave it.
    assert of_linen(around) == [HALF, HALF, HALF]

    class Block(OfModel):
        dtype: Any = None

    around = Around(nn.Dense(8), Block(dtype=jnp.float32))
    assert of_linen(around) == [HALF, FULL, FULL]
    # As the whole model it hands the dtype on.
    assert of_linen(Block(dtype=jnp.float32)) == [HALF, HALF]


def test_layer_that_is_the_whole_model():
    assert of_linen(nn.Dense(8, dtype=jnp.float32)) == [FULL]
    assert of_nnx(lambda: nnx.Linear(8, 8, dtype=jnp.float32, rngs=nnx.Rngs(0))) == [
        FULL
    ]


def test_layers_whose_dtype_nobody_gave():
    """Some have float32 by default, or the dtype of their table."""

    class Words(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(8, 8, rngs=rngs)
            self.cell = nnx.SimpleCell(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.embed(jnp.arange(4))
            return self.embed.attend(self.cell(h, x)[1])

    words = Words()
    assert words.embed.dtype == words.cell.dtype == jnp.float32
    assert set(of_nnx(Words)) == {HALF}


def test_layers_that_layers_are_made_of():
    attention = nn.MultiHeadDotProductAttention(2, dtype=jnp.float32)
    assert set(of_linen(Around(attention, nn.Dense(8)))) == {HALF, FULL}
    assert of_linen(Around(attention, nn.Dense(8))).count(HALF) == 1


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "pattern", ["head", "Head/head", "*", nn.Dense, "**/head"], ids=str
)
def test_entry_that_names_the_layer_wins(pattern):
    policies = amp.PolicyMap("mixed_bfloat16", {pattern: "mixed_float16"})
    assert of_linen(Head(), policies)[1] == "float16"


def test_entry_that_names_what_is_around_it_does_not():
    policies = amp.PolicyMap("float32", {"second": "mixed_bfloat16"})
    assert of_linen(Around(nn.Dense(8), Head()), policies) == [FULL, HALF, FULL]
    policies = amp.PolicyMap("float32", {NnxHead: "mixed_bfloat16"})
    assert of_nnx(NnxHead, policies) == [HALF, FULL]


def test_marked_layer_has_its_mark():
    half = amp.with_policy("mixed_float16")(nn.Dense)
    assert of_linen(half(8, dtype=jnp.float32)) == ["float16"]


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "fp8"])
def test_other_policies(policy):
    assert of_linen(Head(), policy)[1] == FULL


def test_gradients_are_those_of_the_layer_in_f32():
    model = Head()
    params = with_values(in_linen(model, X).variables)

    def by_hand(params, x):
        p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["params"])
        x = jnp.tanh(nn.Dense(8).apply({"params": p["body"]}, x.astype(jnp.bfloat16)))
        head = {"params": params["params"]["head"]}
        return jnp.sum(nn.Dense(8).apply(head, x.astype(jnp.float32)) ** 2)

    def loss(params, x):
        return jnp.sum(model.apply(params, x) ** 2)

    policy = amp.Policy("float32", "bfloat16", "float32", saved="all")
    found, expected = (
        compiled(jax.grad(fn))(params, X)["params"]["head"]
        for fn in (amp.autocast(loss, policy), by_hand)
    )
    # They differ by `tanh`, which is f32 where only the layer reads it.
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    chex.assert_trees_all_close(found, expected, atol=4 * eps, rtol=4 * eps)
