"""The house: wings import one way, and so do the rooms of each wing."""

import ast
import functools
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jmp_amp as amp


class Folder(NamedTuple):
    """A folder of a wing, and its rooms in rows."""

    name: str
    rows: tuple[tuple[str, ...], ...]


# A room imports from the wings before its own, and from the rows of its own wing that
# are above its own row. In the rows of some wings are folders, and a folder has rows
# too: `folder[first row | second row]`. The last wing is the package itself.
HOUSE = """
policies:
  - dtypes patterns arguments deferred
  - fp8
  - policy
  - policy_map
plan:
  - program[jaxprs cpu_target scope_text
      | source_code regions dimensions constructs meshes | binding]
  - tables[operations | rules]
  - dataflow[solver constants made | dead_code gelus values
      | joins sources facts storage | ends paths | recursions | standing]
  - rewrites[linear | rewriting
      | pick_rewrite cpu f32_gradients
      | lookups f32_results | fp8 shifted_scores
      | rewrite_table]
  - choose[modes | records uses | flows pins half_rules
      | trade_offs solver_loops derivatives | choosing | decision_cache
      | choices demands | held]
  - plan
  - saved[needs cut | values | blocks] walk
  - planner
transform:
  - scopes closures refusals successors marking functions custom_jvp_rules
    unused_names layer_dtypes
  - nnx_modules outputs
  - linen_modules
  - markers calls derivatives promote_half_params blocks
  - planned
  - interpreter
  - autocasting
training:
  - structures rounding
  - parameters loss_scale collectives
  - half_weights
  - loss_scale_state low_precision_state
  - presets gradients skip_steps checkpoints
reports:
  - costs rows tables plain_data ways requests
  - opaque askers overruling causes folding sentences
  - reading report_tables why
  - saved_bytes report
  - explaining
numerics:
  - calls[differentiated inputs | losses | asked executables]
    locate[marks sites liveness written | frames]
  - measure[blocks threaded | statistics watch | distances measuring
      | pair_constructs programs | lockstep]
  - diagnose[suggestions wording | diagnosis_tables decoding turns
      | diagnosis advice | checking | diagnosing]
    tune[groups tuning | flagged moves trials | searching | tuner]
:
  - jmp recipes
  - plots
  - doctor
  - __main__ __init__
"""


def names_or_folders(row: str) -> tuple[str | Folder, ...]:
    return tuple(
        Folder(name, tuple(tuple(each.split()) for each in rows.split("|")))
        if rows
        else name
        for name, rows in re.findall(r"(\w+)(?:\[(.*?)\])?", row, re.DOTALL)
    )


WINGS = {
    wing: tuple(map(names_or_folders, rows.split("- ")[1:]))
    for wing, rows in re.findall(r"^(\w*):\n((?: .*\n)+)", HOUSE, re.MULTILINE)
}


class Place(NamedTuple):
    """Where a room is.

    Attributes:
      wing: the number of its wing.
      floor: the row of the wing that it is in, or its folder.
      folder: the folder; empty if it is in none.
      row: the row of the folder.
    """

    wing: int
    floor: int
    folder: str = ""
    row: int = 0

    def is_above(self, other: "Place") -> bool:
        """Whether a room at the other place may import one that is here."""
        if self.folder and self[:3] == other[:3]:
            return self.row < other.row
        return self[:2] < other[:2]


def rooms() -> Iterator[tuple[str, Place]]:
    """Yields the dotted name of each room, and its place."""
    for number, (wing, rows) in enumerate(WINGS.items()):
        for floor, row in enumerate(rows):
            for each in row:
                if isinstance(each, Folder):
                    for i, names in enumerate(each.rows):
                        place = Place(number, floor, each.name, i)
                        for name in names:
                            yield f"{wing}.{each.name}.{name}", place
                else:
                    yield f"{wing}.{each}" if wing else each, Place(number, floor)


PLACE = dict(rooms())
FOLDERS = [
    f"{wing}.{each.name}"
    for wing, rows in WINGS.items()
    for row in rows
    for each in row
    if isinstance(each, Folder)
]
WINGS_OF_FOLDERS = {folder.partition(".")[0] for folder in FOLDERS}
MOST_FLOORS = 9
# Of a file of a wing of folders, and of a function in it.
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 450, 50
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


def text_of(module: str) -> str:
    return (PACKAGE / f"{module.replace('.', '/')}.py").read_text()


@functools.cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text_of(module))))


@functools.cache
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
    entrances = {f"{each}.__init__" for each in (*WINGS, *FOLDERS) if each}
    assert sorted({*PLACE, *entrances}) == MODULES


