"""Reading a plan: what happens in every equation of a program, as plain data.

The plan is a tree of bodies; what comes out here is the list of its equations in the
order of the program, each with the module that it is in and the casts that it costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_amp.plan import jaxprs, regions, rules
from jmp_amp.plan.decisions import castable, traced_dtype
from jmp_amp.plan.islands import Island
from jmp_amp.plan.plan import EquationPlan, Plan
from jmp_amp.policies.dtypes import short_name
from jmp_amp.reports.costs import (
    Matmuls,
    Residual,
    matmul_of,
    matmuls_as_traced,
    saved_for_backward,
)
from jmp_amp.reports.rows import Cast, Equation, Saved
from jmp_amp.transform.interpreter import PlannedCall, run

_IN_TABLE = rules.FOLLOW.union(*(group.names for group in rules.PRIMITIVES))

# What JAX adds to the name stack of a checkpoint.
_NO_MODULES = ("", "checkpoint", "rematted_computation")


def read_plan(call: PlannedCall) -> tuple[Equation, ...]:
    """Returns what happens in every equation of a planned program, in its order.

    Equations whose results nobody reads are left out: they do not run.
    """
    plan = call.plan
    # An argument may be stored in another dtype than it was traced in.
    inputs = [
        traced_dtype(v) and np.dtype(array.dtype)
        for v, array in zip(plan.body.jaxpr.invars, call.arrays, strict=True)
    ]
    found, returned = _Body(plan, inputs, "", 1, 0).read()
    if returned:
        found.append(
            Equation(
                module="",
                operation="return",
                calls="",
                source=None,
                shapes=(),
                dtype="",
                is_floating=False,
                op_class="keep",
                decided_by="return",
                from_policy=False,
                reason="inputs that are returned in the policy's output dtype",
                casts=tuple(returned),
            )
        )
    return tuple(found)


def read_saved(
    call: PlannedCall, equations: Sequence[Equation]
) -> tuple[tuple[Saved, ...] | None, str | None]:
    """Returns what differentiation saves, or None and why there is no derivative.

    Args:
      call: the planned call.
      equations: the equations of the plan.
    """
    moving = [
        i
        for i, value in enumerate(call.arrays)
        if jnp.issubdtype(value.dtype, jnp.inexact)
    ]
    if not moving:
        return None, "no argument is floating-point"
    if not any(jnp.issubdtype(v.dtype, jnp.inexact) for v in call.jaxpr.out_avals):
        return None, "no result is floating-point"

    def plain(*values: Any) -> list[Any]:
        # Caches may come in half precision.
        traced = [
            jax.lax.convert_element_type(x, v.aval.dtype)
            if traced_dtype(v) is not None
            else x
            for x, v in zip(values, call.jaxpr.jaxpr.invars, strict=True)
        ]
        return jaxprs.run_as_traced(jaxprs.body_of(call.jaxpr), traced)

    def planned(*values: Any) -> list[Any]:
        return run(call.plan, values)

    residuals: list[list[Residual]] = []
    for fn in (planned, plain):
        try:
            residuals.append(saved_for_backward(fn, call.arrays, moving))
        except Exception as error:  # whatever the function's own rules raise
            return None, str(error).strip().partition("\n")[0] or type(error).__name__
    sizes, without = (_modules_of(each, equations) for each in residuals)
    return tuple(
        Saved(path, sizes.get(path, 0), without.get(path, 0))
        for path in dict.fromkeys([*sizes, *without])
    ), None


def _modules_of(
    residuals: Iterable[Residual], equations: Sequence[Equation]
) -> dict[str, int]:
    """Returns how many bytes of `residuals` the modules of `equations` keep."""
    known = {name for e in equations for name in e.module.split("/")}
    sizes: dict[str, int] = {}
    for makers, size in residuals:
        path = ""
        for eqn in makers:
            path = _joined(path, *_scope(eqn))
            # A body that the plan staged anew does not know whose function it was.
            name = jaxprs.jitted_name(eqn) or ""
            path = _joined(path, name if name in known else "")
        sizes[path] = sizes.get(path, 0) + size
    return sizes


class _Body:
    """One body of a plan, gone through as the interpreter does, to note what it does.

    Attributes:
      plan: its plan.
      path: the module that it is called in.
      times: how often it runs.
      depth: how many calls it is inside of.
      held: the dtype that each variable is held in.
      found: what each equation comes to: itself, and those of its bodies.
      made: the equation that made each variable.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[np.dtype | None],
        path: str,
        times: int,
        depth: int,
    ):
        jaxpr = plan.body.jaxpr
        self.plan = plan
        self.path = path
        self.times = times
        self.depth = depth
        self.held = dict(zip(jaxpr.invars, inputs, strict=True))
        self.held.update((var, traced_dtype(var)) for var in jaxpr.constvars)
        self.found: dict[int, list[Equation]] = {}
        self.made: dict[Any, int] = {}

    def read(self) -> tuple[list[Equation], list[Cast]]:
        """Returns the equations, and the casts of outputs that none of them made."""
        values = self.casts()
        for step in self.plan.order:
            if isinstance(step, Island):
                self.island(step, values)
            else:
                self.equation(step, values)
        outputs = zip(self.plan.body.jaxpr.outvars, self.plan.outputs, strict=True)
        others = self.returned(outputs, values)
        return [e for index in sorted(self.found) for e in self.found[index]], others

    def casts(self) -> _Casts:
        return _Casts(self.held, self.plan.cast_per_use, self.times)

    def island(self, island: Island, values: _Casts) -> None:
        inside = self.casts()
        inside.held = dict(self.held)
        first = island.equations[0]
        entering: list[Cast] = []
        for var, dtype in island.inputs:
            entering += values.read(var, dtype, "operand")
            inside.held[var] = dtype or self.held[var]
        for index in island.equations:
            self.equation(index, inside, entering if index == first else [])
        self.returned(island.outputs, inside)
        for var, dtype in island.outputs:
            self.held[var] = dtype or inside.held[var]

    def returned(
        self, outputs: Iterable[tuple[Any, np.dtype | None]], values: _Casts
    ) -> list[Cast]:
        """Notes the casts of outputs where they were made; returns the others."""
        others = []
        for atom, dtype in outputs:
            casts = values.read(atom, dtype, "result")
            if casts and atom in self.made:
                maker, *inner = self.found[self.made[atom]]
                maker = dataclasses.replace(maker, casts=(*maker.casts, *casts))
                self.found[self.made[atom]] = [maker, *inner]
            else:
                others += casts
        return others

    def equation(
        self, index: int, values: _Casts, entering: Iterable[Cast] = ()
    ) -> None:
        eqn, planned = self.plan.body.jaxpr.eqns[index], self.plan.equations[index]
        if not eqn.effects and all(isinstance(v, jaxprs.DropVar) for v in eqn.outvars):
            return
        casts = list(entering)
        for atom, dtype in zip(eqn.invars, planned.reads, strict=True):
            read = values.read(atom, dtype, "operand", planned.saturate)
            # A cast of the program's own is not one that the plan inserts.
            casts += [] if jaxprs.is_conversion(eqn) else read
        for var, dtype in zip(eqn.outvars, planned.writes, strict=True):
            computed = _computed(var, planned, dtype, eqn)
            if dtype is not None and computed is not None and computed != dtype:
                casts.append(values.cast(var, computed, dtype, "result"))
        values.held.update(zip(eqn.outvars, planned.writes, strict=True))
        self.made.update((var, index) for var in eqn.outvars)

        path = _joined(self.path, *_scope(eqn))
        inside: list[Equation] = []
        if planned.bodies:
            again = self.times * jaxprs.repetitions(eqn)
            within = _joined(path, jaxprs.jitted_name(eqn) or "")
            for inner, plan in zip(
                jaxprs.inner_bodies(eqn), planned.bodies, strict=True
            ):
                reads = [planned.reads[i] for i in inner.operands]
                body = _Body(plan, reads, within, again, self.depth + 1)
                equations, returned = body.read()
                inside += equations
                casts += returned
        described = self.described(eqn, planned, path, tuple(casts))
        self.found[index] = [described, *inside]

    def described(
        self, eqn: Any, planned: EquationPlan, path: str, casts: tuple[Cast, ...]
    ) -> Equation:
        is_opaque = _is_opaque(eqn, planned)
        matmuls = _matmuls(eqn, planned, is_opaque, self.times)
        dtype = None if planned.bodies else _dtype(eqn, planned)
        return Equation(
            module=path,
            operation=eqn.primitive.name,
            calls=_called(eqn),
            source=jaxprs.source_line(eqn),
            shapes=tuple(_shape(v.aval) for v in eqn.outvars),
            dtype="" if dtype is None else short_name(dtype),
            is_floating=not planned.bodies and _is_floating(eqn),
            op_class=planned.rule.op_class.value,
            decided_by=planned.rule.decided_by,
            from_policy=planned.rule.from_user,
            reason=planned.reason,
            casts=casts,
            matmuls=matmuls.total,
            matmuls_in_half=matmuls.in_half,
            flops=matmuls.flops,
            flops_in_half=matmuls.flops_in_half,
            elements=sum(_size(v.aval) for v in eqn.outvars) * self.times,
            times=self.times,
            depth=self.depth,
            is_opaque=is_opaque,
        )


