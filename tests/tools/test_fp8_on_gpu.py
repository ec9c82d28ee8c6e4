"""The fp8 session for a real GPU runs, in tiny sizes; how fast is not tested here."""

import doctest
import json
import statistics
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from benchmarks import train_on_gpu

import jmp_amp as amp
from examples.benchmarks import fp8_on_gpu
from tests import h100

ON_CPU = {
    "PROGRAMS": ("bf16", "fp8", "fp8_restored"),
    "GRADIENTS": ("f32", "bf16", "fp8", "fp8, no Triton, no fast accumulation"),
}
PARTS = [
    "kernels",
    "gradients",
    *("mlp 16", "mlp of 16384 rows 16", "mlp, gradients 16", "gpt 16"),
]
QUICK = ("--policy", "fp8", "--tiny", "--steps", "2", "--rounds", "2", "--warmup", "1")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("results") / "run.json"
    with pytest.MonkeyPatch.context() as patch:
        # A CPU has none of the options that the others differ in.
        for name, keys in ON_CPU.items():
            every = getattr(fp8_on_gpu, name)
            patch.setattr(fp8_on_gpu, name, {key: every[key] for key in keys})
        assert train_on_gpu.main([*QUICK, "--minutes", "60", "--json", str(file)]) == 0
    (entry,) = json.loads(file.read_text()).items()
    return entry


@pytest.mark.slow
def test_session_measures_every_part_and_says_where(results):
    name, run = results
    assert name == "fp8 tiny"
    assert run["left_out"] == []
    assert list(run["parts"]) == PARTS
    about = run["conditions"]
    assert about["device"]["kind"] == jax.devices()[0].device_kind
    assert (about["steps"], about["rounds"], about["tiny"]) == (2, 2, True)
    assert about["policy"] == "p=f32,c=bf16,o=f32,m=fp8"


@pytest.mark.slow
def test_programs_train_and_their_speed_is_to_bf16(results):
    for part in ("mlp 16", "gpt 16"):
        rows = results[1]["parts"][part]
        assert tuple(rows) == ON_CPU["PROGRAMS"]
        for row in rows.values():
            assert len(row["seconds"]) == 2 and row["last_loss"] < row["first_loss"]
            pairs = zip(rows["bf16"]["seconds"], row["seconds"], strict=True)
            assert row["speed"] == statistics.median(b / a for b, a in pairs)
        # 8 bits round more than 16, and change the loss.
        losses = {name: row["first_loss"] for name, row in rows.items()}
        assert losses["fp8"] == losses["fp8_restored"] != losses["bf16"]


@pytest.mark.slow
def test_gradients_on_the_cpu_are_those_of_the_cpu(results):
    rows = results[1]["parts"]["gradients"]
    assert {row["device_to_cpu"] for row in rows.values()} == {0.0}
    error = {name: row["error_on_device"] for name, row in rows.items()}
    assert error["f32"] == 0 < error["bf16"] < error["fp8"] / 4


class Program:
    """The text of a compiled program."""

    def __init__(self, *lines):
        self.lines = lines

    def as_text(self):
        return "\n".join(self.lines)


def fusion(name, x, *converted):
    """A computation that multiplies x by x, after it was `converted`."""
    operand = "%q" if converted else "%x"
    return (
        f"%{name} (x: {x}[8,8]) -> bf16[8,8] {{",
        f"  %x = {x}[8,8]{{1,0}} parameter(0)",
        *(f"  %q = {to}[8,8]{{1,0}} convert(%x)" for to in converted),
        f"  ROOT %d = bf16[8,8]{{1,0}} dot({operand}, {operand})",
        "}",
    )


def test_kinds_of_kernels_are_told_apart():
    text = Program(
        *fusion("one", "f8e4m3fn"),
        *fusion("two", "f8e4m3fn", "bf16"),
        *fusion("three", "bf16"),
        "ENTRY %main (a: f8e4m3fn[8,8], b: bf16[8,8]) -> f32[8,8] {",
        "  %a = f8e4m3fn[8,8]{1,0} parameter(0)",
        "  %b = bf16[8,8]{1,0} parameter(1)",
        "  %c = bf16[8,8]{1,0} custom-call(%a, %a), "
        'custom_call_target="__cublas$lt$matmul$f8"',
        "  ROOT %e = f32[8,8]{1,0} custom-call(%b, %b), "
        'custom_call_target="__cublas$lt$matmul"',
        "}",
    )
    assert fp8_on_gpu.kernels(text) == {
        "triton_f8": 1,
        "triton_restored": 1,
        "triton": 1,
        "cublas_f8": 1,
        "cublas": 1,
        "values_of_8_bits": 3,
    }


@pytest.mark.slow
@h100.needs_compiler
def test_forms_are_8_bit_calls_with_default_flags():
    for name, (fn, args) in fp8_on_gpu.forms(tiny=False).items():
        found = h100.figures(fn, *args, read=fp8_on_gpu.kernels, default_flags=True)
        if name == "8-bit arrays multiplied":
            # It does not say how to add up: a GPU tries Triton's kernel.
            assert found.keys() == {"triton_f8", "values_of_8_bits"}
            continue
        assert found["cublas_f8"] == (3 if "gradient" in name else 1), name
        assert set(found) == {"cublas_f8", "values_of_8_bits"}, name


@pytest.mark.slow
@h100.needs_compiler
@pytest.mark.parametrize(
    ("form", "calls"),
    [("", 2), ("direct", 0), ("restored", 0), ("fast everywhere", 2)],
)
def test_a_form_is_what_its_name_says(form, calls):
    # A function of its own: JAX remembers what it traced.
    loss = lambda x, w: jnp.sum(amp.autocast(jnp.dot, "fp8")(x, w) ** 2)  # noqa: E731
    x, w = (jax.ShapeDtypeStruct((512, 512), "float32") for _ in "xw")
    with fp8_on_gpu.traced_in(form):
        program = h100.compile_for_gpu(jax.grad(loss), x, w, default_flags=True)
    assert fp8_on_gpu.kernels(program).get("cublas_f8", 0) == calls
    fast = program.as_text().count('"ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM"')
    assert fast == {"": 1, "fast everywhere": 2}.get(form, 0)
    with fp8_on_gpu.traced_in(""):
        assert fp8_on_gpu.rewrite._HAS_ALGORITHMS == jax.__version__.startswith(
            ("0.10.", "0.11.")
        )


def test_what_there_is_no_time_for_is_left_out_and_said():
    options = SimpleNamespace(
        tiny=True, width=(16,), steps=1, rounds=1, warmup=0, minutes=-1
    )
    reported = []
    left_out = fp8_on_gpu.session(options, lambda *part: reported.append(part))
    assert left_out == PARTS
    assert reported == []


def test_cpu_is_refused_in_one_line_that_says_what_is_needed(capsys):
    assert train_on_gpu.main(["--policy", "fp8"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "needs a GPU" in printed.err and "--tiny" in printed.err


@pytest.mark.parametrize(
    "option, value",
    [("--steps", "0"), ("--rounds", "0"), ("--minutes", "-1.0"), ("--width", "100")],
)
def test_option_that_makes_no_sense_is_refused(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_on_gpu.main(["--policy", "fp8", option, value])
    assert stopped.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert option in message and value in message


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(fp8_on_gpu).failed == 0
