"""A call of a function to be measured: traced, planned, and what to differentiate."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from flax import linen as nn

from jmp_amp.numerics.calls.differentiated import (
    as_differentiated,
    check_distinct,
    differentiated,
)
from jmp_amp.plan.plan import Plan
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.program.jaxprs import Value
from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.policies.policy import get_policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.training.gradients import Argnums, check_argnums
from jmp_amp.transform import scopes
from jmp_amp.transform.interpreter import run
from jmp_amp.transform.nnx_modules import is_node
from jmp_amp.transform.planned import PlannedCall, planned_call

# Traces and plans a call under a map of policies.
Called = Callable[[PolicyMap], contextlib.AbstractContextManager["LossCall"]]
# Runs the program of a call: its inputs in, its outputs out.
RunProgram = Callable[[Sequence[Value]], Sequence[Value]]

# What JAX says of loops that run until something is so, of callbacks, and of primitives
# that have no derivative.
_NO_GRADIENT = re.compile(
    "^Reverse-mode differentiation does not work for|callbacks do not support JVP"
    "|^Differentiation rule for .* not implemented"
)


@dataclasses.dataclass(frozen=True)
class LossCall:
    """A call of a function, planned, and its gradient if it has one.

    Attributes:
      loss: which output of the program is the loss; None if the function returns
        something else, which has no gradient.
      keys: which inputs of the program are differentiated, and the key path of each in
        the gradient of `amp.value_and_grad`.
      has_aux: whether the function returns `(loss, aux)`.
      written: the caller's call as written, for errors.
    """

    call: PlannedCall
    loss: int | None
    keys: dict[int, str]
    has_aux: bool
    written: str

    @property
    def plan(self) -> Plan:
        return self.call.plan

    @property
    def arrays(self) -> list[Value]:
        return self.call.traced.arrays

    def value(self, outputs: Sequence[Value]) -> PyTree:
        """Returns what the function returns, without aux; writes nothing to objects."""
        returned = self.call.traced.seen(list(outputs))
        return returned[0] if self.has_aux else returned

    def run(self, arrays: Sequence[Value]) -> list[Value]:
        """Runs the program as it is planned."""
        return run(self.plan, arrays)

    def with_gradients(
        self, run: RunProgram, scaled: Callable[[Value], Value] = lambda loss: loss
    ) -> Callable[..., tuple[list[Value], tuple[Value, ...]]]:
        """Returns a function of the inputs: the outputs and the gradients.

        The gradients are those of `scaled(loss)`, one for each of `keys`; none if
        there is no loss. It raises a ValueError if JAX has no gradient of it.
        """

        def both(*arrays: Value) -> tuple[list[Value], tuple[Value, ...]]:
            position = self.loss
            if position is None:
                return list(run(arrays)), ()

            def loss(moving: tuple[Value, ...]) -> tuple[Value, list[Value]]:
                filled = list(arrays)
                for i, x in zip(self.keys, moving, strict=True):
                    filled[i] = x
                outputs = list(run(filled))
                return scaled(outputs[position]), outputs

            try:
                moving = tuple(arrays[i] for i in self.keys)
                gradients, outputs = jax.grad(loss, has_aux=True)(moving)
            except (ValueError, NotImplementedError) as error:
                told = " ".join(str(error).split())
                if not _NO_GRADIENT.search(told):
                    raise
                raise ValueError(
                    f"{self.written}: the function returns one real scalar, but JAX "
                    f"cannot differentiate it: {told.rstrip('.')}. diagnose(lambda "
                    "*args: [fn(*args)]) diagnoses the forward pass alone."
                ) from error
            return outputs, gradients

        return both


def check_traced(traced: jax.stages.Traced, args: Sequence[Value], call: str) -> None:
    """Raises a TypeError if a program reads arrays of a trace that has ended.

    JAX makes them inputs of the program, besides the `args` that it was traced with.
    """
    if len(traced.jaxpr.in_avals) != len(jax.tree.leaves(args)):
        raise TypeError(
            f"{call}: the program reads an array of a trace that has ended. Does the "
            "gradient rule of a custom_vjp function use an array of the function "
            "around it? Pass the array as an argument of the custom_vjp function. Does "
            "a list or an object keep an array of an earlier call? Return it instead."
        )


def check_measured(name: str, fn: object, argnums: Any) -> None:
    """Raises a TypeError if `fn` is no function or `argnums` no positions.

    A ValueError if they name one twice. `name` is the function that the user called.
    """
    if not callable(fn):
        advice = f" Write {name}(fn, {fn!r})(*args)." if isinstance(fn, str) else ""
        raise TypeError(
            f"{name}({fn!r}): the first argument is the function to {name}, found "
            f"{type(fn).__name__}.{advice}"
        )
    if isinstance(fn, nn.Module) and fn.scope is None:
        raise TypeError(
            f"{name}({type(fn).__name__}(...)): a linen module holds no parameters, so "
            "it cannot be called. Write a loss function that calls model.apply."
        )
    check_argnums(argnums, f"{name}(fn, argnums={{}})")
    check_distinct(argnums, f"{name}(fn)")


@contextlib.contextmanager
def loss_call(
    fn: AnyFn,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    argnums: Argnums,
    has_aux: bool,
    call: str,
    cpu: Cpu | None,
    policies: PolicyMap,
    notes_modules: bool = True,
) -> Iterator[LossCall]:
    """Traces and plans `fn(*args, **kwargs)`; nothing is executed.

    Args:
      fn, args, kwargs, argnums, has_aux, cpu, policies: as those of `autocast` and
        `amp.value_and_grad`. Without `policies` it is a `Called`.
      call: the caller's call as written, for errors.
      notes_modules: whether name scopes say which module runs, see `scopes.module_of`.

    Raises:
      TypeError, ValueError: if an argument has no value, `argnums` name none of the
        arguments or one twice, or `has_aux` is wrong.
    """
    check_distinct(argnums, call, len(args))
    args, kwargs = as_differentiated(args, kwargs, argnums)
    _check_values(jax.tree.leaves((args, kwargs), is_leaf=is_node), call)
    with planned_call(
        fn, policies, args, kwargs, call, cpu, notes_modules=notes_modules
    ) as planned:
        loss, keys = _loss_of(planned, has_aux, call), {}
        if loss is not None:
            positional, _ = planned.traced.numbered()
            keys = {
                position: key
                for position, key in differentiated(positional, argnums, call).items()
                if jnp.issubdtype(planned.traced.arrays[position].dtype, jnp.floating)
            }
            if not keys:
                raise TypeError(
                    f"{call}: no argument that argnums={argnums!r} names holds a "
                    "floating-point array, so there is nothing to differentiate. Name "
                    "the parameters with argnums=."
                )
        yield LossCall(planned, loss, keys, has_aux, call)


def _check_values(leaves: Sequence[PyTree], call: str) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise TypeError(
            f"{call}: an argument is traced, and has no value to measure. Call it "
            "outside of jax.jit, jax.grad and jax.vmap."
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise TypeError(
            f"{call}: an argument is a jax.ShapeDtypeStruct, which has no values to "
            "measure. Give arrays; explain(fn, policy) takes shapes."
        )


@contextlib.contextmanager
def called_as_it_is(called: Called, policies: PolicyMap) -> Iterator[LossCall]:
    """Traces a call to run as it is: without a plan, and without `cast_inputs`.

    Parameters that `policies` store in half are computed with in f32.
    """
    stored = policies.default.param_dtype
    itself = dataclasses.replace(get_policy("float32"), param_dtype=stored)
    # Derivative rules are traced later, when the call is differentiated.
    with scopes.measuring(casts_inputs=False), called(PolicyMap(itself)) as call:
        yield call


@contextlib.contextmanager
def called_beside_f32(called: Called, policies: PolicyMap) -> Iterator[LossCall]:
    """Traces and plans a call whose program is f32, but for what it asks for itself."""
    with contextlib.ExitStack() as stack:
        with scopes.measuring():
            call = stack.enter_context(called(policies))
        yield call


class _Output(int):
    """Stands for the output of a program that has this number."""


def _loss_of(planned: PlannedCall, has_aux: bool, call: str) -> int | None:
    """Returns which output is one real number, the loss, if the function returns it."""
    avals = planned.traced.jaxpr.out_avals
    returned = planned.traced.seen([_Output(i) for i in range(len(avals))])
    if has_aux:
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            is_array = isinstance(returned, _Output)
            found = "one array" if is_array else type(returned).__name__
            raise TypeError(
                f"{call} with has_aux=True: the function has to return a pair "
                f"(loss, aux), but it returned {found}."
            )
        returned = returned[0]
    if not isinstance(returned, _Output):
        return None
    aval = avals[returned]
    is_loss = not aval.shape and jnp.issubdtype(aval.dtype, jnp.floating)
    return int(returned) if is_loss else None
