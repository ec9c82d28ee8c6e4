"""diagnose and tune of the plan for a CPU.

Arrays of small integers are exact in bf16, and so are their products in f32.
"""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp.__main__ import main
from tests.programs import with_rule
from tests.targets.product_programs import multiply_all

POLICY = "mixed_bfloat16"


@pytest.fixture(autouse=True)
def native(monkeypatch):
    multiply_all(monkeypatch)


def integers(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), jnp.float32)


def told(sites):
    """How often each operation is there, with its direction and its dtype."""
    return collections.Counter((s.direction, s.operation, s.dtype) for s in sites)


def test_a_product_is_one_site_forward_and_one_for_each_of_its_gradients():
    w, x = integers((6, 5), 1), integers((4, 6))
    found = amp.diagnose(
        lambda w, x: jnp.sum(x @ w), POLICY, argnums=(0, 1), target="cpu"
    )(w, x)
    assert told(found.sites) == {
        ("forward", "convert_element_type", "bf16"): 2,
        ("forward", "dot_general", "f32"): 1,
        ("forward", "reduce_sum", "f32"): 1,
        ("backward", "broadcast_in_dim", "f32"): 1,
        ("backward", "dot_general", "bf16"): 2,
        ("backward", "convert_element_type", "f32"): 2,
    }
    ones = np.ones((4, 5))
    expected = [np.asarray(x).T @ ones, ones @ np.asarray(w).T]
    made = [
        s
        for s in found.sites
        if s.direction == "backward" and s.operation == "dot_general"
    ]
    figures = sorted((s.shape, s.size, s.amax, s.zeros) for s in made)
    assert figures == sorted(
        (g.shape, g.size, np.abs(g).max(), np.sum(g == 0)) for g in expected
    )
    assert [each.error for each in found.gradients.values()] == [0.0, 0.0]


def scanned(body):
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, _: (body(h, w), None), x, None, 3)[0])

    return loss


def one_pixel(h, w):
    image = h.reshape(2, 2, 4, 8)
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel = w[None, None]
    made = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )
    return made.reshape(h.shape)


def step(h, w):
    return jnp.sin(h @ w)


# Two products are in the first one.
LOSSES = {
    "twice": lambda w, x: jnp.sum(step(step(x, w), w)),
    "in a scan": scanned(step),
    "in a checkpoint": lambda w, x: jnp.sum(jax.checkpoint(step)(x, w) ** 2),
    "under vmap": lambda w, x: jnp.sum(
        jax.vmap(step, (0, None))(x.reshape(4, 4, 8), w)
    ),
    "jitted": lambda w, x: jnp.sum(jax.jit(step)(x, w)),
    "in a branch": lambda w, x: jnp.sum(
        jax.lax.cond(x[0, 0] > -9, step, lambda h, w: h, x, w)
    ),
    "in a rule of the program": lambda w, x: jnp.sum(
        jnp.sin(with_rule(jnp.matmul)(x, w))
    ),
    "a convolution of one pixel": lambda w, x: jnp.sum(one_pixel(x, w) ** 2),
}


@pytest.mark.slow
def test_gradients_are_those_of_the_program():
    rng = np.random.default_rng(0)
    w, x = (np.float32(rng.standard_normal((n, 8)) / 2) for n in (8, 16))
    args = dict.fromkeys(LOSSES, (w, x))

    def total(args):
        return sum(LOSSES[name](*each) for name, each in args.items())

    found = amp.diagnose(total, POLICY, target="cpu")(args)
    gradient = jax.jit(jax.grad(amp.autocast(total, POLICY, target="cpu")))
    exact = {"xla_allow_excess_precision": False}
    half = jax.tree.leaves(gradient.lower(args).compile(exact)(args))
    full = jax.tree.leaves(jax.jit(jax.grad(total))(args))
    for each, low, high in zip(found.gradients.values(), half, full, strict=True):
        error = np.linalg.norm(low - high) / np.linalg.norm(high)
        np.testing.assert_allclose(each.error, error, rtol=0.02)
        np.testing.assert_allclose(each.amax, np.abs(low).max(), rtol=1e-5)
    made = told(found.sites)
    operations = {"dot_general": len(LOSSES), "conv_general_dilated": 1}
    for operation, products in operations.items():
        assert made["forward", operation, "f32"] == products
        assert made["backward", operation, "bf16"] == 2 * products
    assert not any("linear_solve" in s.operation for s in found.sites)
    forward = [s for s in found.sites if s.direction == "forward"]
    assert all(s.error > 1e-4 for s in forward if s.operation in operations)


