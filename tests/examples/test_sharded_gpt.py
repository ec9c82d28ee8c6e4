"""A GPT cut up in every way trains as on one device, and moves half precision."""

from __future__ import annotations

import functools
import re
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import char_gpt
import chex
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
import sharded_gpt
from jax.experimental import topologies
from layouts import LAYOUTS, ONE_DEVICE
from sharded_gpt import Result, Trainer

import jmp_amp as amp
from tests import h100
from tests.measures import relative_error
from tests.scripts import refusal
from tests.training.test_processes import TIMEOUT, run_together
from tests.training.test_sharded_scaling import collectives, on_every_device, shards

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "sharded_gpt.py"
CONTEXT, ROWS, PIECES, STEPS = 16, 16, 4, 6
MODEL = char_gpt.Model(layers=8, width=32, heads=8, context=CONTEXT, dropout=0.0)
DEVICES = 8
HALF = {"bf16": jnp.bfloat16, "f16": jnp.float16}

# Optax raises a float to its integer step count, and adds f32 to half weights.
standard = functools.partial(jax.numpy_dtype_promotion, "standard")


def slow(*values: Any) -> Any:
    # One process for a layout (`--dist loadgroup`): its programs are compiled once.
    group = pytest.mark.xdist_group(f"sharded {values[0]}")
    return pytest.param(*values, marks=[pytest.mark.slow, group])


CUT_UP = [name for name in LAYOUTS if name != ONE_DEVICE]
# Compiling a layout takes seven seconds. Each way to cut is in one of these, alone or
# with another. All tests of a layout share one compilation.
F16_NAMES = (
    *("fsdp", "pipeline", "zero1_tensor"),
    *("pipeline_zero1", "pipeline_data_tensor"),
)
F16_RUNS = ["fsdp", *map(slow, F16_NAMES[1:])]
RUNS = [
    # Every layout trains.
    *(slow(name, "f16") for name in CUT_UP),
    slow("fsdp_tensor", "bf16"),
    slow("pipeline_data_tensor", "float32"),
    slow("fsdp_tensor", "bf16_weights"),
    slow("pipeline_zero1", "f16_weights"),
]


@functools.cache
def trainer_of(name: str, precision: str) -> Trainer:
    return sharded_gpt.make_trainer(name, precision, model=MODEL, pieces=PIECES)


@functools.cache
def beginning(precision: str) -> Any:
    with standard():
        return jax.device_get(trainer_of(ONE_DEVICE, precision).begin(0))


def placed(trainer: Trainer, state: Any) -> Any:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, trainer.like)
    return jax.device_put(state, shardings)


def begun(name: str, precision: str) -> tuple[Trainer, Any]:
    """A trainer whose first state is that of one device: compiled once for all."""
    trainer = trainer_of(name, precision)
    state = beginning(precision)
    return trainer._replace(begin=lambda seed: placed(trainer, state)), state


@functools.cache
def trained(name: str, precision: str, steps: int = STEPS, **options: Any) -> Result:
    trainer, _ = begun(name, precision)
    with standard():
        return sharded_gpt.train(trainer, steps, rows=ROWS, context=CONTEXT, **options)


def batch_of(step: int) -> dict[str, np.ndarray]:
    return sharded_gpt.batch_of(step, 0, ROWS, CONTEXT)


def stepped(trainer: Trainer, state: Any, batch: Any) -> Any:
    with standard():
        return trainer.step(*state, sharded_gpt.put(batch, trainer.rows))


def tolerance(precision: str) -> float:
    """How far the losses of two layouts may be apart, relatively.

    Two layouts add up and round in another order. That moves a logit by some eps of the
    half dtype, to either side, and a loss is the mean of 256 of them: eps / 4 is four
    times eps / sqrt(256). In f32 nothing is averaged away by chance, so 16 eps.
    """
    if precision == "float32":
        return 16 * float(jnp.finfo(jnp.float32).eps)
    return float(jnp.finfo(HALF[precision.removesuffix("_weights")]).eps) / 4


# The mathematics


