"""Products alone in half: what they read of a table is cast after the lookup."""

import jax.numpy as jnp
import pytest

from tests.idioms.measure import leaves
from tests.idioms.table import IDIOMS
from tests.measures import HALF

BY_DEFAULT = "words_in_a_checkpoint"
# Their lookups are of activations, which products made in half precision.
OF_ACTIVATIONS = ("hub_of_a_graph", "hub_before_a_layer")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            *(idiom.name, dtype),
            marks=[pytest.mark.slow] * (idiom.name != BY_DEFAULT),
        )
        for idiom in IDIOMS.values()
        for dtype in HALF
        if idiom.field == "lookups" and idiom.name not in OF_ACTIVATIONS
    ],
)
def test_products_alone_leave_the_sum_of_a_lookup_in_f32(name, dtype):
    eps = float(jnp.finfo(dtype).eps)
    assert max(leaf.products for leaf in leaves(IDIOMS[name], dtype)) <= 4 * eps
