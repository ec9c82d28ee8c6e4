"""A line whose result nobody reads changes the dtype of nothing else.

Each idiom is traced, and lines that nobody reads are written between its equations, at
any depth: they read random values of it. What was planned before is planned after.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jmp_amp.plan.dataflow.dead_code import without_dead_code
from jmp_amp.plan.program import binding, jaxprs, source_code
from tests.idioms.table import IDIOMS
from tests.idioms.test_idioms import by_default
from tests.measures import HALF
from tests.plan import once

pytestmark = once.one_process

READERS = {
    "a product": lambda v: jnp.tanh(v.reshape(1, -1) @ jnp.ones((v.size, 2))),
    "a factor": lambda v: jnp.tanh(v) * v,
    "a sum": lambda v: v + jnp.sin(v),
    "a norm": lambda v: jnp.sqrt(jnp.sum(v * v)),
    "a softmax": lambda v: jax.nn.log_softmax(v.reshape(-1)),
    "a comparison": lambda v: (v > 0.5).astype(jnp.float32),
    "an index": lambda v: jnp.int32(jnp.floor(v * 10)),
    "a sort": lambda v: jnp.argsort(v.reshape(-1)),
    "a barrier": lambda v: jax.lax.stop_gradient(v),
    "a system": lambda v: jnp.linalg.cholesky(v.reshape(-1, 1) @ v.reshape(1, -1)),
    "a loop": lambda v: jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c) * v, v),
}
SHARE = 0.3


def dead_reader(var, rng):
    """Equations that read a variable, and whose results nobody reads."""

    def read(value):
        READERS[rng.choice(list(READERS))](value)

    traced = binding.trace(read, [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)])
    assert not traced.consts
    (given,) = traced.jaxpr.invars

    def of_program(atom):
        return var if atom is given else atom

    return [
        eqn.replace(invars=[of_program(atom) for atom in eqn.invars])
        for eqn in traced.jaxpr.eqns
    ]


def is_chosen(var, rng):
    return (
        not isinstance(var, core.DropVar)
        and getattr(var.aval, "dtype", None) == jnp.float32
        and var.aval.size > 0
        and rng.random() < SHARE
    )


def disturbed(jaxpr, rng, done):
    """A jaxpr with dead readers in it and in its bodies; `done` are those changed."""
    if isinstance(jaxpr, tuple):
        return tuple(disturbed(each, rng, done) for each in jaxpr)
    if not isinstance(jaxpr, core.Jaxpr | core.ClosedJaxpr):
        return jaxpr
    if id(jaxpr) in done:
        return done[id(jaxpr)][1]
    opened = jaxprs.body_of(jaxpr).jaxpr
    eqns = [e for v in opened.invars if is_chosen(v, rng) for e in dead_reader(v, rng)]
    for eqn in opened.eqns:
        # Nobody writes lines into the functions of a library.
        written = jaxprs.is_loop(eqn) or not source_code.is_of_library(eqn)
        if written and jaxprs.inner_bodies(eqn):
            changed = {k: disturbed(p, rng, done) for k, p in eqn.params.items()}
            eqns.append(eqn.replace(params=changed))
        else:
            eqns.append(eqn)
        for var in eqn.outvars:
            if is_chosen(var, rng):
                eqns += dead_reader(var, rng)
    changed = opened.replace(eqns=eqns)
    if opened is not jaxpr:  # JAX < 0.11: a ClosedJaxpr wraps a Jaxpr.
        changed = jaxpr.replace(jaxpr=changed)
    # With the jaxpr itself: no other may get its id.
    done[id(jaxpr)] = (jaxpr, changed)
    return changed


def dtypes(plan, path=()):
    """What is planned for each equation, by the variables that lead to it."""
    found = {}
    for planned, eqn in zip(plan.equations, plan.body.jaxpr.eqns, strict=True):
        for number, var in enumerate(eqn.outvars):
            # Zeros in the place of a dead result are others each time.
            is_zeros = not jaxprs.variables(eqn.invars)
            if isinstance(var, core.DropVar) or is_zeros:
                continue
            key = (*path, var)
            writes = planned.writes[number]
            found[key] = (eqn.primitive.name, planned.dtype, planned.reads, writes)
        named = [v for v in eqn.outvars if not isinstance(v, core.DropVar)][:1]
        for number, body in enumerate(planned.bodies):
            found |= dtypes(body, (*path, *named, number))
    return found


def check(name, dtype, seed):
    closed = once.traced(name).closed
    disturbed_too = without_dead_code(
        disturbed(closed, np.random.default_rng(seed), {})
    )
    before = once.planned(name, dtype)
    after = once.plan_of(disturbed_too, dtype)
    kept, found = dtypes(before), dtypes(after)
    assert kept.keys() <= found.keys()
    assert not [(each, found[key]) for key, each in kept.items() if each != found[key]]
    assert after.outputs == before.outputs


@pytest.mark.breadth(4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            *(name, dtype),
            marks=[pytest.mark.slow] * (dtype != by_default(number)),
        )
        for number, name in enumerate(IDIOMS)
        for dtype in (HALF[number // 6 % 2],)
    ],
)
def test_lines_that_nobody_reads_change_no_dtype(name, dtype):
    check(name, dtype, seed=len(name))
