"""Taking one element of each row: the derivative that is no scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.rewrites.pick_rewrite import pick, picks_from_rows
from tests.programs import equations

POLICIES = ("mixed_bfloat16", "mixed_float16")
FILL, CLIP, PROMISE = (
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)
FILL_VALUE = 7.0
# Rows that are longer than the indices can count, and the largest index.
INDICES = {
    "int8": (300, 127),
    "uint8": (300, 255),
    "int16": (40_000, 32_767),
    "uint32": (300, 299),
    "int32": (300, 299),
}
ROWS = 3
# What multiplies the picked elements; powers of two, so that nothing is rounded.
WEIGHTS = np.array([[1.0], [2.0], [4.0]])
NUMBERS = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)


def gathered(x, labels, mode):
    return lax.gather(
        x, labels[..., None], NUMBERS, (1, 1), mode=mode, fill_value=FILL_VALUE
    )


def gather_of(fn, *args):
    (eqn,) = (
        e for e in equations(jax.make_jaxpr(fn)(*args)) if e.primitive.name == "gather"
    )
    return eqn


def picked(x, labels, mode):
    eqn = gather_of(lambda x, i: gathered(x, i, mode), x, labels)
    return pick(eqn, x, labels[..., None])


def small_integers(*shape):
    """Activations that every dtype holds, and so does every sum of a few."""
    size = int(np.prod(shape))
    return np.random.default_rng(0).integers(-4, 5, size).reshape(shape) * 1.0


def expected_of(x, labels, mode):
    """The picked elements, and the derivative of their weighted sum, in numpy."""
    length = x.shape[1]
    wide = labels.astype(np.int64)
    inside = (wide >= 0) & (wide < length)
    place = np.clip(wide, 0, length - 1)
    value = np.take_along_axis(x, place, axis=1)
    moves = np.ones_like(inside)
    if mode is FILL:
        value, moves = np.where(inside, value, FILL_VALUE), inside
    derivative = np.zeros_like(x)
    np.put_along_axis(derivative, place, WEIGHTS * moves, axis=1)
    return value, derivative


def assert_is_that_of_numpy(x, labels, mode):
    value, derivative = expected_of(x, labels, mode)
    x, indices = jnp.asarray(x, jnp.float32), jnp.asarray(labels)
    assert indices.dtype == labels.dtype
    weights = jnp.asarray(WEIGHTS, jnp.float32)

    @jax.jit
    def both(x):
        found, backward = jax.vjp(lambda x: picked(x, indices, mode), x)
        return found, *backward(weights)

    found, gradient = both(x)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, value)
    np.testing.assert_array_equal(gradient, derivative)
    # And as part of a program: the weights of the product that makes the rows.
    for policy in POLICIES:
        fn = amp.autocast(
            lambda w: jnp.sum(weights * gathered(jnp.eye(ROWS) @ w, indices, mode)),
            policy,
        )
        traced = jax.jit(jax.value_and_grad(fn)).trace(x)
        primitives = {e.primitive.name for e in equations(traced.jaxpr)}
        assert "gather" in primitives and "scatter-add" not in primitives
        total, gradient = traced.lower().compile()(x)
        np.testing.assert_array_equal(total, np.sum(WEIGHTS * value))
        np.testing.assert_array_equal(gradient, derivative)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("mode", [FILL, CLIP, PROMISE], ids=lambda m: m.name)
@pytest.mark.parametrize("dtype", INDICES)
def test_indices_of_every_dtype_pick_from_rows_longer_than_they_count(dtype, mode):
    length, largest = INDICES[dtype]
    labels = np.array([[0], [5], [largest]], dtype)
    assert_is_that_of_numpy(small_integers(ROWS, length), labels, mode)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("mode", [FILL, CLIP], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "labels",
    [
        np.array([[-1], [20], [2]], np.int32),
        np.array([[-128], [127], [2]], np.int8),
        np.array([[255], [20], [2]], np.uint8),
        np.array([[2**32 - 1], [2**31], [2]], np.uint32),
        np.array([[-(2**31)], [2**31 - 1], [2]], np.int32),
    ],
    ids=["int32", "int8", "uint8", "uint32", "largest"],
)
def test_an_index_out_of_bounds_is_filled_or_clipped_as_in_a_gather(labels, mode):
    assert_is_that_of_numpy(small_integers(ROWS, 20), labels, mode)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("dtype", INDICES)
def test_the_labels_of_a_loss_may_be_of_any_integer_dtype(dtype):
    length, largest = INDICES[dtype]
    labels = np.array([[0], [5], [largest]], dtype)
    x = small_integers(ROWS, length).astype(np.float32)

    def fn(w):
        logits = jnp.eye(ROWS) @ w
        return jnp.sum(jnp.take_along_axis(logits, jnp.asarray(labels), axis=-1) ** 2)

    value, derivative = expected_of(x, labels, PROMISE)
    derivative = 2 * x * (derivative != 0)
    for policy in POLICIES:
        found = jax.jit(jax.value_and_grad(amp.autocast(fn, policy)))(x)
        np.testing.assert_array_equal(found[0], np.sum(value**2))
        np.testing.assert_array_equal(found[1], derivative)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("mode", [FILL, CLIP], ids=lambda m: m.name)
def test_its_tangent_is_what_is_picked_from_the_tangents(mode):
    x, tangent = small_integers(2, ROWS, 20)
    labels = np.array([[25], [3], [19]], np.int32)
    value, _ = expected_of(x, labels, mode)
    moves, _ = expected_of(tangent, labels, mode)
    if mode is FILL:
        moves[0] = 0.0  # a fill value does not move
    x, tangent = (jnp.asarray(a, jnp.float32) for a in (x, tangent))

    def found_by(fn):
        rows = lambda x: fn(x, jnp.asarray(labels), mode)  # noqa: E731
        cube = lambda x: jnp.sum(rows(x) ** 3)  # noqa: E731
        (first, second) = jax.jit(
            lambda x, t: (
                jax.jvp(rows, (x,), (t,)),
                jax.jvp(jax.grad(cube), (x,), (t,))[1],
            )
        )(x, tangent)
        np.testing.assert_array_equal(first[0], value)
        np.testing.assert_array_equal(first[1], moves)
        expected = np.zeros(x.shape)
        place = np.clip(labels, 0, 19)
        np.put_along_axis(expected, place, 6 * value * moves, axis=1)
        np.testing.assert_array_equal(second, expected)

    found_by(picked)
    for policy in POLICIES:

        def mixed(x, labels, mode, policy=policy):
            program = lambda w: gathered(jnp.eye(ROWS) @ w, labels, mode)  # noqa: E731
            return amp.autocast(program, policy)(x)

        found_by(mixed)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)], ids=str)
def test_it_is_batched_along_operand_and_indices(axes):
    x = jnp.asarray(small_integers(2, ROWS, 20), jnp.float32)
    labels = jnp.array([[[0], [3], [19]], [[7], [25], [2]]], jnp.int8)
    x = x if axes[0] == 0 else x[0]
    labels = labels if axes[1] == 0 else labels[0]

    def loss(x, labels):
        return jnp.sum(jnp.asarray(WEIGHTS, jnp.float32) * picked(x, labels, FILL))

    found = jax.jit(jax.vmap(jax.value_and_grad(loss), axes))(x, labels)
    for i in range(2):
        one_x = np.asarray(x if axes[0] is None else x[i], np.float64)
        one = np.asarray(labels if axes[1] is None else labels[i])
        value, derivative = expected_of(one_x, one, FILL)
        np.testing.assert_array_equal(found[0][i], np.sum(WEIGHTS * value))
        np.testing.assert_array_equal(found[1][i], derivative)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_batched_loss_is_that_of_f32(place):
    x = jnp.asarray(small_integers(2, ROWS, 20), jnp.float32)
    labels = jnp.array([[[0], [3], [19]], [[7], [5], [2]]], jnp.uint8)

    def loss(w, labels):
        return jnp.sum(jnp.take_along_axis(jnp.eye(ROWS) @ w, labels, axis=1) ** 2)

    expected = jax.jit(jax.vmap(jax.grad(loss)))(x, labels)
    for policy in POLICIES:
        if place == "inside":
            batched = lambda w: jnp.sum(jax.vmap(loss)(w, labels))  # noqa: E731
            found = jax.jit(jax.grad(amp.autocast(batched, policy)))(x)
        else:
            mixed = jax.vmap(jax.grad(amp.autocast(loss, policy)))
            found = jax.jit(mixed)(x, labels)
        np.testing.assert_array_equal(found, expected)


X = jnp.asarray(small_integers(4, 6), jnp.float32)
LABELS = jnp.array([[0], [5], [2], [3]])


def raw(x, indices, **numbers):
    """A gather of single elements along the last axis."""
    dimensions = {
        "offset_dims": (),
        "collapsed_slice_dims": (x.ndim - 1,),
        "start_index_map": (x.ndim - 1,),
        "operand_batching_dims": (),
        "start_indices_batching_dims": (),
        **numbers,
    }
    numbers = lax.GatherDimensionNumbers(**dimensions)
    return lax.gather(x, indices, numbers, (1,) * x.ndim)


OF_EACH_ROW = {"operand_batching_dims": (0,), "start_indices_batching_dims": (0,)}
PICKS = {
    "one_of_each_row": lambda x: jnp.take_along_axis(x, LABELS, axis=1),
    "one_of_each_row_of_a_batch": lambda x: jnp.take_along_axis(
        x.reshape(2, 2, 6), LABELS.reshape(2, 2, 1), axis=2
    ),
    "raw": lambda x: raw(x, LABELS[..., None], **OF_EACH_ROW),
}
OTHERS = {
    "two_of_each_row": lambda x: jnp.take_along_axis(x, jnp.tile(LABELS, (1, 2)), 1),
    "along_the_first_axis": lambda x: jnp.take_along_axis(x, LABELS[:1], axis=0),
    "of_a_vector": lambda x: jnp.take_along_axis(x[0], LABELS[1], axis=0),
    "rows": lambda x: x[jnp.arange(3)],
    "a_column": lambda x: x[:, jnp.array([2])],
    "pairs": lambda x: x[jnp.arange(4), LABELS[:, 0]],
    "with_an_axis_of_its_own": lambda x: raw(
        x,
        LABELS[..., None],
        **{**OF_EACH_ROW, "offset_dims": (2,), "collapsed_slice_dims": ()},
    ),
    "of_the_first_row": lambda x: raw(
        x, LABELS[..., None], collapsed_slice_dims=(0, 1)
    ),
    "of_the_rows_in_another_order": lambda x: raw(
        x.reshape(2, 2, 6),
        LABELS.reshape(2, 2, 1, 1),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(1, 0),
    ),
    "several_times_of_each_row": lambda x: raw(
        x, jnp.tile(LABELS[:, None, :, None], (1, 3, 1, 1)), **OF_EACH_ROW
    ),
}


def assert_differentiated_as_by_jax(fn):
    loss = lambda w: jnp.sum(fn(jnp.eye(4) @ w) ** 2)  # noqa: E731
    expected = jax.jit(jax.grad(loss))(X)
    for policy in POLICIES:
        found = jax.jit(jax.grad(amp.autocast(loss, policy)))(X)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", PICKS)
def test_one_element_of_each_row_is_a_pick(name):
    assert picks_from_rows(gather_of(PICKS[name], X))
    assert_differentiated_as_by_jax(PICKS[name])


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_like_a_pick_is_differentiated_as_by_jax(name):
    assert not picks_from_rows(gather_of(OTHERS[name], X))
    assert_differentiated_as_by_jax(OTHERS[name])


def test_what_is_no_gather_is_no_pick():
    fn = lambda x: lax.dynamic_slice(x, (0, LABELS[1, 0]), (4, 1))  # noqa: E731
    assert not any(picks_from_rows(e) for e in equations(jax.make_jaxpr(fn)(X)))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_picked_from_parameters_is_scattered_back(policy):
    # A parameter's gradient is as large as the parameter anyway.
    fn = amp.autocast(lambda w: jnp.sum(PICKS["raw"](w) ** 2), policy)
    traced = jax.make_jaxpr(jax.grad(fn))(X)
    assert "scatter-add" in {e.primitive.name for e in equations(traced)}
