"""Moments in half or a quarter of their bytes.

Adam keeps two float32 numbers for each parameter. Between two steps they need neither
their digits nor their range: here they are stored in bfloat16 or in 8 bits, and are
float32 while the optimizer works.
"""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer

from jmp_amp.plan.program import jaxprs
from jmp_amp.policies.dtypes import F32, PyTree, is_half
from jmp_amp.training.digits import MasterWeightsState
from jmp_amp.training.finite import is_inexact
from jmp_amp.training.recomputed import in_two_passes
from jmp_amp.training.rounding import Seeds, key_parts, random_seeds
from jmp_amp.training.state_codes import (
    CODES,
    Bfloat16Code,
    Code,
    Float8Code,
    Scales,
    decoded,
    encoded_like,
    is_code,
)
from jmp_amp.training.states import LossScaleState, read_without_target
from jmp_amp.training.structures import (
    TreeStructure,
    check_gradients,
    first_difference,
    key_paths,
    leaves_by_path,
    nodes_of,
    telling_foreign_states,
)
from jmp_amp.training.trainable import owned, with_extra_args

_CALL = "with_low_precision_state"
_KINDS: dict[str, type[Code]] = {"bfloat16": Bfloat16Code, "float8": Float8Code}


class LowPrecisionState(NamedTuple):
    """The state of an optimizer wrapped in `with_low_precision_state`.

    Attributes:
      inner_state: the state of the wrapped transformation, with a `Bfloat16Code` or a
        `Float8Code` in place of each array that is encoded.
      key_data: uint32[...], the PRNG key, as `jax.random.key_data` shows it; or None.
      steps: int32[], steps so far; together with the key they make the bits of one.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: PyTree
    key_data: jax.Array | None
    steps: jax.Array
    structure: TreeStructure


def with_low_precision_state(
    inner: optax.GradientTransformation | optax.MultiSteps,
    dtype: str = "bfloat16",
    *,
    key: jax.Array | None = None,
    min_size: int = 4096,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with its moments stored in bfloat16 or in 8 bits.

    It encodes float32 arrays of the state, moments and momentum, that have the shape of
    a parameter, not `()`, and at least `min_size` elements. Counts, schedules, other
    dtypes and small arrays stay as they are, and so do copies of the parameters, such
    as the `z` of schedule-free: they are weights. `inner` works on the state in
    float32, and the state has the same structure, shapes and dtypes after each step.

    "bfloat16": 2 bytes a number. Rounded to nearest, a moment that should decay by 0.1%
    in a step does not move. With a `key` numbers are rounded at random, right on
    average, as those of `with_stochastic_rounding` are.

    "float8": 1 byte, and a scale for 256 numbers in a row (Dettmers et al. 2021,
    arXiv:2110.02861, section 2.1). A block without a minus sign is float8_e5m2, any
    other float8_e4m3fn. A positive number of the former is not rounded to zero. Codes
    are uint8, in the shape of the parameter. A `key` rounds them at random too. The
    elementwise operations of `inner` are computed twice: for the scales, then for the
    codes.

    What an update that is compiled for an H100 moves, of the bytes of float32, with a
    `key` or without:

    =========== ======== ======
    `inner`     bfloat16 float8
    =========== ======== ======
    adam, adamw 0.71x    0.83x
    lion, sgd   0.80x    0.98x
    =========== ======== ======

    Where XLA stores new moments in float32 between the two passes, float8 moves 0.9x to
    1.4x, with up to 5 temporary bytes a parameter: for parameters whose elements are no
    multiple of 256, and optimizers that make one moment of the other, as `rmsprop` with
    momentum does.

    Codes are sharded as the parameter is. Along its last axis that is so for "float8"
    if the axis is a multiple of 256, and the part of a device one of 32. Else XLA
    gathers the moments, which takes more memory than float32: shard such parameters by
    rows, or use "bfloat16".

    A state that `inner` leaves as it is keeps its bits, with a key too. Masters and
    loss scales belong outside: `with_loss_scale(with_master_weights(
    with_low_precision_state(tx)), scale)`, and a skipped step leaves codes and random
    bits alone. `optax.MultiSteps` belongs outside too: inside, the sums of gradients
    would be rounded in each micro-step. For half parameters wrap it in
    `with_master_weights` or its like, so that `inner` gets float32. Moments that are
    bfloat16 already stay as they are.

    Args:
      inner: an optimizer or a chain; extra arguments of `update` reach it.
      dtype: "bfloat16" or "float8".
      key: a PRNG key of `jax.random`, new or old style, to round with. Equal keys draw
        equal bits: give each part of a tree (`optax.partition`) another.
      min_size: an int, at least 1: arrays with fewer elements are not encoded.

    Returns:
      A transformation whose state is a `LowPrecisionState`. `export_opt_state` returns
      it decoded.

    Raises:
      TypeError: if `inner` is not a transformation, `key` not a key, or `min_size` not
        an int; from `update`, if the state is another optimizer's.
      ValueError: if `dtype` is neither, or `min_size` less than 1; from `init`, if
        `inner` holds masters or a state like this one; from `update`, if the state is
        of another `dtype` or `key`, or the gradients are not a tree like that of
        `init`.

    Example:
      >>> import jmp_amp as amp
      >>> tx = amp.with_low_precision_state(optax.adam(1e-3), "float8")
      >>> moment = tx.init(jnp.zeros((64, 128))).inner_state[0].mu
      >>> jax.tree.map(jax.typeof, moment)
      Float8Code(codes=ShapedArray(uint8[64,128]), scales=ShapedArray(float32[32]))
    """
    transformation = with_extra_args(inner, _CALL)
    kind = _checked_kind(dtype)
    least = _checked_size(min_size)
    key_data = implementation = None
    if key is not None:
        key_data, implementation = key_parts(key, f"{_CALL}(inner, key={{}})")

    def init_fn(params: PyTree) -> PyTree:
        inner_state = owned(transformation.init(params))
        _check_inner(inner_state)
        return LowPrecisionState(
            inner_state=_begun(transformation, params, inner_state, kind, least),
            key_data=owned(key_data),
            steps=jnp.asarray(0, jnp.int32),
            structure=TreeStructure.of(params),
        )

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        _check_state(state, kind, key)
        check_gradients(updates, state.structure, params, _CALL)

        def proposed() -> tuple[PyTree, PyTree]:
            before = decoded(state.inner_state)
            seen = updates if params is None else params
            with telling_foreign_states(
                transformation.init, seen, state.inner_state, _CALL
            ):
                found = transformation.update(updates, before, params, **extra_args)
                _check_structure(found[1], before)
            return found

        seeds = _seeds(state, implementation)
        if kind is Float8Code and _is_traced((updates, state)):
            scales, (new_updates, inner_state) = in_two_passes(
                proposed,
                lambda found: _scales(found[1], state, seeds),
                jax.tree.leaves(state.inner_state),
            )
        else:
            new_updates, inner_state = proposed()
            scales = {}
        # A step that was skipped has used no bits.
        one_more = jnp.asarray(1, jnp.int32)
        if isinstance(inner_state, LossScaleState):
            one_more = inner_state.last_finite.astype(jnp.int32)
        return new_updates, state._replace(
            inner_state=_encoded(inner_state, state, seeds, scales),
            # After 2**31 steps it wraps: a saturated counter would repeat its bits.
            steps=state.steps + one_more,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _begun(
    transformation: optax.GradientTransformation,
    params: PyTree,
    inner_state: PyTree,
    kind: type[Code],
    least: int,
) -> PyTree:
    """Returns a new state with its moments encoded."""
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(params)} - {()}
    are_weights = iter(_weights_of(transformation, params))
    nodes, structure = jax.tree.flatten(
        inner_state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    del inner_state
    for index, node in enumerate(nodes):
        for leaf in jax.tree.leaves(node):
            is_moment = not next(are_weights) and getattr(leaf, "dtype", None) == F32
            if is_moment and leaf.shape in shapes and leaf.size >= least:
                codes, *scales = kind.encoded(_unknown(leaf))
                if not isinstance(leaf, Tracer) and leaf.committed:
                    codes = jax.device_put(codes, leaf.sharding)
                # In place: each array can be freed before the next is encoded. An nnx
                # Variable has one array: it goes around the parts of a code.
                around = jax.tree.structure(node).unflatten
                nodes[index] = kind(*(around([part]) for part in (codes, *scales)))
    return structure.unflatten(nodes)


def _unknown(leaf: jax.Array) -> jax.Array:
    """Returns `leaf`, which XLA does not take for a constant if it is traced.

    It would compute the codes of all zeros while it compiles, in seconds.
    """
    if not isinstance(leaf, Tracer):
        return leaf
    return jnp.where(jax.lax.optimization_barrier(jnp.asarray(True)), leaf, 1.0)


def _weights_of(
    transformation: optax.GradientTransformation, params: PyTree
) -> list[bool]:
    """Returns whether the digits of each leaf of a first state are of the parameters.

    Moments begin as constants. What begins as a copy of a parameter will be one of its
    later versions: in 8 bits it would lose its steps.
    """
    given, structure = jax.tree.flatten(params)
    are_arrays: list[bool] = []

    def first_state(arrays: list[jax.Array]) -> list[jax.Array]:
        remaining = iter(arrays)
        all_leaves = (next(remaining) if is_inexact(leaf) else leaf for leaf in given)
        leaves = jax.tree.leaves(transformation.init(structure.unflatten(all_leaves)))
        are_arrays.extend(isinstance(leaf, jax.Array) for leaf in leaves)
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    inexact = [leaf for leaf in given if is_inexact(leaf)]
    jaxpr = jaxprs.body_of(jax.make_jaxpr(first_state)(inexact)).jaxpr
    reached: set[jaxprs.Atom] = set(jaxpr.invars)

    def is_reached(atom: jaxprs.Atom) -> bool:
        return isinstance(atom, jaxprs.Var) and atom in reached

    for eqn in jaxpr.eqns:
        if any(map(is_reached, eqn.invars)):
            reached.update(eqn.outvars)
    results = iter(jaxpr.outvars)
    return [array and is_reached(next(results)) for array in are_arrays]


def _seeds(state: LowPrecisionState, implementation: Any) -> dict[int, Seeds]:
    """Returns what to round each code with in this step, by its place; or nothing."""
    if state.key_data is None:
        return {}
    key = jax.random.wrap_key_data(state.key_data, impl=implementation)
    places = list(_codes(state))
    return dict(zip(places, random_seeds(key, state.steps, len(places)), strict=True))


def _codes(state: LowPrecisionState) -> dict[int, PyTree]:
    """Returns the codes of a state by their places among the leaves that it decodes."""
    nodes = jax.tree.leaves(state.inner_state, is_leaf=is_code)
    return {index: node for index, node in enumerate(nodes) if is_code(node)}


def _scales(
    new: PyTree, old: LowPrecisionState, seeds: dict[int, Seeds]
) -> dict[int, Scales]:
    """Returns the scales of a new inner state, by the places of its codes."""
    leaves = jax.tree.leaves(new)
    return {at: Float8Code.scales_of(leaves[at], seeds.get(at)) for at in _codes(old)}


def _encoded(
    new: PyTree,
    old: LowPrecisionState,
    seeds: dict[int, Seeds],
    scales: dict[int, Scales],
) -> PyTree:
    """Returns a new inner state with codes where `old` has them.

    Args:
      new: the inner state in float32.
      old: the state before the step.
      seeds: what to round with, by the place of a code.
      scales: those that are known, by the place of a code.
    """
    leaves = jax.tree.leaves(new)
    for at, code in _codes(old).items():
        leaves[at] = encoded_like(code, leaves[at], seeds.get(at), scales.get(at))
    structure = jax.tree.structure(old.inner_state, is_leaf=is_code)
    return structure.unflatten(leaves)


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def _check_structure(new: PyTree, old: PyTree) -> None:
    remedy = "Use an optimizer whose update returns a state like its own."
    if jax.tree.structure(new) != jax.tree.structure(old):
        fact = "changed the structure of its state; first difference at"
        where = first_difference(key_paths(new), key_paths(old))
        raise ValueError(f"{_CALL}: inner {fact} {where}. {remedy}")
    pairs = zip(leaves_by_path(nnx.as_pure(new)), jax.tree.leaves(old), strict=True)
    for (path, leaf), was in pairs:
        types = [(np.shape(part), getattr(part, "dtype", None)) for part in (leaf, was)]
        if types[0] != types[1]:
            if is_half(types[1][1]) and types[0][1] == F32:
                remedy = (
                    "The moments of half parameters are half at first: wrap it, "
                    f"with_master_weights({_CALL}(optimizer)), so that inner gets f32."
                )
            raise ValueError(
                f"{_CALL}: inner changed its state at {path or 'the root'} from "
                f"{jax.typeof(was)} to {jax.typeof(leaf)}. {remedy}"
            )


def _check_inner(inner_state: PyTree) -> None:
    facts = {
        MasterWeightsState: "has float32 masters, which are weights. Put them around: "
        f"with_master_weights({_CALL}(optimizer)).",
        LowPrecisionState: "has a LowPrecisionState already. Leave one of the two out.",
    }
    for kind, fact in facts.items():
        if nodes_of(inner_state, kind):
            raise ValueError(f"{_CALL}: the optimizer it was given {fact}")


def _check_state(state: PyTree, kind: type[Code], key: jax.Array | None) -> None:
    if isinstance(state, dict | list):
        raise TypeError(f"{_CALL}: {read_without_target(state)}")
    if not isinstance(state, LowPrecisionState):
        fact = f"a {type(state).__name__}, the state of another optimizer"
    elif (state.key_data is None) != (key is None):
        fact = f"a state that was made with{'out' * (key is not None)} a key"
    else:
        codes = (node for _, node in nodes_of(state.inner_state, CODES))
        other = next((node for node in codes if not isinstance(node, kind)), None)
        if other is None:
            return
        fact = f"a state with {type(other).__name__}s, not {kind.__name__}s"
    error = ValueError if isinstance(state, LowPrecisionState) else TypeError
    raise error(
        f"{_CALL}: update was given {fact}. Begin with tx.init(params); to go on from "
        "that state, with amp.import_opt_state(tx.init(params), "
        "amp.export_opt_state(state))."
    )


def _checked_kind(dtype: object) -> type[Code]:
    name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    if isinstance(name, str) and name in _KINDS:
        return _KINDS[name]
    raise ValueError(
        f'{_CALL}(inner, {dtype!r}): unknown dtype. Use "bfloat16" or "float8".'
    )


def _checked_size(min_size: object) -> int:
    call = f"{_CALL}(inner, min_size={min_size!r})"
    remedy = "not a number of elements. Use an int, 1 or more."
    if not isinstance(min_size, numbers.Integral) or isinstance(min_size, bool):
        raise TypeError(f"{call}: {remedy}")
    if min_size < 1:
        raise ValueError(f"{call}: {remedy}")
    return int(min_size)
