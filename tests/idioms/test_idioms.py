"""Every idiom: a policy is at most twice as wrong as its products alone, and 4 eps.

Spellings of one program stand together in their file. By default every sixth idiom
runs; the slow tests run all, each in one dtype. `python -m tests.idioms` runs all in
both and prints the errors.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.idioms import measure
from tests.idioms.nothing_in_half import NOTHING_IN_HALF
from tests.idioms.table import IDIOMS
from tests.measures import HALF
from tests.plan import once

# The lookups are of activations, which products made in half precision.
LOOKUPS_OF_ACTIVATIONS = ("hub_of_a_graph", "hub_before_a_layer")

each_half = pytest.mark.parametrize("dtype", HALF)


def rounded(tree, dtype):
    """What is left of f32 arrays that were stored in half precision."""
    return jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), tree)


def by_default(number: int) -> str | None:
    """The dtype in which an idiom runs by default, if it does."""
    return None if number % 6 else dtype_of(number)


def dtype_of(number: int) -> str:
    """The dtype in which an idiom runs in the slow tests."""
    return HALF[(number if number % 6 else number // 6) % 2]


@pytest.mark.breadth(4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            *(name, dtype_of(number)),
            marks=[pytest.mark.slow] * (by_default(number) is None),
        )
        for number, name in enumerate(IDIOMS)
    ],
)
def test_idiom_is_at_most_twice_as_wrong_as_its_products_alone(name, dtype):
    leaves = measure.leaves(IDIOMS[name], dtype)
    assert all(leaf.is_right for leaf in leaves)
    if IDIOMS[name].field == "lookups" and name not in LOOKUPS_OF_ACTIVATIONS:
        # Products alone are given what they read of a table after the lookup.
        eps = float(jnp.finfo(dtype).eps)
        assert max(leaf.products for leaf in leaves) <= 4 * eps


@once.one_process
@pytest.mark.slow
@pytest.mark.parametrize("name", [i.name for i in IDIOMS.values() if not i.f32])
def test_idiom_has_a_product_in_half(name):
    in_half = [reads[0] for reads in once.products(once.planned(name, "bfloat16"))]
    assert ("bfloat16" not in in_half) == (name in NOTHING_IN_HALF)


@each_half
def test_rows_that_were_stored_in_half_lose_their_bits(dtype):
    def stores(fn):
        return lambda p, inputs: rounded(fn(p, inputs), dtype)

    found = measure.leaves(IDIOMS["bank_written_by_set"], dtype, stores)
    kept = [leaf for leaf in found if leaf.kind == "kept"]
    assert len(kept) == 1 and not kept[0].is_right


@each_half
def test_one_rounding_of_arguments_is_more_than_an_f32_idiom_may_lose(dtype):
    def reads(fn):
        return lambda *args: fn(*rounded(args, dtype))

    found = measure.leaves(IDIOMS["rotation_with_an_algorithm"], dtype, reads)
    assert {leaf.kind for leaf in found} == {"value", "gradient"}
    assert not any(leaf.is_right for leaf in found if leaf.kind == "value")


@pytest.mark.breadth(1)
@each_half
def test_steps_that_are_stored_in_half_are_wrong_in_value_and_gradient(dtype):
    idiom = IDIOMS["euler_in_a_scan"]

    def stores(_):
        def program(p, inputs):
            def turn(y, _):
                return rounded(y - 1e-3 * (y @ p["w"]), dtype), None

            y, _ = jax.lax.scan(turn, inputs["y"], None, length=400)
            return {"end": y, "moved": y - inputs["y"]}

        return program

    found = measure.leaves(idiom, dtype, stores)
    assert [leaf.kind for leaf in found] == ["value", "value", "gradient"]
    assert not any(leaf.is_right for leaf in found)


@pytest.mark.parametrize(
    ("found", "reference", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.25, 0.0], [0.0, 0.0], 0.25),
        ([math.inf, 4.0], [3.0, 4.0], math.inf),
        ([math.nan, 4.0], [3.0, 4.0], math.inf),
        ([-math.inf, 4.0], [-math.inf, 4.0], 0.0),
        ([-65504.0, 4.0], [-math.inf, 4.0], math.inf),
    ],
)
def test_error_is_relative_and_infinite_where_something_is_lost(
    found, reference, expected
):
    assert math.isclose(measure.error(np.array(found), np.array(reference)), expected)


@each_half
def test_products_that_are_wrong_by_themselves_excuse_nothing(dtype):
    idiom, eps = IDIOMS["vdot_under_vmap"], float(jnp.finfo(dtype).eps)
    assert idiom.f32 and measure.bound(idiom, 1.0, dtype) < eps / 8
    idiom = IDIOMS["one_step"]
    assert measure.bound(idiom, 0.125, dtype) == 0.25 + 4 * eps
    assert measure.bound(idiom, math.inf, dtype) == 4 * eps
