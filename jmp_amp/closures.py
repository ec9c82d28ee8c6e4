"""Functions that reach objects without being given them, with others in their place."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any


class Closures:
    """Exchanges the objects that functions reach.

    Objects are found in closures and defaults, in `functools.partial`, in bound methods
    and among the globals that a function names, and in lists, tuples and dictionaries
    there; so are functions of the same file that lead to more of them. What leads to
    none is returned as it is.

    Args:
      is_object: says what is to be exchanged.
      swap: returns what takes the place of an object.
    """

    def __init__(self, is_object: Callable[[Any], bool], swap: Callable[[Any], Any]):
        self._is_object, self._swap = is_object, swap
        self._exchanged: dict[int, Any] = {}

    def exchange(self, value: Any) -> Any:
        """Returns a function, or what it closes over, with its objects exchanged."""
        if id(value) in self._exchanged:
            return self._exchanged[id(value)]
        if not self._leads_to_objects(value, set()):
            return value
        return self._changed(value)

    def _changed(self, value: Any) -> Any:
        if self._is_object(value):
            self._exchanged[id(value)] = self._swap(value)
            return self._exchanged[id(value)]
        if isinstance(value, functools.partial):
            named = {key: self.exchange(x) for key, x in value.keywords.items()}
            fn, *args = map(self.exchange, (value.func, *value.args))
            return functools.partial(fn, *args, **named)
        if isinstance(value, types.MethodType):
            if self._is_object(value.__self__):
                # What took its place may have a method of its own.
                return getattr(self.exchange(value.__self__), value.__func__.__name__)
            return types.MethodType(*map(self.exchange, _parts_of(value)))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, dict):
            return {key: self.exchange(each) for key, each in value.items()}
        return type(value)(map(self.exchange, value))

    def _function(self, fn: types.FunctionType) -> Callable[..., Any]:
        contents = {n: x for n, x in _contents(fn).items() if self._changes(x)}
        named = {name: x for name, x in self._named(fn).items() if self._changes(x)}
        cells = {number: types.CellType() for number in contents}
        closure = tuple(cells.get(n, c) for n, c in enumerate(fn.__closure__ or ()))
        # Nothing but the exchanged globals is copied: the others may be assigned to.
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
        return new

    def _changes(self, value: Any) -> bool:
        return self._leads_to_objects(value, set())

    def _leads_to_objects(self, value: Any, seen: set[int]) -> bool:
        if self._is_object(value):
            return True
        if id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._leads_to_objects(x, seen) for x in self._parts(value))

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, types.FunctionType):
            return [*_parts_of(value), *self._named(value).values()]
        return _parts_of(value)

    def _named(self, fn: types.FunctionType) -> dict[str, Any]:
        """The objects, and the functions of the same file, that `fn` names."""
        values = {name: fn.__globals__.get(name) for name in _names(fn.__code__)}
        return {
            name: value
            for name, value in values.items()
            if self._is_object(value)
            or (
                isinstance(value, types.FunctionType)
                and value.__globals__ is fn.__globals__
            )
        }


def _parts_of(value: Any) -> Iterable[Any]:
    """What a function holds; nothing of anything else but plain containers."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        defaults = (value.__defaults__, value.__kwdefaults__)
        return [*_contents(value).values(), *defaults]
    if type(value) in (list, tuple):
        return value
    return value.values() if type(value) is dict else ()


def _contents(fn: types.FunctionType) -> dict[int, Any]:
    """What `fn` closes over, by the number of its cell, as far as it is there yet."""
    found = {}
    for number, cell in enumerate(fn.__closure__ or ()):
        with contextlib.suppress(ValueError):
            found[number] = cell.cell_contents
    return found


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))
