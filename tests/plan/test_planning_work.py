"""A program twice as long takes twice as much to plan, whatever repeats in it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.dataflow.solver import once
from jmp_amp.plan.dataflow.sources import over_turns, positions
from jmp_amp.plan.planner import plan_program
from jmp_amp.plan.program import binding

PACKAGE = str(Path(amp.__file__).parent)
X = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def lines_run(fn: Callable[[], object]) -> int:
    """Returns how many lines of the package run, those of a loop in each turn."""
    count = 0

    def inside(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return inside

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        return inside if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        fn()
    finally:
        sys.settrace(before)
    return count


def work(fn: Callable[..., Any], policy: str) -> int:
    """Returns the lines that planning runs; the program is traced before."""
    traced = binding.trace(lambda w, x: [fn(w, x)], [X, X])
    plan = (traced, amp.get_policy(policy), [None] * 2, [None])
    plan_program(*plan)  # what is cached once for all programs
    return lines_run(lambda: plan_program(*plan))


def blocks(n):
    def fn(w, x):
        for _ in range(n):
            q, k, v = x @ w, x @ jnp.sin(w), x @ jnp.cos(w)
            x = x + jax.nn.gelu(jax.nn.softmax(q @ k.T) @ v + w) @ w
        return jnp.mean(x)

    return fn


def chain(n):
    def fn(w, x):
        y = jnp.exp(x @ w)
        for _ in range(n):
            y = jnp.sin(y) * 1.5
        return jnp.mean(y)

    return fn


def carries(n):
    def turn(carry, _):
        return [jnp.tanh(each) * 0.5 for each in carry], None

    return lambda w, x: lax.scan(turn, [x @ w] * n, None, length=3)[0][0].mean()


def carries_that_products_read(n):
    def fn(w, x):
        def turn(carry, _):
            return [jnp.tanh(each @ w) for each in carry], None

        return lax.scan(turn, [x] * n, None, length=3)[0][0].mean()

    return fn


def branches(n):
    def fn(w, x):
        y = x @ w
        each = [lambda y, i=i: jnp.tanh(y * (i + 1.0)) @ w for i in range(n)]
        return lax.switch(y[0, 0].astype(jnp.int32), each, y).mean()

    return fn


def results(n):
    @jax.jit
    def many(xs, w):
        return [jnp.tanh(x @ w) for x in xs]

    return lambda w, x: sum(jnp.mean(y) for y in many([x] * n, w))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "fp8"])
@pytest.mark.parametrize(
    "program, size",
    [
        (blocks, 6),
        (chain, 500),
        (carries, 60),
        (carries_that_products_read, 60),
        (branches, 12),
        (results, 60),
    ],
)
def test_planning_is_linear_in_what_repeats(program, size, policy):
    once, twice = (work(program(n), policy) for n in (size, 2 * size))
    assert 1.5 * once < twice < 2.1 * once


def test_a_set_yields_its_members_in_order():
    members = [0, 3, 64, 1000]
    assert list(positions(sum(1 << i for i in members))) == members
    assert list(positions(0)) == []


def test_what_loops_make_their_results_of_is_the_closure_over_turns():
    rng = np.random.default_rng(0)
    for _ in range(20):
        # Operands 2 to 6 are carried, to the first five of six outputs.
        reads = rng.random((6, 9)) < 0.2
        layers = rng.random(9) < 0.2
        closed = reads.copy()
        for _ in range(5):
            closed = closed | (closed[:, 2:7].astype(int) @ closed[:5] > 0)
        read = layers | (layers[2:7].astype(int) @ closed[:5] > 0)

        def bits(row):
            return sum(1 << int(i) for i in np.flatnonzero(row))

        found = over_turns(tuple(map(bits, reads)), bits(layers), range(2, 7))
        assert (list(found[0]), found[1]) == ([*map(bits, closed)], bits(read))


def test_what_is_remembered_of_a_body_is_of_no_later_one():
    class Body:
        def __init__(self, number: int) -> None:
            self.number = number

    class Analysis:
        asked = 0

        @once
        def of(self, body: Body, known: int) -> int:
            self.asked += 1
            return body.number + known

    analysis, body = Analysis(), Body(7)
    # Where a body dies, CPython gives its identity to the next one.
    assert [analysis.of(Body(n), 1) for n in range(99)] == list(range(1, 100))
    assert [analysis.of(body, known) for known in (1, 1, 2)] == [8, 8, 9]
    assert analysis.asked == 99 + 2
    assert Analysis().of(body, 3) == 10
