"""The gradient of a row that is looked up 16 times is summed in f32."""

import numpy as np

from tests.plan.rules import needed, rewritten


@needed(of="gather", gets=[True], nearest=[False], read=rewritten)
def test_summed_lookup(needs, x, w):
    count = 16 * 8 if needs else 16 * 8 - 1
    return (x @ w)[np.arange(count) % 8] @ w
