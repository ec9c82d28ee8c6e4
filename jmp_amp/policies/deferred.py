"""Transformations take a function, and what they return takes its arguments.

A caller who gives both at once, or only the first, is told of the second call. An error
of the user's own code passes through without the frames of the library.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import jax

F = TypeVar("F", bound=Callable[..., Any])

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_USERS = (_LIBRARY, os.path.dirname(inspect.getfile(jax)) + os.sep)
# A reader of these settings wants all frames, or tells a debugger which ones to hide.
_WHOLE = ("off", "tracebackhide")


def in_two_calls(transform: F) -> F:
    """Returns a transformation that refuses the arguments of the function itself.

    What it raises is a TypeError, as Python does.
    """
    signature, name = inspect.signature(transform), transform.__name__
    parameters = signature.parameters
    places = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    first = f"{name}({', '.join(n for n in places if n in ('fn', 'policy'))})"

    @functools.wraps(transform)
    def checked(*args: Any, **kwargs: Any) -> Any:
        unknown = next((key for key in kwargs if key not in parameters), "")
        if close := difflib.get_close_matches(unknown, parameters, n=1):
            raise TypeError(
                f"{name}(fn, {unknown}=...): unknown argument. Did you mean {close[0]}?"
            )
        if unknown or len(args) > len(places):
            given = f"{unknown}=" if unknown else f"{len(args)} arguments"
            keyword = f", {unknown}=..." if unknown else ""
            raise TypeError(
                f"{first} was given {given}. What fn is called with goes into a second "
                f"call: {first}(*args{keyword})."
            )
        return transform(*args, **kwargs)

    return cast(F, checked)


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
        told = name if name.startswith("_") else f"{self!r} It may have {name!r} then."
        raise AttributeError(told)


class _OwnFramesHidden:
    """A context that hides the library's frames of an error that passes through it.

    An error of the library keeps all its frames, and so does one of JAX that no code of
    the user stands between. Nothing is hidden where JAX hides nothing of its own:
    `jax.config.update("jax_traceback_filtering", "off")`. It has no state.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> Literal[False]:
        filtering = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(error, Exception) and filtering not in _WHOLE:
            error.__traceback__ = _without_library(error.__traceback__)
        return False


own_frames_hidden = _OwnFramesHidden()


def _without_library(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without frames of the library that the user's come after."""
    shown, entries = None, []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    files = [each.tb_frame.f_code.co_filename for each in entries]
    is_users = [
        not each.startswith(_NOT_USERS) and each != inspect.getfile(contextlib)
        for each in files
    ]
    last = max((i for i, f in enumerate(files) if f.startswith(_LIBRARY)), default=-1)
    is_hiding = any(is_users[last + 1 :])
    for i in reversed(range(len(entries))):
        if i > last or is_users[i] or not is_hiding:
            each = entries[i]
            where = each.tb_frame, each.tb_lasti, each.tb_lineno
            shown = TracebackType(shown, *where)
    return shown
