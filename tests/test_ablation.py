"""Each rule of the plan has a test, and programs that need it: see `ablation.py`."""

import json
from pathlib import Path

import pytest

from jmp_amp.plan.choose.pins import PINS
from tests.ablation import RULES, kept, programs, signature, switched_off
from tests.ablation_on_h100 import TRADE_OFFS

COMPILED = Path(__file__).with_name("ablation_on_h100.json")
# Trade-offs without which no large model of the zoo needs 1 % more memory: what they
# are for.
NO_MEMORY = {
    "grows": "edges of a graph that look up nodes; a shape of gcn",
    "misfit": "the largest constants, which half does not hold",
    "moves_parameters": "casts before moves, where the compiler does not exchange them",
    "stored_in_half": "what a loop stacks or a sort hands on: programs beside the zoo",
    "worth_f32": "digits: what only f32 operations read is not rounded",
}

TESTS = Path(__file__).parent / "plan" / "rules"
# Rules that change no plan of the zoo, shapes, idioms and loops: the test that fails
# without them.
ONLY_UNIT_TESTS = {
    "derivative": "test_derivative: a kernel of distances, with its gradient inside",
    "exact": "test_ends: a factor of a solution",
    "f32_result": "test_plan: products and convolutions with an f32 result",
    "form": "test_ends: a covariance that is mapped",
    "saturates": "test_plan: a mask in a selection saturates for half readers alone",
    "selected": "test_ends: what stop_gradient alone reads, in a selection",
    "shifted_scores": "test_shifted_scores: a log-softmax of a million scores",
    "steep": "test_steep: odds of a sigmoid, the sine of a cosine",
    "spreads_function": "test_custom_jvp_rules: edges look up functions in half",
}
# Few programs need these.
CHANGED = ("grows", "angle", "stopped")


def test_every_rule_has_a_row_and_a_test():
    assert {pin.id for pin in PINS} <= RULES.keys()
    assert sorted(kept()) == sorted(RULES)
    files = {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")}
    assert files == RULES.keys()


def test_every_rule_has_a_program_that_needs_it():
    without = {rule for rule, row in kept().items() if not row["programs"]}
    assert without == ONLY_UNIT_TESTS.keys()


def test_trade_offs_that_buy_no_memory_are_known():
    models = json.loads(COMPILED.read_text())["models"].values()
    most = {
        rule: max(
            rows[rule]["temp"] / rows[""]["temp"] for rows in models if rule in rows
        )
        for rule in TRADE_OFFS
    }
    assert {rule for rule, ratio in most.items() if ratio < 1.01} == NO_MEMORY.keys()


@pytest.mark.slow
@pytest.mark.parametrize("rule", CHANGED)
def test_a_rule_that_is_switched_off_changes_its_first_program(rule):
    (program,) = programs(kept()[rule]["programs"][:1])
    before = signature(program.plan())
    with switched_off(rule):
        assert signature(program.plan()) != before
    assert signature(program.plan()) == before
