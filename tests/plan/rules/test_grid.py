"""A grid that counts further than half precision does is added in f32."""

import numpy as np

from tests.plan.rules import BF16, F32, W, X, planned


def counted(end):
    grid = np.linspace(0, end, 8, dtype=np.float32)[:, None]
    return lambda x, w: (grid + x @ w) @ w


def test_grid():
    # From 256 on every other number is a bfloat16.
    assert planned(counted(511), X, W, of="add") == [F32]
    assert planned(counted(511), X, W, of="add", without="grid") == [BF16]
    assert planned(counted(255), X, W, of="add") == [BF16]
