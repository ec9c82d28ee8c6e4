"""The minimum cut: as small as any, and what is needed is kept or made of what is."""

import itertools
import random

import pytest

from jmp_amp.plan.saved.cut import minimum_cut


def graph(seed, count):
    """Returns sizes, edges, given and needed values of a random program."""
    rng = random.Random(seed)
    edges = [
        (i, j)
        for j in range(1, count)
        for i in rng.sample(range(j), min(j, rng.randint(1, 3)))
    ]
    sizes = [rng.choice((0, 1, 2, 4, 8)) for _ in range(count)]
    given = [0, *(i for i in range(1, count) if rng.random() < 0.2)]
    needed = [i for i in range(count) if rng.random() < 0.4]
    return sizes, edges, given, needed


def is_enough(kept, edges, given, needed, count):
    """Whether all that is needed is kept, or made of what is."""
    there = [False] * count
    for i in range(count):
        made_of = [a for a, b in edges if b == i]
        there[i] = i in kept or (i not in given and all(there[a] for a in made_of))
    return all(there[i] for i in needed)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("seed", range(40))
def test_a_cut_is_enough_and_no_other_is_smaller(seed):
    count = 9
    sizes, edges, given, needed = graph(seed, count)
    cut = minimum_cut(sizes, edges, given, needed)
    kept = {i for i in range(count) if cut.kept[i]}
    assert is_enough(kept, edges, given, needed, count)
    smallest = min(
        sum(sizes[i] for i in some)
        for n in range(count + 1)
        for some in itertools.combinations(range(count), n)
        if is_enough(set(some), edges, given, needed, count)
    )
    assert sum(sizes[i] for i in kept) == smallest
    again = {i for i in range(count) if cut.made_again[i]}
    assert not again & kept and not again & set(given)


def test_of_two_cuts_of_one_size_it_is_the_one_nearest_to_the_needs():
    # 0 is given; 1, 2 and 3 are made of it in a row, and 3 is needed.
    cut = minimum_cut([4, 4, 4, 4], [(0, 1), (1, 2), (2, 3)], [0], [3])
    assert list(cut.kept) == [False, False, False, True]
    assert not cut.made_again.any()
    # A smaller one before it is cheaper: what follows is made again.
    cut = minimum_cut([4, 2, 4, 4], [(0, 1), (1, 2), (2, 3)], [0], [3])
    assert list(cut.kept) == [False, True, False, False]
    assert list(cut.made_again) == [False, False, True, True]


def test_nothing_is_kept_if_nothing_is_needed_or_given():
    assert not minimum_cut([4, 4], [(0, 1)], [0], []).kept.any()
    cut = minimum_cut([4, 4], [(0, 1)], [], [1])
    assert not cut.kept.any() and cut.made_again.all()


def test_sizes_of_terabytes_do_not_overflow():
    sizes = [2**42, 2**41, 2**42]
    cut = minimum_cut(sizes, [(0, 1), (1, 2)], [0], [2])
    assert list(cut.kept) == [False, True, False]
