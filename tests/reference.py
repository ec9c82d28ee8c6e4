"""The notebook of the public names, made from their docstrings.

    python -m tests.reference

writes `notebooks/07_reference.ipynb`. Its groups are those of the docstring of the
package, in its order. Signatures are read from the source, so that no version of
Python or JAX writes them otherwise. `test_reference.py` compares the notebook.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jmp_amp as amp

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "07_reference.ipynb"
COMMAND = "python -m tests.reference"
INTRODUCTION = f"""\
# The public names

Each name with its signature and its docstring; `help(amp.autocast)` prints the same. \
`{COMMAND}` makes this page from the source."""
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example", "Examples", "Source")
Definition = ast.FunctionDef | ast.ClassDef


class Group(NamedTuple):
    """Names that the docstring of the package puts together."""

    title: str
    text: str
    names: list[str]


def groups() -> list[Group]:
    """Returns the groups of the docstring of the package, each name in its first."""
    assert amp.__doc__ is not None
    listed = inspect.cleandoc(amp.__doc__).partition("\nExample:")[0]
    found, seen = [], set()
    for item in re.findall(r"^\* (.*(?:\n  .*)*)", listed, re.MULTILINE):
        title, _, text = " ".join(item.split()).partition(": ")
        names = [each for each in re.findall(r"`(\w+)`", text) if each in amp.__all__]
        new = list(dict.fromkeys(each for each in names if each not in seen))
        seen |= {*new}
        found.append(Group(title, text[0].upper() + text[1:], new))
    return found


def definition(value: Any) -> Definition | None:
    """Returns where a function or a class is defined, None if no source is ours."""
    value = inspect.unwrap(value)
    if not getattr(value, "__module__", "").startswith(amp.__name__):
        return None
    tree = ast.parse(inspect.getsource(importlib.import_module(value.__module__)))
    return _inside(tree, value.__qualname__.split("."))


def _inside(tree: ast.AST, names: list[str]) -> Definition | None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition) and node.name == names[0]:
            if len(names) == 1 and not _is_overload(node):
                return node
            if len(names) > 1:
                return _inside(node, names[1:])
        elif isinstance(node, ast.If) and (found := _inside(node, names)):
            return found
    return None


def _is_overload(node: Definition) -> bool:
    return any("overload" in ast.unparse(each) for each in node.decorator_list)


def signature(node: Definition, name: str) -> str:
    """Returns a call as the source declares it, an argument a line if it is long."""
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        if not made:
            return _call(name, [_field(each) for each in _fields(node)], "")
        (node,) = made
    assert isinstance(node, ast.FunctionDef)
    returns = ast.unparse(node.returns).strip("'\"") if node.returns else "None"
    told = "" if returns == "None" else f" -> {returns}"
    return _call(name, _arguments(node.args), told)


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """The fields of a dataclass or a NamedTuple that its caller gives."""
    found = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return [each for each in found if not ast.unparse(each.target).startswith("_")]


def _field(node: ast.AnnAssign) -> str:
    text = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    # A call makes a field of it, with or without a default.
    if node.value is None or isinstance(node.value, ast.Call):
        return text
    return f"{text} = {ast.unparse(node.value)}"


def _arguments(node: ast.arguments) -> list[str]:
    names = [each.arg for each in [*node.posonlyargs, *node.args][:1]]
    if names and names[0] in ("self", "cls"):
        node.args = node.args[1:]
    text = ast.unparse(node)
    # Commas between arguments, none inside of brackets.
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    spaced = [re.sub(r"^([^=]*:[^=]*)=", r"\1 = ", part.strip()) for part in parts]
    return [part for part in spaced if part]


def _call(name: str, arguments: list[str], returns: str) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= 88:
        return line
    inside = "".join(f"    {each},\n" for each in arguments)
    return f"{name}(\n{inside}){returns}"


def markdown(docstring: str) -> str:
    """Returns a docstring of Google's style as Markdown."""
    heads = "|".join(SECTIONS)
    pieces = re.split(rf"^({heads}):(?: *$| (?=\S))", docstring, flags=re.MULTILINE)
    text, *sections = pieces
    parts = [_text(text)]
    for head, body in zip(sections[::2], sections[1::2], strict=True):
        parts.append(_section(head, textwrap.dedent(body.strip("\n"))))
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())


