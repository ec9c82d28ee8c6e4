"""What every transformation around an optimizer does, asked of all of them.

`with_loss_scale`, `with_master_weights`, `with_kahan`, `with_stochastic_rounding` and
`with_low_precision_state`, alone and one in the other. What one of them computes is
tested in a file of its own.
"""

from __future__ import annotations

import functools
import pickle
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jmp_amp as amp
from tests.training.wrappers import (
    BF16,
    CODING,
    F16,
    F32,
    HALF,
    KEY,
    SCALING,
    STORING,
    WRAPPERS,
    dynamic,
    gradients_at,
    kinds,
    many_parameters,
    outside_and_inside,
    parameters,
    standard,
)

LOSSY = {name: CODING[name] for name in ("bfloat16 at random", "float8")}
SKIPPING = SCALING | outside_and_inside(STORING | LOSSY)
ALL_IN_ONE = {
    "all in one": lambda inner: amp.with_loss_scale(
        amp.with_kahan(LOSSY["float8"](inner)), dynamic()
    )
}
# Those with a number for each half weight.
DIGITS = ("masters", "kahan")
EVERYWHERE = WRAPPERS | SKIPPING | ALL_IN_ONE
each_wrapper = pytest.mark.parametrize("name", WRAPPERS)
each_that_stores = pytest.mark.parametrize("name", STORING)


@pytest.fixture(autouse=True)
def usual_promotion():
    # Adam raises a float to a step count, and optax adds f32 updates to half weights.
    with standard():
        yield


def is_storing(name: str) -> bool:
    return name.startswith((*STORING, "all"))


def first(name: str) -> dict[str, jax.Array]:
    """Parameters as a wrapper is for: half if it stores the digits that they lose."""
    return many_parameters(BF16 if is_storing(name) else F32)


