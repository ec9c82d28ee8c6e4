"""Apex's opt levels: what they hold, and BatchNorm that is fine-tuned in eval mode."""

import functools

import from_apex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_digits import CNN

import jmp_amp as amp
from tests import h100
from tests.examples.tutorials import cnn_batch, cnn_variables

F16 = jnp.float16
F16_EPS = float(jnp.finfo(F16).eps)
# Slow tests share their trainings: one process has them all (`--dist loadgroup`).
pytestmark = pytest.mark.xdist_group("from_apex")


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    # Adam of optax raises a float to its integer step count, which strict JAX refuses.
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def recipe(level):
    return from_apex.recipe_for(level)


def bits(tree):
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path): leaf.tobytes() for path, leaf in leaves}


# The levels


def test_overrides_are_read_as_text_as_in_apex():
    options = from_apex.parse(
        ["--opt-level", "O2", "--keep-batchnorm-fp32", "False", "--loss-scale", "128.0"]
    )
    ((level, found),) = options.recipes.items()
    assert level == "O2" and found.keep_batchnorm_fp32 is False
    assert not found.loss_scale.dynamic and float(found.loss_scale.value) == 128
    params, _ = cnn_variables()
    assert found.cast_params(params)["BatchNorm_0"]["scale"].dtype == F16
    kept = recipe("O2").cast_params(params)
    assert kept["BatchNorm_0"]["scale"].dtype == jnp.float32
    assert kept["Conv_0"]["kernel"].dtype == F16


def test_dynamic_levels_have_the_scale_of_apex_and_others_have_none():
    scales = {level: recipe(level).loss_scale for level in from_apex.LEVELS}
    assert [scales[level].dynamic for level in from_apex.LEVELS] == [0, 1, 1, 0]
    assert [float(scales[level].value) for level in from_apex.LEVELS] == [
        *(1, 2.0**16, 2.0**16, 1),
    ]


@pytest.mark.slow
def test_what_is_stored_and_saved_falls_from_level_to_level():
    found = [from_apex.memory_of(recipe(level)) for level in from_apex.LEVELS]
    assert found[0].saved > found[1].saved >= found[2].saved >= found[3].saved
    assert found[0].stored == found[1].stored >= found[2].stored > found[3].stored
    params, _ = cnn_variables()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    # A weight and two moments in f32; then f16 and what it lacks of f32; then f16. Of
    # the rest, norms and scalars, there is little.
    for memory, each in zip(found, (12, 12, 12, 10), strict=True):
        np.testing.assert_allclose(memory.stored, each * count, rtol=5e-3)


@h100.needs_compiler
@pytest.mark.slow
def test_memory_on_an_h100_falls_from_level_to_level():
    compiler = h100.compile_for_gpu
    found = [from_apex.memory_of(recipe(e), compiler) for e in from_apex.LEVELS]
    total = [memory.stored + memory.temporary for memory in found]
    assert total[0] > total[1] >= total[2] >= total[3]
    # Half of it, but for the workspace that both have.
    workspace = h100.CUBLAS_WORKSPACE_BYTES
    assert found[1].temporary - workspace < 0.6 * (found[0].temporary - workspace)


# Fine-tuning in eval mode


STEPS = 25


@functools.cache
def tuned(begins, head_alone=False):
    """O2, some steps on from parameters that are f32 or stored in f16."""
    level, (params, batch_stats) = recipe("O2"), cnn_variables()
    if begins == "f16":
        params = level.cast_params(params)
    with jax.numpy_dtype_promotion("standard"):
        return from_apex.fine_tune(
            level, params, batch_stats, head_alone=head_alone, steps=STEPS
        )


@pytest.mark.slow
@pytest.mark.parametrize("begins", ["f32", "f16"])
def test_fine_tuning_in_eval_mode_learns_and_leaves_the_statistics(begins):
    params, batch_stats = cnn_variables()
    found = tuned(begins)
    assert bits(found.state.batch_stats) == bits(batch_stats)
    assert found.losses[-3:].mean() < 0.5 * found.losses[0]
    assert int(amp.metrics(found.state.opt_state)["applied"]) == STEPS
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, found.state.params)
    assert dtypes["Conv_0"]["kernel"] == dtypes["Dense_1"]["bias"] == F16
    # Gradients went through BatchNorm, to what is before it and to its own.
    stored, start = bits(found.state.params), bits(recipe("O2").cast_params(params))
    for each in ("['Conv_0']['kernel']", "['BatchNorm_0']['scale']"):
        assert stored[each] != start[each]


