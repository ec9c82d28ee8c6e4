"""The README does what it says: its code runs and prints what the comments say."""

import re
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


class Block(NamedTuple):
    section: str
    code: str


def blocks(language: str) -> list[Block]:
    found, section = [], ""
    headings_and_fences = r"^#+ ([^\n]*)$|^```(\w*)\n(.*?)^```$"
    for match in re.finditer(headings_and_fences, README, re.MULTILINE | re.DOTALL):
        heading, fenced, code = match.groups()
        section = heading or section
        if heading is None and fenced == language:
            found.append(Block(section, code))
    return found


SECTIONS = list(dict.fromkeys(block.section for block in blocks("python")))


def announced(code: str) -> list[str]:
    """What the comments after calls of `print` say."""
    return re.findall(r"^\s*print\(.*\)\s+# (.*)$", code, re.MULTILINE)


@pytest.mark.parametrize("section", SECTIONS)
def test_code_runs_and_prints_what_its_comments_say(section):
    names: dict = {"__name__": "readme"}
    printed: list[str] = []
    names["print"] = lambda *values: printed.append(" ".join(map(str, values)))
    # A reader has the defaults of JAX, under which Adam of optax runs.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks("python"):
            if block.section == section:
                exec(compile(block.code, f"README.md, {section}", "exec"), names)
    expected = [
        text
        for block in blocks("python")
        if block.section == section
        for text in announced(block.code)
    ]
    assert printed == expected


def test_train_step_of_the_first_screen_trains():
    (first,) = [block for block in blocks("python") if block.section == "jmp_amp"]
    names: dict = {"__name__": "readme"}
    with jax.numpy_dtype_promotion("standard"):
        exec(first.code, names)
        batch = {
            "image": jax.random.normal(jax.random.key(1), (32, 64)),
            "label": jax.random.randint(jax.random.key(2), (32,), 0, 10),
        }
        params, opt_state, losses = names["params"], names["opt_state"], []
        for _ in range(100):
            params, opt_state, loss = names["train_step"](params, opt_state, batch)
            losses.append(float(loss))
    assert losses[-1] < losses[0] / 2


def test_commands_are_one_line_each_and_name_what_exists():
    main_job, tests = [block.code.strip() for block in blocks("sh")]
    for command in (main_job, tests):
        assert command.startswith("python3 -m venv .venv && ")
        assert "\n" not in command
    assert (ROOT / main_job.rpartition(" ")[2]).is_file()
    extras = re.findall(r"\.\[([\w,-]+)\]", README)
    declared = (ROOT / "pyproject.toml").read_text()
    for extra in ",".join(extras).split(","):
        assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), extra


def test_continuous_integration_runs_the_command_of_the_readme():
    *_, tests = [block.code.strip() for block in blocks("sh")]
    pattern = re.compile(r"^python3 .*pytest.*$", re.MULTILINE)
    assert pattern.findall(README) == [tests]
    # `.ci/run` takes the line from here.
    assert "'^python3 .*pytest'" in (ROOT / ".ci" / "run").read_text()


def test_links_lead_to_files():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
