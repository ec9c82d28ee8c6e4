"""Modes: in which dtypes an equation asks for its operands, reads and writes.

Each function here answers one question for every mode. The three passes of the planner,
the interpreter and the report ask them, so a mode means the same everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from jmp_amp.plan.dataflow.values import castable, traced_dtype
from jmp_amp.plan.program.jaxprs import Eqn, aval_of, is_print
from jmp_amp.plan.rewrites.rewriting import Dtypes as Dtypes
from jmp_amp.policies.dtypes import BF16, F16, F32


class Mode(enum.Enum):
    """How an equation treats the dtypes of its operands."""

    AS_TRACED = "in the dtypes that it was traced in"
    AS_HELD = "reads its operands in the dtype that they have"
    IN_DTYPE = "in one dtype"
    PASSED_ON = "each result is an operand, in the dtype that it has"
    CONVERSION = "an explicit cast, from the dtype that the operand has"
    CALL = "its bodies are planned"


# How consumers read a value: a set of the bits of `Demands`. A flag of `enum` takes ten
# times as long, and is asked for several times for each operand of a program.
Demand: TypeAlias = int


class Demands:
    """The bits of a demand: the dtypes that a value is read in, and who keeps it."""

    NONE: Final = 0
    F16: Final = 1
    BF16: Final = 2
    F32: Final = 4
    DTYPES: Final = F16 | BF16 | F32
    # A comparison reads it in the dtype that it has.
    AS_IS: Final = 8
    # The program returns it in f32; a loop hands it to the next turn in f32.
    RETURNED: Final = 16


_DEMANDS = {None: Demands.NONE, F16: Demands.F16, BF16: Demands.BF16, F32: Demands.F32}


def demand_of(dtype: np.dtype | None) -> Demand:
    """Returns the demand of a consumer that reads `dtype`."""
    return _DEMANDS[dtype]


def asked(mode: Mode, dtype: np.dtype | None, eqn: Eqn) -> tuple[Demand, ...]:
    """Returns the demand on each operand; `PASSED_ON` hands on that on its result."""
    assert mode is not Mode.PASSED_ON
    if mode is Mode.CONVERSION:
        return (Demands.NONE,) * len(eqn.invars)
    if mode is Mode.AS_HELD or is_print(eqn):
        # A print does not change what it shows.
        floats = map(castable, eqn.invars)
        return tuple(Demands.AS_IS if each else Demands.NONE for each in floats)
    traced = map(traced_dtype, eqn.invars)
    return tuple(demand_of(each and (dtype or each)) for each in traced)


def read(
    mode: Mode,
    dtype: np.dtype | None,
    eqn: Eqn,
    held: Dtypes,
    activations: Sequence[bool],
) -> Dtypes:
    """Returns the dtype in which each operand is read.

    Args:
      mode: the mode of the equation.
      dtype: the dtype that it computes in, if it has one.
      eqn: the equation.
      held: the dtype that each operand has.
      activations: whether each operand depends on activations.
    """
    if mode is Mode.PASSED_ON:
        return held
    if mode is Mode.CONVERSION:
        # The consumer casts up, so that a cast up and down again is no cast.
        return (held[0] if dtype == F32 else dtype,)
    if mode is Mode.AS_TRACED:
        return tuple(map(traced_dtype, eqn.invars))
    floats = list(map(castable, eqn.invars))
    if mode is Mode.AS_HELD:
        # A comparison reads activations as they are, and the rest in the same dtype.
        pairs = zip(held, floats, activations, strict=True)
        found = {each for each, is_float, active in pairs if is_float and active}
        dtype = found.pop() if len(found) == 1 else F32
    return tuple(dtype if is_float else None for is_float in floats)


def computed(mode: Mode, dtype: np.dtype | None, eqn: Eqn, reads: Dtypes) -> Dtypes:
    """Returns the dtype in which an equation yields each result."""
    if mode in (Mode.PASSED_ON, Mode.CONVERSION):
        return reads
    return tuple(
        dtype or aval_of(var).dtype if castable(var) else None for var in eqn.outvars
    )
