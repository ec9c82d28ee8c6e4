"""`diagnose`: an overflow is found in every construct, and a policy without it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jmp_amp as amp


class Block(nn.Module):
    factor: float = 1.0

    @nn.compact
    def __call__(self, x):
        up = nn.Dense(4, name="up", kernel_init=nn.initializers.ones)(x)
        return nn.Dense(4, name="down", kernel_init=nn.initializers.ones)(
            up * self.factor
        )


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, factor in enumerate((1.0, 1e4, 1e-9)):
            x = Block(factor, name=f"b{i}")(x)
        return x


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs, kernel_init=nnx.initializers.ones)
        self.last = nnx.Linear(4, 4, rngs=rngs, kernel_init=nnx.initializers.ones)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.first(self.norm(x) * 0.0 + x) * 1e4) * 1e-9


@jax.custom_jvp
def steep(x):
    return x * 300.0


@steep.defjvp
def _(primals, tangents):
    return steep(primals[0]), 300.0 * tangents[0]


W, X = jnp.full((4, 4), 30.0), jnp.full((8, 4), 2.0)
MESH = functools.partial(jax.make_mesh, (8,), ("d",), axis_types=(AxisType.Auto,))


def in_a_branch(w, x):
    def taken(y):
        return (y @ w) @ w

    return jnp.mean(jax.lax.cond((x @ w)[0, 0] > 0, taken, lambda y: y, x @ w)) * 1e-9


def in_a_scan(w, x):
    turn = lambda c, _: (jnp.maximum(c @ w, 0.0), None)  # noqa: E731
    return jnp.mean(jax.lax.scan(turn, x @ w, None, 4)[0]) * 1e-9


def in_shards(w, x):
    @functools.partial(
        jax.shard_map,
        mesh=MESH(),
        in_specs=(PartitionSpec(), PartitionSpec("d")),
        out_specs=PartitionSpec(),
    )
    def fn(w, x):
        return jax.lax.pmean(jnp.mean((x @ w) @ w @ w), "d") * 1e-9

    return fn(w, x)


def thrice(x, w):
    return x @ w @ w @ w


# The function; then of the site that overflows: module, operation, turn of a loop, and
# how many values of it are not finite.
# 2 * 4 * 30 = 240; times 120 is 28 800, and 3 456 000 overflows.
PLANTED: dict[str, tuple] = {
    "turn of a scan": (in_a_scan, "", "dot_general", 1, 3 * 32),
    "branch": (in_a_branch, "", "dot_general", None, 32),
    "shards": (in_shards, "", "dot_general", None, 32),
    "vmap": (
        lambda w, x: jnp.mean(jax.vmap(lambda row: row @ w @ w @ w)(x)) * 1e-9,
        *("", "dot_general", None, 32),
    ),
    "remat": (
        lambda w, x: jnp.mean(jax.checkpoint(lambda y: y @ w @ w)(x @ w)) * 1e-9,
        *("", "dot_general", None, 32),
    ),
    "custom_jvp": (
        lambda w, x: jnp.mean(steep(x @ w) @ w) * 1e-9,
        *("", "mul", None, 32),
    ),
    "jitted": (
        lambda w, x: jnp.mean(jax.jit(thrice)(x, w)) * 1e-9,
        *("thrice", "dot_general", None, 32),
    ),
    "parameter": (
        lambda w, x: jnp.mean((x * 1e-9) @ (w * 1.0)),
        *("", "convert_element_type", None, 16),
    ),
}


# Each of these is one program.
TOGETHER = (
    ["turn of a scan", "parameter"],
    ["shards"],
    pytest.param(
        ["branch", "vmap", "remat", "custom_jvp", "jitted"], marks=pytest.mark.slow
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER)
def test_an_overflow_is_found_where_it_is_made_and_the_policy_is_finite(names):
    weights = {name: W * 1e5 if name == "parameter" else W for name in names}

    def loss(weights, x):
        return sum(PLANTED[name][0](w, x) for name, w in weights.items())

    d = amp.diagnose(loss, "mixed_float16")(weights, X)
    made = [s for s in d.sites if s.makes_nonfinite and s.is_forward]
    found = [(s.module, s.operation, s.turn, s.nonfinite) for s in made]
    assert sorted(map(str, found)) == sorted(str(PLANTED[name][1:]) for name in names)
    assert d.first_nonfinite == made[0] and {s.dtype for s in made} == {"f16"}
    assert all("test_planted_overflows.py" in s.source for s in made)
    assert d.policy != amp.PolicyMap("mixed_float16") and d.advice
    assert not any(s.makes_nonfinite for s in d.reference)
    step = jax.jit(jax.value_and_grad(amp.autocast(loss, d.policy)))
    assert amp.all_finite(step(weights, X))


def test_the_module_that_overflows_is_named_in_linen():
    params = jax.jit(Stack().init)(jax.random.key(0), X)

    def loss(params, x):
        return jnp.mean(Stack().apply(params, x))

    d = amp.diagnose(loss, "mixed_float16")(params, X)
    assert d.first_nonfinite.module == "Stack/b1" and d.first_nonfinite.path == "b1"
    assert str(d.policy.default) == "p=f32,c=f16,o=f32"
    assert "b1" in [pattern for pattern, _ in d.policy.entries]
    assert all(str(policy) == "p=f32,c=f32,o=f32" for _, policy in d.policy.entries)
    step = jax.jit(jax.value_and_grad(amp.autocast(loss, d.policy)))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(step(params, X)))
    assert d.modules["Stack/b1"].nonfinite and not d.modules["Stack/b0"].nonfinite
    keys = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    assert list(d.gradients) == keys


@pytest.mark.slow
def test_an_nnx_module_is_named_and_left_as_it_was():
    model = Layers(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.state(model))

    def loss(model, x):
        return jnp.mean(model(x))

    d = amp.diagnose(loss, "mixed_float16")(model, X)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))
    assert d.first_nonfinite.path in ("", "last")
    _, gradients = jax.eval_shape(amp.value_and_grad(loss), model, X)
    paths = jax.tree_util.tree_leaves_with_path(gradients)
    assert list(d.gradients) == [jax.tree_util.keystr(path) for path, _ in paths]
    step = amp.value_and_grad(amp.autocast(loss, d.policy))
    value, _ = jax.jit(lambda *args: step(*args, loss_scale=amp.no_loss_scale()))(
        model, X
    )
    assert jnp.isfinite(value)


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.linalg.norm(x @ w),
        lambda w, x: jnp.sqrt(jnp.sum((x @ w) ** 2)),
    ],
    ids=["norm", "sqrt"],
)
def test_a_derivative_that_is_infinite_is_found_where_the_forward_pass_is_finite(fn):
    d = amp.diagnose(fn, "mixed_float16")(W * 0.0, X)
    assert d.value == 0 and d.first_nonfinite.direction == "backward"
    assert d.first_nonfinite.operation == "div" and d.first_nonfinite.nonfinite == 1
    assert d.gradients[""].nonfinite == 16
    # No policy helps, and none is suggested.
    assert d.policy == amp.PolicyMap("mixed_float16") and d.advice
