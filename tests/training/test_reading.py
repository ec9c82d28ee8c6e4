"""What a skip looks at: the gradients that the optimizer reads, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp

PARAMS = {"body": jnp.arange(6.0).reshape(2, 3), "frozen": jnp.ones(4)}
LABELS = {"body": "train", "frozen": "frozen"}
ONLY_FROZEN = {"body": False, "frozen": True}
FROZEN = {
    "partition": optax.partition(
        {"train": optax.sgd(0.1, 0.9), "frozen": optax.set_to_zero()}, LABELS
    ),
    "masked": optax.chain(
        optax.masked(optax.set_to_zero(), ONLY_FROZEN), optax.sgd(0.1, 0.9)
    ),
    "freeze": optax.chain(optax.transforms.freeze(ONLY_FROZEN), optax.sgd(0.1, 0.9)),
    "selective": optax.chain(
        optax.transforms.selective_transform(
            optax.sgd(0.1, 0.9), freeze_mask=ONLY_FROZEN
        )
    ),
}
READ = {
    "handed on": optax.masked(optax.sgd(0.1), {"body": True, "frozen": False}),
    "clipped before": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {"train": optax.sgd(0.1, 0.9), "frozen": optax.set_to_zero()}, LABELS
        ),
    ),
    "frozen behind": optax.chain(
        optax.sgd(0.1, 0.9), optax.transforms.freeze(ONLY_FROZEN)
    ),
    "added up": optax.MultiSteps(FROZEN["partition"], 2),
    "trained": optax.sgd(0.1, 0.9),
}


def gradients(**bad):
    return jax.tree.map(jnp.ones_like, PARAMS) | {
        name: jnp.full_like(PARAMS[name], value) for name, value in bad.items()
    }


def stepped(inner, grads, jit):
    tx = amp.with_loss_scale(inner, amp.dynamic_loss_scale(1024.0))
    update = jax.jit(tx.update) if jit else tx.update
    # MultiSteps of optax mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        return update(grads, tx.init(PARAMS), PARAMS)


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "jit"), [*((name, True) for name in FROZEN), ("partition", False)]
)
def test_a_frozen_part_that_is_not_finite_stops_nothing(name, jit):
    inner = FROZEN[name]
    found, state = stepped(inner, gradients(frozen=jnp.nan), jit)
    assert amp.last_step_finite(state) and amp.loss_scale_of(state).value == 1024.0
    expected, _ = jax.jit(inner.update)(gradients(), inner.init(PARAMS), PARAMS)
    np.testing.assert_allclose(found["body"], expected["body"], rtol=1e-6)
    np.testing.assert_array_equal(found["frozen"], jnp.zeros(4))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("inner", FROZEN.values(), ids=FROZEN)
def test_a_trained_part_that_is_not_finite_is_skipped(inner, jit):
    found, state = stepped(inner, gradients(body=jnp.inf), jit)
    assert not amp.last_step_finite(state) and amp.loss_scale_of(state).value == 512.0
    np.testing.assert_array_equal(found["body"], jnp.zeros((2, 3)))


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "jit"), [*((name, True) for name in READ), ("trained", False)]
)
def test_what_the_optimizer_reads_skips_the_step(name, jit):
    found, state = stepped(READ[name], gradients(frozen=jnp.nan), jit)
    assert not amp.last_step_finite(state)
    assert all(not leaf.any() for leaf in jax.tree.leaves(found))


def test_an_optimizer_that_reads_values_in_python_is_looked_at_whole():
    def update(updates, state, params=None):
        factor = 2.0 if float(updates["body"][0, 0]) > 0 else 1.0
        return jax.tree.map(lambda g: -factor * g, updates), state

    inner = optax.GradientTransformation(lambda params: (), update)
    found, state = stepped(inner, gradients(), jit=False)
    np.testing.assert_array_equal(found["body"], -2 * jnp.ones((2, 3)))
    assert amp.last_step_finite(state)
    assert not amp.last_step_finite(stepped(inner, gradients(frozen=jnp.nan), False)[1])


def in_phases(jit):
    """A part that is frozen first, by a set that a function of the optimizer reads."""
    frozen = set()
    tx = amp.with_loss_scale(
        optax.chain(
            optax.masked(
                optax.set_to_zero(),
                lambda tree: {name: name in frozen for name in tree},
            ),
            optax.sgd(0.1, 0.9),
        ),
        amp.dynamic_loss_scale(1024.0),
    )
    state = tx.init(PARAMS)
    for names in ({"body"}, set()):
        frozen.clear()
        frozen.update(names)
        step = jax.jit(lambda *args: tx.update(*args)) if jit else tx.update
        updates, state = step(gradients(body=jnp.nan), state, PARAMS)
        yield updates, state


@pytest.mark.breadth(1)
@pytest.mark.parametrize("jit", [False, True])
def test_a_part_that_is_thawed_is_looked_at(jit):
    (updates, state), (later, thawed) = in_phases(jit)
    assert amp.last_step_finite(state) and updates["frozen"].all()
    assert not amp.last_step_finite(thawed) and thawed.skipped_total == 1
    assert not any(leaf.any() for leaf in jax.tree.leaves(later))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(thawed.inner_state))


@pytest.mark.parametrize("extra", [{"freeze": True}, {"epoch": 0}], ids=str)
def test_a_number_of_python_decides_anew_in_each_step(extra):
    def update(updates, state, params=None, *, freeze=False, epoch=2, **_):
        frozen = freeze or epoch < 2
        zero = jnp.zeros_like(updates["body"])
        return updates | {"body": zero if frozen else updates["body"]}, state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = amp.with_loss_scale(inner, amp.dynamic_loss_scale(1024.0))
    step = jax.jit(tx.update, static_argnames=("freeze", "epoch"))
    given = gradients(body=jnp.nan), tx.init(PARAMS), PARAMS
    for update in (step, tx.update):
        _, state = update(*given, **extra)
        assert amp.last_step_finite(state)
        updates, state = update(*given, **dict.fromkeys(extra, 2 * ("epoch" in extra)))
        assert not amp.last_step_finite(state) and not updates["body"].any()


def per_example(norm):
    return optax.chain(
        optax.contrib.differentially_private_aggregate(norm, 0.0, key=0),
        optax.sgd(1.0),
    )


def test_gradients_of_single_examples_are_clipped_and_summed():
    draw = np.random.default_rng(0).standard_normal
    examples = jax.tree.map(lambda x: draw((5, *x.shape), np.float32), PARAMS)
    found, state = stepped(per_example(0.5), examples, jit=True)
    flat = np.concatenate(
        [np.asarray(leaf, np.float64).reshape(5, -1) for leaf in examples.values()], 1
    )
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    mean = (flat * np.minimum(1, 0.5 / norms)).mean(0)
    ours = np.concatenate([np.ravel(leaf) for leaf in found.values()])
    np.testing.assert_allclose(ours, -mean, rtol=1e-5)
    assert amp.last_step_finite(state)
    examples["frozen"][3] = np.nan
    _, state = stepped(per_example(0.5), examples, jit=True)
    assert not amp.last_step_finite(state)


@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.sgd(0.1, 0.9)])
def test_a_batch_that_nothing_reduces_is_refused(inner):
    examples = jax.tree.map(lambda x: jnp.ones((5, *x.shape)), PARAMS)
    with pytest.raises(
        ValueError, match=r"has shape \(5, 2, 3\) but the parameter has"
    ):
        stepped(inner, examples, jit=True)
    ragged = examples | {"frozen": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match="one leading axis of one size"):
        stepped(per_example(0.5), ragged, jit=True)


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "wrap",
    [
        amp.with_low_precision_state,
        amp.with_master_weights,
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.partition(
            {"a": tx, "b": optax.set_to_zero()}, {"body": "a", "frozen": "b"}
        ),
    ],
)
def test_what_is_around_an_aggregate_is_told_to_go_behind_it(wrap):
    examples = jax.tree.map(lambda x: jnp.ones((5, *x.shape)), PARAMS)
    with pytest.raises(ValueError) as raised:
        stepped(wrap(per_example(0.5)), examples, jit=True)
    assert str(raised.value).startswith("with_loss_scale: the gradient at")
    assert "comes first, outside of other wrappers" in str(raised.value)
    first, rest = per_example(0.5), wrap(optax.sgd(1.0))
    _, state = stepped(optax.chain(first, rest), examples, jit=True)
    assert amp.last_step_finite(state)


def test_check_scale_names_what_is_not_finite():
    tx = optax.MultiSteps(amp.with_loss_scale(optax.sgd(0.1), amp.no_loss_scale()), 2)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for _ in range(4):
        with jax.numpy_dtype_promotion("standard"):
            _, state = update(gradients(body=jnp.nan), state, PARAMS)
    with pytest.raises(FloatingPointError, match=r"is \.acc_grads\['body'\]\. "):
        amp.check_scale(state, 0)


def test_check_scale_blames_no_scalar_that_is_infinite_by_design():
    plateau = optax.contrib.reduce_on_plateau()
    tx = amp.with_loss_scale(optax.chain(optax.adam(0.1), plateau), amp.no_loss_scale())
    with jax.numpy_dtype_promotion("standard"):
        _, state = jax.jit(tx.update)(
            gradients(body=jnp.nan), tx.init(PARAMS), PARAMS, value=jnp.float32(1.0)
        )
    with pytest.raises(FloatingPointError) as raised:
        amp.check_scale(state, 0)
    assert "Not finite in this state" not in str(raised.value)


def test_steps_in_a_scan_are_skipped_one_by_one():
    tx = amp.with_loss_scale(FROZEN["partition"], amp.dynamic_loss_scale(1024.0))

    def step(carry, value):
        params, state = carry
        grads = gradients(frozen=jnp.nan)
        grads["body"] = grads["body"] * value
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    values = jnp.array([1.0, jnp.inf, 1.0])
    (params, state), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), values)
    assert amp.metrics(state)["applied"] == 2
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))


def test_replicas_agree():
    tx = amp.with_loss_scale(
        FROZEN["partition"], amp.no_loss_scale(), axis_name="replica"
    )
    body = jnp.stack([PARAMS["body"], jnp.full((2, 3), jnp.inf)])
    grads = {"body": body, "frozen": jnp.full((2, 4), jnp.nan)}
    step = functools.partial(tx.update, state=tx.init(PARAMS), params=PARAMS)
    _, state = jax.jit(jax.vmap(step, axis_name="replica"))(grads)
    assert not state.last_finite.any()
