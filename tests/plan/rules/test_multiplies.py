"""A product of numbers that adds nothing up is a multiplication: f32."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import BF16, F32, array, needed


@needed(array(1, 16), array(8, 1), of="dot_general", gets=[F32], nearest=[BF16])
def test_multiplies(needs, frequencies, w):
    numbers = np.arange(8, dtype=np.float32)[:, None]
    # Else it is a layer of one feature.
    return jnp.sin((numbers if needs else w) @ frequencies)
