"""The interpreter: runs a plan in place of the program that it was made for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jmp_amp.plan.plan import Block, EquationPlan, Key, Plan
from jmp_amp.plan.program import (
    binding,
    constructs,
    jaxprs,
    meshes,
    source_code,
)
from jmp_amp.plan.program.jaxprs import ClosedJaxpr, Eqn, Literal, Value, Var, aval_of
from jmp_amp.plan.rewrites.f32_gradients import (
    as_cast,
    with_f32_gradients,
)
from jmp_amp.plan.saved.needs import KEPT
from jmp_amp.plan.walk import Values, Walk
from jmp_amp.policies.dtypes import F32
from jmp_amp.transform.blocks import run_block
from jmp_amp.transform.derivatives import with_planned_rule
from jmp_amp.transform.marking import Marks

# The marks of a plain replay.
_NO_MARKS = Marks()


def run(
    plan: Plan, args: Sequence[Value], marks: Marks = _NO_MARKS, recomputes: bool = True
) -> list[jax.Array]:
    """Runs the planned body on `args`, one for each of its inputs."""
    try:
        return Replay(recomputes=recomputes, marks=marks).body(plan, args)
    except (KeyError, jax.errors.UnexpectedTracerError, AttributeError) as error:
        # A checkpoint and a `custom_jvp` say how a backward pass goes, and what jet
        # computes has none.
        if not _is_of_jet(error):
            raise
        return Replay(False, False, marks).body(plan, args)


def _is_of_jet(error: Exception) -> bool:
    """Whether `jax.experimental.jet` raises an error where it lacks a rule.

    It looks for that of `jax.checkpoint` in a dictionary. It runs the function of a
    `custom_jvp` outside of its own trace, which JAX finds or stumbles over.
    """
    if isinstance(error, KeyError):
        return any(key is jaxprs.CHECKPOINT for key in error.args)
    if isinstance(error, AttributeError):  # JAX > 0.10
        return error.name == "process_primitive"
    return "JetTracer" in str(error)


@dataclasses.dataclass(eq=False)
class Replay(Walk[Value]):
    """One replay of a plan on arrays.

    Attributes:
      differentiates: whether what it runs may be differentiated. Not so the primal of
        a `custom_jvp`, which has a rule, and what jet runs.
      recomputes: whether it runs the blocks of the plan as such.
      marks: what it leaves on the equations that it binds.
      block_kept: inside a block, what of it is kept, see `Block`.
      path: inside a block, the way through helpers to the body.
      staged: the bodies that were staged, each of them once. They are closed jaxprs and
        hold no tracers, so the traces inside `jax.checkpoint` share them too.
    """

    differentiates: bool = True
    recomputes: bool = True
    marks: Marks = _NO_MARKS
    block_kept: Mapping[tuple[int, ...], frozenset[Key]] = dataclasses.field(
        default_factory=dict
    )
    path: tuple[int, ...] = ()
    staged: dict[Plan, ClosedJaxpr] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # A measured cast is one of its reader, as the plan says.
        self.casts_before = not self.marks.tells_equations

    def constant(self, value: Value, var: Var) -> Value:
        # JAX keeps small constants as numpy arrays. A custom rule may index them by a
        # tracer, which numpy arrays refuse.
        return jnp.asarray(value) if isinstance(value, np.ndarray) else value

    def literal(self, atom: Literal, dtype: np.dtype | None, saturate: bool) -> Value:
        value = atom.val
        if not hasattr(value, "dtype"):
            # JAX writes `where(True, x, y)` with the boolean of Python.
            value = np.asarray(value, aval_of(atom).dtype)[()]
        if dtype is not None and value.dtype != dtype:
            if saturate and np.isfinite(value):
                largest = float(jnp.finfo(dtype).max)
                value = np.clip(value, -largest, largest)
            value = np.asarray(value).astype(dtype)
        return jnp.asarray(value) if np.ndim(value) else value

    def dtype_of(self, value: Value) -> np.dtype:
        return value.dtype

    def cast(self, value: Value, dtype: np.dtype, saturate: bool) -> Value:
        with self.marks.cast(), meshes.in_mesh_of(value):
            if saturate:
                largest = jnp.finfo(dtype).max.astype(value.dtype)
                clipped = jax.lax.clamp(-largest, value, largest)
                value = jax.lax.select(jnp.isinf(value), value, clipped)
            return binding.converted(value, dtype)

    def moved(self, eqn: Eqn, operands: Sequence[Value]) -> list[Value]:
        with binding.source_of(eqn):
            return binding.bind(eqn, operands)

    def as_cast(self, value: Value, cast: Value) -> Value:
        return as_cast(value, cast)

    def keeps(self) -> Set[Key]:
        return self.block_kept.get(self.path, frozenset())

    def kept(self, value: Value, key: Key) -> Value:
        return checkpoint_name(value, KEPT)

    def block(self, values: Values[Value], block: Block) -> None:
        if not self.recomputes:
            self.through(values, block.start, block.stop)
            return
        if self.marks.tells_equations:
            # It is measured: it takes longer to compile apart.
            block = block._replace(apart=False)
        # Not a method, which holds this replay: the arrays of the plan would stay until
        # Python collects garbage.
        replay = functools.partial(
            Replay, self.differentiates, False, self.marks, block.kept
        )
        run_block(values, block, replay)

    def equation(
        self, eqn: Eqn, planned: EquationPlan, read: Callable[[], list[Value]]
    ) -> list[Value]:
        with binding.source_of(eqn), self.marks.equation(planned):
            operands = read()
            if planned.bodies:
                return self._call(eqn, planned, operands)
            wide = planned.f32_gradients if self.differentiates else ()
            before = len(operands) - len(wide)
            # `value_and_grad` holds half parameters in f32.
            f32 = [self.cast(x, F32, False) for x in operands[before:]]
            held = dict(zip(wide, f32, strict=True))
            bound = self.bound(eqn, planned, operands[:before], held)
            bound = self.marks.results(eqn, bound)
            if keeps := self.keeps():
                bound = [
                    self.kept(x, (v, None)) if (v, None) in keeps else x
                    for v, x in zip(eqn.outvars, bound, strict=True)
                ]
            with self.marks.cast():
                return [
                    x if dtype is None else binding.converted(x, dtype)
                    for x, dtype in zip(bound, planned.writes, strict=True)
                ]

    def bound(
        self,
        eqn: Eqn,
        planned: EquationPlan,
        operands: Sequence[Value],
        held: Mapping[int, Value] | None = None,
    ) -> Sequence[Value]:
        """Returns the results of an equation that calls nothing, as it makes them.

        Args:
          eqn, planned: the equation and its plan.
          operands: as it reads them.
          held: those whose gradient leaves in f32, as they are held.
        """
        held, rewrite = held or {}, planned.rewrite
        if rewrite is not None and rewrite.measured and self.marks.tells_equations:
            rewrite = rewrite.measured
            planned = dataclasses.replace(planned, rewrite=rewrite)
        if rewrite is not None and rewrite.takes_held:
            operands = [held.get(i, x) for i, x in enumerate(operands)]
            held = {}
        run = functools.partial(self._bound, eqn, planned)
        return with_f32_gradients(eqn, run, operands, held) if held else run(operands)

    def _bound(
        self, eqn: Eqn, planned: EquationPlan, operands: Sequence[Value]
    ) -> Sequence[Value]:
        """Returns the results of an equation, whose derivative is that of JAX."""
        if jaxprs.is_conversion(eqn):
            (source,), (target,) = planned.reads, planned.writes
            if source is not None and target is not None:
                return [binding.converted(operands[0], target)]
        rewrite, dtype = planned.rewrite, planned.dtype
        if rewrite is None:
            changed = {} if dtype is None else jaxprs.retyped(eqn, dtype)
            return binding.bind(eqn, operands, **changed)
        if rewrite.derivative_only and not self.differentiates:
            return binding.bind(eqn, operands)
        return rewrite.bind(eqn, dtype, operands)

    def _call(
        self, eqn: Eqn, planned: EquationPlan, operands: Sequence[Value]
    ) -> list[Value]:
        bodies = planned.bodies
        if jaxprs.is_custom_jvp(eqn):
            return self._custom_jvp(eqn, planned, operands)
        if source_code.is_helper(eqn):
            return self._inside(planned).body(bodies[0], operands)
        if jaxprs.is_shard_map(eqn):
            return constructs.bind_shard_map(
                eqn, lambda *shards: self._apart(bodies[0], shards), operands
            )
        staged = [
            self._staged(plan, [planned.reads[i] for i in inner.operands])
            for inner, plan in zip(jaxprs.inner_bodies(eqn), bodies, strict=True)
        ]
        return binding.bind_staged(eqn, staged, operands)

    def _inside(self, planned: EquationPlan) -> Replay:
        """Returns the replay of the body of a helper."""
        if not self.block_kept:
            return self
        # It is written out: the block around it says what of it is kept.
        return dataclasses.replace(self, path=(*self.path, planned.index, 0))

    def _apart(self, plan: Plan, args: Sequence[Value]) -> list[Value]:
        """Runs a body that is traced apart."""
        with self.marks.body():
            return self.body(plan, args)

    def _staged(self, plan: Plan, dtypes: Sequence[np.dtype | None]) -> ClosedJaxpr:
        """Returns the closed jaxpr of a planned body, staged once for all its calls."""
        if plan not in self.staged:
            avals = [aval_of(v) for v in plan.body.jaxpr.outvars]

            def run_body(*args: Value) -> list[jax.Array]:
                return list(map(binding.as_output, self._apart(plan, args), avals))

            self.staged[plan] = binding.trace(
                run_body, binding.retyped_avals(plan.body, dtypes)
            )
        return self.staged[plan]

    def _custom_jvp(
        self, eqn: Eqn, planned: EquationPlan, operands: Sequence[Value]
    ) -> list[Value]:
        """Runs the planned primal; its derivative is the planned rule of the user."""
        (body,) = planned.bodies

        def primal(*xs: Value) -> list[Value]:
            return Replay(False, self.recomputes, self.marks)._apart(body, xs)

        primal.__name__ = source_code.function_name(eqn) or primal.__name__

        def run_rule(
            rule: Plan, inputs: Sequence[Value], moving: Sequence[int]
        ) -> list[Value]:
            self.marks.derivative(rule, eqn, planned)
            return run(rule, inputs, self.marks, self.recomputes)

        return list(with_planned_rule(primal, eqn, planned, run_rule)(*operands))
