import dataclasses
import functools
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

HALF = (jnp.float16, jnp.bfloat16)


adam_works = pytest.mark.usefixtures("optax_promotion")


def dynamic(scale=2.0**10, **settings):
    return amp.dynamic_loss_scale(scale, **settings)


def parameters(dtype=jnp.float32):
    return {
        "w": jnp.array([[1.0, -2.0], [0.5, 4.0]], dtype),
        "b": jnp.array([0.25, -1.0], dtype),
    }


def poison(tree):
    """`tree` with one bad number in it."""
    return tree | {"b": tree["b"].at[1].set(jnp.nan)}


def kinds(tree):
    return jax.tree.structure(tree), [
        (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", None))
        for leaf in jax.tree.leaves(tree)
    ]


# Skipping a step

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "schedule": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 10)),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(0.1, 0.0, 10), b1=0.8
    ),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "bf16_moment": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "adafactor": lambda: optax.adafactor(0.1),
    "lion": lambda: optax.lion(0.1),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "prodigy": lambda: optax.contrib.prodigy(),
    "muon": lambda: optax.contrib.muon(0.1),
}


@adam_works
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing_but_the_scale_and_its_counters(name):
    tx = amp.with_loss_scale(OPTIMIZERS[name](), dynamic())
    params = parameters()
    state = tx.init(params)
    update = jax.jit(tx.update)
    updates, state = update(params, state, params)
    updates, skipped = update(poison(params), state, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
    chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
    assert amp.loss_scale_of(skipped).value == 2.0**9
    # And the next good step goes as if there had been no bad one.
    expected, _ = update(params, state, params)
    found, after = update(params, skipped, params)
    chex.assert_trees_all_equal(found, expected)
    assert amp.metrics(after)["applied"] == 2


@pytest.mark.parametrize("gradient", [jnp.nan, 1.0])
def test_counters_stay_at_the_largest_number(gradient):
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic(growth_interval=2**31 - 1))
    state = tx.init(jnp.float32(0))
    largest = jnp.int32(2**31 - 1)
    counters = ("skipped_total", "skipped_in_a_row", "applied")
    state = state._replace(**dict.fromkeys(counters, largest))
    found = state.loss_scale
    state = state._replace(
        loss_scale=dataclasses.replace(found, growth_tracker=largest)
    )
    _, state = jax.jit(tx.update)(jnp.float32(gradient), state)
    counted = amp.metrics(state)
    assert counted["skipped_total"] == counted["applied"] == largest
    if counted["finite"]:
        assert counted["skipped_in_a_row"] == 0
        assert 0 <= amp.loss_scale_of(state).growth_tracker <= largest
    else:
        with pytest.raises(FloatingPointError, match="2147483647 steps in a row"):
            amp.check_scale(state, 100)


@adam_works
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_keeps_its_type_in_scan_whatever_the_optimizer(name, dtype):
    tx = amp.with_loss_scale(OPTIMIZERS[name](), dynamic(growth_interval=2))
    params = parameters(dtype)
    state = tx.init(params)

    def step(carry, bad):
        params, state = carry
        gradients = jax.tree.map(lambda p: jnp.where(bad, jnp.nan, p), params)
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    bad = jnp.array([0, 0, 1, 0, 1], bool)
    (params, after), _ = jax.lax.scan(step, (params, state), bad)
    assert kinds(after) == kinds(state)
    assert amp.all_finite((params, after))
    assert {p.dtype for p in params.values()} == {jnp.dtype(dtype)}
    counts = {name: value.item() for name, value in amp.metrics(after).items()}
    assert counts == {
        "scale": 2.0**9,
        "finite": False,
        "skipped_total": 2,
        "skipped_in_a_row": 1,
        "applied": 3,
    }


def test_it_never_gives_up():
    tx = amp.with_loss_scale(optax.sgd(0.5), dynamic(min_scale=2.0))
    params = parameters()

    def step(state, _):
        updates, state = tx.update(poison(params), state, params)
        return state, updates

    state, updates = jax.lax.scan(step, tx.init(params), length=500)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(updates))
    assert amp.metrics(state)["skipped_in_a_row"] == 500
    assert amp.loss_scale_of(state).value == 2.0
    updates, _ = tx.update(params, state, params)
    np.testing.assert_array_equal(updates["b"], -0.5 * params["b"])


@pytest.mark.parametrize(
    "loss_scale", [amp.static_loss_scale(8.0), amp.no_loss_scale()]
)
def test_a_static_scale_skips_too(loss_scale):
    # In Apex it does not.
    tx = amp.with_loss_scale(optax.sgd(1.0), loss_scale)
    updates, state = tx.update(poison(parameters()), tx.init(parameters()))
    assert not any(jnp.any(leaf) for leaf in updates.values())
    assert not amp.last_step_finite(state)
    assert amp.loss_scale_of(state).value == loss_scale.value


