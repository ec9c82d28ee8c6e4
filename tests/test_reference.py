"""The notebook of the public names: it is up to date, and has every docstring whole."""

import inspect
import json
import re

import jmp_amp as amp
from tests import reference


def sources() -> list[str]:
    cells = json.loads(reference.NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells]


def test_the_notebook_is_what_the_docstrings_say():
    stale = f"A docstring is newer. Run: {reference.COMMAND}"
    # Not compared by `==`: the difference of two pages helps nobody.
    is_current = reference.NOTEBOOK.read_text() == reference.notebook()
    assert is_current, stale


def test_every_public_name_has_one_cell_with_its_signature():
    heads = [re.match(r"### `amp\.(\w+)`", each) for each in sources()]
    shown = [head.group(1) for head in heads if head]
    assert sorted(shown) == sorted(amp.__all__)
    for cell in sources():
        if re.match(r"### `amp\.(?!jmp`|plots`)", cell):
            assert "```python\n" in cell


def test_a_class_is_told_with_what_it_inherits():
    told = {}
    for cell in sources():
        if head := re.match(r"### `amp\.(\w+)`", cell):
            told[head.group(1)] = {*re.findall(r"^\**\.(\w+)", cell, re.MULTILINE)}
    for name in ("Report", "Diagnosis", "Tuning"):
        assert {"summary", "table", "to_json", "from_dict", "from_json"} <= told[name]


def test_no_word_of_a_docstring_is_lost():
    page = "\n".join(sources())
    told = {*re.findall(r"\w+", page)}
    for name in amp.__all__:
        docstring = inspect.getdoc(getattr(amp, name)) or ""
        words = {*re.findall(r"\w+", docstring.replace("<BLANKLINE>", ""))}
        assert words <= told, name
    assert page.count("```") % 2 == 0


def test_sections_become_lists_and_code():
    docstring = """Returns a thing.

    Args:
      x: float32[n], the first
        and its second line.
      **more: others.

    Returns:
      Nothing.

    Example:
      >>> 1 + 1
      2
    """
    assert reference.markdown(inspect.cleandoc(docstring)) == (
        "Returns a thing.\n\n"
        "**Args**\n\n"
        "* `x`: float32[n], the first\n  and its second line.\n"
        "* `**more`: others.\n\n"
        "**Returns** Nothing.\n\n"
        "**Example**\n\n```pycon\n>>> 1 + 1\n2\n```"
    )
