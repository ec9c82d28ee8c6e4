"""Equations that are alike are decided once; those that differ are told apart."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.choose.choices import flow_of
from jmp_amp.plan.dataflow.values import Known, Origin
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.regions import region_at
from tests.programs import planned

BF16, F32 = "bfloat16", "float32"
W = jnp.ones((16, 16))
X, Y, B = jnp.ones((8, 16)), jnp.ones((8, 16)), jnp.ones((8, 16))


# Programs with two equations of one primitive that differ in one thing.


def doubled(h):
    return h * 2.0


def function_around_it(h, w, y, b):
    return h * 2.0, doubled(h)


def policy_around_it(h, w, y, b):
    return h * 2.0, amp.full_precision(lambda h: h * 2.0)(h)


def origin_of_an_operand(h, w, y, b):
    full = jnp.exp(h)
    return h * 2.0, full * 2.0, full


def kind_of_an_operand(h, w, y, b):
    full = jnp.exp(h)
    return full * b, full * jnp.tanh(b)


def range_of_a_constant(h, w, y, b):
    return h * 2.0, h * 1e-42


def what_the_result_becomes(h, w, y, b):
    moved, place = h * y, h * y
    return moved, place, y[place.astype(int)[:, 0] % 8]


def what_an_operand_is_made_of(h, w, y, b):
    return h + b, y @ w + y, b


def what_reads_the_result(h, w, y, b):
    return h * 2.0, jnp.exp(h * 2.0)


def wish_of_a_product(h, w, y, b):
    return h @ w, lax.dot(h, w, precision=lax.DotAlgorithmPreset.F32_F32_F32)


def shape_of_an_operand(h, w, y, b):
    return [jnp.einsum("in,nj->ij", jnp.tanh(y[:, :n]), w[:n]) for n in (2, 1)]


@pytest.mark.breadth(2)
@pytest.mark.filterwarnings("ignore:Policy. 'doubled' decided nothing")
@pytest.mark.parametrize(
    ("program", "primitive", "dtypes"),
    [
        (function_around_it, "mul", [BF16, F32]),
        (policy_around_it, "mul", [BF16, F32]),
        (origin_of_an_operand, "mul", [BF16, F32]),
        (kind_of_an_operand, "mul", [BF16, F32]),
        (range_of_a_constant, "mul", [BF16, F32]),
        (what_the_result_becomes, "mul", [BF16, F32]),
        (what_an_operand_is_made_of, "add", [BF16, F32]),
        (what_reads_the_result, "mul", [BF16, F32]),
        (wish_of_a_product, "dot_general", [BF16, BF16, F32]),
        (shape_of_an_operand, "dot_general", [BF16, F32]),
    ],
)
def test_two_equations_are_told_apart(program, primitive, dtypes):
    def fn(x, w, y, b):
        return [jnp.sum(each @ w) for each in program(x @ w, w, y, b)]

    policy = amp.Policy().with_full("doubled")
    found = planned(fn, X, W, Y, B, primitive=primitive, policy=policy)
    assert found[: len(dtypes)] == dtypes


def test_what_alike_regions_make_is_their_own():
    gate = amp.with_policy("mixed_bfloat16")(lambda x, w: jnp.tanh(x @ w) * 2.0)

    def fn(x, w):
        with jax.named_scope("first"):
            x = gate(x, w)
        with jax.named_scope("second"):
            return jnp.sum(gate(x, w) @ w)

    assert planned(fn, X, W, primitive="tanh") == [BF16, BF16]


def decisions(layers):
    """Returns how many decisions a stack of equal layers takes."""

    def stack(x, w):
        for _ in range(layers):
            x = jax.nn.softmax(jnp.tanh(x @ w) * 2.0)
        return x

    body = jaxprs.body_of(jax.make_jaxpr(stack)(X, W))
    region = region_at("", amp.Policy(), None)
    inputs = (Known(Origin.FREE, None, region),) * 2
    flow = flow_of(body, inputs, region, None)
    found = [step.decision for step in flow.steps if step.decision is not None]
    assert len(found) > 8 * layers
    return len(set(map(id, found)))


def test_a_repeated_layer_is_decided_once():
    # The first layer reads an argument, and no layer reads the last one.
    assert decisions(8) == decisions(4) == decisions(3)
