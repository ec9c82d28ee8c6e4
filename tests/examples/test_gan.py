"""The GAN: two losses, each with an optimizer and a loss scale of its own."""

import functools
import sys

import chex
import gan
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from tests.programs import equations

# Tests share compiled steps: one process has the slow ones (`--dist loadgroup`).
pytestmark = pytest.mark.xdist_group("gan")
DTYPES = {
    "float32": jnp.float32,
    "mixed_bfloat16": jnp.bfloat16,
    "mixed_float16": jnp.float16,
}
SCALE = amp.dynamic_loss_scale(2.0**10)
SGD = amp.with_loss_scale(optax.sgd(0.05, momentum=0.5), SCALE)

# Adam of optax raises a float to its integer step count, which strict JAX refuses; the
# rest of the example is run under the strict rules of the suite.
adam_mixes_dtypes = functools.partial(jax.numpy_dtype_promotion, "standard")


@functools.cache
def first_state():
    new_state = jax.jit(lambda: gan.new_state(amp.get_policy("float32"), SGD, 0))
    return jax.device_get(new_state())


def new_state():
    """One that the step may donate."""
    return jax.tree.map(jnp.array, first_state())


def small_batch(number):
    """Some of a batch: without optimisation a convolution of all in half takes long."""
    real, noises = gan.batch_of(number, 0)
    return real[:8], noises[:, :8]


@functools.cache
def step_of(policy):
    return gan.make_train_step(gan.make_losses(policy), SGD)


def plain_losses(discriminator, generator, batch_stats, real, noise):
    """Both losses in f32, as published, without this library."""

    def logits(image):
        return gan.Discriminator().apply({"params": discriminator}, image)

    variables = {"params": generator, "batch_stats": batch_stats}
    fake, _ = gan.Generator().apply(variables, noise, mutable=["batch_stats"])
    to_real, to_fake = jax.nn.sigmoid(logits(real)), jax.nn.sigmoid(logits(fake))
    slopes = jax.vmap(jax.grad(lambda image: logits(image[None])[0]))(real)
    penalty = jnp.mean(jnp.sum(slopes**2, axis=(1, 2, 3)))
    d_loss = -jnp.log(to_real).mean() - jnp.log(1 - to_fake).mean()
    return d_loss + gan.PENALTY * penalty, -jnp.log(to_fake).mean()


@functools.cache
def plain_training(steps=5):
    """The losses of SGD with momentum by hand."""

    @jax.jit
    def step(state, velocity, real, noises):
        discriminator, generator, batch_stats = state

        def move(params, velocity, grads):
            velocity = jax.tree.map(lambda v, g: 0.5 * v + g, velocity, grads)
            params = jax.tree.map(lambda p, v: p - 0.05 * v, params, velocity)
            return params, velocity

        d_loss, grads = jax.value_and_grad(lambda *args: plain_losses(*args)[0])(
            discriminator, generator, batch_stats, real, noises[0]
        )
        discriminator, d_velocity = move(discriminator, velocity[0], grads)
        g_loss, grads = jax.value_and_grad(
            lambda *args: plain_losses(*args)[1], argnums=1
        )(discriminator, generator, batch_stats, real, noises[1])
        variables = {"params": generator, "batch_stats": batch_stats}
        _, updated = gan.Generator().apply(
            variables, noises[1], mutable=["batch_stats"]
        )
        generator, g_velocity = move(generator, velocity[1], grads)
        state = discriminator, generator, updated["batch_stats"]
        return state, (d_velocity, g_velocity), jnp.stack([d_loss, g_loss])

    first = first_state()
    state = first.discriminator, first.generator, first.batch_stats
    velocity = jax.tree.map(np.zeros_like, state[:2])
    losses = []
    for number in range(steps):
        state, velocity, both = step(state, velocity, *gan.batch_of(number, 0))
        losses.append(both)
    return np.array(losses)


@pytest.mark.nightly
@pytest.mark.trains
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_both_losses_are_those_of_plain_f32_to_the_precision_of_the_policy(policy):
    state, losses = new_state(), []
    for number in range(5):
        state, both = step_of(policy)(state, *gan.batch_of(number, 0))
        losses.append(both)
    expected = plain_training()
    # Both have learned more than rounding could pretend.
    assert (np.abs(expected[-1] / expected[0] - 1) > 0.1).all()
    eps = float(jnp.finfo(DTYPES[policy]).eps)
    # Means over 64 images round less than one number: measured, a tenth of bf16's eps
    # and a third of f16's. In f32, what 5 steps make of the order of the sums.
    rtol = 16 * eps if policy == "float32" else eps
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    assert np.asarray(losses).dtype == np.float32
    assert applied(state) == (5, 5)


