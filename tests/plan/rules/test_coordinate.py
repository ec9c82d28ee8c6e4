"""Parts of a value that are subtracted from each other are those of a coordinate."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import BF16, F32, W, X, planned

EDGES = np.arange(32) % 8


def test_coordinate_of_an_argument():
    def relative(x, w, at):
        place = at + x @ w
        return jnp.tanh((place[:, None] - place[None]) @ w)

    def nearest(x, w, at):
        place = at + x @ w
        return jnp.tanh((place[:, None] + place[None]) @ w)

    assert planned(relative, X, W, X, of="add") == [F32]
    assert planned(relative, X, W, X, of="add", without="coordinate") == [BF16]
    assert planned(nearest, X, W, X, of="add")[0] == BF16


def test_coordinate():
    def between(x, w):
        p = x @ w
        return jnp.exp(p[EDGES] - p[EDGES[::-1]])

    def nearest(x, w):
        p = x @ w
        return jnp.exp(p[EDGES] + p[EDGES[::-1]])

    assert planned(between, X, W, of="gather") == [F32, F32]
    found = planned(between, X, W, of="gather", without="coordinate")
    assert found == [BF16, BF16]
    assert planned(nearest, X, W, of="gather") == [BF16, BF16]
