"""How far compiled results are from one another."""

import jax
import numpy as np

from tests.measures import EXACTLY_AS_WRITTEN

# JAX >= 0.11: XLA fuses what is computed again otherwise than what is kept, and what is
# fused otherwise is rounded otherwise.
OPTIONS = EXACTLY_AS_WRITTEN | (
    {"xla_disable_hlo_passes": "fusion"} if jax.__version_info__ >= (0, 11) else {}
)


def exact(fn, *args):
    """Runs a function compiled so that f16 and bf16 are rounded where they are said."""
    return jax.jit(fn, compiler_options=OPTIONS)(*args)


def apart(found):
    """How far results are from the first one: of each array of each, three figures.

    They are the most that a number differs by, the largest number of the first, and the
    norm of the difference by that of the first.

    Args:
      found: a list of trees of arrays, all of one structure.
    """
    whole, *others = [
        [np.asarray(x, np.float64) for x in jax.tree.leaves(each)] for each in found
    ]
    return [
        [
            [float(np.abs(x - y).max()), float(np.abs(y).max()), relative(x, y)]
            for x, y in zip(each, whole, strict=True)
        ]
        for each in others
    ]


def relative(found, expected):
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
