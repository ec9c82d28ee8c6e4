"""What is written into name stacks is read again, whatever JAX does to a function."""

import jax
import jax.numpy as jnp
import pytest

from jmp_amp.plan.program import jaxprs, scope_text
from tests.programs import equations

X = jnp.ones(3)
TRANSFORMS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "gradient": lambda fn: jax.grad(lambda x: fn(x).sum()),
    "checkpoint": lambda fn: jax.grad(lambda x: jax.checkpoint(fn)(x).sum()),
    "gradient of vmap": lambda fn: jax.grad(lambda x: jax.vmap(fn)(x).sum()),
}


def scopes_of(fn, transform=jax.jit):
    program = jax.make_jaxpr(transform(fn))(X)
    return [jaxprs.scope_text(eqn) for eqn in equations(program.jaxpr)]


def scoped(scope):
    def fn(x):
        with jax.named_scope("block"), scope():
            return jnp.sin(x) * x

    return fn


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_what_is_noted_is_read_in_every_transformation(transform):
    fn = scoped(lambda: scope_text.noted("eqn", 3, 14))
    found = [s for s in scopes_of(fn, transform) if [*scope_text.notes("eqn", s)]]
    assert len(found) > 1
    for scopes in found:
        assert {*map(tuple, scope_text.notes("eqn", scopes))} == {("3", "14")}
        assert not [*scope_text.notes("cast", scopes)]
        assert {*scope_text.module_names(scopes)} == {"block"}


@pytest.mark.parametrize("text", ["", "a/b", "p=f32,c=bf16,o=f32", "é_()"])
def test_a_text_of_any_characters_is_read_as_it_was(text):
    scopes = scopes_of(scoped(lambda: scope_text.text_noted("module", text)))
    assert {scope_text.text_of("module", s) for s in scopes if "amp_" in s} == {text}
    assert scope_text.text_of("autocast", scopes[-1]) is None


def test_a_note_without_values_is_one_of_its_kind():
    scopes = scopes_of(scoped(lambda: scope_text.noted("scaling")))
    assert any(scope_text.is_noted("scaling", each) for each in scopes)
    assert not any(scope_text.is_noted("quantised", each) for each in scopes)


def policies_in(scopes):
    found = {scope_text.policy_in(name) for _, name in scope_text.parts(scopes)}
    return found - {None}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_policy_is_read_and_no_name_of_a_module(transform):
    policy = "p=f32,c=f16,o=f32,full=exp+log"
    fn = scoped(lambda: scope_text.policy_noted(policy))
    found = [s for s in scopes_of(fn, transform) if "amp[" in s]
    assert found
    for scopes in found:
        assert policies_in(scopes) == {policy}
        assert {*scope_text.module_names(scopes)} == {"block"}
    assert policies_in("clamp[p=f32,c=f16,o=f32]") == set()


def test_jax_names_what_is_backward_and_what_is_computed_again():
    def marked(transform, name):
        scopes = scopes_of(scoped(lambda: scope_text.noted("eqn", 0, 0)), transform)
        return any(name in each for each in scopes)

    again, backward = scope_text.AGAIN, scope_text.BACKWARD
    assert not marked(jax.jit, backward) and not marked(jax.jit, again)
    assert marked(TRANSFORMS["gradient"], backward)
    assert not marked(TRANSFORMS["gradient"], again)
    assert marked(TRANSFORMS["checkpoint"], again)
