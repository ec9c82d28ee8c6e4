"""Names of operations that a policy has, and nothing in the program has: warnings."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp

X = jnp.ones((2, 4))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(x)


class Nnx(nnx.Module):
    def __init__(self):
        self.head = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(x)


def gate(x):
    return jnp.tanh(x)


@jax.custom_vjp
def kernel(x):
    return jnp.sin(x)


kernel.defvjp(lambda x: (kernel(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_jvp
def curve(x):
    return jnp.sin(x)


def slope(x):
    return jnp.cos(x)


curve.defjvp(lambda primals, tangents: (curve(*primals), tangents[0] * slope(*primals)))


def run(x):
    return kernel(gate(x @ jnp.ones((4, 4))))


def linen_call():
    model = Linen()
    return model.apply, (model.init(jax.random.key(0), X), X)


CALLS = {
    "function": lambda: (run, (X,)),
    "linen": linen_call,
    "nnx": lambda: (lambda model, x: model(x), (Nnx(), X)),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "call", "advice"),
    [
        ("tahn", "function", "Did you mean 'tanh'?"),
        ("gaet", "function", "Did you mean 'gate'?"),
        ("qwerty", "function", "No operation and no function of the program"),
        ("kernel", "function", "It runs as traced"),
        ("head", "linen", 'Write PolicyMap(policy, {"**/head": "float32"})'),
        ("head", "nnx", 'Write PolicyMap(policy, {"**/head": "float32"})'),
    ],
)
def test_a_name_that_decides_nothing_warns_with_the_nearest(name, call, advice):
    fn, args = CALLS[call]()
    half = amp.autocast(fn, amp.Policy().with_full(name))
    with pytest.warns(UserWarning, match=f"Policy: '{name}' decided") as caught:
        jax.eval_shape(lambda: half(*args))
    (told,) = caught
    assert advice in str(told.message) and told.filename == __file__
    # Once: the next trace does not say it again.
    jax.eval_shape(lambda: half(*args))


@pytest.mark.parametrize("method", ["with_low", "with_full", "with_follow"])
def test_a_name_of_an_entry_of_a_map_warns_too(method):
    policy = getattr(amp.Policy(), method)("tahn")
    fn, args = CALLS["linen"]()
    half = amp.autocast(fn, amp.PolicyMap("mixed_bfloat16", {"head": policy}))
    with pytest.warns(UserWarning, match="Did you mean .*'tanh'"):
        jax.eval_shape(lambda: half(*args))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda fn: fn,
        jax.jit,
        jax.checkpoint,
        jax.vmap,
        lambda fn: lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, 2)[0],
    ],
)
def test_a_function_that_the_program_calls_does_not_warn(wrap):
    half = amp.autocast(
        lambda x: wrap(gate)(x @ jnp.ones((4, 4))), amp.Policy().with_full("gate")
    )
    jax.eval_shape(half, X)


@pytest.mark.parametrize("name", ["cumsum", "scatter-add", "softmax", "relu", "einsum"])
def test_names_of_tables_and_libraries_are_for_other_programs_too(name):
    jax.eval_shape(amp.autocast(run, amp.Policy().with_full(name)), X)


def test_a_function_of_a_derivative_that_is_planned_later_does_not_warn():
    jax.eval_shape(amp.autocast(curve, amp.Policy().with_full("slope")), X)


def test_a_name_that_decided_in_an_earlier_call_does_not_warn():
    half = amp.autocast(
        lambda x: gate(x) if x.ndim == 2 else x, amp.Policy().with_full("gate")
    )
    jax.eval_shape(half, X)
    jax.eval_shape(half, X[0])
