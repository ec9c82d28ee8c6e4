"""Which programs need a rule of the plan: each rule switched off, all plans made again.

    python -m tests.ablation [--only RULE ...] [--write]

The programs are small models of the zoo, idioms and loops, in bf16 and in f16. A
plan counts if any dtype, read, write, rewrite, block or output changes. The table is
`ablation.json`: `--write` writes it, else it is compared with it. `test_ablation.py`
asks for a program of each rule, and `plan/rules/` has a test of each.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import tests.conftest  # noqa: F401  # JAX as in the tests, before it is imported

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.plan.choose import choices, choosing, demands, half_rules, pins, trade_offs
from jmp_amp.plan.choose.modes import Demands
from jmp_amp.plan.dataflow import constants, ends, recursions, storage
from jmp_amp.plan.dataflow.ends import Ends
from jmp_amp.plan.dataflow.facts import Made
from jmp_amp.plan.dataflow.standing import Criterion
from jmp_amp.plan.dataflow.values import Origin, Trait
from jmp_amp.plan.plan import Plan
from jmp_amp.plan.planner import plan_program
from jmp_amp.plan.rewrites import rewrite_table
from jmp_amp.plan.saved import blocks
from jmp_amp.policies.policy_map import as_policy_map
from jmp_amp.transform.calls import traced_call
from tests.measures import HALF

FILE = Path(__file__).with_name("ablation.json")
KINDS = ("zoo", "idioms", "loops")
NAMED = 3


class Change(NamedTuple):
    """What a name of a module, or of a class, means while a rule is off.

    Attributes:
      owner, name: where it is looked up.
      off: what it means -> what it means while the rule is off.
    """

    owner: Any
    name: str
    off: Callable[[Any], Any]


# All that switches a rule off.
Rule = tuple[Change, ...]


def no(*places: tuple[Any, str], answer: Any = False) -> Rule:
    """A rule that is off if functions, wherever they are looked up, answer no."""
    return tuple(Change(*place, lambda _: lambda *_: answer) for place in places)


def unset(owner: Any, name: str) -> Rule:
    """A rule that is off if a bit is in no set."""
    return (Change(owner, name, lambda _: 0),)


def without_pin(pin: Criterion) -> Rule:
    """A row of `PINS` that is left out."""

    def off(pin_of: Callable[..., Any]) -> Callable[..., Any]:
        def of_others(at: Any) -> Any:
            others = tuple(each for each in pins.PINS if each.id != pin.id)
            found = pin_of(at)
            if found is None or found.id != pin.id:
                return found
            with mock.patch.object(pins, "PINS", others):
                return pin_of(at)

        return of_others

    return (Change(choosing, "pin_of", off),)


def without_half_rule(row: Criterion) -> Rule:
    """A row of `HALF_RULES` that is left out."""

    def off(rows: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each for each in rows if each.id != row.id)

    return (Change(half_rules, "HALF_RULES", off),)


def without_rewrite(row: Callable[..., Any]) -> Rule:
    """A row of the rewrites that is left out."""

    def off(rewrite_of: Callable[..., Any]) -> Callable[..., Any]:
        def of_others(at: Any) -> Any:
            if row(at) is None:
                return rewrite_of(at)
            others = tuple(each for each in rewrite_table._REWRITES if each is not row)
            with mock.patch.object(rewrite_table, "_REWRITES", others):
                return rewrite_of(at)

        return of_others

    return (Change(choosing, "rewrite_of", off),)


def without_trait(trait: Trait) -> Rule:
    """A trait that no equation gives to its results."""

    def off(traits: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [each for each in traits(*args) if each is not trait]

    return (Change(choosing, "_traits", off),)


def without_option(is_it: Callable[[trade_offs.Option, Any], bool]) -> Rule:
    """Options that no decision has; `is_it` tells them, by what the result is too."""

    def off(options: Callable[..., Any]) -> Callable[..., Any]:
        def others(at: Any, made: Any, result: Any, *args: Any) -> Any:
            found = options(at, made, result, *args)
            return [each for each in found if not is_it(each, result)]

        return others

    return (Change(choosing, "options", off),)


def _never_saturates(options: Callable[..., Any]) -> Callable[..., Any]:
    return lambda at, made, *args: options(
        at, dataclasses.replace(made, saturate=False), *args
    )


def _saves_nothing(results: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: tuple(
        known._replace(traits=known.traits - {Trait.SAVED_IN_F32})
        for known in results(*args)
    )


def _is_free_in_half(option: trade_offs.Option, result: Any) -> bool:
    is_half = option.dtype is not None and option.dtype.itemsize == 2
    return is_half and result.origin == Origin.FREE


RULES: dict[str, Rule] = {
    **{pin.id: without_pin(pin) for pin in pins.PINS},
    # Which products of a loop are recursive.
    "small_steps": no((recursions, "_too_small"), answer=0),
    "begun_stream": (
        Change(choices, "_of_streams", lambda _: lambda eqn, starts, cycles: cycles),
    ),
    "companions": (
        Change(recursions, "_with_companions", lambda _: lambda cycles, _: cycles),
    ),
    "first_steps": (
        Change(recursions, "_with_first_steps", lambda _: lambda cycles, *_: cycles),
    ),
    # What is pinned: the ends that lead to a pin, and the facts.
    "ranked": no((ends, "_ranked"), answer=()),
    "selected": (Change(ends, "_selected", lambda _: lambda eqn: eqn.invars),),
    "form": no((ends, "_between"), answer=[]),
    "factor": unset(Ends, "FACTOR"),
    "exact": unset(Ends, "EXACT"),
    "solution_trait": no((choosing, "is_solution")),
    "solver": no((choices, "is_solver")),
    # What is f32 although half would be right.
    "change": no((storage, "_spread"), answer=set()),
    "pinned": without_trait(Trait.PINNED),
    "returned": without_option(lambda o, _: o.readers == Demands.RETURNED),
    "summed_bias": without_option(lambda o, _: o.readers == Demands.F32),
    "hands_on_kept": no((demands, "_hands_on_kept")),
    "misfit": no((constants, "misfit"), answer=None),
    "met": no((constants, "met"), answer=None),
    "slice": (
        Change(choosing, "_is_slice", lambda _: lambda at: False),
        Change(
            choices, "_entering", lambda _: lambda eqn, inputs, operands: tuple(inputs)
        ),
    ),
    # What is half although f32 would be right.
    "multiplies": no((choosing, "_multiplies")),
    **{row.id: without_half_rule(row) for row in half_rules.HALF_RULES},
    "pair": no((trade_offs, "is_pair")),
    "kept": no((blocks, "_rounds")),
    "moves_stream": no((choosing, "moves_stream"), (trade_offs, "moves_stream")),
    "takes_half": no((demands, "_takes_half")),
    "looked_up": without_trait(Trait.LOOKED_UP),
    "saved_in_f32": no((choosing, "is_saved_in_f32")),
    "saved_by_loops": (Change(choices, "_saved", _saves_nothing),),
    "falls": no((choosing, "may_fall")),
    "gates_a_sum": no((trade_offs, "_gates_a_sum")),
    "normalized": unset(Made, "NORMALIZED"),
    "oversized": without_trait(Trait.OVERSIZED),
    "saturates": (Change(choosing, "options", _never_saturates),),
    "moves_parameters": without_option(lambda o, r: _is_free_in_half(o, r) and o.once),
    "adds_parameters": without_option(
        lambda o, r: _is_free_in_half(o, r) and not o.once
    ),
    "stored_in_half": without_option(lambda o, _: o.store is not None),
    # Rewrites.
    **{
        row.__name__: without_rewrite(row)
        for row in (
            *(rewrite_table.f32_result, rewrite_table.pick_from_rows),
            *(rewrite_table.summed_lookup, rewrite_table.shifted_scores),
        )
    },
}


@contextlib.contextmanager
def switched_off(rule: str) -> Iterator[None]:
    """Plans are made without a rule."""
    with contextlib.ExitStack() as stack:
        for owner, name, off in RULES[rule]:
            changed = off(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, changed))
        yield


@contextlib.contextmanager
def noted(rules: Sequence[str]) -> Iterator[set[str]]:
    """Plans are made as ever; gives the rules that may have decided something.

    A function was asked, and answered what it would not with the rule off.
    """
    found: set[str] = set()
    with contextlib.ExitStack() as stack:
        originals: dict[tuple[int, str], Any] = {}
        for rule in rules:
            for owner, name, off in RULES[rule]:
                now = getattr(owner, name)
                original = originals.setdefault((id(owner), name), now)
                if callable(original):
                    beside = _beside(now, off(original), rule, found)
                    stack.enter_context(mock.patch.object(owner, name, beside))
                else:
                    found.add(rule)
        yield found


def _beside(
    asked: Callable[..., Any], off: Callable[..., Any], rule: str, found: set[str]
) -> Callable[..., Any]:
    def answer(*args: Any) -> Any:
        result = asked(*args)
        if isinstance(result, types.GeneratorType):
            result = list(result)
        if rule not in found:
            other = off(*args)
            is_list = isinstance(other, types.GeneratorType)
            if (list(other) if is_list else other) != result:
                found.add(rule)
        return result

    return answer


class Program(NamedTuple):
    """A program of the table.

    Attributes:
      kind: of which table it is.
      name: its name there, and the half dtype.
      plan: returns its plan; it is traced once.
    """

    kind: str
    name: str
    plan: Callable[[], Plan]


def programs(names: Sequence[str] = ()) -> Iterator[Program]:
    """Yields the programs of these names, or all."""
    # Who switches a rule off needs no models.
    from tests import zoo
    from tests.idioms.table import IDIOMS
    from tests.loops.table import LOOPS

    for model in zoo.MODELS:
        case = zoo.CASES[model, "small"]
        yield from _in_half("zoo", model, case.loss, case.abstract, names)
    loops = {name: loop.idiom for name, loop in LOOPS.items()}
    for kind, table in (("idioms", IDIOMS), ("loops", loops)):
        for name, idiom in table.items():

            def args(idiom: Any = idiom) -> Any:
                rng = np.random.default_rng(0)
                return jax.tree.map(jnp.asarray, (idiom.params(rng), idiom.inputs(rng)))

            yield from _in_half(kind, name, idiom.fn, args, names)


def _in_half(
    kind: str,
    name: str,
    fn: Callable[..., Any],
    args: Callable[[], Any],
    names: Sequence[str],
) -> Iterator[Program]:
    for dtype in HALF:
        full = f"{name}, {dtype}"
        if not names or full in names:
            policies = as_policy_map(f"mixed_{dtype}", "ablation({})")
            with traced_call(fn, policies, args(), {}, "ablation") as traced:
                yield Program(kind, full, _planner(traced, policies.default))


def _planner(traced: Any, policy: Any) -> Callable[[], Plan]:
    return lambda: plan_program(traced.jaxpr, policy, traced.stored, traced.states)


def signature(plan: Plan) -> object:
    """Returns all that counts of a plan; those of two plans of one trace compare."""
    return (
        [(e.dtype, e.reads, e.writes, e.rewrite, e.saturate) for e in plan.equations],
        [[signature(body) for body in e.bodies] for e in plan.equations],
        plan.blocks,
        plan.outputs,
    )


def measured(rules: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns a row for each rule: how many plans change, and the first of them."""
    table: dict[str, dict[str, Any]] = {
        rule: {**dict.fromkeys(KINDS, 0), "programs": []} for rule in sorted(rules)
    }
    for program in programs():
        with noted(rules) as asked:
            before = signature(program.plan())
        for rule in sorted(asked):
            with switched_off(rule):
                after = signature(program.plan())
            if after != before:
                row = table[rule]
                row[program.kind] += 1
                row["programs"] = [*row["programs"], program.name][:NAMED]
    return table


def kept() -> dict[str, dict[str, Any]]:
    """Returns the table that is committed."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def text(table: dict[str, dict[str, Any]]) -> str:
    """Returns a table as aligned text."""
    rows = [("rule", *KINDS, "programs")]
    rows += [
        (rule, *(str(row[kind]) for kind in KINDS), "; ".join(row["programs"]))
        for rule, row in table.items()
    ]
    return "\n".join(
        f"{rule:18}" + "".join(f"{n:>8}" for n in numbers) + f"  {named}".rstrip()
        for rule, *numbers, named in rows
    )


def written(table: dict[str, dict[str, Any]]) -> str:
    """Returns a table as JSON, a line for each rule."""
    lines = (f"{json.dumps(r)}: {json.dumps(table[r])}" for r in sorted(table))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(RULES), metavar="RULE")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    table = measured(options.only or list(RULES))
    print(text(table))
    if options.write:
        others = {r: row for r, row in kept().items() if r in RULES}
        FILE.write_text(written((others if options.only else {}) | table))
        return
    moved = [rule for rule, row in table.items() if kept().get(rule) != row]
    if moved:
        sys.exit(f"{FILE.name} has other rows of {', '.join(moved)}: see --write")


if __name__ == "__main__":
    main()
