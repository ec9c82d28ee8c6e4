"""The two programs of a diagnosis: under the policy, and the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jmp_amp.numerics.calls.executables import Compile, compiler_options
from jmp_amp.numerics.calls.losses import LossCall
from jmp_amp.numerics.locate.frames import Path, frames_of
from jmp_amp.numerics.locate.marks import PlanMarks
from jmp_amp.numerics.measure.measuring import Measure, Measured
from jmp_amp.numerics.measure.watch import watched
from jmp_amp.plan.plan import Plan
from jmp_amp.plan.program import binding, meshes, scope_text
from jmp_amp.plan.program.jaxprs import Value
from jmp_amp.transform.interpreter import run

# A program that measures fewer values runs once in less time than LLVM would take.
_LARGE = 1 << 27


def options_for(values: int) -> dict[str, Any]:
    """Returns the options to compile a program with that measures so many values."""
    return compiler_options(fast=values < _LARGE)


class Program(NamedTuple):
    """A program that was run and measured.

    Attributes:
      measure: its bodies, and what was measured of each.
      statistics: the statistics, by body; numpy arrays.
      outputs: what the function returned, as arrays.
      gradients: one for each differentiated input, of the scaled loss.
    """

    measure: Measure
    statistics: dict[Path, Measured]
    outputs: list[Value]
    gradients: tuple[Value, ...]


def measured(
    compile_: Compile,
    call: LossCall,
    plan: Plan,
    arrays: Sequence[Value],
    scaled: Callable[[Value], Value],
) -> Callable[[], Program]:
    """Begins to compile a plan and its derivative, and what measures all sites.

    It returns a function that runs the program, once. `plan` has the inputs and outputs
    of the call, `arrays` are its inputs. Of `scaled(loss)` the gradient is taken.
    """
    marks = PlanMarks(plan)

    def replay(values: Sequence[Value]) -> list[Value]:
        return run(plan, values, marks)

    def scaled_apart(loss: Value) -> Value:
        with scope_text.noted("scaling"):
            return scaled(loss)

    traced = binding.trace(call.with_gradients(replay, scaled_apart), arrays)
    frames = frames_of(traced, marks, differentiated=call.loss is not None)
    measure = Measure(frames, meshes.mesh_of(arrays))
    compiling = compile_(
        watched(traced, measure), *arrays, options=lambda: options_for(measure.size)
    )

    def program() -> Program:
        returned, statistics = compiling.result()(*arrays)
        count = len(returned) - len(call.keys)
        outputs, gradients = list(returned[:count]), tuple(returned[count:])
        return Program(measure, jax.device_get(statistics), outputs, gradients)

    return program
