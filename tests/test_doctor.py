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
from jmp_amp import __main__, doctor

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


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    # No test reads how fast this machine is.
    monkeypatch.setattr(doctor, "ROUNDS", 2)


@functools.cache
def examination() -> doctor.Examination:
    return doctor.examine()


def half_and_recipe(*device):
    advice = doctor.advise(*device)
    return advice.half_dtype, advice.recipe


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
    assert half_and_recipe("gpu", NVIDIA[name]) == (half, recipe)


def test_only_gpus_with_fp8_units_are_told_of_them():
    advised = {name: doctor.advise("gpu", each) for name, each in NVIDIA.items()}
    told = {name for name, each in advised.items() if 'recipe("fp8")' in each.why}
    assert told == {"L4", "H100", "B200"}
    assert told == {name for name, each in advised.items() if each.fp8_units}
    # They are the second gear: the first one is the same.
    assert {advised[name].recipe for name in told} == {"O1"}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "device, answer",
    [
        (
            ("gpu", "9.0"),
            "fp8 units: yes (under fp8, products multiply the 8-bit ",
        ),
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


GAINS = doctor.Speeds(autocast=0.7, on_cpu=2.1)
GAINS_LITTLE = doctor.Speeds(autocast=0.7, on_cpu=1.05)  # may be noise
IN_F32 = "A CPU computes most of half precision in f32, and casts on top."


def on_a_cpu(speeds):
    """What is found on a CPU; `speeds` are None where it does not multiply bf16."""
    products = examination().products[:3]
    if speeds is not None:
        on_cpu = dataclasses.replace(products[1], dtype="bf16 to f32", speed=3.0)
        products = (*products, on_cpu)
    advice = doctor.advise("cpu", speeds=speeds)
    return dataclasses.replace(
        examination(), advice=advice, speeds=speeds, products=products
    )


@pytest.mark.parametrize(
    "speeds, use, told",
    [
        (
            GAINS,
            "amp.recipe('O1', half_dtype='bf16').autocast(fn, target='auto')",
            2.1,
        ),
        (GAINS_LITTLE, "amp.recipe('O0')", 1.1),
        (None, "amp.recipe('O0')", None),
    ],
)
def test_a_cpu_is_advised_by_the_speed_of_a_step_on_it(speeds, use, told):
    found = on_a_cpu(speeds)
    text = " ".join(str(found).split())
    assert f"Use {use}. Half precision here is bf16." in text
    assert ("no instructions for products of bf16" in text) == (speeds is None)
    if speeds is not None:
        assert f"is {told:.1f}x as fast as in f32 if the plan is for this CPU" in text
        assert "0.7x if it is for a GPU" in text
        assert found.to_dict()["speeds"] == dataclasses.asdict(speeds)
    target = ", target='auto'" if speeds is GAINS else ""
    assert f"amp.diagnose(loss_fn, policy{target})(params, batch)" in text
    assert max(map(len, str(found).splitlines())) <= 88


def test_a_cpu_that_gains_is_not_told_that_cpus_do_not():
    for speeds, gains in ((GAINS, True), (GAINS_LITTLE, False), (None, False)):
        found = on_a_cpu(speeds)
        text = str(found)
        assert (IN_F32 in text) == (not gains)
        # Programs read the same advice.
        told = found.to_dict()["advice"]
        assert (told["recipe"], told["target"]) == (
            ("O1", "auto") if gains else ("O0", None)
        )
        assert (IN_F32 in told["why"]) == (not gains)
        # What was tried is not what is advised: a plan for this CPU.
        assert ("beside it by O0; the plan is for a GPU\n" in text) == gains


def test_the_table_has_the_product_that_a_plan_for_the_cpu_runs():
    for speeds in (GAINS, GAINS_LITTLE):
        found = str(on_a_cpu(speeds))
        (row,) = re.findall(r"^ bf16 to f32 .*$", found, re.MULTILINE)
        assert row.endswith(" 3.00x")
        told = 'bf16 to f32: of f32 arrays, as target="auto" multiplies on this CPU.'
        assert told in found
    assert "bf16 to f32" not in str(on_a_cpu(None))


def test_that_product_is_timed_where_a_cpu_multiplies_bf16():
    usual, native = (doctor.time_products("cpu", native) for native in (False, True))
    assert [each.dtype for each in usual] == ["f32", "bf16", "f16"]
    *others, on_cpu = native
    assert [each.dtype for each in others] == ["f32", "bf16", "f16"]
    assert on_cpu.dtype == "bf16 to f32" and on_cpu.speed > 0
    assert on_cpu.last_place == 2.0**-7


def test_a_gpu_is_told_nothing_of_a_cpus_instructions():
    advice = doctor.advise("gpu", "9.0")
    assert advice == doctor.advise("gpu", "9.0", GAINS)
    found = dataclasses.replace(on_a_cpu(None), advice=advice)
    assert "products of bf16" not in str(found)
    assert "if the plan is for" not in str(found)


def test_steps_are_timed_where_a_cpu_multiplies_bf16(monkeypatch):
    monkeypatch.setattr(doctor, "medians", lambda runs: [3.0, 4.0, 1.5])
    assert doctor.time_steps() == doctor.Speeds(autocast=0.75, on_cpu=2.0)


def test_a_machine_that_slows_down_changes_no_ratio(monkeypatch):
    now, order = [0.0], []

    def program(name, seconds):
        def run():
            order.append(name)
            now[0] += seconds * (1 + now[0])  # the later, the slower
            return jnp.zeros(())

        return run

    monkeypatch.setattr(doctor.time, "perf_counter", lambda: now[0])
    runs = [program("slow", 0.02), program("fast", 0.01)]
    slow, fast = doctor.medians(runs)
    assert abs(slow / fast - 2) < 0.05
    assert order == ["slow", "fast"] * (doctor.ROUNDS + 1)


def test_other_devices_are_advised_bfloat16():
    assert half_and_recipe("tpu") == ("bf16", "O1")
    assert half_and_recipe("gpu", "gfx942") == ("bf16", "O1")
    assert half_and_recipe("cpu") == ("bf16", "O0")


def test_advice_agrees_with_the_half_dtype_of_policies():
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    advised = doctor.advise(device.platform, capability, examination().speeds)
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
        assert advised[name] == half_and_recipe("gpu", capability), name
    assert advised["TPU"] == half_and_recipe("tpu")
    assert advised["CPU"] == half_and_recipe("cpu")


def test_every_check_holds_here():
    found = examination()
    assert found.healthy
    assert [each.dtype for each in found.checks] == ["bf16"] * 5 + ["f16"] * 5
    assert [each.what for each in found.checks if not each.holds] == []


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "recipe, fails",
    [
        # Nothing is in half precision, nothing is scaled.
        (amp.recipe("O0"), {"every product of a gradient is in half precision"}),
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
    found = doctor.check(recipe, F16)
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
    found = doctor.check(Careless(amp.recipe("O1", "float16")), F16)  # pyright: ignore
    assert {each.what for each in found if not each.holds} == {
        "a step that overflows changes no parameter, and a scale backs off",
        "the next step goes on, and all of them were compiled once",
    }


def test_limits_are_those_of_the_dtypes():
    limits = {
        p.dtype: (p.largest, p.smallest, p.last_place) for p in examination().products
    }
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
    sick = (*well, dataclasses.replace(last, holds=False))
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
