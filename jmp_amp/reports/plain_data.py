"""Numbers as plain data: what strict JSON can say, and read back."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.policies.dtypes import PyTree

_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Written(abc.ABC):
    """A result that is written as plain data, and read back."""

    @classmethod
    @abc.abstractmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the result that `to_dict` wrote."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the result that `to_json` wrote.

        Raises:
          TypeError: if `text` is not text.
          ValueError: if it is not what `to_json` wrote.
        """
        return cls.from_dict(parsed(text, cls.__name__))


def written(value: PyTree) -> Any:
    """Returns a pytree as dictionaries, lists, text and finite numbers.

    Arrays are nested lists, a complex number is a pair, and a number that is not finite
    is "inf", "-inf" or "nan". A node that is no dictionary, list or tuple is a
    dictionary from key paths to leaves.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): written(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [written(each) for each in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array | complex):
        return written(_numbers(value))
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if len(leaves) == 1 and leaves[0][1] is value:
        return str(value)
    return {jax.tree_util.keystr(path): written(leaf) for path, leaf in leaves}


def read(data: Any) -> Any:
    """Returns what `written` wrote, with numbers that are not finite as numbers."""
    if isinstance(data, str):
        return _WORDS.get(data, data)
    if isinstance(data, Mapping):
        return {key: read(each) for key, each in data.items()}
    return [read(each) for each in data] if isinstance(data, list) else data


def read_shape(data: Any) -> tuple[int, ...]:
    """Returns a shape from a list of ints, or from the text "[8,16]" of old reports."""
    return tuple(map(int, json.loads(data) if isinstance(data, str) else data))


def _number(number: float) -> float | str:
    # `str` says inf, -inf and nan.
    return number if math.isfinite(number) else str(float(number))


def _numbers(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )
    array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    if np.issubdtype(array.dtype, np.complexfloating):
        array = np.stack([np.real(array), np.imag(array)], axis=-1)
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(np.float64)  # bf16 has no numbers of Python
    return array.tolist()


def is_finite(tree: PyTree) -> bool:
    """Returns whether all floating and complex leaves of a pytree are finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not isinstance(leaf, str)]
    return all(np.isfinite(_numbers(leaf)).all() for leaf in leaves)


def mapping(data: object, name: str) -> Mapping[str, Any]:
    """Returns what `from_dict` of a class was given, if it is a dictionary.

    Args:
      data: what it was given.
      name: of the class, "Report".

    Raises:
      TypeError: if it is none.
    """
    if isinstance(data, Mapping):
        return data
    raise TypeError(
        f"{name}.from_dict({data!r}): not a dictionary. Give what to_dict() of a "
        f"{name.lower()} returned."
    )


def fields(record: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a record in what its `from_dict` was given.

    Raises:
      ValueError: if one is missing.
    """
    name = record.__name__
    names = [each.name for each in dataclasses.fields(record) if each.compare]
    if missing := [each for each in names if each not in data]:
        raise ValueError(
            f"{name}.from_dict: the key {missing[0]!r} is missing. Give what to_dict() "
            f"of a {name.lower()} returned."
        )
    return {each: data[each] for each in names}


@contextlib.contextmanager
def reading_rows(name: str) -> Iterator[None]:
    """Raises a ValueError if a row is not one of the record of a name."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name}.from_dict: a row is not one of a {name.lower()}: {error}. It may "
            f"be of another version: make the {name.lower()} again."
        ) from error


def parsed(text: object, name: str) -> dict[str, Any]:
    """Returns what is in the JSON text that `from_json` of a class was given.

    Args:
      text: what it was given.
      name: of the class, "Report".

    Raises:
      TypeError: if it is not text.
      ValueError: if it is not JSON, or no object.
    """
    remedy = f"Give the text that to_json() of a {name.lower()} returned."
    if not isinstance(text, str | bytes | bytearray):
        raise TypeError(f"{name}.from_json: found {type(text).__name__}. {remedy}")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}.from_json: not JSON: {error}. {remedy}") from error
    if isinstance(data, dict):
        return data
    raise ValueError(
        f"{name}.from_json: {str(text)[:40]!r} is JSON, but no object. {remedy}"
    )
