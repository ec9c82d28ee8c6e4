"""Loops that users write: numerical recursions, and networks in loops.

Each row is a plain f32 `jnp` program whose products stand in a loop. A recursion
(`recursions_*.py`) is a method of numerics: a filter, a solver, a time stepper, a
dynamic program. What a rounding does to it, its turns add up or a condition number
multiplies. A network (`networks_*.py`) is trained to bear roundings: layers in a scan,
recurrent networks, decoders, samplers, training loops.

`table.LOOPS` holds all rows by name. `python -m tests.loops [name ...]` measures them;
`measured.py` holds what it found.
"""
