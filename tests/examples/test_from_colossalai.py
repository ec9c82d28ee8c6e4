"""Colossal-AI's tutorial: its warm-up, its scaler, and what a skipped step leaves."""

import functools
import json
from pathlib import Path

import from_colossalai
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_amp as amp

ORACLE = json.loads(
    (Path(__file__).parents[1] / "oracle/scalers_other.json").read_text()
)
STEPS = from_colossalai.STEPS
WARMUP = 3
# Slow tests share their trainings: one process has them all (`--dist loadgroup`).
pytestmark = pytest.mark.xdist_group("from_colossalai")
# At the scale of the oracle, 2**16, the first gradients of a transformer overflow by
# themselves. Far from its floor and its cap a scaler does the same at any scale.
SMALLER = 2.0**8
F16_EPS = float(jnp.finfo(jnp.float16).eps)
F32_EPS = float(jnp.finfo(jnp.float32).eps)


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    # Adam of optax raises a float to its integer step count, which strict JAX refuses.
    with jax.numpy_dtype_promotion("standard"):
        yield


def rate_of_colossalai(step, total, warmup):
    """`LinearWarmupLR.get_lr`, colossalai/nn/lr_scheduler/linear.py."""
    if step < warmup:
        return (step + 1) / (warmup + 1) * from_colossalai.RATE
    return (total - step) / (total - warmup) * from_colossalai.RATE


@pytest.mark.breadth(2)
@pytest.mark.parametrize("total, warmup", [(300, 30), (10, 9), (5, 0)])
def test_warm_up_is_that_of_colossalai(total, warmup):
    schedule = from_colossalai.linear_warmup(from_colossalai.RATE, total, warmup)
    expected = [rate_of_colossalai(step, total, warmup) for step in range(total)]
    np.testing.assert_allclose(
        [schedule(step) for step in range(total)],
        expected,
        rtol=8 * F32_EPS,
        atol=8 * F32_EPS * from_colossalai.RATE,
    )


def scenario(sequence, hysteresis):
    """What Colossal-AI's DynamicGradScaler did, executed."""
    (found,) = [
        each
        for each in ORACLE["scenarios"]
        if (each["system"], each["sequence"]) == ("colossalai", sequence)
        and each["config"]["hysteresis"] == hysteresis
    ]
    return found


@functools.partial(nnx.jit, static_argnums=(0, 1, 2))
def made(seed, width, depth):
    return from_colossalai.make_model(seed, width, depth)


def first_model():
    return made(0, 16, 1)


@functools.cache
def overflowing():
    """A training whose images overflow where those of the oracle's trace did.

    It ends with what every step left: loss, rate, scale, and the bits of all that the
    step writes but the scale and its counters.
    """
    of_oracle = scenario("two_bad_apart", 2)
    config = dict(of_oracle["config"])
    config["initial_scale"] /= SMALLER
    recipe = from_colossalai.recipe_for("fp16_naive", **config)
    total = len(of_oracle["overflow"])
    tx = from_colossalai.make_optimizer(recipe, total, WARMUP)
    model, optimizer = recipe.init(tx, first_model())
    step, history = from_colossalai.make_train_step(recipe), []
    for number, overflows in enumerate(of_oracle["overflow"]):
        batch = dict(from_colossalai.batch_of(from_colossalai.digits()[0], number, 0))
        if overflows:
            batch["image"] = batch["image"].copy()
            batch["image"][0, 3, 3, 0] = np.inf
        before = written(model, optimizer)
        loss, rate = jax.device_get(step(model, optimizer, batch))
        scale = float(amp.metrics(optimizer)["scale"])
        changed = written(model, optimizer) != before
        history.append((float(loss), float(rate), scale, changed))
    return of_oracle, model, optimizer, history


def written(model, optimizer):
    inner = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"]["inner_state"]
    trees = (nnx.state(model, nnx.Param), inner)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trees)]


@pytest.mark.slow
def test_the_scale_backs_off_after_the_second_overflow_as_in_colossalai():
    of_oracle, _, _, history = overflowing()
    scales = [SMALLER * scale for _, _, scale, _ in history]
    assert scales == [scale for scale, *_ in of_oracle["trace"]]
    # The first overflow, and the second, which is the one that counts.
    assert scales[1] == scales[0] == 2 * scales[3]


@pytest.mark.slow
def test_a_skipped_step_leaves_everything_as_it_was():
    of_oracle, _, optimizer, history = overflowing()
    changed = [changed for *_, changed in history]
    assert changed == [not overflows for overflows in of_oracle["overflow"]]
    assert int(amp.metrics(optimizer)["skipped_total"]) == sum(of_oracle["overflow"])


