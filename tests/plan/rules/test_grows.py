"""What more edges than nodes look up for f32 readers is written in half."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import BF16, F32, W, X, needed, planned


def test_a_lookup_that_does_not_grow_rises_as_a_slice_does():
    """One reader or two, and the sum before it is rounded by neither."""
    places = np.arange(8)[::-1].copy()
    lookups = {
        "one": lambda h: h[places],
        "two": lambda h: jnp.concatenate([h[places[:4]], h[places[4:]]]),
        "slices": lambda h: jnp.concatenate([h[4:], h[:4]]),
    }
    for found in lookups.values():
        fn = lambda x, w: jnp.exp(found(x @ w + 10.0)) @ w  # noqa: B023, E731
        assert planned(fn, X, W, of="add") == [F32]


@needed(of="gather", gets=[BF16], nearest=[F32])
def test_grows(needs, x, w):
    nodes = x @ w
    edges = np.arange(32) % 8 if needs else np.arange(8)
    return jnp.exp(nodes[edges]), jnp.exp(nodes)
