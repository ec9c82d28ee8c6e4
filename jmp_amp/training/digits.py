"""The digits that half-precision parameters lack, as optimizers' states keep them.

A master is the whole number in float32. A compensation counts in int16 how far that
number is from the parameter. Each state knows how its digits begin, how they are read
and how they are written; training, checkpoints and recipes all ask it. Digits begin
with those of the f32 originals that parameters were cast from, if these are given.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jmp_amp.policies.arguments import warn
from jmp_amp.policies.dtypes import F32, PyTree, is_castable, is_half
from jmp_amp.training.rounding import (
    land_on,
    next_on_grid,
    once_a_shape,
    remainder_of,
    round_at_random,
    stored,
    with_remainder,
)
from jmp_amp.training.structures import (
    TreeStructure,
    is_half_parameter,
    key_paths,
    leaves_by_path,
    nodes_at,
    nodes_of,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("param", "kept"),
    meta_fields=("dtype",),
)
@dataclasses.dataclass(frozen=True)
class Half:
    """A half-precision parameter, and what an optimizer keeps to add to it.

    What computes with one is traced once for a shape.

    Attributes:
      param: float32[...], its value.
      dtype: the dtype that it is stored in.
      kept: its master, float32[...]; its compensation, int16[...]; or its seeds.
    """

    param: jax.Array
    dtype: np.dtype
    kept: PyTree

    def step_to(self, landing: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the update toward `landing`, and the number that it really reaches.

        Both are float32[...]. The update is rounded where the two numbers are as far
        apart as 1 and 1e-6. The sum is a number of `dtype` all the same, as it is a
        multiple of the last place of the update and small; or it is `landing`, or one
        float32 less where that is a power of two: the same in `dtype`.
        """
        # A parameter that is inf stays: inf - inf is NaN.
        step = jnp.where(landing == self.param, 0.0, landing - self.param)
        return step, next_on_grid(self.param + step, self.dtype)


class MasterWeightsState(NamedTuple):
    """The state of an optimizer wrapped in `with_master_weights`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      masters: a tree like the parameters, float32 where they are half and masked where
        they are not.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: PyTree
    masters: PyTree
    structure: TreeStructure

    @property
    def kept(self) -> PyTree:
        return self.masters

    @staticmethod
    def first(param: jax.Array, original: jax.Array) -> jax.Array:
        """Returns the master of a new parameter: `original`, float32[...]."""
        return original

    @staticmethod
    @once_a_shape
    def value(half: Half) -> jax.Array:
        """Returns the number that `half` stands for: float32[...]."""
        # A parameter that was changed outside is no longer its rounded master.
        agrees = land_on(half.kept, half.dtype) == half.param
        return jnp.where(agrees, half.kept, half.param)

    @staticmethod
    @once_a_shape
    def written(half: Half, update: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the update of `half` itself, and its next master: float32[...]."""
        master = MasterWeightsState.value(half) + update
        landing = land_on(master, half.dtype)
        _, reached = half.step_to(landing)
        # If the update was rounded, the master gives way, by less than the last place
        # of the old parameter in f32.
        master = jnp.where(reached == landing, master, reached)
        # The update is computed from the new master, not beside it: XLA's CPU makes a
        # loop for each result, and of two loops that both read the old master and the
        # old parameter neither can write in place.
        return half.step_to(land_on(master, half.dtype))[0], master


class KahanState(NamedTuple):
    """The state of an optimizer wrapped in `with_kahan`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      compensation: a tree like the parameters: int16 where they are half, to be added
        to a parameter in units of 2**-16 of its last place; masked elsewhere.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: PyTree
    compensation: PyTree
    structure: TreeStructure

    @property
    def kept(self) -> PyTree:
        return self.compensation

    @staticmethod
    @jax.jit
    def first(param: jax.Array, original: jax.Array) -> jax.Array:
        """Returns the compensation of a new parameter for float32 `original`: int16."""
        return remainder_of(original, jnp.asarray(param, F32), param.dtype)

    @staticmethod
    @once_a_shape
    def value(half: Half) -> jax.Array:
        """Returns the number that `half` stands for: float32[...]."""
        return with_remainder(half.param, half.kept, half.dtype)

    @staticmethod
    @once_a_shape
    def written(half: Half, update: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the update of `half` itself, float32[...], and int16[...]."""
        wanted = KahanState.value(half) + update
        step, reached = half.step_to(land_on(wanted, half.dtype))
        left = remainder_of(wanted, reached, half.dtype)
        # With a zero update nothing is written: rounding anew would move a tie.
        still = update == 0
        return jnp.where(still, 0.0, step), jnp.where(still, half.kept, left)