def test_the_update_has_no_branch():
    tx = amp.with_loss_scale(optax.sgd(0.1, momentum=0.9), dynamic())
    params = parameters()
    jaxpr = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    assert "cond[" not in jaxpr
    assert "select_n" in jaxpr


def test_counters_and_metrics_are_strong_scalars():
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic())
    for state in (
        tx.init(jnp.ones(2)),
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[1],
    ):
        for name, value in amp.metrics(state).items():
            dtype = {"scale": jnp.float32, "finite": jnp.bool_}.get(name, jnp.int32)
            assert (value.shape, value.dtype) == ((), dtype), name
            assert not value.weak_type, name


def test_counters_stop_at_the_largest_integer():
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic())
    largest = jnp.asarray(np.iinfo(np.int32).max)
    names = ("skipped_total", "skipped_in_a_row", "applied")
    state = tx.init(jnp.ones(2))._replace(**dict.fromkeys(names, largest))
    _, skipped = tx.update(jnp.full(2, jnp.nan), state)
    assert [getattr(skipped, name) for name in names] == [largest] * 3
    _, applied = tx.update(jnp.ones(2), state)
    assert [getattr(applied, name) for name in names] == [largest, 0, largest]


# Scales and steps


@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_gradient_is_unscaled_with_the_scale_that_scaled_it(dtype, unscale):
    """The scale doubles, halves and doubles; the run is that of plain descent."""
    tx = amp.with_loss_scale(
        optax.sgd(0.25), dynamic(64.0, growth_interval=2), unscale=unscale
    )
    slope = jnp.array([0.5, -0.25])
    params = jnp.array([1.0, 2.0], dtype)
    state = tx.init(params)

    @jax.jit
    def step(params, state, bad):
        def loss_fn(p):
            return jnp.sum(p.astype(jnp.float32) * slope) * jnp.where(bad, jnp.inf, 1.0)

        if unscale:
            scaled = lambda p: amp.loss_scale_of(state).scale(loss_fn(p))  # noqa: E731
            loss, gradient = loss_fn(params), jax.grad(scaled)(params)
        else:
            loss, gradient = amp.value_and_grad(loss_fn)(params, loss_scale=state)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    applied, scales = 0, []
    for bad in (False, False, True, False, False, False):
        expected = np.array([1.0 - 0.125 * applied, 2.0 + 0.0625 * applied])
        params, state, loss = step(params, state, bad)
        if not bad:
            assert loss == 0.5 * expected[0] - 0.25 * expected[1]
        applied += not bad
        scales.append(float(amp.loss_scale_of(state).value))
    np.testing.assert_array_equal(
        params.astype(jnp.float32), [1.0 - 0.125 * 5, 2.0 + 0.0625 * 5]
    )
    assert scales == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]


def test_a_gradient_that_overflows_only_when_unscaled_is_skipped():
    tx = amp.with_loss_scale(optax.sgd(1.0), amp.static_loss_scale(0.25), unscale=True)
    updates, state = tx.update(jnp.float32(3e38), tx.init(jnp.float32(0.0)))
    assert updates == 0.0
    assert not amp.last_step_finite(state)


@adam_works
def test_gradients_are_unscaled_before_they_are_accumulated():
    tx = amp.with_loss_scale(
        optax.MultiSteps(optax.sgd(1.0), 2), dynamic(growth_interval=1), unscale=True
    )
    params = jnp.float32(0.0)
    state = tx.init(params)
    total = 0.0
    for _ in range(2):
        gradient = amp.loss_scale_of(state).scale(jnp.float32(1.0))
        updates, state = tx.update(gradient, state, params)
        total += updates
    assert amp.loss_scale_of(state).value == 2.0**12
    assert total == -1.0


@adam_works
def test_a_bad_micro_step_is_left_out_of_an_accumulation():
    tx = amp.with_loss_scale(optax.MultiSteps(optax.sgd(1.0), 2), dynamic())
    state = tx.init(jnp.float32(0.0))
    found = []
    for gradient in (1.0, jnp.nan, 3.0):
        updates, state = tx.update(jnp.float32(gradient), state)
        found.append(float(updates))
    assert found == [0.0, 0.0, -2.0]
    assert amp.metrics(state)["applied"] == 2


@adam_works
def test_inside_multi_steps_a_nan_is_never_written_and_is_reported():
    tx = optax.MultiSteps(amp.with_loss_scale(optax.adam(1.0), dynamic()), 2)
    state = tx.init(jnp.float32(0.0))
    update = jax.jit(tx.update)
    for gradient in (jnp.nan, *[1.0] * 7):
        updates, state = update(jnp.float32(gradient), state)
        assert updates == 0.0
    assert amp.metrics(state)["skipped_in_a_row"] == 4
    with pytest.raises(FloatingPointError):
        amp.check_scale(state, 3)


