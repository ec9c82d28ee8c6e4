"""Moments in bfloat16 and in 8 bits.

What is stored is compared with casts of ml_dtypes and f64 of numpy; what is returned,
with the optimizer of optax itself.
"""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_amp as amp
from jmp_amp.training import low_precision_state
from jmp_amp.training.low_precision_state import (
    CODES,
    Bfloat16Code,
    Float8Code,
    decoded,
    encoded,
)
from jmp_amp.training.rounding import random_seeds
from tests.training import moments_on_digits
from tests.training.wrappers import CODING, F32, KEY, gradients_at, kinds, stepper

(SEEDS,) = random_seeds(KEY, 0, 1)
OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=32),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "muon": lambda: optax.contrib.muon(1e-2),
}


def low(tx: Any, way: str) -> Any:
    return CODING[way](tx)


each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
# adam raises a float to a step count, which strict promotion refuses.
pytestmark = pytest.mark.usefixtures("optax_promotion")


def parameters() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"w": (32, 64), "b": (45,)}
    return {
        name: jnp.asarray(rng.standard_normal(shape), F32)
        for name, shape in shapes.items()
    }


def codes_of(tree: Any) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, CODES))
    return [node for node in nodes if isinstance(node, CODES)]


def after_steps(step: Any, params: Any, state: Any, steps: int) -> tuple[Any, Any]:
    for index in range(steps):
        params, state = step(params, state, gradients_at(index, params))
    return params, state


# Codes


def decoded_and_again(code: Any) -> Any:
    numbers = decoded(code)
    return numbers, encoded(type(code), numbers)


