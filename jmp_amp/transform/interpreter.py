"""Autocast: trace a function, plan it, and run the plan in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jmp_amp.plan.dataflow.values import is_inexact
from jmp_amp.plan.plan import Block, EquationPlan, Key, Plan
from jmp_amp.plan.program import binding, constructs, jaxprs, meshes, source_code
from jmp_amp.plan.program.cpu_target import checked_target, cpu_of
from jmp_amp.plan.program.jaxprs import ClosedJaxpr, Eqn, Literal, Value, Var, aval_of
from jmp_amp.plan.rewrites.f32_gradients import as_cast, with_f32_gradients
from jmp_amp.plan.rewrites.rewriting import Shared
from jmp_amp.plan.walk import Values, Walk
from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.policies.flags import checked_flag
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap, as_policy_map
from jmp_amp.policies.tracebacks import own_frames_hidden
from jmp_amp.policies.two_calls import in_two_calls
from jmp_amp.transform import linen_modules, scopes
from jmp_amp.transform.blocks import Run, run_block
from jmp_amp.transform.derivatives import planned_rule
from jmp_amp.transform.functions import check_function, wraps
from jmp_amp.transform.marking import Marks
from jmp_amp.transform.planned import PlannedCall, planned_call
from jmp_amp.transform.stored_blocks import Keeper, named

P = ParamSpec("P")
R = TypeVar("R")
Policies = Policy | PolicyMap | str


@overload
def autocast(
    fn: Callable[P, R],
    policy: Policies = ...,
    *,
    enabled: bool = ...,
    target: str | None = ...,
) -> Callable[P, R]: ...
@overload
def autocast(
    fn: None = None,
    policy: Policies = ...,
    *,
    enabled: bool = ...,
    target: str | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@in_two_calls
def autocast(
    fn: AnyFn | None = None,
    policy: Policies = "mixed_bfloat16",
    *,
    enabled: bool = True,
    target: str | None = None,
) -> Any:
    """Returns `fn` in mixed precision: same signature, matrix products in half.

    The function is traced, every floating-point operation of the whole program gets a
    dtype, and the program with these dtypes runs in its place. Matrix products and
    convolutions run in the policy's `compute_dtype`; exponentials, logarithms, sums,
    norms, softmaxes and losses in float32; everything else follows its operands, and
    runs in float32 where a float32 operation reads it. The table of operations is in
    `jmp_amp/plan/tables/operations.py`, that of functions beside it in `rules.py`.

    Every call traces `fn` anew, so call the result under `jax.jit`. Differentiate it,
    `jax.grad(amp.autocast(loss))`: the backward matrix products run in half too and the
    gradients of float32 parameters are float32. It composes with every transformation
    of JAX, inside and outside. (`jax.experimental.jet` knows no `jax.checkpoint`, which
    is in the result: use it on `autocast(fn)` itself, and `jax.jit` around jet.)

    Under a policy whose `matmul` is an `Fp8`, such as "fp8", matrix products multiply
    8-bit floats, forward and backward; all else is as under `mixed_bfloat16`. These
    products have no second derivatives: NotImplementedError.

    Loops, branches, calls and sharded maps are entered. Half precision is for what
    matrix units read and for what is stored between layers. Float32 is

    * what the function returns in float32, made so by the operation that makes it,
      whatever else reads it: elements that nobody wrote keep their bits;
    * what a loop keeps over its turns: the carry of a `scan` that starts as an argument
      or a constant, or that no layer reads. A layer multiplies by another matrix in
      each turn, a slice of what the loop goes through. A stream between layers, which a
      product or an embedding lookup began, is half. (So the stream of layers that share
      their weights, a universal transformer, is float32 in a loop.)
    * an argument plus what is made of it (`y + dt * f(y)`: a state), and the difference
      of an argument and an activation. What is only added, such as a bias, follows. An
      array that the function closes over is an argument;
    * what becomes an index: all that leads to `floor`, `ceil`, `round`, a cast to an
      integer, or a choice by rank (`argmax`, `top_k`, `argsort`); a grid that counts
      further than half precision does, and the product of one-hot rows with it;
    * a bound that half precision rounds onto a round number: `clip(p, 1e-4, 1 - 1e-4)`;
    * in float16, what an argument scales, from one product to the next;
    * what linear algebra reads, back to the product: the Gram matrix and the right side
      of a linear system, the covariance of a filter, a kernel. A layer whose result is
      solved stays half, and so does a layer in front of a Gram matrix;
    * distances by a product, `|a|**2 - 2 * a @ b.T + |b|**2`, and second moments less
      squared means, `y.T @ y / n - outer(m, m)`: their digits cancel;
    * what `stop_gradient` alone reads, back to the product: no derivative saves it;
    * the body of a `while_loop` that runs until a float of its body is small enough;
    * a product with `precision=` HIGH or HIGHEST, one without a free dimension (`vdot`,
      which is a sum), and the functions of `jnp.linalg`, `jax.scipy.linalg` and
      `jax.random`, whole.

    A product that adds nothing up is a multiplication, however it is spelled:
    `einsum("i,j->ij", positions, frequencies)` is float32 as `positions[:, None] *
    frequencies` is.

    `amp.explain(fn, policy)(*args).why(identity)` tells why an operation has its dtype.

    The gradients of a table are summed in float32 over all lookups of a row. Those of a
    lookup of activations are, if it reads each row 16 times in the mean; else the sum
    is half, which costs digits where one row is looked up hundreds of times.

    What the backward pass keeps is a part of the plan, see `saved` of `Policy`. Inside
    of loops it is the least. Elsewhere elementwise chains are made again from what is
    kept anyway. The operations and their order are those of `saved="all"`, and so are
    values and gradients bit for bit, where XLA fuses them alike. With "int8" and "e4m3"
    what is kept in half is kept in 8 bits, and gradients are rounded.

    What is left alone: integers, booleans, complex, float64, fp8 and PRNG keys; dtypes
    that the program asks for, such as `x.astype(jnp.bfloat16)`; and, computed as they
    were traced, `custom_vjp` functions, callbacks and Pallas kernels that `cast_inputs`
    does not mark. In a float32 program `x.astype(jnp.float32)` is no operation and
    asks for nothing: `full_precision` does.

    nnx modules may be arguments or closed over: what the function writes to them
    reaches the caller's objects, as under `nnx.jit`. What a linen model writes comes
    out of `autocast(model.apply)`; a method of linen that `autocast` decorates may make
    parameters, but write nothing later.

    Args:
      fn: a function of pytrees. Arguments that are no arrays (numbers of Python and
        numpy, strings, callables, modules) reach it unchanged, and so do those of its
        results. Arrays, numpy's too, are traced. Called without `fn`, `autocast` is a
        decorator.
      policy: a `Policy`, what `get_policy` understands, or a `PolicyMap`, by module of
        linen or nnx. Outputs that were float32 come back in its `output_dtype`; those
        of linen's mutable collections and of nnx variables stay as they are. If its
        `param_dtype` is half, `fn` is traced as if its half arguments were float32; a
        half result of the structure and shapes of an argument, as the carry of a loop
        is, stays half.
      enabled: False returns `fn` itself.
      target: the device that the plan is for. "gpu", "tpu" and None make one plan, the
        one described above. "cpu" is the CPU of this machine. "auto" is JAX's default
        backend when the result is called. A CPU that has instructions for bf16 products
        (AVX512-BF16, AMX) runs large products, and convolutions of one pixel, with bf16
        operands and f32 results, forward and backward; everything else is f32, and
        `cast_inputs` without a dtype changes nothing. Under an f16 policy its products
        are f32, under an fp8 policy bf16. Another CPU runs everything in f32. The
        results have the same dtypes for every target.
        `jax.export` takes bf16 products for a CPU with `disabled_checks=[jax.export.
        DisabledSafetyCheck.custom_call("LayoutConstraint")]`. `jax.experimental.jet`
        has no rules for them: call it inside of `fn`, or use the default target.

    Raises:
      TypeError: if `fn` is not callable, or a class; if `policy` is no policy,
        `enabled` no bool or `target` no text; from the function returned, if a result
        that is no pytree holds a traced array.
      ValueError: if the compute dtype is none of float16, bfloat16 and float32, or
        `target` is unknown.

    Source: the op lists are those of `torch.autocast`
    (pytorch/aten/src/ATen/autocast_mode.h), the mixed-precision scheme that of
    Micikevicius et al. 2018, arXiv:1710.03740.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> def loss(w, x):
      ...     return jnp.mean(jax.nn.relu(x @ w) ** 2)
      >>> w, x = jnp.ones((4, 2)), jnp.ones((8, 4))
      >>> print(jax.make_jaxpr(lambda w, x: x @ w)(w, x).eqns[0].outvars[0].aval)
      float32[8,2]
      >>> half = amp.autocast(lambda w, x: x @ w, "mixed_float16")
      >>> [str(e.outvars[0].aval) for e in jax.make_jaxpr(half)(w, x).eqns]
      ['float16[8,4]', 'float16[4,2]', 'float16[8,2]', 'float32[8,2]']
      >>> jax.grad(amp.autocast(loss))(w, x).dtype
      dtype('float32')
    """
    enabled = checked_flag(enabled, "autocast(fn, policy, enabled={})")
    if fn is None:
        return _Decorator(autocast, policy=policy, enabled=enabled, target=target)
    check_function(fn, "autocast", "transform")
    policies = as_policy_map(policy, "autocast(fn, {})")
    checked_target(target, "autocast(fn, target={})")
    if not enabled:
        return fn

    @wraps(fn)
    def autocast_fn(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if linen_modules.initialises(fn, args):
            # linen keeps the parameters that it makes: they must not be tracers.
            return fn(*args, **kwargs)
        outer = scopes.active()
        cpu = cpu_of(target)
        planned = planned_call(fn, policies, args, kwargs, "autocast(fn)", cpu)
        with own_frames_hidden, planned as call:
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in call.arrays):
                raise TypeError(
                    "autocast(fn): an argument is a jax.ShapeDtypeStruct, which has no "
                    "values. Use explain(fn, policy)(*args) to read the plan, or "
                    "jax.eval_shape(autocast(fn), *args) for the shapes."
                )
            # Inside another autocast the scope tells the outer one whose policy it is.
            nested = nullcontext() if outer is None else scopes.inside(policies.default)
            with nested:
                results = _results(call)
            avals = call.jaxpr.out_avals
            return call.returned(list(map(binding.as_output, results, avals)))

    return autocast_fn


def _results(call: PlannedCall) -> list[Value]:
    """Returns the results of the program of an autocast, in the dtypes of its plan."""
    how = scopes.measured()
    if how is None:
        return run(call.plan, call.arrays)
    kept = call.policies.default.output_dtype if how.hands_on_f32 else None
    return [
        x if dtype in (None, kept) else binding.converted(x, dtype)
        for x, dtype in zip(call.as_it_is(call.arrays), call.plan.outputs, strict=True)
    ]


class _Decorator(functools.partial[Any]):
    """`autocast` without a function, which is a decorator and no context manager."""

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "with autocast(...): autocast takes a function and returns one. Write "
            'autocast(loss_fn, policy), with a policy such as "mixed_bfloat16".'
        )

    def __exit__(self, *error: object) -> None: ...


# The marks of a plain replay.
_NO_MARKS = Marks()


def run(
    plan: Plan, args: Sequence[Value], marks: Marks = _NO_MARKS, recomputes: bool = True
) -> list[jax.Array]:
    """Runs the planned body on `args`, one for each of its inputs."""
    try:
        return Replay(recomputes=recomputes, marks=marks).body(plan, args)
    except KeyError as error:
        # A transformation without a rule for `jax.checkpoint`, as jet is, looks for one
        # in a dictionary. A checkpoint changes what a backward pass saves, and what
        # such a transformation computes has none.
        if not any(key is jaxprs.CHECKPOINT for key in error.args):
            raise
        return Replay(recomputes=False, marks=marks).body(plan, args)


class Replay(Walk[Value]):
    """One replay of a plan on arrays.

    Attributes:
      marks: what it leaves on the equations that it binds.
      staged: the bodies that were staged, each of them once. They are closed jaxprs and
        hold no tracers, so the traces inside `jax.checkpoint` share them too.
      differentiable: False inside the primal of a `custom_jvp`, which has a rule.
      blocks: what runs the blocks, each kind of them once.
      recomputes: whether it runs the blocks of the plan as such.
      block_kept: inside a block, what of it is kept, see `Block`.
      keeper: what keeps it.
      path: inside a block, the way through helpers to the body.
    """

    differentiates = True

    def __init__(
        self,
        differentiable: bool = True,
        recomputes: bool = True,
        marks: Marks = _NO_MARKS,
        block_kept: Mapping[tuple[int, ...], frozenset[Key]] | None = None,
        keeper: Keeper = named,
        path: tuple[int, ...] = (),
    ):
        self.marks = marks
        # A measured cast is one of its reader, as the plan says.
        self.casts_before = not marks.tells_equations
        self.staged: dict[Plan, ClosedJaxpr] = {}
        self.blocks: dict[Hashable, Run] = {}
        self.block_kept = block_kept or {}
        self.keeper = keeper
        self.path = path
        self.differentiable = differentiable
        self.recomputes = recomputes

    def constant(self, value: Value, var: Var) -> Value:
        # JAX keeps small constants as numpy arrays. A custom rule may index them by a
        # tracer, which numpy arrays refuse.
        return jnp.asarray(value) if isinstance(value, np.ndarray) else value

    def literal(self, atom: Literal, dtype: np.dtype | None, saturate: bool) -> Value:
        value = atom.val
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

    def quantised(self, value: Value, shared: Shared) -> Value:
        with self.marks.quantised():
            found = shared.quantiser(jax.lax.stop_gradient(value))
            return found.to_keep(shared.name)

    def moved(self, eqn: Eqn, operands: Sequence[Value]) -> list[Value]:
        with binding.source_of(eqn):
            return binding.bind(eqn, operands)

    def as_cast(self, value: Value, cast: Value) -> Value:
        return as_cast(value, cast)

    def keeps(self) -> Set[Key]:
        return self.block_kept.get(self.path, frozenset())

    def kept(self, value: Value, key: Key) -> Value:
        return self.keeper((self.path, key), value)

    def block(self, values: Values[Value], block: Block) -> None:
        if not self.recomputes:
            self.through(values, block.start, block.stop)
            return
        if self.marks.tells_equations:
            # It is measured: it takes longer to compile apart, and what is made again
            # of 8 bits would be measured as well.
            block = block._replace(apart=False, stored=None)
        kept = block.kept
        if block.stored is not None:
            made = block.stored.made
            kept = {path: frozenset(keys) for path, keys in made.items()}
        # Not a method, which holds this replay: the arrays of the plan would stay until
        # Python collects garbage.
        replay = functools.partial(Replay, self.differentiable, False, self.marks, kept)
        # A marked equation is one of a kind.
        known = None if self.marks.tells_equations else self.blocks
        run_block(values, block, replay, known)

    def equation(
        self, eqn: Eqn, planned: EquationPlan, read: Callable[[], list[Value]]
    ) -> list[Value]:
        with binding.source_of(eqn), self.marks.equation(planned):
            operands = read()
            if planned.bodies:
                return self._call(eqn, planned, operands)
            before = len(operands) - len(planned.f32_gradients)
            held = dict(zip(planned.f32_gradients, operands[before:], strict=True))
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
          operands: as it reads them, then what its rewrite computes of them before.
          held: those whose gradient leaves in f32, as they are held.
        """
        if held:
            rewrite = planned.rewrite
            if rewrite is not None and rewrite.bind_f32 is not None:
                return rewrite.bind_f32(eqn, planned.dtype, operands, held)
            run = functools.partial(self.bound, eqn, planned)
            return with_f32_gradients(eqn, run, operands, held)
        if jaxprs.is_conversion(eqn):
            (source,), (target,) = planned.reads, planned.writes
            if source is not None and target is not None:
                return [binding.converted(operands[0], target)]
        rewrite, dtype = planned.rewrite, planned.dtype
        if rewrite is None:
            changed = {} if dtype is None else jaxprs.retyped(eqn, dtype)
            return binding.bind(eqn, operands, **changed)
        if rewrite.derivative_only and not self.differentiable:
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
        path = (*self.path, planned.index, 0)
        replay = Replay(
            *(self.differentiable, self.recomputes, self.marks, self.block_kept),
            *(self.keeper, path),
        )
        replay.staged = self.staged
        return replay

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
        inexact = [jnp.issubdtype(aval_of(v).dtype, jnp.inexact) for v in eqn.outvars]

        def primal(*xs: Value) -> list[Value]:
            replay = Replay(
                differentiable=False, recomputes=self.recomputes, marks=self.marks
            )
            return replay._apart(body, xs)

        primal.__name__ = source_code.function_name(eqn) or primal.__name__
        rewritten = jax.custom_jvp(primal)

        def derivative(
            xs: Sequence[Value], tangents: Sequence[Value]
        ) -> tuple[list[Value], list[Value]]:
            # The user's rule may ask which of the tangents are zero.
            differentiated = [
                i
                for i, (v, t) in enumerate(zip(eqn.invars, tangents, strict=True))
                if is_inexact(v) and not isinstance(t, SymbolicZero)
            ]
            rule = planned_rule(eqn, planned, differentiated)
            self.marks.derivative(rule, eqn, planned)
            moving = [tangents[i] for i in differentiated]
            both = run(rule, [*xs, *moving], self.marks, self.recomputes)
            results, remaining = both[: len(inexact)], iter(both[len(inexact) :])
            result_tangents = [
                next(remaining)
                if is_float
                else np.zeros(aval_of(v).shape, jax.dtypes.float0)
                for is_float, v in zip(inexact, eqn.outvars, strict=True)
            ]
            return results, result_tangents

        rewritten.defjvp(derivative, symbolic_zeros=True)
        return list(rewritten(*operands))