def plain_loss(params: Any, batch: Any) -> jax.Array:
    """The loss of `char_gpt.Model` as it is, which knows of no layout."""
    logits: Any = MODEL.apply({"params": params}, batch["tokens"][:, :-1])
    targets = batch["tokens"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses * batch["weight"][:, None])


@functools.cache
def plain_gradient() -> tuple[Any, Any]:
    # Weights that differ, so that a text that stands in for another is seen.
    return jax.device_get(
        jax.jit(jax.value_and_grad(plain_loss))(weights(), weighted_batch())
    )


def weights() -> Any:
    return beginning("f16")[0]  # stored in f32 too


def weighted_batch() -> dict[str, np.ndarray]:
    weight = np.linspace(0.5, 1.5, ROWS, dtype=np.float32)
    return batch_of(0) | {"weight": weight}


@functools.cache
def gradient_of(name: str, policy: str) -> tuple[Any, Any]:
    """The loss of a layout and its gradient, without a loss scale."""
    mesh = layouts.mesh_of(name, jax.devices())
    loss_fn = layouts.make_loss(MODEL, name, mesh, PIECES)
    if policy != "float32":
        loss_fn = amp.autocast(loss_fn, policy)
    specs = layouts.specs_of(weights(), LAYOUTS[name].parameters)
    params = jax.device_put(weights(), layouts.placed(specs, mesh))
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    options: Any = {"xla_allow_excess_precision": False}
    gradient = jax.jit(jax.value_and_grad(loss_fn), compiler_options=options)
    with jax.set_mesh(mesh):
        return jax.device_get(gradient(params, sharded_gpt.put(weighted_batch(), rows)))


# ZeRO's first stage cuts the state of the optimizer alone: its gradients are those of
# the layout without it.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["pipeline_data_tensor", *map(slow, (ONE_DEVICE, "fsdp_tensor"))]
)
def test_gradients_in_f32_are_those_of_the_model_that_knows_of_no_layout(name):
    loss, grads = gradient_of(name, "float32")
    expected_loss, expected = plain_gradient()
    eps = float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(loss, expected_loss, rtol=8 * eps)
    # Every parameter for itself: a wrong one is not to hide behind a large one. Keys
    # have biases that no loss depends on; what they have for a gradient is rounding.
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for (path, leaf), like in zip(
        jax.tree_util.tree_leaves_with_path(grads),
        jax.tree.leaves(expected),
        strict=True,
    ):
        bound = 64 * eps * max(np.abs(like).max(), largest / 100)
        np.testing.assert_allclose(leaf, like, rtol=0, atol=bound, err_msg=str(path))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        slow("fsdp_tensor", "mixed_float16"),
        slow("pipeline", "mixed_float16"),
        slow("pipeline_data_tensor", "mixed_bfloat16"),
    ],
)
def test_gradients_in_half_are_as_accurate_as_those_of_one_device(name, policy):
    _, expected = plain_gradient()
    error = relative_error(gradient_of(name, policy)[1], expected)
    alone = relative_error(gradient_of(ONE_DEVICE, policy)[1], expected)
    # Sums over devices are rounded once more, at half an eps each.
    eps = float(jnp.finfo(amp.get_policy(policy).compute_dtype).eps)
    assert error <= alone + eps
    assert error <= 4 * eps


# Whole trainings


class Learnt(NamedTuple):
    losses: list[float]
    skips: int
    scale: float
    devices: int


