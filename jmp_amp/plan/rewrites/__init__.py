"""Equations that are not bound as traced: another computation, or another derivative,
of the same operands. Each rewrite is one file and one row of `rewrite_table`.
"""
