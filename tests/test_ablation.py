"""Each rule of the plan has a test, and programs that need it: see `ablation.py`."""

from pathlib import Path

import pytest

from jmp_amp.plan.choose.pins import PINS
from tests.ablation import RULES, kept, programs, signature, switched_off

TESTS = Path(__file__).parent / "plan" / "rules"
# Rules that change no plan of the zoo, shapes, idioms and loops: the test that fails
# without them.
ONLY_UNIT_TESTS = {
    "exact": "test_ends: a factor of a solution",
    "f32_result": "test_plan: products and convolutions with an f32 result",
    "form": "test_ends: a covariance that is mapped",
    "grid": "test_f32_whole: one-hot rows times numbers",
    "hands_on_kept": "test_hands_on_kept: a sum that is moved and returned",
    "one_operation": "test_one_operation: a custom_jvp of one line",
    "saturates": "test_plan: a mask in a selection saturates for half readers alone",
    "selected": "test_ends: what stop_gradient alone reads, in a selection",
    "shifted_scores": "test_shifted_scores: a log-softmax of a million scores",
}
# Few programs need these.
CHANGED = ("epilogue", "misfit", "change")


def test_every_rule_has_a_row_and_a_test():
    assert {pin.id for pin in PINS} <= RULES.keys()
    assert sorted(kept()) == sorted(RULES)
    files = {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")}
    assert files == RULES.keys()


def test_every_rule_has_a_program_that_needs_it():
    without = {rule for rule, row in kept().items() if not row["programs"]}
    assert without == ONLY_UNIT_TESTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("rule", CHANGED)
def test_a_rule_that_is_switched_off_changes_its_first_program(rule):
    (program,) = programs(kept()[rule]["programs"][:1])
    before = signature(program.plan())
    with switched_off(rule):
        assert signature(program.plan()) != before
    assert signature(program.plan()) == before