class StochasticRoundingState(NamedTuple):
    """The state of an optimizer wrapped in `with_stochastic_rounding`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      key_data: uint32[...], the PRNG key, as `jax.random.key_data` shows it.
      steps: int32[], steps so far; together with the key they make the bits of one.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: PyTree
    key_data: jax.Array
    steps: jax.Array
    structure: TreeStructure

    @staticmethod
    @once_a_shape
    def value(half: Half) -> jax.Array:
        """Returns the number that `half` stands for: float32[...]."""
        return half.param

    @staticmethod
    @once_a_shape
    def written(half: Half, update: jax.Array) -> tuple[jax.Array, PyTree]:
        """Returns the update of `half` itself, float32[...], and its seeds."""
        landing = round_at_random(half.param + update, half.dtype, half.kept)
        return half.step_to(landing)[0], half.kept


DIGIT_STATES = (MasterWeightsState, KahanState)
WEIGHT_STATES = (*DIGIT_STATES, StochasticRoundingState)
WeightState = MasterWeightsState | KahanState | StochasticRoundingState


def check_state(is_own: bool, state: PyTree, call: str) -> None:
    """Raises if a state is not of the optimizer that is called."""
    if not is_own:
        raise TypeError(
            f"{call}: update was given a {type(state).__name__}, the state of another "
            "optimizer, dtype or key. Begin with tx.init(params), read a checkpoint "
            "with target=tx.init(params), or go on from another state with "
            "amp.import_opt_state(tx.init(params), amp.export_opt_state(state))."
        )


def warn_of_chain(opt_state: PyTree, call: str) -> None:
    """Warns if others come after a state of half-precision weights in an `optax.chain`.

    What they do to its updates takes the parameters elsewhere: a master that is not the
    parameter, rounded, is overwritten by it in each step.
    """

    def is_chain(node: object) -> bool:
        # The state of a chain is a tuple, and nothing more.
        return type(node) is tuple and bool(nodes_of(node[:-1], WEIGHT_STATES))

    for _, node in nodes_at(opt_state, is_chain):
        _, found = nodes_of(node[:-1], WEIGHT_STATES)[0]
        warn(
            f"{call}: in an optax.chain something comes after the transformation of "
            f"{type(found).__name__} and changes its updates, so that parameters miss "
            "the numbers that it keeps, in each step. Put the whole chain inside: "
            "with_master_weights(optax.chain(...))."
        )


def first_values(params: PyTree, init_from: PyTree | None, call: str) -> PyTree:
    """Returns `params` with its half leaves as new float32 arrays.

    Args:
      params: the tree that `init` was given.
      init_from: the tree (or nnx module) that the half leaves were cast from, and whose
        digits the new arrays have; or None.
      call: the optimizer's name, to begin errors with.

    Raises:
      ValueError: if a leaf is missing in `init_from`, or rounds to another number.
    """
    if isinstance(init_from, nnx.Module):
        init_from = nnx.state(init_from)
    found = dict(leaves_by_path(nnx.as_pure(init_from)))
    leaves, structure = jax.tree.flatten(params)
    call = f"{call}(inner, init_from=...)"
    paths = jax.tree_util.tree_flatten_with_path(nnx.as_pure(params))[0]
    for index, (keys, leaf) in enumerate(paths):
        if is_half_parameter(keys, leaf):
            path = jax.tree_util.keystr(keys)
            if init_from is not None:
                _check_original(leaf, found.get(path), path, call)
            leaves[index] = _new_float32(found.get(path, leaf), leaf)
    return structure.unflatten(leaves)


def begin_with(opt_state: PyTree, params: PyTree, originals: PyTree) -> PyTree:
    """Returns a new optimizer state that has all digits of the original parameters.

    As `init_from=` of `with_master_weights` and `with_kahan`, for a state that began
    without it.

    Args:
      opt_state: any optimizer's state. `nnx.Variable`s in it are changed in place.
      params: the half-precision parameters.
      originals: the parameters before they were cast.
    """
    halves = dict(leaves_by_path(nnx.as_pure(params)))
    found = dict(leaves_by_path(nnx.as_pure(originals)))

    def begun(node: PyTree) -> PyTree:
        if not isinstance(node, DIGIT_STATES):
            return node

        def first(path: str) -> jax.Array:
            leaf = halves[path]
            return node.first(leaf, _new_float32(found[path], leaf))

        kept = _replaced(node.kept, first)
        return type(node)(node.inner_state, kept, node.structure)

    return jax.tree.map(
        begun, opt_state, is_leaf=lambda node: isinstance(node, DIGIT_STATES)
    )


def with_all_digits(
    param: PyTree, state: type[MasterWeightsState | KahanState], kept: PyTree, path: str
) -> jax.Array:
    """Returns the parameter at `path` as float32, with the digits that a state keeps.

    Raises:
      ValueError: if it is not half, or of another shape than `kept`.
    """
    if np.shape(kept) != np.shape(param) or not is_half(getattr(param, "dtype", None)):
        raise ValueError(
            f"export_params: the parameter at {path} is {jax.typeof(param)}, but the "
            f"optimizer has a half-precision one of shape {np.shape(kept)}. Pass the "
            "parameters that this optimizer trains."
        )
    return state.value(Half(jnp.asarray(param, F32), param.dtype, jnp.asarray(kept)))


def _replaced(tree: PyTree, of: Callable[[str], jax.Array]) -> PyTree:
    """Returns `tree` with `of` the key path of each leaf in its place."""
    paths = iter(key_paths(nnx.as_pure(tree)))
    leaves, structure = jax.tree.flatten(
        tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for index, leaf in enumerate(leaves):
        if not jax.tree.leaves(leaf):
            continue  # A Variable whose value is masked.
        value = of(next(paths))
        if isinstance(leaf, nnx.Variable):
            leaf.set_value(value)
        else:
            leaves[index] = value
    return structure.unflatten(leaves)


def _check_original(leaf: jax.Array, original: PyTree, path: str, call: str) -> None:
    dtype = getattr(original, "dtype", None)
    remedy = "Give the tree that the parameters were cast from."
    if not is_castable(dtype) or np.shape(original) != leaf.shape:
        fact = "nothing" if dtype is None else jax.typeof(original)
        raise ValueError(
            f"{call}: the parameter at {path} is {jax.typeof(leaf)}, but there it "
            f"is {fact}. {remedy}"
        )
    original = _beside(original, leaf)
    if _is_at_hand(leaf) and _is_at_hand(original):
        rounded = stored(jnp.asarray(original), leaf.dtype)
        if not jnp.array_equal(rounded, leaf, equal_nan=True):
            raise ValueError(
                f"{call}: the parameter at {path} is not the one there, rounded to "
                f"{leaf.dtype.name}. {remedy}"
            )


def _new_float32(original: PyTree, leaf: PyTree) -> jax.Array:
    return jnp.array(_beside(original, leaf), F32, copy=True)


def _beside(original: PyTree, leaf: PyTree) -> PyTree:
    """Returns `original` on the devices of `leaf`, with the same sharding."""
    if isinstance(original, Tracer) or not _is_at_hand(leaf):
        return original
    # An array that was put somewhere is committed to that place. A step that is given
    # one is compiled for it, and again if its result is not committed.
    return jax.device_put(original, leaf.sharding) if leaf.committed else original


def _is_at_hand(array: PyTree) -> bool:
    is_known = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return is_known and array.is_fully_addressable