@pytest.mark.slow
def test_tuning_the_head_alone_leaves_all_other_parameters():
    params, batch_stats = cnn_variables()
    found = tuned("f32", head_alone=True)
    stored, start = bits(found.state.params), bits(recipe("O2").cast_params(params))
    moved = {path for path in start if stored[path] != start[path]}
    assert moved == {"['Dense_1']['kernel']", "['Dense_1']['bias']"}
    assert bits(found.state.batch_stats) == bits(batch_stats)


@pytest.mark.slow
def test_masters_begin_with_the_digits_of_what_was_exported():
    level, (params, _) = recipe("O2"), cnn_variables()
    tx, _ = from_apex.fine_tuner(level, False)
    exported = jax.jit(lambda params: level.export_params(*level.init(tx, params)))
    exact, rounded = exported(params), exported(level.cast_params(params))

    def error(found):
        off = jax.tree.map(lambda a, b: np.abs(a - b).max(), found, params)
        return max(map(float, jax.tree.leaves(off)))

    assert error(exact) < 1e-3 * error(rounded)


@pytest.mark.parametrize("level", ["O2", pytest.param("O3", marks=pytest.mark.slow)])
def test_gradients_through_batch_norm_in_eval_mode_are_those_of_f32(level):
    params, batch_stats = cnn_variables()
    batch = cnn_batch(0)

    def plain_loss(params):
        logits = CNN().apply(
            {"params": params, "batch_stats": batch_stats}, batch["image"], train=False
        )
        label = batch["label"][..., None]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), label, axis=-1).mean()

    expected = jax.jit(jax.grad(plain_loss))(params)
    found_recipe = recipe(level)
    gradient = amp.value_and_grad(
        found_recipe.autocast(from_apex.loss_of), has_aux=True
    )
    tx = found_recipe.wrap(optax.sgd(0.1))
    stored, opt_state = jax.jit(lambda params: found_recipe.init(tx, params))(params)
    (_, _), grads = from_apex.jitted(gradient)(
        stored, batch_stats, batch, None, loss_scale=opt_state
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}

    def norm(tree):
        return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))

    for module in expected:
        # A relu or a maximum that rounding flips weighs more than all rounding: f32
        # with nothing but its parameters rounded is off by 10 eps. The head has none.
        bound = (2 if module == "Dense_1" else 40) * F16_EPS
        wrong = norm(jax.tree.map(np.subtract, grads[module], expected[module]))
        assert 0 < wrong <= bound * norm(expected[module]), module


@functools.cache
def trained(level):
    """The figures of a training, and of its fine-tuning where that goes on from it."""

    with jax.numpy_dtype_promotion("standard"):
        found = from_apex.train(recipe(level))
        params, batch_stats, opt_state = found.state
        exported = recipe(level).export_params(params, opt_state)
        tuned = {
            how: from_apex.fine_tune(
                recipe(level), exported, batch_stats, head_alone=how == "head"
            )
            for how in TUNED.get(level, ())
        }
    statistics = bits(found.state.batch_stats)
    return {
        "accuracy": found.accuracy,
        "loss": float(found.losses[-20:].mean()),
    } | {
        how: {
            "accuracy": each.accuracy,
            "fall": float(each.losses[-10:].mean() / each.losses[0]),
            "same statistics": bits(each.state.batch_stats) == statistics,
        }
        for how, each in tuned.items()
    }


TUNED = {"O0": ["all"], "O2": ["all", "head"]}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_levels_learn_as_f32_does(level):
    f32, half = trained("O0"), trained(level)
    assert f32["accuracy"] >= 0.95
    # 597 images: half a percent is three of them.
    assert half["accuracy"] >= f32["accuracy"] - 0.005
    # O3 has no masters, and loses what its updates are smaller than.
    assert half["loss"] / f32["loss"] < (1.2 if level == "O3" else 1.05)


@pytest.mark.slow
def test_fine_tuning_goes_on_from_a_training_in_eval_mode_as_in_f32():
    f32, half, head = trained("O0")["all"], trained("O2")["all"], trained("O2")["head"]
    assert f32["same statistics"] and half["same statistics"]
    assert f32["fall"] < 0.1 and half["fall"] < 0.1 and head["fall"] < 0.5
    # 597 images: two standard deviations of a share of 0.96 are 1.6 %.
    assert half["accuracy"] > f32["accuracy"] - 0.02
