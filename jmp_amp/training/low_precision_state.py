"""Moments of an optimizer in half or a quarter of their bytes.

Adam keeps two float32 numbers for each parameter. Between two steps they need neither
their digits nor their range: here they are bfloat16 or 8 bits, and float32 while the
optimizer works.

8 bits are floats with a scale for each block of numbers (Dettmers et al. 2021,
arXiv:2110.02861, section 2.1, "8-bit Optimizers via Block-wise Quantization"). There
codes are looked up in a table of 256 numbers. Here they are fp8: XLA fuses a cast with
what reads it, and a lookup it does not.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_amp.policies.dtypes import F32, PyTree
from jmp_amp.training.half_weights import MasterWeightsState
from jmp_amp.training.rounding import (
    key_parts,
    land_on,
    random_seeds,
    round_at_random,
)
from jmp_amp.training.structures import (
    TreeStructure,
    check_gradients,
    check_state,
    first_difference,
    is_variable,
    key_paths,
    nodes_of,
    owned,
    rows_of,
    telling_foreign_states,
    with_extra_args,
)

BLOCK = 256
_CALL = "with_low_precision_state"
_BF16 = np.dtype(jnp.bfloat16)


class Bfloat16Code(NamedTuple):
    """Float32 numbers that are stored as bfloat16.

    Attributes:
      codes: bfloat16[...].
    """

    codes: jax.Array


class Float8Code(NamedTuple):
    """Float32 numbers that are stored in 8 bits, with a scale for each 256 of them.

    A block is 256 numbers in a row of the flattened array; the last may be shorter. Its
    largest numbers, those within a power of two, decide: if one of them is negative,
    the block is of float8_e4m3fn. Else it is of float8_e5m2, as second moments are,
    which span 8 powers of ten.

    Attributes:
      codes: uint8[...], bit patterns of fp8, in the shape of the numbers.
      scales: float32[..., blocks], powers of two: what a block is multiplied by. Minus
        that if it is of float8_e4m3fn; 1 if it is all zeros, and NaN if not all of it
        is finite. Leading axes of `codes` remain if blocks do not cross them.
    """

    codes: jax.Array
    scales: jax.Array


CODES = (Bfloat16Code, Float8Code)


@jax.jit
def largest_in_blocks(numbers: jax.Array) -> jax.Array:
    """Returns twice the largest exponent of each block, plus one for a minus sign.

    int16[..., blocks]. One maximum: of two, XLA would write the numbers to memory.
    """
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    sizes = bits & jnp.uint32(0x7FFFFFFF)
    # One more beyond 1.75 times a power of two, the largest number of each format. What
    # is not finite is above all.
    powers = jnp.where(jnp.isfinite(numbers), (sizes + jnp.uint32(0x1FFFFF)) >> 23, 256)
    keys = ((powers << 1) | (bits >> 31)).astype(jnp.int16)
    # Axes that no block crosses remain, so that a sharding of these does.
    shape = keys.shape
    are_whole = [math.prod(shape[axis:]) % BLOCK == 0 for axis in range(len(shape))]
    if not any(are_whole):
        keys = jnp.pad(keys.reshape(-1), (0, -keys.size % BLOCK))
    return jnp.max(keys.reshape(*shape[: max(sum(are_whole) - 1, 0)], -1, BLOCK), -1)


@functools.partial(jax.jit, static_argnums=0)
def encoded(kind: type, numbers: jax.Array, known: Any = None) -> Any:
    """Returns the code of float32 `numbers`.

    Args:
      kind: `Bfloat16Code` or `Float8Code`.
      numbers: float32[...].
      known: of the former the seeds to round with, None to round to nearest; of the
        latter what `largest_in_blocks` returns, None to compute it.
    """
    if kind is Bfloat16Code:
        # On bits: XLA may drop a pair of casts, and keep what it should round.
        if known is None:
            return kind(land_on(numbers, _BF16).astype(_BF16))
        return kind(round_at_random(numbers, _BF16, known).astype(_BF16))
    largest = largest_in_blocks(numbers) if known is None else known
    powers = (largest >> 1).astype(jnp.int32)
    are_signed = (largest & 1 == 1) & (powers > 0)
    # Of numbers beyond 1.75 * 2**127 a scaled code would be infinite. The smallest
    # number of a format, scaled, is the smallest normal float32.
    e4m3, e5m2 = jnp.clip(powers, 18, 254) - 8, jnp.clip(powers, 32, 254) - 15
    sizes = jax.lax.bitcast_convert_type(jnp.where(are_signed, e4m3, e5m2) << 23, F32)
    sizes = jnp.where(powers == 0, 1.0, jnp.where(powers < 256, sizes, jnp.nan))
    is_signed = _spread(are_signed, numbers)
    # Of a second moment that is zero Adam divides by the square root. (A CPU takes
    # subnormal numbers for zero.) A cast of what is beyond the largest number, such as
    # 460 to 448, is not that of all devices.
    end = jnp.where(is_signed, 448.0, 57344.0)
    least = jnp.where(~is_signed & (numbers >= 2.0**-126), 2.0**-16, -end)
    scaled = jax.lax.clamp(least, numbers * _spread(1 / sizes, numbers), end)
    casts = scaled.astype(jnp.float8_e4m3fn), scaled.astype(jnp.float8_e5m2)
    bits = (jax.lax.bitcast_convert_type(each, jnp.uint8) for each in casts)
    return kind(jnp.where(is_signed, *bits), jnp.where(are_signed, -sizes, sizes))


@jax.jit
def _numbers_of(code: Bfloat16Code | Float8Code) -> jax.Array:
    if isinstance(code, Bfloat16Code):
        return code.codes.astype(F32)
    # Both formats are leading bits of a float16, e4m3 with another bias. What is known
    # of a block is computed for the block: XLA computes it once.
    codes, are_signed = code.codes.astype(jnp.uint16), code.scales < 0
    shifts = _spread(jnp.where(are_signed, 7, 8).astype(jnp.uint16), codes)
    factors = _spread(jnp.where(are_signed, -256 * code.scales, code.scales), codes)
    bits = ((codes & 0x7F) << shifts) | ((codes & 0x80) << 8)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(F32) * factors


def _spread(of_blocks: jax.Array, like: jax.Array) -> jax.Array:
    """Returns what is known of blocks for each number of an array like `like`."""
    found = jnp.broadcast_to(of_blocks[..., None], (*of_blocks.shape, BLOCK))
    if found.size != like.size:
        found = found.reshape(-1)[: like.size]
    return found.reshape(like.shape)


def is_code(node: object) -> bool:
    return isinstance(node, CODES)


def decoded(tree: PyTree) -> PyTree:
    """Returns `tree` with float32 arrays in place of codes.

    If an nnx Variable holds the codes, one like it holds the array.
    """

    def plain(node: PyTree) -> PyTree:
        if not is_code(node):
            return node
        numbers = _numbers_of(type(node)(*jax.tree.leaves(node)))
        return jax.tree.map(lambda _: numbers, node.codes)

    return jax.tree.map(plain, tree, is_leaf=is_code)


def encoded_like(code: PyTree, numbers: jax.Array, known: Any = None) -> PyTree:
    """Returns what `encoded` does, in Variables where `code` is in some."""
    found = encoded(type(code), numbers, known)
    return jax.tree.structure(code).unflatten(found)


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
    mask: Callable[[str], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with its moments stored in bfloat16 or in 8 bits.

    It encodes float32 arrays of the state, moments and momentum, that have the shape of
    a parameter, not `()`, and at least `min_size` elements. Counts, schedules, other
    dtypes and small arrays stay as they are. `inner` works on the state in float32, and
    the state has the same structure, shapes and dtypes after each step.

    Some optimizers keep copies of the weights, in the same shapes: the `z` of
    `optax.contrib.schedule_free`, the `params0` of `prodigy`. Exclude these with
    `mask`, since in 8 bits they would lose their steps.

    "bfloat16": 2 bytes a number. Rounded to nearest, a moment that should decay by 0.1%
    in a step does not move. With a `key` numbers are rounded at random, right on
    average, as those of `with_stochastic_rounding` are.

    "float8": 1 byte, and a scale for 256 numbers in a row (Dettmers et al. 2021,
    arXiv:2110.02861, section 2.1), rounded to nearest. A block whose largest numbers
    have no minus sign is float8_e5m2, any other float8_e4m3fn. A positive number of the
    former is not rounded to zero. Codes are uint8, in the shape of the parameter.

    What an update that is compiled for an H100 moves, of the bytes of float32:

    =========== ======== ======
    `inner`     bfloat16 float8
    =========== ======== ======
    adam, adamw 0.71x    0.80x
    lion, sgd   0.80x    0.96x
    =========== ======== ======

    Where one moment is made of the other, as `rmsprop` with momentum does, XLA may
    store new moments in float32 for a while: 0.8x to 1.4x for "float8", with up to 4
    temporary bytes a parameter.

    Codes are sharded as the parameter is. Where a block of 256 numbers crosses devices,
    XLA gathers the moments of "float8", which takes more memory than float32: shard
    such parameters by rows, or use "bfloat16".

    A step that `with_loss_scale` skips leaves codes and random bits alone. Masters and
    loss scales belong outside: `with_loss_scale(with_master_weights(
    with_low_precision_state(tx)), scale)`. `optax.MultiSteps` belongs outside too:
    inside, the sums of gradients would be rounded in each micro-step. For half
    parameters wrap it in `with_master_weights` or its like, so that `inner` gets
    float32. Moments that are bfloat16 already stay as they are.

    Args:
      inner: an optimizer or a chain; extra arguments of `update` reach it.
      dtype: "bfloat16" or "float8".
      key: a PRNG key of `jax.random`, new or old style, to round bfloat16 with. Equal
        keys draw equal bits: give each part of a tree (`optax.partition`) another.
      min_size: an int, at least 1: arrays with fewer elements are not encoded.
      mask: a function of the key path of an array in the state of `inner`, such as
        "[0].mu['w']"; it is encoded where this returns True.

    Returns:
      A transformation whose state is a `LowPrecisionState`. `export_opt_state` returns
      it decoded.

    Raises:
      TypeError: if `inner` is not a transformation, or `key` not a key; from `update`,
        if the state is of another optimizer, `dtype` or `key`.
      ValueError: if `dtype` is neither, `min_size` no int or less than 1, or a `key` is
        given for "float8"; from `init`, if `inner` holds masters or a state like this
        one; from `update`, if the gradients are not a tree like that of `init`.

    Example:
      >>> import jmp_amp as amp
      >>> tx = amp.with_low_precision_state(optax.adam(1e-3), "float8")
      >>> moment = tx.init(jnp.zeros((64, 128))).inner_state[0].mu
      >>> jax.tree.map(jax.typeof, moment)
      Float8Code(codes=ShapedArray(uint8[64,128]), scales=ShapedArray(float32[32]))
      >>> free = optax.contrib.schedule_free_adamw(1e-3)
      >>> tx = amp.with_low_precision_state(free, mask=lambda path: ".z" not in path)
    """
    tx = with_extra_args(inner, _CALL)
    name = getattr(dtype, "__name__", str(dtype))
    kind = {"bfloat16": Bfloat16Code, "float8": Float8Code}.get(name)
    if kind is None:
        remedy = 'unknown dtype. Use "bfloat16" or "float8".'
        raise ValueError(f"{_CALL}(inner, {dtype!r}): {remedy}")
    if min_size is True or not isinstance(min_size, int | np.integer) or min_size < 1:
        remedy = "not a number of elements. Use an int, 1 or more."
        raise ValueError(f"{_CALL}(inner, min_size={min_size!r}): {remedy}")
    if key is not None and kind is Float8Code:
        remedy = '8 bits are rounded to nearest. Leave key out, or use "bfloat16".'
        raise ValueError(f'{_CALL}(inner, "float8", key=...): {remedy}')
    written = f"{_CALL}(inner, key={{}})"
    parts: Any = (None, None) if key is None else key_parts(key, written)

    def init_fn(params: PyTree) -> PyTree:
        inner_state = owned(tx.init(params))
        if found := nodes_of(inner_state, (MasterWeightsState, LowPrecisionState)):
            fact = f"the optimizer inside has a {type(found[0][1]).__name__} already"
            remedy = f"Use {_CALL}(optimizer) once, and with_master_weights around it."
            raise ValueError(f"{_CALL}: {fact}. {remedy}")
        shapes = {np.shape(leaf) for leaf in jax.tree.leaves(params)} - {()}
        nodes, structure = jax.tree.flatten(inner_state, is_leaf=is_variable)
        paths = key_paths(inner_state)
        del inner_state
        for index, node in enumerate(nodes):
            leaf: Any = next(iter(jax.tree.leaves(node)), None)
            is_moment = getattr(leaf, "dtype", None) == F32 and leaf.shape in shapes
            is_moment = is_moment and leaf.size >= min_size
            if is_moment and (mask is None or mask(paths[index])):
                # XLA would compute the codes of a constant as it compiles, in seconds.
                true = jax.lax.optimization_barrier(jnp.asarray(True))
                code = encoded(kind, jnp.where(true, leaf, 1.0))
                # In place: each array can be freed before the next is encoded. An nnx
                # Variable has one array: it goes around the parts of a code.
                around = jax.tree.structure(node).unflatten
                nodes[index] = kind(*(around([part]) for part in code))
        steps, seen = jnp.asarray(0, jnp.int32), TreeStructure.of(params)
        key_data = owned(parts[0])
        return LowPrecisionState(structure.unflatten(nodes), key_data, steps, seen)

    def update_fn(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> Any:
        is_own = isinstance(state, LowPrecisionState) and (
            (state.key_data is None) == (key is None)
            and all(type(code) is kind for _, code in nodes_of(state, CODES))
        )
        check_state(is_own, state, _CALL)
        check_gradients(updates, state.structure, params, _CALL)
        seen, before = updates if params is None else params, state.inner_state
        with telling_foreign_states(tx.init, seen, before, _CALL):
            wide = decoded(before)
            new, after = tx.update(updates, wide, params, **extra)
            now, then = (rows_of(x, jax.typeof) for x in (after, wide))
            if now != then:
                fact = f"its state; first difference at {first_difference(now, then)}"
                remedy = f"Half parameters: use with_master_weights({_CALL}(tx))."
                raise ValueError(f"{_CALL}: inner changed {fact}. {remedy}")
        nodes, structure = jax.tree.flatten(before, is_leaf=is_code)
        leaves = jax.tree.leaves(after)
        places = [at for at, node in enumerate(nodes) if is_code(node)]
        known: Any = [None] * len(places)
        if kind is Float8Code:
            # Behind the barrier all of them are known before the first code is. XLA
            # then computes the elementwise operations of `inner` twice, for these and
            # for the codes, and stores no moment in float32.
            known = [largest_in_blocks(leaves[at]) for at in places]
            known = jax.lax.optimization_barrier(known)
        elif state.key_data is not None:
            own_key = jax.random.wrap_key_data(state.key_data, impl=parts[1])
            known = random_seeds(own_key, state.steps, len(places))
        # A moment that a loss scale inside has kept may change if it is encoded again.
        flags: list[Any] = [
            getattr(x, "last_finite", None)
            for x in jax.tree.leaves(after, is_leaf=lambda x: hasattr(x, "last_finite"))
            for _ in jax.tree.leaves(x)
        ]
        for at, each in zip(places, known, strict=True):
            leaves[at] = encoded_like(nodes[at], leaves[at], each)
            if flags[at] is not None:
                choose = functools.partial(jnp.where, flags[at])
                leaves[at] = jax.tree.map(choose, leaves[at], nodes[at])
        # A step that was skipped has used no bits. After 2**31 steps it wraps: a
        # saturated counter would repeat its bits.
        one_more = jnp.asarray(getattr(after, "last_finite", True), jnp.int32)
        inner_state, steps = structure.unflatten(leaves), state.steps + one_more
        return new, state._replace(inner_state=inner_state, steps=steps)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
