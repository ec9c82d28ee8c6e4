"""Half-precision parameters that lose no update.

What arrives is compared with what numpy does in f64 and with casts of ml_dtypes.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jmp_amp as amp
from jmp_amp.training.half_weights import step_to
from jmp_amp.training.rounding import (
    land_on,
    random_seeds,
    remainder_of,
    round_at_random,
    with_remainder,
)
from tests import h100
from tests.measures import OPTIMISED
from tests.training.wrappers import (
    BF16,
    F16,
    F32,
    HALF,
    STORING,
    gradients_at,
    many_parameters,
    outside_and_inside,
    standard,
    stepper,
)

(SEEDS,) = random_seeds(jax.random.key(3), 0, 1)
each_half = pytest.mark.parametrize("dtype", HALF, ids=str)
landed = jax.jit(land_on, static_argnums=1)
rounded_at_random = jax.jit(round_at_random, static_argnums=1)


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def assert_same_bits(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), a, b)


# Rounding


def tricky_numbers() -> np.ndarray:
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    small = rng.standard_normal(50_000) * 2.0 ** -rng.integers(0, 30, 50_000)
    # Ties of f16's subnormal numbers, and of bf16's around 1.
    ties = [np.arange(-3000, 3000) * 2.0**-26, 1 + np.arange(-999, 999) * 2.0**-9]
    return np.concatenate([any_bits, *(n.astype(np.float32) for n in [small, *ties])])


def cast(numbers: np.ndarray, dtype: Any) -> np.ndarray:
    # An overflow to inf warns, and the NaNs among all bits do.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return numbers.astype(dtype)


@each_half
def test_landing_is_a_cast_that_stays_in_the_range(dtype):
    # Arithmetic makes quiet NaNs only; of others the upper half may be that of inf.
    numbers = tricky_numbers()
    numbers = np.where(np.isnan(numbers), np.float32(np.nan), numbers)
    found = np.asarray(landed(numbers, dtype))
    expected = cast(numbers, dtype).astype(np.float32)
    largest = float(jnp.finfo(dtype).max)
    expected = np.where(
        np.isfinite(numbers), np.clip(expected, -largest, largest), numbers
    )
    np.testing.assert_array_equal(found, expected)
    are_numbers = ~np.isnan(expected)
    assert (np.signbit(found) == np.signbit(expected))[are_numbers].all()


@each_half
def test_random_rounding_goes_to_a_neighbour_and_stays_on_the_grid(dtype):
    numbers = tricky_numbers()
    numbers = numbers[np.abs(numbers) < float(jnp.finfo(dtype).max)]
    nearest = cast(numbers, dtype)
    found = np.asarray(rounded_at_random(numbers, dtype, SEEDS))
    toward = np.where(nearest.astype(np.float32) < numbers, np.inf, -np.inf)
    other = np.nextafter(nearest, toward.astype(dtype)).astype(np.float32)
    exact = nearest.astype(np.float32) == numbers
    near, far = found == nearest.astype(np.float32), found == other
    # XLA's CPU has no subnormal f32, which are those of bf16 too.
    counts = exact | (np.abs(numbers) >= float(jnp.finfo(F32).smallest_normal))
    assert (near | (far & ~exact))[counts].all()
    assert far.any()


@pytest.mark.breadth(2)
@each_half
@pytest.mark.parametrize("number", [1 / 3, -2.0001, 1e-3, 3e-6, 1 - 2.0**-13, 700.1])
def test_random_rounding_is_unbiased(dtype, number):
    number = np.float32(number)
    draws = 200_000
    found = np.float64(rounded_at_random(np.full(draws, number), dtype, SEEDS))
    assert len(np.unique(found)) == 2
    low, high = found.min(), found.max()
    spread = (high - low) * math.sqrt(
        (p := (float(number) - low) / (high - low)) * (1 - p) / draws
    )
    assert abs(found.mean() - float(number)) < 5 * spread


@each_half
def test_random_rounding_makes_no_infinity_of_a_number(dtype):
    largest = float(jnp.finfo(dtype).max)
    barely = np.float32(largest * (2.0 if dtype == F16 else 1))
    odd = np.float32([np.inf, -np.inf, np.nan])
    numbers = np.append(np.full(999, barely), odd)
    found = np.asarray(rounded_at_random(numbers, dtype, SEEDS))
    assert (found[:999] == largest).all()
    np.testing.assert_array_equal(found[999:], odd)


def words(seeds: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    """The random 16 bits of an array: which of 2**16 chances each number has."""
    # Between 1 and 2 the fraction of bf16 that is dropped has 16 bits: a number with
    # the fraction f goes up if f + its random bits are at least 2**16.
    up = np.zeros(shape, np.int64)
    for bit in reversed(range(16)):
        tried = up + 2**bit
        numbers = (0x3F800000 + 2**16 - tried).astype(np.uint32).view(np.float32)
        found = np.asarray(rounded_at_random(numbers, BF16, seeds))
        up = np.where(found.view(np.uint32) > 0x3F800000, tried, up)
    return up


def test_random_bits_are_uniform_and_differ_by_place_seeds_and_axis():
    shape = 128, 256
    seeds = random_seeds(jax.random.key(5), 0, 3)
    drawn = np.stack([words(each, shape) for each in seeds])
    counts = np.bincount(drawn.ravel() >> 8, minlength=256)
    chi_squared = ((counts - drawn.size / 256) ** 2 / (drawn.size / 256)).sum()
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)
    centred = drawn / 2.0**16 - 0.5

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        return abs(12 * (a * b).mean() * math.sqrt(a.size))

    for a, b in [(0, 1), (0, 2), (1, 2)]:
        assert correlation(centred[a], centred[b]) < 5
    for lag in (1, 2, 16):
        assert correlation(centred[:, lag:], centred[:, :-lag]) < 5
        assert correlation(centred[..., lag:], centred[..., :-lag]) < 5


def test_rows_beyond_two_to_the_32_have_other_random_bits():
    shape = (2, 2**16, 2**16)

    @jax.jit
    def ends_of_rows(number: jax.Array) -> jax.Array:
        rounded = round_at_random(jnp.full(shape, number), BF16, SEEDS)
        return rounded[:, -1, -4096:]

    first, second = ends_of_rows(jnp.float32(1 + 2.0**-8))
    same = float((first == second).mean())
    assert abs(same - 0.5) < 5 * 0.5 / math.sqrt(4096)


# A hundred small updates


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in STORING for dtype in HALF]
    + [(f"{name}, scale outside", F16) for name in STORING]
    + [(f"{name}, scale inside", BF16) for name in STORING],
    ids=str,
)
def test_small_updates_are_not_lost(name, dtype):
    tx = (STORING | outside_and_inside(STORING))[name](optax.sgd(1.0))
    params = jnp.ones(5000, dtype)
    gradient = jnp.full(5000, -1e-3 if dtype == BF16 else -1e-4, F32)
    step, state = stepper(tx), tx.init(params)
    with standard():
        naive = optax.apply_updates(params, -gradient)
    assert (naive == params).all()
    for _ in range(100):
        params, state = step(params, state, gradient)
    assert params.dtype == dtype
    expected = 1.0 + 100 * (1e-3 if dtype == BF16 else 1e-4)
    eps = float(jnp.finfo(dtype).eps)
    if name.startswith("stochastic"):
        # Each of 100 roundings has a variance of at most (eps / 2)**2.
        spread = eps / 2 * math.sqrt(100 / 5000)
        found = np.asarray(params, np.float64)
        assert abs(found.mean() - expected) < 5 * spread
        assert found.std() > eps / 10
    else:
        np.testing.assert_allclose(np.asarray(params, np.float64), expected, rtol=eps)


# Masters


@pytest.mark.breadth(1)
@each_half
def test_updates_land_exactly_on_the_rounded_master(dtype):
    tx = amp.with_master_weights(optax.sgd(1.0))
    params = many_parameters(dtype)
    state = tx.init(params)
    step = stepper(tx, **OPTIMISED)
    for index in range(20):
        gradients = gradients_at(index, params)
        before = state.masters["w"]
        params, state = step(params, state, gradients)
        masters = state.masters["w"]
        assert_same_bits(params["w"], masters.astype(dtype))
        # And the masters go where an f32 optimizer takes them.
        exact = np.float64(before) - np.float64(gradients["w"])
        eps = np.finfo(np.float32).eps * np.maximum(np.abs(before), np.abs(exact))
        assert (np.abs(np.asarray(masters) - exact) <= eps).all()
    assert params["w"].dtype == dtype
    assert params["b"].dtype == F32


@each_half
def test_updates_land_exactly_from_a_large_weight_to_a_small_one(dtype):
    # The difference of these has more digits than f32.
    starts = np.float32([1.0, 1.0, 3e-3, -777.0, 2.0**-13, 0.0])
    goals = np.float32([1e-6, -3.1e-5, 1e-9, 3.3e-4, 6.1e-8, 1e-7])
    tx = amp.with_master_weights(optax.sgd(1.0))
    params = jnp.asarray(starts).astype(dtype)
    state = tx.init(params)
    gradient = params.astype(F32) - goals
    params, state = stepper(tx, **OPTIMISED)(params, state, gradient)
    np.testing.assert_array_equal(params, state.masters.astype(dtype))
    np.testing.assert_allclose(state.masters, goals, atol=2.0**-24 * 1000)


@each_half
def test_a_loss_scale_outside_does_not_round_the_updates(dtype):
    inner = amp.with_master_weights(optax.sgd(1.0))
    tx = amp.with_loss_scale(inner, amp.no_loss_scale())
    params = jnp.ones(1, dtype)
    gradient = np.float32([1 - 3.1e-5])
    updates, state = jax.jit(tx.update)(gradient, tx.init(params), params)
    landing = state.inner_state.masters.astype(dtype)
    np.testing.assert_array_equal(params.astype(F32) + updates, landing.astype(F32))


@each_half
def test_updates_land_exactly_where_the_last_product_is_not_rounded(dtype):
    # XLA contracts master - rate * gradient to one operation. Where little is left of
    # the weight it then has digits that no sum of two f32 has.
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.uniform(0.5, 2.0, 10_000), dtype)
    left = 10.0 ** rng.uniform(-9, -3, 10_000)
    gradient = jnp.asarray(np.float64(params) * (1 - left) * 3, F32)
    tx = amp.with_master_weights(optax.sgd(1 / 3))
    found, state = stepper(tx, **OPTIMISED)(params, tx.init(params), gradient)
    np.testing.assert_array_equal(found, state.masters.astype(dtype))
    exact = np.float64(params) - np.float64(np.float32(1 / 3)) * np.float64(gradient)
    np.testing.assert_allclose(state.masters, exact, atol=2.0 * 2.0**-24)


def every_half(dtype: Any) -> np.ndarray:
    """All numbers of a dtype but f32's subnormal ones: a CPU takes those for zero."""
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    tiny = np.finfo(np.float32).smallest_normal
    return np.where((numbers != 0) & (np.abs(numbers) < tiny), 1, numbers)


