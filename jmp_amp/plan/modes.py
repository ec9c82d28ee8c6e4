"""Modes: in which dtypes an equation asks for its operands, reads and writes.

Each function here answers one question for every mode. The three passes of the planner,
the interpreter and the report ask them, so a mode means the same everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from jmp_amp.plan.jaxprs import Eqn, aval_of
from jmp_amp.plan.rewriting import Dtypes as Dtypes
from jmp_amp.plan.values import castable, traced_dtype
from jmp_amp.policies.dtypes import BF16, F16, F32


class Mode(enum.Enum):
    """How an equation treats the dtypes of its operands."""

    AS_TRACED = "in the dtypes that it was traced in"
    AS_HELD = "reads its operands in the dtype that they have"
    IN_DTYPE = "in one dtype"
    PASSED_ON = "each result is an operand, in the dtype that it has"
    CONVERSION = "an explicit cast, from the dtype that the operand has"
    CALL = "its bodies are planned"


class Demand(enum.IntFlag):
    """How consumers read a value: in which dtypes, and who keeps it."""

    NONE = 0
    F16 = 1
    BF16 = 2
    F32 = 4
    # A comparison reads it in the dtype that it has.
    AS_IS = 8
    # The program returns it in f32; a loop hands it to the next turn in f32.
    RETURNED = 16
    CARRIED = 32
    KEPT = RETURNED | CARRIED

    @property
    def dtypes(self) -> Demand:
        """The dtypes alone."""
        return self & (Demand.F16 | Demand.BF16 | Demand.F32)


_DEMANDS = {None: Demand.NONE, F16: Demand.F16, BF16: Demand.BF16, F32: Demand.F32}


def demand_of(dtype: np.dtype | None) -> Demand:
    """Returns the demand of a consumer that reads `dtype`."""
    return _DEMANDS[dtype]


def asked(mode: Mode, dtype: np.dtype | None, eqn: Eqn) -> tuple[Demand, ...]:
    """Returns the demand on each operand; `PASSED_ON` hands on that on its result."""
    assert mode is not Mode.PASSED_ON
    if mode is Mode.CONVERSION:
        return (Demand.NONE,) * len(eqn.invars)
    if mode is Mode.AS_HELD:
        floats = map(castable, eqn.invars)
        return tuple(Demand.AS_IS if each else Demand.NONE for each in floats)
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
