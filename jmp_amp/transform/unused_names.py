"""Names of operations that a policy has, and nothing in the program has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_amp.plan.plan import Plan
from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.jaxprs import Eqn
from jmp_amp.plan.tables.operations import OPERATIONS
from jmp_amp.plan.tables.rules import FUNCTION_RULES
from jmp_amp.policies.arguments import warn
from jmp_amp.policies.policy_map import PolicyMap

_KNOWN = frozenset(name.replace("-", "_") for name in (*OPERATIONS, *FUNCTION_RULES))
# A policy may name functions of these that only some programs call.
_LIBRARIES = (jax.lax, jax.nn, jnp, optax)


def warn_of_unused_names(plan: Plan, policies: PolicyMap) -> None:
    """Warns, once for a map, of the names of its policies that decided nothing.

    Operations of the tables and functions of JAX and optax are no mistakes: a policy
    may be for more than one program. A name that decides here counts for later calls.
    """
    memory = policies._memory
    chosen = [policies.default, *(each for _, each in policies.entries)]
    named = {n for each in chosen for n in (*each.low, *each.full, *each.follow)}
    left = {n for n in named - _KNOWN - memory.names if not _is_of_library(n)}
    if not left:
        return
    decided, found = set(), _Found(set(), set(), set(), set())
    for eqn, name in _equations(plan, set()):
        decided.add(name)
        found.add(eqn)
    memory.names.update(left)
    for name in sorted(left - decided):
        if advice := found.advice(name):
            warn(f"Policy: {name!r} decided nothing. {advice}")


class _Found(NamedTuple):
    """The names that a program has.

    Attributes:
      functions: of operations and of the functions that called them.
      as_traced: of the functions that the plan does not look into.
      own_rules: of those with a derivative of the user, which is planned later.
      modules: of modules and other name scopes.
    """

    functions: set[str]
    as_traced: set[str]
    own_rules: set[str]
    modules: set[str]

    def add(self, eqn: Eqn) -> None:
        self.modules.update(re.split(r"[/()]", jaxprs.scope_text(eqn)))
        self.functions.add(source_code.function_name(eqn) or eqn.primitive.name)
        if jaxprs.is_custom_jvp(eqn) and not source_code.is_of_library(eqn):
            self.own_rules.add(source_code.function_name(eqn) or "")
        if not jaxprs.inner_bodies(eqn):
            bodies = jaxprs.owned_bodies(eqn)
            self.as_traced.update(e.jaxpr.debug_info.func_name or "" for e in bodies)
        traceback = eqn.source_info.traceback
        for code in () if traceback is None else traceback.raw_frames()[0]:
            if not source_code.in_library(code.co_filename):
                self.functions.add(code.co_name)

    def advice(self, name: str) -> str:
        """Returns what to write in place of a name; "" if it may decide later."""
        numbered = re.compile(rf"{re.escape(name)}(_\d+)?")
        if modules := sorted(filter(numbered.fullmatch, self.modules)):
            return (
                "It is a module, and names are of operations and functions. Write "
                f'PolicyMap(policy, {{"**/{modules[0]}": "float32"}}).'
            )
        if name in self.as_traced:
            return "It runs as traced; amp.cast_inputs(fn) has such a function in half."
        if name in self.functions:
            return "All operations in it have names inside of it that decide."
        for known in (self.functions, _KNOWN):
            words = sorted(filter(str.isidentifier, known))
            if close := difflib.get_close_matches(name, words, n=2, cutoff=0.75):
                return f"Did you mean {' or '.join(map(repr, close))}?"
        return (
            ""
            if self.own_rules
            else (
                "No operation and no function of the program has this name. "
                "amp.explain(fn, policy)(*args).drill_down() lists the operations."
            )
        )


def _is_of_library(name: str) -> bool:
    return any(hasattr(library, name) for library in _LIBRARIES)


def _equations(plan: Plan, seen: set[int]) -> Iterator[tuple[Eqn, str]]:
    """Yields each equation of a plan, and the name that decided its dtype."""
    if id(plan) in seen:
        return
    seen.add(id(plan))
    for eqn, planned in zip(plan.body.jaxpr.eqns, plan.equations, strict=True):
        yield eqn, planned.rule.decided_by
        for body in planned.bodies:
            yield from _equations(body, seen)
