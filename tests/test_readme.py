"""The README does what it says: its code runs and prints what the comments say."""

import json
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

import jmp_amp as amp

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Megabytes are written without decimals, ratios with two.
RESULTS = ROOT / "examples" / "benchmarks" / "results"
MODELS = json.loads((RESULTS / "h100_compiled.json").read_text())["models"]


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


# The first screen has a test for itself.
FIRST, *SECTIONS = dict.fromkeys(block.section for block in blocks("python"))


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
    (first,) = [block for block in blocks("python") if block.section == FIRST]
    names: dict = {"__name__": "readme"}
    with jax.numpy_dtype_promotion("standard"):
        exec(first.code, names)
        batch = {
            "image": jax.random.normal(jax.random.key(1), (32, 64)),
            "label": jax.random.randint(jax.random.key(2), (32,), 0, 10),
        }
        params, opt_state, losses = names["params"], names["opt_state"], []
        for _ in range(100):
            params, opt_state, loss = names["train_step"](params, opt_state, **batch)
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


def test_is_read_in_one_sitting():
    assert len(README.splitlines()) <= 350


def section_of(heading: str) -> str:
    _, found, rest = README.partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def products(of_a_program: dict) -> tuple[int, int]:
    """How many products are in half precision, and how many there are."""
    counts = [of_a_program[kind].split("/") for kind in ("gemms", "convs")]
    pairs = [(int(half), int(total)) for half, total in filter(lambda x: x[1:], counts)]
    in_half, total = map(sum, zip(*pairs, strict=True))
    return in_half, total


def median(figure) -> str:
    return f"{statistics.median(map(figure, MODELS.values())):.2f}x"


def test_four_numbers_of_the_first_screen_are_those_that_were_measured():
    first_screen = README.partition("\n## ")[0]
    found = dict(re.findall(r"^\| (\d[\w. ]*) \| (.+) \|$", first_screen, re.MULTILINE))
    in_bf16 = [model["bfloat16"] for model in MODELS.values()]
    here, total, by_hand = 0, 0, 0
    for programs in in_bf16:
        in_half, all_products = products(programs["autocast"])
        here, total = here + in_half, total + all_products
        by_hand += products(programs["twin"])[0]
    expected = {
        f"{here} of {total}": f"{by_hand} in mixed precision by hand",
        median(lambda m: ratio(m, "temp", "f32")): "temporary memory",
        median(lambda m: ratio(m, "saved", "twin")): "kept for the backward pass",
        median(lambda m: m["bfloat16"]["compared"]["error"]): "gradient error",
    }
    assert list(found) == list(expected)
    for number, text in expected.items():
        assert text in found[number]
    assert f"three medians over {len(MODELS)} models" in first_screen
    # By hand is the better half of the comparison: nothing that is half there is f32.
    assert all(programs["compared"]["missing"] == 0 for programs in in_bf16)


def ratio(model: dict, figure: str, to: str) -> float:
    programs = model["bfloat16"]
    return programs["autocast"][figure] / programs[to][figure]


def test_what_it_saves_is_what_was_measured():
    rows = re.findall(
        r"^\| (\w+) \| (\d+), (\d+), (\d+) \| ([\d.]+)x \|$",
        section_of("What it saves"),
        re.MULTILINE,
    )
    assert len(rows) == 5
    for name, *megabytes, saved in rows:
        programs = MODELS[name]["bfloat16"]
        measured = [programs[each]["temp"] for each in ("f32", "twin", "autocast")]
        assert megabytes == [f"{each / 1e6:.0f}" for each in measured], name
        assert saved == f"{ratio(MODELS[name], 'saved', 'twin'):.2f}", name
    # The last two are there because none is worse.
    for figure, row in (("saved", rows[-2]), ("temp", rows[-1])):
        worst = max(MODELS, key=lambda name: ratio(MODELS[name], figure, "twin"))
        assert worst == row[0]


CPUS = {
    "on a Xeon with AMX": ("train_on_cpu", ["amx_bf16", "avx512_bf16"]),
    "on an EPYC with AVX512-BF16": ("train_on_cpu_epyc", ["avx512_bf16"]),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_the_speed_on_a_cpu_is_what_was_measured(cpu):
    text = " ".join(section_of("On a CPU").split())
    file, instructions = CPUS[cpu]
    measured = json.loads((RESULTS / f"{file}.json").read_text())
    assert measured["conditions"]["cpu"]["bf16_instructions"] == instructions
    models = measured["models"]
    named = {"MLP": "mlp-256", "transformer": "transformer", "LSTM": "lstm"}
    speeds = []
    for title, name in (named | {"CNN": "cnn"}).items():
        programs = models[name]["programs"]
        ours, gpu = (
            programs[each]["training"]["speed"]["cpu"]["min"]
            for each in ("for a CPU", "autocast")
        )
        speeds.append(f"{title} {ours:.1f}x ({gpu:.1f}x)")
    assert f"{cpu} {', '.join(speeds)}" in text
    kept = [
        programs["for a CPU"]["kept_bytes"] / programs["f32"]["kept_bytes"]
        for programs in (model["programs"] for model in models.values())
    ]
    assert f"{min(kept):.1f}x to {max(kept):.1f}x the bytes of f32" in text


def exported() -> set[str]:
    """The names that `jmp_amp/__init__.py` has for others to use."""
    return set(amp.__all__)


def test_index_has_every_public_name_and_no_other():
    rows = re.findall(r"^\| (`.+`) \| ", section_of("Public names"), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(listed) == len(set(listed))
    assert set(listed) == exported()
    assert {"autocast", "with_loss_scale", "jmp"} <= exported()


def test_every_notebook_and_its_place_in_the_order_is_named():
    text = section_of("Versions, notebooks, examples")
    linked = re.findall(r"\]\((notebooks/\w+\.ipynb)\)", text)
    there = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert linked == [str(path.relative_to(ROOT)) for path in there]


def test_versions_are_those_that_the_package_declares():
    text = section_of("Versions, notebooks, examples")
    declared = (ROOT / "pyproject.toml").read_text()
    ((oldest, above),) = re.findall(r'"jax>=([\d.]+),<0\.(\d+)"', declared)
    assert f"jax {oldest} to 0.{int(above) - 1}," in text
    for package in ("flax", "optax"):
        (version,) = re.findall(rf'"{package}>=([\d.]+)"', declared)
        assert f"{package} {version} or newer" in text
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', declared)
    assert text.strip().startswith(f"Python {python} to ")
