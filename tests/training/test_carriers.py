"""A training step with batch statistics, whatever carries its state.

By hand in linen, in flax's `TrainState`, in `nnx.Optimizer`: each trains, and a step
that overflows leaves all as it was but the scale.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jmp_amp as amp
from tests.training.wrappers import dynamic

# Decays of a weak dtype meet integer counts in Adam.
pytestmark = pytest.mark.usefixtures("optax_promotion")
X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 16), np.float32))
F16 = "mixed_float16"
SCALED = amp.with_loss_scale(optax.adam(0.05), dynamic())


class Run(NamedTuple):
    """A training of one model.

    Attributes:
      carry: what the step is given and returns.
      step: `step(carry, x) -> (carry, loss)`.
      holder: carry -> what holds the loss scale.
      written: carry -> all that a step writes but the scale and its counters.
    """

    carry: Any
    step: Any
    holder: Any
    written: Any


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x))
        return nn.Dense(4)(nn.relu(x))


apply = amp.autocast(lambda variables, x: Net().apply(variables, x, mutable=True), F16)


def variables():
    return jax.jit(Net().init)(jax.random.key(0), X)


def loss_fn(params, stats, x):
    y, written = apply({"params": params, "batch_stats": stats}, x)
    return jnp.mean(jnp.square(y - 1.0)), written["batch_stats"]


def by_hand():
    def step(carry, x):
        params, stats, state = carry
        (loss, new), gradients = amp.value_and_grad(loss_fn, has_aux=True)(
            params, stats, x, loss_scale=state
        )
        updates, state = SCALED.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return (params, amp.keep_if_finite(state, new, stats), state), loss

    start = variables()
    carry = start["params"], start["batch_stats"], SCALED.init(start["params"])
    return Run(
        carry,
        jax.jit(step),
        lambda carry: carry[2],
        lambda carry: (carry[:2], carry[2].inner_state),
    )


class State(TrainState):
    batch_stats: Any = None


def train_state():
    def step(state, x):
        (loss, new), gradients = amp.value_and_grad(loss_fn, has_aux=True)(
            state.params, state.batch_stats, x, loss_scale=state
        )
        after = state.apply_gradients(grads=gradients)
        stats = amp.keep_if_finite(after, new, state.batch_stats)
        # Flax counts every step; the steps applied are counted like this.
        count = amp.keep_if_finite(after, after.step, state.step)
        return after.replace(batch_stats=stats, step=count), loss

    start = variables()
    return Run(
        State.create(apply_fn=None, tx=SCALED, **start),
        jax.jit(step),
        lambda state: state,
        lambda state: (
            *(state.params, state.batch_stats, state.step),
            state.opt_state.inner_state,
        ),
    )


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.linear(x)))))


def nnx_optimizer(keeps):
    """`keeps(optimizer, model)` returns what takes back all but the parameters."""
    model = NnxNet()
    optimizer = nnx.Optimizer(model, SCALED, wrt=nnx.Param)
    loss_of = amp.autocast(lambda m, x: jnp.mean(jnp.square(m(x) - 1.0)), F16)

    @nnx.jit
    def step(model, optimizer, x):
        keep = keeps(optimizer, model)
        loss, gradients = amp.value_and_grad(loss_of)(model, x, loss_scale=optimizer)
        optimizer.update(model, gradients)
        keep()
        return loss

    def written(carry):
        model, optimizer = carry
        kinds = nnx.Any(nnx.Param, nnx.BatchStat, nnx.RngCount)
        state = nnx.state(model, kinds), nnx.state(optimizer.opt_state.inner_state)
        # The Variables of a State change in place.
        return jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(state)))

    return Run(
        (model, optimizer),
        lambda carry, x: (carry, step(*carry, x)),
        lambda carry: carry[1],
        written,
    )


def statistics_and_counts(optimizer, model):
    kept = nnx.Any(nnx.BatchStat, nnx.RngCount)
    before = nnx.as_pure(nnx.state(model, kept))

    def keep():
        after = nnx.as_pure(nnx.state(model, kept))
        nnx.update(model, amp.keep_if_finite(optimizer, after, before))

    return keep


def whole_model(optimizer, model):
    before = nnx.clone(model)

    def keep():
        assert amp.keep_if_finite(optimizer, model, before) is model

    return keep


CARRIERS = {
    "by hand": by_hand,
    "TrainState": train_state,
    "nnx, its statistics": lambda: nnx_optimizer(statistics_and_counts),
    "nnx, the whole model": lambda: nnx_optimizer(whole_model),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_run_trains_and_a_skipped_step_leaves_all_but_the_scale(carrier):
    run = CARRIERS[carrier]()
    carry, first = run.step(run.carry, X)
    before = run.written(carry)
    carry, loss = run.step(carry, X.at[0, 0].set(jnp.inf))
    assert not jnp.isfinite(loss)
    chex.assert_trees_all_equal(run.written(carry), before)
    chex.assert_trees_all_equal_dtypes(run.written(carry), before)
    holder = run.holder(carry)
    assert not amp.last_step_finite(holder)
    assert amp.loss_scale_of(holder).value == 2.0**9
    assert amp.metrics(holder)["skipped_total"] == 1
    for _ in range(4):
        carry, last = run.step(carry, X)
    assert last < first
    # A good step writes all of it.
    pairs = zip(*map(jax.tree.leaves, (run.written(carry), before)), strict=True)
    assert all((new != old).any() for new, old in pairs)
    amp.check_scale(run.holder(carry), 0)


# Along a fixed slope, in a scan


BADS = np.array([0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0], bool)


def expected_run(bads):
    """Weights, scale and applied steps of plain descent: in numpy, in float64."""
    w, scale, applied, good = np.array([1.0, 2.0]), 64.0, 0, 0
    for bad in bads:
        if bad:
            scale, good = scale / 2.0, 0
            continue
        w, applied, good = w - 0.25 * np.array([0.5, -0.25]), applied + 1, good + 1
        if good == 2:
            scale, good = scale * 2.0, 0
    return w, scale, applied


def descent():
    return amp.with_loss_scale(optax.sgd(0.25), dynamic(64.0, growth_interval=2))


def linear_loss(w, bad):
    slope = jnp.array([0.5, -0.25])
    return jnp.sum(w.astype(jnp.float32) * slope) * jnp.where(bad, jnp.inf, 1.0)


class Weights(nnx.Module):
    def __init__(self, dtype):
        self.w = nnx.Param(jnp.array([1.0, 2.0], dtype))
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def loss(self, bad):
        loss = linear_loss(self.w[...], bad)
        self.seen[...] += 1.0 + 0.0 * loss
        return loss


def epochs_of_train_state(dtype):
    """Weights, scales and counted steps after each of three scans."""

    def step(state, bad):
        gradients = amp.grad(lambda params: linear_loss(params["w"], bad))(
            state.params, loss_scale=state
        )
        new = state.apply_gradients(grads=gradients)
        new = new.replace(step=amp.keep_if_finite(new, new.step, state.step))
        return new, amp.loss_scale_of(new).value

    @jax.jit
    @chex.assert_max_traces(n=1)
    def epoch(state, bads):
        return jax.lax.scan(step, state, bads)

    params = {"w": jnp.array([1.0, 2.0], dtype)}
    state, scales = TrainState.create(apply_fn=None, params=params, tx=descent()), []
    for bads in BADS.reshape(3, 4):
        state, values = epoch(state, bads)
        scales.extend(values.tolist())
    return state.params["w"], scales, state.step, state


def epochs_of_nnx(dtype):
    @nnx.jit
    @chex.assert_max_traces(n=1)
    def epoch(model, optimizer, bads):
        graph, start = nnx.split((model, optimizer))

        def step(carry, bad):
            model, optimizer = nnx.merge(graph, carry)
            before = nnx.clone(model)
            _, gradients = amp.value_and_grad(Weights.loss)(
                model, bad, loss_scale=optimizer
            )
            optimizer.update(model, gradients)
            amp.keep_if_finite(optimizer, model, before)
            carry = nnx.state((model, optimizer))
            return nnx.as_pure(carry), amp.loss_scale_of(optimizer).value

        last, scales = jax.lax.scan(step, nnx.as_pure(start), bads)
        nnx.update((model, optimizer), last)
        return scales

    model, scales = Weights(dtype), []
    optimizer = nnx.Optimizer(model, descent(), wrt=nnx.Param)
    for bads in BADS.reshape(3, 4):
        scales.extend(epoch(model, optimizer, jnp.asarray(bads)).tolist())
    return model.w[...], scales, model.seen[...], optimizer


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("epochs", [epochs_of_train_state, epochs_of_nnx])
def test_a_run_is_carried_through_scans_and_compiled_once(epochs, dtype):
    chex.clear_trace_counter()
    w, scales, steps, holder = epochs(dtype)
    expected, _, applied = expected_run(BADS)
    assert scales == [expected_run(BADS[: n + 1])[1] for n in range(len(BADS))]
    assert w.dtype == dtype
    np.testing.assert_array_equal(w, expected)
    assert steps == amp.metrics(holder)["applied"] == applied


# What `keep_if_finite` does to modules


def test_variables_that_a_step_makes_stay_beside_those_that_it_keeps():
    class Caching(NnxNet):
        def __call__(self, x):
            y = super().__call__(x)
            self.made = nnx.Cache(jnp.sum(y))
            return y

    model = Caching()
    tx = amp.with_loss_scale(optax.sgd(0.1), dynamic(8.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = nnx.clone(model)
    kernel = np.array(model.linear.kernel[...])
    loss_of = amp.autocast(lambda model, x: jnp.sum(model(x)))

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = amp.value_and_grad(loss_of)(model, x, loss_scale=optimizer)
        optimizer.update(model, grads)

    step(model, optimizer, np.full_like(X, np.inf))
    model.linear.kernel[...] = jnp.zeros((16, 16))
    assert amp.keep_if_finite(optimizer, model, before) is model
    np.testing.assert_array_equal(model.linear.kernel[...], kernel)
    assert model.made.shape == ()
    # What the step took away is no such variable.
    with pytest.raises(ValueError, match="new and old differ in structure"):
        amp.keep_if_finite(optimizer, before.linear, before)


def test_a_module_is_no_copy_of_itself():
    model = NnxNet()
    state = SCALED.init({})
    with pytest.raises(ValueError, match=r"the same module.*nnx\.clone"):
        amp.keep_if_finite(state, model, model)
    with pytest.raises(ValueError, match=r"a State.*nnx\.clone"):
        amp.keep_if_finite(state, model, nnx.state(model))
