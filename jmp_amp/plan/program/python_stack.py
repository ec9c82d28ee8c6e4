"""Room for the frames of a deep trace.

CPython keeps the frames of Python calls in chunks of 16 KiB. A call that does not fit
maps another chunk, which is unmapped when the call returns: at the end of a chunk, a
function of JAX that runs for every operation costs several microseconds more each time.
A trace of a model is 60 to 100 frames deep and meets the end of a chunk as a rule: a
GPT of 12 layers took 1.05 to 1.3 times as long, by the number of frames around it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

# Of a frame, in values of 8 bytes: a little more than half of the chunk of 128 KiB that
# CPython makes for it. The frame touches none of it. The other half is for the frames
# inside, but for one that is as large: it begins a chunk too.
_STACK_SIZE = 8_250


def with_stack_room(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns a function whose frame begins a large chunk, for the frames inside it."""
    assert isinstance(fn, types.FunctionType)
    roomy = types.FunctionType(
        fn.__code__.replace(co_stacksize=_STACK_SIZE),
        fn.__globals__,
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    roomy.__doc__, roomy.__kwdefaults__ = fn.__doc__, fn.__kwdefaults__
    roomy.__annotations__ = fn.__annotations__
    return cast(Callable[P, R], roomy)
