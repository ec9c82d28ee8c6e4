"""The notebooks run as they are, and what they show is what the library does.

    python tests/test_notebooks.py 05_how_it_works

executes a notebook from top to bottom and writes its outputs into the file.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets.config import Config

from tests.scripts import with_devices_of_its_own

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
ROUNDINGS = 2
BF16 = "p=f32,c=bf16,o=f32"

# What one worker has executed, the next test on it does not execute again.
pytestmark = pytest.mark.xdist_group("notebooks")
each_notebook = pytest.mark.parametrize("name", NOTEBOOKS)
# These train models. By default only their committed outputs are looked at.
TRAIN = ("01_tour", "02_recipes")
# These compile many programs: the same.
COMPILES = ("03_coming_from", "06_numerics")
SLOW = (*TRAIN, *COMPILES)
# This one is text, see `test_reference.py`.
NOT_EXECUTED = ("07_reference",)
each_executed = pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=pytest.mark.slow if each in SLOW else ())
        for each in NOTEBOOKS
        if each not in NOT_EXECUTED
    ],
)
# Other versions of JAX print jaxprs otherwise, and trace other equations.
MADE_WITH = {"05_how_it_works": "0.10.", "06_numerics": "0.10."}
RESULTS = ROOT / "examples" / "benchmarks" / "results"

# What a notebook has computed, read back by a cell of ours at its end.
READ_BACK = {
    "01_tour": """
{
    "losses": {name: each.tolist() for name, each in losses.items()},
    "scales": [float(scale) for scale in scales["f16"]],
    "accuracies": {name: float(each) for name, each in accuracies.items()},
    "tests": len(test),
    "reports": {name: each.to_dict() for name, each in reports.items()},
    "default": report.to_dict(),
}
""",
    "02_recipes": """
{
    "losses": losses,
    "scales": scales,
    "accuracies": accuracies,
    "tests": len(test),
    "sizes": sizes,
    "norms": sum(
        leaf.size
        for name, each in variables["params"].items()
        for leaf in jax.tree.leaves(each)
        if name.startswith("BatchNorm")
    ),
    "weights": sum(leaf.size for leaf in jax.tree.leaves(variables["params"])),
    "products": {
        system: [each.dtype for each in report.equations if each.matmuls]
        for system, report in plans.items()
    },
    "in_half": {system: report.total.in_half for system, report in plans.items()},
    "exported": [np.asarray(each).tolist() for each in (kernel, half_kernel)],
    "agree": agree,
}
""",
    "05_how_it_works": """
{
    "scopes": [
        [str(eqn.source_info.name_stack), eqn.primitive.name]
        for eqn in traced.jaxpr.eqns
    ],
    "dtypes": [[each.module, each.operation, each.dtype] for each in report.equations],
    "products": step_products,
    "options": options,
    "constants": constants,
    "rewrites": rewrites,
    "kept": [kept.total.saved_without, kept.total.saved],
    "carries": {name: str(each) for name, each in carries.items()},
    "keepers": {
        title: [dtype for name, dtype, _ in plan(fn, *args) if name in names]
        for title, (fn, args, names) in keepers.items()
    },
    "by_name": by_name,
    "mapped": {each.module: each.dtype for each in mapped.equations if each.matmuls},
    "weights": {name: float(each) for name, (each, _) in half_weights.items()},
}
""",
}


class ThisPython(AsyncKernelManager):
    """A kernel of the Python that runs the tests, whatever kernels are installed."""

    @property
    def kernel_spec(self):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f"]
        # Of what is written to stderr only what Python writes, which is its warnings:
        # a plugin of JAX that finds no driver writes there too.
        quiet = "--IPKernelApp.capture_fd_output=False"
        return KernelSpec(
            argv=[*command, "{connection_file}", quiet], language="python"
        )


def committed(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@functools.cache
def executed(name, as_read=False):
    """The notebook as a fresh kernel executes it, and what was read back from it.

    as_read: with all that the kernel of a reader has. In a test it is compiled without
    optimising: its programs run a few times. Slow ones are compiled as the suite is;
    another reads what a compiler makes of a program.
    """
    notebook = committed(name)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    expression = READ_BACK.get(name, "None").strip()
    read_back = f"import json\nprint(json.dumps({expression}))"
    notebook.cells.append(nbformat.v4.new_code_cell(read_back))
    with tempfile.TemporaryDirectory() as folder:
        # Sockets in the folder: no ports that another process could have taken.
        sockets = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        folders = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
        # The kernel of a reader has no settings of the suite.
        dropped = ("XLA_FLAGS", "MPLBACKEND", "PYTHONWARNINGS")
        env = {key: value for key, value in os.environ.items() if key not in dropped}
        if not as_read:
            flags = "--xla_backend_optimization_level=0"
            ours = with_devices_of_its_own()["XLA_FLAGS"]
            env["XLA_FLAGS"] = ours if name in SLOW else flags
        client = NotebookClient(
            notebook,
            kernel_manager_class=ThisPython,
            config=Config({"ThisPython": sockets}),
            # Where Jupyter runs it; that of the measurements reads files from there.
            resources={"metadata": {"path": str(ROOT / "notebooks")}},
            timeout=600,
            record_timing=False,
        )
        client.execute(env=env | dict.fromkeys(folders, folder))
    # A kernel hands on in several parts what it prints while the machine is busy.
    return notebook, json.loads("".join(printed_by(notebook.cells.pop())))


def printed_by(cell, name="stdout"):
    return [output.text for output in cell.outputs if output.get("name") == name]


def texts(cell):
    """What the outputs of a cell say; not its figures, in whose base64 is anything."""
    yield from printed_by(cell)
    for output in cell.outputs:
        for mime, data in output.get("data", {}).items():
            if mime.startswith("text/"):
                yield data


def kinds(cell):
    """The kinds of the outputs; how many pieces a printed text comes in is chance."""
    found = []
    for output in cell.outputs:
        data = sorted(output.get("data", {}))
        found.append((output.output_type, output.get("name", ""), *data))
    return sorted(set(found))


def absolute_paths(notebook):
    pattern = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|usr|opt|var|Users)/\S*")
    shown = [text for cell in code_cells(notebook) for text in texts(cell)]
    return [path for text in shown for path in pattern.findall(text)]


@each_notebook
def test_committed_outputs_are_of_one_run_from_top_to_bottom(name):
    cells = code_cells(committed(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert cell.outputs
        assert "error" not in {output.output_type for output in cell.outputs}


@each_notebook
def test_committed_outputs_say_nothing_of_the_machine_or_the_time(name):
    notebook = committed(name)
    assert absolute_paths(notebook) == []
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    assert [dict(cell.metadata) for cell in notebook.cells if cell.metadata] == []


@each_notebook
def test_every_code_cell_comes_after_an_explanation(name):
    kinds_of_cells = [cell.cell_type for cell in committed(name).cells]
    for before, cell in zip(["", *kinds_of_cells], kinds_of_cells, strict=False):
        assert cell == "markdown" or before == "markdown"


@each_notebook
def test_notebook_is_small_enough_to_be_read_in_a_browser(name):
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 400_000


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_code_cells_are_of_the_style_of_the_library(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "notebooks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@each_executed
def test_notebook_runs_in_a_fresh_kernel_and_shows_what_it_showed(name):
    notebook, _ = executed(name)
    pairs = zip(code_cells(notebook), code_cells(committed(name)), strict=True)
    for now, before in pairs:
        assert printed_by(now, "stderr") == []
        assert kinds(now) == kinds(before)
    assert absolute_paths(notebook) == []
    if name not in TRAIN and jax.__version__.startswith(MADE_WITH.get(name, "")):
        for now, before in zip(
            code_cells(notebook), code_cells(committed(name)), strict=True
        ):
            (text, numbers), (expected, near) = shown_by(now), shown_by(before)
            assert text == expected
            assert numbers == pytest.approx(near, rel=0.1)


NUMBER = re.compile(r"\d+\.\d+(?:e[+-]\d+)?%?")


def shown_by(cell):
    """What a cell prints, without its decimal numbers, and these.

    CPUs round differently: where a Xeon has 0.0011 and 2.18, an EPYC has 0.0012 and
    2.19. Shares below one percent count a handful of values near a bound: 0.027% and
    0.037%.
    """
    text = "".join(printed_by(cell))
    numbers = [
        0.0 if each.endswith("%") and float(each[:-1]) < 1 else float(each.rstrip("%"))
        for each in NUMBER.findall(text)
    ]
    return NUMBER.sub("x", text), numbers


def matmuls_by_dtype(report):
    """The modules of the matrix products, those in half and those in f32."""
    found = {"bf16": [], "f32": []}
    for equation in report["equations"]:
        if equation["matmuls"]:
            found[equation["dtype"]].append(equation["module"])
    return found["bf16"], found["f32"]


@pytest.mark.slow
def test_tour_has_every_matmul_in_half_but_those_that_its_maps_name():
    _, values = executed("01_tour")
    # Without a name: of queries and keys, and of the softmax and the values.
    attention = ["query", "key", "value", "", "", "out"]
    blocks = [
        f"Transformer/blocks/{number}/{path}".rstrip("/")
        for number in range(2)
        for path in (*(f"attn/{name}" for name in attention), "up", "down")
    ]
    everything = ["Transformer/embed", *blocks, "Transformer/head"]
    second = [path for path in blocks if "/blocks/1/" in path]
    expected = {
        "half": [],
        "head": ["Transformer/head"],
        "head, block": [*second, "Transformer/head"],
    }
    reports = values["reports"]
    assert list(reports) == list(expected)
    for name, in_f32 in expected.items():
        in_half = [path for path in everything if path not in in_f32]
        assert matmuls_by_dtype(reports[name]) == (in_half, in_f32)
    assert matmuls_by_dtype(values["default"]) == (everything, [])


@pytest.mark.slow
def test_tour_trains_in_half_as_in_f32():
    _, values = executed("01_tour")
    losses = {name: np.array(each) for name, each in values["losses"].items()}
    f32, scales = losses["f32"], np.array(values["scales"])
    overflows = {"bf16": np.array([], int), "f16": np.flatnonzero(np.diff(scales) < 0)}
    for name, skipped in overflows.items():
        eps = float(jnp.finfo({"bf16": jnp.bfloat16, "f16": jnp.float16}[name]).eps)
        mixed = losses[name]
        assert mixed.shape == f32.shape
        assert not np.array_equal(mixed, f32)
        # The first step sees the same parameters, so only roundings are between them.
        np.testing.assert_allclose(mixed[0], f32[0], rtol=ROUNDINGS * eps)
        # A skipped step leaves all that follow one step behind: that moves the mean of
        # a curve by at most its fall, divided by its steps.
        behind = len(skipped) * (f32[0] - f32[-1]) / len(f32)
        difference = abs(mixed.mean() - f32.mean())
        assert difference <= behind + ROUNDINGS * eps * f32.mean()
        assert mixed[-20:].mean() < mixed[0] / 10
    # Two shares of right answers are apart by chance by about this much.
    share = values["accuracies"]["f32"]
    chance = np.sqrt(2 * share * (1 - share) / values["tests"])
    for accuracy in values["accuracies"].values():
        assert abs(accuracy - share) <= 3 * chance
        assert accuracy > 0.9


@pytest.mark.slow
def test_tour_scale_doubles_after_finite_steps_and_halves_at_each_skipped_one():
    notebook, values = executed("01_tour")
    scales = np.array(values["scales"])
    changes = np.diff(np.log2(np.concatenate([[2.0**16], scales])))
    assert set(changes) == {-1.0, 0.0, 1.0}
    # Twenty finite steps are between a change and the next doubling.
    changed = np.flatnonzero(changes)
    for earlier, later in zip([-1, *changed], changed, strict=False):
        if changes[later] > 0:
            assert later - earlier == 20
        else:
            assert later - earlier <= 20
    printed = "".join(printed_by(code_cells(notebook)[1]))
    halved = int(np.sum(changes < 0))
    assert f"f16: {halved} of {len(scales)} steps skipped" in printed


@pytest.mark.slow
def test_tour_prints_the_operations_of_a_module_and_the_mistyped_path():
    notebook, values = executed("01_tour")
    *_, third, fourth, _ = code_cells(notebook)
    printed = "".join(printed_by(third))
    attention = [
        (str(index), equation["operation"], equation["dtype"])
        for index, equation in enumerate(values["default"]["equations"])
        if equation["module"] == "Transformer/blocks/0/attn"
    ]
    assert len(attention) > 2
    rows = {tuple(line.split()[:1]): line for line in printed.splitlines()}
    for index, operation, dtype in attention:
        assert {operation, dtype} <= set(rows[(index,)].split())
    assert "Warning: PolicyMap: 'heads' matched no module." in "".join(
        printed_by(fourth)
    )


@pytest.mark.slow
def test_tour_shows_in_its_outputs_the_plans_that_it_makes():
    notebook, _ = executed("01_tour")
    pattern = re.compile(r"^(Transformer\S*)\s+(b?f\d+)\s+(b?f\d+)\s+(b?f\d+)$", re.M)
    now, before = (
        pattern.findall("".join(printed_by(code_cells(each)[3])))
        for each in (notebook, committed("01_tour"))
    )
    assert now == before != []


LEVELS = ("O0", "O1", "O2", "O3")


@pytest.mark.slow
def test_recipes_of_scaled_levels_train_as_float32_does():
    _, values = executed("02_recipes")
    losses = {name: np.array(values["losses"][name]) for name in LEVELS}
    f32 = losses["O0"]
    for name in ("O1", "O2"):
        # The first step sees the same parameters, but for O2's rounding.
        eps = float(jnp.finfo(jnp.float16).eps)
        np.testing.assert_allclose(losses[name][0], f32[0], rtol=4 * eps)
        skips = np.count_nonzero(np.diff(np.log2(values["scales"][name])) < 0)
        behind = skips * (f32[0] - f32[-1]) / len(f32)
        # Steps differ by which digits they round: of the whole fall, by a per cent.
        assert abs(losses[name].mean() - f32.mean()) <= behind + 0.01 * f32[0]
        assert losses[name][-20:].mean() < f32[0] / 50
    share = values["accuracies"]["O0"]
    assert share > 0.95
    chance = np.sqrt(2 * share * (1 - share) / values["tests"])
    for name in LEVELS:
        assert abs(values["accuracies"][name] - share) <= 3 * chance


@pytest.mark.slow
def test_recipes_store_what_their_levels_say():
    _, values = executed("02_recipes")
    weights, norms, sizes = values["weights"], values["norms"], values["sizes"]
    # Adam's two moments are f32; the rest are counters, which all levels have.
    moments, counters = 8 * weights, sizes["O0"] - 12 * weights
    assert 0 < counters < 100
    half = weights - norms
    assert sizes["O1"] == sizes["O0"]
    # A weight of 2 bytes and the 2 bytes that it lacks.
    assert sizes["O2"] == moments + counters + 4 * norms + (2 + 2) * half
    assert sizes["O3"] == moments + counters + 2 * weights


@pytest.mark.slow
def test_recipes_scales_move_and_static_ones_do_not():
    _, values = executed("02_recipes")
    for name, first in (("O1", 2.0**16), ("O2", 2.0**16)):
        steps = np.diff(np.log2([first, *values["scales"][name]]))
        assert set(steps) == {-1.0, 0.0, 1.0}
    for name in ("O0", "O3"):
        assert set(values["scales"][name]) == {1.0}


@pytest.mark.slow
def test_recipes_of_other_systems_run_the_products_that_they_name_in_half():
    _, values = executed("02_recipes")
    expected = dict.fromkeys(values["products"], ["f16"] * 4)
    expected["Paddle, lists"] = ["bf16"] * 3 + ["f32"]
    assert values["products"] == expected
    assert values["in_half"]["Paddle"] < values["in_half"]["MindSpore"]


@pytest.mark.slow
def test_recipes_refuse_each_mistake_in_words():
    notebook, _ = executed("02_recipes")
    fourth = code_cells(notebook)[3]
    printed = "".join(printed_by(fourth)).strip().split("\n\n")
    assert len(printed) == fourth.source.count("lambda:")
    assert all(re.match(r"(Value|Type)Error: recipe\(", each) for each in printed)


@pytest.mark.slow
def test_recipes_export_the_digits_that_half_precision_lacks():
    _, values = executed("02_recipes")
    exported, half = map(np.array, values["exported"])
    # Half a unit of the last place; of what is below the normal range, half of 2**-24.
    eps, tiny = 2.0**-10, 2.0**-24
    assert np.all(np.abs(exported - half) <= np.maximum(eps * np.abs(half), tiny) / 2)
    assert np.mean(exported != half) > 0.9
    assert values["agree"] > 0.99


def printed_lines(name):
    """The lines that the code cells of a notebook print when it is executed."""
    notebook, _ = executed(name)
    return ["".join(printed_by(cell)).splitlines() for cell in code_cells(notebook)]


@pytest.mark.slow
def test_coming_from_trains_alike_by_the_words_of_all_systems():
    found = [line.split() for line in printed_lines("03_coming_from")[0]]
    stored = {system: dtype for system, _, _, dtype, *_ in found}
    others = dict.fromkeys(["Paddle", "Colossal-AI", "Keras", "f32"], "float32")
    assert stored == {"Apex": "float16"} | others
    losses = [float(line[-1]) for line in found]
    assert losses == [losses[-1]] * len(found)


@pytest.mark.slow
def test_coming_from_does_what_the_other_systems_do():
    _, torch, apex, paddle, mindspore, colossalai, keras, jmp, *others = printed_lines(
        "03_coming_from"
    )
    *flax, fp8, at_scale, presets = others
    # One finite step is left until the scale doubles.
    assert torch == ["8192.0", "16384.0", "True"]
    assert 'the letter O, not the digit zero: "O2"' in apex[0]
    assert "its parameters are f32, norms too" in apex[1]
    assert apex[2] == "LossScale(value=1.0, dynamic=False)"
    # The second overflow halves.
    assert paddle[0] == "1024.0 512.0"
    assert paddle[-1].endswith("**/head: p=f32,c=f32,o=f32")
    # The derivative of x**2 at 3, after one finite step.
    assert mindspore == ["6.0 1", "True"]
    assert colossalai == ["256.0 128.0"]
    assert keras == ["32768.0 500", "True"]
    assert jmp == ["float32", "16384.0"]
    # 1 - 0.5 * 2 * [1, 0.25], and the loss 1 + 0.25.
    assert flax[0] == ["[1. 1.] 32768.0", "[0.   0.75] 1.25"]
    assert flax[1] == ["bfloat16", "[1.001 1.001]"]
    # One product of three is as wide as blocks of 16 are, and no output.
    assert fp8[0].endswith("m=fp8+backward=e4m3; **/output: " + BF16)
    assert sorted(fp8[1:]) == [
        "e4m3 x e4m3 -> bf16",
        "n = 1000 is no multiple of 16",
        "the policy of **/output",
    ]
    assert at_scale[0] == f"{BF16},r=f32"
    told = [line.split()[0] for line in at_scale[1:]]
    assert told.count("dot_general") == 3 and set(told) == {"dot_general", "add"}
    assert all(line.endswith("its gradient leaves in f32") for line in at_scale[1:])
    scales = {line.split()[0]: line.split()[1:] for line in presets[1:]}
    assert scales["torch"] == ["2**16", "2000", "1"]
    assert scales["megatron"] == ["2**32", "1000", "2"]
    assert len(scales) == 10


def results(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(lines, models):
    """The words of the lines that begin with a model's name, by model."""
    words = [line.split() for line in lines if line.split()]
    return {first: rest for first, *rest in words if first in models}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_measurements_show_every_model_as_it_was_measured(dtype):
    models = results("h100_compiled")["models"]
    lines = printed_lines("04_measurements")[1]
    # The table of a dtype ends at an empty line.
    start = next(i for i, line in enumerate(lines) if line.startswith(dtype))
    shown = rows_of(lines[start : lines.index("", start)], models)
    assert list(shown) == list(models)
    for name, row in shown.items():
        half, of, total, *memory, temp, saved, error = row
        f32, twin, autocast = (
            models[name][dtype][p] for p in ("f32", "twin", "autocast")
        )
        counts = [autocast["gemms"], autocast["convs"]]
        pairs = [each.split("/") for each in counts if each]
        assert of == "of"
        assert int(half) == sum(int(each) for each, _ in pairs)
        assert int(total) == sum(int(each) for _, each in pairs)
        bytes_of_steps = [each["temp"] for each in (f32, twin, autocast)]
        assert memory == [f"{each / 1e6:.0f}" for each in bytes_of_steps]
        assert temp == f"{autocast['temp'] / twin['temp']:.2f}x"
        assert saved == f"{autocast['saved'] / twin['saved']:.2f}x"
        pairs = zip(autocast["errors"], twin["errors"], strict=True)
        assert error == f"{np.median([here / hand for here, hand in pairs]):.2f}x"


