"""What a long run needs: checkpoints, other meshes, other precisions, faults."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import serialization
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jmp_amp as amp
from tests.training.wrappers import BF16, CODING, KEY, standard

STORAGE: dict[str, Callable[..., Any]] = {
    "float32": lambda tx, original: tx,
    "masters": lambda tx, original: amp.with_master_weights(tx, init_from=original),
    "kahan": lambda tx, original: amp.with_kahan(tx),
    "float8": lambda tx, _: CODING["float8"](tx),
    "stochastic": lambda tx, _: amp.with_stochastic_rounding(tx, KEY),
}
each_storage = pytest.mark.parametrize("storage", STORAGE)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(32)(x))
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return nn.Dense(8)(x)


def optimizer() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 40)
    with standard():
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.standard_normal((16, 16)).astype(np.float32)
    return x, x[:, :8] * 2 - 1


@functools.cache
def original() -> Any:
    return jax.jit(Model().init)(jax.random.key(0), batch(0)[0])


@functools.cache
def setup(storage: str, policy: str, static_scale: float | None) -> Any:
    """The optimizer, the jitted step, and what a run begins with, for all runs.

    The step adds `fault`, a tree like the parameters, to the gradients.
    """
    loss_scale = (
        amp.dynamic_loss_scale(2.0**10, growth_interval=3)
        if static_scale is None
        else amp.static_loss_scale(static_scale)
    )
    inner = STORAGE[storage](optimizer(), original()["params"])
    tx = amp.with_loss_scale(inner, loss_scale)
    apply = amp.autocast(
        functools.partial(Model().apply, mutable=["batch_stats"]), policy
    )

    @jax.jit
    @standard()
    def step(carry: Any, data: Any, fault: Any) -> Any:
        params, stats, average, state = carry

        def loss_fn(params: Any) -> Any:
            x, y = data
            out, new = apply({"params": params, "batch_stats": stats}, x)
            return jnp.mean((out - y) ** 2), new["batch_stats"]

        gradient = amp.value_and_grad(loss_fn, has_aux=True)
        (_, new_stats), grads = gradient(params, loss_scale=state)
        grads = jax.tree.map(jnp.add, grads, fault)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        new_average = jax.tree.map(
            lambda a, p: (0.5 * a + 0.5 * p).astype(a.dtype), average, params
        )
        return (
            params,
            amp.keep_if_finite(state, new_stats, stats),
            amp.keep_if_finite(state, new_average, average),
            state,
        )

    params, stats = original()["params"], original()["batch_stats"]
    params = params if storage.startswith("float") else half(params)
    with standard():
        return tx, step, (params, stats, params, tx.init(params))


class Run:
    """A training run: parameters, batch statistics, a moving average, the optimizer."""

    def __init__(
        self,
        storage: str = "float32",
        policy: str = "mixed_bfloat16",
        static_scale: float | None = None,
    ):
        self.tx, self.step, self.carry = setup(storage, policy, static_scale)

    @property
    def carry(self) -> Any:
        return self.params, self.stats, self.average, self.state

    @carry.setter
    def carry(self, carry: Any) -> None:
        self.params, self.stats, self.average, self.state = carry

    def train(self, steps: range, fault: float = 0.0) -> Run:
        added = jax.tree.map(lambda p: np.full(p.shape, fault, np.float32), self.params)
        for index in steps:
            self.carry = self.step(self.carry, batch(index), added)
        return self


def half(params: Any) -> Any:
    return amp.cast_params(params, "p=bf16,c=bf16,o=f32")


def assert_same(a: Any, b: Any) -> None:
    chex.assert_trees_all_equal_structs(a, b)
    chex.assert_trees_all_equal_dtypes(a, b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# Checkpoints


def through_orbax(state: Any, like: Any, folder: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(
            folder / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        )


def through_flax(state: Any, like: Any, folder: Path) -> Any:
    (folder / "state").write_bytes(serialization.to_bytes(state))
    return serialization.from_bytes(like, (folder / "state").read_bytes())


def through_pickle(state: Any, like: Any, folder: Path) -> Any:
    (folder / "state").write_bytes(pickle.dumps(state))
    return pickle.loads((folder / "state").read_bytes())


@pytest.mark.breadth(2)
@each_storage
@pytest.mark.parametrize("through", [through_orbax, through_flax, through_pickle])
def test_a_run_goes_on_from_a_checkpoint_at_the_same_bits(storage, through, tmp_path):
    whole = Run(storage).train(range(8))
    first, second = Run(storage).train(range(5)), Run(storage)
    second.carry = through(first.carry, second.carry, tmp_path)
    assert_same(second.carry, first.carry)
    second.train(range(5, 8))
    assert_same(second.carry, whole.carry)


@pytest.mark.parametrize(
    ("through", "interval"),
    [(through_orbax, 9), (through_flax, 7), (through_pickle, 7)],
)
def test_the_settings_of_a_checkpoint_are_as_the_docstring_says(
    through, interval, tmp_path
):
    saved = amp.dynamic_loss_scale(8.0, growth_interval=7).adjust(True)
    found = through(saved, amp.dynamic_loss_scale(growth_interval=9), tmp_path)
    assert found.growth_interval == interval
    assert (found.value, found.growth_tracker) == (8.0, 1)


# Other meshes


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh(
        (devices,),
        ("d",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )


def shardings(tree: Any, mesh: Mesh) -> Any:
    """All that can be split over the devices is: parameters, moments, masters."""

    def sharding(leaf: Any) -> NamedSharding:
        parts = ("d",) if leaf.ndim and leaf.shape[0] % mesh.size == 0 else ()
        return NamedSharding(mesh, PartitionSpec(*parts))

    return jax.tree.map(sharding, tree)


def on_mesh(run: Run, devices: int) -> Run:
    if devices == 1:
        return run
    mesh = mesh_of(devices)
    run.carry = jax.device_put(run.carry, shardings(run.carry, mesh))
    return run


@pytest.mark.breadth(1)
@each_storage
def test_a_checkpoint_of_one_mesh_is_read_on_another(storage, tmp_path):
    first = on_mesh(Run(storage), 8).train(range(4))
    kernel = first.state.inner_state
    assert any(
        len({shard.device for shard in leaf.addressable_shards}) == 8
        and not leaf.is_fully_replicated
        for leaf in jax.tree.leaves(kernel)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", first.carry)
    second = Run(storage)
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        second.carry,
        shardings(second.carry, mesh_of(2)),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        second.carry = checkpointer.restore(tmp_path / "state", like)
    assert_same(jax.device_get(second.carry), jax.device_get(first.carry))
    assert {
        len(leaf.sharding.device_set) for leaf in jax.tree.leaves(second.carry)
    } == {2}
    # One device goes on from the same numbers at the same bits whoever wrote them.
    alone = Run(storage)
    alone.carry = jax.device_put(jax.device_get(first.carry), jax.devices()[0])
    second.carry = jax.device_put(second.carry, jax.devices()[0])
    assert_same(alone.train(range(4, 6)).carry, second.train(range(4, 6)).carry)


# Other precisions


@pytest.mark.slow
def test_a_float32_run_goes_on_with_half_weights():
    plain_tx = optimizer()
    f32 = Run("float32", static_scale=1.0).train(range(6))
    plain_state = amp.export_opt_state(f32.state)
    with standard():
        first = jax.eval_shape(plain_tx.init, f32.params)
        chex.assert_trees_all_equal_structs(plain_state, first)
    for storage in ("masters", "kahan", "stochastic"):
        mixed = Run(storage)
        params = half(f32.params)
        mixed.tx = amp.with_loss_scale(
            STORAGE[storage](optimizer(), f32.params), amp.dynamic_loss_scale(2.0**10)
        )
        with standard():
            state = mixed.tx.init(params)
        mixed.carry = (
            params,
            f32.stats,
            f32.average,
            amp.import_opt_state(state, plain_state),
        )
        # Moments, counts and schedule are those of the f32 run.
        assert_same(amp.export_opt_state(mixed.state), plain_state)
        if storage == "masters":
            assert_same(amp.export_params(params, mixed.state), f32.params)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("storage", ["masters", "kahan"])
def test_a_mixed_run_goes_on_in_float32(storage):
    mixed = Run(storage).train(range(6))
    exported = amp.export_params(mixed.params, mixed.state)
    assert_same(half(exported), mixed.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(exported)} == {jnp.dtype("float32")}
    state = amp.export_opt_state(mixed.state)
    tx = optimizer()

    @functools.partial(jax.jit, static_argnums=0)
    @standard()
    def step(tx: Any, params: Any, state: Any) -> Any:
        updates, state = tx.update(exported, state, params)
        return optax.apply_updates(params, updates), state

    with standard():
        chex.assert_trees_all_equal_structs(state, jax.eval_shape(tx.init, exported))
    # And what f32 does next is what the mixed run does next.
    expected, _ = step(tx, exported, state)
    params, after = step(mixed.tx, mixed.params, mixed.state)
    found = amp.export_params(params, after)
    chex.assert_trees_all_close(found, expected, rtol=2.0**-22, atol=2.0**-30)


def test_a_state_of_another_optimizer_is_refused():
    tx = amp.with_loss_scale(optax.sgd(0.1, momentum=0.9), amp.no_loss_scale())
    state = tx.init({"w": jnp.ones(2)})
    other = optax.sgd(0.1).init({"w": jnp.ones(2)})
    with pytest.raises(
        ValueError, match=r"import_opt_state.*not one of this optimizer"
    ):
        amp.import_opt_state(state, other)
    momentum = optax.sgd(0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"first difference at.*'v'"):
        amp.import_opt_state(state, momentum.init({"v": jnp.ones(2)}))
    with pytest.raises(ValueError, match=r"at .*'w'\] bfloat16\[2\].* in float32"):
        amp.import_opt_state(state, momentum.init({"w": jnp.ones(2, BF16)}))


def test_digits_kept_of_other_parameters_are_refused():
    tx = amp.with_master_weights(optax.sgd(0.1))
    state = tx.init({"w": jnp.ones(2, BF16)})
    with pytest.raises(ValueError, match=r"at \['w'\], but there is none in this dict"):
        amp.export_params({"v": jnp.ones(2, BF16)}, state)
    with pytest.raises(ValueError, match=r"of shape \(2,\) at \['w'\], but there is"):
        amp.export_params({"w": jnp.ones(3, BF16)}, state)


def test_masters_of_the_parameters_are_found_in_all_variables():
    variables = {
        "params": {"w": jnp.ones(2, BF16)},
        "batch_stats": {"mean": jnp.zeros(2)},
    }
    tx = amp.with_master_weights(optax.sgd(1.0))
    state = tx.init(variables["params"])
    _, state = tx.update({"w": jnp.full(2, 1e-3)}, state, variables["params"])
    exported = amp.export_params(variables, state)
    np.testing.assert_allclose(exported["params"]["w"], 0.999, rtol=2.0**-22)


# Faults


def faults(seed: int, steps: int, share: float, like: Any) -> list[Any]:
    """Per step what is added to the gradients: mostly zeros, else one inf or NaN."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        tree = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), like)
        if rng.random() < share:
            leaf = rng.choice(np.array(jax.tree.leaves(tree), object))
            leaf.flat[rng.integers(leaf.size)] = rng.choice([np.nan, np.inf, -np.inf])
        found.append(tree)
    return found