def applied(state):
    """How many steps the discriminator and the generator have made."""
    both = state.discriminator_opt, state.generator_opt
    return tuple(int(amp.metrics(opt)["applied"]) for opt in both)


def scales(state):
    both = state.discriminator_opt, state.generator_opt
    return tuple(float(amp.loss_scale_of(opt).value) for opt in both)


def parts(state):
    """What belongs to each network, without its loss scale."""
    return (
        (state.discriminator, state.discriminator_opt.inner_state),
        (state.generator, state.generator_opt.inner_state, state.batch_stats),
    )


def assert_all_move(new, old):
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        assert (one != other).any()


@pytest.mark.slow
@pytest.mark.parametrize("pixel", [np.inf, np.nan])
def test_real_images_that_are_not_finite_skip_the_discriminator_alone(pixel):
    step = step_of("mixed_float16")
    state, _ = step(new_state(), *small_batch(0))
    before = jax.device_get(state)
    real, noises = small_batch(1)
    real[3, 4, 4, 0] = pixel
    after, losses = jax.device_get(step(state, real, noises))
    assert applied(after) == (1, 2)
    assert scales(after) == (2.0**9, 2.0**10)
    chex.assert_trees_all_equal(parts(after)[0], parts(before)[0])
    assert_all_move(parts(after)[1], parts(before)[1])
    # It learned from the discriminator that there is, which was not hurt.
    assert not np.isfinite(losses[0]) and np.isfinite(losses[1])
    chex.assert_tree_all_finite(after[:4])

    recovered, losses = step(jax.tree.map(jnp.array, after), *small_batch(2))
    assert applied(recovered) == (2, 3)
    assert np.isfinite(losses).all()


def test_noise_of_the_generator_skips_it_alone_with_its_batch_statistics():
    step = step_of("mixed_float16")
    state, _ = step(new_state(), *small_batch(0))
    before = jax.device_get(state)
    real, noises = small_batch(1)
    good, _ = step(jax.tree.map(jnp.array, before), real, noises)
    noises[1, 3, 4] = np.inf
    after, losses = jax.device_get(step(state, real, noises))
    assert applied(after) == (2, 1)
    assert scales(after) == (2.0**10, 2.0**9)
    chex.assert_trees_all_equal(parts(after)[1], parts(before)[1])
    # The discriminator has learned as if nothing had happened.
    chex.assert_trees_all_equal(parts(after)[0], parts(jax.device_get(good))[0])
    assert np.isfinite(losses[0]) and not np.isfinite(losses[1])


def test_gradients_that_overflow_f16_back_off_the_scale_of_their_loss_alone():
    step = step_of("mixed_float16")
    high = amp.dynamic_loss_scale(2.0**24)
    for number, name in enumerate(("discriminator_opt", "generator_opt")):
        state = new_state()
        optimizer = getattr(state, name)._replace(
            loss_scale=jax.tree.map(jnp.array, high)
        )
        after, losses = step(state._replace(**{name: optimizer}), *small_batch(0))
        assert np.isfinite(losses).all()
        expected = [2.0**10, 2.0**10]
        expected[number] = 2.0**23
        assert scales(after) == tuple(expected)
        assert applied(after) == ((0, 1), (1, 0))[number]