def updates_of(params: np.ndarray, kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(params.shape)
    with np.errstate(all="ignore"):
        found = {
            "none": 0 * noise,
            "small": params * noise * 1e-3,
            "ties": params * 2.0**-9,
            "to nearly zero": -params * (1 + noise * 2.0 ** -rng.integers(3, 26)),
            "to another": np.roll(params, 977) - params,
            "far beyond": params * noise * 3e4,
            "any": rng.integers(0, 2**32, params.shape, np.uint32).view(np.float32),
        }[kind].astype(np.float32)
    # A CPU's arithmetic has no subnormal numbers.
    return np.where(np.abs(found) < 1e-30, 0, found)


@pytest.mark.breadth(3)
@each_half
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["none", "small", "ties", "to nearly zero", "to another", "far beyond", "any"],
)
def test_every_half_number_lands_exactly_on_the_rounded_master(dtype, jit, kind):
    params = every_half(dtype)
    update = updates_of(params, kind)
    # The last product of an optimizer is not to be contracted with the sum.
    tx = amp.with_master_weights(optax.identity())
    stored = jnp.asarray(params).astype(dtype)
    step = stepper(tx, **OPTIMISED) if jit else stepper(tx, **OPTIMISED).__wrapped__
    found, state = step(stored, tx.init(stored), jnp.asarray(update))

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        master = params + update
        landing = cast(master, dtype).astype(np.float32)
        largest = float(jnp.finfo(dtype).max)
        inside = np.clip(landing, -largest, largest)
        landing = np.where(np.isfinite(master), inside, landing)
        step = np.where(landing == params, 0, landing - params)  # inf - inf is NaN
        reached = cast(params + step, dtype).astype(np.float32)
        master = np.where(reached == landing, master, reached)
    kept = np.abs(master) >= np.finfo(np.float32).smallest_normal
    kept |= (master == 0) | np.isnan(master)
    found = np.float32(found)
    np.testing.assert_array_equal(found[kept], reached[kept])
    np.testing.assert_array_equal(state.masters[kept], master[kept])
    nearest = np.asarray(landed(state.masters, dtype))
    finite = np.isfinite(nearest)
    np.testing.assert_array_equal(found[finite], nearest[finite])


