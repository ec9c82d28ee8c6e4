"""What the backward pass of a loop keeps is half, if it is one sum of half values."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, X, array, needed, planned


@needed(X, array(3, 16, 16), of="add", gets=[BF16, BF16], nearest=[F32, BF16])
def test_kept(needs, x, stack):
    def turn(h, w):
        return h + jnp.exp(h @ w + h @ w.T) @ w, None

    h = x @ stack[0]
    h = lax.scan(turn, h, stack)[0] if needs else turn(h, stack[1])[0]
    return h @ stack[0]


def test_so_is_what_an_lstm_makes_its_gates_of():
    # Else the part with the bias would be in f32 for their sake.
    def fn(xs, cell, w, u, b):
        def turn(carry, x):
            cell, h = carry
            parts = (jnp.split(each, 4, axis=-1) for each in (x @ w, h @ u + b))
            *gates, new = map(jnp.add, *parts)
            i, f, o = map(jax.nn.sigmoid, gates)
            cell = f * cell + i * jnp.tanh(new)
            return (cell, o * jnp.tanh(cell)), None

        return lax.scan(turn, (cell, cell), xs)[0][1] @ u

    shapes = (5, 8, 16), (8, 16), (16, 64), (16, 64), (1, 64)
    biased, *_ = planned(fn, *(array(*each) for each in shapes), of="add")
    assert biased == BF16