def numbers_of_blocks() -> np.ndarray:
    """Blocks over all magnitudes, signed and not, and a tail."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((400, 256)) * 2.0 ** rng.integers(-60, 100, (400, 1))
    rows *= 2.0 ** -rng.integers(0, 40, rows.shape)
    rows[::2] = np.abs(rows[::2])
    # Largest numbers just below and above where a scale changes, and ties.
    for index, top in enumerate([1.75, 1.7501, 1.8125, 1.8126, 1.9999, 1.0, 1.0001]):
        rows[index::20, 7] = top * np.abs(rows[index::20]).max(-1)
    rows[20] = 0
    rows[21, 1:] = 0
    return np.append(rows.ravel(), rng.standard_normal(100)).astype(F32)


def in_numpy(block: np.ndarray) -> tuple[np.ndarray, float]:
    """The codes and the scale of a block, as the docstring of Float8Code has them."""
    mantissas, exponents = np.frexp(np.abs(np.float64(block)))
    # Beyond 1.75 * 2**n, the largest number of both formats, it counts to the next.
    exponents = np.where(block == 0, -9999, exponents + (mantissas > 1.75 / 2))
    signed = np.signbit(block[exponents == exponents.max()]).any()
    dtype = ml_dtypes.float8_e4m3fn if signed else ml_dtypes.float8_e5m2
    end = float(ml_dtypes.finfo(dtype).max)
    largest = np.abs(np.float64(block)).max()
    if largest == 0:
        return np.zeros(block.shape, np.uint8), 1.0
    scale = 2.0 ** np.ceil(np.log2(largest / end))
    scaled = np.clip(block / scale, -end, end)
    if not signed:
        tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        scaled = np.where(scaled > 0, np.maximum(scaled, tiny), scaled)
    return scaled.astype(dtype).view(np.uint8), -scale if signed else scale


def test_codes_and_scales_are_those_of_numpy():
    numbers = numbers_of_blocks()
    expected = [in_numpy(numbers[at : at + 256]) for at in range(0, numbers.size, 256)]
    signs = np.sign([scale for _, scale in expected])
    assert (signs < 0).sum() > 50 and (signs > 0).sum() > 50
    code = encoded(Float8Code, numbers)
    np.testing.assert_array_equal(code.scales, [scale for _, scale in expected])
    np.testing.assert_array_equal(
        code.codes, np.concatenate([codes for codes, _ in expected])
    )


def test_every_code_of_both_formats_is_decoded_as_ml_dtypes_does():
    codes = np.tile(np.arange(256, dtype=np.uint8), 2)
    found = decoded(Float8Code(codes, np.float32([-(2.0**-9), 2.0**7])))
    expected = codes[:256].view(ml_dtypes.float8_e4m3fn).astype(F32) * 2.0**-9
    is_number = np.isfinite(expected)
    np.testing.assert_array_equal(found[:256][is_number], expected[is_number])
    expected = codes[:256].view(ml_dtypes.float8_e5m2).astype(F32) * 2.0**7
    np.testing.assert_array_equal(found[256:], expected)


@pytest.mark.breadth(1)
def test_what_is_decoded_and_not_changed_moves_by_one_code_at_most():
    code = encoded(Bfloat16Code, numbers_of_blocks())
    chex.assert_trees_all_equal(decoded_and_again(code)[1], code)
    numbers = decoded(encoded(Float8Code, numbers_of_blocks()))
    found = np.float64(decoded(encoded(Float8Code, numbers)))
    # e5m2 has two bits of mantissa: a place is a quarter of the number at most.
    assert (np.abs(found - numbers) <= np.abs(numbers) / 4).mean() > 0.99
    assert (found == numbers).mean() > 0.9
    blocks = np.abs(numbers[: 400 * 256].reshape(400, 256)).max(-1, keepdims=True)
    off = np.abs(found - numbers)[: 400 * 256].reshape(400, 256)
    assert (
        off <= np.abs(numbers)[: 400 * 256].reshape(400, 256) / 4 + blocks / 2**16
    ).all()


@pytest.mark.breadth(2)
@pytest.mark.parametrize("size", [1, 256, 257])
def test_an_error_is_at_most_a_place_of_the_number_or_of_the_block(size):
    rng = np.random.default_rng(size)
    numbers = rng.standard_normal(size).astype(F32)
    numbers[::256] = -3
    found = np.asarray(decoded(encoded(Float8Code, numbers)))
    # e4m3: 3 bits of mantissa, and 2**-9 steps below; its end is 448.
    place = np.maximum(np.abs(numbers) / 8, 2.0**-9 / 224 * np.abs(numbers).max())
    assert (np.abs(found - numbers) <= place / 2).all()


@pytest.mark.breadth(2)
@pytest.mark.parametrize("number", [0.3, 1e-3, 1.1e-6, 1.7e-2])
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_at_random_is_unbiased(number, sign):
    draws = 100 * 255
    numbers = np.full((100, 256), sign * number, F32)
    numbers[:, 0] = sign
    found = np.float64(decoded(encoded(Bfloat16Code, numbers, SEEDS)))[:, 1:]
    low, high = found.min(), found.max()
    assert low < high
    exact = float(np.float32(sign * number))
    chance = (exact - low) / (high - low)
    spread = (high - low) * np.sqrt(chance * (1 - chance) / draws)
    assert abs(found.mean() - exact) < 5 * spread + 2.0**-16 * (high - low)


def test_a_block_that_is_not_finite_is_nan_and_leaves_the_others_alone():
    numbers = np.ones((3, 256), F32)
    numbers[0, 3], numbers[1, 4] = np.inf, np.nan
    code = encoded(Float8Code, numbers)
    found, again = decoded_and_again(code)
    assert np.isnan(found[:2]).all()
    np.testing.assert_array_equal(found[2], 1)
    np.testing.assert_array_equal(np.isnan(code.scales), [[True], [True], [False]])
    chex.assert_trees_all_equal(again, code)


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_at_both_ends_of_float32_stay_finite_and_keep_their_bits(sign):
    end = np.finfo(np.float32).max
    for number in [end, end / 1.01, 1e-37, 2.0**-126, 1e-39]:
        code = encoded(Float8Code, np.full(256, sign * np.float32(number)))
        found, again = decoded_and_again(code)
        assert np.isfinite(found).all()
        chex.assert_trees_all_equal(decoded(again), found)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_block_of_zeros_has_scale_one(zero):
    code = encoded(Float8Code, np.full(256, zero, F32))
    np.testing.assert_array_equal(code.scales, [1])
    np.testing.assert_array_equal(decoded(code), np.zeros(256))


def test_bfloat16_to_nearest_is_a_cast():
    numbers = numbers_of_blocks()
    expected = numbers.astype(ml_dtypes.bfloat16)
    for encode in (encoded, jax.jit(encoded, static_argnums=0)):
        codes = encode(Bfloat16Code, jnp.asarray(numbers)).codes
        assert codes.dtype == jnp.bfloat16
        # A CPU takes subnormal numbers for zero; a cast on bits does not.
        np.testing.assert_array_equal(codes, expected)


# Which leaves, and what the optimizer sees


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "rmsprop"))
        for name in OPTIMIZERS
    ],
)
def test_updates_are_those_of_the_optimizer_on_the_decoded_state(name):
    inner, params = OPTIMIZERS[name](), parameters()
    tx = low(inner, "float8")
    state = tx.init(params)
    begun = kinds(state)
    chex.assert_trees_all_equal(decoded(state.inner_state), inner.init(params))
    for index in range(2):
        grads = gradients_at(index, params)
        before = decoded(state.inner_state)
        expected, exact = inner.update(grads, before, params)
        updates, state = tx.update(grads, state, params)
        chex.assert_trees_all_equal(updates, expected)
        # A place of e5m2 is a quarter of the number.
        place = 2.0**-2
        for found, wanted in zip(
            jax.tree.leaves(decoded(state.inner_state)),
            jax.tree.leaves(exact),
            strict=True,
        ):
            floor = 2.0**-17 * float(jnp.abs(wanted).max())
            bound = place * np.abs(wanted) + floor
            assert (np.abs(np.float64(found) - np.float64(wanted)) <= bound).all()
    assert codes_of(state)
    assert kinds(state) == begun


def test_counts_schedules_small_arrays_and_other_dtypes_are_untouched():
    params = {
        "big": jnp.ones((64, 64)),
        "small": jnp.ones((63, 65)),
        "half": jnp.ones((64, 65), jnp.bfloat16),
        "scalar": jnp.ones(()),
    }
    inner = optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(1e-2, 0.0, 10), mu_dtype=None
    )
    state = amp.with_low_precision_state(inner).init(params)
    adam = state.inner_state.inner_state[0]
    plain = inner.init(params).inner_state[0]
    for found, expected in [(adam.mu, plain.mu), (adam.nu, plain.nu)]:
        assert isinstance(found["big"], Bfloat16Code)
        assert found["big"].codes.shape == (64, 64)
        for name in ("small", "half", "scalar"):
            assert found[name].dtype == expected[name].dtype
    everything = amp.with_low_precision_state(inner, min_size=1).init(params)
    assert len(codes_of(everything)) == 4
    assert everything.inner_state.hyperparams["learning_rate"].dtype == F32
    # Of the shape of no parameter.
    other = optax.GradientTransformation(lambda p: jnp.zeros((7, 9)), lambda *a: a[:2])
    assert not codes_of(amp.with_low_precision_state(other, min_size=1).init(params))


def test_weights_in_the_state_stay_in_float32():
    params = parameters()
    tx = amp.with_low_precision_state(
        optax.contrib.schedule_free_adamw(1e-2),
        "float8",
        min_size=1,
        mask=lambda path: path not in (".z['w']", ".z['b']"),
    )
    state = tx.init(params)
    chex.assert_trees_all_equal(state.inner_state.z, params)
    assert len(codes_of(state)) == 2


@pytest.mark.parametrize("kind", CODES)
def test_first_moments_of_one_shape_are_compiled_once(kind, monkeypatch):
    name = "largest_in_blocks" if kind is Float8Code else "land_on"
    encode, seen = getattr(low_precision_state, name), []

    def noted(*args):
        seen.append(args[0].size)
        return encode(*args)

    monkeypatch.setattr(low_precision_state, name, noted)
    way = "float8" if kind is Float8Code else "bfloat16"
    for _ in range(2):
        # A shape that no other test has.
        low(optax.adam(1e-2), way).init([np.ones((41, 103), F32)] * 3)
    assert len(seen) == 1


@pytest.mark.parametrize(("way", "bound"), [("bfloat16", 0.51), ("float8", 0.26)])
def test_bytes_of_moments(way, bound):
    shapes = {"w": (512, 512), "odd": (333, 111)}
    params = {name: jax.ShapeDtypeStruct(s, F32) for name, s in shapes.items()}
    sizes = [
        sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(jax.eval_shape(tx.init, params))
        )
        for tx in (low(optax.adamw(1e-3), way), optax.adamw(1e-3))
    ]
    assert sizes[0] <= bound * sizes[1]


# Together with the others


def composed(place: str, way: str) -> Any:
    adam = optax.adamw(1e-2)
    if place == "masters":
        return amp.with_master_weights(low(adam, way))
    if place == "kahan, scaled":
        return amp.with_loss_scale(
            amp.with_kahan(low(adam, way)), amp.dynamic_loss_scale(8.0), unscale=True
        )
    if place == "multi steps":
        return optax.MultiSteps(low(adam, way), 2)
    if place == "partition":
        parts = {"a": low(adam, way), "b": low(optax.sgd(0.1, momentum=0.9), way)}
        return optax.partition(parts, {"w": "a", "b": "b"})
    if place == "inject outside":
        return optax.inject_hyperparams(lambda rate: low(optax.adamw(rate), way))(
            rate=1e-2
        )
    if place == "inject inside":
        return low(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2), way)
    if place == "schedule-free outside":
        return optax.contrib.schedule_free(low(adam, way), 1e-2)
    assert place == "schedule-free inside"
    return low(optax.contrib.schedule_free_adamw(1e-2), way)


PLACES = [
    *("masters", "kahan, scaled", "multi steps", "partition", "inject outside"),
    *("inject inside", "schedule-free outside", "schedule-free inside"),
]


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=[pytest.mark.slow] * (i % 3 > 0))
        for i, place in enumerate(PLACES)
    ],
)
def test_it_descends_wherever_it_is(place):
    half = place in ("masters", "kahan, scaled")
    # Where it is does not depend on how it stores; 8 bits compile longer.
    way = "float8" if place == "kahan, scaled" else "bfloat16 at random"
    tx, params = composed(place, way), parameters()
    if half:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    state = tx.init(params)
    assert codes_of(state)
    scale = 8.0 if "scaled" in place else 1.0

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        grads = jax.tree.map(lambda p: scale * p, params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (after, last), _ = jax.lax.scan(step, (params, state), length=60)
    assert jax.tree.map(jnp.shape, last) == jax.tree.map(jnp.shape, state)
    assert optax.tree.norm(after) < 0.8 * optax.tree.norm(params)


def test_optax_can_map_over_the_codes():
    tx, params = low(optax.adam(1e-2), "float8"), parameters()
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda leaf: leaf + 1, state)
    np.testing.assert_array_equal(mapped.inner_state[0].mu["b"].codes, 1)
    assert mapped.inner_state[0].count == 0


@pytest.mark.breadth(1)
@pytest.mark.parametrize("way", ["bfloat16", "float8"])
def test_checkpoints_get_float32_and_hand_it_back(way):
    inner, params = optax.adamw(1e-2), parameters()
    tx = amp.with_loss_scale(low(inner, way), amp.no_loss_scale())
    _, state = after_steps(stepper(tx), params, tx.init(params), 2)
    exported = amp.export_opt_state(state)
    assert kinds(exported) == kinds(inner.init(params))
    chex.assert_trees_all_equal(exported, decoded(state.inner_state.inner_state))
    back = amp.import_opt_state(tx.init(params), exported)
    assert kinds(back) == kinds(state)
    # Encoded again, a number of 8 bits may move by one code.
    again = amp.export_opt_state(back)
    for mine, theirs in zip(
        jax.tree.leaves(again), jax.tree.leaves(exported), strict=True
    ):
        rtol, smallest = (2.0**-2, 2.0**-16) if way == "float8" else (0, 0)
        atol = smallest * np.abs(theirs).max()
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol)
    # And from a run in float32.
    _, plain = after_steps(stepper(inner), params, inner.init(params), 2)
    found = amp.export_opt_state(amp.import_opt_state(tx.init(params), plain))
    place = 2.0**-3 if "float8" in way else 2.0**-8
    for mine, theirs in zip(found[0].nu.values(), plain[0].nu.values(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=place)


def test_an_nnx_optimizer_is_exported_too():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    tx = optax.sgd(1e-2, momentum=0.9)
    plain = nnx.Optimizer(model, tx, wrt=nnx.Param)
    mine = nnx.Optimizer(model, low(tx, "bfloat16"), wrt=nnx.Param)
    grads = jax.tree.map(np.ones_like, nnx.state(model, nnx.Param))
    for _ in range(2):
        mine.update(model, grads)
    exported = amp.export_opt_state(mine.opt_state)
    expected = amp.export_opt_state(plain.opt_state)
    assert jax.tree.structure(exported) == jax.tree.structure(expected)
    back = amp.import_opt_state(mine.opt_state, exported)
    chex.assert_trees_all_equal(nnx.as_pure(back), nnx.as_pure(mine.opt_state))


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    ("way", "spec", "columns"),
    [
        ("float8", PartitionSpec("d"), 1024),
        ("float8", PartitionSpec(None, "d"), 1024),
        # 192 columns on a device are no whole number of blocks.
        ("float8", PartitionSpec(None, "d"), 768),
        ("float8", PartitionSpec("d"), 384),
    ],
)
def test_codes_are_sharded_as_their_parameter(way, spec, columns):
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    sharding = NamedSharding(mesh, spec)
    whole = jnp.asarray(np.random.default_rng(0).standard_normal((64, columns)), F32)
    params = jax.device_put(whole, sharding)
    tx = low(optax.adam(1e-2), way)
    state = tx.init(params)
    update = jax.jit(tx.update).lower(params, state, params).compile()
    _, after = update(params, state, params)
    # Blocks are within the part of a device, or cross it.
    assert ("all-gather" in update.as_text()) == (columns == 768)
    for moment in (state.inner_state[0], after.inner_state[0]):
        for code in (moment.mu, moment.nu):
            assert code.codes.sharding.is_equivalent_to(sharding, 2)
    _, alone = jax.jit(tx.update)(whole, tx.init(whole), whole)
    chex.assert_trees_all_equal(after, alone)


# Rare rows


def test_a_small_gradient_beside_large_ones_does_not_make_a_large_step():
    # Its second moment is size**2 of that of its block: in fp8 it would be zero.
    params, grads = np.zeros((3, 4, 64), F32), np.ones((3, 4, 64), F32)
    for block, size in zip(grads, [1e-3, 1e-4, 1e-5], strict=True):
        block[1], block[2] = size, -size
    tx, inner = low(optax.adam(1.0), "float8"), optax.adam(1.0)
    update, update_plain = jax.jit(tx.update), jax.jit(inner.update)
    state, plain = tx.init(params), inner.init(params)
    for _ in range(3):
        updates, state = update(grads, state, params)
        expected, plain = update_plain(grads, plain, params)
    assert (np.abs(updates) <= 2 * np.abs(expected)).all()


@pytest.mark.breadth(1)
@pytest.mark.parametrize("way", ["float8", "bfloat16 at random"])
def test_an_embedding_with_rare_rows_trains_as_in_float32(way):
    goal = jnp.asarray(np.random.default_rng(0).standard_normal((64, 32)), F32)
    # Row i is in one batch of i + 1.
    turns = np.arange(64) + 1

    def final(tx: Any) -> np.ndarray:
        def step(carry: Any, now: Any) -> Any:
            rows, state = carry
            touched = (now % jnp.asarray(turns) == 0).astype(F32)
            grads = touched[:, None] * (rows - goal)
            updates, state = tx.update(grads, state, rows)
            return (optax.apply_updates(rows, updates), state), None

        rows = jnp.zeros((64, 32))
        carry = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(600)))(
            (rows, tx.init(rows))
        )[0]
        return np.asarray(jnp.abs(carry[0] - goal).mean(-1))

    found, expected = final(low(optax.adam(1e-2), way)), final(optax.adam(1e-2))
    assert np.isfinite(found).all()
    assert (found <= 1.5 * expected + 0.1).all()


# A training run


@functools.cache
def digits() -> dict[str, Any]:
    return moments_on_digits.figures(moments_on_digits.train())


@pytest.mark.slow
def test_bfloat16_at_random_goes_the_way_of_float32():
    off = {way: found["off"] for way, found in digits().items()}
    assert off["bfloat16 at random"] <= min(0.05, off["bfloat16"] / 2)


# By default an embedding does, above.
@pytest.mark.slow
def test_8_bits_train_as_float32():
    assert digits()["float8"]["loss"] <= 1.05 * digits()["f32"]["loss"]


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"dtype": "float16"},
            ValueError,
            r"state\(inner, 'float16'\): unknown dtype. Use \"bfloat16\" or \"float8\"",
        ),
        ({"dtype": None}, ValueError, r"\(inner, None\): unknown dtype"),
        ({"dtype": jnp.float8_e5m2}, ValueError, "unknown dtype"),
        ({"key": 3}, TypeError, r"\(inner, key=3\): not one PRNG key. Use jax.random"),
        (
            {"key": jax.random.split(jax.random.key(0))},
            TypeError,
            "not one PRNG key",
        ),
        ({"min_size": 0}, ValueError, r"min_size=0\): not a number of elements. Use"),
        ({"min_size": 0.5}, ValueError, r"min_size=0.5\): not a number of elements"),
        ({"min_size": True}, ValueError, "min_size=True"),
        ({"key": KEY, "dtype": "float8"}, ValueError, r"8 bits are rounded to nearest"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        amp.with_low_precision_state(optax.adam(1e-3), **arguments)


def test_the_state_of_another_optimizer_is_refused():
    params = parameters()
    tx = low(optax.adam(1e-2), "float8")
    with pytest.raises(TypeError, match="given a tuple, the state of another optimi"):
        tx.update(params, optax.adam(1e-2).init(params), params)
    for other in ("bfloat16", "bfloat16 at random"):
        with pytest.raises(TypeError, match="another optimizer, dtype or key"):
            tx.update(params, low(optax.adam(1e-2), other).init(params), params)
    keyed = low(optax.adam(1e-2), "bfloat16 at random")
    with pytest.raises(TypeError, match="another optimizer, dtype or key"):
        keyed.update(params, low(optax.adam(1e-2), "bfloat16").init(params), params)
    with pytest.raises(ValueError, match=r"first difference at \['b'\]"):
        tx.update({"w": params["w"]}, tx.init(params), None)


def test_masters_and_a_second_one_inside_are_refused():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters())
    for inner, message in [
        (
            amp.with_master_weights(optax.adam(1e-2)),
            "has a MasterWeightsState already. Use .*, and with_master_weights around",
        ),
        (low(optax.adam(1e-2), "float8"), "has a LowPrecisionState already. Use"),
    ]:
        with pytest.raises(ValueError, match=message):
            low(inner, "float8").init(params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_a_state_keeps_its_shapes_and_dtypes_or_is_refused(dtype):
    tx = amp.with_low_precision_state(optax.adam(1e-2), dtype, min_size=4)
    other = tx.init(jnp.ones((1, 4)))
    with pytest.raises(
        TypeError, match=r"has \[0\]\.mu \(1, 4\), and not \[0\]\.mu \(4"
    ):
        tx.update(jnp.ones((4, 4)), other, jnp.ones((4, 4)))
    amsgrad = amp.with_low_precision_state(optax.amsgrad(1e-2), dtype, min_size=4)
    with pytest.raises(TypeError, match="the state of another optimizer"):
        tx.update(jnp.ones((4, 4)), amsgrad.init(jnp.ones((4, 4))), jnp.ones((4, 4)))
    half = jnp.ones((4, 4), jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(ValueError, match=r"changed its state.*with_master_weights"):
            tx.update(jnp.ones((4, 4)), tx.init(half), half)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.partition({"x": tx}, "x"),
        lambda tx: optax.named_chain(("a", tx)),
    ],
)
def test_codes_of_a_skipped_step_stay_wherever_the_loss_scale_is(around):
    scaled = amp.with_loss_scale(optax.adam(1e-2), amp.dynamic_loss_scale(1024.0))
    tx = amp.with_low_precision_state(around(scaled), "float8")
    numbers = np.random.default_rng(3).standard_t(3, 9600)
    w = jnp.asarray(numbers, jnp.float32)
    update, state = jax.jit(tx.update), tx.init(w)
    for i in range(3):
        _, state = update(w * (i - 1.3), state, w)
    _, after = update(w.at[0].set(jnp.inf), state, w)
    assert not amp.last_step_finite(after)
    codes = [
        [x for x in jax.tree.leaves(each) if x.dtype == jnp.uint8]
        for each in (state, after)
    ]
    assert len(codes[0]) == 2
    chex.assert_trees_all_equal(*codes)
