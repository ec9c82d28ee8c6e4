"""The flagged program: one program that rounds, group by group, where a flag says so.

It computes in the dtypes that the function was traced in. Where the plan reads or
writes half precision it rounds to half and back, if the flag of the equation's group is
`BASE`; other flags round to the dtypes of other policies, or not at all. The flags are
an input of the program: one compilation measures every choice of groups. A cast is
linear to JAX, so the cotangents of what is rounded are rounded too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.numerics.tune.groups import OUTSIDE, Group, Place, is_rounded
from jmp_amp.plan.dataflow.values import traced_dtype
from jmp_amp.plan.plan import EquationPlan, Plan
from jmp_amp.plan.program import binding, constructs, jaxprs, meshes
from jmp_amp.plan.program.jaxprs import Eqn, Literal, Value, Var, aval_of
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.walk import Walk
from jmp_amp.policies.dtypes import BF16, F32, is_half
from jmp_amp.transform.derivatives import with_planned_rule
from jmp_amp.transform.interpreter import Replay

# The flag of a group that rounds as the plan says.
BASE = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A value of the flagged program, and how the plan holds it.

    Attributes:
      array: the value, in the dtype that it was traced in.
      dtype: the dtype in which the plan holds it; None if it is never cast.
      waiting: the half dtype that it was cast to since it was made. Whose reads it
        rounds it: casts are shared, and the flags of their readers differ.
      group: the number of the group that made it and rounded it to `dtype`, if one did.
      saturates: whether rounding keeps it finite.
    """

    array: Value
    dtype: np.dtype | None
    waiting: np.dtype | None = None
    group: int | None = None
    saturates: bool = False

    def narrow(self, reader: int | None) -> np.dtype | None:
        """Returns the half dtype that a reader rounds the value to, if it has to."""
        if self.waiting is not None:
            return self.waiting
        return None if reader == self.group is not None else _half(self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Flagged(Walk[Held]):
    """A walk that computes as traced, and rounds what the plan has in half precision.

    Attributes:
      flags: int32[number of groups].
      numbers: the place of each group among the flags; for modules that are one group,
        without the name of an operation.
      others: for each flag above `BASE`, the half dtype that it rounds to; None for one
        that leaves values as they are.
      place: where the body is.
    """

    flags: Value
    numbers: Mapping[Group, int]
    others: Sequence[np.dtype | None]
    place: Place = OUTSIDE

    def _number(self, eqn: Eqn) -> int | None:
        """Returns the number of the group of an equation."""
        group = self.place.group(eqn)
        of_module = None if group.is_fixed else self.numbers.get(Group(group.path))
        return self.numbers.get(group, of_module)

    def run(self, plan: Plan, inputs: Sequence[Held]) -> list[Value]:
        """Returns the outputs of a planned body, rounded as it returns them."""
        return [
            self._rounded(held, held.waiting, held.group)
            for held in self.body(plan, inputs)
        ]

    def constant(self, value: Value, var: Var) -> Held:
        return Held(Replay().constant(value, var), traced_dtype(var))

    def literal(self, atom: Literal, dtype: np.dtype | None, saturate: bool) -> Held:
        # It may be a number of Python.
        value = np.asarray(atom.val, aval_of(atom).dtype)
        array = jnp.asarray(value) if value.ndim else value[()]
        halves = [each for each in (dtype, *self.others) if is_half(each)]
        if all(value.astype(half) == value for half in halves if not value.ndim):
            return Held(array, F32)  # the same number in every dtype
        return Held(array, dtype, _half(dtype), saturates=saturate)

    def dtype_of(self, value: Held) -> np.dtype | None:
        return value.dtype

    def cast(self, value: Held, dtype: np.dtype, saturate: bool) -> Held:
        waiting = _half(dtype) or value.waiting
        return dataclasses.replace(
            value, dtype=dtype, waiting=waiting, saturates=saturate
        )

    def equation(
        self, eqn: Eqn, planned: EquationPlan, read: Callable[[], list[Held]]
    ) -> list[Held]:
        operands = read()
        with binding.source_of(eqn):
            if planned.bodies:
                results = self._call(eqn, planned, operands)
                return list(map(Held, results, planned.writes))
            if is_rounded(eqn, planned):
                return self._in_half(eqn, planned, operands)
            arrays = [
                # What is cast to half on its way and read in f32 has lost its digits.
                self._rounded(x, x.waiting if dtype == F32 else None, self._number(eqn))
                for x, dtype in zip(operands, planned.reads, strict=True)
            ]
            results = binding.bind(eqn, arrays)
        return list(map(Held, results, planned.writes, map(_half, planned.writes)))

    def _in_half(
        self, eqn: Eqn, planned: EquationPlan, operands: Sequence[Held]
    ) -> list[Held]:
        group, rewrite = self._number(eqn), planned.rewrite
        arrays = [self._rounded(x, x.narrow(group), group) for x in operands]
        results = binding.bind(eqn, arrays)
        if group is not None and rewrite is not None and rewrite.fp8 is not None:
            in_8_bits = self._in_8_bits(eqn, rewrite, operands)
            results = [jax.lax.select(self._flag(group) == BASE, in_8_bits, *results)]
        made = zip(results, planned.yields, planned.writes, strict=True)
        return [
            Held(
                self._rounded(Held(x, kept), _half(computed) or _half(kept), group),
                kept,
                group=group,
            )
            for x, computed, kept in made
        ]

    def _in_8_bits(
        self, eqn: Eqn, rewrite: Rewrite, operands: Sequence[Held]
    ) -> jax.Array:
        """Returns a product of 8-bit floats in f32, with its derivative."""
        half = [jax.lax.convert_element_type(x.array, BF16) for x in operands]
        (result,) = rewrite.bind(eqn, BF16, half)
        return jax.lax.convert_element_type(result, F32)

    def _rounded(self, held: Held, dtype: np.dtype | None, number: int | None) -> Value:
        """Returns a value rounded to `dtype`, or as the flag of a group says."""
        array = held.array
        if dtype is None or number is None or array.dtype != F32:
            return array
        array = jnp.asarray(array)
        with meshes.in_mesh_of(array):
            cases = [
                array if each is None else _there_and_back(array, each, held.saturates)
                for each in (dtype, *self.others)
            ]
            flag = self._flag(number)
            return jax.lax.select_n(flag if len(cases) > 2 else flag != BASE, *cases)

    def _flag(self, number: int) -> jax.Array:
        with meshes.in_mesh_of(self.flags):
            flag = self.flags[number]
        return meshes.here(flag)

    def _call(
        self, eqn: Eqn, planned: EquationPlan, operands: Sequence[Held]
    ) -> list[Value]:
        if jaxprs.is_custom_jvp(eqn):
            return self._custom_jvp(eqn, planned, operands)
        functions = [
            self._inner(eqn, planned, number, [operands[i] for i in inner.operands])
            for number, inner in enumerate(jaxprs.inner_bodies(eqn))
        ]
        arrays = [each.array for each in operands]
        if jaxprs.is_shard_map(eqn):
            # A function that is mapped over shards closes over no value.
            return constructs.bind_shard_map(
                eqn,
                lambda *shards: functions[0](*shards[:-1], flags=shards[-1]),
                [*arrays, self.flags],
            )
        return constructs.bind_functions(eqn, functions, arrays)

    def _inner(
        self, eqn: Eqn, planned: EquationPlan, number: int, operands: Sequence[Held]
    ) -> Callable[..., list[Value]]:
        """Returns a body of an equation as a function of arrays."""
        plan = planned.bodies[number]
        place = self.place.inside(eqn, planned.index, number)
        avals = [aval_of(v) for v in plan.body.jaxpr.outvars]

        def run_body(*arrays: Value, flags: Value = self.flags) -> list[Value]:
            walk = dataclasses.replace(self, place=place, flags=flags)
            held = [
                # In a loop, another group makes it for the next turn.
                dataclasses.replace(each, array=x, group=None)
                for each, x in zip(operands, arrays, strict=True)
            ]
            return list(map(binding.as_output, walk.run(plan, held), avals))

        return run_body

    def _custom_jvp(
        self, eqn: Eqn, planned: EquationPlan, operands: Sequence[Held]
    ) -> list[Value]:
        """Runs the primal; its derivative is the planned rule of the user."""
        run_body = self._inner(eqn, planned, 0, operands)
        place = self.place.inside(eqn, planned.index, 0)

        def run_rule(
            rule: Plan, inputs: Sequence[Value], moving: Sequence[int]
        ) -> list[Value]:
            count = len(eqn.invars)
            walk = dataclasses.replace(self, place=place, flags=inputs[count])
            dtypes = [*planned.reads, *(planned.reads[i] for i in moving)]
            arrays = [*inputs[:count], *inputs[count + 1 :]]
            return walk.run(rule, list(map(Held, arrays, dtypes)))

        # The rule may be traced when the trace around this call is over, so that the
        # flags come as an operand.
        call = with_planned_rule(
            lambda *xs: run_body(*xs[:-1], flags=xs[-1]), eqn, planned, run_rule
        )
        return list(call(*(each.array for each in operands), self.flags))


def _half(dtype: np.dtype | None) -> np.dtype | None:
    return dtype if is_half(dtype) else None


def _there_and_back(array: Value, dtype: np.dtype, saturate: bool) -> Value:
    half = Replay().cast(array, dtype, saturate)
    return jax.lax.convert_element_type(half, array.dtype)
