"""Tracebacks of errors of the user's own code, without the frames of the library."""

from __future__ import annotations

import contextlib
import inspect
import os
from types import TracebackType
from typing import Literal

import jax

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = os.path.dirname(inspect.getfile(jax)) + os.sep
# A reader of these settings wants all frames, or tells a debugger which ones to hide.
_WHOLE = ("off", "tracebackhide")


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
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    files = [each.tb_frame.f_code.co_filename for each in entries]
    last = max((i for i, f in enumerate(files) if f.startswith(_LIBRARY)), default=-1)
    if not any(map(_is_users, files[last + 1 :])):
        last = -1
    shown = None
    for i in reversed(range(len(entries))):
        each = entries[i]
        if i > last or _is_users(files[i]):
            where = each.tb_frame, each.tb_lasti, each.tb_lineno
            shown = TracebackType(shown, *where)
    return shown


def _is_users(file: str) -> bool:
    return not file.startswith((_LIBRARY, _JAX)) and file != inspect.getfile(contextlib)
