"""Gradients that are sums are summed in f32: of whatever many elements read.

JAX differentiates a broadcast to a sum in the dtype of what is broadcast. Nearest: with
autocast around the gradient the sum is an operation of the program, and in f32 anyway.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.experimental.jet import jet
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_amp as amp
from tests import h100
from tests.measures import compiled, relative_error
from tests.programs import equations
from tests.rounding import BF16, POLICIES, assert_only_rounded, eps

N = 16
X = jax.random.normal(jax.random.key(0), (8, 32, N))
W, V = (jax.random.normal(jax.random.key(i), (N, N)) / 4 for i in (1, 2))
ROW = jnp.linspace(0.5, 1.5, N).reshape(1, 1, N)


def product(x, w):
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


# Each is between two products: its operands are in half, and its cotangents too.
PROGRAMS = {
    "a bias": lambda h, p: h + p,
    "a bias, broadcast by hand": lambda h, p: h + jnp.broadcast_to(p, h.shape),
    "what is taken away": lambda h, p: h - p,
    "a scale": lambda h, p: h * p,
    "a gate of all elements": lambda h, p: h * jnp.tanh(p[..., :1]),
    "a scalar": lambda h, p: h + h[::-1] * p[0, 0, 0],
    "a divisor": lambda h, p: h / p,
    "a numerator": lambda h, p: p / (2 + jnp.square(h)),
    "a threshold": lambda h, p: jnp.maximum(h, p - 1),
    "a token for what is hidden": lambda h, p: jnp.where(h > 0, p.astype(h.dtype), h),
    "embeddings of places": lambda h, p: h + jnp.ones((1, 32, 1)).astype(h.dtype) * p,
    "an embedding of a time": lambda h, p: (
        h + jnp.tanh(product(h[:, :1] * p, V.astype(h.dtype)))
    ),
    "the first of a batch": lambda h, p: h + h[:1] * p,
    "tiles": lambda h, p: h + jnp.tile(p, (*h.shape[:2], 1)),
    "a part of each element": lambda h, p: h + h[..., :1] * p,
}


def network(operation):
    def apply(params, x):
        w, v, p = params
        return product(operation(product(x, w), p), v)

    return apply


def loss_of(apply):
    def loss(params, x):
        # Not the mean: cotangents in f16 would be subnormal.
        return jnp.sum(jnp.square(apply(params, x).astype(jnp.float32) - 1)) / 8

    return loss


def sums_in_half(fn, *args):
    """The shapes that the sums of a program in half read, and those that they write."""
    found = []
    for eqn in equations(jax.make_jaxpr(fn)(*args)):
        if eqn.primitive.name in ("reduce_sum", "psum", "psum_invariant"):
            read, written = (v.aval for v in (*eqn.invars, *eqn.outvars))
            if read.dtype.itemsize == 2 and read.size > written.size:
                found.append((read.shape, written.shape))
    return found


PARAMS = (W, V, ROW)
every_program = pytest.mark.parametrize("name", PROGRAMS)


@every_program
def test_a_gradient_that_is_a_sum_is_summed_in_f32(name):
    apply = network(PROGRAMS[name])
    written = jax.grad(loss_of(apply))
    by_hand = [x.astype(jnp.bfloat16) for x in PARAMS]
    half = jax.grad(loss_of(amp.autocast(apply, BF16)))
    # What a user writes by hand has such sums: the test can tell them.
    assert sums_in_half(written, by_hand, X.astype(jnp.bfloat16))
    assert not sums_in_half(half, PARAMS, X)


@every_program
@pytest.mark.parametrize("policy", POLICIES)
def test_values_and_gradients_are_those_of_f32(name, policy):
    assert_only_rounded(
        lambda transform, params: jax.value_and_grad(
            loss_of(transform(network(PROGRAMS[name])))
        )(params, X),
        args=(PARAMS,),
        policies=[policy],
    )


BIAS, SCALE = map(network, [PROGRAMS["a bias"], PROGRAMS["a scale"]])


def scanned(params, x):
    """Layers in a loop, each with a bias and a scale."""

    def layer(h, _):
        return BIAS(params, SCALE(params, jax.nn.relu(h))), None

    return jax.lax.scan(layer, product(x, W), None, length=3)[0]


def branched(params, x):
    return jax.lax.cond(x[0, 0, 0] > 9, SCALE, BIAS, params, x)


# A program, and the same under autocast: what is around autocast, and inside.
AROUND = {
    "jit inside": (BIAS, amp.autocast(jax.jit(BIAS), BF16)),
    "jit around": (BIAS, jax.jit(amp.autocast(BIAS, BF16))),
    "a checkpoint inside": (SCALE, amp.autocast(jax.checkpoint(SCALE), BF16)),
    "a checkpoint around": (SCALE, jax.checkpoint(amp.autocast(SCALE, BF16))),
    "a scan": (scanned, amp.autocast(scanned, BF16)),
    "a branch": (branched, amp.autocast(branched, BF16)),
    "vmap inside": (
        SCALE,
        amp.autocast(jax.vmap(lambda p, x: SCALE(p, x[None])[0], (None, 0)), BF16),
    ),
    "autocast inside": (BIAS, amp.autocast(amp.autocast(BIAS, BF16), BF16)),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_sum_is_in_f32_wherever_the_broadcast_is(name):
    apply, half = AROUND[name]
    gradient = jax.grad(loss_of(half))
    assert not sums_in_half(gradient, PARAMS, X)
    for found, expected in zip(
        compiled(gradient)(PARAMS, X), jax.grad(loss_of(apply))(PARAMS, X), strict=True
    ):
        assert relative_error(found, expected) < 8 * eps(BF16)


def tangent_of_a_pool(h):
    """It is chosen by an operand that is larger than the result."""
    pool = lambda h: nn.max_pool(h, (4,), strides=(4,))  # noqa: E731
    return jax.jvp(pool, (h,), (h / 2,))[1]


def scattered(h):
    """Rows in half that are smaller than the result, and go into a part of it."""
    half = h.astype(jnp.float16)
    return half.at[:, :4].max(half[:, 4:8] / 2).astype(h.dtype)


def largest(h):
    return h.max(1)


def looked_up(h):
    """Each row twice: a lookup says for itself what it sums."""
    return h[:, jnp.arange(64) % 32]


def scaled(h):
    """By a constant, which has no gradient."""
    return h * 0.5


@pytest.mark.parametrize(
    "operation", [tangent_of_a_pool, scattered, largest, looked_up, scaled]
)
def test_other_operations_are_derived_as_jax_derives_them(operation):
    def apply(params, x):
        return product(operation(product(x, params[0])), params[1])

    program = jax.make_jaxpr(amp.autocast(apply, BF16))((W, V), X)
    names = [e.primitive.name for e in equations(program)]
    assert "custom_jvp_call" not in names

    assert_only_rounded(
        lambda transform, params: jax.grad(loss_of(transform(apply)))(params, X),
        args=((W, V),),
        policies=[BF16, "p=f32,c=bf16,o=f32,r=f32"],
    )


def test_forward_mode_and_second_derivatives_are_those_of_f32():
    def results(transform, params):
        loss = loss_of(transform(SCALE))
        moving = jax.tree.map(jnp.cos, params)
        gradient = jax.grad(loss)
        along = jax.jvp(loss, (params, X), (moving, X))
        _, linear = jax.linearize(lambda p: loss(p, X), params)
        second = jax.jvp(lambda p: gradient(p, X), (params,), (moving,))[1]
        reverse = jax.grad(lambda p: optax.tree.vdot(gradient(p, X), moving))(params)
        return along, linear(moving), second, reverse

    assert_only_rounded(results, args=(PARAMS,))


@pytest.mark.parametrize("policy", [BF16, "p=f32,c=bf16,o=f32,r=f32"])
def test_taylor_mode_goes_through(policy):
    # It knows no derivative rules: it goes through the operations.
    def series(fn):
        zero = jnp.zeros_like(ROW)
        loss = loss_of(fn)
        return jet(lambda p: loss((W, V, p), X), (ROW,), ((ROW, zero),))

    found, expected = series(amp.autocast(SCALE, policy)), series(SCALE)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert abs(a - b) <= 8 * eps(BF16) * abs(b)


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
@pytest.mark.parametrize("name", ["a bias", "a divisor", "a part of each element"])
def test_a_sum_is_in_f32_on_a_mesh(kind, name):
    apply = network(PROGRAMS[name])
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis,))
    half = amp.autocast(apply, BF16)
    if kind == "manual":
        specs = PartitionSpec(), PartitionSpec("data")
        half = jax.shard_map(half, mesh=mesh, in_specs=specs, out_specs=specs[1])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        gradient = jax.grad(loss_of(half))
        assert not sums_in_half(gradient, PARAMS, x)
        found = compiled(gradient)(PARAMS, x)
    for a, b in zip(found, jax.grad(loss_of(apply))(PARAMS, X), strict=True):
        assert relative_error(a, b) < 8 * eps(BF16)


@pytest.mark.parametrize("name", ["a bias", "a scale", "a bias, broadcast by hand"])
def test_gradients_of_half_parameters_are_summed_in_f32(name):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    policy = "p=bf16,c=bf16,o=bf16"
    gradient = amp.grad(loss_of(amp.autocast(network(PROGRAMS[name]), policy)))
    assert not sums_in_half(gradient, half, X)
    sums = [
        eqn.outvars[0].aval.dtype.name
        for eqn in equations(jax.make_jaxpr(gradient)(half, X))
        if eqn.primitive.name == "reduce_sum" and eqn.outvars[0].aval.shape == (N,)
    ]
    assert sums and {*sums} == {"float32"}


@every_program
def test_no_more_is_kept_than_what_is_written_by_hand_keeps(name):
    def kept(apply, params, x):
        backward = jax.eval_shape(
            lambda p: jax.vjp(lambda p: apply(p, x), p)[1], params
        )
        return [(a.size, a.dtype.itemsize) for a in jax.tree.leaves(backward)]

    apply = network(PROGRAMS[name])
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, X))
    by_hand = kept(apply, params, x)
    # What is repeated is kept in f32: it is smaller than the batch.
    most = sum(size * (4 if size < X.size else 2) for size, _ in by_hand)
    half = amp.autocast(apply, BF16)
    assert sum(size * bytes_ for size, bytes_ in kept(half, PARAMS, X)) <= most


def test_the_bias_of_a_convolution_has_the_gradient_of_f32():
    """In bf16 XLA for CPUs loses more than half of the sum of 18 432 cotangents."""
    images = jax.random.normal(jax.random.key(0), (8, 48, 48, N))
    kernels = jax.random.normal(jax.random.key(1), (2, 3, 3, N, N)) / 10

    def conv(x, w):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=dims
        )

    def apply(bias, x):
        h = jax.nn.relu(conv(x, kernels[0]) + bias.reshape(1, 1, 1, N))
        return conv(h, kernels[1])

    def gradient(fn):
        return jax.jit(jax.grad(loss_of(fn)))(jnp.zeros(N), images)

    found, expected = gradient(amp.autocast(apply, BF16)), gradient(apply)
    assert relative_error(found, expected) < 2 * eps(BF16)


@h100.needs_compiler
def test_no_kernel_of_a_gpu_adds_up_in_half():
    """What is written by hand has kernels that add bf16 to bf16."""

    def half_sums(apply, *args):
        program = h100.compile_for_gpu(jax.grad(loss_of(apply)), *args)
        return re.findall(r" = bf16\[[\d,]*\]\S* reduce\(", program.as_text())

    apply = network(lambda h, p: jnp.tanh(h + p))
    x = jnp.zeros((64, 512, N))
    assert half_sums(
        apply, *jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, x))
    )
    assert not half_sums(amp.autocast(apply, BF16), PARAMS, x)
