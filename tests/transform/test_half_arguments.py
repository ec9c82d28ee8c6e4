"""Functions of half-precision parameters are traced as the f32 ones they are."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests.measures import compiled

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
STORED = "p=bf16,c=bf16,o=f32"
EPS = float(jnp.finfo(BF16).eps)
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), F32)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return x + nn.Dense(8)(nn.LayerNorm()(x)), None


class Scanned(nn.Module):
    """A scan whose carry begins with an embedding and meets f32 norms."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        x = nn.Embed(16, 8)(tokens)
        return layers()(x, jnp.zeros(3))[0]


TOKENS = jnp.arange(12).reshape(3, 4)


@functools.cache
def half_and_full() -> tuple[Any, Any]:
    params = jax.jit(Scanned().init)(jax.random.key(0), TOKENS)
    half = amp.cast_params(params, STORED)
    return half, amp.cast_to_full(half)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [STORED, "mixed_bfloat16"])
def test_a_scan_that_begins_in_half_and_goes_on_in_float32_is_traced(policy):
    half, full = half_and_full()
    with pytest.raises(TypeError), jax.numpy_dtype_promotion("standard"):
        Scanned().apply(half, TOKENS)
    found = compiled(amp.autocast(Scanned().apply, policy))(half, TOKENS)
    assert found.dtype == F32
    expected = compiled(Scanned().apply)(full, TOKENS)
    np.testing.assert_allclose(found, expected, atol=8 * EPS)


def test_gradients_are_those_of_float32_parameters_in_the_dtype_of_each():
    half, full = half_and_full()

    def loss(apply: Any, params: Any) -> jax.Array:
        return jnp.sum(apply(params, TOKENS) ** 2)

    apply = amp.autocast(Scanned().apply, STORED)
    found = jax.jit(jax.grad(functools.partial(loss, apply)))(half)
    expected = jax.jit(jax.grad(functools.partial(loss, Scanned().apply)))(full)
    for leaf, like, wanted in zip(
        *map(jax.tree.leaves, (found, half, expected)), strict=True
    ):
        assert leaf.dtype == like.dtype
        error = np.linalg.norm(leaf.astype(F32) - wanted) / np.linalg.norm(wanted)
        assert error < 8 * EPS


def test_outputs_are_in_the_dtype_of_the_policy_where_all_parameters_are_half():
    w = jnp.ones((8, 4), BF16)
    fn = lambda w, x: x @ w  # noqa: E731
    assert amp.autocast(fn, STORED)(w, X).dtype == F32
    assert amp.autocast(fn, STORED)(w, X.astype(BF16)).dtype == F32
    assert amp.autocast(fn, "bf16")(w, X).dtype == BF16


def test_products_take_the_stored_weights_as_they_are():
    w = jnp.ones((8, 4), BF16)
    report = amp.explain(lambda w, x: x @ w, STORED)(w, X)
    # The activation and the output are cast, and the weight is not.
    assert report.casts == {"f32 to bf16": (1, X.size), "bf16 to f32": (1, 16)}
    assert report.total.matmuls_in_half == 1


