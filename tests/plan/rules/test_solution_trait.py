"""Arithmetic on a solution of linear algebra is one too."""

import jax.numpy as jnp
from jax.lax.linalg import triangular_solve

from tests.plan.rules import BF16, F32, W, needed


@needed(W, W, W, of="dot_general", gets=[F32], nearest=[BF16])
def test_solution_trait(needs, g, a, b):
    x = triangular_solve(a, b, left_side=True)
    return (2.0 * x if needs else jnp.tanh(x)) @ g
