"""Reports: a plan as people read it.

The rows of a plan, with modules, casts and costs, as plain data; tables of them as text
and as HTML. Nothing in this wing changes what a program computes.
"""
