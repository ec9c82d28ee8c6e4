"""Gradients of half parameters are the f32 sums of the gradients of all their uses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

F32 = jnp.float32
TURNS, ROWS = 4096, 8192
# A half sum of ones ends at 256 in bf16, and at 2048 in f16.
ONES = jnp.ones((TURNS, 1, 8))


def near(found, expected, dtype):
    found = np.asarray(found)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2 * float(jnp.finfo(dtype).eps))


def full(dtype, *shape):
    return jnp.full(shape, 0.5, dtype)


def total(x):
    return jnp.sum(x.astype(F32))


# Many uses of one parameter. The gradient of every element of most is 1.


def unrolled(w):
    return sum(total(-w) for _ in range(4)) / -4


def in_turns(w, turn=lambda w, x: total(x @ w)):
    xs = ONES.astype(w.dtype)
    return jax.lax.scan(lambda c, x: (c + turn(w, x), None), 0.0, xs)[0] / TURNS


def in_calls(w):
    return in_turns(w, jax.jit(lambda w, x: total(x @ jax.jit(jnp.transpose)(w).T)))


def in_branches(w):
    add, other = lambda w, x: total(x @ w), lambda w, x: -total(x @ w)
    return in_turns(w, lambda w, x: jax.lax.cond(x[0, 0] > 0, add, other, w, x))


def in_a_layer(uses, w):
    # A layer is a slice of a stack.
    return jax.lax.scan(lambda c, w: (c + uses(w), None), 0.0, w[None])[0]


def looked_up(w):
    return total(w[jnp.arange(ROWS) % 8]) / (ROWS // 8)


def many(w):
    return jnp.ones((1024, 8, 8), w.dtype)


USES = {
    "unrolled": unrolled,
    "in_turns": in_turns,
    "in_a_checkpoint": jax.checkpoint(in_turns),
    "in_calls": in_calls,
    "in_a_call": jax.jit(unrolled),
    "in_branches": in_branches,
    "of_a_reshape": lambda w: unrolled(w.reshape(4, 16)),
    "of_joined": lambda w: unrolled(jnp.concatenate([w, w])) / 2,
    "in_turns_of_a_layer": functools.partial(in_a_layer, in_turns),
    "in_a_layer": functools.partial(in_a_layer, unrolled),
    "looked_up": looked_up,
    "looked_up_in_turns": lambda w: in_turns(w, lambda w, x: total(w[x.astype(int)])),
    "added_to_many": lambda w: total(many(w) + w[None]),
    "scales_many": lambda w: total(many(w) * w[None]),
}


def sums(jaxpr):
    """Yields the results of the sums of a program and of its bodies."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("add_any", "reduce_sum", "scatter-add"):
            yield eqn.outvars[0].aval
        for body in core.jaxprs_in_params(eqn.params):
            yield from sums(body)


