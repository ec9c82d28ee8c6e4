"""Transforms: function in, function out.

`autocast` traces a function, plans its program, and replays the plan in its place.
Flax modules open name scopes while they are traced, through which policies reach the
plan. No function of another library is replaced.
"""
