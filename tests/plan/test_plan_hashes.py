"""Every plan of idioms, loops, zoo and shapes is the one whose hash is kept.

Not that it is right: that it has not moved where nobody meant to move it. A hash says
nothing of the prose of reasons. `plan_hashes.json` has a line for each program, and the
versions that it was written with: with others JAX may trace other equations, and
nothing is compared.

    PLAN_HASHES=write python -m pytest -m "slow or not slow" \
        tests/plan/test_plan_hashes.py

writes it anew; the lines that `git diff` shows are the programs that have moved.
"""

import functools
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jmp_amp.plan.plan import Plan
from jmp_amp.policies.policy_map import as_policy_map
from jmp_amp.transform.planned import planned_call
from tests import kept, zoo
from tests.idioms.table import IDIOMS
from tests.measures import HALF
from tests.plan import once

FILE = Path(__file__).parents[1] / "plan_hashes.json"
VERSIONS = {name: importlib.metadata.version(name) for name in ("jax", "flax")}
WRITE = (
    'PLAN_HASHES=write python -m pytest -m "slow or not slow" '
    "tests/plan/test_plan_hashes.py"
)


def plan_of_call(fn: Callable[..., Any], args: Any, policy: str) -> Plan:
    policies = as_policy_map(policy, "plan_hashes({})")
    with planned_call(fn, policies, args, {}, "plan_hashes", None) as call:
        return call.plan


def of_case(case: zoo.case.Case, dtype: str) -> Plan:
    return plan_of_call(case.loss, case.abstract(), f"mixed_{dtype}")


# By group, and by the name of a program: half dtype -> its plan. Models are traced in
# the process of their other tests.
PROGRAMS: dict[str, dict[str, Callable[[str], Plan]]] = {
    "idioms": {f"idioms: {n}": functools.partial(once.planned, n) for n in IDIOMS},
    "loops": {n: functools.partial(once.planned, n) for n in once.LOOP_NAMES.values()},
    **{
        model: {
            f"{room}: {model} {name}": functools.partial(of_case, case)
            for room, cases in (("zoo", zoo.CASES), ("shapes", zoo.SHAPES))
            for (of_model, name), case in cases.items()
            if of_model == model
        }
        for model in zoo.MODELS
    },
}


def rows(plan: Plan, path: tuple[int, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """What a plan says of each equation, and of the outputs of each body."""
    for planned, eqn in zip(plan.equations, plan.body.jaxpr.eqns, strict=True):
        here = (*path, planned.index)
        yield (
            *(here, eqn.primitive.name, str(planned.dtype)),
            *(list(map(str, planned.reads)), list(map(str, planned.writes))),
            planned.rewrite is not None,
        )
        for number, body in enumerate(planned.bodies):
            yield from rows(body, (*here, number))
    yield path, list(map(str, plan.outputs))
    for block in plan.blocks:
        kept = sum(map(len, block.kept.values()))
        yield (path, block.start, block.stop, kept, sorted(block.recomputed))


def digest(plan: Plan) -> str:
    return kept.digest("\n".join(map(str, rows(plan))))


def written() -> dict[str, Any]:
    if not FILE.exists():
        return kept.NOTHING
    return json.loads(FILE.read_text())


def is_writing() -> bool:
    mode = os.environ.get("PLAN_HASHES", "")
    assert mode in ("", "write"), f"PLAN_HASHES={mode}: write, or nothing"
    return mode == "write"


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    [
        *(pytest.param(each, marks=once.one_process) for each in ("idioms", "loops")),
        *(pytest.param(m, marks=pytest.mark.xdist_group(m)) for m in zoo.MODELS),
    ],
)
def test_plans_are_those_whose_hashes_are_kept(group):
    if not is_writing() and written()["versions"] != VERSIONS:
        pytest.skip(f"the hashes were written with {written()['versions']}")
    moved, programs = [], written()["programs"]
    for name, plan in PROGRAMS[group].items():
        found = {dtype: digest(plan(dtype)) for dtype in HALF}
        if is_writing():
            kept.keep(name, found, VERSIONS, FILE)
        elif programs.get(name) != found:
            moved.append(name)
    assert not moved, f"plans moved: {', '.join(moved)}. If they were meant to: {WRITE}"


def test_hashes_are_kept_of_the_programs_that_there_are():
    names = {name for programs in PROGRAMS.values() for name in programs}
    assert is_writing() or written()["programs"].keys() == names


@pytest.mark.breadth(1)
@pytest.mark.parametrize("room", ["zoo", "idioms", "loops"])
def test_hash_tells_plans_apart_and_is_the_same_for_each_trace(room):
    if is_model := room == "zoo":
        case = zoo.CASES["mlp", "small"]
        fn, args = case.loss, case.abstract()
    else:
        name = min(IDIOMS if room == "idioms" else once.LOOP_NAMES.values())
        fn, args = once.drawn(name)
    policies = ["mixed_bfloat16", "mixed_float16", "float32"]
    hashes = [digest(plan_of_call(fn, args, policy)) for policy in policies]
    assert len(set(hashes)) == len(policies)

    def same(*args):
        return fn(*args)

    again = [digest(plan_of_call(same, args, policy)) for policy in policies]
    assert again == hashes
    # Of a program without modules it is that of the jaxpr alone.
    if not is_model:
        plans = [once.planned(name, dtype) for dtype in HALF]
        assert list(map(digest, plans)) == hashes[:2]