def test_measurements_leave_out_no_figure_and_no_bound_that_does_not_hold():
    zoo, levels = results("h100_compiled"), results("recipe_levels")["models"]
    conditions, _, _, errors, casts, times, recipes, steps, updates, *_ = printed_lines(
        "04_measurements"
    )
    for key, value in zoo["conditions"].items():
        assert f"{key:13} {value}" in conditions
    for table in (errors, casts, times):
        assert list(rows_of(table, zoo["models"])) == list(zoo["models"])
    violations = [line.partition(": ")[2] for line in times if "not hold" in line]
    assert violations == zoo["violations"]
    shown = rows_of(recipes, zoo["models"])
    for model in levels:
        found = [each["memory"]["all"] for each in model["levels"].values()]
        expected = [f"{each / 1e6:.0f}" for each in found]
        assert shown[model["model"]][: len(expected)] == expected
    cost = results("loss_scale_cost")
    assert len(steps) == 1 + len(cost["steps"])
    for line, step in zip(steps[1:], cost["steps"], strict=True):
        moved = step["scaled"]["bytes_moved"] / step["plain"]["bytes_moved"]
        assert line.split()[-2:-1] == [f"{moved:.3f}x"]
    # Parameters and Adam's two moments, in f32, are 12 bytes; masters add 2.
    stay = {line[:18].strip(): line.split()[-2] for line in updates[2:]}
    assert stay["f32"] == stay["bf16, Kahan"] == "12.0"
    assert stay["bf16, masters"] == "14.0"
    assert stay["bf16, stochastic"] == "10.0"


