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