@pytest.mark.parametrize("uses", USES)
def test_no_sum_of_gradients_of_a_half_parameter_is_half(uses):
    w = full("bfloat16", 8, 8)
    found = list(sums(jax.make_jaxpr(amp.grad(USES[uses]))(w).jaxpr))
    assert found
    assert all(aval.dtype == F32 for aval in found)
    assert any(
        aval.dtype == w.dtype
        for aval in sums(jax.make_jaxpr(jax.grad(USES[uses]))(w).jaxpr)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("uses", ["in_turns", "looked_up"])
def test_a_gradient_is_the_sum_of_thousands_of_uses(uses, dtype):
    w = full(dtype, 8, 8)
    loss, gradient = jax.jit(amp.value_and_grad(USES[uses]))(w)
    near(gradient, np.ones((8, 8)), dtype)
    assert loss == jax.jit(USES[uses])(w)


def test_what_a_loop_carries_is_no_parameter_and_is_differentiated_as_written():
    def loss(h):
        turn = lambda h, _: (jnp.sin(h) + h * jnp.cos(3 * h), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(turn, h, None, length=5)[0].astype(F32))

    h = jnp.linspace(-1.0, 1.0, 64).astype(jnp.bfloat16)
    # The initial carry has one use: there is nothing to add up in f32.
    found, expected = (jax.jit(each(loss))(h) for each in (amp.grad, jax.grad))
    np.testing.assert_array_equal(found, expected.astype(F32))


def test_a_tied_embedding_sums_the_gradients_of_its_lookup_and_its_head():
    table = (jnp.arange(8.0).reshape(4, 2) / 8).astype(jnp.bfloat16)
    ids = jnp.where(jnp.arange(ROWS) < 6, jnp.arange(ROWS) % 4, 3)

    def loss(table):
        return jnp.mean((table[ids] @ table.T).astype(F32))

    t = np.asarray(table, np.float64)
    counts = np.bincount(ids, minlength=4) / ROWS
    expected = (counts[:, None] * t.sum(0) + counts @ t) / 4
    near(jax.jit(amp.grad(loss))(table), expected, table.dtype)


def test_a_recipe_that_stores_half_sums_gradients_in_f32():
    recipe = amp.recipe("O2", half_dtype="bfloat16")
    params = recipe.cast_params({"kernel": full("float32", 8, 8)})
    apply = recipe.autocast(lambda w, x: x @ w)
    loss = lambda p: in_turns(p["kernel"], lambda w, x: total(apply(w, x)))  # noqa: E731
    near(jax.jit(amp.grad(loss))(params)["kernel"], np.ones((8, 8)), "bfloat16")


def test_gradients_that_vanish_in_f16_survive():
    # The smallest f16 is 6e-8.
    loss = lambda w: total(w) * 1e-9  # noqa: E731
    w, scale = full("float16", 3), amp.static_loss_scale(2.0**4)
    for fn, given in ((loss, None), (loss, scale), (jax.jit(loss), scale)):
        gradient = amp.grad(fn)(w, loss_scale=given)
        np.testing.assert_allclose(gradient, 1e-9 * np.ones(3), rtol=1e-6)


# What the function sees


def test_the_function_is_called_once_and_sees_half_arrays_and_all_else_as_given():
    seen, marker, given = [], object(), []

    def loss(params, x, n, name, given):
        seen.append((params["w"].dtype, type(x), int(n), name))
        given.append(name)
        jax.debug.callback(lambda w: seen.append(w.dtype), params["w"])
        ys = [params["w"] * jnp.asarray(x, params["w"].dtype) for _ in range(int(n))]
        return total(sum(ys)), (marker, ys[0])

    params = {"w": full("bfloat16", 3), "text": None}
    args = np.ones(3, np.float32), jnp.int32(2), "name", given
    (_, aux), gradients = amp.value_and_grad(loss, has_aux=True)(params, *args)
    jax.effects_barrier()
    assert seen == [(jnp.bfloat16, np.ndarray, 2, "name"), jnp.bfloat16]
    assert given == ["name"]
    assert aux[0] is marker
    assert aux[1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradients["w"], 2 * np.ones(3))


def test_a_function_that_reads_values_of_half_parameters_is_refused_by_jax():
    loss = lambda w: total(w) if w[0] > 0 else total(-w)  # noqa: E731
    with pytest.raises(jax.errors.TracerBoolConversionError, match="boolean"):
        amp.grad(loss)(full("float16", 3))
    np.testing.assert_array_equal(amp.grad(loss)(jnp.ones(3)), np.ones(3))


@pytest.mark.parametrize(
    "wrong", [lambda w: w @ jnp.ones(4, w.dtype), lambda w: f"{[]:.2f}"]
)
def test_an_error_of_the_function_is_that_of_jax(wrong):
    calls, errors = [], []

    def loss(w):
        calls.append(None)
        return total(wrong(w))

    for grad in (jax.grad, amp.grad):
        with pytest.raises(TypeError) as raised:
            grad(loss)(full("bfloat16", 3))
        errors.append(raised.value)
    assert str(errors[1]) == str(errors[0])
    assert len(calls) == 2


def test_a_function_of_parameters_that_are_not_half_is_differentiated_as_before():
    loss = lambda w, x: jnp.sum(jnp.tanh(w * x.astype(F32)))  # noqa: E731
    args = jnp.ones(3), full("bfloat16", 3)
    found = jax.make_jaxpr(amp.grad(loss))(*args)
    assert str(found) == str(jax.make_jaxpr(jax.grad(loss))(*args))


def test_what_is_overwritten_with_its_gradient_stays_half():
    params = {"w": full("float16", 3), "_overwrite_with_gradient": full("float16", 3)}
    loss = lambda p: sum(map(total, p.values()))  # noqa: E731
    gradients = amp.grad(loss)(params)
    assert gradients["w"].dtype == F32
    assert gradients["_overwrite_with_gradient"].dtype == jnp.float16


# What it costs


def test_stacked_layers_and_what_their_gradients_save_stay_half():
    def loss(stack, x):
        layer = lambda x, w: (jnp.tanh(x @ w.T), None)  # noqa: E731
        return total(jax.lax.scan(layer, x, stack)[0])

    args = full("bfloat16", 5, 4, 4), full("bfloat16", 3, 4)
    eqns = jax.make_jaxpr(amp.grad(loss))(*args).eqns
    forward, backward = [e for e in eqns if e.primitive.name == "scan"]
    for v in (*forward.invars, *forward.outvars, *backward.invars, *backward.outvars):
        assert v.aval.dtype == jnp.bfloat16


def test_a_block_that_is_called_often_is_staged_once():
    block = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def loss(w):
        x = full("bfloat16", 1, 4)
        for _ in range(12):
            x = block(x, w)
        return total(x)

    eqns = jax.make_jaxpr(amp.grad(loss))(full("bfloat16", 4, 4)).eqns
    called = [eqn.params["jaxpr"] for eqn in eqns if "jaxpr" in eqn.params]
    assert len(called) == 24
    # The first block has no gradient of its input.
    assert len(set(map(id, called))) <= 4


# Equations that are not entered, and maps


def test_opaque_equations_read_half_and_their_gradients_are_summed_in_f32():
    @jax.custom_vjp
    def twice(w):
        assert w.dtype == jnp.bfloat16
        return w + w

    twice.defvjp(lambda w: (twice(w), None), lambda _, g: (g + g,))

    def loss(w):
        doubled = jax.lax.while_loop(
            lambda s: s[0] < 1, lambda s: (s[0] + 1, s[1] * w), (0, jnp.ones_like(w))
        )[1]
        terms = [total(twice(w)) for _ in range(4)]
        return sum(terms) / 4 + total(jax.lax.stop_gradient(doubled))

    w = full("bfloat16", 3)
    near(amp.grad(loss)(w), 2 * np.ones(3), "bfloat16")
    found = list(sums(jax.make_jaxpr(amp.grad(loss))(w)))
    assert found and all(x.dtype == F32 for x in found)


@pytest.mark.parametrize("inside", [True, False])
def test_a_sharded_map_sums_the_gradients_of_its_shards_in_f32(inside):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    mapped = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P()
    )

    def loss(w, x):
        turn = lambda c, x: (c + total(w * x), None)  # noqa: E731
        return jax.lax.psum(jax.lax.scan(turn, 0.0 * total(x[0]), x)[0], "d") / TURNS

    gradient = mapped(amp.grad(loss)) if inside else amp.grad(mapped(loss))
    x = jnp.ones((TURNS, 3), jnp.bfloat16)
    near(jax.jit(gradient)(full("bfloat16", 3), x), np.ones(3), "bfloat16")


