"""Programs that look like those that need f32, and whose products stay half.

Each is a row of the table as well: it is right with its products in half. A policy
that computes everything in f32 would be right everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests.idioms.table import IDIOMS
from tests.measures import matmuls
from tests.programs import results_of

NEAR_MISSES = (
    "residual_stream_that_a_norm_reads",
    "gated_sum_that_a_product_reads",
    "result_that_a_product_and_a_return_read",
    "layers_with_a_dead_norm",
    "lookup_by_a_product",
    "bias_of_many_rows",
    "layers_of_stacked_weights",
    "layers_of_weights_by_index",
    "layers_from_a_product_in_a_row",
    "clip_far_from_one",
    "tanh_between_products",
    "best_values_for_a_product",
    "pool_of_the_largest",
    "residual_of_an_argument_for_a_product",
    "rotary_halves_of_a_product",
    "second_moment_of_centred_samples",
    "product_less_the_square_of_another",
    "bias_and_gain_between_products",
    "mask_between_products",
)


def drawn(name):
    idiom, rng = IDIOMS[name], np.random.default_rng(0)
    return idiom, jax.tree.map(jnp.asarray, (idiom.params(rng), idiom.inputs(rng)))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_has_every_product_in_half(name):
    idiom, args = drawn(name)

    def loss(p, inputs):
        return sum(jnp.sum(x) for x in jax.tree.leaves(idiom.fn(p, inputs)))

    found = matmuls(jax.value_and_grad(amp.autocast(loss)), *args)
    assert found
    assert {m.operands for m in found} == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize(
    "name", ["layers_of_stacked_weights", "layers_of_weights_by_index"]
)
def test_stream_between_layers_is_carried_in_half(name):
    idiom, args = drawn(name)
    assert results_of(amp.autocast(idiom.fn), *args, primitive="scan") == ["bfloat16"]
