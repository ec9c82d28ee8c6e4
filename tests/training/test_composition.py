"""`with_loss_scale` and `value_and_grad` together with the rest of optax and Flax."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from tests.measures import relative_error
from tests.training.wrappers import HALF, dynamic

usual_promotion = pytest.mark.usefixtures("optax_promotion")


def walk(tx, gradients, params=None):
    """The updates of a run over `gradients` from zero parameters, and its last state.

    Parameters do not move: what is looked at are the updates.
    """
    gradients = [
        jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), tree) for tree in gradients
    ]
    params = jax.tree.map(jnp.zeros_like, gradients[0]) if params is None else params
    state, update, found = tx.init(params), jax.jit(tx.update), []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        found.append(jax.tree.map(lambda u: np.asarray(u).tolist(), updates))
    return found, state


# Clipping


@pytest.mark.breadth(2)
@pytest.mark.parametrize("limit", [1.0, 1000.0])
@pytest.mark.parametrize("gradient_dtype", [jnp.float32, *HALF])
@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
def test_the_norm_that_clips_is_that_of_float32(dtype, gradient_dtype, limit):
    values = {"w": np.array([300.0, 300.0]), "b": np.array([-200.0])}
    gradients = jax.tree.map(lambda v: jnp.asarray(v, gradient_dtype), values)
    params = jax.tree.map(lambda v: jnp.ones(v.shape, dtype), values)
    tx = amp.with_loss_scale(
        optax.chain(optax.clip_by_global_norm(limit), optax.sgd(0.5)), dynamic()
    )
    updates, state = tx.update(gradients, tx.init(params), params)
    norm = np.sqrt(sum(np.sum(v**2) for v in values.values()))
    for name, value in values.items():
        expected = -0.5 * value * min(1.0, limit / norm)
        assert updates[name].dtype == dtype
        np.testing.assert_allclose(
            updates[name].astype(jnp.float32),
            expected,
            rtol=2 * float(jnp.finfo(dtype).eps),
        )
    assert amp.last_step_finite(state)


def test_clipping_by_blocks_and_by_ratio_is_done_in_float32():
    gradient, param = np.array([300.0, 400.0]), np.array([3.0, 4.0])
    clip = {
        # Of a root mean square of 353.6.
        optax.clip_by_block_rms(1.0): gradient / np.sqrt(np.mean(gradient**2)),
        # A gradient no longer than a tenth of its parameter.
        optax.adaptive_grad_clip(0.1): gradient / 500.0 * 0.1 * 5.0,
    }
    params = jnp.asarray(param, jnp.float16)
    for inner, expected in clip.items():
        tx = amp.with_loss_scale(inner, dynamic())
        updates, _ = tx.update(
            jnp.asarray(gradient, jnp.float16), tx.init(params), params
        )
        np.testing.assert_allclose(
            updates, expected, rtol=2 * float(jnp.finfo(jnp.float16).eps)
        )


@pytest.mark.breadth(2)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    "hides", [optax.clip(1.0), optax.zero_nans(), optax.clip_by_global_norm(1.0)]
)
def test_what_clips_inside_does_not_hide_an_overflow(hides, bad):
    tx = amp.with_loss_scale(optax.chain(hides, optax.sgd(1.0)), dynamic())
    found, state = walk(tx, [[0.5, bad]])
    assert found == [[0.0, 0.0]]
    assert amp.loss_scale_of(state).value == 2.0**9


def test_a_norm_clipped_outside_still_shows_an_overflow():
    inner = amp.with_loss_scale(optax.sgd(1.0), dynamic())
    tx = optax.chain(optax.clip_by_global_norm(5.0), inner)
    found, state = walk(tx, [[np.inf, 3.0], [6.0, 8.0]])
    assert found == [[0.0, 0.0], [-3.0, -4.0]]
    assert amp.metrics(state)["skipped_total"] == 1


# Accumulation


@usual_promotion
@pytest.mark.parametrize(
    ("settings", "gradients", "expected"),
    [
        # Bad steps before, inside and between accumulations.
        (
            dict(every_k_schedule=2),
            [np.nan, 1, np.inf, 3, *[-np.inf] * 4, 5, 7],
            [0, 0, 0, -2, 0, 0, 0, 0, 0, -6],
        ),
        (
            dict(every_k_schedule=3, use_grad_mean=False),
            [1, np.nan, 2, np.nan, 4, 1],
            [0, 0, 0, 0, -7, 0],
        ),
        # Two, then three micro-steps; the schedule counts what was applied.
        (
            dict(every_k_schedule=lambda step: jnp.where(step < 1, 2, 3)),
            [1, np.nan, 3, 3, 6, np.inf, 12, 4],
            [0, 0, -2, 0, 0, 0, -7, 0],
        ),
    ],
    ids=["mean", "sum", "schedule"],
)
def test_an_accumulation_is_over_the_good_micro_steps(settings, gradients, expected):
    tx = amp.with_loss_scale(optax.MultiSteps(optax.sgd(1.0), **settings), dynamic())
    found, state = walk(tx, gradients)
    np.testing.assert_allclose(found, expected, rtol=4 * float(jnp.finfo("f4").eps))
    bad = int(np.sum(~np.isfinite(gradients)))
    assert amp.loss_scale_of(state).value == 2.0 ** (10 - bad)
    assert amp.metrics(state)["applied"] == len(gradients) - bad


@pytest.mark.filterwarnings("ignore:.*optax.MultiSteps around")
@pytest.mark.breadth(2)
@usual_promotion
@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("unscale", [False, True])
def test_an_accumulation_over_changes_of_the_scale_is_a_mean_of_true_gradients(
    unscale, where, dtype
):
    """1.5 instead of 1.0 is what the mean of scaled gradients would come to."""
    accumulated = functools.partial(optax.MultiSteps, every_k_schedule=2)
    scaled = functools.partial(
        amp.with_loss_scale,
        loss_scale=dynamic(64.0, growth_interval=1),
        unscale=unscale,
    )
    around = {
        "inside": lambda: scaled(accumulated(optax.sgd(1.0))),
        "outside": lambda: accumulated(scaled(optax.sgd(1.0))),
    }
    tx = around[where]()
    params = jnp.zeros((), dtype)
    state, found, scales = tx.init(params), [], []

    @jax.jit
    def step(state, slope):
        loss_fn = lambda p: p.astype(jnp.float32) * slope  # noqa: E731
        loss_scale = amp.loss_scale_of(state)
        if unscale:
            gradient = jax.grad(lambda p: loss_scale.scale(loss_fn(p)))(params)
            gradient = gradient.astype(jnp.float32)
        else:
            gradient = amp.grad(loss_fn)(params, loss_scale=state)
        return tx.update(gradient, state, params)

    for slope in (1.0, 1.0, 0.5, 1.5, 1.0, 1.0):
        updates, state = step(state, slope)
        found.append(float(updates))
        scales.append(float(amp.loss_scale_of(state).value))
    assert found == [0.0, -1.0, 0.0, -1.0, 0.0, -1.0]
    # Outside, MultiSteps keeps the state of the inner one but for every second step.
    grown = {"inside": [1, 2, 3, 4, 5, 6], "outside": [0, 1, 1, 2, 2, 3]}
    assert scales == [64.0 * 2.0**times for times in grown[where]]


@pytest.mark.breadth(2)
@usual_promotion
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("mean", [True, False])
def test_multi_steps_outside_writes_nothing_after_a_bad_micro_step(mean, bad):
    tx = optax.MultiSteps(
        amp.with_loss_scale(optax.sgd(0.5, momentum=0.5), dynamic()),
        2,
        use_grad_mean=mean,
    )
    # The first accumulation is whole; then the sum is not finite, and stays so.
    found, state = walk(tx, [1.0, 3.0, 1.0, bad, *[1.0] * 6])
    first = -0.5 * (2.0 if mean else 4.0)
    assert found == [0.0, first] + [0.0] * 8
    assert not np.isfinite(state.acc_grads)
    momentum = state.inner_opt_state.inner_state[0].trace
    assert momentum == -2.0 * first
    counts = {name: value.item() for name, value in amp.metrics(state).items()}
    assert counts == {
        "scale": 2.0**6,
        "finite": False,
        "skipped_total": 4,
        "skipped_in_a_row": 4,
        "applied": 1,
    }
    inside = r"with_loss_scale\(optax.MultiSteps\(tx, n\), loss_scale\)"
    with pytest.raises(FloatingPointError, match=rf"acc_grads\. .* {inside}"):
        amp.check_scale(state, 3)
    with pytest.warns(UserWarning, match=rf"^value_and_grad.* {inside}"):
        amp.value_and_grad(lambda w: w**2)(jnp.float32(1.0), loss_scale=state)


@usual_promotion
def test_multi_steps_outside_may_leave_out_bad_micro_steps_itself():
    # The sum survives, but the loss scale never hears of the overflow.
    tx = optax.MultiSteps(
        amp.with_loss_scale(optax.sgd(1.0), dynamic()),
        2,
        should_skip_update_fn=optax.skip_not_finite,
    )
    found, state = walk(tx, [1.0, np.nan, 3.0, np.inf, 5.0, 7.0])
    assert found == [0.0, 0.0, -2.0, 0.0, 0.0, -6.0]
    assert amp.loss_scale_of(state).value == 2.0**10
    with pytest.warns(UserWarning, match="optax.MultiSteps .* does not back off"):
        amp.value_and_grad(lambda w: w**2)(jnp.float32(1.0), loss_scale=state)


def test_apply_if_finite_outside_gives_up_into_a_step_that_is_skipped():
    tx = optax.apply_if_finite(amp.with_loss_scale(optax.sgd(0.5), dynamic()), 2)
    found, state = walk(tx, [1.0, *[np.nan] * 5, 1.0])
    assert found == [-0.5, *[0.0] * 5, -0.5]
    # The scale hears of an overflow only when optax gives up: the last three of five.
    assert state.total_notfinite == 5
    assert amp.metrics(state)["skipped_total"] == 3
    assert amp.loss_scale_of(state).value == 2.0**7
    inside = amp.with_loss_scale(optax.apply_if_finite(optax.sgd(1.0), 3), dynamic())
    amp.value_and_grad(lambda w: w**2)(jnp.float32(1.0), loss_scale=inside.init(1.0))


# Schedules and hyperparameters


def test_an_injected_schedule_outside_counts_every_step():
    # It is optax that counts them.
    tx = optax.inject_hyperparams(
        lambda rate: amp.with_loss_scale(optax.sgd(rate), dynamic())
    )(rate=lambda count: 2.0 ** -count.astype(jnp.float32))
    found, state = walk(tx, [1.0, 1.0, np.nan, np.inf, 1.0, 1.0])
    assert found == [-1.0, -0.5, 0.0, 0.0, -(2.0**-4), -(2.0**-5)]
    assert state.hyperparams["rate"] == 2.0**-5
    assert amp.loss_scale_of(state).value == 2.0**8


@pytest.mark.parametrize("dtype", HALF)
def test_an_injected_rate_is_float32_whatever_the_parameters_are(dtype):
    # optax keeps hyperparameters in the dtype of the parameters: 1e-8 is 0 in f16.
    tx = amp.with_loss_scale(
        optax.inject_hyperparams(optax.sgd)(learning_rate=1e-8), dynamic()
    )
    params = jnp.zeros((), dtype)
    state = tx.init(params)
    gradient = jnp.float32(3e5)
    updates, state = tx.update(gradient, state, params)
    rate = state.inner_state.hyperparams["learning_rate"]
    assert (rate.dtype, rate) == (jnp.float32, np.float32(1e-8))
    np.testing.assert_allclose(
        float(updates), -3e-3, rtol=2 * float(jnp.finfo(dtype).eps)
    )
    # And it is set by hand where it is found.
    state = optax.tree.set(state, learning_rate=jnp.float32(2e-8))
    updates, _ = tx.update(gradient, state, params)
    np.testing.assert_allclose(
        float(updates), -6e-3, rtol=2 * float(jnp.finfo(dtype).eps)
    )


# Some parameters differently from others


def test_parts_inside_one_loss_scale_skip_together():
    parts = optax.partition(
        {
            "slow": optax.sgd(0.5),
            "fast": optax.sgd(1.0, momentum=0.5),
            "frozen": optax.set_to_zero(),
        },
        {"w": "slow", "b": "fast", "c": "frozen", "steps": "frozen"},
    )
    tx = amp.with_loss_scale(parts, dynamic())
    params = {"w": jnp.ones(2), "b": jnp.ones(()), "c": jnp.ones(()), "steps": 3}
    ones = {"w": jnp.ones(2), "b": jnp.ones(()), "c": jnp.ones(()), "steps": 0}
    state, found = tx.init(params), []
    for bad in (None, "w", None, "c", "b", None):
        gradients = ones | ({bad: ones[bad] * jnp.nan} if bad else {})
        updates, state = tx.update(gradients, state, params)
        found.append((float(updates["w"][1]), float(updates["b"])))
        assert updates["c"] == 0.0
        assert optax.apply_updates(params, updates)["steps"] == 3
    # What is frozen is not looked at.
    skipped, third = (0.0, 0.0), (-0.5, -1.75)
    assert found[:3] == [(-0.5, -1.0), skipped, (-0.5, -1.5)]
    assert found[3:] == [third, skipped, (-0.5, -1.875)]
    assert amp.loss_scale_of(state).value == 2.0**8


def test_parts_with_a_loss_scale_each_skip_for_themselves():
    parts = {
        "w": amp.with_loss_scale(optax.sgd(0.5), dynamic(64.0)),
        "b": amp.with_loss_scale(optax.sgd(1.0, momentum=0.5), dynamic(1024.0)),
        "c": optax.set_to_zero(),
    }
    tx = optax.partition(parts, {"w": "w", "b": "b", "c": "c"})
    gradients = [
        {"w": 1.0, "b": 1.0, "c": 1.0},
        {"w": np.nan, "b": 1.0, "c": 1.0},
        {"w": 1.0, "b": np.inf, "c": 1.0},
        {"w": 1.0, "b": 1.0, "c": np.nan},
    ]
    found, state = walk(tx, gradients)
    assert [updates["w"] for updates in found] == [-0.5, 0.0, -0.5, -0.5]
    assert [updates["b"] for updates in found] == [-1.0, -1.5, 0.0, -1.75]
    assert [updates["c"] for updates in found] == [0.0] * 4
    assert amp.loss_scale_of(state.inner_states["w"]).value == 32.0
    assert amp.loss_scale_of(state.inner_states["b"]).value == 512.0
    with pytest.raises(ValueError, match="2 loss scales"):
        amp.loss_scale_of(state)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_mask_tells_which_leaves_are_looked_at(where):
    mask = {"w": True, "b": False}
    if where == "inside":
        tx = amp.with_loss_scale(optax.masked(optax.sgd(0.5), mask), dynamic())
    else:
        tx = optax.masked(amp.with_loss_scale(optax.sgd(0.5), dynamic()), mask)
    found, state = walk(tx, [{"w": 1.0, "b": 3.0}, {"w": np.nan, "b": 3.0}])
    # optax hands on what is masked as it came; inside, a skipped step has no updates.
    last = {"inside": 0.0, "outside": 3.0}[where]
    assert found == [{"w": -0.5, "b": 3.0}, {"w": 0.0, "b": last}]
    _, state = walk(tx, [{"w": 1.0, "b": np.nan}])
    assert amp.last_step_finite(state) == (where == "outside")


# Moving averages


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_a_moving_average_of_parameters_waits_while_steps_are_skipped(dtype):
    tx = amp.with_loss_scale(optax.sgd(0.5), dynamic())
    params = jnp.array([1.0, -1.0], dtype)
    state, average = tx.init(params), jnp.zeros(2)
    gradients = [1.0, np.nan, 2.0, np.inf, np.nan, -4.0]

    @jax.jit
    def step(params, average, state, gradient):
        updates, state = tx.update(jnp.full(2, gradient), state, params)
        params = optax.apply_updates(params, updates)
        moved = optax.incremental_update(params.astype(jnp.float32), average, 0.25)
        return params, amp.keep_if_finite(state, moved, average), state

    expected_params, expected = np.array([1.0, -1.0]), np.zeros(2)
    for gradient in gradients:
        params, average, state = step(params, average, state, gradient)
        if np.isfinite(gradient):
            expected_params = expected_params - 0.5 * gradient
            expected = 0.75 * expected + 0.25 * expected_params
        np.testing.assert_array_equal(average, expected)
        np.testing.assert_array_equal(params, expected_params)


# Several losses, several optimizers


def rounded_to_half(values):
    """What a float16 gradient is, in float64: overflow is inf."""
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float16).astype(np.float64)


def test_one_player_of_a_gan_skips_while_the_other_steps():
    rate, real = 0.25, np.array([2.0, -1.0])
    critic_tx = amp.with_loss_scale(optax.sgd(rate), dynamic(2.0**20))
    maker_tx = amp.with_loss_scale(optax.sgd(rate), dynamic(2.0**4))
    critic, maker = jnp.array([0.5, 0.25]), jnp.array([1.0, 0.0])
    critic_state, maker_state = critic_tx.init(critic), maker_tx.init(maker)
    half = lambda tree: tree.astype(jnp.float16)  # noqa: E731

    def score(critic, sample):
        return jnp.sum((half(critic) * half(sample)).astype(jnp.float32))

    @jax.jit
    def step(critic, maker, critic_state, maker_state):
        to_critic = amp.grad(
            lambda c: score(c, maker) - score(c, jnp.asarray(real, jnp.float32))
        )(critic, loss_scale=critic_state)
        to_maker = amp.grad(lambda m: -score(critic, m))(maker, loss_scale=maker_state)
        updates, critic_state = critic_tx.update(to_critic, critic_state, critic)
        critic = optax.apply_updates(critic, updates)
        updates, maker_state = maker_tx.update(to_maker, maker_state, maker)
        return critic, optax.apply_updates(maker, updates), critic_state, maker_state

    carry = critic, maker, critic_state, maker_state
    expected_critic, expected_maker = np.array([0.5, 0.25]), np.array([1.0, 0.0])
    scale, applied = 2.0**20, 0
    for _ in range(9):
        carry = step(*carry)
        # Two gradients, one of each score: both are float16 before they are added.
        slopes = [rounded_to_half(scale * v) for v in (expected_maker, -real)]
        from_critic = -expected_critic
        if np.all(np.isfinite(slopes)):
            expected_critic = expected_critic - rate * sum(slopes) / scale
            applied += 1
        else:
            scale /= 2.0
        expected_maker = expected_maker - rate * from_critic
        tolerance = 32 * float(jnp.finfo(jnp.float16).eps)
        np.testing.assert_allclose(carry[0], expected_critic, atol=tolerance)
        np.testing.assert_allclose(carry[1], expected_maker, atol=tolerance)
        assert amp.metrics(carry[2])["applied"] == applied
        assert amp.loss_scale_of(carry[2]).value == scale
    assert 0 < applied < 9
    assert amp.metrics(carry[3])["applied"] == 9


def test_two_losses_with_a_scale_each_reach_one_optimizer():
    """As `num_losses=2` of Apex; a step is skipped if either overflowed."""
    tx = amp.with_loss_scale(optax.sgd(0.5), amp.no_loss_scale())
    slopes = {"small": 2.0**-20, "large": 8.0}
    scales = {"small": dynamic(2.0**14), "large": dynamic(2.0**14)}
    params = jnp.zeros((), jnp.float16)
    state = tx.init(params)

    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def step(params, scales, state):
        def gradient(name):
            # The product's gradient is half, as in a layer.
            loss_fn = lambda p: jnp.float32(p * jnp.ones_like(p)) * slopes[name]  # noqa: E731
            return amp.grad(loss_fn)(params, loss_scale=scales[name])

        gradients = {name: gradient(name) for name in slopes}
        scales = {
            name: scale.adjust(amp.all_finite(gradients[name]))
            for name, scale in scales.items()
        }
        total = sum(gradients.values())
        updates, state = tx.update(total, state, params)
        return optax.apply_updates(params, updates), scales, state, total

    # 8 * 2**14 is beyond float16, 8 * 2**13 just so, 8 * 2**12 within.
    applied = [False, False, True, True]
    for count, good in enumerate(applied):
        params, scales, state, total = step(params, scales, state)
        assert amp.last_step_finite(state) == good
        assert not good or total == np.float32(8.0 + 2.0**-20)
        assert scales["small"].value == 2.0**14
        assert scales["large"].value == 2.0 ** (14 - min(count + 1, 2))
    assert params == -8.0
    # Alone, the small gradient is that of an underflow without its scale.
    tiny = lambda p: jnp.float32(p * jnp.ones_like(p)) * 2.0**-30  # noqa: E731
    assert amp.grad(tiny)(params, loss_scale=scales["small"]) == 2.0**-30
    assert amp.grad(tiny)(params) == 0.0


# Gradients inside a loss


def critic(weights, x):
    return jnp.sum(jnp.tanh(x @ weights["first"]) @ weights["last"])


def penalty(critic_gradient, weights, x):
    """How far the lengths of a critic's gradients by its inputs are from 1."""
    lengths = jnp.sqrt(jnp.sum(critic_gradient(weights, x) ** 2, axis=-1))
    return jnp.mean((lengths - 1.0) ** 2)


