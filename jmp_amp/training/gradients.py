"""`value_and_grad` and `grad` of a scaled loss: true losses in, true gradients out."""

import functools
import inspect
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp_amp.policies.arguments import checked_flag, warn, written
from jmp_amp.policies.deferred import in_two_calls, own_frames_hidden
from jmp_amp.policies.dtypes import F16, AnyFn, PyTree, is_half
from jmp_amp.training.loss_scale import LossScale
from jmp_amp.training.loss_scale_state import (
    SCALES,
    LossScaleState,
    find_loss_scale,
    what_hides_overflows,
)
from jmp_amp.training.structures import (
    map_trained,
    nodes_of,
    promote_gradient,
    promote_half,
)
from jmp_amp.transform import scopes
from jmp_amp.transform.promote_half_params import promote_half_params, through_trees

# The positions to differentiate: one or several, as in jax and in nnx.
Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


@in_two_calls
def value_and_grad(
    fn: AnyFn,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that evaluates `fn` and its gradient under a loss scale.

    `jax.value_and_grad` with one more keyword argument on the function it returns,
    `loss_scale`: a `LossScale`, an optimizer's state or any tree that holds one (see
    `loss_scale_of`), or None for no scaling.

    The loss comes back as `fn` returned it, neither scaled nor cast. The gradients are
    unscaled with the same scale; those of f16 and bf16 arguments are float32, all
    others have the dtype of their argument. `aux` is returned as it is, and a NaN in it
    has no effect. So is the collection `_overwrite_with_gradient` of flax's fp8 layers,
    at any depth: it holds no gradients but the next state of the layers.

    A gradient that overflowed is inf or NaN; `with_loss_scale` skips such a step. Keep
    the loss itself in float32, which the mixed policies do: one computed in f16 comes
    back right, but its gradient at a scale of 2**16 starts from inf, so that steps are
    skipped until the scale has backed off into the range of f16. There is a warning if
    the loss is f16 or bf16.

    If an f16 or bf16 argument is used several times (in iterations of a loop, in
    microbatches, by lookups of one row), its gradients are summed in float32. Under a
    policy with `reduce_dtype="float32"` so are those that products make. For this the
    function is traced once, with half arrays; the loss is the same, bit for bit. A
    function that reads values of arrays, as Python's `if` and `f"{x:.2f}"` do, raises
    JAX's error then, as it does under `jax.jit`.

    There is a warning if an autocast in f16 runs inside and no `loss_scale` is given.

    Kernels of f16 and bf16 convolutions are given a memory layout
    (`jax.experimental.layout`), unless they are sharded automatically. `jax.export` of
    such a step needs
    `disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]`.

    With an `nnx.Module` among the differentiated arguments, or another object of nnx
    that has variables, it is `nnx.value_and_grad`: the gradients are an `nnx.State`,
    and the values that the module writes while it runs (batch statistics, random number
    streams) reach the caller's object.

    Args:
      fn: returns a floating scalar, or a pair of that and anything if `has_aux`.
      argnums, has_aux, holomorphic, allow_int: as in jax.

    Returns:
      A function of `fn`'s arguments and `loss_scale`: `(loss, gradients)`, or
      `((loss, aux), gradients)`.

    Raises:
      TypeError: if `argnums` are not positions, or a flag is not a bool; from the
        function returned, while it is traced, if the loss is not a floating scalar.
      ValueError: if `fn` has a parameter called `loss_scale` itself; from the function
        returned, if the tree holds no loss scale or several, or an optimizer's state
        that unscales gradients too.

    Example:
      >>> import jmp_amp as amp
      >>> loss_scale = amp.static_loss_scale(2.0**10)
      >>> weights = jnp.array([1.0, 2.0], jnp.float16)
      >>> loss_fn = lambda w: jnp.sum(w.astype(jnp.float32) ** 2)
      >>> amp.value_and_grad(loss_fn)(weights, loss_scale=loss_scale)
      (Array(5., dtype=float32), Array([2., 4.], dtype=float32))
    """
    options = dict(holomorphic=holomorphic, allow_int=allow_int)
    return _differentiated("value_and_grad", fn, argnums, has_aux, **options)


@in_two_calls
def grad(
    fn: AnyFn,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> AnyFn:
    """Returns a function that evaluates the gradient of `fn` under a loss scale.

    As `value_and_grad`, without the loss: the gradients, or `(gradients, aux)`.

    Example:
      >>> import jmp_amp as amp
      >>> amp.grad(jnp.sin)(0.0, loss_scale=amp.static_loss_scale(2.0**10))
      Array(1., dtype=float32)
    """
    options = dict(holomorphic=holomorphic, allow_int=allow_int)
    both = _differentiated("grad", fn, argnums, has_aux, **options)

    @functools.wraps(both, updated=())
    def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with own_frames_hidden:
            value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def _differentiated(
    name: str, fn: AnyFn, argnums: Any, has_aux: bool, **options: bool
) -> AnyFn:
    if not callable(fn):
        remedy = "Pass the loss function: lambda params: loss(params, batch)."
        raise TypeError(f"{name}({written(fn)}): not a function. {remedy}")
    call = f"{name}({_name(fn)})"
    check_argnums(argnums, f"{call[:-1]}, argnums={{}})")
    for key, flag in {"has_aux": has_aux, **options}.items():
        checked_flag(flag, f"{call[:-1]}, {key}={{}})")
    signature = _signature_with_loss_scale(fn, call)

    @functools.wraps(fn, updated=())
    def differentiated(
        *args: PyTree, loss_scale: PyTree = None, **kwargs: PyTree
    ) -> PyTree:
        scaler = find_scaler(loss_scale, call)
        if signature is not None and args and nodes_of(args[-1], SCALES):
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                remedy = f"Give the scale by name: {call}(*args, loss_scale=state)."
                raise TypeError(f"{call}(...): {error}. {remedy}") from None

        def scaled(*args: PyTree, **kwargs: PyTree) -> PyTree:
            output = fn(*args, **kwargs)
            if has_aux and (not isinstance(output, tuple | list) or len(output) != 2):
                fact = "the function did not return two values"
                remedy = "Return a pair (loss, aux)."
                raise TypeError(f"{call} with has_aux=True: {fact}. {remedy}")
            loss, aux = output if has_aux else (output, None)
            return (loss if scaler is None else scaler.scale(loss)), (loss, aux)

        with own_frames_hidden, scopes.autocast_dtypes() as dtypes:
            (_, (loss, aux)), gradients = _value_and_grad(
                scaled, argnums, args, kwargs, has_aux=True, **options
            )
        if is_half(dtype := jnp.result_type(loss)):
            warn(
                f"{call}: the loss is {dtype.name}, which has three digits, and in "
                "float16 is infinite above 65504. Keep it float32: take the policy "
                f'"mixed_{dtype.name}", or cast what the loss is computed from.'
            )
        if scaler is None and F16 in dtypes:
            warn(
                f"{call}: an autocast in float16 ran without a loss scale, and small "
                "gradients became zero. Pass loss_scale=opt_state; to mean it, "
                "loss_scale=amp.no_loss_scale()."
            )
        if scaler is None:
            gradients = map_trained(promote_gradient, gradients)
        else:
            gradients = scaler.unscale(gradients)
        return ((loss, aux) if has_aux else loss), gradients

    if signature is not None:
        differentiated.__signature__ = signature  # pyright: ignore
    return differentiated


def _value_and_grad(
    fn: AnyFn,
    argnums: Argnums,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    **options: bool,
) -> PyTree:
    """Calls `jax.value_and_grad(fn)`, or nnx's; half leaves are f32."""
    positions = module_positions(argnums, args)
    if positions is None:
        wide, halves = _promoted(args, argnums)
        if halves and not options["holomorphic"]:
            fn, args = promote_half_params(fn, halves), tuple(wide)
        differentiate: Any = jax.value_and_grad
        return differentiate(fn, argnums, **options)(*args, **kwargs)
    args = *args, kwargs  # Objects of nnx may be in both.

    def of_positions(*args: PyTree) -> PyTree:
        return fn(*args[:-1], **args[-1])

    differentiate = functools.partial(nnx.value_and_grad, argnums=positions, **options)
    _, halves = _promoted(nnx.to_tree(args), positions)
    if not halves or options["holomorphic"]:
        return differentiate(of_positions)(*args)

    with_half = functools.partial(promote_half_params, halves=halves)

    def promoted(*args: PyTree) -> PyTree:
        return through_trees(of_positions, args, with_half)

    def with_promoted(pure: AnyFn) -> AnyFn:
        return lambda *trees: pure(*_promoted(trees, positions)[0])

    return through_trees(differentiate(promoted), args, with_promoted)


