"""A lookup of one element in each row has no scatter for derivative."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import needed, rewritten


@needed(of="gather", gets=[True], nearest=[False], read=rewritten)
def test_pick_from_rows(needs, x, w):
    places = np.zeros((8, 1 if needs else 2), np.int32)
    return jnp.take_along_axis(x @ w, places, axis=1)
