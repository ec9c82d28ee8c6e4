"""The gradient of a row that is looked up 16 times is summed in f32."""

import numpy as np

from tests.plan.rules import W, X, rewritten


def looked_up(count):
    return lambda x, w: (x @ w)[np.arange(count) % 8] @ w


def test_summed_lookup():
    often, nearest = looked_up(16 * 8), looked_up(16 * 8 - 1)
    assert rewritten(often, X, W, of="gather") == [True]
    assert rewritten(often, X, W, of="gather", without="summed_lookup") == [False]
    assert rewritten(nearest, X, W, of="gather") == [False]
