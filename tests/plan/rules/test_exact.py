"""The other factor of a solution is f32, although a layer looks the same."""

from jax.lax.linalg import triangular_solve

from tests.plan.rules import BF16, F32, W, needed


@needed(W, W, W, of="dot_general", gets=[F32, F32], nearest=[BF16, BF16])
def test_exact(needs, x, w, a):
    return (triangular_solve(a, a, left_side=True) if needs else a) @ (x @ w)
