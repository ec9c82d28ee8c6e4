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


def doubled(h):
    return h * 2.0


def in_f32_whole(h):
    return amp.full_precision(lambda h: h * 2.0)(h)


def becomes_an_index(h, y):
    moved, place = h * y, h * y
    return moved, place, y[place.astype(int)[:, 0] % 8]


def wished(h, w):
    return lax.dot(h, w, precision=lax.DotAlgorithmPreset.F32_F32_F32)


def summed(n, w, y):
    return jnp.einsum("in,nj->ij", jnp.tanh(y[:, :n]), w[:n])


# Two equations of one primitive, of an activation `h` and of arguments, that differ in
# one thing.
APART = {
    "function around it": ("mul", lambda h, w, y, b: (h * 2.0, doubled(h))),
    "policy around it": ("mul", lambda h, w, y, b: (h * 2.0, in_f32_whole(h))),
    "origin of an operand": (
        "mul",
        lambda h, w, y, b: (h * 2.0, (full := jnp.exp(h)) * 2.0, full),
    ),
    "kind of an operand": (
        "mul",
        lambda h, w, y, b: ((full := jnp.exp(h)) * b, full * jnp.tanh(b)),
    ),
    "range of a constant": ("mul", lambda h, w, y, b: (h * 2.0, h * 1e-42)),
    "what the result becomes": ("mul", lambda h, w, y, b: becomes_an_index(h, y)),
    "what an operand is made of": ("add", lambda h, w, y, b: (h + h, y @ w + y, b)),
    "what reads the result": ("mul", lambda h, w, y, b: (h * 2.0, jnp.exp(h * 2.0))),
    "wish of a product": ("dot_general", lambda h, w, y, b: (h @ w, wished(h, w))),
    "shape of an operand": (
        "dot_general",
        lambda h, w, y, b: [summed(n, w, y) for n in (2, 1)],
    ),
}


@pytest.mark.breadth(2)
@pytest.mark.filterwarnings("ignore:Policy. 'doubled' decided nothing")
@pytest.mark.parametrize("name", APART)
def test_two_equations_are_told_apart(name):
    primitive, program = APART[name]

    def fn(x, w, y, b):
        return [jnp.sum(each @ w) for each in program(x @ w, w, y, b)]

    policy = amp.Policy().with_full("doubled")
    found = planned(fn, X, W, Y, B, primitive=primitive, policy=policy)
    # The product that makes `h` is in half.
    first = [BF16] * (name == "wish of a product")
    assert found[: len(first) + 2] == [*first, BF16, F32]


def test_what_alike_regions_make_is_their_own():
    gate = amp.with_policy("mixed_bfloat16")(lambda x, w: jnp.tanh(x @ w))

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
