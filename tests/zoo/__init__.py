"""Models to compare autocast with mixed precision written by hand.

`CASES` holds those of every file of this package, by (name, size). "small" ones are run
on the CPU, "large" ones are only traced, and compiled for an H100. The small ones are
smooth (no ReLU, no maximum): there a rounding does not flip a branch, and gradient
errors that differ by some percent can be told apart.

`SHAPES` holds the same models in other large shapes, by (name, shape).

`python examples/benchmarks/compare_precision.py` prints how they compare.
"""

import importlib
import pkgutil

from tests.zoo.case import Case
from tests.zoo.shapes import SHAPES as SHAPES

CASES: dict[tuple[str, str], Case] = {}
for _file in sorted(pkgutil.iter_modules(__path__)):
    if _file.name.startswith("test_") or _file.name in ("on_h100", "as_traced"):
        continue  # they ask for the cases
    _found = getattr(importlib.import_module(f"{__name__}.{_file.name}"), "CASES", {})
    assert not CASES.keys() & _found.keys(), f"{_file.name}: a name is already taken"
    CASES |= _found

MODELS = tuple(dict.fromkeys(name for name, _ in CASES))
