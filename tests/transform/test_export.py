"""Programs that `jax.export` traces with sizes that are told when they run."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jmp_amp as amp
from tests.measures import EXACTLY_AS_WRITTEN
from tests.programs import equations
from tests.targets.product_programs import multiply_all

WIDTH = 16
POLICIES = ("mixed_bfloat16", "mixed_float16", amp.Policy(matmul=amp.Fp8(min_size=16)))
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=["bf16", "f16", "fp8"])
# No product of the first two has rows by 16: XLA multiplies 8-bit floats in blocks.
SIZES = ({"b": 3, "s": 5}, {"b": 9, "s": 7})


class Case(NamedTuple):
    """A loss of parameters and arrays whose shapes are text, `b, s, 16`."""

    loss: Callable[..., jax.Array]
    params: Callable[[], Any]
    shapes: tuple[str, ...]
    dtype: Any = jnp.float32

    def symbolic(self) -> list[jax.ShapeDtypeStruct]:
        scope = jax.export.SymbolicScope()
        return [
            jax.ShapeDtypeStruct(jax.export.symbolic_shape(s, scope=scope), self.dtype)
            for s in self.shapes
        ]

    def arrays(self, sizes: dict[str, int]) -> list[jax.Array]:
        found = []
        for number, text in enumerate(self.shapes):
            shape = tuple(eval(n, {}, sizes) for n in text.split(","))
            key = jax.random.key(number)
            if self.dtype == jnp.int32:
                found.append(jax.random.randint(key, shape, 0, WIDTH, jnp.int32))
            else:
                found.append(jax.random.normal(key, shape))
        return found


@functools.cache
def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(7), len(shapes))
    return [jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=True)]


MATRIX, VECTOR = (WIDTH, WIDTH), (WIDTH,)
LAYERS = functools.partial(arrays, MATRIX, VECTOR, MATRIX, VECTOR)


def mlp(p, x):
    return jnp.mean(jnp.square(jax.nn.gelu(x @ p[0] + p[1][None]) @ p[2] - p[3][None]))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(4)(nn.GroupNorm(4)(nn.Conv(8, (1, 1))(x)).mean((1, 2)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.silu(nn.Dense(WIDTH)(nn.RMSNorm()(x))))


class Language(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WIDTH, WIDTH)
        places = jnp.arange(tokens.shape[1]).astype(jnp.float32)
        angles = jnp.outer(places, 0.5 ** jnp.arange(8.0))
        code = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return embed.attend(Block()(embed(tokens) + code[None]))


def language(params, tokens, labels):
    logits = Language().apply(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def over_time(p, x):
    def turn(h, x):
        h = jnp.tanh(x @ p[0] + h @ p[2] + p[1][None])
        return h, h

    h, hs = lax.scan(turn, jnp.zeros(x.shape[1:]), x)
    return jnp.mean(hs * hs) + jnp.mean(h)


def recurrent(params, x):
    return jnp.mean(nn.RNN(nn.LSTMCell(WIDTH)).apply(params, x) ** 2)


def experts(p, x):
    value, index = lax.top_k(jax.nn.softmax(x @ p[0]), 2)
    gates = jnp.sum(jax.nn.one_hot(index, WIDTH) * value[..., None], axis=1)
    return jnp.mean(jnp.square(jnp.einsum("be,eij,bi->bj", gates, p[1], x) @ p[2]))


def dropout(p, x):
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return mlp(p, jnp.where(kept, x / 0.5, 0.0))


def contrasts(p, x):
    z = x @ p[0] + p[1][None]
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    labels = jnp.arange(x.shape[0])
    logits = z @ z.T / 0.1
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def checkpointed(p, x):
    h = jax.checkpoint(jax.nn.gelu)(x @ p[0] + p[1][None])
    return jnp.mean(
        lax.cond(h.sum() > 0, lambda h: h @ p[2], lambda h: h - p[3][None], h)
    )


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attend(self.norm(nnx.gelu(self.first(x))))


@functools.cache
def split_attention():
    return nnx.split(Attention(nnx.Rngs(0)))


def of_nnx(state, x):
    return jnp.mean(nnx.merge(split_attention()[0], state)(x) ** 2)


@functools.cache
def initial(model: nn.Module, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.jit(model.init)(jax.random.key(1), jnp.ones(shape, dtype))


CASES = {
    "mlp": Case(mlp, LAYERS, ("b, 16",)),
    "mlp of blocks": Case(mlp, LAYERS, ("16 * b, 16",)),
    "convolutions": Case(
        lambda p, x: jnp.mean(Convolutions().apply(p, x) ** 2),
        functools.partial(initial, Convolutions(), 2, 8, 8, 3),
        ("b, 8, 8, 3",),
    ),
    "language": Case(
        language,
        functools.partial(initial, Language(), 2, 4, dtype=jnp.int32),
        ("b, s",) * 2,
        jnp.int32,
    ),
    "scan over time": Case(over_time, LAYERS, ("s, b, 16",)),
    "lstm": Case(
        recurrent,
        functools.partial(initial, nn.RNN(nn.LSTMCell(WIDTH)), 2, 4, WIDTH),
        ("b, s, 16",),
    ),
    "experts": Case(
        experts, functools.partial(arrays, MATRIX, (16, 16, 16), MATRIX), ("b, 16",)
    ),
    "dropout": Case(dropout, LAYERS, ("b, 16",)),
    "contrasts": Case(contrasts, LAYERS, ("b, 16",)),
    "checkpointed": Case(checkpointed, LAYERS, ("b, 16",)),
    "nnx": Case(of_nnx, lambda: split_attention()[1], ("b, s, 16",)),
}
each_case = pytest.mark.parametrize("name", CASES)


def gradient(case: Case, policy: Any, **options: Any) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(amp.autocast(case.loss, policy, **options)))


def dtypes(jaxpr: Any) -> list[tuple[str, ...]]:
    """The operations of floats in a jaxpr, each with the dtypes of its results."""
    return [
        (eqn.primitive.name, *(v.aval.dtype.name for v in eqn.outvars))
        for eqn in equations(jaxpr)
        if any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
        # A size that is told later is cast to a float, to divide by it.
        and eqn.primitive.name != "convert_element_type"
    ]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "policy"), [(name, POLICIES[-i % 3]) for i, name in enumerate(CASES)]
)
def test_sizes_that_are_told_later_change_no_dtype(name, policy):
    case = CASES[name]
    fn = gradient(case, policy)
    symbolic = dtypes(jax.make_jaxpr(fn)(case.params(), *case.symbolic()))
    assert symbolic == dtypes(jax.make_jaxpr(fn)(case.params(), *case.arrays(SIZES[1])))


@each_policy
def test_a_batch_of_blocks_is_multiplied_in_8_bits(policy):
    case = CASES["mlp of blocks"]
    jaxpr = jax.make_jaxpr(gradient(case, policy))(case.params(), *case.symbolic())
    found = any("float8_e4m3fn" in each for each in dtypes(jaxpr))
    assert found == (not isinstance(policy, str))


@pytest.mark.parametrize(
    "name, policy",
    [
        ("mlp", POLICIES[1]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("mlp of blocks", POLICIES[2]), ("language", POLICIES[0]))
        ),
    ],
    ids=["mlp f16", "mlp fp8", "language bf16"],
)
def test_exported_gradients_are_those_of_the_program(name, policy):
    case = CASES[name]
    fn = gradient(case, policy)
    exported = jax.export.export(fn)(case.params(), *case.symbolic())
    loss = jax.export.export(jax.jit(amp.autocast(case.loss, policy)))
    loss = loss(case.params(), *case.symbolic())
    # A GPU and a TPU lower it too, though nothing of them is here.
    jax.export.export(fn, platforms=["cuda", "tpu"])(case.params(), *case.symbolic())

    def of_exported(params, *batch):
        return jax.value_and_grad(loss.call)(params, *batch)

    for sizes in SIZES:
        args = case.params(), *case.arrays(sizes)
        wanted, *found = (
            jax.jit(each, compiler_options=EXACTLY_AS_WRITTEN)(*args)
            for each in (fn, exported.call, of_exported)
        )
        for each in found:
            # The same operations, but sizes are multiplied out when it runs.
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(
                    a, b, rtol=0, atol=4 * jnp.finfo(a.dtype).eps * np.max(np.abs(b))
                ),
                each,
                wanted,
            )


def test_an_exported_model_keeps_its_derivative_when_it_is_stored():
    pytest.importorskip("flatbuffers")
    case = CASES["mlp"]
    loss = jax.jit(amp.autocast(case.loss))
    exported = jax.export.export(loss)(case.params(), *case.symbolic())
    stored = jax.export.deserialize(exported.serialize(vjp_order=1))
    args = case.params(), *case.arrays(SIZES[0])
    found, wanted = jax.grad(stored.call)(*args), jax.grad(loss)(*args)
    for a, b in zip(found, wanted, strict=True):
        eps = float(jnp.finfo(jnp.bfloat16).eps)
        np.testing.assert_allclose(a, b, rtol=0, atol=eps * np.max(np.abs(b)))


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ["scan over time", "language", "experts"])
def test_products_of_a_cpu_are_exported_with_sizes_that_are_told_later(
    name, monkeypatch
):
    multiply_all(monkeypatch)
    case = CASES[name]
    fn = gradient(case, "mixed_bfloat16", target="cpu")
    pinned = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    exported = jax.export.export(fn, disabled_checks=[pinned])
    args = case.params(), *case.symbolic()
    assert "bf16" in exported(*args).mlir_module()
    concrete = case.params(), *case.arrays(SIZES[1])
    assert dtypes(jax.make_jaxpr(fn)(*args)) == dtypes(jax.make_jaxpr(fn)(*concrete))


@pytest.mark.breadth(2)
@each_case
def test_a_report_of_sizes_that_are_told_later_counts_one_example(name):
    case = CASES[name]
    ones = case.arrays({"b": 1, "s": 1})
    explain = amp.explain(case.loss)
    symbolic, one = (explain(case.params(), *x) for x in (case.symbolic(), ones))
    assert symbolic.total.matmuls == one.total.matmuls
    if name != "mlp of blocks":
        assert symbolic.total.flops == one.total.flops
    assert "b" in symbolic.drill_down() and symbolic.to_json() and str(symbolic)
