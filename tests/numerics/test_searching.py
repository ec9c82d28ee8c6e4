"""The search of `tune`, over errors that are made up: nothing is compiled.

Every group makes an error of its own, and their squares add up. What the flagged
program expects may differ from what the real one measures.
"""

import math

import jmp_amp as amp
from jmp_amp.numerics.tune.groups import Group, Member
from jmp_amp.numerics.tune.moves import menu_of
from jmp_amp.numerics.tune.searching import Search
from jmp_amp.numerics.tune.tuning import Step
from jmp_amp.policies.patterns import matches_path

F16 = amp.get_policy("mixed_float16")
F32 = amp.get_policy("float32")


def in_half(group, policies):
    """Whether a group runs in half under a map: entries reach the modules inside."""
    if group.name in policies.default.full:
        return False
    policy = policies.default
    names = group.path.split("/") if group.path else []
    for end in range(1, len(names) + 1):
        for pattern, entry in policies.entries:
            if matches_path("/".join(names[:end]), pattern):
                policy = entry
    return policy == F16


def searched(errors, bound, real=None, known=()):
    """The map that is found for errors of groups, and the search.

    `real` are the errors of the real program, if they differ; `known` the paths of
    modules that have nothing in half precision.
    """
    groups = [Group(*key.split(":")) for key in errors]
    expected_of = dict(zip(groups, errors.values(), strict=True))
    real_of = expected_of if real is None else dict(zip(groups, real, strict=True))
    members = [Member(group, str(i)) for i, group in enumerate(groups)]
    paths = {group.path for group in groups if group.path} | set(known)
    menu = menu_of(amp.PolicyMap(F16), (F32,), members, paths, {})

    def total(of, halves):
        pairs = zip(groups, halves, strict=True)
        return math.hypot(*(of[group] for group, is_half in pairs if is_half))

    def by_group(level_of):
        # What a module that calls no other computes is one group.
        return [level_of.get(g, level_of.get(Group(g.path))) == 0 for g in groups]

    def expected(levels):
        level_of = dict(zip(menu.groups, levels, strict=True))
        return total(expected_of, by_group(level_of))

    def measured(policies):
        return Step("", total(real_of, [in_half(g, policies) for g in groups]), 1.0)

    alone = {
        menu_group: math.hypot(
            *(expected_of[g] for g in groups if menu_group in (g, Group(g.path)))
        )
        for menu_group in menu.groups
    }
    search = Search(menu, bound, expected, measured, lambda: len(search.steps), alone)
    return search.found(), search


def f32(*patterns, names=()):
    default = F16.with_full(*names) if names else F16
    return amp.PolicyMap(default, dict.fromkeys(patterns, F32))


def test_siblings_share_a_glob_only_if_all_of_them_need_it():
    all_of_them = {"block_0/a:dot": 1.0, "block_1/a:dot": 1.0}
    assert searched(all_of_them, 0.5)[0] == f32("block_*/a")
    fine = {"block_2/a:dot": 0.1}
    both = f32("block_0/a", "block_1/a")
    assert searched(all_of_them | fine, 0.5)[0] == both
    # A module without anything in half precision is matched by a glob all the same.
    assert searched(all_of_them, 0.5, known=["block_2/a"])[0] == both


def test_what_the_real_program_does_not_need_has_no_entry():
    found, search = searched({"a:dot": 1.0, "b:dot": 1.0}, 0.5, real=[0.0, 1.0])
    assert found == f32("b") and search.is_minimal


def test_the_real_program_meets_the_bound_whatever_is_expected():
    errors = {"a:dot": 1.0, "b:dot": 0.2, "c:dot": 0.1}
    found, search = searched(errors, 0.5, real=[1.0, 0.6, 0.1])
    assert found == f32("a", "b") and search.steps[found].error <= 0.5
    # The flagged program expects that nothing is needed.
    found, search = searched({"a:dot": 0.1, "b:dot": 0.1}, 0.5, real=[1.0, 0.1])
    assert found == f32("a")


def test_a_parent_gets_an_entry_only_for_a_fault_of_its_own():
    errors = {"m/block:add": 1.0, "m/block/a:dot": 0.1, "m/other/a:dot": 0.1}
    assert searched(errors, 0.5)[0] == f32("m/block")
    # Two that are not at fault alone get the name of their operation.
    errors = {f"m/{i}:add": 0.4 for i in "xy"} | {f"m/{i}/a:dot": 0.1 for i in "xy"}
    assert searched(errors, 0.5)[0] == f32(names=["add"])


def test_without_modules_operations_are_named():
    assert searched({":add": 1.0, ":sub": 0.1}, 0.5)[0] == f32(names=["add"])
