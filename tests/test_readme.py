"""The README does what it says: its code runs and prints what the comments say."""

import functools
import json
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

import jmp_amp as amp

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Megabytes are written without decimals, ratios with two.
RESULTS = ROOT / "examples" / "benchmarks" / "results"
DIGITS = (ROOT / "examples" / "train_digits.py").read_text()
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


FIRST = blocks("python")[0].section
SECTIONS = list(dict.fromkeys(block.section for block in blocks("python")))
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def announced(code: str) -> list[str]:
    """What the comments after calls of `print` say."""
    return re.findall(r"^\s*print\(.*\)\s+# (.*)$", code, re.MULTILINE)


def code_of(section: str) -> str:
    """The Python code of a section, its blocks one after another."""
    return "\n".join(
        block.code for block in blocks("python") if block.section == section
    )


def run(code: str, names: dict[str, Any], file: str) -> list[str]:
    """Runs code and returns what it prints; later code has its `names`."""
    printed: list[str] = []
    names["print"] = lambda *values: printed.append(" ".join(map(str, values)))
    # A reader has the defaults of JAX, under which Adam of optax runs.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(code, file, "exec"), names)
    return printed


@functools.cache
def first_screen() -> tuple[dict[str, Any], str]:
    """The names that the first screen defines, and what it prints."""
    names: dict[str, Any] = {"__name__": "readme"}
    printed = run(code_of(FIRST), names, "train.py")
    return names, "\n".join(printed)


@pytest.mark.parametrize("section", SECTIONS[1:])
def test_code_runs_and_prints_what_its_comments_say(section):
    code = code_of(section)
    names = dict(first_screen()[0])
    assert run(code, names, f"README.md, {section}") == announced(code)


def test_the_first_screen_shows_what_explain_and_diagnose_print():
    shown = next(block.code for block in blocks("text") if block.section == FIRST)
    printed = first_screen()[1]
    # CPUs round differently, and other versions of JAX trace other equations.
    told, numbers = NUMBER.sub("0", printed), NUMBER.findall(printed)
    at = 0
    for part in shown.split("...\n"):
        start = told.find(NUMBER.sub("0", part), at)
        assert start >= 0, f"\n{part}\nis not printed. What is:\n{printed}"
        at = start + 1
        before = len(NUMBER.findall(told[:start]))
        near = NUMBER.findall(part)
        found = [float(each) for each in numbers[before : before + len(near)]]
        assert found == pytest.approx([float(each) for each in near], rel=0.1)


def test_train_step_of_the_first_screen_trains():
    names, _ = first_screen()
    batch = {
        "image": jax.random.normal(jax.random.key(1), (32, 64)),
        "label": jax.random.randint(jax.random.key(2), (32,), 0, 10),
    }
    params, opt_state, losses = names["params"], names["opt_state"], []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
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


def test_anchors_lead_to_headings():
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    there = {
        re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
    }
    assert {*re.findall(r"\]\(#([^)]+)\)", README)} <= there


def test_is_read_in_one_sitting():
    lines = README.splitlines()
    assert len(lines) <= 230
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    wide = [line for line in prose.splitlines() if len(line) > 88]
    # The rows of a table are one line each.
    assert [line for line in wide if not line.startswith("|")] == []


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


def ratio(model: dict, figure: str, to: str) -> float:
    programs = model["bfloat16"]
    return programs["autocast"][figure] / programs[to][figure]


FIRST_SCREEN = README.partition("\n## ")[0]


def test_figures_of_the_first_screen_are_those_of_the_compiled_models():
    text = " ".join(FIRST_SCREEN.split())
    in_bf16 = [model["bfloat16"] for model in MODELS.values()]
    here, total, by_hand = 0, 0, 0
    for programs in in_bf16:
        in_half, all_products = products(programs["autocast"])
        here, total = here + in_half, total + all_products
        by_hand += products(programs["twin"])[0]
    # By hand is the better half of the comparison: nothing that is half there is f32.
    assert all(programs["compared"]["missing"] == 0 for programs in in_bf16)
    assert f"In {len(MODELS)} models compiled for an H100, {here} of {total}" in text
    assert f"in half precision, by hand {by_hand}." in text
    memory = median(lambda m: ratio(m, "temp", "f32"))
    kept = median(lambda m: ratio(m, "saved", "twin"))
    error = median(lambda m: m["bfloat16"]["compared"]["error"])
    assert (
        f"Medians: {memory} the memory of f32; against by hand, {kept} the activations "
        f"kept for the backward pass and {error} the gradient error." in text
    )
    worst = max(ratio(model, "temp", "twin") for model in MODELS.values())
    assert f"No model takes more than {worst:.2f}x the memory by hand." in text


