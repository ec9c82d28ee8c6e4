"""Idioms whose every product is f32, each with its reason."""

_OPAQUE = "a solver of JAX runs as it was traced, with the products of its operator"

_FILTER = "the covariance of a filter leads to a linear system in every turn"

_RECURSION = "no activation stands between the product and the carry of its loop"

# No line of these idioms asks for f32. A bound on errors does not see a lost half.
NOTHING_IN_HALF = {
    "conjugate_gradients_of_fixed_length": _RECURSION,
    "conjugate_gradients_of_jax": _OPAQUE,
    "implicit_gradient_of_a_solve": _OPAQUE,
    "jacobi_iteration": _RECURSION,
    "kalman_filter": _FILTER,
    "kalman_filter_from_an_argument": _FILTER,
    "top_k_of_biased_experts": "an index, and a constant is a factor of the scores",
}