@pytest.mark.breadth(1)
@each_half
def test_what_an_update_reaches_is_its_sum_rounded(dtype):
    # All landings from some parameters of every exponent.
    rng = np.random.default_rng(0)
    numbers = every_half(dtype)
    landings = numbers[np.isfinite(numbers)]
    starts = numbers.reshape(512, -1)[:, rng.integers(0, 128, 3)].ravel()
    reached_from = jax.jit(
        lambda start: step_to(jnp.full(landings.shape, start), landings, dtype)
    )
    rounded = 0
    for start in starts[::3]:
        step, reached = map(np.asarray, reached_from(start))
        with np.errstate(all="ignore"):
            expected = cast(np.float32(start) + step, dtype).astype(np.float32)
        normal = np.abs(step) >= np.finfo(np.float32).smallest_normal
        np.testing.assert_array_equal(reached[normal], expected[normal])
        rounded += np.count_nonzero(reached != landings)
    assert rounded > 0


@pytest.mark.parametrize("wrapper", [amp.with_master_weights, amp.with_kahan])
def test_all_digits_of_the_original_are_there_from_the_start(wrapper):
    original = numbers_of_weights()
    params = jax.tree.map(lambda leaf: leaf.astype(BF16), original)
    state = wrapper(optax.sgd(1.0), init_from=original).init(params)
    chex.assert_trees_all_equal(amp.export_params(params, state), original)