def test_entrance_of_a_wing_tells_its_idea_and_defines_nothing():
    for wing in filter(None, (*WINGS, *FOLDERS)):
        (idea,) = ast.parse(text_of(f"{wing}.__init__")).body
        assert isinstance(idea, ast.Expr), wing
        text = ast.literal_eval(idea.value)
        assert len(text) > 100, wing
        # Of a folder in at most three sentences.
        assert wing in WINGS or len(re.findall(r"[.?!](?=\s|$)", text)) <= 3, wing


def test_a_wing_of_folders_has_few_floors():
    for wing in WINGS_OF_FOLDERS:
        assert len(WINGS[wing]) <= MOST_FLOORS


def test_files_of_a_wing_of_folders_are_short():
    for module in MODULES:
        if module.partition(".")[0] in WINGS_OF_FOLDERS:
            assert len(text_of(module).splitlines()) <= MOST_LINES, module


def test_functions_of_a_wing_of_folders_are_short():
    for module in MODULES:
        if module.partition(".")[0] not in WINGS_OF_FOLDERS:
            continue
        for node in nodes(module):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if node.name in EXPORTS:  # its docstring is as long as users need
                    told = ast.get_docstring(node, clean=False) or ""
                    lines -= len(told.splitlines())
                assert lines <= MOST_LINES_OF_A_FUNCTION, f"{module}: {node.name}"


def test_room_imports_from_wings_before_its_own_and_from_rows_above():
    for module in PLACE:
        for name in imported(module):
            package, _, rest = name.partition(".")
            if package != "jmp_amp" or not rest or rest in (*WINGS, *FOLDERS):
                continue
            found = [room for room in PLACE if is_in(rest, room)]
            assert found, f"{module}.py imports {name}, which is no room"
            is_above = PLACE[found[0]].is_above(PLACE[module])
            assert is_above, f"{module}.py imports {name}"


def test_modules_use_public_jax_only():
    for module in MODULES:
        for name in used(module):
            parts = name.split(".")
            assert not is_in(name, "jax.interpreters"), f"{module}.py uses {name}"
            assert not (
                parts[0] in ("jax", "jaxlib", "flax", "optax")
                and any(part.startswith("_") for part in parts)
            ), f"{module}.py uses {name}"


def test_jaxprs_and_binding_alone_use_jax_extend():
    found = [m for m in MODULES if any(is_in(n, "jax.extend") for n in used(m))]
    assert set(found) == {"plan.program.jaxprs", "plan.program.binding"}


def is_prose(node: ast.AST) -> bool:
    """Whether an expression is a reason in words."""
    name = getattr(node, "attr", getattr(node, "id", None))
    return name in ("reason", "reasons", "REASONS", "in_bf16")


def decided_by_prose(node: ast.AST) -> bool:
    """Whether code decides by the text of a reason.

    It compares one, looks one up or looks for one in a text. It may ask for `None`.
    """
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        asks = any(isinstance(n, ast.Constant) and n.value is None for n in parts)
        return not asks and any(is_prose(n) for part in parts for n in ast.walk(part))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        looks = node.func.attr in ("get", "replace", "startswith", "endswith", "find")
        return looks and any(map(is_prose, (*node.args, node.func.value)))
    return isinstance(node, ast.Subscript) and is_prose(node.slice)


def test_nothing_is_decided_by_the_words_of_a_reason():
    for module in MODULES:
        found = [ast.unparse(node) for node in nodes(module) if decided_by_prose(node)]
        assert not found, f"{module}.py compares prose: {found}"


def test_no_module_shares_a_name_with_an_export():
    # A folder lies in a wing, where no name of the package is looked up.
    parts = {part for module in MODULES for part in module.split(".")}
    parts -= {folder.partition(".")[2] for folder in FOLDERS}
    assert not (parts - {"jmp_amp"}) & set(EXPORTS)


def public(name: str, value: object) -> Iterator[tuple[str, object]]:
    """An export and, for a class of ours, its own public methods."""
    yield name, value
    if inspect.isclass(value) and value.__module__.startswith("jmp_amp"):
        for attribute, member in vars(value).items():
            if inspect.isfunction(member) and not attribute.startswith("_"):
                yield f"{name}.{attribute}", member


def test_exports_have_a_docstring_with_an_example():
    for name, value in (both for item in EXPORTS.items() for both in public(*item)):
        first, *rest = (inspect.getdoc(value) or "").splitlines()
        assert first.endswith((".", "?")), f"{name}: the first line is no sentence"
        shows = any(line.strip().startswith(">>>") for line in rest)
        assert "Example:" in rest and shows, name
