"""Scores less their maximum, of which a log-softmax needs the exponentials and more.

XLA computes the maximum and the difference of a row in one kernel, if the row is short
enough for it, and writes the difference to memory in f32 if several operations read it:
scores of 8 x 512 words over a vocabulary of 8192 are 128 MB, beside 64 MB of the scores
in half. A barrier behind the maximum keeps both in kernels of their own, and then each
reader computes the difference from the scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.program import binding
from jmp_amp.plan.program.dimensions import is_larger
from jmp_amp.plan.program.jaxprs import Eqn, Value, aval_of
from jmp_amp.plan.rewrites.rewriting import Readers, Rewrite
from jmp_amp.policies.dtypes import is_half

# One more kernel takes 2 microseconds on an H100: about as long as it takes to write
# and to read so many elements in f32.
_ELEMENTS = 3 * 2**18


def shifted_scores(at: Standing) -> Rewrite | None:
    """Returns the rewrite of scores less one number a row, such as their maximum."""
    applies = (
        at.name == "sub"
        and is_half(at.half)
        and at.is_related
        and is_larger(_size(at.eqn, 0), _size(at.eqn, 1), unless_known=True)
        and is_larger(_size(at.eqn, 0), _ELEMENTS, unless_known=True)
    )
    return _SHIFTED if applies else None


def _size(eqn: Eqn, operand: int) -> int:
    return aval_of(eqn.invars[operand]).size


def _beside(eqn: Eqn, readers: Readers) -> Rewrite | None:
    """Returns the rewrite if an exponential and others read the difference."""
    names = [reader.eqn.primitive.name for reader in readers.of(eqn.outvars[0])]
    return _SHIFTED if "exp" in names and len(names) > 1 else None


def _bind(
    eqn: Eqn, dtype: np.dtype | None, operands: Sequence[Value]
) -> Sequence[jax.Array]:
    scores, most = operands
    return binding.bind(eqn, (scores, jax.lax.optimization_barrier(most)))


_SHIFTED = Rewrite(_bind, beside=_beside)
