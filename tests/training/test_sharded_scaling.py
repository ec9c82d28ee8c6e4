"""Loss scaling over eight devices: one step, one scale, however the arrays are cut up.

Under `jit` the program sees whole arrays, so nothing has to be asked for. Under
`shard_map`, `pmap` and `vmap` a program sees one part, and `axis_name` says with which
others it has to agree.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp
from tests import h100

# Also imported by the processes of `test_processes.py`, which have no device yet then:
# no array of JAX is made while this module is imported.

SCALE = 2.0**12
GROWTH_INTERVAL = 3
ROWS, FEATURES, HIDDEN = 32, 8, 16
BAD_ROW = 29  # of the last device but one; in two processes, of the second
EPS = float(jnp.finfo(jnp.float16).eps)

# eps keeps an update from depending on the last bits of a gradient near zero.
ADAM = optax.adam(0.1, eps=0.1)


class Layout(NamedTuple):
    """How the parameters and the batch lie on a mesh."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    specs: dict[str, P]
    batch: P


WHOLE = {"w1": P(), "b1": P(), "w2": P(), "b2": P()}
CUT = {"w1": P("data"), "b1": P("data"), "w2": P("data"), "b2": P("data")}
TENSOR = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()}
MIXED = {
    "w1": P("data", "model"),
    "b1": P("model"),
    "w2": P("model", "data"),
    "b2": P("data"),
}
ONE = Layout((1,), ("data",), WHOLE, P())
LAYOUTS = {
    "replicated": Layout((8,), ("data",), WHOLE, P()),
    "data parallel": Layout((8,), ("data",), WHOLE, P("data")),
    "fsdp": Layout((8,), ("data",), CUT, P("data")),
    "tensor parallel": Layout((4, 2), ("data", "model"), TENSOR, P("data")),
    "mixed": Layout((4, 2), ("data", "model"), MIXED, P("data")),
}


def parameters() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).normal
    w1 = draw(size=(FEATURES, HIDDEN)) / math.sqrt(FEATURES)
    w2 = draw(size=(HIDDEN, FEATURES)) / math.sqrt(HIDDEN)
    b1, b2 = np.zeros(HIDDEN), np.zeros(FEATURES)
    whole = {"w1": w1, "b1": b1, "w2": w2, "b2": b2}
    return {name: leaf.astype(np.float32) for name, leaf in whole.items()}


def good_batch(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1 + seed).normal
    names = ("x", "y")
    return {n: draw(size=(ROWS, FEATURES)).astype(np.float32) for n in names}


# An inf saturates the activations, so that the loss is finite; the last one overflows
# in the backward pass in half precision only.
BAD = {"nan": ("x", math.nan), "inf": ("x", math.inf), "overflow": ("y", 1e9)}


def bad_batch(kind: str = "nan", seed: int = 0) -> dict[str, np.ndarray]:
    batch = good_batch(seed)
    name, value = BAD[kind]
    batch[name][BAD_ROW, 2] = value
    return batch