def numbers_of_weights() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.standard_normal(4096), F32)}


def test_masters_begin_with_the_digits_of_the_original():
    original = {"w": jnp.float32([1.001, 0.3]), "b": jnp.float32([0.1])}
    params = {"w": original["w"].astype(BF16), "b": original["b"]}
    tx = amp.with_master_weights(optax.sgd(1.0), init_from=original)
    state = tx.init(params)
    assert_same_bits(state.masters["w"], original["w"])
    assert isinstance(state.masters["b"], optax.MaskedNode)
    original["w"].delete()
    chex.assert_trees_all_equal(state.masters["w"], jnp.float32([1.001, 0.3]))


def test_a_parameter_that_was_changed_outside_takes_its_master_along():
    tx = amp.with_master_weights(optax.sgd(1.0))
    params = jnp.asarray([1.0, 2.0], BF16)
    step, state = stepper(tx), tx.init(params)
    params, state = step(params, state, jnp.float32([1e-3, 1e-3]))
    params = params.at[0].set(5.0)
    params, state = step(params, state, jnp.float32([1e-3, 1e-3]))
    np.testing.assert_allclose(state.masters, [4.999, 1.998], rtol=2.0**-22)


@pytest.mark.parametrize(
    ("original", "message"),
    [
        ({"b": jnp.ones(3)}, r"at \['w'\] is bfloat16\[2\], but there it is nothing"),
        (
            {"w": jnp.ones(3)},
            r"at \['w'\] is bfloat16\[2\], but there it is float32\[3",
        ),
        ({"w": jnp.arange(2)}, r"but there it is int32\[2\]"),
        ({"w": jnp.ones(2, "complex64")}, r"but there it is complex64\[2\]"),
        ({"w": jnp.ones(2) * 1.5}, r"at \['w'\] is .*, but there it is another num"),
    ],
)
def test_originals_that_are_none_are_refused(original, message):
    tx = amp.with_master_weights(optax.sgd(1.0), init_from=original)
    with pytest.raises(ValueError, match=message):
        tx.init({"w": jnp.ones(2, BF16)})


# Kahan


@each_half
def test_a_number_is_its_rounding_and_the_remainder(dtype):
    numbers = tricky_numbers()
    info = jnp.finfo(dtype)
    fits = (np.abs(numbers) < float(info.max)) & (np.abs(numbers) > 2.0**-80)
    numbers = numbers[fits]
    rounded = landed(numbers, dtype)
    remainder = jax.jit(remainder_of, static_argnums=2)(numbers, rounded, dtype)
    found = jax.jit(with_remainder, static_argnums=2)(rounded, remainder, dtype)
    found, rounded = np.asarray(found), np.asarray(rounded)
    power = 2.0 ** np.floor(np.log2(np.maximum(np.abs(rounded), 2.0**-130)))
    last_place = np.maximum(power, float(info.smallest_normal)) * float(info.eps)
    assert (np.abs(np.float64(found) - numbers) <= last_place * 2.0**-16).all()
    # All but the ties: their remainders do not go up to one half.
    # All digits of f32, but of ties that were rounded down.
    is_normal = np.abs(numbers) >= float(info.smallest_normal)
    left = np.abs(numbers - rounded)
    is_power = np.abs(rounded) == power
    tie = (left == last_place / 2) | (is_power & (left == last_place / 4))
    assert (found == numbers)[is_normal & ~tie].all()
    assert remainder.dtype == jnp.int16


