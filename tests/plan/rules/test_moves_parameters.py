"""A parameter is cast before it is moved, if one product reads it."""

from tests.plan.rules import BF16, F32, needed


@needed(of="rev", gets=[BF16], nearest=[F32])
def test_moves_parameters(needs, x, w):
    moved = w[::-1]
    # Two gradients are summed in f32.
    return x @ moved if needs else (x @ moved, (2 * x) @ moved)