class _Casts:
    """The casts of a body's variables: each is made once, unless at each use."""

    def __init__(
        self,
        held: dict[Any, np.dtype | None],
        cast_per_use: frozenset[Any],
        times: int,
    ):
        self.held = held
        self.cast_per_use = cast_per_use
        self.times = times
        self.shared: set[tuple[Any, np.dtype]] = set()

    def read(
        self, atom: Any, dtype: np.dtype | None, where: str, saturate: bool = False
    ) -> list[Cast]:
        """Returns the cast that reading `atom` in `dtype` costs, if it costs one."""
        if isinstance(atom, jaxprs.Literal) or dtype is None:
            return []
        held = self.held[atom]
        if held is None or held == dtype or (atom, dtype) in self.shared:
            return []
        if not saturate and atom not in self.cast_per_use:
            self.shared.add((atom, dtype))
        return [self.cast(atom, held, dtype, where)]

    def cast(self, atom: Any, source: np.dtype, target: np.dtype, where: str) -> Cast:
        elements = _size(atom.aval) * self.times
        return Cast(short_name(source), short_name(target), elements, where)


def _computed(
    var: Any, planned: EquationPlan, written: np.dtype | None, eqn: Any
) -> np.dtype | None:
    """The dtype in which an equation yields a result, before it is cast."""
    as_written = planned.bodies or planned.f32_result or jaxprs.is_conversion(eqn)
    if as_written or eqn.primitive.name in rules.PASSED_ON or not castable(var):
        return written
    return planned.dtype or traced_dtype(var)


