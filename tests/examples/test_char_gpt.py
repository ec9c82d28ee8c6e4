"""The character-level GPT: a scan over layers that are computed again, and its text."""

import functools

import char_gpt
import chex
import digits_report
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from tests.programs import equations
from tests.scripts import run_example

# Tests share trainings: one process has the slow ones (`--dist loadgroup`).
pytestmark = pytest.mark.xdist_group("char_gpt")
HALF = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
TINY = char_gpt.Model(layers=2, width=32, context=16)
SGD = amp.with_loss_scale(optax.sgd(0.1), amp.no_loss_scale())

# Adam of optax raises a float to its integer step count, which strict JAX refuses; the
# rest of the example is run under the strict rules of the suite.
adam_mixes_dtypes = functools.partial(jax.numpy_dtype_promotion, "standard")


@functools.cache
def first_params():
    return jax.jit(TINY.init)(jax.random.key(0), batch(0)[:, :-1])["params"]


def shapes(model):
    """What the parameters are, without any."""
    tokens = batch(0, model)[:, :-1]
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


def batch(step, model=TINY):
    return char_gpt.batch_of(step, 0, model.context)


def loss_under(policy, model=TINY):
    return char_gpt.make_loss(amp.autocast(model.apply, policy))


@functools.cache
def trained(policy, model=TINY, steps=20):
    with adam_mixes_dtypes():
        return char_gpt.train(policy, steps, model=model)


@pytest.mark.slow
def test_two_steps_of_the_script_print_a_table_and_a_text_for_every_policy():
    policies = ["mixed_float16", "fp8"]
    options = "--steps 2 --seed 1 --length 30 --layers 1 --width 16".split()
    for policy in policies:
        options += ["--policy", policy]
    done = run_example("char_gpt", *options, columns=88)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    rows = [line.split() for line in printed.splitlines() if "MB" in line]
    assert [row[0] for row in rows] == policies
    # There is no f32 run to take a ratio to.
    _, train_loss, validation_loss, skips, scale, half, saved, ratio = rows[0]
    # Knowing nothing costs the logarithm of how many characters there are.
    nothing = np.log(len(char_gpt.vocabulary()))
    assert abs(float(train_loss) - nothing) < 1
    assert abs(float(validation_loss) - nothing) < 1
    assert abs(float(rows[1][2]) - float(validation_loss)) < 0.01
    assert (skips, half, scale) == ("0", "34/34", "65536")
    assert saved.endswith("MB")
    assert float(ratio.removesuffix("x")) < 1
    for policy in policies:
        _, written = printed.split(f"─ {policy} ─")
        assert written.splitlines()[1].startswith(char_gpt.PROMPT)


def test_tokens_are_the_whole_text_and_the_last_tenth_is_held_out():
    train, held_out = char_gpt.tokens()
    characters = np.array(list(char_gpt.vocabulary()))
    assert "".join(characters[np.concatenate([train, held_out])]) == char_gpt.text()
    assert len(held_out) == -(-len(char_gpt.text()) // 10)


def test_batches_are_pieces_of_the_text_that_step_and_seed_decide():
    train = "".join(np.array(list(char_gpt.vocabulary()))[char_gpt.tokens()[0]])
    rows = char_gpt.batch_of(3, seed=1, context=16)
    assert rows.shape == (char_gpt.BATCH, 17)
    for row in rows:
        assert "".join(char_gpt.vocabulary()[token] for token in row) in train
    np.testing.assert_array_equal(rows, char_gpt.batch_of(3, seed=1, context=16))
    for other in (char_gpt.batch_of(4, 1, 16), char_gpt.batch_of(3, 2, 16)):
        assert (other != rows).any()


@functools.cache
def losses_of_plain_jax():
    """The losses of the f32 program, written without this library."""
    params, key = first_params(), jax.random.key(0)
    rate = optax.warmup_cosine_decay_schedule(0, 2e-3, 2, 21)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1)
    )

    @jax.jit
    def step(params, opt_state, rows, dropout_key):
        def loss_fn(params):
            logits = TINY.apply(
                {"params": params}, rows[:, :-1], True, rngs={"dropout": dropout_key}
            )
            picked = jnp.take_along_axis(
                jax.nn.log_softmax(logits), rows[:, 1:, None], axis=-1
            )
            return -picked.mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses, opt_state = [], tx.init(params)
    with adam_mixes_dtypes():
        for number in range(20):
            dropout_key = jax.random.fold_in(key, number)
            params, opt_state, loss = step(
                params, opt_state, batch(number), dropout_key
            )
            losses.append(float(loss))
    return np.array(losses)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_losses_are_those_of_plain_f32_to_the_precision_of_the_policy(policy):
    expected = losses_of_plain_jax()
    assert expected[-1] < 0.95 * expected[0]
    eps = float(jnp.finfo(HALF.get(policy, jnp.float32)).eps)
    # A mean over 128 characters rounds less than one number. In f32, what 20 steps make
    # of the order of the sums.
    tolerance = eps if policy in HALF else 100 * eps
    np.testing.assert_allclose(trained(policy).losses, expected, rtol=tolerance)
    assert trained(policy).losses.dtype == np.float32
    assert trained(policy).skips == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_validation_loss_is_the_mean_over_the_held_out_text(policy):
    result, (_, held_out) = trained(policy), char_gpt.tokens()
    pieces = (len(held_out) - 1) // TINY.context
    given = held_out[: pieces * TINY.context].reshape(pieces, -1)
    next_ones = held_out[1 : pieces * TINY.context + 1].reshape(pieces, -1)
    logits = np.float64(jax.jit(TINY.apply)({"params": result.params}, given))
    logits -= logits.max(axis=-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_p, next_ones[..., None], axis=-1).mean()
    eps = float(jnp.finfo(HALF.get(policy, jnp.float32)).eps)
    np.testing.assert_allclose(result.validation_loss, expected, rtol=eps)