@pytest.mark.breadth(1)
@each_half
def test_compensation_gives_a_parameter_the_digits_of_float32(dtype):
    tx = amp.with_kahan(optax.sgd(1.0))
    params = many_parameters(dtype)
    step, state = stepper(tx), tx.init(params)
    exact = np.float64(params["w"])
    largest = np.abs(exact)
    for index in range(50):
        gradients = jax.tree.map(
            lambda g: g.astype(F32) * 1e-3, gradients_at(index, params)
        )
        exact -= np.float64(gradients["w"])
        largest = np.maximum(largest, np.abs(exact))
        params, state = step(params, state, gradients)
    error = np.abs(np.float64(params["w"]) - exact)
    error_with = np.abs(np.float64(amp.export_params(params, state)["w"]) - exact)
    # One rounding of f32 and one of the remainder a step.
    eps = float(jnp.finfo(F32).eps)
    assert (error_with <= 50 * eps * np.maximum(largest, 2.0**-14)).all()
    assert np.median(error) > 1000 * np.median(error_with)


@each_half
def test_a_zero_update_does_not_round_a_tie_again(dtype):
    # Halfway down to an even neighbour: rounded anew it would go there.
    params = jnp.asarray([1 + float(jnp.finfo(dtype).eps)], dtype)
    tx = amp.with_kahan(optax.sgd(1.0))
    state = tx.init(params)._replace(compensation=jnp.int16([-(2**15)]))
    updates, after = jax.jit(tx.update)(np.zeros(1, F32), state, params)
    np.testing.assert_array_equal(updates, [0.0])
    np.testing.assert_array_equal(after.compensation, state.compensation)


# Excess precision


def kept_after_one_step(name: str) -> Any:
    """A step on bf16 weights as one program, its input bf16: what it keeps."""
    tx = STORING[name](optax.sgd(1.0))
    params = jnp.asarray(np.linspace(0.5, 2.0, 256), BF16)

    def two_steps(params, gradient):
        state = tx.init(params)
        for _ in range(2):
            with standard():
                updates, state = tx.update(gradient, state, params)
                params = optax.apply_updates(params, updates)
        kept = state.masters if name == "masters" else state.compensation
        return params, kept

    return two_steps, params, jnp.full(256, 1e-3, F32)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ["masters", "kahan"])
def test_rounding_survives_the_excess_precision_of_xla(name):
    fn, params, gradient = kept_after_one_step(name)
    lowered = jax.jit(fn).lower(params, gradient)
    (found, kept), as_written = (
        lowered.compile({"xla_allow_excess_precision": excess})(params, gradient)
        for excess in (True, False)
    )
    assert_same_bits((found, kept), as_written)
    exact = np.float64(params) - 2e-3
    if name == "kahan":
        assert jnp.any(kept != 0)
        with_kept = with_remainder(found.astype(F32), kept, BF16)
        np.testing.assert_allclose(with_kept, exact, rtol=2.0**-22)
    else:
        np.testing.assert_array_equal(found, kept.astype(BF16))
        np.testing.assert_allclose(kept, exact, rtol=2.0**-22)


@h100.needs_compiler
@pytest.mark.parametrize("name", ["masters", "kahan"])
def test_rounding_survives_in_the_program_of_a_gpu(name):
    fn, params, gradient = kept_after_one_step(name)
    text = h100.compile_for_gpu(fn, params, gradient).as_text()
    # XLA would have dropped a pair of casts, and with it the rounding: a mask that
    # leaves the upper half of a float32.
    assert re.search(r"u32\[\S* constant\(4294901760\)", text)


# Together with loss scaling, accumulation, parts of a tree


def test_accumulation_inside_of_masters_sums_in_float32():
    tx = amp.with_master_weights(optax.MultiSteps(optax.sgd(1.0), 4))
    params = jnp.ones(2, BF16)
    step, state = stepper(tx), tx.init(params)
    for value in (1.0, 1e-3, 1e-3, 1e-3):
        params, state = step(params, state, jnp.full(2, value, F32))
    np.testing.assert_allclose(state.masters, 1 - (1.003 / 4), rtol=2.0**-22)
    np.testing.assert_array_equal(params, state.masters.astype(BF16))