ROWS = re.findall(
    r"^\| ([^|]+) on (?:a|an) ([^|]+) \| (.+) \| (.+) \|$", FIRST_SCREEN, re.M
)
ON_H200 = {"GPT-2": "gpt bfloat16 batch 8", "ResNet-50": "resnet bfloat16 batch 128"}


def test_the_speed_of_a_gpu_is_what_was_measured():
    measured = json.loads((RESULTS / "nvidia_h200.json").read_text())
    rows = {model: row for model, *row in ROWS if model in ON_H200}
    assert rows.keys() == ON_H200.keys()
    for model, (device, to_f32, by_hand) in rows.items():
        found = measured[ON_H200[model]]
        assert device == found["conditions"]["device"]["kind"]
        ratios = found["programs"]["autocast"]["ratios"]
        tf32, twin = ratios["f32_tf32"], ratios["twin"]
        assert to_f32 == (
            f"{tf32['speed']:.1f}x as fast as in TF32, "
            f"{tf32['program_bytes']:.2f}x the memory"
        )
        assert by_hand == (
            f"{twin['speed']:.2f}x as fast, {twin['program_bytes']:.2f}x the memory"
        )
    (fp8,) = re.findall(r"3 x 4096 trains ([\d.]+)x as fast", README)
    speed = measured["fp8"]["parts"]["mlp 4096"]["fp8_no_triton"]["speed"]
    assert fp8 == f"{speed:.2f}"


def test_the_speed_of_a_cpu_is_what_was_measured():
    measured = json.loads((RESULTS / "train_on_cpu.json").read_text())
    assert "amx_bf16" in measured["conditions"]["cpu"]["bf16_instructions"]
    ((device, to_f32, by_hand),) = [
        row for model, *row in ROWS if model == "transformer"
    ]
    assert device.startswith("Xeon with AMX")
    programs = measured["models"]["transformer"]["programs"]
    ours, twin = (
        programs[each]["training"]["speed"]["cpu"]["min"]
        for each in ("for a CPU", "by hand")
    )
    kept = {
        name: model["programs"]["for a CPU"]["kept_bytes"]
        / model["programs"]["f32"]["kept_bytes"]
        for name, model in measured["models"].items()
    }
    told = f"{ours:.1f}x as fast, {kept['transformer']:.2f}x kept for the backward pass"
    assert (to_f32, by_hand) == (told, f"{ours / twin:.1f}x as fast")
    text = " ".join(section_of("Which precision should I use?").split())
    # The first table that a user sees is that of the main job.
    mlp = re.findall(r"^ +(?:f32|bf16, target).* ([\d.]+) +[\d.]+x$", DIGITS, re.M)
    in_f32, on_cpu = map(float, mlp[-2:])
    bounds = f"{min(kept.values()):.1f}x to {max(kept.values()):.1f}x the bytes of f32"
    assert f"{bounds} in the models measured, and {on_cpu / in_f32:.1f}x" in text


def exported() -> set[str]:
    """The names that `jmp_amp/__init__.py` has for others to use."""
    return set(amp.__all__)


def test_every_public_name_is_in_the_docstring_of_the_package():
    assert amp.__doc__ is not None
    assert "`help(jmp_amp)`" in README
    grouped = amp.__doc__.partition("Example:")[0]
    listed = re.findall(r"`(\w+)", grouped)
    assert exported() - {*listed} == set()
    assert {"autocast", "with_loss_scale", "jmp"} <= exported()


def test_every_notebook_is_linked_where_a_reader_wants_it():
    linked = re.findall(r"\]\((notebooks/\w+\.ipynb)\)", README)
    there = (ROOT / "notebooks").glob("*.ipynb")
    assert {*linked} == {str(path.relative_to(ROOT)) for path in there}


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