def stepper(tx: Any) -> Any:
    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def all_but_counters(state: Any) -> dict[str, Any]:
    """The leaves of a state but the scale and what counts steps beside it."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    counters = r"\.(loss_scale|last_finite|skipped_\w+|applied)\b"
    return {name: leaf for name, leaf in named.items() if not re.search(counters, name)}


# Steps


@functools.cache
def compiled(name: str) -> Any:
    """A first state, a step, and a list that grows when the step is traced."""
    tx, traces = EVERYWHERE[name](optax.adamw(1e-2)), []

    def step(*args: Any) -> Any:
        traces.append(name)
        return stepper(tx)(*args)

    return tx.init(first(name)), jax.jit(step), traces


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", SKIPPING | ALL_IN_ONE)
def test_a_poisoned_run_equals_the_run_over_its_clean_steps(name):
    begun, step, traces = compiled(name)

    def run(poisoned: set[int]) -> Any:
        params, state = first(name), begun
        for index in range(5):
            gradients = gradients_at(index, params)
            if index in poisoned:
                leaf = "b" if index == 3 else "w"
                spoiled = np.array(gradients[leaf])
                spoiled[index - 1] = np.nan
                bad = gradients | {leaf: spoiled}
                before = params, all_but_counters(state)
                params, state = step(params, state, bad)
                # Every leaf: moments, counts, digits, codes, random bits.
                chex.assert_trees_all_equal((params, all_but_counters(state)), before)
            params, state = step(params, state, gradients)
        return params, state

    (clean, clean_state), (found, state) = run(set()), run({1, 2, 3})
    chex.assert_trees_all_equal(found, clean)
    chex.assert_trees_all_equal(all_but_counters(state), all_but_counters(clean_state))
    assert any((found[key] != leaf).any() for key, leaf in first(name).items())
    assert {key: value.item() for key, value in amp.metrics(state).items()} == {
        "scale": 2.0**7,
        "finite": True,
        "skipped_total": 3,
        "skipped_in_a_row": 0,
        "applied": 5,
    }
    assert traces == [name]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", SKIPPING | ALL_IN_ONE)
def test_a_checkpoint_restores_every_field(name):
    (begun, step, _), params = compiled(name), first(name)
    params, state = step(params, begun, gradients_at(0, params))
    bad = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params)
    params, state = step(params, state, bad)
    saved, gradients = serialization.to_bytes(state), gradients_at(1, params)
    for found in (
        serialization.from_bytes(begun, saved),
        pickle.loads(pickle.dumps(state)),
    ):
        chex.assert_trees_all_equal(found, state)
        resumed, expected = (step(params, each, gradients) for each in (found, state))
        chex.assert_trees_all_equal(resumed, expected)


# Around a loss scale and in one, the poisoned runs are traced once.
@pytest.mark.breadth(2)
@each_wrapper
def test_a_state_keeps_its_type_in_scan(name):
    tx, params = WRAPPERS[name](optax.adamw(1e-2)), first(name)
    gradients, step = gradients_at(0, params), stepper(tx)

    def scanned(params: Any) -> Any:
        # It refuses a carry that changes its type.
        steps = lambda carry, _: (step(*carry, gradients), None)  # noqa: E731
        return jax.lax.scan(steps, (params, tx.init(params)), length=3)[0]

    states = tx.init(params), jax.eval_shape(scanned, params)[1]
    assert not any(getattr(x, "weak_type", False) for x in jax.tree.leaves(states))


@pytest.mark.breadth(2)
@each_that_stores
def test_steps_in_a_scan_are_those_outside(name):
    tx, params = STORING[name](optax.sgd(1e-3, momentum=0.9)), first(name)
    step, gradients = stepper(tx), gradients_at(0, params)
    jitted, outside = jax.jit(step), (params, tx.init(params))
    for _ in range(4):
        outside = jitted(*outside, gradients)
    inside, _ = jax.lax.scan(
        lambda carry, _: (step(*carry, gradients), None),
        (params, tx.init(params)),
        length=4,
    )
    chex.assert_trees_all_equal(inside, outside)


# What the optimizer sees


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "name", SCALING | STORING | outside_and_inside(STORING) | ALL_IN_ONE
)
def test_half_parameters_are_optimized_in_float32(name):
    tx = EVERYWHERE[name](optax.adam(1e-2))
    params = many_parameters(F16)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    # What stores digits returns updates that are not rounded.
    assert updates["w"].dtype == (F16 if name in SCALING else F32)
    if name not in ALL_IN_ONE:
        for moments in ("mu", "nu"):
            found = optax.tree.get(after, moments)
            assert {leaf.dtype for leaf in found.values()} == {F32}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "name",
    [
        *("loss scale", "masters, scale outside", "masters, scale inside"),
        *("kahan, scale outside", "stochastic, scale inside"),
    ],
)
def test_float16_gradients_too_small_or_too_large_for_adam_are_no_trouble(name):
    # Squared in f16 they are zero or infinite; Adam's epsilon is zero.
    tx, params = EVERYWHERE[name](optax.adam(1e-2)), jnp.ones(4, F16)
    step = jax.jit(stepper(tx))
    gradients = jnp.asarray([1e-7, -1e-5, 3e4, -3e4], F16)
    params, _ = step(params, tx.init(params), gradients)
    np.testing.assert_allclose(params, [0.99, 1.01, 0.99, 1.01], atol=5e-3)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", SCALING | STORING)
def test_leaves_that_are_not_trained_take_no_part(name):
    tx = WRAPPERS[name](optax.sgd(0.5, momentum=0.9))
    params = {
        "w": jnp.ones(2, BF16),
        "step": jnp.int32(3),
        "mask": jnp.array([True, False]),
        "fp8": jnp.ones(2, jnp.float8_e4m3fn),
        "key": jax.random.key(0),
        "frozen": None,
        "masked": optax.MaskedNode(),
    }
    state = tx.init(params)
    gradients = {**params, "step": np.zeros((), jax.dtypes.float0)}
    updates, after = tx.update(gradients, state, params)
    assert kinds(after) == kinds(state)
    assert updates["step"] == 0 and updates["step"].dtype == jnp.int32
    assert not updates["mask"].any()
    assert (updates["fp8"] == 0).all() and updates["fp8"].dtype == params["fp8"].dtype
    assert updates["key"] is params["key"] and updates["frozen"] is None
    np.testing.assert_array_equal(updates["w"], -0.5)
    # Without what is no array, it compiles.
    del params["key"]
    arrays = {**params, "step": jnp.int32(0)}
    jax.jit(tx.update)(arrays, tx.init(params), params)


@each_wrapper
def test_extra_arguments_reach_the_inner_optimizer(name):
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
    tx, params = WRAPPERS[name](optax.chain(inner, optax.scale(2.0))), jnp.ones(2)
    updates, _ = tx.update(params, tx.init(params), params, value=3.0, other=None)
    np.testing.assert_array_equal(updates, [6.0, 6.0])
    # And one that takes none is given none.
    tx = WRAPPERS[name](optax.sgd(1.0))
    tx.update(params, tx.init(params), params, value=3.0)


@pytest.mark.breadth(2)
@each_wrapper
def test_init_shares_no_array_with_anybody(name):
    held = jnp.float32(0.1)
    keeps = optax.GradientTransformation(
        lambda p: {"params": p, "again": p, "held": held},
        lambda u, s, p=None: (u, s),
    )
    tx, params = WRAPPERS[name](optax.chain(optax.trace(0.9), keeps)), first(name)
    gradients = gradients_at(0, params)
    state = tx.init(params)
    jax.jit(tx.update, donate_argnums=1)(gradients, state, params)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for leaf in (*jax.tree.leaves(params), held, KEY):
        assert not leaf.is_deleted()


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "originals"),
    [
        *((name, None) for name in WRAPPERS),
        *((name, kind) for name in DIGITS for kind in (jnp.array, np.array)),
    ],
)
def test_what_is_kept_is_sharded_as_the_parameters_are(name, originals):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("d"))
    wrapper, original = WRAPPERS[name], {"w": jnp.linspace(-1.0, 1.0, 4096)}
    if originals is not None:
        given = jax.tree.map(originals, original)
        wrapper = functools.partial(wrapper, init_from=given)
    dtype = BF16 if is_storing(name) else F32
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), original)
    params = jax.device_put(cast, sharding)
    state = wrapper(optax.adam(0.1)).init(params)
    kept = [x for x in jax.tree.leaves(state) if x.shape == (4096,)]
    assert len(kept) == 2 + (name in DIGITS)
    assert {leaf.sharding for leaf in kept} == {sharding}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["loss scale", "masters", "kahan, scale outside"])
def test_none_in_place_of_an_update_changes_nothing(name, dtype):
    def update(updates, state, params=None):
        return {"a": None, "b": {"c": -updates["b"]["c"]}}, state

    inner = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    tx = EVERYWHERE[name](inner)
    params = {"a": jnp.ones(2, dtype), "b": {"c": jnp.ones(3, dtype)}}
    grads = {"a": jnp.ones(2), "b": {"c": jnp.full(3, 3.0)}}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["a"], [0.0, 0.0])
    np.testing.assert_array_equal(updates["b"]["c"], [-3.0, -3.0, -3.0])


@pytest.mark.parametrize("name", SCALING | STORING)
def test_a_state_that_optax_has_mapped_says_that_it_is_not_known(name):
    tx = WRAPPERS[name](optax.sgd(1.0, momentum=0.9))
    params = {"w": jnp.ones(2, BF16)}
    mapped = optax.tree.map_params(tx, lambda leaf: leaf, tx.init(params))
    if is_storing(name):
        with pytest.raises(ValueError, match=r"Map it with jax\.tree\.map instead"):
            tx.update(params, mapped, params)
    copied = jax.tree.map(lambda leaf: leaf, tx.init(params))
    tx.update(params, copied, params)


# Mistakes


@each_wrapper
@pytest.mark.parametrize("inner", [None, optax.sgd, 1e-3])
def test_something_that_is_no_optimizer_is_refused(inner, name):
    with pytest.raises(TypeError, match=r"not an optax transformation. Pass the"):
        WRAPPERS[name](inner)


@pytest.mark.breadth(2)
@each_wrapper
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_of_another_tree_are_refused(jit, name):
    tx, params = WRAPPERS[name](optax.sgd(0.1)), parameters()
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for gradients, where in (
        ({"w": jnp.ones((2, 2))}, "['b']"),
        (params | {"c": jnp.ones(2)}, "['c']"),
        ({"w": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "['bias']"),
        ({"w": {"kernel": 1.0}, "b": jnp.ones(2)}, "['w']['kernel']"),
        (params | {"b": None}, "['b']"),
    ):
        message = (
            r": update was given gradients of structure .* but init saw "
            r"\{\['b'\], \['w'\]\}; first difference at " + re.escape(where)
        )
        with pytest.raises(ValueError, match=message):
            update(gradients, state, params)
        if name in SCALING:
            with pytest.raises(ValueError, match=message):
                update(gradients, state, None)
    with pytest.raises(ValueError, match=r"but params of .*\['c'\]"):
        update(params, state, params | {"c": jnp.ones(2)})
    gradients = params | {"b": jnp.ones((4, 2))}
    message = r"\['b'\] has shape \(4, 2\) but the parameter has \(2,\)"
    with pytest.raises(ValueError, match=message):
        update(gradients, state, params)
    with pytest.raises(ValueError, match=r"at the root has shape \(8, 2\)"):
        update(jnp.ones((8, 2)), tx.init(jnp.ones(2)), jnp.ones(2))


@pytest.mark.parametrize("name", ["kahan, scale outside", "stochastic"])
def test_updates_of_another_tree_are_refused(name):
    only_one = optax.stateless(lambda updates, _: {"a": updates["a"]})
    tx, params = EVERYWHERE[name](only_one), {"a": jnp.ones(2), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="inner returned 1 updates for 2 gradients"):
        tx.update(params, tx.init(params), params)


def test_an_optimizer_that_changes_its_state_is_refused_by_leaf():
    params = jnp.ones((4, 4))
    for change, message in (
        (lambda mean: mean.astype(BF16), r"\['mean'\].*bfloat16"),
        (lambda mean: mean[:2], r"\['mean'\].*2.*4|\['mean'\].*\[2,4\]"),
        (lambda mean: (mean, mean), r"structure.*\['mean'\]\[0\]|structure"),
    ):
        inner = optax.GradientTransformation(
            lambda p: {"mean": jnp.zeros((4, 4))},
            lambda u, s, p=None, change=change: (u, {"mean": change(s["mean"])}),
        )
        tx = WRAPPERS["loss scale"](inner)
        call = "with_loss_scale: inner changed "
        with pytest.raises((TypeError, ValueError), match=f"{call}.*({message})"):
            jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p), params)


@each_that_stores
def test_an_update_without_parameters_is_refused(name):
    tx = WRAPPERS[name](optax.sgd(1.0))
    state = tx.init(jnp.ones(2, BF16))
    with pytest.raises(ValueError, match=r"no parameters.*update\(gradients, state, p"):
        tx.update(jnp.ones(2), state)


@pytest.mark.parametrize(
    "name", [*STORING, *(f"{each}, scale outside" for each in STORING)]
)
def test_parameters_that_were_cast_after_init_are_refused(name):
    tx, params = EVERYWHERE[name](optax.sgd(1.0)), {"a": jnp.ones(2, BF16)}
    for dtype in (F16, F32):
        now = jax.tree.map(lambda leaf, d=dtype: leaf.astype(d), params)
        with pytest.raises(ValueError, match=r"\['a'\] is .*, but init saw bfloat16"):
            tx.update(now, tx.init(params), now)
    full = {"a": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"at \['a'\] is bfloat16 now, but init saw"):
        tx.update(params, tx.init(full), params)


@pytest.mark.parametrize("inside", WRAPPERS)
def test_wrapping_twice_is_refused(inside):
    outer, message = {
        **{name: (STORING[name], r"State already") for name in STORING},
        "loss scale": (SCALING["loss scale"], "holds a loss scale already"),
    }.get(inside, (CODING["float8"], "LowPrecisionState already"))
    inner = optax.chain(optax.clip(1.0), WRAPPERS[inside](optax.adam(1.0)))
    outers = STORING.values() if inside in STORING else [outer]
    weights = jax.ShapeDtypeStruct((2,), BF16 if inside in STORING else F32)
    for wrapper in outers:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(wrapper(inner).init, weights)


# After a transformation that stores half weights


LOSS_SCALE = amp.with_loss_scale(optax.identity(), amp.no_loss_scale())
# The masters of the first part are overwritten in each step.
FOLLOWED = {
    "with_loss_scale": lambda tx, params: amp.with_loss_scale(
        optax.chain(tx, optax.scale(2.0)), amp.no_loss_scale()
    ).init(params),
    "loss_scale_of": lambda tx, params: amp.loss_scale_of(
        optax.chain(tx, LOSS_SCALE).init(params)
    ),
    "value_and_grad": lambda tx, params: amp.value_and_grad(
        lambda params: jnp.sum(params["w"].astype(F32))
    )(params, loss_scale=optax.chain(optax.clip(1.0), tx, LOSS_SCALE).init(params)),
    "export_params": lambda tx, params: amp.export_params(
        params, optax.chain(tx, optax.scale(2.0)).init(params)
    ),
}


@pytest.mark.breadth(2)
@each_that_stores
@pytest.mark.parametrize("call", FOLLOWED)
def test_what_comes_after_a_transformation_that_stores_half_weights_is_warned_of(
    call, name
):
    tx, params = WRAPPERS[name](optax.sgd(0.1)), {"w": jnp.ones(2, BF16)}
    told = f"{call}.*comes after the transformation of {type(tx.init(params)).__name__}"
    with pytest.warns(UserWarning, match=told) as caught:
        FOLLOWED[call](tx, params)
    assert len(caught) == 1 and caught[0].filename == __file__


@each_that_stores
def test_a_transformation_in_front_of_one_that_stores_half_weights_is_not(name):
    tx = optax.chain(optax.clip(1.0), WRAPPERS[name](optax.adam(0.1)))
    tx, params = amp.with_loss_scale(tx, amp.no_loss_scale()), {"w": jnp.ones(2, BF16)}
    state = tx.init(params)
    amp.loss_scale_of(state)
    amp.export_params(params, state)


# What each half dtype loses, and what is left of it


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@each_that_stores
def test_a_weight_that_leaves_the_range_waits_at_its_end(name, dtype):
    largest = float(jnp.finfo(dtype).max)
    tx = WRAPPERS[name](optax.sgd(1.0))
    params = jnp.full(4, largest, dtype)
    step, state = jax.jit(stepper(tx)), tx.init(params)
    # Up by a thousandth of it, nothing, and down by half of it.
    for gradient in (-1e-3 * largest, 0.0, 0.5 * largest):
        params, state = step(params, state, jnp.full(4, gradient, F32))
        assert jnp.isfinite(params).all()
    np.testing.assert_allclose(np.float64(params), 0.5 * largest, rtol=0.02)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@each_that_stores
def test_a_zero_update_changes_no_bit(name, dtype):
    tx, params = WRAPPERS[name](optax.sgd(1.0)), many_parameters(dtype)
    step = jax.jit(stepper(tx))
    small = jax.tree.map(lambda g: g.astype(F32) / 3, gradients_at(0, params))
    zeros = jax.tree.map(lambda g: jnp.zeros_like(g), small)
    some, state = step(params, tx.init(params), small)
    after, still = step(some, state, zeros)
    chex.assert_trees_all_equal(after, some)
    kept = {"masters": "masters", "kahan": "compensation"}.get(name)
    if kept is not None:
        chex.assert_trees_all_equal(getattr(still, kept), getattr(state, kept))