def test_what_an_nnx_module_writes_keeps_its_dtype():
    class Model(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(8, 8, param_dtype=BF16, rngs=nnx.Rngs(0))
            self.last = nnx.BatchStat(jnp.zeros(8, BF16))

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.dense(x)
            self.last[...] = y.mean(0).astype(BF16)
            return y

    model = Model()
    assert amp.autocast(model, STORED)(X).dtype == F32
    assert model.last[...].dtype == BF16
    assert model.dense.kernel[...].dtype == BF16


# Mistakes


def raises_its_own(w: jax.Array) -> jax.Array:
    raise TypeError("mine")


def raises(message: str) -> Any:
    def fn(*_: Any) -> Any:
        raise TypeError(message)

    return fn


MISTAKES = {
    "mine": raises_its_own,
    "no layer bf16": raises("no layer bf16"),
    "got bfloat16 weights": lambda w: jax.tree.map(raises("got bfloat16 weights"), w),
    "f16 of a turn": lambda w: jax.lax.map(raises("f16 of a turn: f16[2]"), w),
    "float16 of a branch": lambda w: jax.lax.cond(
        w[0] > 0, raises("float16 of a branch"), jnp.sin, w
    ),
    "bfloat16 of a helper": lambda w: jax.jit(raises("bfloat16 of a helper"))(w),
    "data type 'bf16' not understood": lambda w: w.astype("bf16"),
    "got ''bfloat16''": lambda w: np.dtype(["bfloat16"]),
    "unsupported operand": lambda w: w + "a",
    "missing 1 required positional argument": lambda w: raises_its_own(),  # pyright: ignore
    "concrete value": lambda w: jnp.zeros(w[0].astype(int)),
    "boolean conversion": lambda w: w if w[0] > 0 else -w,
    r"traced array with shape (bfloat16|float32)\[\]": lambda w: float(w[0]),
}


@pytest.mark.parametrize("message", MISTAKES)
@pytest.mark.parametrize("policy", [STORED, "mixed_bfloat16"])
def test_a_function_with_a_mistake_of_its_own_runs_once(message, policy):
    runs = []

    def fn(w: jax.Array) -> jax.Array:
        runs.append(w.dtype)
        return MISTAKES[message](w)

    with pytest.raises(TypeError, match=message):
        amp.autocast(fn, policy)(jnp.ones(2, BF16))
    assert len(runs) == 1


@pytest.mark.breadth(1)
@pytest.mark.parametrize("dtype", [BF16, jnp.dtype("float16")])
def test_a_function_whose_dtypes_do_not_meet_runs_in_float32(dtype):
    def branches(w: jax.Array) -> jax.Array:
        return jax.lax.cond(w[0] > 0, lambda w: w, lambda w: w.astype(F32), w)

    def turns(w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2, lambda _, w: w.astype(F32) * 2, w)

    def sum_of_two(w: jax.Array) -> jax.Array:
        return w + jnp.ones(2, F32)

    for fn in (branches, turns, sum_of_two):
        with pytest.raises((TypeError, jax.dtypes.TypePromotionError)):
            fn(jnp.ones(2, dtype))
        found = amp.autocast(fn)(jnp.ones(2, dtype))
        np.testing.assert_array_equal(found, fn(jnp.ones(2, F32)))


# States in half precision


STORES_HALF = [("O2", "bf16"), ("O3", "bf16"), ("O3", "f16"), ("fp16_naive", None)]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("name", "half"), STORES_HALF)
def test_a_loop_carries_the_half_state_of_a_step(name, half):
    recipe = amp.recipe(name, half)
    dtype = recipe.cast_model_type
    w = jax.random.normal(jax.random.key(0), (8, 8), F32) / 4
    xs = jnp.stack([X, -X, X])

    def step(carry, x):
        h, (total, count) = carry
        h = jnp.tanh(h @ w.astype(h.dtype) + x)
        return (h, (total + h, count + 1)), h.sum()

    def scanned(step, dtype):
        carry = jnp.zeros((4, 8), dtype), (jnp.zeros((4, 8), dtype), 0)
        return jax.lax.scan(step, carry, xs.astype(dtype))

    (h, (total, count)), sums = scanned(recipe.autocast(step), dtype)
    assert h.dtype == total.dtype == dtype and count == 3
    # What no argument stands for comes back in the dtype of outputs.
    assert sums.dtype == F32
    (expected, (expected_total, _)), _ = scanned(step, F32)
    # Each of three turns rounds the state, the product and the sum.
    for found, wanted in ((h, expected), (total, expected_total)):
        error = np.abs(found.astype(F32) - wanted).max()
        assert error < 9 * float(jnp.finfo(dtype).eps) * np.abs(wanted).max()