@pytest.mark.slow
def test_the_warm_up_counts_the_steps_that_were_made():
    of_oracle, _, _, history = overflowing()
    total, made = len(history), 0
    expected = []
    for overflows in of_oracle["overflow"]:
        made += not overflows
        # A skipped step leaves the rate of the last one that was made.
        expected.append(rate_of_colossalai(made - 1, total, WARMUP))
    rates = [rate for _, rate, _, _ in history]
    np.testing.assert_allclose(rates, expected, rtol=16 * F32_EPS)
    # Two skipped steps among the first ones: it ends two steps later.
    assert np.argmax(rates) == WARMUP + 2


@pytest.mark.slow
def test_naive_parameters_are_stored_in_f16_and_those_of_norms_are_not():
    _, model, _, _ = overflowing()
    assert model.patches.kernel[...].dtype == jnp.float16
    assert model.blocks[0].up.kernel[...].dtype == jnp.float16
    assert model.blocks[0].norm1.scale[...].dtype == jnp.float32


@pytest.mark.slow
def test_the_loss_that_is_reported_is_that_of_f32_unscaled():
    _, _, _, history = overflowing()
    batch = from_colossalai.batch_of(from_colossalai.digits()[0], 0, 0)
    # Plain JAX. The same model, so the same dropout.
    logits = np.asarray(nnx.jit(lambda m, x: m(x))(first_model(), batch["image"]))
    logits = logits.astype(np.float64)
    log_sum = np.log(np.exp(logits).sum(axis=-1))
    expected = (log_sum - logits[np.arange(len(logits)), batch["label"]]).mean()
    np.testing.assert_allclose(history[0][0], expected, rtol=4 * F16_EPS)


@pytest.mark.slow
def test_training_leaves_the_model_that_it_was_given_alone():
    model = first_model()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    recipe = from_colossalai.recipe_for("float32")
    data, _ = from_colossalai.digits()
    batches = [from_colossalai.batch_of(data, step, 0) for step in range(2)]
    result = from_colossalai.train(recipe, batches, 2, 0, model=model)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    moved = nnx.to_pure_dict(nnx.state(result.model, nnx.Param))
    assert (moved["head"]["kernel"] != before["head"]["kernel"]).any()
    assert len(result.losses) == len(result.rates) == 2


OURS = {"initial_scale": "value"}


@pytest.mark.parametrize(
    "name, value",
    [
        ("initial_scale", 2.0**10),
        ("growth_factor", 4.0),
        ("backoff_factor", 0.25),
        ("growth_interval", 7),
        ("hysteresis", 3),
        ("min_scale", 2.0),
        ("max_scale", 2.0**17),
    ],
)
def test_every_parameter_of_the_scaler_reaches_it(name, value):
    option = f"--{name.replace('_', '-')}"
    recipes = from_colossalai.parse([option, str(value)]).recipes
    assert set(recipes) > set(from_colossalai.NAMES)
    for recipe in ("fp16", "fp16_apex", "fp16_naive"):
        found = getattr(recipes[recipe].loss_scale, OURS.get(name, name))
        assert float(found) == value
    assert not recipes["bf16"].loss_scale.dynamic
    asked = from_colossalai.parse(["--mixed-precision", "bf16", option, str(value)])
    assert asked.recipes["bf16"].loss_scale.dynamic


def trained(name, first=0, **scaler):
    recipe = from_colossalai.recipe_for(name, **scaler)
    data = from_colossalai.digits()[0]
    steps = range(first, STEPS)
    batches = (from_colossalai.batch_of(data, step, 0) for step in steps)
    return from_colossalai.train(recipe, batches, STEPS, model=made(0, 32, 2))


def far_too_large():
    """A training in f16 that begins at 2**32, and f32's that begins where it learns."""
    half = trained(
        "fp16_naive",
        initial_scale=from_colossalai.TOO_LARGE,
        growth_interval=from_colossalai.GROWTH_INTERVAL,
    )
    skipped = int(amp.metrics(half.optimizer)["skipped_total"])
    return half, trained("float32", first=skipped)


# Half precision that keeps f32 weights trains such a model in `test_vit_nnx.py`.
@pytest.mark.slow
def test_a_scale_that_is_far_too_large_delays_the_warm_up_and_nothing_else():
    half, f32 = far_too_large()
    skipped = int(amp.metrics(half.optimizer)["skipped_total"])
    # From 2**32 to 2**18 at the most, and one overflow that does not count.
    assert skipped >= 15
    warmup = STEPS // 10
    assert warmup + 15 <= np.argmax(half.rates) <= warmup + skipped
    assert np.isfinite(half.losses).all()
    # It is f32's of a run that begins with the batch after the skipped ones.
    assert f32.accuracy > 0.85
    # 597 images: three standard deviations of a share of 0.89 are 3.8 %.
    assert half.accuracy > f32.accuracy - 0.04
    assert half.losses[-20:].mean() < 1.3 * f32.losses[-20:].mean()