def test_measurements_show_fp8_and_flax_as_they_were_measured():
    titles, *lines = printed_lines("04_measurements")[9]
    assert titles.split()[:2] == ["f8", "of"]
    shown = [line.split() for line in lines if line]
    for row in results("fp8_compiled")["models"]:
        programs = row["programs"]
        assert shown[0][:2] == [row["model"], row["size"]]
        del shown[0][:2]
        for name, found in programs.items():
            program, f8, gemms, temp, moved, saved, kernels, *error = shown.pop(0)
            assert (program, f8) == (name, str(found["f8_calls"]))
            assert [gemms, kernels] == [str(found[e]) for e in ("gemms", "kernels")]
            figures = ("temp", "bytes_moved", "saved")
            ratios = [found[each] / programs["bf16"][each] for each in figures]
            assert [temp, moved, saved] == [f"{each:.2f}x" for each in ratios]
            expected = [np.median(found["errors"])] if "errors" in found else []
            assert error == [f"{each:.4f}" for each in expected]
    assert not shown


def test_measurements_show_what_a_cpu_did():
    steps, weights = printed_lines("04_measurements")[10:12]
    tables = "\n".join(steps).strip().split("\n\n")
    for table, file in zip(tables, ("train_on_cpu", "train_on_cpu_epyc"), strict=True):
        measured = results(file)
        assert table.startswith(measured["conditions"]["cpu"]["name"])
        shown = rows_of(table.split("\n"), measured["models"])
        assert list(shown) == list(measured["models"])
        for name, row in measured["models"].items():
            speeds = [
                row["programs"][program][phase]["speed"]["cpu"]["min"]
                for phase in ("training", "inference")
                for program in ("by hand", "autocast", "for a CPU")
            ]
            assert shown[name][:6] == [f"{speed:.2f}x" for speed in speeds]
    measured = results("weights_on_cpu")
    lines = {line[:38].strip(): line[38:].split() for line in weights if line}
    assert list(lines) == [*measured["steps"], *measured["updates"]]
    for name, row in measured["updates"].items():
        assert lines[name] == [f"{row['ratio']:.2f}x"]


