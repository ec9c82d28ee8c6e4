"""Which equation of a plan an equation of the gradient comes from. The marks of the
replay come back in JAX's name stacks, and a `Site` is an equation with its figures.
"""
