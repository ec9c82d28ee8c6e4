"""Programs of the tables: each is traced once in a process, and planned once a dtype.

Tests that read them are in one group (`--dist loadgroup`): they share a process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from jmp_amp.plan.plan import Plan
from jmp_amp.plan.planner import plan_program
from jmp_amp.plan.tables.operations import PRODUCTS
from tests import zoo
from tests.idioms.table import IDIOMS
from tests.loops.table import LOOPS
from tests.plan import cutting

# Idioms have names that loops have too.
LOOP_NAMES = {name: f"loops: {name}" for name in LOOPS}
_ROWS = IDIOMS | {LOOP_NAMES[name]: each.idiom for name, each in LOOPS.items()}

one_process = pytest.mark.xdist_group("plans of idioms")


def drawn(name: str) -> tuple[Callable[..., Any], Any]:
    """Returns the function of an idiom or a loop, and arguments of it."""
    idiom, rng = _ROWS[name], np.random.default_rng(0)
    args = (idiom.params(rng), idiom.inputs(rng))
    return idiom.fn, jax.tree.map(jnp.asarray, args)


@functools.cache
def traced(name: str) -> cutting.Program:
    """Returns the program of an idiom, of a loop, or of a small model of the zoo."""
    if name in _ROWS:
        fn, args = drawn(name)
        return cutting.traced(fn, *args)
    case = zoo.CASES[name, "small"]
    return cutting.traced(case.loss, *case.abstract())


@functools.cache
def planned(name: str, dtype: str) -> Plan:
    """Returns its plan under a mixed policy."""
    return plan_of(traced(name).closed, dtype)


def plan_of(closed: Any, dtype: str) -> Plan:
    jaxpr = closed.jaxpr
    inputs, outputs = [None] * len(jaxpr.invars), [None] * len(jaxpr.outvars)
    policy = amp.get_policy(f"mixed_{dtype}")
    return plan_program(closed, policy, inputs, outputs)


def products(plan: Plan) -> list[list[str]]:
    """Returns the dtypes of the factors of each product of a plan, in their order."""
    found = []
    for row, eqn in zip(plan.equations, plan.body.jaxpr.eqns, strict=True):
        if eqn.primitive.name in PRODUCTS:
            found.append(list(map(str, row.reads[:2])))
        for body in row.bodies:
            found += products(body)
    return found