@pytest.mark.slow
def test_run_that_was_saved_goes_on_as_if_it_had_not_stopped():
    tx = amp.with_loss_scale(char_gpt.make_optimizer(6), amp.dynamic_loss_scale())
    step = char_gpt.make_train_step(loss_under("mixed_float16"), tx)

    def run(state, numbers):
        for number in numbers:
            key = jax.random.fold_in(jax.random.key(0), number)
            *state, _ = step(*state, batch(number), key)
        return tuple(state)

    def new():
        params = jax.tree.map(jnp.copy, first_params())
        return params, jax.jit(tx.init)(params)

    with adam_mixes_dtypes():
        straight = run(new(), range(6))
        saved = flax.serialization.to_bytes(run(new(), range(3)))
        restored = flax.serialization.from_bytes(new(), saved)
        # From numpy to arrays that the step may donate.
        resumed = run(jax.tree.map(jnp.array, restored), range(3, 6))
    chex.assert_trees_all_equal(resumed, straight)


@functools.cache
def trained_by_the_caller():
    tx = amp.with_loss_scale(optax.sgd(0.0), amp.static_loss_scale(8.0))
    return char_gpt.train("mixed_float16", 2, model=TINY, tx=tx, params=first_params())


@pytest.mark.slow
def test_optimizer_and_parameters_can_be_the_callers_own():
    params = first_params()
    given = jax.tree.map(np.array, params)
    result = trained_by_the_caller()
    # With a learning rate of 0 nothing moves.
    chex.assert_trees_all_equal(result.params, given)
    assert result.scale == 8
    # The caller's arrays were not donated.
    chex.assert_trees_all_equal(params, given)


def step_program(policy):
    params = shapes(TINY)
    opt_state = jax.eval_shape(SGD.init, params)
    step = char_gpt.make_train_step(loss_under(policy), SGD)
    return step.trace(params, opt_state, batch(0), jax.random.key(0)).jaxpr


@pytest.mark.slow
def test_every_matmul_of_a_training_step_is_in_half():
    policy = "mixed_float16"
    operands = [
        {v.aval.dtype for v in eqn.invars}
        for eqn in equations(step_program(policy))
        if eqn.primitive.name == "dot_general"
    ]
    # A layer has 8, each with 2 in the backward pass, which computes all but the last
    # one again; the head has 3. All layers are one scan.
    assert operands == [{jnp.dtype(HALF[policy])}] * (8 + 16 + 7 + 3)
    assert trained(policy).matmuls == (len(operands), len(operands))
    assert trained("float32").matmuls == (0, len(operands))