def _text(text: str) -> str:
    """Returns prose, what is drawn in it (tables, code) in fences."""
    parts = []
    for block in re.split(r"\n{2,}", text.strip("\n")):
        is_drawn = re.search(r"^ {2,}\S", block, re.M) and not _is_list(block)
        if is_drawn or re.match(r"=+ =+|>>> ", block):
            block = f"```text\n{textwrap.dedent(block)}\n```"
        # What introduces code in reStructuredText.
        parts.append(re.sub(r"::$", ":", block))
    return "\n\n".join(parts)


def _is_list(block: str) -> bool:
    return block.lstrip().startswith(("* ", "- ", "1. ")) or "\n* " in block


def _section(head: str, body: str) -> str:
    if head.startswith("Example"):
        code = body.replace("<BLANKLINE>", "")
        return f"**{head}**\n\n```pycon\n{code}\n```"
    if head in ("Returns", "Source"):
        return f"**{head}** {_text(body)}"
    items = re.split(r"^(?=\S)", body, flags=re.MULTILINE)
    return f"**{head}**\n\n" + "\n".join(map(_item, filter(None, items)))


def _item(item: str) -> str:
    """Returns `name: what it is` as an item of a list, its paragraphs indented."""
    name, colon, text = item.partition(":")
    if not colon or "\n" in name:
        return f"* {' '.join(item.split())}"
    first, _, more = text.strip("\n").partition("\n")
    lines = textwrap.dedent(more).strip("\n")
    told = f"{first.strip()}\n{lines}".strip()
    return f"* `{name}`: {textwrap.indent(told, '  ').strip()}"


def cells() -> Iterator[tuple[str, str]]:
    """Yields the cells of the page: what they are called, and their text."""
    yield "reference", INTRODUCTION
    for group in groups():
        key = group.title.lower().replace(" ", "-")
        yield f"reference-{key}", f"## {group.title}\n\n{group.text}"
        for name in group.names:
            yield f"reference-{key}-{name}", entry(name)


def entry(name: str) -> str:
    """Returns a public name, with its members, as Markdown."""
    value = getattr(amp, name)
    if not isinstance(value, types.ModuleType):
        return _entry(value, name, "###")
    parts = [f"### `amp.{name}`", markdown(inspect.cleandoc(value.__doc__ or ""))]
    parts += [
        _entry(getattr(value, each), f"{name}.{each}", "####")
        for each in getattr(value, "__all__", ())
    ]
    return "\n\n".join(filter(None, parts))


def _entry(value: Any, name: str, heading: str) -> str:
    node, parts = definition(value), [f"{heading} `amp.{name}`"]
    if node is not None:
        parts.append(f"```python\n{signature(node, name.rpartition('.')[2])}\n```")
        parts.append(markdown(ast.get_docstring(node) or ""))
        if isinstance(value, type):
            parts += map(_member, _members(value))
    return "\n\n".join(filter(None, parts))


def _members(value: type) -> Iterable[ast.FunctionDef]:
    """Returns what a class or its bases in the package define and tell of."""
    found: dict[str, ast.FunctionDef] = {}
    for node in filter(None, map(definition, value.__mro__)):
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and ast.get_docstring(each):
                if not each.name.startswith("_"):
                    found.setdefault(each.name, each)
    return found.values()


def _member(node: ast.FunctionDef) -> str:
    text = markdown(ast.get_docstring(node) or "")
    if any("property" in ast.unparse(each) for each in node.decorator_list):
        return f"**.{node.name}**: {text}"
    return f"```python\n.{signature(node, node.name)}\n```\n\n{text}"


def notebook() -> str:
    """Returns the page as the JSON of a notebook."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = [
        {
            "cell_type": "markdown",
            "id": key[:64],
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        for key, text in cells()
    ]
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    page = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(page, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook())
