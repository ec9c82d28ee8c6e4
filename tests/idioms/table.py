"""All rows of the table, by name: those of every file of this package."""

import importlib
import pkgutil

from tests import idioms
from tests.idioms.row import Idiom

IDIOMS: dict[str, Idiom] = {}
for _file in pkgutil.iter_modules(idioms.__path__):
    if _file.name.startswith("test_"):
        continue  # they ask for the rows
    if _file.name in ("row", "table", "measure", "nothing_in_half", "__main__"):
        continue
    _module = importlib.import_module(f"{idioms.__name__}.{_file.name}")
    _found = {i.name: i for i in vars(_module).values() if isinstance(i, Idiom)}
    assert not IDIOMS.keys() & _found.keys(), f"{_file.name}: a name is already taken"
    IDIOMS |= _found
