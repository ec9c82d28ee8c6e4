"""`python -m jmp_amp doctor`: what suits a machine, and whether it works there."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp import __main__, checkup, doctor

F16, BF16 = jnp.dtype("float16"), jnp.dtype("bfloat16")
README = (Path(__file__).parent.parent / "README.md").read_text()

# Compute capabilities, from NVIDIA's table of them.
NVIDIA = {
    "P100": "6.0",
    "V100": "7.0",
    "T4": "7.5",
    "A100": "8.0",
    "L4": "8.9",
    "H100": "9.0",
    "B200": "10.0",
}


@functools.cache
def examination() -> doctor.Examination:
    return doctor.examine()


@pytest.mark.parametrize(
    "name, half, recipe",
    [
        ("P100", "f16", "O0"),  # no matrix units
        ("V100", "f16", "O1"),  # Volta and Turing multiply f16 alone
        ("T4", "f16", "O1"),
        ("A100", "bf16", "O1"),
        ("L4", "bf16", "O1"),
        ("H100", "bf16", "O1"),
        ("B200", "bf16", "O1"),
    ],
)
def test_an_nvidia_gpu_is_advised_what_its_matrix_units_take(name, half, recipe):
    assert doctor.advise("gpu", NVIDIA[name])[:2] == (half, recipe)


def test_only_gpus_with_fp8_units_are_told_of_them():
    advised = {name: doctor.advise("gpu", each) for name, each in NVIDIA.items()}
    told = {name for name, each in advised.items() if 'recipe("fp8")' in each.why}
    assert told == {"L4", "H100", "B200"}
    assert told == {name for name, each in advised.items() if each.fp8_units}
    # They are the second gear: the first one is the same.
    assert {advised[name].recipe for name in told} == {"O1"}


@pytest.mark.parametrize(
    "device, answer",
    [
        (("gpu", "9.0"), "fp8 units: yes."),
        (("gpu", "8.0"), "fp8 units: no (products then run in bf16 after quantising: "),
        (("cpu",), "fp8 units: no (products then run in bf16 after quantising: "),
        # AMD's older ones have other formats, TPUs none or other ones.
        (("gpu", "gfx942"), "fp8 units: not known ("),
        (("tpu",), "fp8 units: not known ("),
    ],
)
def test_whether_there_are_fp8_units_is_printed(device, answer):
    found = dataclasses.replace(examination(), advice=doctor.advise(*device))
    assert answer in str(found)
    assert max(map(len, str(found).splitlines())) <= 88
    assert found.to_dict()["advice"]["fp8_units"] is found.advice.fp8_units


@pytest.mark.parametrize(
    "speeds, use, told",
    [
        # On a CPU that gains, one whose gain may be noise, and one that cannot.
        (doctor.Speeds(0.7, 2.1), 'amp.recipe("O1").autocast(fn, target="auto")', 2.1),
        (doctor.Speeds(0.7, 1.05), "amp.recipe('O0')", 1.1),
        (None, "amp.recipe('O0')", None),
    ],
)
def test_a_cpu_is_advised_by_the_speed_of_a_step_on_it(speeds, use, told):
    advice = doctor.advise("cpu")
    found = dataclasses.replace(examination(), advice=advice, speeds=speeds)
    text = " ".join(str(found).split())
    assert f"Use {use}. Half precision here is bf16." in text
    assert ("no instructions for products of bf16" in text) == (speeds is None)
    if speeds is not None:
        assert f"is {told:.1f}x as fast as in f32 if the plan is for this CPU" in text
        assert "0.7x if it is for a GPU" in text
        assert found.to_dict()["speeds"] == speeds._asdict()
    assert max(map(len, str(found).splitlines())) <= 88


def test_a_gpu_is_told_nothing_of_a_cpus_instructions():
    advice = doctor.advise("gpu", "9.0")
    text = str(dataclasses.replace(examination(), advice=advice, speeds=None))
    assert "products of bf16" not in text
    assert "if the plan is for" not in text


def test_steps_are_timed_where_a_cpu_multiplies_bf16(monkeypatch):
    times = iter([3.0, 4.0, 1.5])
    monkeypatch.setattr(doctor, "_shortest", lambda run: next(times))
    assert doctor._speeds() == doctor.Speeds(autocast=0.75, on_cpu=2.0)


def test_other_devices_are_advised_bfloat16():
    assert doctor.advise("tpu")[:2] == ("bf16", "O1")
    assert doctor.advise("gpu", "gfx942")[:2] == ("bf16", "O1")
    assert doctor.advise("cpu")[:2] == ("bf16", "O0")


def test_advice_agrees_with_the_half_dtype_of_policies():
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    advised = doctor.advise(device.platform, capability)
    assert examination().advice == advised
    assert amp.get_policy(advised.half_dtype).compute_dtype == amp.half_dtype()


def test_the_table_of_the_readme_says_what_the_doctor_says():
    table = README.partition("## Which precision should I use?")[2].partition("\n## ")[
        0
    ]
    advised = {}
    for names, half, recipe in re.findall(
        r"^\| ([^|]+) \| (bf16|f16) \| `(\w+)`", table, re.MULTILINE
    ):
        for name in re.split(r",\s*", names):
            advised[name] = (half, recipe)
    for name, capability in NVIDIA.items():
        assert advised[name] == doctor.advise("gpu", capability)[:2], name
    assert advised["TPU"] == doctor.advise("tpu")[:2]
    assert advised["CPU"] == doctor.advise("cpu")[:2]


def test_every_check_holds_here():
    found = examination()
    assert found.healthy
    assert [each.dtype for each in found.checks] == ["bf16"] * 5 + ["f16"] * 5
    assert [each.what for each in found.checks if not each.holds] == []


@pytest.mark.parametrize(
    "recipe, fails",
    [
        # Nothing is in half precision, nothing is scaled.
        (
            amp.recipe("O0"),
            {"every product of a gradient is in half precision"},
        ),
        (
            amp.recipe("O1", "float16", loss_scale=1.0),
            {"a step that overflows changes no parameter, and a scale backs off"},
        ),
        # bf16 has three bits less.
        (
            amp.recipe("O1", "bfloat16", loss_scale="dynamic"),
            {"gradients are f32, and right to 2 units of the last place"},
        ),
    ],
    ids=["f32", "unscaled", "other half"],
)
def test_checks_fail_where_a_recipe_does_not_do_what_f16_needs(recipe, fails):
    found = checkup.check(recipe, F16)
    missing = {"a step that overflows changes no parameter, and a scale backs off"}
    wanted = fails | (missing if not recipe.loss_scale.dynamic else set())
    assert {each.what for each in found if not each.holds} == wanted


class Careless:
    """A recipe that backs off when a step overflows, and makes it all the same."""

    def __init__(self, recipe):
        self.recipe = recipe

    def __getattr__(self, name):
        return getattr(self.recipe, name)

    def wrap(self, tx):
        careful = self.recipe.wrap(tx)

        def update(updates, state, params=None):
            proposed, _ = tx.update(updates, state.inner_state, params)
            return proposed, careful.update(updates, state, params)[1]

        return optax.GradientTransformation(careful.init, update)


def test_checks_fail_where_a_step_that_overflows_is_made():
    found = checkup.check(Careless(amp.recipe("O1", "float16")), F16)  # pyright: ignore
    assert {each.what for each in found if not each.holds} == {
        "a step that overflows changes no parameter, and a scale backs off",
        "the next step goes on, and all of them were compiled once",
    }


def test_limits_are_those_of_the_dtypes():
    limits = {p.dtype: p[1:4] for p in examination().products}
    assert limits["f16"] == (65504.0, 2.0**-24, 2.0**-10)
    assert limits["bf16"] == ((2 - 2.0**-7) * 2.0**127, 2.0**-133, 2.0**-7)
    assert limits["f32"] == ((2 - 2.0**-23) * 2.0**127, 2.0**-149, 2.0**-23)
    assert examination().products[0].speed == 1
    assert all(np.isfinite(p.speed) and p.speed > 0 for p in examination().products)


def test_what_it_prints_names_the_choice_the_reason_and_every_figure():
    found = examination()
    text = " ".join(str(found).split())
    assert f"jax {jax.__version__}" in text and found.device in text
    assert f"Half precision here is {found.advice.half_dtype}." in text
    assert " ".join(found.advice.why.split()) in text
    assert "All 10 checks hold." in text
    for each in found.checks:
        assert all(word in text for word in each.measured.split())
    assert max(map(len, str(found).splitlines())) <= 88


def test_a_check_that_fails_is_the_exit_status(monkeypatch, capsys):
    *well, last = examination().checks
    sick = (*well, last._replace(holds=False))
    found = dataclasses.replace(examination(), checks=sick)
    monkeypatch.setattr(__main__, "examine", lambda: found)
    assert __main__.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "FAILS" in printed
    assert printed.rstrip().endswith("1 of 10 checks fail: do not train so.")


def test_the_command_prints_and_is_read_by_other_programs(monkeypatch, capsys):
    monkeypatch.setattr(__main__, "examine", examination)
    assert __main__.main(["doctor"]) == 0
    assert capsys.readouterr().out == f"{examination()}\n"
    assert __main__.main(["doctor", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["healthy"] is True
    assert read["advice"]["half_dtype"] == examination().advice.half_dtype
    assert [each["holds"] for each in read["checks"]] == [True] * 10


def test_a_cpu_that_was_asked_for_is_noted(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert doctor.notes("cpu")[0] == "JAX_PLATFORMS=cpu keeps JAX on the CPU."
    assert doctor.notes("gpu") == []
    with jax.enable_x64(True):
        assert doctor.notes("gpu")[0].startswith("jax_enable_x64 is on")