def predict(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    return hidden @ params["w2"] + params["b2"][None]


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((predict(params, batch["x"]) - batch["y"]) ** 2)


def scaled_adam(axis_name: Any = None) -> optax.GradientTransformationExtraArgs:
    loss_scale = amp.dynamic_loss_scale(SCALE, growth_interval=GROWTH_INTERVAL)
    return amp.with_loss_scale(ADAM, loss_scale, axis_name=axis_name)


def half_step(tx: Any, loss: Callable[..., Any] = loss_fn) -> Callable[..., Any]:
    """Returns a training step in f16, with a loss scale unless `tx` is plain ADAM."""
    half = amp.autocast(loss, "mixed_float16")

    def step(params: Any, state: Any, batch: Any) -> Any:
        if tx is ADAM:
            value, grads = jax.value_and_grad(half)(params, batch)
        else:
            value, grads = amp.value_and_grad(half)(params, batch, loss_scale=state)
        params, state = updated(tx, params, state, grads)
        return params, state, value

    return step


def updated(tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    # Adam of optax raises a float to its integer step count.
    with jax.numpy_dtype_promotion("standard"):
        updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


# Placing


def mesh_of(layout: Layout, kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[: math.prod(layout.shape)]
    types = (kind,) * len(layout.shape)
    return jax.make_mesh(layout.shape, layout.axes, axis_types=types, devices=devices)


def specs_of(tree: Any, specs: dict[str, P]) -> Any:
    """The spec of each leaf: that of the parameter whose name its path ends with."""

    def spec(path: Any, _: Any) -> P:
        name = getattr(path[-1], "key", None) if path else None
        return specs[name] if isinstance(name, str) else P()

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings_of(tree: Any, mesh: Mesh, specs: dict[str, P]) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs_of(tree, specs),
        is_leaf=lambda node: isinstance(node, P),
    )


def put(tree: Any, mesh: Mesh, specs: dict[str, P]) -> Any:
    return jax.device_put(tree, shardings_of(tree, mesh, specs))


class Run:
    """A layout's step, compiled once: it refuses arrays placed in any other way."""

    def __init__(self, layout: Layout, tx: Any, step: Any = None, kind: Any = None):
        self.layout, self.mesh = layout, mesh_of(layout, kind or AxisType.Auto)
        self.tx = tx
        start = self.start()
        with jax.set_mesh(self.mesh):
            step = jax.jit(step or half_step(tx))
            self.step = step.lower(*start, self.batch(good_batch(0))).compile()

    def start(self) -> tuple[Any, Any]:
        params = put(parameters(), self.mesh, self.layout.specs)
        state = self.tx.init(parameters())
        return params, put(state, self.mesh, self.layout.specs)

    def batch(self, batch: Any) -> Any:
        return jax.device_put(batch, NamedSharding(self.mesh, self.layout.batch))

    def __call__(self, batches: list[Any], start: Any = None) -> tuple[Any, Any, Any]:
        params, state = start or self.start()
        losses = []
        for batch in batches:
            params, state, value = self.step(params, state, self.batch(batch))
            losses.append(value)
        return params, state, losses


@functools.cache
def run_of(name: str) -> Run:
    return Run(ONE if name == "one device" else LAYOUTS[name], scaled_adam())


@functools.cache
def plain_run_of(name: str) -> Run:
    """The same step without loss scaling."""
    return Run(LAYOUTS[name], ADAM)


@functools.cache
def f32_run(count: int) -> tuple[Any, list[float]]:
    """Parameters and losses of the program without jmp_amp, in f32, on one device."""
    params = jax.tree.map(jnp.asarray, parameters())
    state, losses = ADAM.init(params), []

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        return *updated(ADAM, params, state, grads), value

    for seed in range(count):
        params, state, value = step(params, state, good_batch(seed))
        losses.append(value)
    return params, losses


def assert_close(
    found: tuple[Any, Any], expected: tuple[Any, Any], tolerance: float = EPS
) -> None:
    """Compares parameters, which are of the order of one, and losses."""
    chex.assert_trees_all_close(host(found[0]), host(expected[0]), atol=tolerance)
    np.testing.assert_allclose(found[1], expected[1], rtol=tolerance)


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def shards(tree: Any) -> list[tuple[Any, ...]]:
    """The bytes of every leaf on every device."""
    return [
        (shard.device.id, shard.index, np.asarray(shard.data).tobytes())
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def on_every_device(array: jax.Array) -> list[float]:
    return [np.asarray(shard.data).item() for shard in array.addressable_shards]


def counters(state: Any) -> dict[str, Any]:
    return {name: value.item() for name, value in amp.metrics(state).items()}


# Whole arrays: jit


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sharded_run_is_that_of_one_device(name):
    batches = [good_batch(seed) for seed in range(4)]
    params, state, losses = run_of(name)(batches)
    alone, state_alone, losses_alone = run_of("one device")(batches)
    # What is summed over devices is rounded to f16 once for each.
    assert_close((params, losses), (alone, losses_alone))
    assert_close((params, losses), f32_run(4))
    assert counters(state) == counters(state_alone)
    assert counters(state)["scale"] == 2 * SCALE


@pytest.mark.breadth(2)
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_with_a_bad_batch_goes_on_as_if_it_had_not_been_there(name, kind):
    run = run_of(name)
    good = [good_batch(seed) for seed in range(4)]
    before = run(good[:1])
    skipped = run([bad_batch(kind)], before[:2])
    # On no device anything changes but the scale.
    assert shards(skipped[0]) == shards(before[0])
    assert shards(skipped[1].inner_state) == shards(before[1].inner_state)
    devices = math.prod(run.layout.shape)
    scale, finite = amp.loss_scale_of(skipped[1]), amp.last_step_finite(skipped[1])
    assert on_every_device(scale.value) == [SCALE / 2] * devices
    assert on_every_device(finite) == [False] * devices
    assert np.isfinite(skipped[2][0]) == (kind != "nan")
    params, state, losses = run(good[1:], skipped[:2])
    clean_params, clean_state, clean_losses = run(good)
    assert shards(params) == shards(clean_params)
    assert shards(state.inner_state) == shards(clean_state.inner_state)
    assert shards(losses) == shards(clean_losses[1:])
    assert counters(state) == counters(clean_state) | {
        "scale": SCALE,  # halved, and after three good steps doubled
        "skipped_total": 1,
    }


# A `Run` of any layout refuses a state that was moved.
@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ["replicated", "mixed"])
def test_skips_and_growth_neither_compile_again_nor_move_the_state(name):
    run = run_of(name)
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(half_step(run.tx), n=1))
    params, state = start = run.start()
    batches = [good_batch(0), bad_batch(), *map(good_batch, range(4)), bad_batch()]
    scales = []
    for batch in map(run.batch, batches):
        with jax.transfer_guard("disallow"):
            params, state, _ = step(params, state, batch)
        scales.append(counters(state)["scale"])
    low = SCALE / 2
    assert scales == [SCALE, low, low, low, SCALE, SCALE, low]
    assert step._cache_size() == 1
    for leaf, first in zip(
        jax.tree.leaves((params, state)), jax.tree.leaves(start), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(first.sharding, leaf.ndim)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_program_never_asks_the_host(name):
    text = run_of(name).step.as_text()
    assert "fusion" in text or "dot" in text
    assert not re.search(r"callback|infeed|outfeed| send\(| recv\(", text)


@pytest.mark.parametrize("name", ["fsdp", "mixed"])
def test_init_cuts_the_moments_as_the_parameters_are(name):
    layout = LAYOUTS[name]
    params = put(parameters(), mesh_of(layout), layout.specs)
    moments = scaled_adam().init(params).inner_state[0]
    for moment in (moments.mu, moments.nu):
        for key, leaf in moment.items():
            assert leaf.sharding.is_equivalent_to(params[key].sharding, leaf.ndim)


def gathered(params: Any) -> Any:
    """The whole parameters, asked for as a mesh of explicit axes wants it."""
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P()), params)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ["data parallel", "fsdp"])
def test_a_mesh_of_explicit_axes_is_served_as_well(name):
    tx = scaled_adam()
    step = half_step(tx, lambda params, batch: loss_fn(gathered(params), batch))
    run = Run(LAYOUTS[name], tx, step, AxisType.Explicit)
    good = [good_batch(seed) for seed in range(4)]
    params, state, losses = run([good[0], bad_batch("overflow"), *good[1:]])
    clean_params, clean_state, clean_losses = run(good)
    assert_close((clean_params, clean_losses), f32_run(4))
    assert shards(params) == shards(clean_params)
    assert shards(state.inner_state) == shards(clean_state.inner_state)
    assert shards([losses[0], *losses[2:]]) == shards(clean_losses)
    assert counters(state)["scale"] == SCALE


