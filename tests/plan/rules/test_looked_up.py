"""Rows of a table are added to scores in half; a parameter in f32."""

import jax
import numpy as np

from tests.plan.rules import BF16, F32, W, X, planned

BUCKETS = np.arange(8) % 3


def test_looked_up():
    def biased(x, w, table):
        return jax.nn.softmax(x @ w + table[BUCKETS]) @ w

    def nearest(x, w, table):
        return jax.nn.softmax(x @ w + table[:8]) @ w

    assert planned(biased, X, W, W, of="add")[-1] == BF16
    assert planned(biased, X, W, W, of="add", without="looked_up")[-1] == F32
    assert planned(nearest, X, W, W, of="add")[-1] == F32