def test_masters_inside_of_accumulation_move_once_a_window():
    tx = optax.MultiSteps(amp.with_master_weights(optax.sgd(1.0)), 2)
    params = jnp.ones(2, BF16)
    step, state = stepper(tx), tx.init(params)
    moved = []
    for _ in range(4):
        params, state = step(params, state, np.full(2, 1e-3, F32))
        moved.append(state.inner_opt_state.masters[0])
    np.testing.assert_allclose(moved, [1, 0.999, 0.999, 0.998], rtol=2.0**-22)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("scaled", [False, True])
def test_parts_of_a_tree_are_stored_in_different_ways(scaled):
    params = {key: jnp.ones(2000, BF16) for key in ("m", "k", "s", "plain")}
    transforms = {
        "m": amp.with_master_weights(optax.sgd(1.0)),
        "k": amp.with_kahan(optax.sgd(1.0)),
        "s": amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(0)),
        "plain": optax.sgd(1.0, momentum=0.0),
    }
    tx = optax.partition(transforms, {key: key for key in params})
    tx = optax.chain(optax.clip_by_global_norm(1e9), tx)
    if scaled:
        tx = amp.with_loss_scale(tx, amp.no_loss_scale())
    step, state = stepper(tx), tx.init(params)
    # Only with_loss_scale begins the state of what stores nothing itself in f32.
    trace = optax.tree.get(state, "trace")["plain"]
    assert trace.dtype == (F32 if scaled else BF16)
    gradient = {key: jnp.full(2000, -1e-3, F32) for key in params}
    for _ in range(100):
        params, state = step(params, state, gradient)
    means = {key: float(np.float32(leaf).mean()) for key, leaf in params.items()}
    assert means["plain"] == 1.0
    assert means["m"] == means["k"] == float(jnp.asarray(1.1, BF16))
    np.testing.assert_allclose(means["s"], 1.1, atol=5 * 2.0**-8 * math.sqrt(0.05))
    exported = amp.export_params(params, state)
    np.testing.assert_allclose(exported["m"], 1.1, rtol=1e-5)
    np.testing.assert_allclose(exported["k"], 1.1, rtol=1e-5)


def test_clipping_inside_of_masters_has_float32_norms():
    tx = amp.with_master_weights(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    )
    params = jnp.zeros(2, F16)
    _, state = stepper(tx)(params, tx.init(params), jnp.full(2, 300.0, F16))
    np.testing.assert_allclose(state.masters, -(0.5**0.5), rtol=2.0**-22)


# At the ends of the range, and after changes from outside


@pytest.mark.parametrize("wrapper", [amp.with_master_weights, amp.with_kahan])
def test_exported_parameters_are_those_of_now(wrapper):
    tx = wrapper(optax.sgd(1.0))
    state = tx.init({"w": jnp.ones(2, BF16)})
    exported = amp.export_params({"w": jnp.zeros(2, BF16)}, state)
    np.testing.assert_array_equal(exported["w"], 0.0)


LARGEST = {F16: 65504.0, BF16: 3.3895313892515355e38}
BEYOND = {F16: 7e4, BF16: 3.4028234663852886e38}


def cast_to(dtype: Any, params: Any) -> Any:
    return amp.cast_params(params, f"p={dtype.name},c={dtype.name},o=f32")


@each_half
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("name", "from_originals"),
    [*((name, False) for name in STORING), ("masters", True), ("kahan", True)],
)
def test_a_weight_beyond_the_range_outlives_a_zero_update_and_is_exported(
    name, from_originals, jit, dtype
):
    originals = {"u": jnp.float32([BEYOND[dtype], -BEYOND[dtype], 1.001])}
    params = cast_to(dtype, originals)
    ends = np.array([LARGEST[dtype], -LARGEST[dtype], 1.001], dtype)
    assert_same_bits(params["u"], ends)
    given = {"init_from": originals} if from_originals else {}
    tx = STORING[name](optax.sgd(0.1), **given)
    step = stepper(tx) if jit else stepper(tx).__wrapped__
    state = tx.init(params)
    for _ in range(2):
        exported = amp.export_params(params, state)["u"]
        if from_originals and name == "masters":
            np.testing.assert_array_equal(exported, originals["u"])
        elif from_originals:
            # Half of the last place is what a compensation can tell.
            half_a_place = {F16: 16.0, BF16: 2.0**119}[dtype]
            assert (np.abs(exported[:2]) <= LARGEST[dtype] + half_a_place).all()
            assert (np.abs(exported[:2]) >= LARGEST[dtype]).all()
            assert exported[2] == originals["u"][2]
        else:
            np.testing.assert_array_equal(exported, np.float32(ends))
        params, state = step(params, state, {"u": jnp.zeros(3)})
        assert_same_bits(params["u"], ends)


