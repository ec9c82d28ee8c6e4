"""Transformations take a function, and what they return takes its arguments.

A caller who gives both at once, or only the first, is told of the second call.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from jmp_amp.policies.tracebacks import own_frames_hidden

F = TypeVar("F", bound=Callable[..., Any])


def in_two_calls(transform: F) -> F:
    """Returns a transformation that refuses the arguments of the function itself.

    What it raises is a TypeError, as Python does.
    """
    signature = inspect.signature(transform)

    @functools.wraps(transform)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            _refuse(transform.__name__, signature.parameters, args, kwargs)
        return transform(*args, **kwargs)

    return cast(F, checked)


def _refuse(
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    """Raises if there are too many arguments, or unknown ones."""
    places = [
        key
        for key, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    first = f"{name}({', '.join(each for each in places if each in ('fn', 'policy'))})"
    unknown = [key for key in kwargs if key not in parameters]
    for key in unknown:
        if close := difflib.get_close_matches(key, parameters, n=1):
            raise TypeError(
                f"{name}(fn, {key}=...): unknown argument. Did you mean {close[0]}?"
            )
    if unknown or len(args) > len(places):
        given = f"{unknown[0]}=" if unknown else f"{len(args)} arguments"
        keyword = f", {unknown[0]}=..." if unknown else ""
        raise TypeError(
            f"{first} was given {given}. What fn is called with goes into a second "
            f"call: {first}(*args{keyword})."
        )


class Waiting:
    """A function that waits for arguments, and says so where a result is looked for.

    Args:
      run: the function.
      first: the call that returned it, as written.
      result: what it returns, in words.
    """

    def __init__(self, run: Callable[..., Any], first: str, result: str):
        functools.update_wrapper(self, run, updated=())
        self._run, self._first, self._result = run, first, result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with own_frames_hidden:
            return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        return (
            f"{self._first}: no {self._result} yet. Give it the arguments of the "
            f"function in a second call: {self._first}(*args)."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self!r} It has {name!r} then, if anything has.")