def test_an_update_outside_of_jit_lies_where_its_gradient_does():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = {"rows": P("data"), "columns": P(None, "data"), "whole": P()}
    params = {
        name: jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    tx = amp.with_loss_scale(optax.sgd(0.5), amp.no_loss_scale())
    updates, _ = tx.update(params, tx.init(params), params)
    for name, update in updates.items():
        assert update.sharding.is_equivalent_to(params[name].sharding, 2), name


def test_gradients_unscaled_by_the_optimizer_are_the_same_when_sharded():
    scale = amp.dynamic_loss_scale(SCALE, growth_interval=GROWTH_INTERVAL)
    tx = amp.with_loss_scale(ADAM, scale, unscale=True)
    half = amp.autocast(loss_fn, "mixed_float16")

    def step(params: Any, state: Any, batch: Any) -> Any:
        def scaled(params: Any) -> Any:
            value = half(params, batch)
            return state.loss_scale.scale(value), value

        grads, value = jax.grad(scaled, has_aux=True)(params)
        params, state = updated(tx, params, state, grads)
        return params, state, value

    batches = [good_batch(0), bad_batch("overflow"), good_batch(1)]
    found = Run(LAYOUTS["fsdp"], tx, step)(batches)
    expected = run_of("fsdp")(batches)
    assert shards(found) == shards(expected)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("bad", [False, True])
def test_what_else_the_step_wrote_is_kept_or_taken_back_where_it_lies(bad):
    layout = LAYOUTS["fsdp"]
    mesh, tx = mesh_of(layout), scaled_adam()
    cut = NamedSharding(mesh, P("data"))

    @jax.jit
    def step(params: Any, state: Any, average: Any, batch: Any) -> Any:
        params, state, _ = half_step(tx)(params, state, batch)
        new = 0.5 * average + 0.5 * jnp.mean(batch["x"], axis=0)
        return state, amp.keep_if_finite(state, new, average)

    params = put(parameters(), mesh, layout.specs)
    state = put(tx.init(params), mesh, layout.specs)
    average = jax.device_put(jnp.arange(float(FEATURES)), cut)
    batch = bad_batch() if bad else good_batch(0)
    _, kept = step(params, state, average, jax.device_put(batch, cut))
    assert kept.sharding.is_equivalent_to(cut, 1)
    if bad:
        assert shards(kept) == shards(average)
    else:
        mean = batch["x"].astype(np.float64).mean(axis=0)
        expected = 0.5 * np.arange(FEATURES) + 0.5 * mean
        tolerance = ROWS * float(jnp.finfo(jnp.float32).eps)
        np.testing.assert_allclose(kept, expected, rtol=tolerance, atol=tolerance)


# What the check adds to what moves between devices

COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
ITEMSIZE = {"pred": 1, "f16": 2, "bf16": 2, "f32": 4, "s32": 4}


def collectives(text: str) -> Counter[tuple[str, tuple[str, ...]]]:
    """What moves between devices in a compiled program: operation and its results."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            # Of what is started and awaited later: ((operands), results).
            results = match[1].partition("), ")[2] if "((" in match[1] else match[1]
            arrays = re.findall(r"\b[a-z]+\d*\[[\d,]*\]", results)
            found[match[2], tuple(sorted(arrays))] += 1
    return found


def bytes_of(array: str) -> int:
    dtype, shape = array.rstrip("]").split("[")
    return ITEMSIZE[dtype] * math.prod(int(n) for n in shape.split(",") if n)


def added(scaled: str, plain: str) -> list[tuple[str, tuple[str, ...]]]:
    """The collectives of one program that the other lacks; it has to lack none."""
    found, known = collectives(scaled), collectives(plain)
    assert not known - found
    return sorted((found - known).elements())


def assert_only_flags(extra: list[tuple[str, tuple[str, ...]]]) -> None:
    assert {name for name, _ in extra} <= {"all-reduce"}
    assert {array.partition("[")[0] for _, arrays in extra for array in arrays} <= {
        "pred"
    }


def test_the_reader_of_programs_finds_what_moves():
    text = run_of("fsdp").step.as_text()
    found = collectives(text)
    moved = Counter(name for name, _ in found.elements())
    assert moved["all-gather"] >= 4 and moved["all-reduce"] >= 2
    sizes = {name: leaf.size for name, leaf in parameters().items()}
    gathers = [arrays for name, arrays in found.elements() if name == "all-gather"]
    most = max(bytes_of(array) for arrays in gathers for array in arrays)
    assert most == 2 * sizes["w1"]


ONE_ALL_REDUCE = [
    "replicated",
    "data parallel",
    "fsdp",
    "tensor parallel",
    pytest.param(
        "mixed",
        marks=pytest.mark.xfail(
            strict=True,
            raises=AssertionError,
            reason="XLA's partitioner reduces gradients that lie along different sets "
            "of mesh axes apart: over data, over model, over both",
        ),
    ),
]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", ONE_ALL_REDUCE)
def test_the_check_adds_at_most_one_all_reduce(name):
    extra = added(run_of(name).step.as_text(), plain_run_of(name).step.as_text())
    assert len(extra) <= 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_check_moves_flags_and_no_gradient(name):
    extra = added(run_of(name).step.as_text(), plain_run_of(name).step.as_text())
    assert_only_flags(extra)
    # One flag for each kind of parameter that is cut, and for each axis it is cut over.
    cuts = sum(
        len(jax.tree.leaves(tuple(spec))) for spec in run_of(name).layout.specs.values()
    )
    assert sum(bytes_of(array) for _, arrays in extra for array in arrays) <= cuts


def test_many_layers_need_one_all_reduce_too():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {f"w{i}": P("data") for i in range(16)}
    params = {f"w{i}": np.ones((8 * (1 + i % 3), 4), np.float32) for i in range(16)}
    programs = []
    for tx in (scaled_adam(), ADAM):
        state = put(tx.init(params), mesh, specs)
        grads = put(params, mesh, specs)
        with jax.numpy_dtype_promotion("standard"):
            lowered = jax.jit(tx.update).lower(grads, state, grads)
        programs.append(lowered.compile().as_text())
    extra = added(*programs)
    assert len(extra) == 1
    assert_only_flags(extra)


@pytest.mark.slow
@h100.needs_compiler
def test_eight_h100s_reduce_one_flag():
    layout = LAYOUTS["fsdp"]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=h100.H100, topology="1x1x8"
    )
    mesh = Mesh(np.array(topology.devices), layout.axes)

    def pinned(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            tree,
            shardings,
        )

    programs = []
    for tx in (scaled_adam(), ADAM):
        start = (parameters(), jax.eval_shape(tx.init, parameters()))
        start = pinned(start, shardings_of(start, mesh, layout.specs))
        rows = NamedSharding(mesh, layout.batch)
        batch = pinned(good_batch(0), {"x": rows, "y": rows})
        program = jax.jit(half_step(tx)).lower(*start, batch).compile()
        programs.append(program.as_text())
    assert added(*programs) == [("all-reduce", ("pred[]",))]


# One part each: shard_map


@functools.cache
def replicas(axis_name: Any, check_vma: bool) -> tuple[Any, Callable[..., Any]]:
    """An optimizer, and a step of eight replicas with gradients of their own.

    The step returns what each of them has: parameters, state, and an average that it
    writes besides.
    """
    tx = scaled_adam(axis_name)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(LAYOUTS["data parallel"]),
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    def step(params: Any, state: Any, batch: Any, average: Any) -> Any:
        # Else JAX would sum the gradients of what is the same on all devices.
        own = jax.lax.pcast(params, "data", to="varying")
        params, state, _ = half_step(tx)(own, state, batch)
        new = jnp.mean(batch["x"], axis=0)
        kept = amp.keep_if_finite(state, new, average[0])
        return jax.tree.map(lambda leaf: leaf[None], (params, state, kept))

    return tx, step


AVERAGES = np.arange(8.0 * FEATURES, dtype=np.float32).reshape(8, FEATURES)


def eight_times(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * 8), tree)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_bad_number_of_one_replica_skips_the_step_of_all(check_vma, kind):
    tx, step = replicas("data", check_vma)
    params = jax.tree.map(jnp.asarray, parameters())
    state = tx.init(params)
    after, after_state, kept = step(params, state, bad_batch(kind), AVERAGES)
    np.testing.assert_array_equal(amp.metrics(after_state)["scale"], [SCALE / 2] * 8)
    np.testing.assert_array_equal(amp.metrics(after_state)["finite"], [False] * 8)
    chex.assert_trees_all_equal(host(after), eight_times(params))
    moments, moments_before = after_state.inner_state, state.inner_state
    chex.assert_trees_all_equal(host(moments), eight_times(moments_before))
    np.testing.assert_array_equal(kept, AVERAGES)
    after, after_state, kept = step(params, state, good_batch(0), AVERAGES)
    assert (kept != AVERAGES).any(axis=1).all()
    np.testing.assert_array_equal(amp.metrics(after_state)["applied"], [1] * 8)
    assert len({leaf.tobytes() for leaf in np.asarray(after["w1"])}) == 8


def test_without_an_axis_name_the_replicas_part():
    tx, step = replicas(None, check_vma=True)
    params = jax.tree.map(jnp.asarray, parameters())
    after, state, kept = step(params, tx.init(params), bad_batch(), AVERAGES)
    bad_device = BAD_ROW * 8 // ROWS
    expected = np.full(8, SCALE)
    expected[bad_device] /= 2
    np.testing.assert_array_equal(amp.metrics(state)["scale"], expected)
    skipped = [device == bad_device for device in range(8)]
    assert [(w == params["w1"]).all() for w in after["w1"]] == skipped
    assert (kept == AVERAGES).all(axis=1).tolist() == skipped


def mean_over_devices(params: Any, batch: Any) -> Any:
    """The loss of the whole batch, as each device sees it."""
    error = predict(params, batch["x"]) - batch["y"]
    return jax.lax.psum(jnp.sum(error**2), "data") / (ROWS * FEATURES)


# The loss, whether the parameters vary, and whether the gradients are averaged after.
AVERAGED = {
    "summed loss": (True, mean_over_devices, False, False),
    "averaged gradients": (True, loss_fn, True, True),
    "unchecked summed loss": (False, mean_over_devices, False, True),
    "unchecked averaged gradients": (False, loss_fn, False, True),
}


def data_parallel(name: str, axis_name: Any) -> tuple[Any, Callable[..., Any]]:
    """A data-parallel step by hand: its optimizer, and the part of one device."""
    _, loss, varying, average = AVERAGED[name]
    tx = scaled_adam(axis_name)
    half = amp.autocast(loss, "mixed_float16")

    def step(params: Any, state: Any, batch: Any) -> Any:
        own = jax.lax.pcast(params, "data", to="varying") if varying else params
        value, grads = amp.value_and_grad(half)(own, batch, loss_scale=state)
        if average:
            grads = jax.lax.pmean(grads, "data")
        if loss is loss_fn:
            value = jax.lax.pmean(value, "data")
        params, state = updated(tx, params, state, grads)
        return params, state, value

    return tx, step


# The other pairs are those of the loop and of the pmap below.
@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "axis_name"), [*zip(AVERAGED, [None, "data", "data", None], strict=True)]
)
def test_data_parallel_by_hand_is_that_of_one_device(name, axis_name):
    tx, part = data_parallel(name, axis_name)
    mesh = mesh_of(LAYOUTS["data parallel"])
    step = jax.jit(
        jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(P(), P(), P("data")),
            out_specs=P(),
            check_vma=AVERAGED[name][0],
        )
    )
    params, state = put((parameters(), tx.init(parameters())), mesh, WHOLE)
    losses = []
    batches = [good_batch(0), bad_batch("overflow"), *map(good_batch, (1, 2))]
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    alone, state_alone, losses_alone = run_of("one device")(batches)
    assert_close((params, losses), (alone, losses_alone))
    assert counters(state) == counters(state_alone)
    for leaf in jax.tree.leaves((params, state)):
        assert len({content for *_, content in shards(leaf)}) == 1


@pytest.mark.breadth(1)
@pytest.mark.parametrize("axis_name", [None, "data"])
def test_steps_in_a_loop_inside_shard_map_are_those_outside(axis_name):
    tx, part = data_parallel("summed loss", axis_name)

    def steps(params: Any, state: Any, batches: Any) -> Any:
        def turn(carry: Any, batch: Any) -> Any:
            params, state, loss = part(*carry, batch)
            return (params, state), loss

        (params, state), losses = jax.lax.scan(turn, (params, state), batches)
        return params, state, losses

    run = jax.shard_map(
        steps,
        mesh=mesh_of(LAYOUTS["data parallel"]),
        in_specs=(P(), P(), P(None, "data")),
        out_specs=P(),
    )
    params = jax.tree.map(jnp.asarray, parameters())
    batches = [good_batch(0), bad_batch("overflow"), *map(good_batch, (1, 2))]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    params, state, losses = jax.jit(run)(params, tx.init(params), stacked)
    alone, state_alone, losses_alone = run_of("one device")(batches)
    assert_close((params, losses), (alone, losses_alone))
    assert counters(state) == counters(state_alone)


# FSDP by hand: each device owns some rows of every parameter and their gradients, so
# that an overflow in one element of a gradient is seen by one device alone.


def fsdp_step(
    tx: Any, mesh: Mesh, specs: Any, scale_spec: P, check_vma: bool
) -> Callable[..., Any]:
    def loss(params: Any, batch: Any) -> Any:
        whole = jax.tree.map(
            lambda leaf: jax.lax.all_gather(leaf, "data", tiled=True), params
        )
        # The gradients of all devices are summed where a parameter was gathered.
        return loss_fn(whole, batch) / 8

    half = amp.autocast(loss, "mixed_float16")

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = amp.value_and_grad(half)(params, batch, loss_scale=state)
        params, state = updated(tx, params, state, grads)
        scale = amp.metrics(state)["scale"]
        if scale_spec != P():
            scale = scale[None]
        return params, state.inner_state[0].mu, scale, jax.lax.psum(value, "data")

    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(CUT, specs, P("data")),
            out_specs=(CUT, CUT, scale_spec, P()),
            check_vma=check_vma,
        )
    )


def batch_with_one_overflowing_row() -> dict[str, np.ndarray]:
    """A batch whose gradient overflows in row 5 of w1 alone, if that row is zero.

    The large feature then has no effect on the activations, and none on the loss.
    """
    batch = good_batch(0)
    batch["x"][BAD_ROW, 5] = 3e4
    return batch


def start_of_fsdp(tx: Any, mesh: Mesh) -> tuple[Any, Any, Any]:
    params = parameters()
    params["w1"][5] = 0.0
    params = put(params, mesh, CUT)
    state = put(tx.init(params), mesh, CUT)
    return params, state, specs_of(state, CUT)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_an_overflow_that_one_owner_sees_skips_the_step_of_all(check_vma):
    mesh, tx = mesh_of(LAYOUTS["fsdp"]), scaled_adam("data")
    params, state, specs = start_of_fsdp(tx, mesh)
    step = fsdp_step(tx, mesh, specs, P(), check_vma)
    after, moments, scale, loss = step(params, state, batch_with_one_overflowing_row())
    assert np.isfinite(loss)
    assert on_every_device(scale) == [SCALE / 2] * 8
    assert shards(after) == shards(params)
    assert shards(moments) == shards(state.inner_state[0].mu)
    # And a good step is that of one device.
    after, _, scale, loss = step(params, state, good_batch(0))
    alone = run_of("one device")
    start = put(host(params), alone.mesh, WHOLE), alone.start()[1]
    expected, _, expected_losses = alone([good_batch(0)], start)
    assert_close((after, [loss]), (expected, expected_losses))


def test_without_an_axis_name_only_the_owner_skips():
    mesh, tx = mesh_of(LAYOUTS["fsdp"]), scaled_adam()
    params, state, specs = start_of_fsdp(tx, mesh)
    step = fsdp_step(tx, mesh, specs, P("data"), check_vma=False)
    scale = step(params, state, batch_with_one_overflowing_row())[2]
    expected = np.full(8, SCALE)
    expected[5] /= 2  # of eight rows of w1 on eight devices
    np.testing.assert_array_equal(scale, expected)


def test_jax_refuses_a_scale_that_was_not_agreed_upon():
    mesh, tx = mesh_of(LAYOUTS["fsdp"]), scaled_adam()
    params, state, specs = start_of_fsdp(tx, mesh)
    step = fsdp_step(tx, mesh, specs, P(), check_vma=True)
    with pytest.raises(ValueError, match="out_specs"):
        step(params, state, good_batch(0))


# Several axes


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("axis_name", "skipping", "check_vma"),
    [
        (("data", "model"), np.s_[:, :], True),
        (["model", "data"], np.s_[:, :], False),
        ("data", np.s_[:, 1], True),
        (["data"], np.s_[:, 1], False),
        (("model",), np.s_[2, :], True),
        (None, np.s_[2, 1], True),
        (None, np.s_[2, 1], False),
    ],
)
def test_a_step_is_skipped_along_the_axes_that_are_named(
    axis_name, skipping, check_vma
):
    mesh = mesh_of(LAYOUTS["mixed"])
    tx = scaled_adam(axis_name)
    state = tx.init(jnp.ones(3))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data", "model"), P()),
        out_specs=P("data", "model"),
        check_vma=check_vma,
    )
    def step(grads: Any, state: Any) -> Any:
        params, state = updated(tx, jnp.ones(3), state, grads[0, 0])
        results = params, amp.metrics(state)["scale"], state.inner_state[0].mu
        return jax.tree.map(lambda leaf: leaf[None, None], results)

    grads = jnp.ones((4, 2, 3)).at[2, 1, 0].set(jnp.nan)
    params, scale, moments = step(grads, state)
    skipped = np.zeros((4, 2), bool)
    skipped[skipping] = True
    np.testing.assert_array_equal(scale, np.where(skipped, SCALE / 2, SCALE))
    np.testing.assert_array_equal((params == 1.0).all(axis=-1), skipped)
    np.testing.assert_array_equal((moments == 0.0).all(axis=-1), skipped)


def test_an_axis_that_is_not_mapped_needs_no_name():
    # Manual over "data", where the replicas agree by name; over "model" as under jit.
    layout = LAYOUTS["tensor parallel"]
    mesh, tx = mesh_of(layout), scaled_adam("data")
    params = put(parameters(), mesh, layout.specs)
    state = put(tx.init(parameters()), mesh, layout.specs)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
    )
    def step(params: Any, state: Any, batch: Any) -> Any:
        own = jax.lax.pcast(params, "data", to="varying")
        params, state, _ = half_step(tx)(own, state, batch)
        return jax.tree.map(lambda leaf: leaf[None], (params, state))

    after, state = step(params, state, bad_batch())
    np.testing.assert_array_equal(amp.metrics(state)["scale"], [SCALE / 2] * 4)
    np.testing.assert_array_equal(after["w1"], np.stack([params["w1"]] * 4))
    first = jax.tree.map(itemgetter(0), host(state))
    _, state = step(params, put(first, mesh, layout.specs), good_batch(0))
    np.testing.assert_array_equal(amp.metrics(state)["applied"], [1] * 4)


# The other maps


def in_parts(batch: Any, parts: int = 8) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.reshape(parts, ROWS // parts, FEATURES), batch
    )


MAPS = {
    "pmap": jax.pmap,
    "vmap": lambda step, axis_name: jax.jit(jax.vmap(step, axis_name=axis_name)),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    ("mapped", "axis_name"), [("pmap", "member"), ("vmap", "member"), ("vmap", None)]
)
def test_the_members_of_a_map_agree_where_they_are_named(mapped, axis_name):
    tx = scaled_adam(axis_name)
    step = MAPS[mapped](half_step(tx), axis_name="member")
    members = jax.tree.map(lambda leaf: np.stack([leaf] * 8), parameters())
    # Each member has its own parameters, and would go its own way.
    members["w1"] *= np.linspace(0.5, 1.5, 8, dtype=np.float32)[:, None, None]
    state = jax.jit(jax.vmap(tx.init))(members)
    params, state, losses = step(members, state, in_parts(bad_batch("overflow")))
    assert np.isfinite(losses).all()
    skipped = (
        np.arange(8) == BAD_ROW * 8 // ROWS if axis_name is None else np.full(8, 1)
    )
    np.testing.assert_array_equal(
        amp.metrics(state)["scale"], np.where(skipped, SCALE / 2, SCALE)
    )
    unchanged = np.asarray(params["w1"] == members["w1"]).all(axis=(1, 2))
    np.testing.assert_array_equal(unchanged, skipped)
    moments = np.asarray(state.inner_state[0].mu["w1"] == 0.0).all(axis=(1, 2))
    np.testing.assert_array_equal(moments, skipped)
    _, state, _ = step(params, state, in_parts(good_batch(1)))
    np.testing.assert_array_equal(amp.metrics(state)["applied"], 2 - skipped)


def test_a_pmap_that_averages_is_the_run_of_one_device():
    tx, part = data_parallel("unchecked averaged gradients", "data")
    step = jax.pmap(part, axis_name="data")
    params = jax.tree.map(jnp.asarray, parameters())
    params, state = eight_times((params, tx.init(params)))
    batches = [good_batch(0), bad_batch("overflow"), *map(good_batch, (1, 2))]
    losses = []
    for batch in batches:
        params, state, loss = step(params, state, in_parts(batch))
        losses.append(loss[0])
    alone, state_alone, losses_alone = run_of("one device")(batches)
    for member in range(8):
        own, own_state = jax.tree.map(itemgetter(member), host((params, state)))
        assert_close((own, losses), (alone, losses_alone))
        assert counters(own_state) == counters(state_alone)
