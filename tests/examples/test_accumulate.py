"""The accumulation example: what N micro-batches make, and what one bad one costs."""

import functools
import itertools
import sys

import accumulate
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp

PIECES = 4
DTYPES = {"float32": jnp.float32, "mixed_float16": jnp.float16}
# f32 has no loss scale, and skips all the same.
BACKOFF = {"float32": 1, "mixed_float16": 0.5}
# A step of each is compiled: that of f32 in slow tests alone.
BOTH = pytest.mark.parametrize(
    "policy", [pytest.param("float32", marks=pytest.mark.slow), "mixed_float16"]
)

# MultiSteps of optax divides by its integer count, which strict JAX refuses. That the
# rest mixes no dtypes has a test of its own; so each step is compiled only once.
multi_steps_mixes_dtypes = functools.partial(jax.numpy_dtype_promotion, "standard")


@functools.cache
def first_params():
    image = np.zeros((1, 8, 8, 1), np.float32)
    return accumulate.initialise(jax.random.key(0), image)["params"]


def windows(steps, **how):
    how = {"seed": 0, "pieces": PIECES, "poisoned": False} | how
    return list(accumulate.windows(steps, **how))


def mean_loss(params, batch):
    """The loss of plain f32 JAX, written without this library."""
    logits = accumulate.MODEL.apply({"params": params}, batch["image"])
    label = batch["label"][..., None]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), label, axis=-1).mean()


@jax.jit
def plain_step(params, velocity, batch):
    grads = jax.grad(mean_loss)(params, batch)
    velocity = jax.tree.map(lambda v, g: accumulate.MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - accumulate.RATE * v, params, velocity)
    return params, velocity


def plain_training(groups):
    """The parameters after one step on the images of each group, all at once."""
    params = first_params()
    velocity = jax.tree.map(np.zeros_like, params)
    for group in groups:
        batch = {k: np.concatenate([one[k] for one in group]) for k in group[0]}
        params, velocity = plain_step(params, velocity, batch)
    return params


def micro_batches(steps, **how):
    pieces = [accumulate.given(w, "MultiSteps") for w in windows(steps, **how)]
    return [batch for window in pieces for batch in window]


def step_of(policy, way):
    return accumulate.compiled(amp.get_policy(policy), way, PIECES)


def new_state(policy, way):
    _, tx = step_of(policy, way)
    params = jax.tree.map(jnp.copy, first_params())
    return params, tx.init(params)


def run(policy, way, batches, state=None):
    step, _ = step_of(policy, way)
    state = new_state(policy, way) if state is None else state
    for batch in batches:
        with multi_steps_mixes_dtypes():
            *state, _ = step(*state, batch)
    return tuple(state)


def batches_for(way, steps, **how):
    return [b for w in windows(steps, **how) for b in accumulate.given(w, way)]


def assert_moved_alike(params, expected, dtype):
    """That what training changed is the same, to the precision of `dtype`."""
    moved, wanted = (
        np.concatenate(
            [
                np.ravel(np.float64(new) - np.float64(old))
                for new, old in zip(
                    jax.tree.leaves(tree), jax.tree.leaves(first_params()), strict=True
                )
            ]
        )
        for tree in (params, expected)
    )
    error = np.linalg.norm(moved - wanted) / np.linalg.norm(wanted)
    assert error < TOLERANCE[dtype], error


# Measured: 9 eps of f32 and 4 of f16. One micro-batch of 8 exchanged is off by 0.05.
TOLERANCE = {
    jnp.float32: 32 * float(jnp.finfo(jnp.float32).eps),
    jnp.float16: 8 * float(jnp.finfo(jnp.float16).eps),
}


@BOTH
@pytest.mark.parametrize("way", accumulate.WAYS)
def test_accumulated_gradients_train_as_the_whole_batch_does(policy, way):
    params, opt_state = run(policy, way, batches_for(way, 3))
    assert_moved_alike(params, plain_training(map_windows(3)), DTYPES[policy])
    assert amp.metrics(opt_state)["skipped_total"] == 0


@BOTH
def test_step_by_hand_mixes_no_dtypes(policy):
    step, _ = step_of(policy, "by hand")
    jax.eval_shape(step, *new_state(policy, "by hand"), windows(1)[0])


def map_windows(steps, **how):
    return [accumulate.given(w, "MultiSteps") for w in windows(steps, **how)]


@BOTH
def test_bad_micro_batch_is_left_out_and_its_window_ends_one_later(policy):
    stream = micro_batches(2, poisoned=True)
    good = [b for b in stream if np.isfinite(b["image"]).all()]
    assert len(stream) == 2 * PIECES and len(good) == 2 * PIECES - 1
    params, opt_state = run(policy, "MultiSteps", stream)
    # The second window lacks one, so it has moved nothing yet.
    expected = plain_training([good[:PIECES]])
    assert_moved_alike(params, expected, DTYPES[policy])
    assert opt_state.inner_state.mini_step == PIECES - 1

    more = micro_batches(1, seed=1)[0]
    params, opt_state = run(policy, "MultiSteps", [more], (params, opt_state))
    expected = plain_training([good[:PIECES], [*good[PIECES:], more]])
    assert_moved_alike(params, expected, DTYPES[policy])
    assert opt_state.inner_state.mini_step == 0
    assert amp.metrics(opt_state)["skipped_total"] == 1


