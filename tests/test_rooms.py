"""The package's order: a file imports only from the rows above its own."""

import ast
import inspect
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import jmp_amp as amp

ROOMS = (
    ("dtypes", "finite"),
    ("policy", "patterns", "closures", "jaxprs", "bounds", "rounding", "levels"),
    ("policy_map", "casting", "rules", "loss_scale"),
    ("scopes", "leaves", "states"),
    ("nnx_modules", "decisions", "derivatives", "islands", "parameters", "exports"),
    ("presets",),
    ("originals", "overrides"),
    ("linen_modules", "flows", "plan"),
    ("regions", "demands", "calls"),
    ("planner",),
    ("interpreter", "gradients", "optimizers", "weights"),
    ("costs", "facts"),
    ("reading", "tables"),
    ("report",),
    ("plots", "recipes", "jmp"),
    ("checkup",),
    ("doctor",),
    ("__main__", "__init__"),
)
ROW = {name: row for row, names in enumerate(ROOMS) for name in names}
PACKAGE = Path(amp.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.rglob("*.py"))
EXPORTS = {
    name: value
    for name, value in vars(amp).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
}

each_module = pytest.mark.parametrize("module", MODULES)


def nodes(module: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text()))


def imported(module: str) -> set[str]:
    """The dotted names that a module imports: `from a import b` is both a and a.b."""
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}.py: write `from jmp_amp import ...`"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def used(module: str) -> set[str]:
    """The dotted names that a module imports or reaches through attributes."""
    reached = {ast.unparse(n) for n in nodes(module) if isinstance(n, ast.Attribute)}
    return reached | imported(module)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_every_module_has_a_row():
    assert sorted(ROW) == MODULES


@each_module
def test_module_imports_only_from_rows_above(module):
    for name in imported(module):
        package, _, rest = name.partition(".")
        inner = rest.partition(".")[0]
        if package == "jmp_amp" and inner:
            assert inner in ROW, f"{module}.py imports {name}, which is no module"
            assert ROW[inner] < ROW[module], f"{module}.py imports {name}"


@each_module
def test_module_uses_public_jax_only(module):
    for name in used(module):
        parts = name.split(".")
        assert not is_in(name, "jax.interpreters"), f"{module}.py uses {name}"
        assert not (
            parts[0] in ("jax", "jaxlib", "flax", "optax")
            and any(part.startswith("_") for part in parts)
        ), f"{module}.py uses {name}"


@each_module
def test_jaxprs_alone_uses_jax_extend(module):
    extends = any(is_in(name, "jax.extend") for name in used(module))
    assert extends == (module == "jaxprs")


def test_no_module_shares_a_name_with_an_export():
    assert not set(MODULES) & set(EXPORTS)


def public(name: str, value: object) -> Iterator[tuple[str, object]]:
    """An export and, for a class of ours, its own public methods."""
    yield name, value
    if inspect.isclass(value) and value.__module__.startswith("jmp_amp"):
        for attribute, member in vars(value).items():
            if inspect.isfunction(member) and not attribute.startswith("_"):
                yield f"{name}.{attribute}", member


@pytest.mark.parametrize(
    "name, value",
    [
        pytest.param(*both, id=both[0])
        for item in EXPORTS.items()
        for both in public(*item)
    ],
)
def test_export_has_a_docstring_with_an_example(name, value):
    first, *rest = (inspect.getdoc(value) or "").splitlines()
    assert first.endswith((".", "?")), f"{name}: the first line is no sentence"
    assert "Example:" in rest and any(line.strip().startswith(">>>") for line in rest)
