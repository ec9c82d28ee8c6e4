"""Reading a plan: what happens in every equation of a program, as plain data.

The plan is walked as the interpreter walks it, with dtypes in place of arrays. What
comes out is the list of its equations in the order of the program, each with the module
that it is in and the casts that it costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.core
import numpy as np

from jmp_amp.plan.dataflow.values import castable, traced_dtype
from jmp_amp.plan.plan import EquationPlan
from jmp_amp.plan.program import jaxprs, scope_text, source_code
from jmp_amp.plan.program.dimensions import as_number, elements_of, sides_of
from jmp_amp.plan.program.jaxprs import Eqn, Literal, Value, Var, aval_of
from jmp_amp.plan.rewrites.f32_gradients import NOTE
from jmp_amp.plan.saved.needs import Part, part_of
from jmp_amp.plan.tables.operations import OPERATIONS
from jmp_amp.plan.walk import Walk
from jmp_amp.policies.dtypes import short_name
from jmp_amp.policies.patterns import describe, text_of
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports.askers import asked_for
from jmp_amp.reports.costs import (
    Matmuls,
    added_up,
    matmul_of,
    products_inside,
    turns_of,
)
from jmp_amp.reports.opaque import reason_of
from jmp_amp.reports.rows import Cast, Equation
from jmp_amp.reports.ways import Frame, Place
from jmp_amp.transform.planned import PlannedCall
from jmp_amp.transform.scopes import entry_of


def read_plan(call: PlannedCall) -> tuple[Equation, ...]:
    """Returns what happens in every equation of a planned program, in its order.

    Equations whose results nobody reads are left out: they do not run.
    """
    on_cpu = call.cpu is not None
    # No entry switches off what a CPU does not have.
    switched_off = {} if on_cpu else _switched_off(call.policies)
    program = Frame(call.plan, inputs_of(call))
    found, returned = _Reader(program, _Context(switched_off, on_cpu)).read()
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


def inputs_of(call: PlannedCall) -> tuple[np.dtype | None, ...]:
    """Returns the dtype in which each input of a plan comes; None: it is never cast.

    An argument may be stored in another dtype than it was traced in.
    """
    invars = call.plan.body.jaxpr.invars
    return tuple(
        traced_dtype(v) and np.dtype(array.dtype)
        for v, array in zip(invars, call.traced.arrays, strict=True)
    )


def _switched_off(policies: PolicyMap) -> dict[int, str]:
    """Returns the entries that switch fp8 off, with the reason for the report."""
    if policies.default.matmul is None:
        return {}
    return {
        number: f"the policy of {text_of(pattern) or describe(pattern)}"
        for number, (pattern, policy) in enumerate(policies.entries)
        if policy.matmul is None
    }


@dataclasses.dataclass(frozen=True, eq=False)
class _Slot:
    """A value of the report's walk: the dtype of a variable, and its maker.

    Attributes:
      var: the variable; None for a literal.
      dtype: the dtype that it is held in; None if it is never cast.
      maker: the index of the equation of the same body that made it, if one did.
    """

    var: Var | None
    dtype: np.dtype | None
    maker: int | None = None


@dataclasses.dataclass(frozen=True)
class _Context:
    """What a body has of the program, and of the equations that call it.

    Attributes:
      switched_off: for each entry of the map without fp8, why a product is not fp8.
      on_cpu: whether the plan is for a CPU.
      module: the path of the module that it is called in.
      times: how often it runs.
      entry: the number of the entry of the map that gave the module its policy.
      by_policy: whether it was traced in the dtypes of the policy.
      again: whether the backward pass makes an equation again, by its path through
        helpers; None asks the blocks of the body.
      path: the path to the body through helpers.
    """

    switched_off: Mapping[int, str]
    on_cpu: bool
    module: str = ""
    times: int = 1
    entry: int | None = None
    by_policy: bool = False
    again: Callable[[tuple[int, ...]], bool] | None = None
    path: tuple[int, ...] = ()

    def inside(self, eqn: Eqn) -> _Context:
        """Returns the context of an equation: its scopes say where it is."""
        scope = jaxprs.scope_text(eqn)
        entry = entry_of(scope) if self.switched_off else None
        return dataclasses.replace(
            self,
            module=joined(self.module, *module_scopes(eqn)),
            entry=self.entry if entry is None else entry,
            by_policy=self.by_policy
            or scope_text.is_noted(scope_text.BY_POLICY, scope),
        )


class _Reader(Walk[_Slot]):
    """A walk that notes the casts and the equations of one body at a time.

    Attributes:
      frame: the body.
      context: where it is.
      found: the rows of each of its equations: its own, and those of its bodies.
      casts: the casts since the last equation, with the slots that they read.
    """

    def __init__(self, frame: Frame, context: _Context) -> None:
        if context.again is None:
            made = {path for each in frame.plan.blocks for path in each.recomputed}
            context = dataclasses.replace(context, again=made.__contains__)
        self.frame, self.context = frame, context
        self.found: dict[int, list[Equation]] = {}
        self.casts: list[tuple[_Slot, np.dtype]] = []

    def read(self) -> tuple[list[Equation], list[Cast]]:
        """Returns the equations, and the casts of outputs that none of them made."""
        plan = self.frame.plan
        self.body(plan, list(map(_Slot, plan.body.jaxpr.invars, self.frame.inputs)))
        others = self._returned()
        return [e for index in sorted(self.found) for e in self.found[index]], others

    def constant(self, value: Value, var: Var) -> _Slot:
        return _Slot(var, traced_dtype(var))

    def literal(self, atom: Literal, dtype: np.dtype | None, saturate: bool) -> _Slot:
        return _Slot(None, dtype)

    def dtype_of(self, value: _Slot) -> np.dtype | None:
        return value.dtype

    def cast(self, value: _Slot, dtype: np.dtype, saturate: bool) -> _Slot:
        self.casts.append((value, dtype))
        return dataclasses.replace(value, dtype=dtype)

    def equation(
        self, eqn: Eqn, planned: EquationPlan, read: Callable[[], list[_Slot]]
    ) -> list[_Slot]:
        read()
        operands = self._noted("operand")
        # A cast of the program's own is not one that the plan inserts.
        casts = [] if jaxprs.is_conversion(eqn) else operands
        slots = []
        for var, made, kept in zip(
            eqn.outvars, planned.yields, planned.writes, strict=True
        ):
            slots.append(_Slot(var, kept, planned.index))
            if made is not None and kept is not None and made != kept:
                casts.append(self._cast(_Slot(var, made), kept, "result"))
        at, here = self.frame.places[planned.index], self.context.inside(eqn)
        again = not planned.bodies and self._is_again(planned)
        rows: list[Equation] = []
        for body in at.inner:
            equations, returned = self._inside(at, body, here)
            rows += equations
            casts += returned
        self.found[planned.index] = [_row(at, here, casts, again), *rows]
        return slots

    def _is_again(self, planned: EquationPlan) -> bool:
        again, path = self.context.again, self.context.path
        return again is not None and again((*path, planned.index))

    def _inside(
        self, at: Place, body: Frame, here: _Context
    ) -> tuple[list[Equation], list[Cast]]:
        """Returns the rows of a body of an equation, and the casts of its outputs."""
        again, path = None, ()
        if (part := part_of(at.eqn)) is Part.HELPER:
            again, path = here.again, (*here.path, at.index, body.number)
        elif part is Part.RULE and self._is_again(at.planned):
            again = bool  # all of it: no path is empty
        context = dataclasses.replace(
            here,
            module=joined(here.module, source_code.jitted_name(at.eqn) or ""),
            times=here.times * turns_of(at.eqn),
            again=again,
            path=path,
        )
        return _Reader(body, context).read()

    def _noted(self, where: str) -> list[Cast]:
        """Returns the casts since the last equation."""
        noted, self.casts = self.casts, []
        return [self._cast(slot, dtype, where) for slot, dtype in noted]

    def _cast(self, slot: _Slot, dtype: np.dtype, where: str) -> Cast:
        assert slot.var is not None and slot.dtype is not None
        elements = _size(slot.var) * self.context.times
        return Cast(short_name(slot.dtype), short_name(dtype), elements, where)

    def _returned(self) -> list[Cast]:
        """Notes the casts of outputs where they were made; returns the others."""
        others = []
        slots = [slot for slot, _ in self.casts]
        for slot, cast in zip(slots, self._noted("result"), strict=True):
            if slot.maker in self.found:
                maker, *inner = self.found[slot.maker]
                maker = dataclasses.replace(maker, casts=(*maker.casts, cast))
                self.found[slot.maker] = [maker, *inner]
            else:
                others.append(cast)
        return others


def _row(
    at: Place, here: _Context, casts: Sequence[Cast], recomputed: bool
) -> Equation:
    eqn, planned = at.eqn, at.planned
    is_opaque = _is_opaque(eqn, planned)
    matmuls = _matmuls(eqn, planned, is_opaque, here.times)
    dtype = None if planned.bodies else _dtype(eqn, planned)
    fp8 = None if planned.rewrite is None else planned.rewrite.fp8
    is_fp8 = fp8 is not None
    reason = f"{planned.reason}; {NOTE}" if planned.f32_gradients else planned.reason
    row = Equation(
        module=here.module,
        operation=eqn.primitive.name,
        calls=_called(eqn),
        source=source_code.source_line(eqn),
        shapes=tuple(map(_shape, eqn.outvars)),
        dtype=fp8.forward if fp8 else ("" if dtype is None else short_name(dtype)),
        is_floating=not planned.bodies and _is_floating(eqn),
        op_class=planned.rule.op_class.value,
        decided_by=planned.rule.decided_by,
        from_policy=planned.rule.from_user,
        reason=reason_of(eqn, matmuls, here.on_cpu) if is_opaque else reason,
        casts=tuple(casts),
        matmuls=matmuls.total,
        matmuls_in_half=matmuls.in_half,
        flops=matmuls.flops,
        flops_in_half=matmuls.flops_in_half,
        fp8_matmuls=int(is_fp8),
        fp8_flops=matmuls.flops * is_fp8,
        smallest_side=min(map(as_number, sides_of(eqn))) if is_fp8 else 0,
        quantisations=2 * is_fp8,
        elements=sum(map(_size, eqn.outvars)) * here.times,
        times=here.times,
        depth=len(at.identity) // 2,
        is_opaque=is_opaque,
        identity=str(at.identity),
        recomputed=recomputed,
        f32_gradients=len(planned.f32_gradients),
    )
    if not here.by_policy:
        row = asked_for(row, eqn, planned)
    # The map may be why a product is not one of 8-bit floats.
    is_low = row.matmuls and row.op_class == "low" and not is_fp8
    without_fp8 = None if here.entry is None else here.switched_off.get(here.entry)
    if is_low and without_fp8 is not None:
        return dataclasses.replace(row, reason=without_fp8)
    return row


def _dtype(eqn: Eqn, planned: EquationPlan) -> np.dtype | None:
    dtypes = [planned.dtype, *planned.reads, *planned.writes]
    known = [dtype for dtype in dtypes if dtype is not None]
    traced = [
        aval_of(v).dtype
        for v in eqn.outvars
        if isinstance(v.aval, jax.core.ShapedArray)
    ]
    return next(iter(known + traced), None)


def _is_floating(eqn: Eqn) -> bool:
    return any(castable(v) for v in (*eqn.invars, *eqn.outvars))


def _is_opaque(eqn: Eqn, planned: EquationPlan) -> bool:
    name = eqn.primitive.name
    if planned.bodies or name in OPERATIONS or not _is_floating(eqn):
        return False
    return "call" in name or bool(jaxprs.owned_bodies(eqn))


def _matmuls(eqn: Eqn, planned: EquationPlan, opaque: bool, times: int) -> Matmuls:
    if opaque:
        return added_up(cost for _, cost in products_inside(eqn, times))
    dtypes = [
        dtype or getattr(v.aval, "dtype", None)
        for dtype, v in zip(planned.reads, eqn.invars, strict=True)
    ]
    return matmul_of(eqn, dtypes, times)


def _called(eqn: Eqn) -> str:
    if name := source_code.function_name(eqn):
        return name
    for body in jaxprs.owned_bodies(eqn):
        name = body.jaxpr.debug_info.func_name
        if name and name.isidentifier():
            return name
    return ""


def module_scopes(eqn: Eqn) -> list[str]:
    """Returns the names of the modules that the name stack of `eqn` tells."""
    return scope_text.module_names(jaxprs.scope_text(eqn))


def joined(path: str, *names: str) -> str:
    """Returns the path of a module and the names of what is inside of it, as one."""
    return "/".join(name for name in (path, *names) if name)


def _shape(var: Var) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _size(var: Var) -> int:
    shape = getattr(var.aval, "shape", None)
    return 0 if shape is None else elements_of(shape)