# float32 inside


@adam_works
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("gradient_dtype", [jnp.float32, *HALF])
@pytest.mark.parametrize("strict", [False, True])
def test_half_parameters_are_optimized_in_float32(dtype, gradient_dtype, strict):
    tx = amp.with_loss_scale(optax.adam(0.125), dynamic())
    params = parameters(dtype)
    state = tx.init(params)
    adam = state.inner_state[0]
    assert {leaf.dtype for leaf in jax.tree.leaves((adam.mu, adam.nu))} == {
        jnp.dtype("float32")
    }
    gradients = parameters(gradient_dtype)
    updates, state = tx.update(gradients, state, params)
    assert {leaf.dtype for leaf in updates.values()} == {jnp.dtype(dtype)}
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        params = optax.apply_updates(params, updates)
    # Adam's first step is the sign of the gradient times the rate.
    expected = jax.tree.map(lambda p: p - 0.125 * jnp.sign(p), parameters())
    chex.assert_trees_all_close(
        jax.tree.map(lambda p: p.astype(jnp.float32), params),
        expected,
        rtol=float(jnp.finfo(dtype).eps),
    )


@adam_works
@pytest.mark.parametrize("dtype", HALF)
def test_half_gradients_train_float32_parameters(dtype):
    tx = amp.with_loss_scale(optax.adamw(1e-3), dynamic())
    params = parameters()
    updates, _ = tx.update(parameters(dtype), tx.init(params), params)
    expected, _ = optax.adamw(1e-3).update(
        parameters(), optax.adamw(1e-3).init(params), params
    )
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


@adam_works
def test_adam_works_on_gradients_whose_square_float16_cannot_hold():
    tx = amp.with_loss_scale(optax.adam(0.5), dynamic())
    params = jnp.ones(2, jnp.float16)
    gradients = jnp.array([1e-5, -3e4], jnp.float16)
    updates, _ = tx.update(gradients, tx.init(params), params)
    np.testing.assert_allclose(updates, [-0.5, 0.5], rtol=2e-3)


def test_the_global_norm_of_float16_gradients_does_not_overflow():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = amp.with_loss_scale(inner, dynamic())
    params = jnp.ones(2, jnp.float16)
    gradients = jnp.array([300.0, 300.0], jnp.float16)
    updates, _ = tx.update(gradients, tx.init(params), params)
    np.testing.assert_allclose(updates, -np.full(2, 0.5**0.5), rtol=1e-3)


def test_small_scaled_float16_gradients_are_unscaled_in_float32():
    tx = amp.with_loss_scale(
        optax.sgd(1.0), amp.static_loss_scale(2.0**15), unscale=True
    )
    gradient = jnp.float16(5e-4)
    updates, _ = tx.update(gradient, tx.init(gradient))
    assert updates.dtype == jnp.float32
    assert float(updates) == -float(gradient) * 2.0**-15


def test_float64_and_complex_gradients_keep_their_type():
    with jax.enable_x64(True):
        params = {"f64": jnp.float64(1.0), "c64": jnp.complex64(1.0 + 1.0j)}
        tx = amp.with_loss_scale(
            optax.sgd(1.0), amp.static_loss_scale(2.0), unscale=True
        )
        gradients = {"f64": jnp.float64(2.0**-40), "c64": jnp.complex64(2.0 - 4.0j)}
        updates, _ = tx.update(gradients, tx.init(params), params)
        assert updates["f64"].dtype == jnp.float64
        assert updates["f64"] == -(2.0**-41)
        assert updates["c64"].dtype == jnp.complex64
        assert updates["c64"] == -1.0 + 2.0j


@adam_works
def test_leaves_that_are_not_trained_take_no_part():
    params = {
        "w": jnp.ones(2),
        "step": jnp.int32(3),
        "mask": jnp.array([True, False]),
        "fp8": jnp.ones(2, jnp.float8_e4m3fn),
        "frozen": None,
        "masked": optax.MaskedNode(),
    }
    loss_fn = lambda p: jnp.sum(p["w"] ** 2)  # noqa: E731
    tx = amp.with_loss_scale(optax.adam(0.5), dynamic())
    state = tx.init(params)
    gradients = amp.grad(loss_fn, allow_int=True)(params, loss_scale=state)
    assert gradients["step"].dtype == jax.dtypes.float0
    updates, after = jax.jit(tx.update)(
        gradients | {"step": jnp.int32(0), "mask": params["mask"]}, state, params
    )
    updates, after = tx.update(gradients, state, params)
    assert kinds(after) == kinds(state)
    found = optax.apply_updates(params, updates)
    np.testing.assert_allclose(found["w"], 0.5, rtol=1e-5)
    for name in set(params) - {"w"}:
        chex.assert_trees_all_equal(found[name], params[name])
        if params[name] is not None and name != "masked":
            assert found[name].dtype == params[name].dtype


