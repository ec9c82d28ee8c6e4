"""What differentiation saves of a planned program, by the module that makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jmp_amp.plan.program import source_code
from jmp_amp.plan.program.jaxprs import Eqn, Value
from jmp_amp.policies.dtypes import short_name
from jmp_amp.reports.costs import Residual, saved_for_backward
from jmp_amp.reports.reading import joined, module_scopes
from jmp_amp.reports.rows import Equation, Kept, Saved
from jmp_amp.transform.interpreter import run
from jmp_amp.transform.planned import PlannedCall


class SavedBytes(NamedTuple):
    """What differentiation saves: the fields of a `Report` that say it."""

    saved: tuple[Saved, ...] | None
    not_differentiable: str | None = None
    arguments: int = 0
    arguments_without: int = 0
    largest_kept: tuple[Kept, ...] = ()


def read_saved(call: PlannedCall, equations: Sequence[Equation]) -> SavedBytes:
    """Returns what differentiation saves, or why there is no derivative.

    Args:
      call: the planned call.
      equations: the equations of the plan.
    """
    traced = call.traced
    moving = [
        i
        for i, value in enumerate(traced.arrays)
        if jnp.issubdtype(value.dtype, jnp.inexact)
    ]
    if not moving:
        return SavedBytes(None, not_differentiable="no argument is floating-point")
    if not any(jnp.issubdtype(v.dtype, jnp.inexact) for v in traced.jaxpr.out_avals):
        return SavedBytes(None, not_differentiable="no result is floating-point")

    def planned(*values: Value) -> list[Value]:
        return run(call.plan, values)

    def plain(*values: Value) -> list[Value]:
        return traced.as_it_is(values)

    residuals: list[list[Residual]] = []
    for fn in (planned, plain):
        try:
            residuals.append(saved_for_backward(fn, traced.arrays, moving))
        except Exception as error:  # whatever the function's own rules raise
            told = str(error).strip().partition("\n")[0] or type(error).__name__
            return SavedBytes(None, not_differentiable=told)
    made = [[each for each in found if each.makers] for found in residuals]
    copies = [[each for each in found if each.of_argument] for found in made]
    arguments, arguments_without = (
        sum(each.size for each in found if not each.makers) for found in residuals
    )
    places = _Places(equations)
    sizes = [_by_module(each, places) for each in (*made, *copies)]
    paths = dict.fromkeys(path for each in sizes for path in each)
    saved = tuple(Saved(path, *(each[path] for each in sizes)) for path in paths)
    largest = sorted(made[0], key=lambda each: -each.size)
    kept = tuple(map(places.kept, largest))
    return SavedBytes(saved, None, arguments, arguments_without, kept)


def _by_module(residuals: Iterable[Residual], places: _Places) -> Counter[str]:
    """Returns how many bytes of `residuals` the modules of a program keep."""
    sizes = Counter[str]()
    for each in residuals:
        sizes[places.module_of(each.makers)] += each.size
    return sizes


class _Places:
    """The modules of a program, and the lines of code that run in them.

    Attributes:
      modules: their paths.
      by_line: those that a line of code runs in.
      names: every name in a path.
    """

    def __init__(self, equations: Sequence[Equation]):
        self.modules = dict.fromkeys(each.module for each in equations)
        self.by_line: dict[str | None, dict[str, None]] = {}
        for each in equations:
            self.by_line.setdefault(each.source, {})[each.module] = None
        self.names = {name for path in self.modules for name in path.split("/")}

    def kept(self, each: Residual) -> Kept:
        """Returns the row of an array that is kept."""
        module, made = self.module_of(each.makers), each.makers[-1]
        dtype = short_name(each.dtype)
        return Kept(module, made.primitive.name, each.shape, dtype, each.size)

    def module_of(self, makers: Sequence[Eqn]) -> str:
        """Returns the module that makes a residual, see `Residual.makers`.

        What was moved out of a loop that is itself in a loop or a call lacks the scopes
        between the two: it is of the module that has the others, and that line.
        """
        path = ""
        for eqn in makers:
            path = joined(path, *module_scopes(eqn))
            # A body that the plan staged anew does not know whose function it was.
            name = source_code.jitted_name(eqn) or ""
            path = joined(path, name if name in self.names else "")
        line = source_code.source_line(makers[-1])
        here = self.by_line.get(line, {}) if line else {}
        if path in here:
            return path
        found = [each for each in here if _lacks_scopes(path, each)]
        if not found and path and path not in self.modules:
            found = [each for each in self.modules if _lacks_scopes(path, each)]
        return found[0] if found else path


def _lacks_scopes(path: str, module: str) -> bool:
    """Whether `path` is that of a module without some of the names in front."""
    *around, own = path.split("/")
    *others, last = module.split("/")
    names = iter(others)
    return own in ("", last) and all(name in names for name in around)
