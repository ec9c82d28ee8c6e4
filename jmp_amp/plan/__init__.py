"""Plans: the dtype of every equation of a traced program, and why.

A traced program goes in, plain data comes out. One pass follows values from where they
come from, one goes back from where they are read, and one settles the dtypes. Planning
traces nothing, executes nothing, and knows nothing of Flax.
"""
