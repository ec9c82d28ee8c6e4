"""`recipe("fp8")`: which products are of 8-bit floats, and which layers are not."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp

F16, BF16, F32 = jnp.dtype("float16"), jnp.dtype("bfloat16"), jnp.dtype("float32")
HEADS = ("lm_head", "head", "logits", "classifier")
SIZE = 32


class Model(nn.Module):
    head: str | None = "head"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(SIZE, name="up")(x))
        return nn.Dense(SIZE, name=self.head or "down")(x)


class Model2(nnx.Module):
    def __init__(self, head: str, rngs: nnx.Rngs):
        self.up = nnx.Linear(SIZE, SIZE, rngs=rngs)
        setattr(self, head, nnx.Linear(SIZE, SIZE, rngs=rngs))
        self.last = head

    def __call__(self, x: jax.Array) -> jax.Array:
        return getattr(self, self.last)(nnx.relu(self.up(x)))


class Tied(nn.Module):
    """Its logits are made of the embedding's own table."""

    @nn.compact
    def __call__(self, token: jax.Array) -> jax.Array:
        table = nn.Embed(SIZE, SIZE, name="wte")
        return table.attend(nn.Dense(SIZE, name="up")(table(token)))


class Tied2(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.wte = nnx.Embed(SIZE, SIZE, rngs=rngs)
        self.up = nnx.Linear(SIZE, SIZE, rngs=rngs)

    def __call__(self, token: jax.Array) -> jax.Array:
        return self.wte.attend(self.up(self.wte(token)))


class TokenEmbedder(nn.Module):
    """No `nn.Embed`, but one by its name and its method."""

    def setup(self) -> None:
        self.table = self.param("table", nn.initializers.normal(), (SIZE, SIZE))

    def __call__(self, token: jax.Array) -> jax.Array:
        return jnp.take(self.table, token, axis=0)

    def attend(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


class TiedByHand(nn.Module):
    @nn.compact
    def __call__(self, token: jax.Array) -> jax.Array:
        embedder = TokenEmbedder(name="wte")
        return embedder.attend(nn.Dense(SIZE, name="up")(embedder(token)))


class Around(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Model(name="decoder")(x)


class Tanh(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(SIZE)(jnp.tanh(nn.Dense(SIZE)(x)))


class WideHead(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Tanh(name="head")(x)


def x() -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((SIZE, SIZE)), F32)


def tokens() -> jax.Array:
    return jnp.arange(SIZE, dtype=jnp.int32)


def called(model: nn.Module, given: jax.Array) -> tuple[Callable[..., Any], tuple]:
    return model.apply, (jax.jit(model.init)(jax.random.key(0), given), given)


def products(recipe: amp.Recipe, fn: Callable[..., Any], args: tuple) -> dict[str, str]:
    """The dtype of each product, by the last name of its module."""
    report = amp.explain(fn, recipe.policy)(*args)
    found = [each for each in report.equations if each.matmuls]
    return {each.module.rpartition("/")[2]: each.dtype for each in found}


def quantisations(fn: Callable[..., Any], *args: Any) -> int:
    """How many arrays the program rounds to 8 bits."""
    lowered = jax.jit(fn).lower(*args).as_text()
    return len(re.findall(r"stablehlo\.convert .*-> tensor<\w*xf8E4M3FN>", lowered))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("head", HEADS)
def test_heads_of_linen_are_bfloat16_and_other_products_fp8(head):
    fn, args = called(Model(head), x())
    found = products(amp.recipe("fp8"), fn, args)
    assert found == {"up": "e4m3", head: "bf16"}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("head", HEADS)
def test_heads_of_nnx_are_bfloat16_and_other_products_fp8(head):
    model = Model2(head, nnx.Rngs(0))
    found = products(amp.recipe("fp8"), lambda model, x: model(x), (model, x()))
    assert found == {"up": "e4m3", head: "bf16"}


def test_the_program_rounds_the_operands_of_fp8_products_alone():
    recipe = amp.recipe("fp8")
    fn, args = called(Model(), x())
    assert quantisations(recipe.autocast(fn), *args) == 2
    # A policy knows of no heads.
    assert quantisations(amp.autocast(fn, "fp8"), *args) == 4


@pytest.mark.parametrize("word", ["all", "auto", "least"])
def test_heads_save_what_the_recipe_says_and_excluded_layers_all(word):
    policies = amp.recipe("fp8", saved=word, excluded_layers=["**/gate"]).policy
    assert policies.default == amp.Policy(matmul=amp.Fp8(), saved=word)
    heads = [each for _, each in policies.entries if each.compute_dtype == BF16]
    assert len(heads) == len(HEADS) + 1
    assert set(heads) == {amp.Policy(saved=word)}
    assert {each.saved for each in heads} == {word}
    full = [each for _, each in policies.entries if each.compute_dtype == F32]
    assert full and not any(each.says_saved for each in full)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("model", [Tied(), TiedByHand()], ids=["Embed", "other class"])
def test_an_embedding_that_makes_logits_is_bfloat16_in_linen(model):
    found = products(amp.recipe("fp8"), *called(model, tokens()))
    assert found == {"up": "e4m3", "wte.attend": "bf16"}


def test_an_embedding_that_makes_logits_is_bfloat16_in_nnx():
    args = (Tied2(nnx.Rngs(0)), tokens())
    found = products(amp.recipe("fp8"), lambda model, token: model(token), args)
    assert found == {"up": "e4m3", "wte.attend": "bf16"}


def test_why_a_head_is_not_fp8_is_told():
    fn, args = called(Model("lm_head"), x())
    report = amp.explain(fn, amp.recipe("fp8").policy)(*args)
    assert {each.reason for each in report.products} == {
        "e4m3 x e4m3 -> bf16",
        "the policy of **/lm_head",
    }


@pytest.mark.filterwarnings("error")
def test_a_model_without_heads_gets_no_warning_of_entries_it_does_not_know():
    fn, args = called(Model(None), x())
    recipe = amp.recipe("fp8")
    assert jax.eval_shape(recipe.autocast(fn), *args).dtype == F32
    recipe.cast_params(args[0]["params"])
    # Neither with more entries behind them.
    policy = recipe.policy
    more = amp.PolicyMap(policy.default, [*policy.entries, ("up", "float32")])
    jax.eval_shape(amp.autocast(fn, more), *args)


@pytest.mark.slow
def test_an_excluded_layer_that_is_not_there_warns():
    fn, args = called(Model(None), x())
    recipe = amp.recipe("fp8", excluded_layers=("**/middle", nn.Conv))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        recipe.autocast(fn)(*args)
    told = [str(each.message) for each in found]
    assert [text.partition(" matched no module")[0] for text in told] == [
        "PolicyMap: '**/middle'",
        "PolicyMap: flax.linen.linear.Conv",
    ]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "excluded, expected",
    [
        ("**/head", {"up": "e4m3", "head": "f32"}),
        (("up",), {"up": "f32", "head": "bf16"}),
        (nn.Dense, {"up": "f32", "head": "f32"}),
        (("**",), {"up": "f32", "head": "f32"}),
        (("",), {"up": "f32", "head": "f32"}),
    ],
    ids=["head", "layer", "class", "all", "outermost"],
)
def test_what_is_excluded_is_float32_also_where_it_is_a_head(excluded, expected):
    recipe = amp.recipe("fp8", excluded_layers=excluded)
    assert products(recipe, *called(Model(), x())) == expected


def test_a_head_in_what_is_excluded_is_float32_too():
    fn, args = called(Around(), x())
    assert products(amp.recipe("fp8"), fn, args) == {"up": "e4m3", "head": "bf16"}
    excluded = amp.recipe("fp8", excluded_layers=("**/decoder",))
    assert products(excluded, fn, args) == {"up": "f32", "head": "f32"}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("moved", [(), ("tanh",)])
def test_operations_that_are_moved_are_moved_in_heads_too(moved):
    recipe = amp.recipe("fp8", custom_black_list=moved)
    fn, args = called(WideHead(), x())
    report = amp.explain(fn, recipe.policy)(*args)
    (tanh,) = [e for e in report.equations if e.operation == "tanh"]
    assert tanh.dtype == "f32" and tanh.from_policy == bool(moved)


def test_it_trains_with_float32_parameters_and_no_loss_scale():
    recipe = amp.recipe("fp8")
    fn, (params, given) = called(Model(), x())
    apply, tx = recipe.autocast(fn), recipe.wrap(optax.sgd(0.2))
    params, opt_state = recipe.init(tx, params)
    target = jnp.tanh(given)
    losses = []

    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((apply(params, given) - target) ** 2)

    @jax.jit
    def train_step(params: Any, opt_state: Any) -> Any:
        loss, grads = amp.value_and_grad(loss_fn)(params, loss_scale=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(60):
        params, opt_state, loss = train_step(params, opt_state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {F32}
    scale = amp.loss_scale_of(opt_state)
    assert float(scale.value) == 1 and not scale.dynamic


def test_the_gradient_is_that_of_float32_to_the_digits_of_the_formats():
    fn, (params, given) = called(Model(), x())

    def loss_of(apply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params: jnp.mean(apply(params, given) ** 2)

    grads = jax.jit(jax.grad(loss_of(amp.recipe("fp8").autocast(fn))))(params)
    true_grads = jax.jit(jax.grad(loss_of(fn)))(params)
    error = optax.tree.norm(optax.tree.sub(grads, true_grads))
    # A number of e5m2 is wrong by at most an eighth, one of e4m3 by half of that.
    bound = float(jnp.finfo("float8_e5m2").eps) / 2
    relative = float(error / optax.tree.norm(true_grads))
    # bf16 alone would be at 1/256.
    assert float(jnp.finfo("bfloat16").eps) < relative < bound


def test_it_prints_that_products_are_fp8_and_which_layers_are_not():
    text = str(amp.recipe("fp8", excluded_layers=("**/gate",)))
    assert text.startswith("fp8 of Colossal-AI\n")
    assert "bf16, products fp8" in text
    told = " ".join(text.split())
    for head in (*(f"**/{head}" for head in HEADS), "<attend_of_embedding>"):
        assert f"; {head}: p=f32,c=bf16,o=f32;" in told
    assert "; **/gate: p=f32,c=f32,o=f32;" in told
    assert "fp8" not in str(amp.recipe("fp8", enabled=False)).partition("\n")[2]


def test_its_policy_is_the_same_at_each_call_and_is_pickled():
    policy = amp.recipe("fp8").policy
    again = amp.recipe("fp8").policy
    assert policy == again and hash(policy) == hash(again)
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"half_dtype": "float16"}, r"'float16'.*bf16 by the name and f16 by half"),
        ({"half_dtype": "e4m3"}, r"'e4m3'.*bf16 by the name and f8_e4m3 by half"),
        ({"cast_model_type": "bf16"}, r"its parameters are f32, .* Use O2 or O3"),
        ({"master_weights": True}, r"its parameters are f32, .* need no masters"),
    ],
)
def test_what_contradicts_it_is_refused(overrides, message):
    with pytest.raises(ValueError, match=rf"recipe\('fp8'.*{message}"):
        amp.recipe("fp8", **overrides)


def test_bfloat16_may_be_said():
    assert amp.recipe("fp8", "bfloat16").policy == amp.recipe("fp8").policy


@pytest.mark.parametrize("name", ["FP8", "float8", "e4m3", "f8"])
def test_near_words_name_it(name):
    with pytest.raises(ValueError, match=r'Did you mean "fp8"\?'):
        amp.recipe(name)


def test_heads_are_globs_that_a_user_may_replace():
    policy = amp.recipe("fp8").policy
    half = amp.Policy()
    entries = dict(policy.entries)
    for name in ("lm_head", "head", "logits", "classifier"):
        assert entries[f"**/{name}"] == half
    excluded = dict(amp.recipe("fp8", excluded_layers="**/head").policy.entries)
    assert excluded["**/head"] == amp.get_policy("float32")
    assert excluded["**/lm_head"] == half