@BOTH
def test_bad_micro_batch_changes_neither_the_sum_nor_the_count(policy):
    stream = micro_batches(2, poisoned=True)
    at = next(n for n, b in enumerate(stream) if not np.isfinite(b["image"]).all())
    state = run(policy, "MultiSteps", stream[:at])
    before = jax.device_get(state)
    assert before[1].inner_state.mini_step == at % PIECES > 0
    after = jax.device_get(run(policy, "MultiSteps", stream[at : at + 1], state))
    chex.assert_trees_all_equal(after[0], before[0])
    chex.assert_trees_all_equal(after[1].inner_state, before[1].inner_state)
    assert after[1].loss_scale.value == before[1].loss_scale.value * BACKOFF[policy]


@BOTH
def test_by_hand_a_bad_micro_batch_drops_its_whole_window(policy):
    # One window before and one after the bad one.
    before, bad, after = windows(3, poisoned=True)[0:3]
    assert not np.isfinite(bad["image"]).all()
    state = run(policy, "by hand", [before])
    kept = jax.device_get(state)
    state = run(policy, "by hand", [bad], state)
    now = jax.device_get(state)
    chex.assert_trees_all_equal(now[0], kept[0])
    chex.assert_trees_all_equal(now[1].inner_state, kept[1].inner_state)
    assert now[1].loss_scale.value == kept[1].loss_scale.value * BACKOFF[policy]
    params, opt_state = run(policy, "by hand", [after], state)
    pieces = [accumulate.given(w, "MultiSteps") for w in (before, after)]
    assert_moved_alike(params, plain_training(pieces), DTYPES[policy])
    assert amp.metrics(opt_state)["skipped_total"] == 1


@pytest.mark.breadth(1)
@pytest.mark.parametrize("first", [2.0**10, 2.0**24])
def test_scale_may_change_within_a_window_that_is_summed(first):
    # It doubles after two finite micro-batches; at 2**24 the first gradients overflow.
    params, opt_state = new_state("mixed_float16", "MultiSteps")
    scale = amp.dynamic_loss_scale(first, growth_interval=2)
    state = params, opt_state._replace(loss_scale=scale)
    (window,) = windows(1)
    batches, scales = accumulate.given(window, "MultiSteps"), []
    # Read again until it is in the sum.
    for batch in batches:
        finite = False
        while not finite:
            scales.append(float(amp.loss_scale_of(state).value))
            state = run("mixed_float16", "MultiSteps", [batch], state)
            finite = bool(amp.last_step_finite(state))
    skipped = int(amp.metrics(state)["skipped_total"])
    assert (skipped > 0) == (first == 2.0**24)
    assert len(scales) == PIECES + skipped
    assert len(set(scales)) > 1
    assert_moved_alike(state[0], plain_training([batches]), jnp.float16)


def test_windows_are_the_same_images_however_many_pieces_they_are_in():
    whole, pieces = (windows(2, pieces=pieces) for pieces in (1, 8))
    for one, other in zip(whole, pieces, strict=True):
        assert other["image"].shape == (8, accumulate.BATCH // 8, 8, 8, 1)
        for name in ("image", "label"):
            flat = other[name].reshape(one[name].shape)
            np.testing.assert_array_equal(flat, one[name])
    for other in (windows(2, seed=1), windows(2)[::-1]):
        assert (whole[0]["label"].ravel() != other[0]["label"].ravel()).any()


def test_one_pixel_of_all_windows_is_poisoned():
    bad = [np.isinf(window["image"]).sum() for window in windows(4, poisoned=True)]
    assert sorted(bad) == [0, 0, 0, 1]
    assert not any(np.isinf(window["image"]).any() for window in windows(4))


def test_two_steps_print_a_row_for_each_way_with_and_without_a_bad_pixel(
    monkeypatch, capsys
):
    arguments = "accumulate.py --policy mixed_float16 --steps 2 --pieces 4"
    monkeypatch.setattr(sys, "argv", arguments.split())
    monkeypatch.setenv("COLUMNS", "88")
    with multi_steps_mixes_dtypes():
        accumulate.main()
    rows = [r.split() for r in capsys.readouterr().out.splitlines() if "mixed_f" in r]
    # Without the loss and its difference to that of the whole batch.
    assert [row[1:-6] + row[-4:] for row in rows] == [
        ["whole", "batch", "no", "2", "0", "0", "2**16"],
        ["MultiSteps", "no", "2", "0", "0", "2**16"],
        ["by", "hand", "no", "2", "0", "0", "2**16"],
        ["MultiSteps", "yes", "1", "1", "64", "2**15"],
        ["by", "hand", "yes", "1", "1", "256", "2**15"],
    ]
    losses = [float(row[-6]) for row in rows]
    np.testing.assert_allclose(losses[1:3], losses[0], rtol=TOLERANCE[jnp.float16])
    # One update instead of two, and from the same parameters.
    assert losses[0] < losses[3] and losses[3] == pytest.approx(losses[4], rel=1e-3)


@pytest.mark.slow
def test_script_compares_both_policies_without_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", "accumulate.py --steps 1 --seed 1 --pieces 4".split()
    )
    monkeypatch.setenv("COLUMNS", "88")
    with multi_steps_mixes_dtypes():
        accumulate.main()
    printed = capsys.readouterr().out
    for policy in accumulate.POLICIES:
        assert printed.count(f" {policy} ") == 5


@pytest.mark.slow
def test_whole_training_ends_at_the_loss_of_the_whole_batch():
    runs = itertools.product(accumulate.POLICIES, accumulate.WAYS)

    with multi_steps_mixes_dtypes():
        results = {each: accumulate.train(*each) for each in runs}
    whole = results["float32", "whole batch"].loss
    assert whole < 0.2
    for (policy, _), found in results.items():
        assert (found.updates, found.skips) == (accumulate.STEPS, 0)
        rtol = 1e-4 if policy == "float32" else 0.02
        np.testing.assert_allclose(found.loss, whole, rtol=rtol)