def test_every_loop_carries_the_half_state_of_a_step():
    step = amp.recipe("O3", "bf16").autocast(lambda h: jnp.tanh(h @ h))
    h = jnp.eye(4, dtype=BF16)
    found = [
        jax.lax.fori_loop(0, 2, lambda _, h: step(h), h),
        jax.lax.while_loop(lambda h: h.sum() > 1, step, h),
        jax.lax.scan(lambda h, _: (step(h), None), h, length=2)[0],
    ]
    assert {each.dtype for each in found} == {BF16}


def test_a_state_is_half_only_if_the_function_says_so():
    step = amp.autocast(lambda h, x: (h * x, {"twice": 2 * h, "same": h}), STORED)
    half, full = jnp.ones(3, BF16), jnp.ones(3, F32)
    # The function returns f32: one of its arguments is.
    with jax.numpy_dtype_promotion("standard"):
        found, tree = step(half, full)
    assert found.dtype == F32
    assert amp.autocast(lambda h: {"only": h}, STORED)(half)["only"].dtype == F32
    # Neither a dictionary of results nor an array of another shape is the argument.
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {F32}
    assert amp.autocast(lambda h: h[:2], STORED)(half).dtype == F32
    assert amp.autocast(lambda h: h.astype(F32), STORED)(half).dtype == F32
    assert amp.autocast(lambda h: [h.sum(), h], STORED)(half)[1].dtype == BF16


def test_a_function_without_such_a_state_is_traced_once():
    runs = []

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        runs.append(w.dtype)
        return x @ w

    amp.autocast(fn, STORED)(jnp.ones((8, 4), BF16), X)
    assert runs == [F32]


# Half weights that the function writes


class Clipped(nnx.Module):
    """Writes its weight: in half by itself, or by a function that only f32 enters."""

    def __init__(self, dtype: Any) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (8, 8), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.w[...] = jnp.clip(self.w[...], -0.5, 0.5)
        return x @ self.w[...]


class Rematted(nnx.Module):
    """Its call writes variables back as they are."""

    def __init__(self, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(8, 8, param_dtype=dtype, rngs=rngs)

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("model", (Clipped, Rematted))
@pytest.mark.parametrize("policy", (STORED, "bf16"))
@pytest.mark.parametrize("name", ("in f32", "as stored"))
def test_weights_that_a_module_writes_stay_half(model, policy, name):
    net, runs = model(BF16), []
    # Strict promotion refuses half weights beside f32 inputs: it runs in f32 alone.
    x = X if name == "in f32" else X.astype(BF16)
    before = jax.tree.leaves(nnx.state(net))

    @nnx.jit
    @functools.partial(amp.autocast, policy=policy)
    def call(net, x):
        runs.append(None)
        return net(x)

    call(net, x)
    traced = len(runs)
    call(net, x)
    after = jax.tree.leaves(nnx.state(net))
    assert {leaf.dtype for leaf in after} == {BF16} and len(runs) == traced
    bound = 0.5 if model is Clipped else np.inf
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.clip(a.astype(F32), -bound, bound), b)


def test_each_weight_has_the_dtype_that_the_function_writes():
    """Whatever else it writes: as it is, in f32, a new variable, metadata."""

    class Several(nnx.Module):
        def __init__(self) -> None:
            self.same, self.wide, self.half = (
                nnx.Param(jnp.ones(2, BF16)) for _ in range(3)
            )

    def write(net: Several) -> None:
        net.same[...] = net.same[...].astype(BF16)
        net.wide.set_value(net.wide[...].astype(F32) * jnp.float32(1.001))
        net.half[...] = net.half[...] * 2
        net.new = nnx.Variable(net.half[...])
        net.half.set_metadata("seen", True)

    mine, plain = Several(), Several()
    amp.autocast(write, STORED)(mine)
    write(plain)
    for name in ("same", "wide", "half"):
        found, expected = (getattr(each, name)[...] for each in (mine, plain))
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_two_half_states_of_one_structure_keep_their_dtypes():
    half = jnp.ones(3, BF16), jnp.ones(3, jnp.float16)
    found = amp.autocast(lambda a, b: (a + 1, b + 1), STORED)(*half)
    assert [each.dtype for each in found] == [each.dtype for each in half]


