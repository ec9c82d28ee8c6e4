"""The main job: what a newcomer runs first, and what it promises."""

import functools
import io

import chex
import digits_report
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_digits
from rich.console import Console

import jmp_amp as amp
from jmp_amp.plan.program import cpu_target
from jmp_amp.plan.program.cpu_target import Cpu
from tests.scripts import refusal, run_example

# Adam of optax raises a float to its integer step count, which strict JAX refuses; the
# rest of the example is run under the strict rules of the suite.
adam_mixes_dtypes = functools.partial(jax.numpy_dtype_promotion, "standard")


@pytest.mark.slow
def test_a_few_steps_with_one_policy_print_a_table_and_write_a_plot(tmp_path):
    plot = tmp_path / "curves.png"
    done = run_example(
        "train_digits",
        *("--policy", "mixed_float16", "--steps", "3", "--seed", "1"),
        *("--plot", str(plot)),
    )
    assert done.returncode == 0, done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if "c=f16" in line][1:]
    name, loss_mult, *_, scale, _skips, half, saved, step = row
    assert (name, loss_mult, half) == ("p=f32,c=f16,o=f32", "1", "17/17")
    assert scale.startswith("2**1")
    assert float(saved) > 0 and step.endswith("ms")
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_no_cell_is_wrapped_at_80_columns():
    def run(name, loss_mult, scale):
        metrics = {"loss": 2.9507, "zero gradients": 1.0, "scale": scale}
        metrics = {key: np.full(300, value) for key, value in metrics.items()}
        metrics["skipped_total"] = np.full(300, 13)
        digits = loss_mult, 0.9816, metrics, (17, 17), 13_130_000, 0.1234
        return digits_report.Result("CNN", name, *digits)

    compared = [
        run(each.name, each.loss_mult, 2.0**22) for each in train_digits.comparison()
    ]
    alone = [run("p=f32,c=bf16,o=f32", 2.0**-20, 1.0)]
    by_device = train_digits.BY_DEVICE, ("test accuracy", "final loss", "saved MB")
    for runs, *options in (
        (compared,),
        (alone,),
        ([run('bf16, target="auto"', 1, 1.0)] * 2, *by_device),
    ):
        console = Console(file=io.StringIO(), width=80)
        console.print(digits_report.table_of(runs, *options))
        lines = console.file.getvalue().splitlines()
        rule = next(i for i, line in enumerate(lines) if "──" in line)
        shown = lines[rule + 1 : rule + 1 + len(runs)]
        assert not lines[rule + 1 + len(runs)].strip(), "\n".join(lines)
        for line, each in zip(shown, runs, strict=True):
            assert line.strip().startswith(each.name), "\n".join(lines)
            assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("policy", ["fp17", "c=f16,c=f32", "float64"])
def test_policy_that_is_none_gets_the_error_of_the_library_in_one_line(policy, capsys):
    with pytest.raises(ValueError) as expected:
        train_digits.make_loss(amp.get_policy(policy))
    message = refusal(capsys, lambda: train_digits.parse(["--policy", policy]))
    assert message.endswith(f"error: {expected.value}\n")
    assert message.count("\n") == 1


def test_comparison_trains_f16_with_and_without_scaling_on_the_same_losses():
    runs = train_digits.comparison()
    assert [(run.name, run.loss_mult) for run in runs] == [
        *(("f32", 1), ("bf16", 1), ("f16 + scaling", 1), ("f16 alone", 1)),
        *(("f32", 2**-20), ("f16 + scaling", 2**-20), ("f16 alone", 2**-20)),
    ]
    assert [run.loss_scale.dynamic for run in runs] == [
        *(False, False, True, False),
        *(False, True, False),
    ]
    assert {run.loss_mult for run in train_digits.comparison(1e-3)} == {1e-3}


SCALE = amp.dynamic_loss_scale(2.0**10)


@functools.cache
def first_batch():
    return next(train_digits.batches(train_digits.digits()[0], 1, seed=0))


def new_state(tx):
    init = jax.jit(functools.partial(train_digits.CNN().init, train=False))
    variables = init(jax.random.key(0), first_batch()["image"])
    params, batch_stats = variables["params"], variables["batch_stats"]
    return train_digits.State(params, batch_stats, jax.jit(tx.init)(params))


@pytest.mark.breadth(1)
@pytest.mark.filterwarnings("ignore:.*the loss is:UserWarning")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_loss_and_gradients_mix_no_dtypes(policy):
    policy = amp.get_policy(policy)
    tx = amp.with_loss_scale(optax.sgd(0.1), SCALE)
    state = jax.eval_shape(lambda: new_state(tx))
    gradient = amp.value_and_grad(train_digits.make_loss(policy), has_aux=True)
    (loss, _), grads = jax.eval_shape(
        lambda state, *args: gradient(*state[:2], *args, loss_scale=state.opt_state),
        *(state, first_batch(), jax.random.key(0)),
    )
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
    assert loss.shape == ()


