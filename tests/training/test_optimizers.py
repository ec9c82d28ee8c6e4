"""`with_loss_scale`: what it skips, scales, finds and refuses."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jmp_amp as amp
from jmp_amp.training.structures import first_difference
from tests.training.wrappers import HALF, dynamic, kinds, parameters

adam_works = pytest.mark.usefixtures("optax_promotion")


def poison(tree):
    """`tree` with one bad number in it."""
    return tree | {"b": tree["b"].at[1].set(jnp.nan)}


# Skipping a step


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
    update = jax.jit(tx.update)
    _, skipped = update(np.full(2, np.nan, np.float32), state)
    assert [getattr(skipped, name) for name in names] == [largest] * 3
    _, applied = update(np.ones(2, np.float32), state)
    assert [getattr(applied, name) for name in names] == [largest, 0, largest]


# Scales and steps


@pytest.mark.breadth(2)
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


@pytest.mark.parametrize("differentiate", [amp.grad, amp.value_and_grad])
def test_gradients_are_not_unscaled_twice(differentiate):
    scale = amp.static_loss_scale(8.0)
    tx = amp.with_loss_scale(optax.sgd(1.0), scale, unscale=True)
    state = jax.jit(tx.init)(jnp.float32(2.0))
    with pytest.raises(ValueError, match=r"grad.*with unscale=True.*unscaled twice"):
        differentiate(jnp.square)(jnp.float32(2.0), loss_scale={"opt": state})
    gradient = jax.grad(lambda w: amp.loss_scale_of(state).scale(w**2))(2.0)
    assert gradient == 32.0
    updates, _ = tx.update(gradient, state)
    assert updates == -4.0
    # Without it, the call unscales, also if one compiled function has seen both states.
    other = amp.with_loss_scale(optax.sgd(1.0), scale).init(jnp.float32(2.0))
    handed_on = jax.jit(lambda state: state)
    handed_on(state)
    assert amp.grad(jnp.square)(jnp.float32(2.0), loss_scale=handed_on(other)) == 4.0


def test_a_gradient_that_overflows_only_when_unscaled_is_skipped():
    tx = amp.with_loss_scale(optax.sgd(1.0), amp.static_loss_scale(0.25), unscale=True)
    updates, state = tx.update(jnp.float32(3e38), tx.init(jnp.float32(0.0)))
    assert updates == 0.0
    assert not amp.last_step_finite(state)


# float32 inside


@pytest.mark.breadth(2)
@adam_works
@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
def test_parameters_and_gradients_of_any_dtype_are_optimized_in_float32(dtype):
    plain, start = optax.adam(0.125), parameters()
    tx, params = amp.with_loss_scale(plain, dynamic()), parameters(dtype)
    updates, _ = plain.update(start, plain.init(start), start)
    expected = optax.apply_updates(start, updates)
    # Adam's first step is the sign of the gradient times the rate.
    by_hand = jax.tree.map(lambda p: p - 0.125 * jnp.sign(p), start)
    chex.assert_trees_all_close(expected, by_hand, rtol=1e-5)
    for gradient_dtype in (jnp.float32, *HALF):
        gradients = parameters(gradient_dtype)
        updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
        assert {leaf.dtype for leaf in updates.values()} == {jnp.dtype(dtype)}
        with jax.numpy_dtype_promotion("strict"):
            found = optax.apply_updates(params, updates)
        found = jax.tree.map(lambda p: p.astype(jnp.float32), found)
        rtol = max(float(jnp.finfo(dtype).eps), 1e-6)
        chex.assert_trees_all_close(found, expected, rtol=rtol)


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
        updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
        assert updates["f64"].dtype == jnp.float64
        assert updates["f64"] == -(2.0**-41)
        assert updates["c64"].dtype == jnp.complex64
        assert updates["c64"] == -1.0 + 2.0j


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


def test_the_first_difference_of_large_trees_is_found_in_one_pass():
    hashed = []

    class Path(str):
        def __hash__(self):
            hashed.append(self)
            return super().__hash__()

    a, b = ([Path(f"['{i}']") for i in range(n)] for n in (1001, 1000))
    assert first_difference(a, b) == "['1000']"
    # Each is put into one set, and looked up in the other.
    assert len(hashed) <= 2 * (len(a) + len(b))


# What the optimizer is given


@adam_works
def test_extra_arguments_reach_the_optimizer_inside_multi_steps():
    inner = optax.MultiSteps(optax.contrib.reduce_on_plateau(patience=1), 1)
    tx = amp.with_loss_scale(inner, dynamic())
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=jnp.float32(3.0))
    assert state.inner_state.inner_opt_state.best_value == 3.0


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


@functools.cache
def nested():
    """States that hold one of a loss scale, by the transformation around it."""
    tx, params = amp.with_loss_scale(optax.adam(0.1), dynamic()), parameters()
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


@pytest.mark.breadth(2)
@adam_works
@pytest.mark.parametrize("place", PLACES)
def test_the_state_is_found_at_any_depth(place):
    state = nested()[place]
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


@pytest.mark.breadth(2)
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


def test_a_batch_of_states_that_is_not_mapped_is_refused():
    tx = amp.with_loss_scale(optax.sgd(0.5), dynamic())
    params = jnp.ones((3, 2))
    state = jax.vmap(tx.init)(params)
    with pytest.raises(ValueError, match=r"of shape \(3,\).*jax.vmap\(tx.update\)"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match=r"^value_and_grad.*of shape \(3,\)"):
        amp.value_and_grad(jnp.sum)(params, loss_scale=state)


def test_a_scale_backs_off_where_the_state_of_an_nnx_optimizer_is_taken_back():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    bad = jax.tree.map(lambda x: x * jnp.inf, nnx.state(model, nnx.Param))
    scales = []
    for _ in range(3):
        old = nnx.state(nnx.clone(optimizer))
        optimizer.update(model, bad)
        kept = amp.keep_if_finite(optimizer, nnx.state(optimizer), old)
        nnx.update(optimizer, kept)
        scales.append(float(amp.loss_scale_of(optimizer).value))
    first = float(dynamic().value)
    assert scales == [first / 2, first / 4, first / 8]
    assert amp.metrics(optimizer)["skipped_total"] == 3


def test_a_scale_whose_settings_changed_in_a_skipped_step_stays():
    tx = amp.with_loss_scale(optax.sgd(0.5), dynamic())
    old = tx.init(jnp.ones(2))
    _, new = tx.update(jnp.full(2, jnp.nan), old)
    slow = dataclasses.replace(new.loss_scale, growth_interval=7)
    kept = amp.keep_if_finite(new, new._replace(loss_scale=slow), old)
    assert kept.loss_scale.growth_interval == 7
    assert kept.loss_scale.value == dynamic().value / 2


def test_the_state_of_an_optimizer_without_leaves_of_its_own_is_told():
    wrap = lambda tx: amp.with_loss_scale(tx, amp.no_loss_scale())  # noqa: E731
    w = jnp.ones(3)
    state = wrap(optax.adam(1e-3)).init(w)
    with pytest.raises(TypeError, match=r"the state of another .* EmptyState\(\)"):
        wrap(optax.adamw(1e-3)).update(w, state, w)


def test_updates_may_be_in_another_container():
    inner = optax.GradientTransformation(
        lambda params: (), lambda grads, state, params=None: (list(grads.values()), ())
    )
    tx = amp.with_loss_scale(inner, amp.no_loss_scale())
    grads = {"a": jnp.ones(2)}
    updates, _ = tx.update(grads, tx.init(grads))
    chex.assert_trees_all_equal(updates, grads)
