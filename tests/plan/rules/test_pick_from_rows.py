"""A lookup of one element in each row has no scatter for derivative."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import W, X, rewritten


def picked(count):
    places = np.zeros((8, count), np.int32)
    return lambda x, w: jnp.take_along_axis(x @ w, places, axis=1)


def test_pick_from_rows():
    one, two = picked(1), picked(2)
    assert rewritten(one, X, W, of="gather") == [True]
    assert rewritten(one, X, W, of="gather", without="pick_from_rows") == [False]
    assert rewritten(two, X, W, of="gather") == [False]
