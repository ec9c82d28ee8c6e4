"""Functions that reach objects without being given them, with others in their place."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

# Longer containers are taken for data, and not searched.
_LONG = 1000


class Closures:
    """Exchanges the objects that functions reach.

    Objects are found in closures and defaults, in `functools.partial`, in bound methods
    and among the globals that a function names; in lists, tuples and dictionaries
    there, if they are short; and so are functions of the same file that lead to more of
    them. What leads to none is returned as it is.

    Args:
      is_object: says what is to be exchanged.
      swap: returns what takes the place of an object.
      method: returns the method of an exchanged object that takes the place of a bound
        method, given the object and the method's function.
    """

    def __init__(
        self,
        is_object: Callable[[Any], bool],
        swap: Callable[[Any], Any],
        method: Callable[[Any, Any], Any],
    ):
        self._is_object, self._swap, self._method = is_object, swap, method
        self._exchanged: dict[int, Any] = {}
        self._leading: dict[int, bool] = {}
        self._copied: list[tuple[Any, Any, Any]] = []
        self._originals: dict[int, Any] = {}

    def exchange(self, value: Any) -> Any:
        """Returns a function, or what it closes over, with its objects exchanged."""
        if id(value) in self._exchanged:
            return self._exchanged[id(value)]
        if not self._leads_to_objects(value):
            return value
        new = self._changed(value)
        self._exchanged[id(value)] = new
        self._originals[id(new)] = value
        return new

    def write_back(self) -> None:
        """Does to globals, lists and dictionaries what was done to their copies."""

        def original(value: Any) -> Any:
            return self._originals.get(id(value), value)

        for value, copy, before in self._copied:
            if isinstance(value, list):
                if [*map(id, copy)] != [*map(id, before)]:
                    value[:] = map(original, copy)
                continue
            for key in before.keys() - copy.keys():
                del value[key]
            for key, each in copy.items():
                if key not in before or before[key] is not each:
                    value[key] = original(each)

    def _changed(self, value: Any) -> Any:
        if self._is_object(value):
            return self._swap(value)
        if isinstance(value, functools.partial):
            named = {key: self.exchange(x) for key, x in value.keywords.items()}
            fn, *args = map(self.exchange, (value.func, *value.args))
            return type(value)(fn, *args, **named)
        if isinstance(value, types.MethodType):
            if self._is_object(value.__self__):
                return self._method(self.exchange(value.__self__), value.__func__)
            return types.MethodType(*map(self.exchange, _parts_of(value)))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, tuple):
            return tuple(map(self.exchange, value))
        if isinstance(value, list):
            new: Any = [self.exchange(each) for each in value]
        else:
            new = {key: self.exchange(each) for key, each in value.items()}
        self._copied.append((value, new, new.copy()))
        return new

    def _function(self, fn: types.FunctionType) -> Callable[..., Any]:
        leads = self._leads_to_objects
        contents = {n: x for n, x in _contents(fn).items() if leads(x)}
        named = {name: x for name, x in self._named(fn).items() if leads(x)}
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

    def _leads_to_objects(self, value: Any) -> bool:
        seen: set[int] = set()
        if not self._searched(value, seen):
            # All that it leads to leads to none; of what leads to some, a part may not
            # have been searched to the end.
            self._leading.update(dict.fromkeys(seen, False))
            return False
        return True

    def _searched(self, value: Any, seen: set[int]) -> bool:
        if self._is_object(value):
            return True
        known = self._leading.get(id(value))
        if known is not None or id(value) in seen:
            return bool(known)
        seen.add(id(value))
        if any(self._searched(each, seen) for each in self._parts(value)):
            self._leading[id(value)] = True
            return True
        return False

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, types.FunctionType):
            return [*_parts_of(value), *self._named(value).values()]
        return _parts_of(value)

    def _named(self, fn: types.FunctionType) -> dict[str, Any]:
        """The globals that `fn` names, of functions only those of the same file."""
        found = {}
        for name in _names(fn.__code__):
            value = fn.__globals__.get(name)
            if isinstance(value, types.FunctionType):
                holds = value.__globals__ is fn.__globals__
            else:
                holds = self._is_object(value) or _is_holder(value)
            if holds:
                found[name] = value
        return found


def _is_holder(value: Any) -> bool:
    if isinstance(value, functools.partial):
        return True
    return type(value) in (list, tuple, dict) and len(value) <= _LONG


def _parts_of(value: Any) -> Iterable[Any]:
    """What a function holds; nothing of anything else but plain containers."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        defaults = (value.__defaults__, value.__kwdefaults__)
        return [*_contents(value).values(), *defaults]
    if not _is_holder(value):
        return ()
    return [*value.values()] if type(value) is dict else value


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
