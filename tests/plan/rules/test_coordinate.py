"""Parts of a value that are subtracted from each other are those of a coordinate."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import BF16, F32, W, X, needed, planned

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


@needed(of="gather", gets=[F32, F32], nearest=[BF16, BF16])
def test_coordinate(needs, x, w):
    p = x @ w
    first, second = p[EDGES], p[EDGES[::-1]]
    return jnp.exp(first - second if needs else first + second)
