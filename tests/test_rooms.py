"""The house: wings import one way, and so do the rooms of each wing."""

import ast
import inspect
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import jmp_amp as amp

# A room imports from the wings before its own, and from the rows of its own wing that
# are above its own row.
WINGS = {
    "policies": (
        ("dtypes", "patterns", "flags", "arguments"),
        ("fp8", "casting"),
        ("policy",),
        ("policy_map",),
    ),
    "plan": (
        ("stack_room",),
        ("jaxprs", "operations", "targets", "quantising"),
        ("regions", "dimensions", "dataflow"),
        ("dead_code", "gelus"),
        ("constants", "constructs", "meshes", "rules", "rewriting"),
        ("values",),
        ("modes", "sources", "facts"),
        ("destinations",),
        ("decisions",),
        (
            *("f32_results", "picks", "quotients"),
            *("fp8_choice", "fp8_barriers", "cpu_products"),
        ),
        ("fp8_products", "lookups"),
        ("rewrites",),
        ("flows",),
        ("pins",),
        ("trade_offs",),
        ("deciding",),
        ("decided",),
        ("solvers",),
        ("origins",),
        ("consumers", "plan"),
        ("alike", "islands", "walk"),
        ("planner",),
    ),
    "transform": (
        (
            *("scopes", "closures", "refusals", "successors", "marking", "functions"),
            "custom_jvp_rules",
        ),
        ("nnx_modules",),
        ("linen_modules",),
        ("markers", "calls", "derivatives", "widened"),
        ("planned",),
        ("interpreter",),
    ),
    "training": (
        ("overwritten", "rounding"),
        ("structures", "parameters"),
        ("finite", "digits"),
        ("skipping", "trainable"),
        ("loss_scale",),
        ("states",),
        ("presets", "gradients", "optimizers", "checkpoints", "weights"),
    ),
    "reports": (
        ("costs", "rows", "tables", "plain_data", "ways", "bit_words"),
        ("opaque", "askers", "overruling", "causes"),
        ("reading", "report_tables", "why"),
        ("report",),
    ),
    "numerics": (
        ("differentiated", "gradient_costs", "blocks", "watch"),
        ("losses", "marks", "options", "statistics", "sites", "groups", "tuning"),
        ("liveness",),
        ("frames", "distances", "flagged", "trials", "moves", "asked"),
        ("measuring", "searching", "pairs"),
        ("own_dtypes",),
        ("executables", "tuner", "pair_constructs"),
        ("programs",),
        ("lockstep",),
        ("suggestions", "wording", "exponent_maps", "eight_bits"),
        ("advice", "diagnosis_tables", "decoding", "turns", "inputs"),
        ("diagnosis",),
        ("checking",),
        ("diagnosing",),
    ),
    "recipes": (("levels", "recipe_tables"), ("overrides",), ("recipes",)),
    "": (
        ("plots", "jmp"),
        ("checkup", "timings"),
        ("doctor",),
        ("__main__", "__init__"),
    ),
}
# The place of each room: the wing's, then the row's.
PLACE = {
    f"{wing}.{room}" if wing else room: (number, row)
    for number, (wing, rows) in enumerate(WINGS.items())
    for row, rooms in enumerate(rows)
    for room in rooms
}
PACKAGE = Path(amp.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
)
EXPORTS = {
    name: value
    for name, value in ((name, getattr(amp, name)) for name in amp.__all__)
    if not isinstance(value, types.ModuleType)
}

each_module = pytest.mark.parametrize("module", MODULES)


def nodes(module: str) -> Iterator[ast.AST]:
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    return ast.walk(ast.parse(path.read_text()))


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


def test_every_room_has_a_place():
    entrances = {f"{wing}.__init__" for wing in WINGS if wing}
    assert sorted({*PLACE, *entrances}) == MODULES


@pytest.mark.parametrize("wing", [wing for wing in WINGS if wing])
def test_entrance_of_a_wing_tells_its_idea_and_defines_nothing(wing):
    (idea,) = ast.parse((PACKAGE / wing / "__init__.py").read_text()).body
    assert isinstance(idea, ast.Expr) and len(ast.literal_eval(idea.value)) > 100


@each_module
def test_room_imports_from_wings_before_its_own_and_from_rows_above(module):
    if module.endswith(".__init__"):
        return
    for name in imported(module):
        package, _, rest = name.partition(".")
        if package != "jmp_amp" or not rest or rest in WINGS:
            continue
        found = [room for room in PLACE if is_in(rest, room)]
        assert found, f"{module}.py imports {name}, which is no room"
        assert PLACE[found[0]] < PLACE[module], f"{module}.py imports {name}"


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
    assert extends == (module == "plan.jaxprs")


def test_no_module_shares_a_name_with_an_export():
    parts = {part for module in MODULES for part in module.split(".")}
    assert not (parts - {"jmp_amp"}) & set(EXPORTS)


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
