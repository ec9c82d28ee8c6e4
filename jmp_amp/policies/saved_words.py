"""Words for what the backward pass keeps: `Policy.saved`."""

import difflib
from collections.abc import Sequence

import numpy as np

from jmp_amp.policies.dtypes import is_half

# What is kept in half precision is kept in these formats.
EIGHT_BITS = ("int8", "e4m3")
SAVED = ("all", "auto", "least", *EIGHT_BITS)


class ResolvedWord(str):
    """A word that a policy has, in place of one that a caller writes.

    `dataclasses.replace(policy, compute_dtype=float32)` gives it to the new policy.
    Nothing half is kept there, so of 8 bits it takes the default.
    """

    __slots__ = ()


class DefaultWord(ResolvedWord):
    """A word that is the default of the compute dtype.

    `dataclasses.replace(policy, compute_dtype=...)` gives it again, and so the new
    policy has the default of the other dtype.
    """

    __slots__ = ()


def word_of(
    saved: str | None, compute_dtype: np.dtype, call: str | None = None
) -> ResolvedWord:
    """Returns the word of a policy.

    Args:
      saved: what the policy is made with: one of `SAVED`, None, or the word of the
        policy that it is made of.
      compute_dtype: of the policy.
      call: the caller's call as written, for errors.

    Raises:
      TypeError: if it is neither text nor None.
      ValueError: if it is none of `SAVED`, or a caller asks for 8 bits where the
        compute dtype is not half.

    Example:
      >>> F16, F32 = np.dtype("float16"), np.dtype("float32")
      >>> word_of(None, F16), word_of(" LEAST", F16)
      ('auto', 'least')
      >>> word_of(word_of(None, F16), F32)
      'all'
    """
    default = DefaultWord("auto" if is_half(compute_dtype) else "all")
    if isinstance(saved, DefaultWord):
        return default
    call = call or f"Policy(saved={saved!r})"
    word = checked_word(saved, call)
    if word in EIGHT_BITS and not is_half(compute_dtype):
        if isinstance(saved, ResolvedWord):
            return default
        raise ValueError(
            f"{call}: the compute dtype is {compute_dtype}, so nothing half is kept "
            'that 8 bits could stand for. Use "least", or a compute_dtype of bfloat16 '
            "or float16."
        )
    return default if word is None or word == default else ResolvedWord(word)


def checked_word(saved: object, call: str) -> str | None:
    """Returns one of `SAVED`, or None, as it was written in any case.

    Args:
      saved: the argument of the caller.
      call: the caller's call as written, for errors.
    """
    if saved is None:
        return None
    if not isinstance(saved, str):
        raise TypeError(
            f"{call}: {saved!r} is neither text nor None. Use {_one_of(SAVED)}."
        )
    word = saved.strip().lower()
    if word not in SAVED:
        close = difflib.get_close_matches(word, SAVED, n=1)
        hint = f'Did you mean "{close[0]}"? ' if close else ""
        raise ValueError(
            f"{call}: unknown word {saved!r}. {hint}Use "
            f"{_one_of(SAVED)}: what the backward pass keeps."
        )
    return word


def _one_of(words: Sequence[str]) -> str:
    *first, last = (f'"{word}"' for word in words)
    return f"{', '.join(first)} or {last}"