def test_measurements_show_what_devices_send():
    titles, *lines = printed_lines("04_measurements")[12]
    assert titles.split() == ["kB", "reduced", "gathered", "memory"]
    steps = results("collectives_8_h100")["steps"]
    rows = [(at, name, row) for at, each in steps.items() for name, row in each.items()]
    for line, (at, name, row) in zip(lines, rows, strict=True):
        assert line.startswith(f"{at}: {name} ")
        assert line.split()[-1] == f"{row['temp'] / 1e3:.0f}"
        for dtype, size in [*row["reduced"].items(), *row["gathered"].items()]:
            assert f"{dtype} {size / 1e3:.0f}" in line


def test_measurements_show_moments_below_f32():
    titles, *lines = printed_lines("04_measurements")[13]
    assert titles.split()[-4:] == ["state", "moved", "loss", "distance"]
    rows = results("low_precision_state")["optimizers"]
    for line, (name, row) in zip(lines, rows.items(), strict=True):
        sizes = [row[each] / rows["f32"][each] for each in ("state", "moved")]
        numbers = [f"{row['loss']:.3f}", f"{row['distance']:.4f}"]
        assert line.startswith(f"{name} ")
        assert line.split()[-4:] == [*(f"{each:.2f}x" for each in sizes), *numbers]
    # 8 bits learn as f32 does.
    assert abs(rows["float8"]["loss"] / rows["f32"]["loss"] - 1) < 0.01


