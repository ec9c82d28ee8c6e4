"""The digits that half-precision parameters lack, as optimizers' states keep them.

A master is the whole number in float32. A compensation counts in int16 how far that
number is from the parameter. Each state knows how its digits begin, how they are read
and how they are written; training, checkpoints and recipes all ask it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.policies.dtypes import F32, PyTree
from jmp_amp.training.rounding import (
    land_on,
    remainder_of,
    round_at_random,
    round_to,
    with_remainder,
)
from jmp_amp.training.structures import TreeStructure


class Half(NamedTuple):
    """A half-precision parameter.

    Attributes:
      param: float32[...], its value.
      dtype: the dtype that it is stored in.
      kept: its master, float32[...]; its compensation, int16[...]; or a PRNG key.
    """

    param: jax.Array
    dtype: np.dtype
    kept: jax.Array

    def step_to(self, landing: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the update toward `landing`, and the number that it really reaches.

        Both are float32[...]. The update is rounded where the two numbers are as far
        apart as 1 and 1e-6.
        """
        step = landing - self.param
        return step, round_to(self.param + step, self.dtype)


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

    def with_kept(self, kept: PyTree) -> MasterWeightsState:
        return self._replace(masters=kept)

    @staticmethod
    def first(param: jax.Array, original: jax.Array) -> jax.Array:
        """Returns the master of a new parameter: `original`, float32[...]."""
        return original

    @staticmethod
    def value(half: Half) -> jax.Array:
        """Returns the number that `half` stands for: float32[...]."""
        # A parameter that was changed outside is no longer its rounded master.
        agrees = land_on(half.kept, half.dtype) == half.param
        return jnp.where(agrees, half.kept, half.param)

    @staticmethod
    def written(half: Half, update: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the update of `half` itself, and its next master: float32[...]."""
        master = MasterWeightsState.value(half) + update
        landing = land_on(master, half.dtype)
        step, reached = half.step_to(landing)
        # If the update was rounded, the master gives way, by less than the last place
        # of the old parameter in f32.
        return step, jnp.where(reached == landing, master, reached)


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

    def with_kept(self, kept: PyTree) -> KahanState:
        return self._replace(compensation=kept)

    @staticmethod
    @jax.jit
    def first(param: jax.Array, original: jax.Array) -> jax.Array:
        """Returns the compensation of a new parameter for float32 `original`: int16."""
        return remainder_of(original, jnp.asarray(param, F32), param.dtype)

    @staticmethod
    def value(half: Half) -> jax.Array:
        """Returns the number that `half` stands for: float32[...]."""
        return with_remainder(half.param, half.kept, half.dtype)

    @staticmethod
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
    def value(half: Half) -> jax.Array:
        """Returns the number that `half` stands for: float32[...]."""
        return half.param

    @staticmethod
    def written(half: Half, update: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the update of `half` itself, float32[...], and its key."""
        landing = round_at_random(half.param + update, half.dtype, half.kept)
        return half.step_to(landing)[0], half.kept


DIGIT_STATES = (MasterWeightsState, KahanState)
WEIGHT_STATES = (*DIGIT_STATES, StochasticRoundingState)
WeightState = MasterWeightsState | KahanState | StochasticRoundingState