@pytest.mark.slow
def test_step_that_overflows_changes_nothing_but_the_loss_scale():
    f16 = amp.get_policy("mixed_float16")
    tx = train_digits.make_optimizer(SCALE, steps=10)
    train_step = train_digits.make_train_step(train_digits.make_loss(f16), tx)
    good, key = first_batch(), jax.random.key(0)
    bad = good | {"image": np.full_like(good["image"], 1e6)}

    with adam_mixes_dtypes():
        state, _ = train_step(new_state(tx), good, key)
        before = jax.device_get(state)
        after, metrics = jax.device_get(train_step(state, bad, key))
    assert not metrics["finite"]
    chex.assert_trees_all_equal(after[:2], before[:2])
    chex.assert_trees_all_equal(
        after.opt_state.inner_state, before.opt_state.inner_state
    )
    assert metrics["scale"] == 2.0**9

    with adam_mixes_dtypes():
        recovered, metrics = jax.device_get(train_step(after, good, key))
    assert metrics["finite"]
    assert metrics["applied"] == 2
    assert amp.all_finite(recovered.batch_stats)


# Slow tests share their trainings: one process has them all (`--dist loadgroup`).
pytestmark = pytest.mark.xdist_group("train_digits")


def outcome(result):
    metrics = result.metrics
    zeros = metrics["zero gradients"]
    return {
        "accuracy": result.accuracy,
        "largest scale": float(metrics["scale"].max()),
        "skipped": int(metrics["skipped_total"][-1]),
        "all finite": bool(np.isfinite(metrics["loss"]).all()),
        "zero gradients": [float(zeros.min()), float(zeros.max())],
    }


@functools.cache
def trained(run: int):
    with adam_mixes_dtypes():
        return outcome(train_digits.train(train_digits.comparison()[run]))


@pytest.mark.parametrize("native", [True, False])
def test_the_mlp_is_planned_for_the_cpu_that_it_runs_on(native, monkeypatch):
    monkeypatch.setattr(cpu_target, "this_cpu", lambda: Cpu(native=native))
    f32, bf16 = train_digits.on_this_device()
    assert (f32.policy, f32.target) == (amp.get_policy("float32"), None)
    loss = train_digits.make_loss(bf16.policy, model=bf16.model, target=bf16.target)
    image = jnp.zeros((bf16.batch, 8, 8, 1))
    params = jax.eval_shape(
        functools.partial(bf16.model.init, train=False), jax.random.key(0), image
    )["params"]
    batch = {"image": image, "label": jnp.zeros(bf16.batch, int)}
    products = [
        {v.aval.dtype.name for v in eqn.invars}
        for eqn in jax.make_jaxpr(loss)(params, {}, batch, jax.random.key(0)).eqns
        if eqn.primitive.name == "dot_general"
    ]
    # The last layer is too small to gain anything.
    assert len(products) == (1 if native else 4)
    assert all(dtypes == {"float32"} for dtypes in products)


F32, BF16, F16_SCALED, F16_ALONE, F32_SMALL, F16_SMALL_SCALED, F16_SMALL_ALONE = range(
    7
)


@pytest.mark.nightly
@pytest.mark.trains
def test_half_precision_is_as_accurate_as_float32():
    reference = trained(F32)["accuracy"]
    assert reference >= 0.97
    for run in (BF16, F16_SCALED):
        assert abs(trained(run)["accuracy"] - reference) <= 0.005


@pytest.mark.nightly
def test_the_mlp_is_as_accurate_in_bf16_for_this_device():
    accuracy = []
    for experiment in train_digits.on_this_device():
        with adam_mixes_dtypes():
            accuracy.append(train_digits.train(experiment).accuracy)
    assert accuracy[0] >= 0.96
    assert abs(accuracy[1] - accuracy[0]) <= 0.01


@pytest.mark.nightly
@pytest.mark.trains
def test_small_loss_trains_in_f16_only_with_loss_scaling():
    reference, scaled = trained(F32_SMALL), trained(F16_SMALL_SCALED)
    alone = trained(F16_SMALL_ALONE)
    assert scaled["accuracy"] >= 0.95
    assert abs(scaled["accuracy"] - reference["accuracy"]) <= 0.005
    # Every gradient is zero, so nothing moves but what weight decay takes. Only the
    # last bias, which the f32 logits alone read, is added in f32 and has a gradient.
    init = functools.partial(train_digits.CNN().init, train=False)
    image = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)
    variables = jax.eval_shape(init, jax.random.key(0), image)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    moving = (1 - np.array(alone["zero gradients"])) * parameters
    np.testing.assert_allclose(moving, 10, atol=0.1)
    assert alone["accuracy"] <= 0.2


@pytest.mark.nightly
@pytest.mark.trains
def test_loss_scale_grows_until_a_step_overflows():
    found = trained(F16_SCALED)
    assert found["largest scale"] > 2.0**16
    assert found["skipped"] > 0
    assert found["all finite"]