class Cancelling(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (16, 16))
        return (x + 30.0) @ kernel - jnp.full_like(x, 30.0) @ kernel


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Cancelling(name="planted")(nn.Dense(16, name="first")(x))
        return nn.Dense(16, name="last")(jnp.tanh(x))


@pytest.mark.slow
def test_tune_finds_the_module_that_loses_digits_on_a_cpu():
    x = jax.random.normal(jax.random.key(0), (32, 16))
    params = jax.jit(Model().init)(jax.random.key(1), x)

    def loss(params):
        return jnp.mean(Model().apply(params, x) ** 2)

    found = amp.tune(loss, POLICY, max_grad_error=0.01, target="cpu")(params)
    assert found.policy == amp.PolicyMap(POLICY, {"planted": "float32"})
    assert found.cost_before == 1.0 and found.cost == 0.5
    exact = jax.jit(jax.grad(loss))(params)

    def error(policy):
        gradient = jax.grad(amp.autocast(loss, policy, target="cpu"))
        # As `tune` compiles it.
        compiled = (
            jax.jit(gradient)
            .lower(params)
            .compile({"xla_allow_excess_precision": False})
        )
        apart = jax.tree.map(jnp.subtract, compiled(params), exact)
        return optax.tree.norm(apart) / optax.tree.norm(exact)

    np.testing.assert_allclose(found.error, error(found.policy), rtol=0.01)
    np.testing.assert_allclose(found.error_before, error(POLICY), rtol=0.01)
    # The plan for a GPU is another one, and rounds the sums too.
    gpu = amp.tune(loss, POLICY, max_grad_error=0.01)(params)
    assert gpu.error_before > 1.2 * found.error_before


@pytest.mark.slow
@pytest.mark.parametrize("policy", [POLICY, "mixed_float16"])
def test_what_cast_inputs_marks_is_measured_as_any_other_function(policy):
    w, x = integers((8, 8)), integers((16, 8), 1)

    def loss(mark):
        return lambda w, x: jnp.mean(jnp.tanh(mark(jnp.matmul)(x, w) / 8) ** 2)

    marked, plain = loss(amp.cast_inputs), loss(lambda fn: fn)
    if policy == POLICY:
        diagnosed, expected = (
            amp.diagnose(each, policy, target="cpu")(w, x) for each in (marked, plain)
        )
        assert told(diagnosed.sites) == told(expected.sites)
        assert diagnosed.gradients == expected.gradients
    tuned, expected = (
        amp.tune(each, policy, max_grad_error=0.1, target="cpu")(w, x)
        for each in (marked, plain)
    )
    assert (tuned.policy, tuned.error) == (expected.policy, expected.error)
    assert (tuned.error == 0.0) == (policy == "mixed_float16")


@pytest.mark.parametrize("measure", [amp.diagnose, amp.tune])
def test_an_unknown_target_is_an_error_before_anything_runs(measure):
    bound = {"max_grad_error": 0.1} if measure is amp.tune else {}
    with pytest.raises(ValueError, match=r"target='cuda'.*unknown target"):
        measure(jnp.sum, target="cuda", **bound)
    with pytest.raises(TypeError, match="a target is text"):
        measure(jnp.sum, target=1, **bound)


def test_the_command_diagnoses_the_plan_of_a_target(capsys):
    name = "tests.numerics.test_cpu_target:squares"
    assert (
        main(["diagnose", name, "--policy", POLICY, "--target", "cpu", "--json"]) == 0
    )
    found = amp.Diagnosis.from_json(capsys.readouterr().out)
    assert told(found.sites)["forward", "dot_general", "f32"] == 1


def squares(w):
    return jnp.sum((w @ w) ** 2)


def squares_args():
    return (integers((8, 8)),)
