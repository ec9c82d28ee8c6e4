"""Numerical idioms, as users write them around and with half products.

Real programs are more than networks: they keep averages, take steps, solve, warp and
count. Each row of this table is one such program in plain f32 `jnp`: a few lines that
run in milliseconds. `measure.py` runs it in f32, under a mixed policy, and with its
products alone in half precision (recipe "OD"), values and gradients. A policy that
keeps what an f32 reader keeps is at most twice as wrong as the products alone.

`table.IDIOMS` holds the rows of every file of this package, by name. To add an idiom,
write a function below `@row(...)` in the file of its field, or in a new file. `python
-m tests.idioms [name ...]` prints the errors.
"""
