"""Policies: which dtypes, said as data.

A policy names three dtypes and exceptions by operation; a map gives policies to Flax
modules. Both are frozen, hashable and print as text that reads back. Nothing in this
wing knows of jaxprs, gradients or optimizers.
"""
