"""What `autocast` promises of every construct of JAX: properties, each of its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.policies.policy_map import as_policy_map
from jmp_amp.transform.planned import planned_call
from tests.constructs import ROWS, rows
from tests.programs import dtypes_of, equations, products
from tests.rounding import (
    BF16,
    F16,
    POLICIES,
    ROUNDINGS,
    W,
    assert_only_rounded,
    half_of,
    mean_square,
)


def derivative(name, fn):
    """`fn` and its derivative, as far as JAX has one of this row."""
    if "value" in ROWS[name].tags:
        return fn
    if "forward" in ROWS[name].tags:
        return lambda w: jax.jvp(fn, (w,), (w,))
    return jax.value_and_grad(fn)


# What runs in half depends on which half it is: a constant may not fit in f16. All else
# is compared in f16 alone, which rounds less.
BY_HALF = {
    *"gelu relu_in_scan interp erf ldexp nan_to_num masked_branch".split(),
    *"oversize_constant_branch vmap_of_cond vmap_of_switch axis_index".split(),
    *"axis_index_unchecked vmap_with_an_axis scan_of_layers scan_of_checkpoint".split(),
    *"associative state_space custom_jvp custom_jvp_integer".split(),
}


@pytest.mark.slow
def test_what_depends_on_which_half_it_is_is_compared_in_both():
    def dtypes(plan):
        for row in plan.equations:
            yield "half" if row.dtype in half else row.dtype
            for body in row.bodies:
                yield from dtypes(body)

    def plan(loss, policy):
        policies = as_policy_map(policy, "plan({})")
        with planned_call(loss, policies, (W,), {}, "plan", None) as call:
            return list(dtypes(call.plan))

    half = [jnp.dtype(half_of(policy)) for policy in POLICIES]

    plans = {name: [plan(r.loss, p) for p in POLICIES] for name, r in ROWS.items()}
    differing = {name for name, (first, second) in plans.items() if first != second}
    assert differing and differing <= BY_HALF


@pytest.mark.breadth(4)
@rows(every=2)
def test_value_and_derivative_are_those_of_f32(name):
    row = ROWS[name]
    assert_only_rounded(
        lambda transform, w: derivative(name, transform(row.loss))(w),
        roundings=row.roundings,
        policies=POLICIES if name in BY_HALF else [F16],
    )


@pytest.mark.breadth(2)
@rows("inside", slow="slow inside")
def test_derivatives_inside_and_along_a_line_are_those_of_f32(name):
    row = ROWS[name]

    def results(transform, w):
        inside = transform(derivative(name, row.loss))(w)
        # JAX has no derivative of a `custom_vjp` along a line.
        has_rule = "own rule" in row.tags
        return inside, None if has_rule else jax.jvp(transform(row.loss), (w,), (w,))

    assert_only_rounded(results, roundings=row.roundings, policies=[F16])


@pytest.mark.breadth(2)
@rows("half", slow=None)
def test_all_products_are_half_both_ways(name):
    loss = ROWS[name].loss
    found = products(derivative(name, amp.autocast(loss, BF16)), W)
    assert len(found) == len(products(derivative(name, loss), W)) >= 2
    assert set(found) == {half_of(BF16)}


@pytest.mark.breadth(2)
@rows("some half", slow=None)
def test_products_around_what_runs_as_traced_are_half(name):
    fn = amp.autocast(ROWS[name].loss, BF16)
    assert (half_of(BF16),) * 3 in dtypes_of(fn, W, primitive="dot_general")


@pytest.mark.breadth(2)
@rows("own rule", slow=None)
def test_a_custom_vjp_is_in_the_program_with_its_rule(name):
    found = equations(jax.make_jaxpr(amp.autocast(ROWS[name].loss))(W))
    assert any(e.primitive.name.startswith("custom_vjp") for e in found)


@pytest.mark.breadth(2)
@rows("f32 algebra", slow=None)
def test_linear_algebra_runs_in_f32(name):
    routines = "cholesky lu qr geqrf eigh svd triangular_solve fft".split()
    fn = amp.autocast(ROWS[name].loss, F16)
    found = {row for each in routines for row in dtypes_of(fn, W, primitive=each)}
    assert found and {d for row in found for d in row} <= {"float32", "complex64"}


@pytest.mark.breadth(2)
@rows("once")
def test_twice_is_once(name):
    once = amp.autocast(ROWS[name].loss, F16)
    twice = amp.autocast(once, F16)
    assert str(jax.make_jaxpr(twice)(W)) == str(jax.make_jaxpr(once)(W))


@pytest.mark.slow
@rows("once", slow=None)
def test_an_f32_policy_changes_nothing(name):
    loss = ROWS[name].loss
    found, expected = (
        jax.jit(derivative(name, fn))(W) for fn in (amp.autocast(loss, "float32"), loss)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# Each takes `t`, which is `autocast` or nothing, a program, and the weights.
MAPPED = {
    "vmap": lambda t, f, w: jax.vmap(t(f))(jnp.stack([w, 0.5 * w])),
    "linearize": lambda t, f, w: jax.linearize(t(f), w)[1](w),
}
TRANSFORMATIONS = MAPPED | {
    "jvp": lambda t, f, w: jax.jvp(t(f), (w,), (w,)),
    "vjp": lambda t, f, w: (lambda y, back: back(y))(*jax.vjp(t(f), w)),
    "jacfwd": lambda t, f, w: jax.jacfwd(t(lambda s: f(w * s)))(jnp.ones((1, 16))),
    "jacrev": lambda t, f, w: jax.jacrev(
        t(lambda s: jax.tree.map(lambda y: jnp.mean(y, axis=0), f(w * s)))
    )(jnp.ones((1, 16))),
    "hessian": lambda t, f, w: jax.hessian(t(lambda s: loss_of(f)(w * (1 + s))))(
        jnp.float32(0)
    ),
    "inside": lambda t, f, w: t(jax.grad(loss_of(f)))(w),
    "inside_vmap": lambda t, f, w: t(jax.vmap(f))(jnp.stack([w, 0.5 * w])),
    "inside_vmap_grad": lambda t, f, w: t(jax.vmap(jax.grad(loss_of(f))))(
        jnp.stack([w, 0.5 * w])
    ),
    "inside_jvp": lambda t, f, w: t(lambda w: jax.jvp(f, (w,), (w,)))(w),
    "inside_linearize": lambda t, f, w: t(lambda w: jax.linearize(f, w)[1](w))(w),
    "jit_inside": lambda t, f, w: t(jax.jit(f))(w),
    "grad_of_vmap": lambda t, f, w: jax.grad(
        loss_of(lambda w: jax.vmap(t(f))(jnp.stack([w, 0.5 * w])))
    )(w),
    "checkpoint_outside": lambda t, f, w: jax.grad(loss_of(jax.checkpoint(t(f))))(w),
    "checkpoint_inside": lambda t, f, w: jax.grad(t(loss_of(jax.checkpoint(f))))(w),
    "scan_outside": lambda t, f, w: lax.scan(
        lambda c, _: (c + loss_of(t(f))(w), None), jnp.float32(0), length=2
    )[0],
}


def loss_of(fn):
    return lambda w: sum(map(mean_square, jax.tree.leaves(fn(w))))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@rows("transformed", slow="slow transformations")
def test_a_transformation_of_it_is_that_of_f32(name, transformation):
    fn, apply = ROWS[name].fn, TRANSFORMATIONS[transformation]
    assert_only_rounded(
        lambda transform, w: apply(transform, fn, w),
        roundings=2 * ROUNDINGS,
        policies=[F16],
    )


@pytest.mark.breadth(2)
@rows("mapped")
def test_vmap_and_linearize_of_it_are_those_of_f32(name):
    loss = ROWS[name].loss
    assert_only_rounded(
        lambda transform, w: [each(transform, loss, w) for each in MAPPED.values()],
        policies=[F16],
    )
