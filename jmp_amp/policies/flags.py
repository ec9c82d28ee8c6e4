"""Flags: arguments that are true or false, and nothing else."""

import numpy as np


def checked_flag(value: object, call: str) -> bool:
    """Returns a flag as a Python bool; numpy's bools are flags too.

    Every other value is true or false to Python, "False" is true: it is refused.

    Args:
      value: the argument of the caller.
      call: the caller's call as written, with `{}` for the value, for the error.

    Raises:
      TypeError: if it is neither True nor False.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(
        f"{call.replace('{}', repr(value))}: neither True nor False, but of type "
        f"{type(value).__name__}. Give a bool."
    )
