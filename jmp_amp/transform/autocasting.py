"""Autocast: trace a function, plan it, and run the plan in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

import jax

from jmp_amp.plan.planner import returned_dtype
from jmp_amp.plan.program import binding, scope_text
from jmp_amp.plan.program.cpu_target import checked_target, cpu_of
from jmp_amp.plan.program.jaxprs import Value
from jmp_amp.policies.arguments import checked_flag
from jmp_amp.policies.deferred import in_two_calls, own_frames_hidden
from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap, as_policy_map
from jmp_amp.transform import linen_modules, scopes
from jmp_amp.transform.calls import TracedCall, traced_call
from jmp_amp.transform.functions import check_function, wraps
from jmp_amp.transform.interpreter import run
from jmp_amp.transform.planned import plan_of

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
    convolutions read and write the policy's `compute_dtype`. What is stored across a
    product is in it too, such as the stream of a residual network. All else that
    follows activations is float32: a kernel computes in registers. The table of
    operations is in `jmp_amp/plan/tables/operations.py`, that of functions beside it in
    `rules.py`; the exceptions are `HALF_RULES` in `jmp_amp/plan/choose/half_rules.py`:

    * moves, `max`, `relu` and selections of half values are half: nothing is lost;
    * so are a product and its bias, where more than float32 operations read them; a
      gelu or silu; a function with a `custom_jvp` rule and no product inside;
    * so is one operation on half values that half alone reads, since that is the same
      number, rounded: no quotient, no function of a product and its bias.

    Every call traces `fn` anew, so call the result under `jax.jit`. Differentiate it,
    `jax.grad(amp.autocast(loss))`: the backward matrix products run in half too and the
    gradients of float32 parameters are float32. It composes with every transformation
    of JAX, inside and outside. (`jax.experimental.jet` knows no `jax.checkpoint`, which
    is in the result: use it on `autocast(fn)` itself, and `jax.jit` around jet.)
    `amp.autocast(jax.value_and_grad(loss))` takes the gradient inside: the forward pass
    has the same numbers as `amp.autocast(loss)`, but for `custom_vjp` functions, which
    JAX replaces by the operations of their rules. Take the value too: in a program
    without the loss no float32 operation reads the end of the forward pass, so that it
    may be half.

    Under a policy whose `matmul` is an `Fp8`, such as "fp8", matrix products multiply
    8-bit floats, forward and backward; all else is as under `mixed_bfloat16`. These
    products have no second derivatives: NotImplementedError.

    Loops, branches, calls and sharded maps are entered. Products and stored values are
    float32 where half has too few digits for them:

    * a float32 result of the function: the operation that makes it runs in float32,
      even if others read it in half. Elements that no scatter writes keep their bits;
    * the carry of a loop, if it starts as an argument or a constant, or if no layer
      reads it. A layer is a product with other weights in each iteration, a slice of
      the scanned input. A stream between such layers, begun by a product or an
      embedding lookup, is half. (If all iterations share their weights, as in a
      universal transformer, it is float32.)
    * a sum that a sum with the same term is subtracted from, `(h + f(h)) - h`;
    * a value that becomes an index: every operation before `floor`, `ceil`, `round`, a
      cast to an integer, or a choice by rank (`argmax`, `top_k`, `argsort`); a range of
      integers longer than half precision can count, and the product of one-hot rows
      with it;
    * a bound that half precision would round to 1, or to another round number:
      `clip(p, 1e-4, 1 - 1e-4)`;
    * an input of linear algebra, back to the product that makes it: the Gram matrix and
      the right side of a linear system, the covariance of a filter, a kernel. The layer
      before a solver stays half, and so does the one before a Gram matrix;
    * distances by a product, `|a|**2 - 2 * a @ b.T + |b|**2`, and second moments less
      squared means, `y.T @ y / n - outer(m, m)`: their digits cancel;
    * the body of a `while_loop` that runs until a float of its body is small enough;
    * a product with `precision=` HIGH or HIGHEST, one without a free dimension (`vdot`,
      which is a sum), and the functions of `jnp.linalg`, `jax.scipy.linalg` and
      `jax.random`, whole.

    A product that adds nothing up is a multiplication, however it is spelled:
    `einsum("i,j->ij", positions, frequencies)` is float32 as `positions[:, None] *
    frequencies` is.

    `amp.explain(fn, policy)(*args).why(identity)` explains the dtype of an operation.

    The gradient of a bias or a scale is summed in float32, over all of its uses; so is
    that of a lookup table. If the table is an activation,
    the sum is float32 only where each row is read 16 times on average; otherwise it is
    half, and a row that is read hundreds of times loses digits.

    The plan also decides which values are kept for the backward pass, see `saved` of
    `Policy`: inside of loops as few bytes as possible; elsewhere all but chains of
    elementwise operations, which are computed again. Operations and their order are
    those of `saved="all"`, and so are values and gradients, bit for bit where XLA fuses
    them alike.

    These are left as they are: integers, booleans, complex, float64, fp8 and PRNG keys;
    dtypes that the program asks for, such as `x.astype(jnp.bfloat16)`; and, computed as
    they were traced, `custom_vjp` functions, callbacks and Pallas kernels that
    `cast_inputs` does not mark. In a float32 program `x.astype(jnp.float32)` leaves no
    operation to see: mark the function with `full_precision`.

    A Flax layer that is given `dtype=jnp.float32` computes in float32, as if it were
    marked with `full_precision`. An entry of a `PolicyMap` that names the layer wins.
    A dtype that the modules around it have too, or their configuration, is that of the
    model: it says nothing about one layer, and the policy decides.

    An autocast inside of another one is `with_policy(policy)(fn)`, a region of the
    outer plan, whose results have its `output_dtype`. Entries of the outer map reach
    the modules in it, if it has no entries of its own. It plans itself where the outer
    function takes its gradient, as in a training step, or calls it in a `custom_vjp`.

    nnx modules may be arguments or closed over: the caller's objects get the values
    that the function writes, as under `nnx.jit`. `autocast(model.apply)` returns the
    variables that a linen model writes. A linen method that `autocast` decorates may
    create parameters, but cannot write variables later.

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
        results have the same dtypes for every target. An autocast inside of another
        one, without a target, has the outer one's.
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
        scopes.note_autocast(policies)
        outer, cpu = scopes.active() or scopes.OUTSIDE, cpu_of(target)
        is_planned = outer.plans(cpu)
        traced = traced_call(fn, policies, args, kwargs, "autocast(fn)", cpu=cpu)
        with own_frames_hidden, traced as call:
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in call.arrays):
                raise TypeError(
                    "autocast(fn): an argument is a jax.ShapeDtypeStruct, which has no "
                    "values. Use explain(fn, policy)(*args) to read the plan, or "
                    "jax.eval_shape(autocast(fn), *args) for the shapes."
                )
            noted = nullcontext()
            if outer.depth >= 0 or not is_planned:
                noted = scopes.region(policies, call.entries, is_planned)
            with noted:
                if is_planned:
                    results = run(plan_of(call, policies, cpu), call.arrays)
                else:
                    results = _of_region(call, policies.default, outer.hands_on_f32)
            avals = call.jaxpr.out_avals
            return call.returned(list(map(binding.as_output, results, avals)))

    return autocast_fn


def _of_region(
    call: TracedCall, policy: Policy, hands_on_f32: bool | None
) -> list[Value]:
    """Returns the results of an autocast inside of another one, which plans it."""
    kept = policy.output_dtype if hands_on_f32 else None
    results, outvars = call.as_it_is(call.arrays), call.jaxpr.jaxpr.outvars
    dtypes = [*map(returned_dtype, outvars, call.states, [policy] * len(outvars))]
    with scope_text.noted(scope_text.BY_POLICY):
        return [
            x if dtype in (None, kept) else binding.converted(x, dtype)
            for x, dtype in zip(results, dtypes, strict=True)
        ]


class _Decorator(functools.partial[Any]):
    """`autocast` without a function, which is a decorator and no context manager."""

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "with autocast(...): autocast takes a function and returns one. Write "
            'autocast(loss_fn, policy), with a policy such as "mixed_bfloat16".'
        )

    def __exit__(self, *error: object) -> None: ...