@pytest.mark.parametrize(
    "policy", [pytest.param("float32", marks=pytest.mark.slow), "mixed_float16"]
)
def test_every_matmul_of_both_gradients_is_in_half(policy):
    losses, state = gan.make_losses(policy), first_state()
    counted = gan.matmuls_in_half(losses, state, gan.batch_of(0, 0))
    traced = step_of(policy).trace(new_state(), *gan.batch_of(0, 0))
    operands = [
        {v.aval.dtype for v in eqn.invars}
        for eqn in equations(traced.jaxpr)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    # Those of the step: the two gradients, and nothing else that multiplies.
    assert set(map(frozenset, operands)) == {frozenset({jnp.dtype(DTYPES[policy])})}
    half, every = zip(*(map(int, each.split("/")) for each in counted), strict=True)
    assert sum(every) == len(operands)
    assert half == ((0, 0) if policy == "float32" else every)


@pytest.mark.slow
def test_without_a_penalty_the_loss_lacks_it_and_its_matmuls():
    state, (real, noises) = first_state(), gan.batch_of(0, 0)
    args = state.discriminator, state.generator, state.batch_stats, real, noises[0]
    loss, weighted = (
        jax.jit(gan.make_losses("float32", penalty)[0]) for penalty in (0.0, 2.0)
    )

    def logit(image):
        return gan.Discriminator().apply({"params": state.discriminator}, image[None])

    slopes = jax.jit(jax.vmap(jax.grad(lambda image: logit(image)[0])))(real)
    expected = np.square(np.float64(slopes)).sum(axis=(1, 2, 3)).mean()
    difference = float(weighted(*args)) - float(loss(*args))
    assert expected > 1e-3
    # A difference of numbers near 2.
    eps = float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(difference, 2 * expected, atol=16 * eps, rtol=16 * eps)


def test_quality_of_held_out_digits_is_high_and_of_one_image_is_low():
    train, held_out = gan.real_images()
    real = gan.quality(held_out)
    assert real.digits == 10 and real.spread > 9.5 and real.confidence > 0.9
    # The same distribution.
    np.testing.assert_allclose(real.distance, 0, atol=1e-6)
    same = gan.quality(np.repeat(train[:1], 50, axis=0))
    assert same.digits == 1
    np.testing.assert_allclose(same.spread, 1)
    noise = np.random.default_rng(0).uniform(-1, 1, (500, 8, 8, 1))
    assert gan.quality(noise).distance > 10 > gan.quality(train).distance


def test_distance_of_moved_and_stretched_rows_is_the_closed_form():
    rows = np.random.default_rng(0).standard_normal((200, 5))
    np.testing.assert_allclose(gan.distance(rows, rows + 2), 5 * 4)
    # Between one distribution and itself 3 times as wide.
    centred = rows - rows.mean(axis=0)
    expected = (3 - 1) ** 2 * np.trace(np.cov(rows.T))
    np.testing.assert_allclose(gan.distance(centred, 3 * centred), expected)


def test_batches_and_noises_are_decided_by_step_and_seed():
    real, noises = gan.batch_of(3, 1)
    assert real.shape == (gan.BATCH, 8, 8, 1)
    assert noises.shape == (2, gan.BATCH, gan.NOISE)
    assert real.min() == -1 and real.max() == 1
    chex.assert_trees_all_equal((real, noises), gan.batch_of(3, 1))
    for other in (gan.batch_of(4, 1), gan.batch_of(3, 2)):
        assert (other[0] != real).any() and (other[1] != noises).any()


@pytest.mark.slow
def test_two_steps_of_every_policy_print_a_table_and_digits_and_write_a_plot(
    monkeypatch, capsys, tmp_path
):
    plot = tmp_path / "samples.png"
    monkeypatch.setattr(sys, "argv", f"gan.py --steps 2 --plot {plot}".split())
    monkeypatch.setenv("COLUMNS", "88")
    monkeypatch.setattr(gan, "BATCH", 8)
    monkeypatch.setattr(gan, "SAMPLES", 100)
    with adam_mixes_dtypes():
        gan.main()
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    for policy, scale, matmuls in (
        ("float32", "2**0", ("0/29", "0/14")),
        ("mixed_bfloat16", "2**0", ("29/29", "14/14")),
        ("mixed_float16", "2**16", ("29/29", "14/14")),
    ):
        (at,) = [i for i, row in enumerate(rows) if row[:2] == [policy, "D"]]
        first, second = rows[at : at + 2]
        assert first[3:] == ["0", scale, matmuls[0]]
        assert second[0] == "G" and second[2:5] == ["0", scale, matmuls[1]]
        assert len(second) == 9
        # A discriminator that knows nothing: two coins to call, and one.
        coin = np.log(2)
        assert abs(float(first[2]) - 2 * coin) < 0.5
        assert abs(float(second[1]) - coin) < 0.2
        _, drawn = printed.split(f"─ {policy} ─")
        # Five images of 8 x 8, two characters to a pixel.
        lines = drawn.splitlines()[1:9]
        assert set("".join(lines)) <= set(" .:*#")
        assert max(map(len, lines)) <= 5 * 16 + 4 * 2
    assert len(drawn.splitlines()) == 1 + 8
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
@pytest.mark.trains
def test_half_precision_makes_digits_as_good_as_those_of_float32():
    def outcome(result):
        made = gan.quality(result.images)
        return made._asdict() | {"scales": result.scales, "skips": result.skips}

    results = {}
    for policy in gan.POLICIES:
        with adam_mixes_dtypes():
            results[policy] = outcome(gan.train(policy))
    for made in results.values():
        # Measured: 0.78 to 0.79, 9.2 to 9.9, 1.9 to 2.2.
        assert made["digits"] == 10
        assert made["confidence"] > 0.75
        assert made["spread"] > 8.5
        assert made["distance"] < 3
    # Each scale finds a limit of its own, and each loses few steps to it.
    in_f16 = results["mixed_float16"]
    discriminator, generator = in_f16["scales"]
    assert discriminator < generator
    assert all(0 < skips < 0.03 * gan.STEPS for skips in in_f16["skips"])
