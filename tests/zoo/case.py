"""One program of the zoo: in f32, and written by hand in mixed precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# (params, batch) -> f32[]
Loss = Callable[[Any, Any], jax.Array]
# (params, scales, batch) -> f32[]
LossOfScales = Callable[[Any, Any, Any], jax.Array]
# (params, batch) -> (logits, state of the model)
Forward = Callable[[Any, Any], tuple[jax.Array, Any]]


class Fp8Twin(NamedTuple):
    """A program with the fp8 layers of Flax, whose scales are state.

    Attributes:
      scales: batch -> the first scales and histories of maxima. The gradient of the
        loss with respect to them is not a gradient: it is what they are next.
      loss: it takes the f32 parameters of the f32 program.
    """

    scales: Callable[[Any], Any]
    loss: LossOfScales


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of one size.

    Attributes:
      sample: key -> (params, batch), random f32 parameters and a batch. It may be
        traced, for the shapes alone too.
      loss: the unchanged f32 program. It follows the dtype of its parameters, so that
        it can be computed in f64.
      twin: half dtype -> the same loss written by hand in mixed precision, with the
        same f32 parameters.
      wrapped: wrapper of a forward pass -> the loss of the wrapped one, itself outside
        of the wrapper; None where the model does not tell the two apart.
      fp8: the bf16 twin with the fp8 layers of Flax, its head in bf16; None where
        nobody has written it.
    """

    sample: Callable[[jax.Array], tuple[Any, Any]]
    loss: Loss
    twin: Callable[[Any], Loss]
    wrapped: Callable[[Callable[[Forward], Forward]], Loss] | None = None
    fp8: Fp8Twin | None = None

    def abstract(self) -> tuple[Any, Any]:
        """Returns the shapes of (params, batch): nothing is allocated."""
        return jax.eval_shape(self.sample, jax.random.key(0))
