"""The character-level GPT with fp8: what runs in 8 bits, and how wrong gradients are.

The bounds hold for this model: 2 layers of width 128, weights begun at 0.02, trained
for 150 steps, the head in bf16. With Flax's first weights errors are twice as large.
"""

import functools

import char_gpt
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests import kept, measures
from tests.scripts import run_example

# Tests share trainings: one process has them.
pytestmark = [pytest.mark.xdist_group("char_gpt_fp8"), pytest.mark.trains]
MODEL = char_gpt.Model(layers=2, width=128, context=32)
STEPS = 150
POLICIES = {"e5m2": "fp8", "e4m3": str(amp.Policy(matmul=amp.Fp8(backward="e4m3")))}


def dtypes_by_module(policy):
    model = char_gpt.Model(layers=2, width=32, context=16)
    tokens = char_gpt.batch_of(0, 0, 16)[:, :-1]
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    report = amp.explain(model.apply, char_gpt.policy_for(policy))(params, tokens)
    return {each.module: each.dtype for each in report.equations if each.matmuls}


def test_all_layers_but_the_head_and_attention_itself_are_in_8_bits():
    found = dtypes_by_module("fp8")
    in_bf16 = [name for name, dtype in found.items() if dtype == "bf16"]
    assert [name.rsplit("/")[-1] for name in in_bf16] == [
        "MultiHeadDotProductAttention_0",
        "head",
    ]
    in_8_bits = [name.rsplit("/")[-1] for name in found if name not in in_bf16]
    assert in_8_bits == ["query", "key", "value", "out", "Dense_0", "Dense_1"]
    assert {found[name] for name in found if name not in in_bf16} == {"e4m3"}
    assert set(dtypes_by_module("mixed_bfloat16").values()) == {"bf16"}


@pytest.mark.slow
def test_script_compares_fp8_with_bf16():
    options = "--steps 3 --length 20 --layers 2 --width 32".split()
    policies = ("--policy", "mixed_bfloat16", "--policy", "fp8")
    done = run_example("char_gpt", *policies, *options, columns=100)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "MB" in line]
    assert [row[0] for row in rows] == ["mixed_bfloat16", "fp8"]
    bf16, fp8 = (float(row[2]) for row in rows)
    # Knowing nothing costs the logarithm of how many characters there are.
    assert abs(fp8 - np.log(len(char_gpt.vocabulary()))) < 1
    assert abs(fp8 - bf16) < 0.01


def first_params():
    """Biases of 0, scales of 1, and random numbers of size 0.02."""
    tokens = char_gpt.batch_of(0, 0, MODEL.context)[:, :-1]
    params = char_gpt.initialise(MODEL, jax.random.key(0), tokens)
    leaves, tree = jax.tree.flatten_with_path(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            0.02 * jax.random.normal(key, leaf.shape)
            if path[-1].key in ("kernel", "embedding")
            else leaf
            for key, (path, leaf) in zip(keys, leaves, strict=True)
        ],
    )


@functools.cache
def trained(policy):
    # Adam of optax mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        return char_gpt.train(policy, STEPS, model=MODEL, params=first_params())


@functools.cache
def kept_losses(policy):
    """The first and last losses of a training, and the one of validation."""

    def outcome(result):
        first, last = float(result.losses[0]), float(result.losses[-20:].mean())
        return {"first": first, "last": last, "validation": result.validation_loss}

    train = functools.partial(
        char_gpt.train, policy, STEPS, model=MODEL, params=first_params()
    )
    # Adam of optax mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        return kept.training(f"char_gpt_fp8 {policy}", train, outcome, [char_gpt])


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_fp8_trains_to_the_loss_of_bf16(policy):
    result, reference = kept_losses(policy), kept_losses("mixed_bfloat16")
    assert reference["last"] < 0.75 * reference["first"]
    assert result["last"] - reference["last"] <= 0.005
    assert result["validation"] - reference["validation"] <= 0.005


@functools.cache
def gradients_in_f64():
    """At the weights that f32 has trained, without dropout; of four batches."""
    loss = char_gpt.make_loss(MODEL.apply)
    params = trained("float32").params
    batches = [char_gpt.batch_of(STEPS + i, 0, MODEL.context) for i in range(4)]
    # Layers of Flax mix dtypes.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        gradient = jax.jit(jax.grad(loss))
        found = [jax.device_get(gradient(wide, batch)) for batch in batches]
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float64)}
    return [(params, batch) for batch in batches], found


def errors_and_cosines(policy):
    """Returns arrays of both, an entry for each batch."""
    apply = amp.autocast(MODEL.apply, char_gpt.policy_for(policy))
    loss = char_gpt.make_loss(apply)
    gradient = jax.jit(jax.grad(loss), compiler_options=measures.EXACTLY_AS_WRITTEN)
    found = []
    for sample, tree in zip(*gradients_in_f64(), strict=True):
        ours, reference = (
            np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(each)])
            for each in (gradient(*sample), tree)
        )
        size = np.linalg.norm(reference)
        cosine = ours @ reference / (np.linalg.norm(ours) * size)
        found.append((np.linalg.norm(ours - reference) / size, cosine))
    return np.array(found).T


@pytest.mark.slow
@pytest.mark.parametrize("backward, bound", [("e5m2", 0.05), ("e4m3", 0.036)])
def test_gradients_of_trained_weights_are_as_wrong_as_8_bits_are(backward, bound):
    errors, cosines = errors_and_cosines(POLICIES[backward])
    assert np.max(errors) <= bound
    assert np.min(cosines) >= 0.9988
    # e4m3 has 3 bits after the point: below that, nothing was rounded to 8 bits.
    assert np.min(errors) > float(jnp.finfo(jnp.float8_e4m3fn).eps) / 8


@pytest.mark.slow
def test_bf16_is_nearer_to_f64_than_fp8():
    (bf16, _), (fp8, _) = map(errors_and_cosines, ("mixed_bfloat16", "fp8"))
    assert np.all(4 * bf16 < fp8)