def _promoted(
    args: Sequence[PyTree], argnums: Argnums
) -> tuple[list[PyTree], dict[int, PyTree]]:
    """Returns the arguments with f32 in place of half leaves to differentiate.

    And those with such leaves as they were, by their positions. What is overwritten
    with its gradient stays as it is.
    """
    wide, halves = list(args), {}
    for each in argnums if isinstance(argnums, Sequence) else (argnums,):
        position = each.argnum if isinstance(each, nnx.DiffState) else int(each)
        if -len(args) <= position < len(args):
            position %= len(args)
            given = args[position]
            found = map_trained(promote_half, given)
            if any(map(operator.is_not, *map(jax.tree.leaves, (found, given)))):
                wide[position], halves[position] = found, given
    return wide, halves


def check_argnums(argnums: object, call: str) -> None:
    """Raises if `argnums` are not positions; `call` has `{}` for them."""
    is_one = not isinstance(argnums, Sequence) or isinstance(argnums, str)
    positions: PyTree = (argnums,) if is_one else argnums
    kinds = int | np.integer | nnx.DiffState
    if not positions or not all(
        isinstance(each, kinds) and not isinstance(each, bool) for each in positions
    ):
        raise TypeError(
            f"{call.replace('{}', written(argnums))}: not the position of an argument. "
            "Use an int, or several in a tuple; what fn is called with goes into a "
            f"second call: {call.partition(',')[0]})(*args)."
        )


