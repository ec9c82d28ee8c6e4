"""The call that is measured: its arguments are checked, it is traced and
differentiated, and compiled so that every rounding is kept.
"""
