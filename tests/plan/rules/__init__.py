"""A test for each rule of the plan: a program that needs it, and its nearest.

The nearest program differs in one line, and must not get what the rule gives. That it
is this rule is seen with the rule switched off, as in `tests/ablation.py`. A file has
the name of its rule.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jmp_amp as amp
from jmp_amp.plan.plan import EquationPlan, Plan
from jmp_amp.plan.planner import plan_program
from jmp_amp.plan.program import binding
from tests.ablation import switched_off

F32, BF16, F16 = "float32", "bfloat16", "float16"


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Returns the shape of an argument; nothing is computed."""
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = array(8, 16), array(16, 16)


def equations(plan: Plan) -> Iterator[tuple[str, EquationPlan]]:
    """Every planned equation with the name of its primitive, calls before bodies."""
    for each, eqn in zip(plan.equations, plan.body.jaxpr.eqns, strict=True):
        yield eqn.primitive.name, each
        for body in each.bodies:
            yield from equations(body)


def planned_equations(
    fn: Callable[..., Any],
    *args: Any,
    of: str,
    without: str | None = None,
    half: str = BF16,
) -> list[EquationPlan]:
    """The plans of the equations of a primitive, without a rule if one is given."""
    closed = binding.trace(lambda *args: jax.tree.leaves(fn(*args)), args)
    inputs, outputs = ([None] * len(v) for v in (args, closed.jaxpr.outvars))
    with switched_off(without) if without else contextlib.nullcontext():
        plan = plan_program(closed, amp.get_policy(f"mixed_{half}"), inputs, outputs)
    return [each for name, each in equations(plan) if name == of]


def planned(*program: Any, **how: str) -> list[str]:
    """The dtypes that each equation computes its result in, see `planned_equations`."""
    found = planned_equations(*program, **how)
    return [str(each.yields[0]) for each in found if each.yields[0]]


def stored(*program: Any, **how: str) -> list[str]:
    """The dtypes that the results are kept in, see `planned_equations`."""
    found = planned_equations(*program, **how)
    return [str(each.writes[0]) for each in found if each.writes[0]]


def rewritten(*program: Any, **how: str) -> list[bool]:
    """Whether each equation is bound otherwise than as traced."""
    return [each.rewrite is not None for each in planned_equations(*program, **how)]


def reasons(*program: Any, **how: str) -> list[str]:
    """Why each equation computes in its dtype."""
    return [each.reason for each in planned_equations(*program, **how)]


def needed(
    *args: Any,
    of: str,
    gets: list[Any],
    nearest: list[Any],
    half: str = BF16,
    other_half: list[Any] | None = None,
    read: Callable[..., list[Any]] = planned,
) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Returns a decorator that makes the test of a rule from its two programs.

    The program without the rule, and the nearest one with it, have the same.

    Args:
      args: what the programs are given, by default `X, W`.
      of: the primitive that is looked at.
      gets: what `read` finds of the program that needs the rule.
      nearest: what it finds of the other one.
      half: the half dtype.
      other_half: what `read` finds of the first program in the other half dtype.
      read: one of the functions above.
    """

    def of_program(program: Callable[..., Any]) -> Callable[[], None]:
        """Of (whether it is the program that needs the rule, *args) -> its results."""
        rule = program.__name__.removeprefix("test_")

        def test() -> None:
            needs, near = (functools.partial(program, each) for each in (True, False))
            read_of = functools.partial(read, of=of, half=half)
            given = args or (X, W)
            found = {
                "the program": read_of(needs, *given),
                "without the rule": read_of(needs, *given, without=rule),
                "its nearest": read_of(near, *given),
            }
            expected = {
                "the program": gets,
                "without the rule": nearest,
                "its nearest": nearest,
            }
            if other_half is not None:
                other = F16 if half == BF16 else BF16
                found[other] = read(needs, *given, of=of, half=other)
                expected[other] = other_half
            assert found == expected, f"{found} for {expected}"

        test.__name__ = program.__name__
        test.__module__ = program.__module__
        return test

    return of_program