def test_a_weight_beyond_the_range_comes_back_where_its_master_does():
    originals = {"u": jnp.float32([7e4])}
    params = cast_to(F16, originals)
    tx = amp.with_master_weights(optax.sgd(1.0), init_from=originals)
    step, state = stepper(tx), tx.init(params)
    for reached in (67_000.0, 64_000.0, 61_000.0):
        params, state = step(params, state, {"u": jnp.float32([3_000.0])})
        np.testing.assert_array_equal(state.masters["u"], np.float32([reached]))
        stored = np.float16(min(reached, 65504.0))
        np.testing.assert_array_equal(params["u"], [stored])


@each_half
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", STORING)
def test_an_infinity_or_nan_that_was_stored_stays_what_it_is(name, jit, dtype):
    given = np.array([np.inf, -np.inf, np.nan, 1.0], np.float32)
    params = cast_to(dtype, {"u": jnp.asarray(given)})
    tx = STORING[name](optax.sgd(0.1))
    step = stepper(tx) if jit else stepper(tx).__wrapped__
    state = tx.init(params)
    for update in (0.0, 1.0):
        np.testing.assert_array_equal(amp.export_params(params, state)["u"], given)
        np.testing.assert_array_equal(np.float32(params["u"]), given)
        given[3] -= 0.0 if update == 0.0 else 0.5
        gradient = {"u": jnp.full(4, 5.0 * update)}
        params, state = step(params, state, gradient)
    np.testing.assert_array_equal(np.float32(params["u"]), given)


@each_half
def test_a_weight_beyond_the_range_is_finite_under_recipe_o2(dtype):
    recipe = amp.recipe("O2", dtype.name)
    tx = recipe.wrap(optax.sgd(0.1))
    originals = {"u": jnp.float32([BEYOND[dtype], 1.0])}
    params, state = recipe.init(tx, originals)
    for _ in range(2):
        expected = np.array([LARGEST[dtype], 1], dtype)
        np.testing.assert_array_equal(params["u"], expected)
        assert np.isfinite(recipe.export_params(params, state)["u"]).all()
        params, state = stepper(tx)(params, state, {"u": jnp.zeros(2)})


def test_what_was_exported_outlives_a_donated_state():
    tx = amp.with_master_weights(optax.sgd(1.0, momentum=0.9))
    params = {"w": jnp.ones(2, BF16), "b": jnp.ones(2)}
    state = tx.init(params)
    exported = amp.export_params(params, state), amp.export_opt_state(state)
    imported = amp.import_opt_state(tx.init(params), exported[1])
    for leaf in jax.tree.leaves((params, state)):
        leaf.delete()
    assert amp.all_finite(exported)
    for leaf in jax.tree.leaves(exported[1]):
        leaf.delete()
    assert amp.all_finite(imported)


@pytest.mark.parametrize("wrapper", [amp.with_master_weights, amp.with_kahan])
def test_an_optimizer_that_begins_from_the_parameters_begins_from_the_originals(
    wrapper,
):
    original = numbers_of_weights()
    params = jax.tree.map(lambda leaf: leaf.astype(BF16), original)
    with standard():
        tx = wrapper(optax.contrib.schedule_free_sgd(0.1), init_from=original)
        state = tx.init(params)
    chex.assert_trees_all_equal(state.inner_state.z, original)


def test_bits_go_on_for_some_parameters_while_others_are_skipped():
    scaled = amp.with_loss_scale(optax.sgd(1.0), amp.no_loss_scale())
    parts = optax.partition({"x": scaled, "y": optax.sgd(1.0)}, {"x": "x", "y": "y"})
    tx = amp.with_stochastic_rounding(parts, jax.random.key(0))
    params = {"x": jnp.ones(4, BF16), "y": jnp.ones(1000, BF16)}
    gradient = {"x": jnp.full(4, jnp.nan), "y": jnp.full(1000, -1e-3)}
    step, state = stepper(tx), tx.init(params)
    for _ in range(100):
        params, state = step(params, state, gradient)
    found = np.asarray(params["y"], np.float64)
    # A hundred independent roundings have a spread of at most half a step each.
    assert found.std() < 0.5 * float(jnp.finfo(BF16).eps) * math.sqrt(100) * 1.2
    np.testing.assert_allclose(found.mean(), 1.1, atol=0.005)