def test_an_empty_tree_is_fine():
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic())
    updates, state = tx.update({}, tx.init({}), {})
    assert updates == {}
    assert amp.last_step_finite(state)


def test_an_empty_tree_is_a_tree_like_any_other():
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic())
    states = [tx.init(tree) for tree in ({}, {"a": 1.0}, {"b": 1.0})]
    assert len({jax.tree.structure(state) for state in states}) == 3
    # A jitted function compiles for each, and returns each with its own structure.
    identity = jax.jit(lambda state: state)
    for state in states:
        assert identity(state).structure == state.structure
    assert len({state.structure for state in states}) == 3
    with pytest.raises(ValueError, match=r"but init saw \{\}; first difference at"):
        tx.update({"a": jnp.ones(2)}, states[0])


# What the optimizer is given


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "wrapper",
    [
        lambda inner: amp.with_loss_scale(inner, dynamic()),
        lambda inner: amp.with_loss_scale(amp.with_kahan(inner), dynamic()),
        amp.with_master_weights,
    ],
)
def test_none_in_place_of_an_update_changes_nothing(wrapper, dtype):
    def update(updates, state, params=None):
        return {"a": None, "b": {"c": -updates["b"]["c"]}}, state

    tx = wrapper(optax.GradientTransformation(lambda _: optax.EmptyState(), update))
    params = {"a": jnp.ones(2, dtype), "b": {"c": jnp.ones(3, dtype)}}
    grads = {"a": jnp.ones(2), "b": {"c": jnp.full(3, 3.0)}}
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["a"], [0.0, 0.0])
    np.testing.assert_array_equal(updates["b"]["c"], [-3.0, -3.0, -3.0])


@pytest.mark.parametrize("wrapper", [amp.with_kahan, amp.with_stochastic_rounding])
def test_updates_of_another_tree_are_refused(wrapper):
    first = optax.stateless(lambda updates, _: {"a": updates["a"]})
    if wrapper is amp.with_stochastic_rounding:
        tx = wrapper(first, jax.random.key(0))
    else:
        tx = amp.with_loss_scale(wrapper(first), dynamic())
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="inner returned 1 updates for 2 gradients"):
        tx.update(params, tx.init(params), params)


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
    tx = amp.with_loss_scale(optax.chain(inner, optax.scale(2.0)), dynamic())
    updates, _ = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=3.0, other=None)
    np.testing.assert_array_equal(updates, [6.0, 6.0])
    tx = amp.with_loss_scale(optax.sgd(1.0), dynamic())
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=3.0)


@adam_works
def test_extra_arguments_reach_the_optimizer_inside_multi_steps():
    inner = optax.MultiSteps(optax.contrib.reduce_on_plateau(patience=1), 1)
    tx = amp.with_loss_scale(inner, dynamic())
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=jnp.float32(3.0))
    assert state.inner_state.inner_opt_state.best_value == 3.0


@adam_works
def test_init_shares_no_array_with_anybody():
    held = jnp.float32(0.1)
    keeps_params = optax.GradientTransformation(
        lambda p: {"params": p, "again": p, "held": held},
        lambda u, s, p=None: (u, s),
    )
    loss_scale = dynamic()
    tx = amp.with_loss_scale(optax.chain(optax.adam(0.1), keeps_params), loss_scale)
    params = parameters()
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, params):
        return tx.update(params, state, params)

    step(state, params)
    assert jax.tree.leaves(state.inner_state)[1].is_deleted()
    for leaf in jax.tree.leaves((params, loss_scale, held)):
        np.asarray(leaf)


def test_numbers_in_the_inner_state_become_strong_arrays():
    def update(updates, state, params=None):
        new = {"decay": state["decay"] * 0.5, "count": state["count"] + 1}
        return updates, jax.tree.map(lambda leaf: jnp.asarray(leaf), new)

    init = {"decay": jnp.asarray(0.5), "count": 3}
    inner = optax.GradientTransformation(lambda p: init, update)
    tx = amp.with_loss_scale(inner, dynamic())
    state = tx.init(jnp.ones(2))
    _, after = tx.update(jnp.ones(2), state)
    assert kinds(state) == kinds(after)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    assert after.inner_state == {"decay": 0.25, "count": 4}


def test_init_keeps_shardings():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("d"))
    for dtype in (jnp.float32, jnp.bfloat16):
        params = jax.device_put(jnp.ones((8, 2), dtype), sharding)
        keeps = optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, s))
        state = amp.with_loss_scale(keeps, dynamic()).init(params)
        assert state.inner_state.sharding == sharding


