"""A product with a grid that counts further than half precision does is f32."""

import numpy as np

from tests.plan.rules import BF16, F32, needed


@needed(of="dot_general", gets=[F32, BF16], nearest=[BF16, BF16])
def test_grid(needs, x, w):
    # From 256 on every other number is a bfloat16.
    end = 511 if needs else 255
    return x @ np.linspace(0, end, 256, dtype=np.float32).reshape(16, 16) @ w
