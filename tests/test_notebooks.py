"""The notebooks run as they are, and what they show is what the library does."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
ROUNDINGS = 2

# What one worker has executed, the next test on it does not execute again.
pytestmark = pytest.mark.xdist_group("notebooks")
each_notebook = pytest.mark.parametrize("name", NOTEBOOKS)
# Of what is not slow, what is committed is looked at.
each_executed = pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) for each in NOTEBOOKS]
)

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
def executed(name):
    """The notebook as a fresh kernel executes it, and what was read back from it."""
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
        # The kernel of a reader has none of the settings of the suite.
        ours = ("XLA_FLAGS", "MPLBACKEND", "PYTHONWARNINGS")
        env = {key: value for key, value in os.environ.items() if key not in ours}
        client = NotebookClient(
            notebook,
            kernel_manager_class=ThisPython,
            config=Config({"ThisPython": sockets}),
            resources={"metadata": {"path": folder}},
            timeout=600,
        )
        client.execute(env=env | dict.fromkeys(folders, folder))
    (printed,) = notebook.cells.pop().outputs
    return notebook, json.loads(printed.text)


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


@each_executed
def test_notebook_runs_in_a_fresh_kernel_and_shows_what_it_showed(name):
    notebook, _ = executed(name)
    pairs = zip(code_cells(notebook), code_cells(committed(name)), strict=True)
    for now, before in pairs:
        assert printed_by(now, "stderr") == []
        assert kinds(now) == kinds(before)
    assert absolute_paths(notebook) == []


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
    assert values["in_half"]["Paddle"] < values["in_half"]["MindSpore"] / 2


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