def _signature_with_loss_scale(fn: AnyFn, call: str) -> inspect.Signature | None:
    """Returns the signature of `fn` with one more keyword, or None if it has none."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    if "loss_scale" in signature.parameters:
        fact = "the function has a parameter `loss_scale` of its own"
        remedy = f"Rename it: {call} adds one to give the scale with."
        raise ValueError(f"{call}: {fact}. {remedy}")
    kind = inspect.Parameter.KEYWORD_ONLY
    keyword = inspect.Parameter("loss_scale", kind, default=None)
    parameters = [*signature.parameters.values(), keyword]
    return signature.replace(parameters=sorted(parameters, key=lambda x: x.kind))


def find_scaler(loss_scale: PyTree, call: str) -> LossScale | None:
    """Returns the scale in what a user gives as `loss_scale=`; None for none."""
    if loss_scale is None:
        return None
    if isinstance(loss_scale, numbers.Number | str | np.ndarray | jax.Array):
        remedy = "Pass static_loss_scale(2.0**16), or a state of with_loss_scale."
        raise TypeError(f"{call}: loss_scale={loss_scale!r} is no LossScale. {remedy}")
    call = f"{call}: loss_scale"
    scaler = find_loss_scale(loss_scale, call)
    states = nodes_of(loss_scale, LossScaleState)
    if any(state.structure.unscales for _, state in states):
        raise ValueError(
            f"{call}: its optimizer was made with unscale=True, so that gradients "
            "would be unscaled twice. Leave unscale=True out of with_loss_scale."
        )
    if shape := np.shape(scaler.value):
        remedy = "Map the function over them with jax.vmap."
        raise ValueError(f"{call} holds scales of shape {shape}. {remedy}")
    if hidden := what_hides_overflows(loss_scale):
        warn(f"{call}: {hidden}")
    return scaler


def module_positions(argnums: Argnums, args: Sequence[PyTree]) -> PyTree | None:
    """Returns `argnums`, counted from the front, if nnx has to differentiate.

    None if jax does: to it objects of nnx are trees of arrays.
    """
    is_several = isinstance(argnums, Sequence)
    positions = tuple(
        each + len(args) if isinstance(each, int) and each < 0 else each
        for each in (argnums if is_several else (argnums,))
    )
    is_for_nnx = any(
        # An nnx.DiffState says itself which argument it means.
        isinstance(each, nnx.DiffState) or _has_variables(args[each : each + 1])
        for each in positions
    )
    return (positions if is_several else positions[0]) if is_for_nnx else None


def _has_variables(tree: PyTree) -> bool:
    """Whether a tree holds a module, or another object of nnx that has variables."""
    return any(
        isinstance(node, nnx.Module)
        or any(isinstance(x, nnx.Variable) for _, x in nnx.iter_graph(node))
        for _, node in nodes_of(tree, nnx.Pytree)
    )


def _name(fn: AnyFn) -> str:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__name__", type(inner).__name__)