def test_measurements_show_what_is_kept_by_each_word():
    titles, *lines = printed_lines("04_measurements")[14]
    assert titles.split()[-4:] == ["memory", "kept", "time", "error"]
    shown = [line for line in lines if line.strip()]
    for name, rows in results("kept_for_backward")["models"].items():
        assert shown[0].split()[0] == name
        for program in list(rows)[1:]:
            line = shown.pop(0)
            assert line[18:30].strip() == program
            figures = ("temp", "kept", "ms", "error")
            ratios = [rows[program][each] / rows["all"][each] for each in figures]
            assert line[30:].split() == [f"{each:.2f}x" for each in ratios]
    assert not shown


@pytest.mark.slow
def test_how_it_works_names_the_module_of_every_operation():
    _, values = executed("05_how_it_works")
    dense = ["dot_general", "reshape", "add"]
    up, down = ([[f"Model/{each}", name] for name in dense] for each in ("up", "down"))
    assert values["scopes"][:7] == [*up, ["Model", "tanh"], *down]
    # The loss is in no module.
    assert {module for module, _ in values["scopes"][7:]} == {""}


@pytest.mark.slow
def test_how_it_works_plans_by_makers_and_readers():
    _, values = executed("05_how_it_works")
    dtypes = {(module, name): dtype for module, name, dtype in values["dtypes"]}
    assert dtypes["Model/up", "add"] == dtypes["Model", "tanh"] == "f32"
    assert dtypes["Model/down", "dot_general"] == "bf16"
    # The softmax alone reads the logits.
    assert dtypes["Model/down", "add"] == dtypes["", "exp"] == "f32"
    assert values["products"] == ["bf16 x bf16 -> bf16"] * 5
    added = {
        title: dict((name, dtype) for name, dtype, _ in rows)["add"]
        for title, rows in values["options"].items()
    }
    half = dict.fromkeys(["half reads it", "both read it"], "f16")
    assert added == half | dict.fromkeys(["f32 reads it", "no activation"], "f32")