def test_a_step_compiles_once():
    tx = amp.with_loss_scale(
        optax.sgd(0.1, momentum=0.9), amp.dynamic_loss_scale(64, growth_interval=2)
    )
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, bad):
        traces.append(None)
        loss_fn = lambda p: jnp.sum(p["w"] ** 2) + jnp.sum(p["b"])  # noqa: E731
        gradients = amp.grad(loss_fn)(params, loss_scale=state)
        gradients = jax.tree.map(lambda g: jnp.where(bad, jnp.inf, g), gradients)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = parameters()
    state = tx.init(params)
    for bad in (False, False, True, False):
        params, state = step(params, state, jnp.asarray(bad))
    assert len(traces) == 1
    assert amp.loss_scale_of(state).value == 64.0


def test_vmapped_optimizers_skip_each_for_itself():
    tx = amp.with_loss_scale(optax.sgd(1.0), dynamic())
    state = jax.vmap(tx.init)(jnp.ones((2, 3)))
    gradients = jnp.ones((2, 3)).at[1, 0].set(jnp.nan)
    updates, state = jax.vmap(tx.update)(gradients, state)
    np.testing.assert_array_equal(updates, [[-1.0] * 3, [0.0] * 3])
    np.testing.assert_array_equal(amp.metrics(state)["scale"], [1024.0, 512.0])


# Devices


@pytest.mark.parametrize("axis_name", ["d", ("d",), ["d"]])
def test_one_bad_shard_skips_the_step_on_all_of_them(axis_name):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    tx = amp.with_loss_scale(
        optax.sgd(1.0, momentum=0.9), dynamic(), axis_name=axis_name
    )
    # Parameters and moments sharded, the scale replicated: shard_map checks that it is.
    params = jnp.arange(16.0)
    state = tx.init(params)
    specs = jax.tree.map(lambda leaf: P("d") if leaf.ndim else P(), state)
    run = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(P("d"), specs), out_specs=(P("d"), specs)
    )
    updates, after = jax.jit(run)(jnp.ones(16).at[5].set(jnp.nan), state)
    np.testing.assert_array_equal(updates, jnp.zeros(16))
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert amp.loss_scale_of(after).value == 2.0**9
    updates, after = jax.jit(run)(jnp.ones(16), after)
    np.testing.assert_array_equal(updates, -jnp.ones(16))


def test_replicas_whose_gradients_were_averaged_agree_without_an_axis():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    tx = amp.with_loss_scale(optax.sgd(1.0), dynamic())
    params = jnp.float32(1.0)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=P()
    )
    def step(params, state, x):
        loss_fn = lambda p: jax.lax.pmean(jnp.sum(p * x), "d")  # noqa: E731
        gradients = amp.grad(loss_fn)(params, loss_scale=state)
        return tx.update(gradients, state, params)

    updates, state = step(params, tx.init(params), jnp.arange(8.0).at[3].set(jnp.inf))
    assert (updates, amp.loss_scale_of(state).value) == (0.0, 2.0**9)
    updates, state = step(params, state, jnp.arange(8.0))
    assert updates == -3.5


# Finding the state


PLACES = (
    "itself",
    "chain",
    "multi_steps",
    "inject_hyperparams",
    "partition",
    "masked",
    "train_state",
    "tuple",
)


def nested(tx, params):
    """States that hold that of `tx`, by the transformation around it."""
    x = {"tx": tx, "rest": optax.set_to_zero()}
    labels = {"w": "tx", "b": "rest"}
    around = {
        "itself": tx,
        "chain": optax.chain(optax.clip(1.0), optax.chain(tx, optax.scale(1.0))),
        "multi_steps": optax.MultiSteps(tx, 2),
        "inject_hyperparams": optax.inject_hyperparams(
            lambda rate: optax.chain(tx, optax.scale(rate))
        )(rate=1.0),
        "partition": optax.partition(x, labels),
        "masked": optax.masked(tx, {"w": True, "b": False}),
    }
    states = {}
    for name, outer in around.items():
        state = outer.init(params)
        _, states[name] = outer.update(params, state, params)
    train_state = TrainState.create(apply_fn=None, params=params, tx=tx)
    states["train_state"] = train_state.apply_gradients(grads=params)
    states["tuple"] = (params, states["itself"], 3)
    return states


@adam_works
@pytest.mark.parametrize("place", PLACES)
def test_the_state_is_found_at_any_depth(place):
    tx = amp.with_loss_scale(optax.adam(0.1), dynamic())
    state = nested(tx, parameters())[place]
    assert amp.loss_scale_of(state).value == 2.0**10
    assert amp.last_step_finite(state)
    assert amp.metrics(state)["skipped_total"] == 0
    assert amp.metrics(state)["applied"] == (0 if place == "multi_steps" else 1)
    assert amp.keep_if_finite(state, 1.0, 2.0) == 1.0
    amp.check_scale(state, 0)


