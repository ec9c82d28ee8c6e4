"""Arithmetic on a solution of linear algebra is one too."""

import jax.numpy as jnp
from jax.lax.linalg import triangular_solve

from tests.plan.rules import BF16, F32, W, planned


def test_solution_trait():
    def linear(g, a, b):
        x = triangular_solve(a, b, left_side=True)
        return (2.0 * x) @ g

    def nearest(g, a, b):
        x = triangular_solve(a, b, left_side=True)
        return jnp.tanh(x) @ g

    args = (W, W, W)
    assert planned(linear, *args, of="dot_general") == [F32]
    found = planned(linear, *args, of="dot_general", without="solution_trait")
    assert found == [BF16]
    assert planned(nearest, *args, of="dot_general") == [BF16]
