"""Python maps memory for a deep call: a trace must not pay at each operation for it."""

import jax.numpy as jnp
import pytest

from jmp_amp.plan.program import binding

resource = pytest.importorskip("resource")
CALLS = 2000
# The frames of `below` fill 16 KiB, the size of the chunks that Python maps.
DEPTHS = range(140)


def below(depth, fn):
    return fn() if depth == 0 else below(depth - 1, fn)


def leaf(x):
    return max(x, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)


def faults_of_calls():
    """Returns how often memory is mapped by many calls from here."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(CALLS):
        leaf(number)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def traced(fn):
    """Returns what a function returns while it is traced."""
    found = []
    binding.trace(lambda: found.append(fn()), ())
    return found[0]


@pytest.mark.parametrize("traces", [1, 2], ids=["a trace", "a trace in a trace"])
def test_a_trace_maps_no_memory_at_each_call_however_deep_it_is(traces):
    def faults(depth):
        def inside():
            return below(depth, faults_of_calls)

        return traced(inside) if traces == 1 else traced(lambda: traced(inside))

    assert max(map(faults, DEPTHS)) < CALLS / 10


def test_a_function_with_room_is_the_same_function():
    assert binding.trace.__doc__.startswith("Returns the closed jaxpr")
    assert binding.trace(lambda x, *, n=2: x * n, (jnp.ones(3),)).out_avals[0].size == 3