@pytest.mark.breadth(1)
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_layers_are_still_scanned_and_computed_again_in_the_backward_pass(policy):
    scans = [
        eqn for eqn in equations(step_program(policy)) if eqn.primitive.name == "scan"
    ]
    assert {eqn.params["length"] for eqn in scans} == {TINY.layers}
    # Autocast itself makes operations again; they have no matmuls.
    matmuls = [
        sum(
            eqn.primitive.name == "dot_general"
            for eqn in equations(inner.params["jaxpr"])
        )
        for scan in scans
        for inner in equations(scan.params["jaxpr"])
        if inner.params.get("differentiated") and "policy" in inner.params
    ]
    # All but the last of the forward pass, and both of each in the backward pass.
    assert max(matmuls, default=0) == 7 + 16


def kept_of(loss_fn, model=TINY):
    return digits_report.saved_for_backward(
        *(lambda *args: (loss_fn(*args), None), shapes(model)),
        *(batch(0), jax.random.key(0)),
    )


@pytest.mark.parametrize(
    "policy", [pytest.param("float32", marks=pytest.mark.slow), "mixed_float16"]
)
def test_only_the_residual_stream_is_kept_of_a_layer(policy):
    deeper = char_gpt.Model(layers=3, width=32, context=16)
    in_two = kept_of(loss_under(policy))
    in_three = kept_of(loss_under(policy, deeper), deeper)
    # One activation of the model's width, and the layer's dropout key.
    stream = jnp.zeros((char_gpt.BATCH, 16, 32), HALF.get(policy, jnp.float32))
    key = jax.random.key_data(jax.random.key(0))
    assert in_three - in_two == stream.nbytes + key.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_training_says_what_is_kept_with_and_without_its_policy(policy):
    result = trained_by_the_caller() if policy == "mixed_float16" else trained(policy)
    plain = kept_of(char_gpt.make_loss(TINY.apply))
    assert result.saved == (kept_of(loss_under(policy)), plain)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_sample_changes_with_its_seed_and_not_with_its_length(policy):
    write = functools.partial(char_gpt.sample, first_params(), policy)
    written = write(40, model=TINY)
    assert len(written) == 40
    assert set(written) <= set(char_gpt.vocabulary())
    assert written == write(40, model=TINY)
    assert write(1, model=TINY) == written[0]
    assert write(40, seed=1, model=TINY) != written


@pytest.mark.slow
def test_greedy_sample_is_the_likeliest_character_after_the_last_window():
    params, characters = first_params(), char_gpt.vocabulary()
    # Larger than trained ones, so that what is likeliest changes with the window.
    params = jax.tree.map(lambda leaf: 3 * leaf, params)
    expected = [characters.index(character) for character in char_gpt.PROMPT]
    apply = jax.jit(lambda window: TINY.apply({"params": params}, window))
    for _ in range(40):
        window = expected[-TINY.context :]
        # What follows does not matter, whatever it is.
        filled = np.array([window + [7] * (TINY.context - len(window))])
        expected.append(int(jnp.argmax(apply(filled)[0, len(window) - 1])))
    written = char_gpt.sample(params, "float32", 40, 0.0, model=TINY)
    assert char_gpt.PROMPT + written == "".join(characters[t] for t in expected)
    assert len(set(written)) > 5
    assert written == char_gpt.sample(params, "float32", 40, 0.0, seed=1, model=TINY)


def bigram_loss():
    """The held-out loss of counting which character follows which, in f64."""
    train, held_out = char_gpt.tokens()
    counts = np.ones((len(char_gpt.vocabulary()),) * 2)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    probability = counts / counts.sum(axis=1, keepdims=True)
    return -np.log(probability[held_out[:-1], held_out[1:]]).mean()


@pytest.mark.nightly
@pytest.mark.trains
def test_half_precision_reaches_the_loss_of_float32():
    def outcome(result):
        return {
            "validation_loss": result.validation_loss,
            "end": float(result.losses[-20:].mean()),
            "skips": result.skips,
        }

    def of(policy):
        with adam_mixes_dtypes():
            return outcome(char_gpt.train(policy, char_gpt.STEPS))

    # bf16, which cannot overflow, is left to the script.
    reference, result = of("float32"), of("mixed_float16")
    # It has learned as much as pairs of characters tell. Measured: 0.987 of that.
    assert reference["validation_loss"] < 1.02 * bigram_loss()
    assert result["validation_loss"] <= 1.02 * reference["validation_loss"]
    assert result["end"] <= 1.02 * reference["end"]
    assert result["skips"] <= 0.02 * char_gpt.STEPS
