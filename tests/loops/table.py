"""All loops by name, with what they are: those of every file of this package."""

from __future__ import annotations

import importlib
import pkgutil
from typing import NamedTuple

from tests import loops
from tests.idioms.row import Idiom


class Loop(NamedTuple):
    """A loop of the table.

    Attributes:
      idiom: its row.
      is_recursion: whether it is a recursion; else it is a network.
    """

    idiom: Idiom
    is_recursion: bool


LOOPS: dict[str, Loop] = {}
for _file in pkgutil.iter_modules(loops.__path__):
    _kind = _file.name.partition("_")[0]
    if _kind not in ("recursions", "networks"):
        continue
    _module = importlib.import_module(f"{loops.__name__}.{_file.name}")
    _found = [i for i in vars(_module).values() if isinstance(i, Idiom)]
    assert not LOOPS.keys() & {i.name for i in _found}, f"{_file.name}: a name is taken"
    LOOPS |= {i.name: Loop(i, _kind == "recursions") for i in _found}