HALF_AT_ONE_SCALE = {"policy": "mixed_float16", "static_scale": 2.0**10}


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("storage", "devices", "options"),
    [
        *((storage, 1, {}) for storage in STORAGE),
        *((storage, 8, {}) for storage in reversed(STORAGE)),
        ("masters", 1, HALF_AT_ONE_SCALE),
    ],
)
def test_a_run_with_faults_equals_the_run_over_its_clean_steps(
    storage, devices, options
):
    steps = 16
    faulty, clean = (on_mesh(Run(storage, **options), devices) for _ in range(2))
    clean.train(range(1))
    faulty.train(range(1))
    compiled = faulty.step._cache_size()
    skipped = 0
    for index, fault in enumerate(faults(3, steps, 0.2, faulty.params)):
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fault)):
            skipped += 1
        else:
            clean.carry = clean.step(clean.carry, batch(index), fault)
        faulty.carry = faulty.step(faulty.carry, batch(index), fault)
    assert skipped > 2
    assert_same(faulty.carry[:3], clean.carry[:3])
    assert_same(faulty.state.inner_state, clean.state.inner_state)
    counts = {name: int(value) for name, value in amp.metrics(faulty.state).items()}
    assert counts["skipped_total"] == skipped
    assert counts["applied"] == 1 + steps - skipped
    # Neither a skip nor a growth makes it compile again.
    assert faulty.step._cache_size() == compiled


# Watching


def test_check_scale_tells_when_the_last_finite_step_was():
    run = Run()
    run.train(range(3)).train(range(4), fault=np.nan)
    amp.check_scale(run.state, 4)
    message = (
        r"4 steps in a row .*4 skipped and 3 applied in all, the last finite step was "
        r"number 3; the loss scale is now 128\.0"
    )
    with pytest.raises(FloatingPointError, match=message):
        amp.check_scale(run.state, 3)


def test_check_scale_says_if_no_step_was_finite():
    run = Run().train(range(1), fault=np.nan)
    with pytest.raises(FloatingPointError, match="applied in all, none was finite"):
        amp.check_scale(run.state, 0)