@pytest.mark.parametrize(
    "read",
    [
        amp.loss_scale_of,
        amp.last_step_finite,
        amp.metrics,
        lambda s: amp.keep_if_finite(s, 1, 2),
        lambda s: amp.check_scale(s, 3),
    ],
    ids=["loss_scale_of", "last_step_finite", "metrics", "keep_if_finite", "check"],
)
def test_a_state_with_no_loss_scale_or_two_is_refused(read):
    params = parameters()
    with pytest.raises(
        ValueError, match=r"no loss scale in this tuple.*with_loss_scale"
    ):
        read(optax.sgd(0.1).init(params))
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic())
    two = optax.chain(tx, optax.clip(1.0), tx).init(params)
    with pytest.raises(ValueError, match=r"holds 2 loss scales, at \[0\] and \[2\]"):
        read(two)


def test_a_loss_scale_is_found_in_itself():
    loss_scale = dynamic()
    assert amp.loss_scale_of(loss_scale).value == loss_scale.value


# nnx


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


@adam_works
def test_an_nnx_optimizer_trains_and_skips():
    net = Net()
    optimizer = nnx.Optimizer(
        net, amp.with_loss_scale(optax.adam(0.1), dynamic()), wrt=nnx.Param
    )
    traces = []

    @nnx.jit
    def step(net, optimizer, x):
        traces.append(None)
        loss_fn = lambda net, x: jnp.mean((net(x) - 1.0) ** 2)  # noqa: E731
        # A copy: the Variables of a State change in place.
        before = nnx.as_pure(nnx.state(net, nnx.BatchStat))
        loss, gradients = amp.value_and_grad(loss_fn)(net, x, loss_scale=optimizer)
        optimizer.update(net, gradients)
        after = nnx.as_pure(nnx.state(net, nnx.BatchStat))
        nnx.update(net, amp.keep_if_finite(optimizer, after, before))
        return loss

    x = jnp.arange(8.0).reshape(2, 4)
    first = step(net, optimizer, x)
    before = jax.tree.map(jnp.copy, nnx.state((net, optimizer.opt_state.inner_state)))
    assert not jnp.isfinite(step(net, optimizer, x * jnp.inf))
    after = nnx.state((net, optimizer.opt_state.inner_state))
    chex.assert_trees_all_equal(after, before)
    assert amp.loss_scale_of(optimizer).value == 2.0**9
    assert amp.metrics(optimizer)["skipped_total"] == 1
    assert not amp.last_step_finite(optimizer)
    for _ in range(5):
        last = step(net, optimizer, x)
    assert last < first
    assert len(traces) == 1
    amp.check_scale(optimizer, 0)


# batch_stats


class BatchNormNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))
        return nn.Dense(1)(x)


@adam_works
def test_batch_stats_are_kept_when_a_step_is_skipped():
    model = BatchNormNet()
    variables = model.init(jax.random.key(0), jnp.ones((4, 2)))
    params, stats = variables["params"], variables["batch_stats"]
    tx = amp.with_loss_scale(optax.adam(0.1), dynamic())
    state = tx.init(params)

    @jax.jit
    def step(params, stats, state, x):
        def loss_fn(params):
            out, written = model.apply(
                {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
            )
            return jnp.mean((out - 1.0) ** 2), written["batch_stats"]

        gradients, written = amp.grad(loss_fn, has_aux=True)(params, loss_scale=state)
        updates, state = tx.update(gradients, state, params)
        stats = amp.keep_if_finite(state, written, stats)
        return optax.apply_updates(params, updates), stats, state

    x = jnp.arange(8.0).reshape(4, 2)
    good = step(params, stats, state, x)
    assert not jnp.all(good[1]["BatchNorm_0"]["mean"] == 0.0)
    bad = step(*good, x.at[0, 0].set(jnp.inf))
    chex.assert_trees_all_equal(bad[:2], good[:2])
    assert not amp.last_step_finite(bad[2])


# Checkpoints and tools


def test_a_scale_has_backed_off_where_a_whole_train_state_is_taken_back():
    class Trainer(nnx.Module):
        def __init__(self):
            self.model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
            self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)

    tx = amp.with_loss_scale(optax.sgd(0.1, momentum=0.9), dynamic())
    old = TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    new = old.apply_gradients(grads={"w": jnp.array([jnp.nan, 1.0])})
    kept = amp.keep_if_finite(new, new, old)
    assert kept.step == 0
    chex.assert_trees_all_equal(kept.params, old.params)
    trainer = Trainer()
    before = nnx.clone(trainer)
    nan = jax.tree.map(lambda x: x * jnp.nan, nnx.state(trainer.model, nnx.Param))
    trainer.optimizer.update(trainer.model, nan)
    trainer.model.bias[...] = jnp.full(1, jnp.inf)
    amp.keep_if_finite(trainer, trainer, before)
    np.testing.assert_array_equal(trainer.model.bias[...], [0.0])
    assert trainer.optimizer.step[...] == 0
    other = Trainer()
    pure = nnx.as_pure(nnx.state(other))
    other.optimizer.update(other.model, nan)
    written = nnx.as_pure(nnx.state(other))
    nnx.update(other, amp.keep_if_finite(other, written, pure))
    assert other.optimizer.step[...] == 0
    for holder in (kept, trainer, other):
        found = {name: value.item() for name, value in amp.metrics(holder).items()}
        assert found == {
            "scale": 2.0**9,
            "finite": False,
            "skipped_total": 1,
            "skipped_in_a_row": 1,
            "applied": 0,
        }