class Average(nn.Module):
    """Keeps an average of its weight under the name of the weight, in f32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.ones, (8, 8), BF16)
        mean = self.variable("mean", "kernel", lambda: jnp.ones((8, 8), F32))
        mean.value = 0.875 * mean.value + 0.125 * kernel.astype(F32)
        return x @ kernel


def test_an_f32_variable_of_the_name_of_a_half_weight_stays_f32():
    net = Average()
    variables = net.init(jax.random.key(0), X.astype(BF16))

    def step(params, mean):
        given = {"params": params, "mean": mean}
        return net.apply(given, X, mutable=["mean"])[1]["mean"]

    mean = jax.tree.map(lambda leaf: 1.0625 * leaf, variables["mean"])
    found = amp.autocast(step, STORED)(variables["params"], mean)["kernel"]
    assert found.dtype == F32
    np.testing.assert_array_equal(found, jnp.full((8, 8), 0.875 * 1.0625 + 0.125))


class Memory(nn.Module):
    """Keeps its last result in a collection of its own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kept = self.variable("memory", "kept", lambda: jnp.zeros((4, 8), BF16))
        dense = nn.Dense(8, param_dtype=BF16, dtype=BF16)
        kept.value = jnp.tanh(dense(x) + kept.value)
        return kept.value


def test_a_loop_carries_half_variables_of_linen():
    net, x = Memory(), X.astype(BF16)
    variables = net.init(jax.random.key(0), x)
    params, memory = variables["params"], {"memory": variables["memory"]}
    step = amp.autocast(
        lambda p, m: net.apply({"params": p, **m}, x, mutable=["memory"])[1], STORED
    )
    found = jax.lax.fori_loop(0, 3, lambda _, m: step(params, m), memory)
    expected = memory
    for _ in range(3):
        expected = net.apply({"params": params, **expected}, x, mutable=["memory"])[1]
    (kept,), (wanted,) = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert kept.dtype == BF16
    np.testing.assert_allclose(kept.astype(F32), wanted.astype(F32), atol=4 * EPS)


def test_each_leaf_of_a_state_is_half_if_the_function_leaves_it_half():
    def step(state):
        wide = state["wide"].astype(F32) * 1.5
        return 0, {"wide": wide, "same": state["same"], "half": state["half"] + 1}

    state = {name: jnp.ones(3, BF16) for name in ("wide", "same", "half")}
    found = jax.tree.map(jnp.result_type, amp.autocast(step, STORED)(state)[1])
    assert found == {"wide": F32, "same": BF16, "half": BF16}


@pytest.mark.slow
@pytest.mark.parametrize("name", ("O2", "fp16_naive"))
def test_a_whole_step_whose_optimizer_began_with_half_weights(name):
    recipe = amp.recipe(name, **({"half_dtype": "bfloat16"} if name == "O2" else {}))
    tx = recipe.wrap(optax.sgd(0.125))
    params, state = recipe.init(tx, {"w": jnp.eye(8)})

    def step(params, state, x):
        def loss(params):
            return jnp.mean(jnp.square(x @ params["w"].astype(F32)))

        value, gradients = amp.value_and_grad(loss)(params, loss_scale=state)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    with jax.numpy_dtype_promotion("standard"):
        expected = step(params, state, X)
        found = recipe.autocast(step)(params, state, X)
        report = amp.explain(step, recipe.policy)(params, state, X)
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(
        jnp.result_type, expected
    )
    # Half products, and a weight that half rounds.
    eps = float(jnp.finfo(recipe.cast_model_type).eps)
    a, b = found[0]["w"], expected[0]["w"]
    np.testing.assert_allclose(a.astype(F32), b.astype(F32), atol=2 * eps)
    assert report.total.in_half > 0