def _dtype(eqn: Any, planned: EquationPlan) -> np.dtype | None:
    dtypes = [planned.dtype, *planned.reads, *planned.writes]
    known = [dtype for dtype in dtypes if dtype is not None]
    traced = [
        v.aval.dtype for v in eqn.outvars if isinstance(v.aval, jax.core.ShapedArray)
    ]
    return next(iter(known + traced), None)


def _is_floating(eqn: Any) -> bool:
    return any(castable(v) for v in (*eqn.invars, *eqn.outvars))


def _is_opaque(eqn: Any, planned: EquationPlan) -> bool:
    name = eqn.primitive.name
    if planned.bodies or name in _IN_TABLE or not _is_floating(eqn):
        return False
    return "call" in name or bool(jaxprs.owned_bodies(eqn))


def _matmuls(eqn: Any, planned: EquationPlan, opaque: bool, times: int) -> Matmuls:
    if opaque:
        total, again = Matmuls(), times * jaxprs.repetitions(eqn)
        if eqn.primitive.name == "pallas_call":
            return total
        for body in jaxprs.owned_bodies(eqn):
            total = total.plus(matmuls_as_traced(body, again))
        return total
    dtypes = [
        dtype or getattr(v.aval, "dtype", None)
        for dtype, v in zip(planned.reads, eqn.invars, strict=True)
    ]
    return matmul_of(eqn, dtypes, times)


def _called(eqn: Any) -> str:
    if name := jaxprs.function_name(eqn):
        return name
    for body in jaxprs.owned_bodies(eqn):
        name = body.jaxpr.debug_info.func_name
        if name and name.isidentifier():
            return name
    return ""


def _scope(eqn: Any) -> list[str]:
    text = regions.without_policies(jaxprs.scope_text(eqn))
    # `jnp.einsum` opens a scope of the name of its subscripts.
    return [
        name for name in text.split("/") if name not in _NO_MODULES and "->" not in name
    ]


def _joined(path: str, *names: str) -> str:
    return "/".join(name for name in (path, *names) if name)


def _shape(aval: Any) -> str:
    return f"[{','.join(map(str, getattr(aval, 'shape', ())))}]"


def _size(aval: Any) -> int:
    return int(getattr(aval, "size", 0))