@functools.cache
def learnt(name: str, precision: str) -> Learnt:
    found = trained(name, precision)
    devices = int(np.prod(list(found.mesh.values())))
    return Learnt(found.losses, found.skips, found.scale, devices)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_losses_are_those_of_one_device(name, precision):
    found, alone = learnt(name, precision), learnt(ONE_DEVICE, precision)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=tolerance(precision))
    assert alone.losses[-1] < 0.9 * alone.losses[0]
    assert (found.skips, found.scale) == (alone.skips, alone.scale)
    assert found.devices == DEVICES


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "f16", "bf16_weights", "f16_weights"])
def test_half_precision_trains_as_f32_does(precision):
    expected = learnt(ONE_DEVICE, "float32").losses
    # Here every logit is rounded, not in another order but at all: eps and not eps / 4.
    rtol = 4 * tolerance(precision)
    np.testing.assert_allclose(
        learnt(ONE_DEVICE, precision).losses, expected, rtol=rtol
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "pipeline_data_tensor"])
def test_what_begins_on_all_devices_is_what_begins_on_one(name):
    trainer = trainer_of(name, "f16")
    with standard():
        found = trainer.begin(0)
    for leaf, like in zip(
        jax.tree.leaves(found), jax.tree.leaves(trainer.like), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    # `jit` fuses the scaling of the random numbers in another way on each mesh.
    eps = float(jnp.finfo(jnp.float32).eps)
    chex.assert_trees_all_close(
        jax.device_get(found), beginning("f16"), rtol=4 * eps, atol=eps
    )


# Overflows


def with_a_large_feature(state: Any) -> Any:
    """A state in which one row of one kernel has a gradient that overflows f16.

    What that row is multiplied by is a feature of 1e4, and the row itself is zero: no
    activation, no loss and no other gradient depends on the feature.
    """
    params, opt_state = jax.tree.map(np.copy, state)
    params["layers"]["LayerNorm_1"]["scale"][5, 29] = 1e4
    params["layers"]["Dense_0"]["kernel"][5, 29] = 0.0
    return params, opt_state


def bad(kind: str, state: Any) -> tuple[Any, dict[str, np.ndarray]]:
    batch = batch_of(0)
    if kind == "infinite weight":
        return state, sharded_gpt.poisoned(batch)
    if kind == "one shard":
        return with_a_large_feature(state), batch
    # The loss stays finite: half precision overflows on the way back.
    batch["weight"][-1] = 1e9
    return state, batch


BAD = ["infinite weight", "large weight", "one shard"]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", F16_RUNS)
def test_an_overflow_on_one_device_changes_nothing_but_the_scale_of_all(name, kind):
    trainer, start = begun(name, "f16")
    state, batch = bad(kind, start)
    params, opt_state = placed(trainer, state)
    before = shards((params, opt_state.inner_state))
    params, opt_state, loss = stepped(trainer, (params, opt_state), batch)
    assert np.isfinite(loss) == (kind != "infinite weight")
    assert shards((params, opt_state.inner_state)) == before
    scale = amp.loss_scale_of(opt_state).value
    assert on_every_device(scale) == [2.0**15] * DEVICES
    assert on_every_device(amp.last_step_finite(opt_state)) == [False] * DEVICES


@pytest.mark.slow
@pytest.mark.parametrize("name", F16_RUNS)
def test_a_run_goes_on_after_an_overflow(name):
    trainer, _ = begun(name, "f16")
    result = trained(name, "f16", 4, poison=1)
    assert (result.skips, result.scale) == (1, 2.0**15)
    assert np.isfinite(result.losses).tolist() == [True, False, True, True]
    alone = trained(ONE_DEVICE, "f16", 4, poison=1)
    assert sharded_gpt.to_one_device(result, alone) <= tolerance("f16")
    # The third step saw what the first one had written.
    clean = trained(name, "f16")
    assert result.losses[0] == clean.losses[0] and result.losses[2] > clean.losses[2]
    # It is compiled once, whatever happens.
    assert trainer.step._cache_size() == 1


@pytest.mark.slow
def test_the_large_feature_overflows_in_one_stage_and_in_one_shard_alone():
    params, _ = with_a_large_feature(beginning("f16"))
    mesh = layouts.mesh_of(ONE_DEVICE, jax.devices())
    loss_fn = amp.autocast(
        layouts.make_loss(MODEL, ONE_DEVICE, mesh, PIECES), "mixed_float16"
    )
    gradient = amp.value_and_grad(loss_fn)
    scale = amp.static_loss_scale(2.0**16)
    options: Any = {"xla_allow_excess_precision": False}
    step = jax.jit(
        lambda params, batch: gradient(params, batch, loss_scale=scale),
        compiler_options=options,
    )
    with jax.set_mesh(mesh):
        loss, grads = step(params, batch_of(0))
    assert np.isfinite(loss)
    kernel = np.isfinite(grads["layers"]["Dense_0"].pop("kernel"))
    assert amp.all_finite(grads)
    layer, row, _ = np.nonzero(~kernel)
    assert set(layer) == {5} and set(row) == {29}


# What a device holds


def share(leaf: Any) -> float:
    """The part of an array that one device holds."""
    return np.prod(leaf.sharding.shard_shape(leaf.shape)) / leaf.size


def shares(tree: Any) -> tuple[float, float]:
    """Of a tree's matrices the largest part that a device holds, and of all bytes."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
    large = [share(leaf) for leaf in leaves if leaf.size > 1024]
    held = sum(share(leaf) * leaf.size for leaf in leaves)
    return max(large), held / sum(leaf.size for leaf in leaves)


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "precision", "parameters", "moments"),
    [
        ("data", "f16", 1, 1),
        ("zero1", "f16", 1, 1 / 8),
        ("zero1", "bf16_weights", 1, 1 / 8),
        ("fsdp", "f16", 1 / 8, 1 / 8),
        ("tensor", "bf16_weights", 1 / 8, 1 / 8),
        ("pipeline", "f16", 1 / 8, 1 / 8),
        ("zero1_tensor", "f16", 1 / 2, 1 / 8),
        ("fsdp_tensor", "bf16_weights", 1 / 8, 1 / 8),
        ("pipeline_data", "bf16_weights", 1 / 4, 1 / 4),
        ("pipeline_zero1", "f16", 1 / 4, 1 / 8),
        ("pipeline_data_tensor", "f16", 1 / 2, 1 / 2),
    ],
)
def test_a_device_holds_its_part_of_what_the_layout_cuts(
    name, precision, parameters, moments
):
    params, opt_state = trainer_of(name, precision).like
    assert shares(params)[0] == parameters
    assert shares(opt_state)[0] == moments
    # Biases and norms are small, and some of them are not cut.
    assert shares(params)[1] <= parameters + 0.03
    assert shares(opt_state)[1] <= moments + 0.03


@pytest.mark.parametrize("name", F16_RUNS)
def test_the_arrays_of_a_training_lie_as_the_layout_says(name):
    result = trained(name, "f16")
    like = trainer_of(name, "f16").like
    arrays = result.params, result.opt_state
    for leaf, wanted in zip(
        jax.tree.leaves(arrays), jax.tree.leaves(like), strict=True
    ):
        parts = {shard.data.shape for shard in leaf.addressable_shards}
        assert parts == {wanted.sharding.shard_shape(wanted.shape)}
        assert len(leaf.addressable_shards) == DEVICES
        assert leaf.dtype == wanted.dtype
    assert result.bytes_held == sum(
        share(leaf) * leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like)
    )


# Checkpoints


def assert_same(found: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_dtypes(found, expected)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((found, expected)))


MOVES = [
    ("fsdp", "pipeline", "f16"),
    slow("pipeline_data_tensor", ONE_DEVICE, "f16"),
    slow("pipeline_zero1", ONE_DEVICE, "f16_weights"),
    slow("fsdp_tensor", "fsdp_tensor", "bf16_weights"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "precision"), MOVES)
def test_a_checkpoint_of_one_mesh_goes_on_on_another(
    first, second, precision, tmp_path
):
    # With a skipped step before and with one after, so that the scale has moved.
    whole = trained(first, precision, 6, poison=1)
    half = trained(first, precision, 3, poison=1, checkpoint=tmp_path / "state")
    with standard():
        step, state = sharded_gpt.restore(
            trainer_of(second, precision), tmp_path / "state"
        )
    assert step == 3
    assert_same(state, (half.params, half.opt_state))
    for leaf, like in zip(
        jax.tree.leaves(state),
        jax.tree.leaves(trainer_of(second, precision).like),
        strict=True,
    ):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    result = trained(second, precision, 3, resume=tmp_path / "state")
    if first == second:
        assert result.losses == whole.losses[3:]
        assert_same((result.params, result.opt_state), (whole.params, whole.opt_state))
    np.testing.assert_allclose(
        result.losses, whole.losses[3:], rtol=tolerance(precision)
    )
    assert (result.skips, result.scale) == (whole.skips, whole.scale)


# What eight H100s would send each other

WIDE = char_gpt.Model(layers=8, width=512, heads=8, context=64, dropout=0.0)
# What one layer has, and what all have besides.
KERNELS = {"attention": 512 * 512, "feed-forward": 512 * 2048}
# Of the attention and of the feed-forward part, in the body of the loop over layers.
BIASES = 4 * 512 + 2048 + 512
TABLES = {"token": len(char_gpt.vocabulary()) * 512, "position": 64 * 512}
LARGE = 4096  # elements; norms and biases are smaller
TO_GATHER = {*KERNELS.values(), *TABLES.values()}

Moved = dict[tuple[str, str], list[int]]


def trained_on(devices: Any, *chosen: Any) -> Any:
    """The step of a layout, a precision and a dtype to reduce in, lowered."""
    name, precision, reduce = chosen
    with standard():
        trainer = sharded_gpt.make_trainer(
            name, precision, model=WIDE, devices=devices, reduce_dtype=reduce
        )
        batch = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=trainer.rows
            ),
            sharded_gpt.batch_of(0, 0, 64, WIDE.context),
        )
        return trainer.step.lower(*trainer.like, batch)


@functools.cache
def moved(name: str, precision: str, reduce: str | None = None) -> Moved:
    """The elements of the large arrays of floats that a step sends, by (how, dtype).

    Those of the body of a loop are counted once.
    """
    h100.skip_without_compiler()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=h100.H100, topology="1x1x8"
    )
    lowered = trained_on(topology.devices, name, precision, reduce)
    # Without Triton it takes less time.
    program = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    return {tuple(key.split()): sizes for key, sizes in sent(program).items()}


def sent(program: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for how, arrays in collectives(program.as_text()).elements():
        for dtype, sizes in re.findall(r"\b(b?f\d+)\[([\d,]*)\]", " ".join(arrays)):
            elements = int(np.prod([int(size) for size in sizes.split(",") if size]))
            if elements >= LARGE:
                found.setdefault(f"{how} {dtype}", []).append(elements)
    return found


def of_dtype(found: Moved, dtype: str) -> dict[str, list[int]]:
    return {how: sizes for (how, each), sizes in found.items() if each == dtype}


# `test_sharded_weights.py` has smaller programs in the default suite.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"), [("fsdp", "bf16"), ("fsdp_tensor", "f16_weights")]
)
def test_fsdp_gathers_parameters_and_scatters_gradients_in_half(name, precision):
    half = precision.removesuffix("_weights")
    found = moved(name, precision)
    tensor, data = (2, 4) if name == "fsdp_tensor" else (1, 8)
    # What many elements read has gradients that are summed in f32.
    summed = sum(found.pop(("all-reduce", "f32")))
    assert TABLES["position"] <= summed <= TABLES["position"] + 1.05 * BIASES
    # Rows of tables are looked up and added in f32, and so are their gradients.
    wide = {n for (_, d), sizes in found.items() for n in sizes if d != half}
    tables = [size // tensor for size in TABLES.values()]
    assert wide <= {*tables, TABLES["token"] // DEVICES, TABLES["position"]}
    gathered, scattered = found["all-gather", half], found["reduce-scatter", half]
    # For the forward pass and again for the backward pass.
    for elements in KERNELS.values():
        assert gathered.count(elements // tensor) >= 2
        assert elements // tensor // data in scattered
    assert TABLES["token"] // tensor in gathered
    assert TABLES["token"] // DEVICES in scattered


@pytest.mark.slow
def test_data_parallelism_reduces_gradients_in_half():
    found = moved("data", "bf16")
    assert set(found) == {("all-reduce", "bf16"), ("all-reduce", "f32")}
    one_layer = 4 * KERNELS["attention"] + 2 * KERNELS["feed-forward"]
    head = TABLES["token"]
    # The gradient of a table is summed in f32, of all its rows: looked up, or read by
    # all sequences. So are those of biases.
    wide = sum(TABLES.values()) + BIASES
    assert wide <= sum(found["all-reduce", "f32"]) <= 1.05 * wide
    least = one_layer + head
    assert least <= sum(found["all-reduce", "bf16"]) <= 1.01 * least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "stored"),
    # Weights are gathered as they are stored: the policy `bf16` stores f32.
    [("bf16", "f32"), ("bf16_weights", "bf16")],
)
def test_zero1_scatters_gradients_in_half_and_gathers_weights_as_they_are_stored(
    precision, stored
):
    found = moved("zero1", precision)
    reduced = {dtype: n for (how, dtype), n in found.items() if how == "reduce-scatter"}
    # The gradient of a lookup is summed in f32, that of the head's product is not.
    assert set(reduced) == {"bf16", "f32"}
    assert reduced["f32"] == [TABLES["token"] // DEVICES]
    gathered = found["all-gather", stored]
    for elements in KERNELS.values():
        assert 8 * elements in gathered
    if stored != "f32":
        # Norms have f32 parameters, eight layers of 512.
        f32 = of_dtype(found, "f32")
        # What many elements read has gradients that are summed in f32.
        summed = sum(f32.pop("all-reduce"))
        assert TABLES["position"] <= summed <= TABLES["position"] + 1.05 * BIASES
        assert set(f32) <= {"all-gather", "reduce-scatter"}
        assert set(f32.get("all-gather", [])) <= {8 * 512}


@pytest.mark.slow
def test_tensor_parallelism_adds_up_activations_in_half():
    found = moved("tensor", "f16")
    activations = 64 * 64 * 512
    # After attention and after the feed-forward part, forward and backward; and the
    # first of them again, for the backward pass.
    assert found["all-reduce", "f16"].count(activations) == 5
    # The table of places is added to rows of a table in f32.
    assert of_dtype(found, "f32") == {"all-gather": [TABLES["position"]]}


@pytest.mark.slow
def test_stages_hand_on_half_precision():
    found = moved("pipeline_data_tensor", "bf16")
    # Tables alone are gathered in f32, and their gradients are summed in f32.
    f32 = of_dtype(found, "f32")
    assert f32.pop("all-gather") == [TABLES["token"], TABLES["position"]]
    # So is that of the rows that all stages are fed with.
    wide = sum(TABLES.values()) + BIASES + 32 * 64 * 512
    assert wide <= sum(f32.pop("all-reduce")) <= 1.05 * wide and not f32
    # From stage to stage, there and back.
    assert found["collective-permute", "bf16"].count(32 // 8 * 64 * 512) >= 2


# The command


def rows_of(printed: str) -> dict[str, list[str]]:
    """The last columns of the table by layout: losses, difference, skips, scale, MB."""
    lines = [line.strip() for line in printed.splitlines()]
    found = {name: [x for x in lines if x.startswith(f"{name} ")] for name in LAYOUTS}
    return {name: row[-1].split()[-6:] for name, row in found.items() if row}


@pytest.mark.slow
def test_a_few_steps_print_a_table(capsys):
    with standard():
        sharded_gpt.main(
            [
                "--layout",
                ONE_DEVICE,
                *"--precision float32 --steps 2 --poison 1".split(),
            ]
        )
    ((name, row),) = rows_of(capsys.readouterr().out).items()
    first, last, difference, skips, scale, size = row
    assert name == ONE_DEVICE
    assert abs(float(first) - np.log(len(char_gpt.vocabulary()))) < 1
    assert (last, difference, skips, scale) == ("inf", "0.0e+00", "1", "2**0")
    assert size.endswith("MB")


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--layout", "fsdb"],
            "--layout fsdb: there is none of this name. Did you mean 'fsdp'?",
        ),
        (
            ["--precision", "fp16"],
            "--precision fp16: there is none of this name. Did you mean 'f16'?",
        ),
        (["--steps", "0"], "--steps 0: use a number of at least 1"),
        (
            ["--layout", "data", "--batch", "12"],
            "--batch 12: the layout data cuts a batch into 8 parts. Use a multiple",
        ),
        (
            ["--layout", "pipeline_data", "--batch", "8"],
            "--batch 8: the layout pipeline_data cuts a batch into 16 parts.",
        ),
        (["--devices", "16"], "--devices 16: there are 8. Use --devices 8, or"),
        (
            ["--layout", "pipeline_data", "--devices", "6"],
            "--layout pipeline_data: 6 devices cannot be cut into groups of 4. Use",
        ),
        (
            ["--layout", "pipeline", "--devices", "3"],
            "--layout pipeline: embedding/embedding has a dimension of 64, which "
            "cannot be cut into 3 equal parts. Use other --devices.",
        ),
        (["--checkpoint", "new"], "--checkpoint: say which --layout it is for"),
        (
            ["--layout", "fsdp", "--checkpoint", "."],
            "--checkpoint .: exists already. Name a new folder.",
        ),
        (["--resume", "nowhere"], "--resume nowhere: there is no checkpoint. Write"),
        (["--processes", "3"], "--devices 8: 3 processes cannot have the same number"),
        (["--process", "1"], "--process 1: with --processes 1 they are numbered from"),
        (["--processes", "2"], "--processes 2: they have to find each other. Give all"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, message, capsys):
    written = refusal(capsys, lambda: sharded_gpt.main(arguments))
    assert f": error: {message}" in written
    assert written.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ([], sharded_gpt.DEFAULT),
        (["--full"], CUT_UP),
        (["--full", "--layout", "data"], ["data"]),
    ],
)
def test_options_choose_layouts_beside_one_device(options, chosen, monkeypatch, capsys):
    def stop(options: Any) -> None:
        raise ValueError(", ".join(options.layout))

    monkeypatch.setattr(sharded_gpt, "make_trainers", stop)
    with pytest.raises(SystemExit):
        sharded_gpt.main(options)
    assert capsys.readouterr().err.endswith(f"{', '.join([ONE_DEVICE, *chosen])}\n")


# Two processes


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_two_processes_train_as_one_does_which_goes_on(tmp_path, capsys):
    folder = str(tmp_path / "state")
    # Each process holds, sends and writes a part of every array.
    name, steps = "fsdp", ["--steps", "3", "--poison", "1"]

    def together(*options: str) -> str:
        # See test_processes.py: kept while the coordinator listens on it.
        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{reserved.getsockname()[1]}"
            worker = [sys.executable, str(SCRIPT), "--processes", "2"]
            worker += ["--coordinator", address, *options]
            commands = [[*worker, "--process", str(number)] for number in range(2)]
            return run_together(commands, 2 * TIMEOUT)[0]

    rows = rows_of(together(*steps, "--layout", name, "--checkpoint", folder))
    both, alone = rows[name], rows[ONE_DEVICE]
    assert both[3:5] == alone[3:5] == ["1", "2**15"]
    for found, expected in zip(both[:2], alone[:2], strict=True):
        assert float(found) == pytest.approx(float(expected), tolerance("f16"))
    assert float(both[2]) <= tolerance("f16")
    # What two processes wrote, one reads, and goes on with it on one device.
    with standard():
        sharded_gpt.main(["--layout", ONE_DEVICE, "--steps", "2", "--resume", folder])
    (row,) = rows_of(capsys.readouterr().out).values()
    assert float(row[1]) < float(row[0]) < float(both[0])
    assert row[3:5] == ["1", "2**15"]


@pytest.mark.slow
def test_gradients_are_scattered_in_f32_on_request_and_weights_gathered_as_before():
    before, after = (moved("fsdp", "bf16", reduce) for reduce in (None, "float32"))
    assert ("reduce-scatter", "bf16") in before
    assert {dtype for how, dtype in after if how != "all-gather"} == {"f32"}
    gathers = [
        {key: sizes for key, sizes in found.items() if key[0] == "all-gather"}
        for found in (before, after)
    ]
    assert gathers[0] == gathers[1]


def test_the_command_takes_the_dtype_to_reduce_in():
    options = sharded_gpt.make_parser().parse_args(["--reduce", "float32"])
    assert sharded_gpt.recipe_of("bf16", options.reduce).policy.reduce_dtype == "f4"
    assert sharded_gpt.recipe_of("bf16").policy.reduce_dtype is None
