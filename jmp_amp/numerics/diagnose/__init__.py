"""A `Diagnosis` of the figures: its sites, its tables, and what to do. Advice about
the policy is tried before it is given.
"""
