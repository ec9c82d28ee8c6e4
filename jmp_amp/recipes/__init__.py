"""Recipes: one word for policy, loss scale and storage of weights.

The words of other systems (Apex, Paddle, MindSpore, Colossal-AI, Keras) are rows of one
table, and their options are overrides of its columns.
"""