def test_another_optimizer_is_taken_back_but_for_its_scale():
    tx = amp.with_loss_scale(optax.trace(0.9), dynamic())
    params = jnp.ones(2)
    _, bad = tx.update(params * jnp.nan, tx.init(params), params)
    old = tx.init(params)
    _, good = tx.update(params, old, params)
    kept = amp.keep_if_finite(bad, {"other": good}, {"other": old})["other"]
    np.testing.assert_array_equal(kept.inner_state.trace, [0.0, 0.0])
    assert amp.metrics(kept)["applied"] == 1
    written = [serialization.to_state_dict(state) for state in (good, old)]
    kept = amp.keep_if_finite(bad, *written)
    np.testing.assert_array_equal(kept["inner_state"]["trace"], [0.0, 0.0])
    assert kept["applied"] == 1


@adam_works
def test_a_checkpoint_restores_every_field():
    tx = amp.with_loss_scale(optax.adam(0.1), dynamic(64.0, min_scale=8.0))
    params = parameters()
    _, state = tx.update(params, tx.init(params), params)
    _, state = tx.update(poison(params), state, params)
    saved = serialization.to_bytes(state)
    other = amp.with_loss_scale(optax.adam(0.1), dynamic(2.0))
    for found in (
        serialization.from_bytes(other.init(params), saved),
        pickle.loads(pickle.dumps(state)),
    ):
        chex.assert_trees_all_equal(found, state)
        assert amp.loss_scale_of(found).min_scale == 8.0
        chex.assert_trees_all_equal(
            tx.update(params, found, params), tx.update(params, state, params)
        )


@adam_works
def test_optax_can_map_over_the_parameters_in_the_state():
    tx = amp.with_loss_scale(optax.adam(0.1), dynamic())
    params = parameters()
    state = tx.init(params)
    specs = {"w": "spec of w", "b": "spec of b"}
    found = optax.tree.map_params(
        tx, lambda _, s: s, state, specs, transform_non_params=lambda _: None
    )
    assert found.inner_state[0].mu == specs
    assert found.loss_scale.value is None
    doubled = optax.tree.map_params(tx, lambda leaf: leaf + 1.0, state)
    updates, _ = jax.jit(tx.update)(params, doubled, params)
    assert amp.all_finite(updates)


@pytest.mark.parametrize("around", ["alone", "chain", "partition", "masked"])
def test_optax_can_map_over_the_state_wherever_it_is(around):
    tx = amp.with_loss_scale(amp.with_kahan(optax.sgd(0.1, momentum=0.9)), dynamic())
    tx = {
        "alone": tx,
        "chain": optax.chain(optax.clip(1.0), tx),
        "partition": optax.partition({"x": tx, "y": tx}, {"w": "x", "b": "y"}),
        "masked": optax.masked(tx, {"w": True, "b": False}),
    }[around]
    params = parameters(jnp.bfloat16)
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda leaf: leaf + 1, state)
    doubled = optax.tree.map_params(tx, lambda leaf: leaf * 2, mapped)

    def parts(state, name):
        return [part for _, part in optax.tree.get_all_with_path(state, name)]

    expected = jax.tree.map(lambda leaf: (leaf + 1) * 2, parts(state, "trace"))
    chex.assert_trees_all_equal(parts(doubled, "trace"), expected)
    # The mapped state goes with the real one, as a tree of shardings has to.
    jax.tree.map(lambda *leaves: None, state, mapped)
    assert not {*parts(state, "structure")} & {*parts(mapped, "structure")}
    with pytest.raises(ValueError, match=r"Map it with jax\.tree\.map instead"):
        tx.update(params, mapped, params)


# check_scale


def after_skips(count):
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic())
    state = tx.init(jnp.ones(2))
    _, state = tx.update(jnp.ones(2), state)
    for _ in range(count):
        _, state = tx.update(jnp.array([jnp.nan, 1.0]), state)
    return state


