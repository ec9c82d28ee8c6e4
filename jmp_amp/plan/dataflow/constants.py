"""What the constants of a program can become: do they fit into half precision?

A constant such as `-1e9`, or `1e-8`, has a place in an f32 program and none in f16.
The plan follows every value that is computed from constants through the program, as
the interval that its elements lie in.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Sequence

import jax
import jax.core
import numpy as np

from jmp_amp.plan.program.dimensions import as_number, is_elementwise_product
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Value, aval_of
from jmp_amp.plan.tables.operations import OPERATIONS, Fold, Kind, kind_of

# The lowest and the highest finite element; None when nothing is known.
Bounds = tuple[float, float] | None

# Larger constants are data, not numbers that somebody wrote into the program, and
# looking at them would wait for the device.
_LARGEST_CONSTANT = 4096

_F16 = np.dtype(np.float16)
# The range that a parameter or an input is assumed to have where it meets a constant.
_UNKNOWN = (-1.0, 1.0)


def bounds_of_constant(value: Value) -> Bounds:
    """Returns the bounds of a literal or of a small constant array."""
    is_array = isinstance(jax.typeof(value), jax.core.ShapedArray)
    if isinstance(value, jax.core.Tracer) or not is_array:
        return None
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if np.size(value) > _LARGEST_CONSTANT or not _is_real(dtype):
        return None
    if not np.ndim(value):  # most are numbers
        number = float(value)
        return (number, number) if math.isfinite(number) else None
    elements = np.asarray(value).astype(np.float64)
    elements = elements[np.isfinite(elements)]
    if not elements.size:
        return None
    return float(elements.min()), float(elements.max())


def bounds_of_fill(eqn: Eqn) -> Bounds:
    """Returns the bounds of the fill value of a `gather`, for indices out of bounds."""
    fill = eqn.params.get("fill_value")
    return None if fill is None else bounds_of_constant(fill)


def bounds_of_result(eqn: Eqn, operands: Sequence[Bounds]) -> Bounds:
    """Returns the bounds of the result of `eqn`, none of whose operands is computed.

    A constant that has no place in f16 makes the result suspect even where another
    operand is unknown: `mask * -1e9` may be -1e9. An unknown operand counts as about 1,
    so that `variance + 1e-12` is as large as a variance. Of everything else that
    parameters and inputs have a part in, nothing is known.
    """
    name = eqn.primitive.name
    if name == "bitcast_convert_type":
        return None  # the random bits of a number are none of its size
    if name == "iota":
        size = as_number(eqn.params["shape"][eqn.params["dimension"]])
        return 0.0, float(max(size - 1, 0))
    operands = [
        b for b, v in zip(operands, eqn.invars, strict=True) if not _is_position(eqn, v)
    ]
    fill = bounds_of_fill(eqn)
    if fill is not None:
        operands.append(fill)
    if all(b is None for b in operands):
        return None
    if is_elementwise_product(eqn):
        name = "mul"
    limits = OPERATIONS[name].row.limits if name in OPERATIONS else None
    if isinstance(limits, tuple):
        return limits
    ranges = [b or _UNKNOWN for b in operands]
    result = (limits and _corners(limits, ranges)) or hull(ranges)
    if None not in operands:
        return result
    travels = any(misfit(b, _F16) for b in operands) and misfit(result, _F16)
    return result if travels else None


def _is_position(eqn: Eqn, operand: Atom) -> bool:
    """Whether an operand says which element is taken, not what it is."""
    dtype = aval_of(operand).dtype
    if dtype == np.bool_:
        return True
    moves = kind_of(eqn.primitive.name) in (Kind.MOVE, Kind.SELECTION)
    return moves and dtype != aval_of(eqn.outvars[0]).dtype


@functools.lru_cache(maxsize=4096)
def misfit(bounds: Bounds, dtype: np.dtype) -> str | None:
    """Returns "overflows" or "vanishes" if `dtype` has no place for the constant.

    An array vanishes only if all of its non-zero elements become zero: the zeros of a
    sine table are meant to be small.
    """
    if bounds is None:
        return None
    magnitude = max(abs(bounds[0]), abs(bounds[1]))
    rounded = _rounded(magnitude, dtype)
    if np.isinf(rounded):
        return "overflows"
    return "vanishes" if magnitude > 0 and rounded == 0 else None


@functools.lru_cache(maxsize=4096)
def met(bound: float, dtype: np.dtype) -> float | None:
    """Returns the number that a bound was to keep away from and meets in `dtype`.

    `1 - 1e-4` is 1.0 in half precision, and `log(1 - p)` is infinite. Such a number has
    at most three significant bits; `0.1` and `0.9` meet none.
    """
    rounded = _rounded(bound, dtype)
    if rounded == bound or not rounded or not math.isfinite(rounded):
        return None
    mantissa, _ = math.frexp(rounded)
    return rounded if (mantissa * 8).is_integer() else None


def _rounded(number: float, dtype: np.dtype) -> float:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return float(np.asarray(number, np.float64).astype(dtype))


@functools.cache
def _is_real(dtype: np.dtype) -> bool:
    return jax.numpy.issubdtype(dtype, np.number) and not jax.numpy.issubdtype(
        dtype, np.complexfloating
    )


def hull(bounds: Sequence[tuple[float, float]]) -> Bounds:
    """Returns the range of a value that is in one of several."""
    return min(b[0] for b in bounds), max(b[1] for b in bounds)


def _corners(fold: Fold, bounds: Sequence[tuple[float, float]]) -> Bounds:
    with np.errstate(all="ignore"):
        values = np.array(
            [fold(*corner) for corner in itertools.product(*bounds)], dtype=np.float64
        )
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size else None
