"""Rows of a table are added in half, as a stream begins; a parameter in f32."""

import numpy as np

from tests.plan.rules import BF16, F32, W, X, needed

BUCKETS = np.arange(8) % 3


@needed(X, W, W, of="add", gets=[BF16], nearest=[F32])
def test_looked_up(needs, x, w, table):
    rows = table[BUCKETS] if needs else table[:8]
    return (x @ w + rows) @ w
