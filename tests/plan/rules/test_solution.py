"""The solution of a linear system times an argument is f32: terms cancel."""

from jax import lax
from jax.lax.linalg import triangular_solve

from tests.plan.rules import BF16, F32, W, needed, planned


@needed(W, W, W, of="dot_general", gets=[F32], nearest=[BF16])
def test_solution(needs, g, a, b):
    return (triangular_solve(a, b, left_side=True) if needs else a * b) @ g


def test_one_that_is_a_result_of_either_branch():
    def either(branches):
        return lambda g, a, b: lax.cond(g[0, 0] > 0, *branches, a, b) @ g

    def solved(a, b):
        return triangular_solve(a, b, left_side=True)

    branches = (solved, lambda a, b: a * b)
    for each in (branches, branches[::-1]):
        assert planned(either(each), W, W, W, of="dot_general") == [F32]
