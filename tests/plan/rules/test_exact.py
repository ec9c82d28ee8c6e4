"""The other factor of a solution is f32, although a layer looks the same."""

from jax.lax.linalg import triangular_solve

from tests.plan.rules import BF16, F32, W, planned


def test_exact():
    def gain(x, w, a):
        return triangular_solve(a, a, left_side=True) @ (x @ w)

    def nearest(x, w, a):
        return a @ (x @ w)

    args = (W, W, W)
    assert planned(gain, *args, of="dot_general") == [F32, F32]
    assert planned(gain, *args, of="dot_general", without="exact")[0] == BF16
    assert planned(nearest, *args, of="dot_general")[0] == BF16
