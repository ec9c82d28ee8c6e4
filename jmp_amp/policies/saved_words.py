"""Words for what the backward pass keeps: `Policy.saved`."""

import difflib

import numpy as np

from jmp_amp.policies.dtypes import is_half

SAVED = ("all", "auto", "least")
_ONE_OF = '"all", "auto" or "least"'
_GONE = ("int8", "e4m3")


class DefaultWord(str):
    """A word that is the default of the compute dtype.

    `dataclasses.replace(policy, compute_dtype=...)` gives it again, and so the new
    policy has the default of the other dtype.
    """

    __slots__ = ()


def word_of(saved: str | None, compute_dtype: np.dtype) -> str:
    """Returns the word of a policy.

    Args:
      saved: what the policy is made with: one of `SAVED`, None, or the word of the
        policy that it is made of.
      compute_dtype: of the policy.

    Raises:
      TypeError: if it is neither text nor None.
      ValueError: if it is none of `SAVED`.

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
    word = checked_word(saved, f"Policy(saved={saved!r})")
    return default if word is None or word == default else word


def checked_word(saved: object, call: str) -> str | None:
    """Returns one of `SAVED`, or None, as it was written in any case.

    Args:
      saved: the argument of the caller.
      call: the caller's call as written, for errors.
    """
    if saved is None:
        return None
    if not isinstance(saved, str):
        raise TypeError(f"{call}: {saved!r} is neither text nor None. Use {_ONE_OF}.")
    word = saved.strip().lower()
    if word in _GONE:
        raise ValueError(
            f"{call}: {word!r} is gone: on an H200 residuals in 8 bits needed more "
            'time and memory than "all". Use "least", the fewest bytes.'
        )
    if word not in SAVED:
        close = difflib.get_close_matches(word, SAVED, n=1)
        hint = f'Did you mean "{close[0]}"? ' if close else ""
        raise ValueError(
            f"{call}: unknown word {saved!r}. {hint}Use {_ONE_OF}: what the backward "
            "pass keeps."
        )
    return word
