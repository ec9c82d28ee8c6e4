"""The cheapest policy with an accurate gradient. All groups of modules are tried in one
program, where flags switch their roundings; the search needs few compilations.
"""
