"""Errors of a function that is being traced, as far as tracing has caused them.

A function of half-precision arrays may be refused because two dtypes do not meet, and
is then traced in f32. A function may need the values of an array, which nobody knows
while it is traced: the error then names the argument as the caller knows it. A result
that is no pytree may hold arrays that are gone when the trace has ended.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import traceback
import types
from collections.abc import Iterator, Sequence

import jax
import jax.core
from jax.tree_util import KeyPath, SequenceKey, keystr

from jmp_amp.plan.program import source_code
from jmp_amp.policies.dtypes import AnyFn

# JAX names a dtype, or the type of an array: `bf16[8,16]`.
_HALF = re.compile(r"\b(bfloat16|float16|(bf16|f16)\[)")
# What JAX says of a tracer: "The error occurred while tracing the function run at
# .../calls.py:216 for jit. This concrete value was not available in Python because it
# depends on the value of the argument arrays[2]."
_OUR_TRACE = re.compile(r"The error occurred while tracing the function run at .*")
_INPUT = re.compile(r"\barrays\[(\d+)\]")


class OtherParametersError(ValueError):
    """Parameters are half where an optimizer saw f32 ones, or the other way round.

    That is a mistake of the user, or the trace of a whole training step was given f32
    in place of half.
    """


def is_about_half(error: Exception) -> bool:
    """Whether JAX may have refused a dtype because it is a half one.

    Two dtypes do not meet in a loop, or under strict promotion. JAX raises the error,
    and names them; those of the function itself may be about anything.

    Args:
      error: caught inside of the trace, where JAX has not cut its traceback yet.
    """
    kinds = (TypeError, jax.dtypes.TypePromotionError)
    if not isinstance(error, kinds) or isinstance(error, jax.errors.JAXTypeError):
        return False  # The latter needs the values of an array.
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_by_jax = source_code.in_library(frame.f_code.co_filename)
    return raised_by_jax and bool(_HALF.search(str(error)))


def explain_traced_values(
    error: Exception, call: str, fn: AnyFn, inputs: Sequence[KeyPath | None]
) -> None:
    """Makes an error about the value of a tracer name the arguments of `fn`.

    Args:
      error: raised by `fn` while it was traced.
      call: the caller's call as written.
      fn: the function of the user.
      inputs: for each input of the program, its path in `(args, kwargs)`; None for a
        variable of an nnx object.
    """
    text = str(error)
    found = _OUR_TRACE.search(text)
    if found is None:
        if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
            error.add_note(_advice(call, "an array", fn))
        return
    numbers = dict.fromkeys(int(number) for number in _INPUT.findall(found[0]))
    paths = [inputs[number] for number in numbers if number < len(inputs)]
    named = [
        "a variable of an nnx module" if path is None else _argument(fn, path)
        for path in paths
    ]
    told = " and of ".join(dict.fromkeys(named)) or "an argument"
    error.args = (text.replace(found[0], _advice(call, told, fn)), *error.args[1:])


def _advice(call: str, argument: str, fn: AnyFn) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return (
        f"{call}: the function {name} needs the value of {argument}, but arrays "
        "(numpy's too) are traced, as under jax.jit. Pass flags, sizes and indices as "
        "Python or numpy numbers; let the function close over an array whose value it "
        "needs. Under jax.jit, make the argument static."
    )


def _argument(fn: AnyFn, path: KeyPath) -> str:
    """Returns the name of a leaf of `(args, kwargs)`, such as `params['w']`."""
    _, key, *rest = path
    if isinstance(key, SequenceKey):
        name = _parameter(fn, key.idx)
    else:
        name = str(getattr(key, "key", key))
    return f"the argument {name}{keystr(tuple(rest))}"


def _parameter(fn: AnyFn, index: int) -> str:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return f"args[{index}]"
    for number, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{index - number}]"
        if number == index:
            return parameter.name
    return f"args[{index}]"


def check_result(leaf: object, call: str) -> None:
    """Raises a TypeError if a result that is no array holds one of the trace."""
    for name, value in _parts(leaf):
        if any(isinstance(each, jax.core.Tracer) for each in jax.tree.leaves(value)):
            raise TypeError(
                f"{call}: a result is of {type(leaf).__name__}, which is no pytree, "
                f"and holds an array in {name!r}. Nothing that is traced may stay "
                "there. Return the arrays, or register the class with "
                "jax.tree_util.register_dataclass."
            )


def _parts(leaf: object) -> Iterator[tuple[str, object]]:
    """Yields what an object holds, and under which name, as far as Python tells."""
    if isinstance(leaf, types.FunctionType):
        cells = zip(leaf.__code__.co_freevars, leaf.__closure__ or (), strict=True)
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # It is empty.
                yield name, cell.cell_contents
    elif not isinstance(leaf, type | types.ModuleType):
        names = [*getattr(leaf, "__dict__", ()), *getattr(leaf, "__slots__", ())]
        yield from ((each, getattr(leaf, each, None)) for each in names)