def test_check_scale_raises_only_beyond_its_limit():
    amp.check_scale(after_skips(3), 3)
    message = r"4 steps in a row.*max_skips_in_a_row=3.*4 skipped and 1 applied.*64\.0"
    with pytest.raises(FloatingPointError, match=message):
        amp.check_scale(after_skips(4), 3)


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_check_scale_says_that_the_scale_is_to_blame(value):
    scale = dataclasses.replace(amp.static_loss_scale(8.0), value=jnp.float32(value))
    tx = amp.with_loss_scale(optax.sgd(0.5), scale)
    state = tx.init(jnp.float32(1.0))
    grad = amp.grad(jnp.square)(1.0, loss_scale=state)
    _, state = tx.update(grad, state)
    with pytest.raises(FloatingPointError, match=rf"now {value}. With it no gradient"):
        amp.check_scale(state, 0)


def test_check_scale_refuses_a_traced_state():
    with pytest.raises(TypeError, match=r"the state is traced.*metrics"):
        jax.jit(lambda state: amp.check_scale(state, 3))(after_skips(0))


@pytest.mark.parametrize("limit", [-1, 2.5])
def test_check_scale_refuses_a_bad_limit(limit):
    with pytest.raises(ValueError, match=r"max_skips_in_a_row=.*Use an int"):
        amp.check_scale(after_skips(0), limit)


# Errors


@pytest.mark.parametrize("loss_scale", [2.0**16, "dynamic", None, jnp.ones(())])
def test_something_that_is_no_loss_scale_is_refused(loss_scale):
    with pytest.raises(TypeError, match=r"not a LossScale\. Use dynamic_loss_scale"):
        amp.with_loss_scale(optax.sgd(0.1), loss_scale)


@pytest.mark.parametrize("inner", [None, optax.sgd, 0.1])
def test_something_that_is_no_optimizer_is_refused(inner):
    with pytest.raises(TypeError, match="not an optax transformation"):
        amp.with_loss_scale(inner, dynamic())


def test_a_batch_of_states_that_is_not_mapped_is_refused():
    tx = amp.with_loss_scale(optax.sgd(0.5), dynamic())
    params = jnp.ones((3, 2))
    state = jax.vmap(tx.init)(params)
    with pytest.raises(ValueError, match=r"of shape \(3,\).*jax.vmap\(tx.update\)"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match=r"^value_and_grad.*of shape \(3,\)"):
        amp.value_and_grad(jnp.sum)(params, loss_scale=state)


def test_a_loss_scale_inside_a_loss_scale_is_refused():
    inner = optax.chain(optax.clip(1.0), amp.with_loss_scale(optax.sgd(0.1), dynamic()))
    tx = amp.with_loss_scale(inner, dynamic())
    with pytest.raises(ValueError, match="holds a loss scale already"):
        tx.init(parameters())


GRADIENTS = {
    "missing": ({"w": jnp.ones((2, 2))}, "['b']"),
    "extra": (parameters() | {"c": jnp.ones(2)}, "['c']"),
    "renamed": ({"w": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "['bias']"),
    "deeper": ({"w": {"kernel": 1.0}, "b": jnp.ones(2)}, "['w']['kernel']"),
    "none": (parameters() | {"b": None}, "['b']"),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("give_params", [False, True])
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_of_another_structure_are_refused(case, give_params, momentum, jit):
    gradients, where = GRADIENTS[case]
    params = parameters()
    tx = amp.with_loss_scale(optax.sgd(0.1, momentum=momentum), dynamic())
    update = jax.jit(tx.update) if jit else tx.update
    message = (
        r"with_loss_scale: update was given gradients of structure .* but init saw "
        r"\{\['b'\], \['w'\]\}; first difference at " + re.escape(where)
    )
    with pytest.raises(ValueError, match=message):
        update(gradients, tx.init(params), params if give_params else None)


def test_gradients_of_another_structure_than_the_parameters_are_refused():
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic())
    params = parameters()
    with pytest.raises(ValueError, match=r"but params of .*\['c'\]"):
        tx.update(params, tx.init(params), params | {"c": jnp.ones(2)})


def test_gradients_of_another_shape_are_refused():
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic())
    params = parameters()
    gradients = params | {"b": jnp.ones((4, 2))}
    with pytest.raises(ValueError, match=r"\['b'\] has shape \(4, 2\).*\(2,\)"):
        tx.update(gradients, tx.init(params), params)
    params = jnp.ones(2)
    with pytest.raises(ValueError, match=r"at the root has shape \(8, 2\)"):
        tx.update(jnp.ones((8, 2)), tx.init(params), params)


def test_an_optimizer_that_changes_the_type_of_its_state_is_refused_by_leaf():
    inner = optax.GradientTransformation(
        lambda p: {"mean": jnp.zeros(2)},
        lambda u, s, p=None: (u, {"mean": s["mean"].astype(jnp.bfloat16)}),
    )
    tx = amp.with_loss_scale(inner, dynamic())
    with pytest.raises(TypeError, match=r"inner changed.*\['mean'\].*bfloat16"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
