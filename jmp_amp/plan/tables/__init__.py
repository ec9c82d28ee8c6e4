"""What is known of an operation before any program is read: the row of each primitive
of JAX, and the rule that a row, a function's name or the user gives.
"""
