"""The idioms that do not meet the bound, each with its reason.

A row that meets the bound in all respects must leave this list: its test fails.
"""

_SUMMED_IN_HALF = (
    "every turn reads one half value that a product made before the loop: autodiff "
    "sums its cotangents over the turns in the dtype of that value"
)

EXPECTED = {
    "force_that_a_product_predicted": _SUMMED_IN_HALF,
    "leapfrog": _SUMMED_IN_HALF,
    "inner_momentum": _SUMMED_IN_HALF,
    "euler_from_a_product": (
        "a carry that a product began and that adds up is a stream between layers: "
        "nothing tells steps of one layer from a stack of layers"
    ),
    "state_space_model_by_associative_scan": (
        "a tree of half multiplications and additions, nine deep for 300 turns, "
        "between two layers: products alone in half round none of it"
    ),
}

_OPAQUE = "a solver of JAX runs as it was traced, with the products of its operator"
_INDEX = (
    "the range of the loop's counter is taken for that of the row that it chooses: too "
    "large for half precision"
)

# Idioms whose every product is f32, although nothing in them asks for it. The bound
# says nothing of them.
NOTHING_IN_HALF = {
    "total_in_a_fori_loop": _INDEX,
    "total_in_a_while_loop": _INDEX,
    "conjugate_gradients_of_jax": _OPAQUE,
    "implicit_gradient_of_a_solve": _OPAQUE,
}