# Random bits


def test_random_bits_are_those_of_the_key_and_the_step():
    params = jnp.ones(512, BF16)
    gradient = jnp.full(512, 1e-3, F32)

    @functools.cache
    def optimizer(seed: int) -> Any:
        tx = amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(seed))
        return tx, stepper(tx)

    def after(seed: int, steps: int) -> jax.Array:
        tx, step = optimizer(seed)
        now, state = params, tx.init(params)
        for _ in range(steps):
            now, state = step(now, state, gradient)
        return now

    assert_same_bits(after(0, 1), after(0, 1))
    assert jnp.any(after(0, 1) != after(1, 1))
    # The second step is not the first one again: that would round the same ones down.
    second = after(0, 2)
    assert len(np.unique(np.asarray(second, np.float32))) == 3


def test_random_bits_go_on_after_the_largest_step():
    tx = amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    params, gradient = jnp.ones(512, BF16), jnp.full(512, 1e-3, F32)
    state = tx.init(params)._replace(steps=jnp.asarray(np.iinfo(np.int32).max))
    update = jax.jit(tx.update)
    first, state = update(gradient, state, params)
    second, _ = update(gradient, state, params)
    assert jnp.any(first != second)


def test_leaves_have_random_bits_of_their_own():
    tx = amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    params = {"a": jnp.ones(512, BF16), "b": jnp.ones(512, BF16)}
    found, _ = stepper(tx)(
        params, tx.init(params), {"a": jnp.full(512, 1e-3), "b": jnp.full(512, 1e-3)}
    )
    assert jnp.any(found["a"] != found["b"])


def test_random_bits_do_not_depend_on_the_sharding():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    params, gradient = jnp.ones(4096, BF16), jnp.full(4096, 1e-3, F32)
    step, state = stepper(tx), tx.init(params)
    expected, _ = step(params, state, gradient)
    for spec in (jax.P(), jax.P("d")):
        place = functools.partial(
            jax.device_put, device=jax.sharding.NamedSharding(mesh, spec)
        )
        found, _ = step(place(params), state, place(gradient))
        assert_same_bits(found, expected)
        for shard in found.addressable_shards:
            assert_same_bits(shard.data, expected[shard.index])


@pytest.mark.parametrize(
    "key", [0, "key", jax.random.split(jax.random.key(0)), jnp.ones(2), None]
)
def test_something_that_is_no_key_is_refused(key):
    with pytest.raises(TypeError, match=r"not one PRNG key. Use jax.random.key\(0\)"):
        amp.with_stochastic_rounding(optax.sgd(1.0), key)


def test_keys_of_the_old_style_and_of_other_generators_are_keys():
    old = amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.PRNGKey(5))
    new = amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(5))
    params, gradient = jnp.ones(99, BF16), jnp.full(99, 1e-3, F32)
    found = [stepper(tx)(params, tx.init(params), gradient)[0] for tx in (old, new)]
    assert_same_bits(*found)
    rbg = amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(5, impl="rbg"))
    assert len(np.unique(stepper(rbg)(params, rbg.init(params), gradient)[0])) == 2


# linen, with module policies


def test_half_parameters_of_a_policy_map_have_masters_and_the_others_do_not():
    model = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.Dense(2)])
    original = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3)))
    policy = amp.PolicyMap("bf16", {"layers_2": "float32"})
    params = amp.cast_params(original, policy, model=model)
    tx = amp.with_master_weights(optax.sgd(0.1), init_from=original)
    state = tx.init(params)
    assert {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(state.masters)[0]
    } == {"['params']['layers_0']['bias']", "['params']['layers_0']['kernel']"}
    assert_same_bits(amp.export_params(params, state), original)


def test_a_step_that_a_loss_scale_inside_skips_uses_no_random_bits():
    scaled = amp.with_loss_scale(optax.sgd(0.1), amp.dynamic_loss_scale(8.0))
    tx = amp.with_stochastic_rounding(scaled, jax.random.key(0))
    params = jnp.ones(3, jnp.bfloat16)
    state = tx.init(params)
    for gradient, steps in ((jnp.inf, 0), (1.0, 1), (jnp.nan, 1)):
        _, state = tx.update(jnp.full(3, gradient), state, params)
        assert state.steps == steps