# nnx


class Net(nnx.Module):
    def __init__(self, dtype):
        options = dict(dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(8, 8, **options)
        self.tied = self.linear
        self.calls = nnx.Variable(jnp.zeros((), dtype))

    def __call__(self, x):
        assert self.linear.kernel[...].dtype == self.linear.param_dtype
        self.calls[...] += 1
        self.seen = nnx.Variable(self.tied(x))
        return self.linear(x)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("wrap", [nnx.jit, lambda fn: fn], ids=["jit", "eager"])
def test_an_nnx_module_sums_in_f32_and_keeps_what_it_wrote(wrap):
    def loss(net, xs):
        y = net(xs[0])
        return total(y) * 0 + in_turns(net.linear.kernel[...]), net.linear

    found, plain = Net("bfloat16"), Net("bfloat16")
    xs = ONES.astype("bfloat16")
    both = wrap(lambda net, xs: amp.value_and_grad(loss, has_aux=True)(net, xs))
    (value, aux), gradients = both(found, xs)
    both = wrap(lambda net, xs: nnx.value_and_grad(loss, has_aux=True)(net, xs))
    (expected, _), structure = both(plain, xs)
    assert value == expected
    assert aux is found.linear
    assert found.tied is found.linear
    near(gradients["linear"]["kernel"][...], np.ones((8, 8)), "bfloat16")
    assert jax.tree.structure(gradients) == jax.tree.structure(structure)
    states = nnx.state(found), nnx.state(plain)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
