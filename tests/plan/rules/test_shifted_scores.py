"""Scores less their maximum, of which not the exponentials alone are needed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from jmp_amp.plan.program import cpu_target
from jmp_amp.plan.program.cpu_target import Cpu
from tests import h100
from tests.ablation import switched_off
from tests.plan.rules import W, X, array, rewritten

ROWS, WIDTH, CLASSES = 1024, 64, 1024
SCORED = array(ROWS, WIDTH), array(WIDTH, CLASSES), array(ROWS, dtype=jnp.int32)


def cross_entropy(x, w, labels):
    told = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(told, labels[:, None], axis=-1).mean()


def nearest(x, w, labels):
    scores = x @ w
    told = jax.nn.logsumexp(scores, axis=-1)
    return (told - jnp.take_along_axis(scores, labels[:, None], axis=-1)[:, 0]).mean()


def rewrites(loss, *args, **how):
    return any(rewritten(loss, *args, of="sub", **how))


def test_shifted_scores():
    assert rewrites(cross_entropy, *SCORED)
    assert not rewrites(cross_entropy, *SCORED, without="shifted_scores")
    # Exponentials alone read the difference; one kernel makes a softmax.
    assert not rewrites(nearest, *SCORED)
    assert not rewrites(lambda x, w, _: jax.nn.softmax(x @ w).mean(), *SCORED)
    # It is small; it is centred, and no exponential reads it.
    assert not rewrites(cross_entropy, X, W, array(8, dtype=jnp.int32))

    def centred(x, w, labels):
        shifted = x @ w - (x @ w).mean(-1, keepdims=True)
        return (shifted * jnp.tanh(shifted)).mean()

    assert not rewrites(centred, *SCORED)


def test_what_is_subtracted_is_a_number_a_row_that_is_made_of_the_scores():
    def gumbel(x, w, noise):
        shifted = x @ w - noise
        return (shifted * jnp.exp(shifted)).mean()

    def twice(x, w, _):
        shifted = x @ w - jnp.sin(x @ w)
        return (shifted * jnp.exp(shifted)).mean()

    assert not rewrites(gumbel, *SCORED[:2], array(ROWS, 1))
    assert not rewrites(twice, *SCORED)


def test_programs_in_f32_and_for_a_cpu_have_no_barrier_behind_the_maximum(monkeypatch):
    monkeypatch.setattr(cpu_target, "this_cpu", lambda: Cpu(native=True))

    def has(policy, **how):
        program = amp.autocast(cross_entropy, policy, **how)
        text = str(jax.make_jaxpr(program)(*SCORED))
        return f"f32[{ROWS},1] = optimization_barrier" in text

    assert has("bf16")
    assert not has("f32")
    assert not has("bf16", target="cpu")


def values_of(transform):
    """The value of a transformation of the loss, with the rewrite and without."""
    x, w, labels = (
        jax.random.normal(jax.random.key(0), (ROWS, WIDTH)),
        jax.random.normal(jax.random.key(1), (WIDTH, CLASSES)),
        jax.random.randint(jax.random.key(2), (ROWS,), 0, CLASSES),
    )
    loss = functools.partial(amp.autocast(cross_entropy, "bf16"), labels=labels)
    # Operation by operation: XLA fuses both otherwise, and rounds otherwise.
    return transform(loss)(x, w)


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "transform",
    [
        lambda loss: jax.grad(jax.checkpoint(loss)),
        lambda loss: jax.value_and_grad(loss, (0, 1)),
        lambda loss: lambda x, w: jax.jvp(jax.grad(loss, 1), (x, w), (x, w)),
        lambda loss: (
            lambda x, w: jax.vmap(jax.grad(loss, 1), (None, 0))(
                x, jnp.stack([w, w / 2])
            )
        ),
    ],
    ids=["checkpoint", "gradient", "Hessian product", "vmap"],
)
def test_numbers_are_the_same(transform):
    found = values_of(transform)
    with switched_off("shifted_scores"):
        expected = values_of(transform)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@h100.needs_compiler
def test_an_h100_writes_no_scores_in_f32():
    large = array(4096, 512), array(512, 4096), array(4096, dtype=jnp.int32)

    def written(compiled):
        entry = compiled.as_text().partition("\nENTRY")[2]
        return {"in f32": len(re.findall(r"= \(?f32\[4096,4096\]", entry))}

    def found():
        def step(x, w, labels):
            loss = amp.autocast(cross_entropy, "bf16")
            return jax.value_and_grad(loss, (0, 1))(x, w, labels)

        return h100.figures(step, *large, read=written)

    assert found() == {"in f32": 0}
    with switched_off("shifted_scores"):
        assert found() == {"in f32": 1}