@pytest.mark.slow
def test_how_it_works_shows_the_rules_of_the_plan():
    _, values = executed("05_how_it_works")
    found = {
        title: [dtype for name, dtype, _ in rows if name in ("add", "mul", "select_n")]
        for title, rows in values["constants"].items()
    }
    full = (
        "+ 1e-8",
        "where(.., -1e9), returned",
        "+ linspace(0, 4095, 8)",
        "+ arange(8)",
    )
    for title in full:
        assert set(found.pop(title)) == {"f32"}
    assert set(map(tuple, found.values())) == {("f16",)}
    assert values["rewrites"]["JAX"]["scatters"] == 1
    assert values["rewrites"]["autocast"]["scatters"] == 0
    assert values["rewrites"]["autocast"]["products"] == [
        "bf16 x bf16 -> f32",
        "bf16 x bf16 -> bf16",
    ]
    # The norm's f32 input and what it was before the scale, of 256 x 64 elements, are
    # not kept: one half-precision array on each side of it is.
    without, kept = values["kept"]
    assert without > 2 * 4 * 256 * 64
    assert 2 * 2 * 256 * 64 < kept < without / 3
    assert values["carries"] == {
        "residual stream": "float16[5,8]",
        "ODE": "float32[5,8]",
        "RNN": "float32[8]",
    }
    keepers = values["keepers"]
    assert keepers.pop("a Gram matrix") == ["f16", "f32"]
    assert len(keepers) == 6 and {d for row in keepers.values() for d in row} == {"f32"}
    by_name = {
        title: [dtype for name, dtype, _ in rows if name in ("tanh", "mul")]
        for title, rows in values["by_name"].items()
    }
    assert by_name.pop("as it is") == ["f16"]
    assert list(by_name.values()) == [["f32"]] * 2
    assert values["mapped"] == {
        "Experts/expert_0/up": "f16",
        "Experts/expert_0/down": "f16",
        "Experts/expert_1/up": "bf16",
        "Experts/expert_1/down": "bf16",
        "Experts/expert_2/up": "f32",
        "Experts/expert_2/down": "f32",
        "Experts/head": "f32",
    }
    # A hundred updates of 0.001: bf16 has seven bits after the point.
    assert values["weights"].pop("rounded") == 1.0
    assert set(values["weights"].values()) == {float(jnp.bfloat16(1.1))}


