"""Arguments whose values a function needs: numbers reach it, arrays are traced."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_amp as amp

W, X = jnp.eye(3), jnp.ones(3)


def flagged(params, x, *rest, flag=False, **more):
    if flag or any(rest) or any(more.values()) or params.get("on", False):
        x = x + 1
    return params["w"] @ x


def sized(x, size):
    return jnp.broadcast_to(x, (size, 3))


def indexed(x, index):
    return (x, 2 * x, 3 * x)[index]


def as_numpy(x, factor):
    return x * np.asarray(factor).astype(np.float32)


def counted(x, count):
    return sum(x for _ in range(count))


def masked(x, mask):
    return x[mask]


USES = [sized, indexed, as_numpy, counted]
NUMBERS = [np.int64(2), np.int8(2), np.uint16(2)]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("number", [2, *NUMBERS], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize("fn", USES)
def test_a_number_of_numpy_is_a_number(fn, number):
    found = amp.autocast(fn)(X, number)
    np.testing.assert_array_equal(found, fn(X, 2))


@pytest.mark.parametrize("flag", [True, np.True_, np.bool_(1)])
def test_a_boolean_of_numpy_is_a_flag(flag):
    found = amp.autocast(flagged)({"w": W}, X, flag=flag)
    np.testing.assert_array_equal(found, 2 * X)
    assert amp.explain(flagged)({"w": W}, X, flag=flag).total.matmuls == 1


def test_a_float_of_numpy_reaches_the_function_and_comes_back_as_it_is():
    seen = []

    def fn(x, rate):
        seen.append(rate)
        return x * rate, rate

    rate = np.float32(0.1)
    found, same = amp.autocast(fn)(X, rate)
    assert seen == [rate] and same is rate
    np.testing.assert_array_equal(found, X * rate)


ARRAYS = {
    "rest[0]": lambda fn, a: fn({"w": W}, X, a),
    "flag": lambda fn, a: fn({"w": W}, X, flag=a),
    "late": lambda fn, a: fn({"w": W}, X, late=a),
    "params['on']": lambda fn, a: fn({"w": W, "on": a}, X),
}


@pytest.mark.parametrize("array", [np.array(True), jnp.array(True)], ids=["np", "jnp"])
@pytest.mark.parametrize("transform", [amp.autocast, amp.explain])
@pytest.mark.parametrize("argument", ARRAYS)
def test_the_error_names_the_argument_that_is_traced(argument, transform, array):
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        ARRAYS[argument](transform(flagged), array)
    message = str(raised.value)
    call = f"{transform.__name__}(fn)"
    assert (
        f"{call}: the function flagged needs the value of the argument {argument}, "
    ) in message
    assert "Pass flags, sizes and indices as Python or numpy numbers" in message
    assert "arrays[" not in message and "calls.py" not in message


@pytest.mark.parametrize("fn", USES)
def test_the_error_names_the_argument_whatever_needs_its_value(fn):
    with pytest.raises(TypeError) as raised:
        amp.autocast(fn)(X, np.array(2))
    name = ["size", "index", "factor", "count"][USES.index(fn)]
    assert f"needs the value of the argument {name}, but" in str(raised.value)


def test_the_error_names_both_of_two_arguments():
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        amp.autocast(lambda a, b: a if a[0] > b[0] else b)(X, 2 * X)
    assert "of the argument a and of the argument b, but" in str(raised.value)


def test_a_mask_is_traced_and_the_error_says_so():
    with pytest.raises(jax.errors.NonConcreteBooleanIndexError) as raised:
        amp.autocast(masked)(X, np.array([True, False, True]))
    notes = "\n".join(raised.value.__notes__)
    assert "autocast(fn): the function masked needs the value of an array" in notes


def test_the_error_names_a_variable_of_a_module():
    class Model(nnx.Module):
        def __init__(self):
            self.flag = nnx.Variable(jnp.array(True))

        def __call__(self, x):
            return x if self.flag[...] else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        amp.autocast(Model())(X)
    assert "needs the value of a variable of an nnx module, but" in str(raised.value)


def test_an_error_in_a_function_that_the_user_jitted_is_left_alone():
    @jax.jit
    def inner(x):
        return x if x[0] > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as expected:
        inner(X)
    with pytest.raises(jax.errors.TracerBoolConversionError) as found:
        amp.autocast(inner)(X)
    assert str(found.value) == str(expected.value)


# Results that are no pytrees


@dataclasses.dataclass
class Output:
    logits: object


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits):
        self.logits = {"last": logits}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Output, "of Output, which .* in 'logits'"),
        (Slotted, "of Slotted, which .* in 'logits'"),
        (lambda y: lambda: y, "of function, which .* in 'y'"),
    ],
    ids="dataclass slots closure".split(),
)
def test_a_result_that_holds_a_traced_array_is_refused(make, told):
    with pytest.raises(TypeError, match=rf"autocast\(fn\): a result is {told}"):
        amp.autocast(lambda x: {"made": make(x * 2)})(X)


def test_other_results_that_are_no_pytrees_come_back():
    held = Output(W)
    results = amp.autocast(lambda x: (x @ W, held, jnp.sin, Output("text"), int))(X)
    assert results[1] is held and results[2] is jnp.sin and results[4] is int
    assert results[3] == Output("text")


def test_a_custom_vjp_that_uses_an_array_around_it_says_the_remedy():
    def loss(w):
        zeros = jnp.zeros(4)

        @jax.custom_vjp
        def solve(w):
            return jnp.tanh(zeros + w)

        solve.defvjp(lambda w: (solve(w), w), lambda w, g: (g * w,))
        return jnp.sum(solve(w))

    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        jax.grad(amp.autocast(loss, "mixed_bfloat16"))(jnp.ones(4))
    notes = " ".join(raised.value.__notes__)
    assert f"custom_vjp function called at {__file__}" in notes
    assert "Pass the array as an argument" in notes
