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

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_amp.plan.plan import Plan
from jmp_amp.policies.policy_map import as_policy_map
from jmp_amp.transform.planned import planned_call
from tests import kept, zoo
from tests.idioms.row import Idiom
from tests.idioms.table import IDIOMS
from tests.loops.table import LOOPS
from tests.measures import HALF

FILE = Path(__file__).parents[1] / "plan_hashes.json"
VERSIONS = {name: importlib.metadata.version(name) for name in ("jax", "flax")}
WRITE = (
    'PLAN_HASHES=write python -m pytest -m "slow or not slow" '
    "tests/plan/test_plan_hashes.py"
)
Args = tuple[Any, ...]


def of_idiom(idiom: Idiom) -> tuple[Callable[..., Any], Args]:
    rng = np.random.default_rng(0)
    args = (idiom.params(rng), idiom.inputs(rng))
    return idiom.fn, jax.tree.map(jnp.asarray, args)


def of_case(case: zoo.case.Case) -> tuple[Callable[..., Any], Args]:
    return case.loss, case.abstract()


Maker = Callable[[], tuple[Callable[..., Any], Args]]
PROGRAMS: dict[str, dict[str, Maker]] = {
    "idioms": {name: functools.partial(of_idiom, i) for name, i in IDIOMS.items()},
    "loops": {n: functools.partial(of_idiom, each.idiom) for n, each in LOOPS.items()},
    **{
        room: {" ".join(name): functools.partial(of_case, c) for name, c in all.items()}
        for room, all in (("zoo", zoo.CASES), ("shapes", zoo.SHAPES))
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


def digest(fn: Callable[..., Any], args: Args, policy: str) -> str:
    policies = as_policy_map(policy, "plan_hashes({})")
    with planned_call(fn, policies, args, {}, "plan_hashes", None) as call:
        return kept.digest("\n".join(map(str, rows(call.plan))))


def written() -> dict[str, Any]:
    if not FILE.exists():
        return kept.NOTHING
    return json.loads(FILE.read_text())


def is_writing() -> bool:
    mode = os.environ.get("PLAN_HASHES", "")
    assert mode in ("", "write"), f"PLAN_HASHES={mode}: write, or nothing"
    return mode == "write"


@pytest.mark.slow
@pytest.mark.parametrize("room", PROGRAMS)
def test_plans_are_those_whose_hashes_are_kept(room):
    if not is_writing() and written()["versions"] != VERSIONS:
        pytest.skip(f"the hashes were written with {written()['versions']}")
    moved = []
    for name, program in PROGRAMS[room].items():
        fn, args = program()
        found = {dtype: digest(fn, args, f"mixed_{dtype}") for dtype in HALF}
        if is_writing():
            kept.keep(f"{room}: {name}", found, VERSIONS, FILE)
        elif written()["programs"].get(f"{room}: {name}") != found:
            moved.append(name)
    assert not moved, f"plans moved: {', '.join(moved)}. If they were meant to: {WRITE}"


def test_hashes_are_kept_of_the_programs_that_there_are():
    names = {f"{room}: {name}" for room, all in PROGRAMS.items() for name in all}
    assert is_writing() or written()["programs"].keys() == names


@pytest.mark.parametrize("room", PROGRAMS)
def test_hash_tells_plans_apart_and_is_the_same_for_each_trace(room):
    fn, args = PROGRAMS[room][min(PROGRAMS[room])]()
    policies = ["mixed_bfloat16", "mixed_float16", "float32"]
    hashes = [digest(fn, args, policy) for policy in policies]
    assert len(set(hashes)) == len(policies)

    def same(*args):
        return fn(*args)

    assert [digest(same, args, policy) for policy in policies] == hashes
