"""Training: what an optimizer needs in half precision.

A loss scale is immutable state; a step whose gradients are not finite is skipped whole;
half-precision weights keep the digits that their updates need. All of it is optax
transformations and functions of pytrees, and works without `autocast`.
"""
