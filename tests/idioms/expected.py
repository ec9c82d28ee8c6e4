"""The idioms that do not meet the bound, each with its reason.

A row that meets the bound in all respects must leave this list: its test fails.
"""

EXPECTED: dict[str, str] = {}