@pytest.mark.slow
def test_how_it_works_prints_every_value_that_it_tells_of():
    _, traced, _, _, totals, *_, kernels, policies, _, _, in_f16, devices, _ = (
        printed_lines("05_how_it_works")
    )
    assert sum("dot_general" in line for line in traced) == 2
    assert not [line for line in traced if "f16" in line]
    # A multiplication and an addition for each of 8 x 6 x 16 and 8 x 16 x 4 elements.
    flops = [2 * 8 * 16 * 6, 2 * 8 * 16 * 4]
    assert totals[0] == f"2 of 2 products in half, {sum(flops)} FLOP"
    assert totals[1] == f"of these in up: {flops[0]}"
    assert policies[-2:] == [
        "p=f32,c=f16,o=f16",
        'get_policy("c=fp17"): unknown dtype \'fp17\' at "c="',
    ]
    assert kernels == [
        "double is traced in float16",
        "largest energy 1.6e+09, largest f16 65504.0",
    ]
    assert in_f16[:-1] == ["2.0 [inf inf]", "2.0 [2. 2.]"]
    assert "the loss is float16" in in_f16[-1]
    assert devices == ["False 32768.0"]


def test_links_in_notebooks_lead_to_files():
    for name in NOTEBOOKS:
        for cell in committed(name).cells:
            if cell.cell_type == "markdown":
                for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", cell.source):
                    assert (ROOT / "notebooks" / target).exists(), (name, target)


def write(name):
    """Executes a notebook and keeps its outputs, and nothing else of the run."""
    notebook, _ = executed(name, as_read=True)
    notebook.metadata = committed(name).metadata
    for cell in code_cells(notebook):
        merged = []
        for output in cell.outputs:
            last = merged[-1] if merged else {}
            # How many pieces a printed text comes in is chance.
            if output.get("name") and output.get("name") == last.get("name"):
                last["text"] += output.text
            else:
                merged.append(output)
        cell.outputs = merged
    nbformat.write(notebook, ROOT / "notebooks" / f"{name}.ipynb")


if __name__ == "__main__":
    # As in `conftest.py`: without them a machine's drivers are part of the output.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    for each in sys.argv[1:]:
        write(each)
