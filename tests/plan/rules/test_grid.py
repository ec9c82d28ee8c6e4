"""A grid that counts further than half precision does is added in f32."""

import numpy as np

from tests.plan.rules import BF16, F32, needed


@needed(of="add", gets=[F32], nearest=[BF16])
def test_grid(needs, x, w):
    # From 256 on every other number is a bfloat16.
    end = 511 if needs else 255
    return (np.linspace(0, end, 8, dtype=np.float32)[:, None] + x @ w) @ w
