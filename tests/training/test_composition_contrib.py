"""optax optimizers under a loss scale walk as they do without one over the clean steps.

The same optimizer, unwrapped, in plain float32 and without a scale, sees only the steps
whose gradients are finite. Parameters and inner state have to agree bit for bit, so
both run one compiled `update`: two compilations would round differently.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jmp_amp as amp
from tests.training.wrappers import kinds

# Decays of a weak dtype meet integer counts all over optax.
pytestmark = pytest.mark.usefixtures("optax_promotion")


def parameters(dtype):
    return {
        "w": jnp.array([[1.0, -2.0, 0.5], [0.5, 4.0, -3.0]], dtype),
        "b": jnp.array([0.25, -1.0, 2.0], dtype),
    }


def loss_fn(params, x):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    error = x @ params["w"] + params["b"][None] - 1.0
    return jnp.mean(error**2)


def batches():
    """Seven batches; in three of them something is not finite."""
    data = np.random.default_rng(0).normal(size=(7, 4, 2)).astype(np.float32)
    data[2, 1, 0], data[4, 0, 1], data[5, 3, 1] = np.nan, np.inf, -np.inf
    return [jnp.asarray(x) for x in data]


def no_arguments(loss, gradients, x):
    return {}


def its_value(loss, gradients, x):
    return {"value": loss}


def a_line_search(loss, gradients, x):
    return {"value": loss, "grad": gradients, "value_fn": loss_fn, "x": x}


def its_objective(loss, gradients, x):
    return {"obj_fn": objective}


def objective(params):
    return loss_fn(params, jnp.ones((4, 2)))


# How each is made, and what `update` is given besides gradients, state and parameters.
# Their states differ in kind: none, counts, schedules, keys, other dtypes and shapes.
FAST = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(0.1),
    "schedule": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 10)),
    "warm_up": lambda: optax.sgd(
        optax.warmup_cosine_decay_schedule(0.1, 1.0, 2, 6, 0.1)
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(0.1, 0.0, 10), b1=0.8
    ),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "bf16_moment": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.75)),
    "ema_biased": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.75, debias=False)),
    # It never sees a bad step, and so never gives up.
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1, momentum=0.5), 0),
    "polyak_sgd": (lambda: optax.polyak_sgd(), its_value),
    "reduce_on_plateau": (
        lambda: optax.chain(
            optax.sgd(0.1),
            contrib.reduce_on_plateau(0.5, patience=1, rtol=0.9, accumulation_size=2),
        ),
        its_value,
    ),
}
SLOW = {
    "adafactor": lambda: optax.adafactor(0.1),
    "backtracking": (
        lambda: optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
        ),
        a_line_search,
    ),
    "conditionally_mask": lambda: optax.conditionally_mask(
        optax.adam(0.1), lambda step: step % 2 == 0
    ),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(0.5, estim_lr0=0.01),
    "lbfgs": (lambda: optax.lbfgs(memory_size=2), a_line_search),
    "schedule_free": lambda: contrib.schedule_free_adamw(0.1, 2),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1), s_init=0.01),
    "muon": lambda: contrib.muon(0.1),
    "sam": lambda: contrib.sam(
        optax.adam(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05))
    ),
    "sophia": (lambda: contrib.sophia(0.1, update_interval=2), its_objective),
}
OPTIMIZERS = FAST | SLOW


@functools.cache
def optimizer(name):
    """The optimizer, its `update` compiled, and its extra arguments."""
    made = OPTIMIZERS[name]
    make, extra = made if isinstance(made, tuple) else (made, no_arguments)
    inner = make()
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    inner = optax.with_extra_args_support(inner)

    @functools.partial(jax.jit, static_argnames=("value_fn", "obj_fn"))
    def update(updates, state, params, **arguments):
        return inner.update(updates, state, params, **arguments)

    return optax.GradientTransformationExtraArgs(inner.init, update), extra


def plain_run(inner, extra, dtype):
    """The clean steps alone, the optimizer in float32 whatever the parameters are."""
    full = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)  # noqa: E731
    params = parameters(dtype)
    state = inner.init(full(params))
    for x in batches():
        if not jnp.all(jnp.isfinite(x)):
            continue
        # Without a scale. Of half parameters gradients are summed in float32.
        loss, gradients = amp.value_and_grad(loss_fn)(params, x)
        arguments = extra(loss, gradients, x)
        updates, state = inner.update(gradients, state, full(params), **arguments)
        params = jax.tree.map(lambda p, u: p + u.astype(dtype), params, updates)
    return params, state


# Inside all of them see f32: one half dtype will do.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, jnp.float16) for name in FAST),
        *(pytest.param(name, jnp.float16, marks=pytest.mark.slow) for name in SLOW),
        ("adam", jnp.float32),
    ],
)
def test_an_optimizer_walks_as_it_does_without_a_scale(name, dtype):
    inner, extra = optimizer(name)
    expected, expected_state = plain_run(inner, extra, dtype)
    tx = amp.with_loss_scale(inner, amp.dynamic_loss_scale(16.0, growth_interval=2))
    params = parameters(dtype)
    state = tx.init(params)
    begun, scales = kinds((params, state)), []
    for x in batches():
        before = params, state.inner_state
        loss, gradients = amp.value_and_grad(loss_fn)(params, x, loss_scale=state)
        arguments = extra(loss, gradients, x)
        updates, state = tx.update(gradients, state, params, **arguments)
        params = optax.apply_updates(params, updates)
        if not jnp.all(jnp.isfinite(x)):
            chex.assert_trees_all_equal((params, state.inner_state), before)
        scales.append(float(amp.loss_scale_of(state).value))
    assert scales == [16.0, 32.0, 16.0, 16.0, 8.0, 4.0, 4.0]
    assert amp.metrics(state)["applied"] == 4
    chex.assert_trees_all_equal(params, expected)
    chex.assert_trees_all_equal(state.inner_state, expected_state)
    # As a scan demands it.
    assert kinds((params, state)) == begun
    assert not any(
        jnp.all(leaf == start)
        for leaf, start in zip(
            jax.tree.leaves(params), jax.tree.leaves(parameters(dtype)), strict=True
        )
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_schedule_free_parameters_for_evaluation_are_the_mean_over_the_clean_steps(
    dtype,
):
    rate, slopes = 0.25, [1.0, np.nan, 2.0, np.inf, 0.5]
    tx = amp.with_loss_scale(
        contrib.schedule_free_sgd(rate, b1=0.5), amp.dynamic_loss_scale(2.0**10)
    )
    params = jnp.array([1.0, -2.0], dtype)
    state = tx.init(params)
    for slope in slopes:
        gradients = slope * jnp.array([1.0, 2.0])
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    # Defazio et al. 2024, arXiv:2405.15682, equations 3 to 5, with a constant rate.
    steps = np.cumsum([slope for slope in slopes if np.isfinite(slope)])
    z = np.array([1.0, -2.0]) - rate * steps[:, None] * np.array([1.0, 2.0])
    mean = z.mean(axis=0)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(params, 0.5 * mean + 0.5 * z[-1], rtol=tolerance)
    found = contrib.schedule_free_eval_params(state.inner_state, params)
    np.testing.assert_allclose(found, mean, rtol=4 * tolerance)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_an_opaque_sam_step_is_taken_from_the_adversarial_point_or_not_at_all(where):
    curvature, rho, rate = np.array([1.0, 4.0]), 0.125, 0.25

    def loss_fn(params, factor):
        loss = 0.5 * jnp.sum(jnp.asarray(curvature, jnp.float32) * params**2)
        return loss * factor

    descent = optax.sgd(rate)
    loss_scale = amp.dynamic_loss_scale(2.0**10)
    if where == "inside":
        descent = amp.with_loss_scale(descent, loss_scale)
    climb = optax.chain(contrib.normalize(), optax.sgd(rho))
    tx = contrib.sam(descent, climb, opaque_mode=True)
    if where == "around":
        tx = amp.with_loss_scale(tx, loss_scale)
    params, expected = jnp.array([3.0, 1.0]), np.array([3.0, 1.0])
    state = tx.init(params)
    for factor in (1.0, jnp.nan, 1.0, jnp.inf, 1.0):
        gradient = functools.partial(amp.grad(loss_fn), loss_scale=state)
        updates, state = tx.update(
            gradient(params, factor),
            state,
            params,
            grad_fn=lambda p, _, g=gradient, factor=factor: g(p, factor),
        )
        params = optax.apply_updates(params, updates)
        if factor == 1.0:
            slope = curvature * expected
            point = expected + rho * slope / np.sqrt(np.sum(slope**2))
            expected = expected - rate * curvature * point
        np.testing.assert_allclose(params, expected, rtol=1e-6, atol=1e-6)
    assert amp.loss_scale_of(state).value == 2.0**8
    assert amp.metrics(state)["applied"] == 3


def test_a_gradient_that_overflows_at_the_adversarial_point_alone_is_skipped():
    # The gradient that `update` is given is finite: only the one that SAM asks for
    # itself is not, so the scale belongs around what that one reaches.
    inner = amp.with_loss_scale(optax.sgd(0.25), amp.dynamic_loss_scale(2.0**10))
    tx = contrib.sam(inner, optax.sgd(0.5), opaque_mode=True)
    params = jnp.array([3.0, 1.0])
    gradient = lambda p, _: jnp.where(p > 3.0, jnp.inf, p)  # noqa: E731
    updates, state = tx.update(
        gradient(params, 0), tx.init(params), params, grad_fn=gradient
    )
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert amp.loss_scale_of(state).value == 2.0**9


def test_a_line_search_goes_on_from_the_value_and_gradient_in_the_wrapped_state():
    """Which is what the last clean step left there."""
    curvature, minimum = np.array([1.0, 1.5, 2.0]), np.array([0.5, -1.0, 2.0])

    def fn(params):
        error = params - jnp.asarray(minimum, jnp.float32)
        return jnp.sum(jnp.asarray(curvature, jnp.float32) * error**2)

    inner = optax.chain(
        optax.sgd(0.4), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    )
    tx = amp.with_loss_scale(inner, amp.dynamic_loss_scale(4.0))
    value_and_grad = optax.value_and_grad_from_state(fn)

    def descend(tx, params, bad):
        @jax.jit
        def step(params, state, factor):
            value, gradient = value_and_grad(params, state=state)
            gradient = gradient * factor
            updates, state = tx.update(
                gradient, state, params, value=value, grad=gradient, value_fn=fn
            )
            return optax.apply_updates(params, updates), state, value

        state, values = tx.init(params), []
        for is_bad in bad:
            factor = np.float32(np.nan if is_bad else 1.0)
            params, state, value = step(params, state, factor)
            values.append(float(value))
        return params, state, values

    start = jnp.zeros(3)
    plain, _, expected = descend(inner, start, [False] * 4)
    params, state, values = descend(tx, start, [False, True, False, True, False, False])
    assert values[0] == np.sum(curvature * minimum**2)
    assert [values[1], values[3]] == [values[2], values[4]]
    np.testing.assert_allclose(np.delete(values, [1, 3]), expected, rtol=1e-4)
    np.testing.assert_allclose(params, plain, rtol=1e-4)
    assert expected[-1] < 0.1 * expected[0]
    assert amp.loss_scale_of(state).value == 1.0


def test_lookahead_around_synchronizes_finite_parameters():
    inner = amp.with_loss_scale(optax.sgd(0.5), amp.dynamic_loss_scale(16.0))
    tx = optax.lookahead(inner, 2, 0.5)
    params = optax.LookaheadParams.init_synced(jnp.array([1.0, -2.0]))
    state = tx.init(params)
    fast = slow = np.array([1.0, -2.0])
    for count, slope in enumerate((1.0, np.nan, 2.0, 1.0, np.inf, 4.0), start=1):
        gradients = jnp.full(2, slope, jnp.float32)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        fast = fast - 0.5 * slope if np.isfinite(slope) else fast
        # It is lookahead that counts, and it counts every step.
        if count % 2 == 0:
            fast = slow = slow + 0.5 * (fast - slow)
        np.testing.assert_array_equal(params.fast, fast)
        np.testing.assert_array_equal(params.slow, slow)
    assert amp.loss_scale_of(state).value == 4.0


def test_lookahead_inside_is_refused():
    # It is initialised with pairs of parameters, and given gradients of one.
    tx = amp.with_loss_scale(
        optax.lookahead(optax.sgd(0.5), 2, 0.5), amp.no_loss_scale()
    )
    params = optax.LookaheadParams.init_synced(jnp.ones(2))
    with pytest.raises(
        ValueError, match=r"but init saw \{\.fast, \.slow\}.*lookahead\(wrapped, "
    ):
        tx.update(jnp.ones(2), tx.init(params), params)
