"""Tests that share programs are given to one worker of pytest-xdist."""

import pytest


@pytest.mark.slow
def test_the_name_of_a_test_says_which_tests_it_stays_with(request):
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("only `--dist loadgroup` puts groups into names")
    assert request.node.nodeid.endswith("@test_groups.py")


@pytest.mark.slow
@pytest.mark.xdist_group("a group")
def test_the_group_of_a_mark_stands_in_place_of_the_file(request):
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("only `--dist loadgroup` puts groups into names")
    assert request.node.nodeid.endswith("@a group")