@functools.cache
def penalty_case():
    random = np.random.default_rng(0)
    weights = {
        "first": random.normal(size=(8, 16)) / np.sqrt(8),
        "last": random.normal(size=(16, 1)) / np.sqrt(16),
    }
    x = random.normal(size=(4, 8))
    with jax.enable_x64(True):
        plain = functools.partial(penalty, jax.grad(critic, argnums=1))
        loss, gradients = jax.jit(jax.value_and_grad(plain))(
            jax.tree.map(jnp.asarray, weights), jnp.asarray(x)
        )
        expected = float(loss), jax.tree.map(np.asarray, gradients)
    single = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), weights)
    return single, jnp.asarray(x, jnp.float32), expected


def largest_error(found, expected):
    return max(relative_error(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the whole loss", "the critic"])
def test_a_gradient_penalty_under_autocast_has_the_gradient_of_float64(what):
    weights, x, (expected_loss, expected) = penalty_case()
    low = lambda fn: amp.autocast(fn, "mixed_float16")  # noqa: E731
    if what == "the critic":
        loss_fn = functools.partial(penalty, jax.grad(low(critic), argnums=1))
    else:
        loss_fn = low(functools.partial(penalty, jax.grad(critic, argnums=1)))
    tx = amp.with_loss_scale(optax.sgd(0.5), dynamic(2.0**24))

    @jax.jit
    def step(state):
        loss, gradients = amp.value_and_grad(loss_fn)(weights, x, loss_scale=state)
        updates, state = tx.update(gradients, state, weights)
        return loss, updates, state

    program = str(jax.make_jaxpr(jax.grad(loss_fn))(weights, x))
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general", program)
    assert len(products) >= 7
    assert set(products) == {"f16"}
    state = tx.init(weights)
    tolerance = 4 * float(jnp.finfo(jnp.float16).eps)
    # From 2**24, where it overflows, down to where it does not.
    for _ in range(24):
        loss, updates, state = step(state)
        np.testing.assert_allclose(float(loss), expected_loss, rtol=tolerance)
        if amp.last_step_finite(state):
            break
        assert not any(np.any(leaf) for leaf in updates.values())
    counts = amp.metrics(state)
    assert counts["skipped_total"] > 0
    assert counts["applied"] == 1
    gradients = {name: np.asarray(leaf) / -0.5 for name, leaf in updates.items()}
    assert largest_error(gradients, expected) < tolerance


@pytest.mark.parametrize("scale", [1.0, 2.0**28])
def test_a_gradient_inside_a_loss_may_have_a_scale_of_its_own(scale):
    weights, x, (_, expected) = penalty_case()
    low = amp.autocast(critic, "mixed_float16")
    # A score so small that its gradients are beyond float16, but for the scale.
    small = 2.0**-30
    inner = amp.grad(lambda weights, x: small * low(weights, x), argnums=1)

    def gradient_of_score(weights, x):
        return inner(weights, x, loss_scale=amp.static_loss_scale(scale)) / small

    loss_fn = functools.partial(penalty, gradient_of_score)
    gradient = jax.jit(amp.grad(loss_fn))
    found = gradient(weights, x, loss_scale=amp.static_loss_scale(2.0**8))
    tolerance = 4 * float(jnp.finfo(jnp.float16).eps)
    assert (largest_error(found, expected) < tolerance) == (scale > 1.0)


# Scaled by hand


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
def test_a_loss_scaled_by_hand_gives_the_same_numbers(dtype):
    # The first slope is below the subnormals of f16, the second among them.
    slopes = np.array([3 * 2.0**-28, 5 * 2.0**-22, 0.75, -(2.0**-10)])
    loss_fn = lambda p: jnp.sum(  # noqa: E731
        (p * jnp.ones_like(p)).astype(jnp.float32) * jnp.asarray(slopes, jnp.float32)
    )
    loss_scale = dynamic(2.0**15, growth_interval=1)
    by_hand = amp.with_loss_scale(optax.sgd(2.0**10), loss_scale, unscale=True)
    tx = amp.with_loss_scale(optax.sgd(2.0**10), loss_scale)
    params = jnp.ones(4, dtype)
    state, hand_state = tx.init(params), by_hand.init(params)
    for _ in range(2):
        _, gradient = amp.value_and_grad(loss_fn)(params, loss_scale=state)
        loss_scale = amp.loss_scale_of(hand_state)
        scaled = jax.grad(lambda p, s=loss_scale: s.scale(loss_fn(p)))(params)
        assert scaled.dtype == dtype
        hand_updates, hand_state = by_hand.update(scaled, hand_state)
        updates, state = tx.update(gradient, state)
        np.testing.assert_array_equal(gradient, slopes)
        np.testing.assert_array_equal(hand_updates, -(2.0**10) * slopes)
        # The state of one says that it unscales: only the leaves are equal.
        pair = (updates, state), (hand_updates, hand_state)
        chex.assert_trees_all_equal(*map(jax.tree.leaves, pair))
    # Without a scale the first is lost to f16.
    lost = amp.grad(loss_fn)(params)[0]
    assert (lost == 0.0) == (dtype == jnp.float16)
