"""A product of half operands with an f32 result has half derivatives."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import needed, rewritten


@needed(of="dot_general", gets=[True], nearest=[False], read=rewritten)
def test_f32_result(needs, x, w):
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return lax.dot(x, w, preferred_element_type=jnp.float32 if needs else jnp.bfloat16)
