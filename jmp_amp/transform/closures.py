"""Functions that reach objects without being given them, with others in their place."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

T = TypeVar("T")
IsObject = Callable[[object], bool]

# Longer containers are taken for data, and not searched.
_LONG = 1000


def find_objects(
    value: object, is_object: IsObject, seen: set[int] | None = None
) -> Iterator[object]:
    """Yields the objects that `Closures` exchanges in a value, each once.

    Args:
      value: a function, or a value that one reaches.
      is_object: as in `Closures`.
      seen: the identities of values that are not searched; more are added.
    """
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if is_object(value):
        yield value
        return
    for part in _parts(value, is_object):
        yield from find_objects(part, is_object, seen)


class Closures:
    """Exchanges the objects that functions reach.

    Objects are found in closures and defaults, in `functools.partial`, in bound methods
    and among the globals that a function names; in lists, tuples and dictionaries
    there, if they are short; and in the functions of the same file that are reached
    so. A value that leads to no object is returned unchanged.

    Args:
      is_object: says which values are exchanged.
      swap: returns the replacement of an object.
      method: returns the replacement of a bound method, given the replacement of its
        object and the method's function.
    """

    def __init__(
        self,
        is_object: IsObject,
        swap: Callable[[object], object],
        method: Callable[[object, Callable[..., object]], object],
    ):
        self._is_object, self._swap, self._method = is_object, swap, method
        self._exchanged: dict[int, object] = {}
        self._leading: set[int] = set()
        self._dead: set[int] = set()
        # Containers, their copies, and the contents of the copies at first.
        self._copied: list[tuple[list | dict, list | dict, list | dict]] = []
        self._originals: dict[int, object] = {}

    def exchange(self, value: T) -> T:
        """Returns a function, or a value that it reaches, with objects exchanged."""
        if id(value) in self._exchanged:
            return cast(T, self._exchanged[id(value)])
        if not self._leads_to_objects(value):
            return value
        new = self._changed(value)
        self._exchanged[id(value)] = new
        self._originals[id(new)] = value
        return cast(T, new)

    def write_back(self) -> None:
        """Does to globals, lists and dictionaries what was done to their copies."""

        def original(value: object) -> object:
            return self._originals.get(id(value), value)

        for value, copy, before in self._copied:
            if isinstance(value, list):
                if [*map(id, copy)] != [*map(id, before)]:
                    value[:] = map(original, copy)
                continue
            assert isinstance(copy, dict) and isinstance(before, dict)
            for key in before.keys() - copy.keys():
                del value[key]
            for key, each in copy.items():
                if key not in before or before[key] is not each:
                    value[key] = original(each)

    def _changed(self, value: object) -> object:
        if self._is_object(value):
            return self._swap(value)
        if isinstance(value, functools.partial):
            named = {key: self.exchange(x) for key, x in value.keywords.items()}
            fn, *args = map(self.exchange, (value.func, *value.args))
            return type(value)(fn, *args, **named)
        if isinstance(value, types.MethodType):
            if self._is_object(value.__self__):
                return self._method(self.exchange(value.__self__), value.__func__)
            fn, owner = self.exchange(value.__func__), self.exchange(value.__self__)
            return types.MethodType(fn, owner)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, tuple):
            return tuple(map(self.exchange, value))
        if isinstance(value, list):
            new = [self.exchange(each) for each in value]
        else:
            assert isinstance(value, dict)
            new = {key: self.exchange(each) for key, each in value.items()}
        self._copied.append((value, new, new.copy()))
        return new

    def _function(self, fn: types.FunctionType) -> Callable[..., object]:
        leads = self._leads_to_objects
        contents = {n: x for n, x in _contents(fn).items() if leads(x)}
        named = {n: x for n, x in _named(fn, self._is_object).items() if leads(x)}
        cells = {number: types.CellType() for number in contents}
        closure = tuple(cells.get(n, c) for n, c in enumerate(fn.__closure__ or ()))
        scope = {**fn.__globals__} if named else fn.__globals__
        defaults = self.exchange(fn.__defaults__)
        new = types.FunctionType(
            fn.__code__, scope, fn.__name__, defaults, closure or None
        )
        new.__kwdefaults__ = self.exchange(fn.__kwdefaults__)
        # It may lead to itself.
        self._exchanged[id(fn)] = functools.update_wrapper(new, fn)
        for number, cell in cells.items():
            cell.cell_contents = self.exchange(contents[number])
        for name, each in named.items():
            scope[name] = self.exchange(each)
        if named:
            self._copied.append((fn.__globals__, scope, scope.copy()))
        return new

    def _leads_to_objects(self, value: object) -> bool:
        if id(value) in self._leading:
            return True
        # If no object is found, no value that was seen leads to one.
        seen = set(self._dead)
        if next(find_objects(value, self._is_object, seen), None) is None:
            self._dead = seen
            return False
        self._leading.add(id(value))
        return True


def _parts(value: object, is_object: IsObject) -> Iterable[object]:
    """The values that a function, a partial or a short container holds."""
    if isinstance(value, functools.partial):
        return [*value.keywords.values(), value.func, *value.args]
    if isinstance(value, types.MethodType):
        # The method of an object is found again in the class of its replacement.
        owner = value.__self__
        return [owner] if is_object(owner) else [value.__func__, owner]
    if isinstance(value, types.FunctionType):
        defaults = (value.__defaults__, value.__kwdefaults__)
        named = _named(value, is_object).values()
        return [*defaults, *_contents(value).values(), *named]
    if not _is_short_container(value):
        return ()
    return list(value.values()) if isinstance(value, dict) else cast(Sequence, value)


def _named(fn: types.FunctionType, is_object: IsObject) -> dict[str, object]:
    """The globals that `fn` names, of functions only those of the same file."""
    found = {}
    for name in _names(fn.__code__):
        value = fn.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            holds = value.__globals__ is fn.__globals__
        else:
            holds = (
                is_object(value)
                or isinstance(value, functools.partial)
                or _is_short_container(value)
            )
        if holds:
            found[name] = value
    return found


def _is_short_container(value: object) -> bool:
    # Subclasses may do anything when they are copied.
    if type(value) not in (list, tuple, dict):
        return False
    return len(cast(Sequence, value)) <= _LONG


def _contents(fn: types.FunctionType) -> dict[int, object]:
    """The values that `fn` closes over, by the number of their cell, if it is set."""
    found = {}
    for number, cell in enumerate(fn.__closure__ or ()):
        with contextlib.suppress(ValueError):
            found[number] = cell.cell_contents
    return found


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))
