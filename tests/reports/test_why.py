"""What `Report.why` tells: each pin names where it begins."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.choose.pins import PINS
from tests.plan.rules.test_derivative import two_of_one_line


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X, W = f32(32, 16), f32(16, 16)


def explained(fn, *args, policy="mixed_bfloat16"):
    return amp.explain(fn, policy)(*args)


def told(fn, *args, operation, number=0, policy="mixed_bfloat16"):
    """The lines of `why` of the equations of a name, one of them by its number."""
    report = explained(fn, *args, policy=policy)
    rows = [e for e in report.equations if e.operation == operation]
    return report.why(rows[number]).splitlines()


def chain(lines):
    return [line for line in lines if line.startswith("  ")]


# Pins


def _place(x, w):
    return jnp.arange(16)[jnp.floor(4 * (x @ w)).astype(int)]


def _grid(x):
    return x @ np.linspace(0, 4095, 256, dtype=np.float32).reshape(16, 16)


def _distance(x, w):
    h = jnp.tanh(x @ w)
    squares = jnp.sum(h * h, axis=1)
    return squares[:, None] - 2 * h @ h.T + squares[None]


def _moment(x, w):
    h = jnp.tanh(x @ w)
    return jnp.ones((1, 32)) @ (h * h) / 32 - jnp.square(jnp.sum(h, axis=0) / 32)[None]


def _solution(x, w):
    return jnp.linalg.solve(w, w) @ w


def _power(x, w):
    return jax.lax.scan(lambda v, _: (w @ v, None), x[0], length=9)[0]


# The program, the operation, which one, and what the chain ends with.
BEGUN = {
    "index": (_place, (X, W), "mul", "floor", "becomes an index"),
    "solved": (
        lambda x: jnp.linalg.cholesky(x.T @ x + jnp.eye(16)),
        (X,),
        "dot_general",
        "cholesky",
        "linear algebra begins",
    ),
    "grid": (_grid, (X,), "dot_general", "constant", "is the grid"),
    "recursion": (_power, (X, W), "dot_general", "scan", "No activation"),
    "distance": (_distance, (X, W), "dot_general", "sub", "sum of squares"),
    "moment": (_moment, (X, W), "dot_general", "sub", "second moment"),
    "derivative": (
        jax.grad(lambda x, w: jnp.sum(jnp.exp(-_distance(x, w))), 1),
        (X, W),
        "dot_general",
        "dot_general",
        "It is a derivative of",
    ),
    "solution": (
        _solution,
        (W, W),
        "dot_general",
        "custom_linear_solve",
        "is the solution",
    ),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("pin", PINS, ids=[pin.id for pin in PINS])
def test_a_pin_is_named_with_its_words_and_where_it_begins(pin):
    fn, args, operation, begins, words = BEGUN[pin.id]
    # f16 has the pins of all half dtypes.
    report = explained(fn, *args, policy="mixed_float16")
    reason = pin.words.format(half="float16")
    decided = f'The pin "{pin.id}" decided: {reason}.'
    rows = [e for e in report.equations if e.operation == operation]
    texts = [report.why(row) for row in rows if row.reason == reason]
    (text, *_) = [each for each in texts if decided in each]
    lines = chain(text.splitlines())
    assert any(begins in line for line in lines[1:]), text
    assert any(words in line for line in lines[1:]), text


# Causes


def test_an_f32_operand_is_followed_back_to_the_class_that_decided():
    lines = told(lambda x, w: -(jnp.exp(x @ w) + 1.0), X, W, operation="neg")
    assert chain(lines)[0].startswith("  3 neg is f32")
    assert "that is 2 add" in chain(lines)[1]
    assert "that is 1 exp" in chain(lines)[2] and len(chain(lines)) == 3


def test_a_derivative_is_that_of_the_f32_product_of_a_line():
    """One line makes a product in half first, and then one of distances."""
    of_both = jax.grad(lambda x, w: two_of_one_line(x, w, (1, 0)), 1)
    report = explained(of_both, X, W)
    products = [e for e in report.equations if e.operation == "dot_general"]
    texts = [report.why(row) for row in products]
    (distances,) = [i for i, t in enumerate(texts) if "It is f32: a distance" in t]
    begin = texts[distances].split()[1]
    told = [t for t in texts if "It is a derivative of" in t]
    assert len(told) == 2
    assert all(f"It is a derivative of {begin} dot_general" in t for t in told)


def test_what_is_f32_between_products_is_followed_back_to_them():
    lines = told(lambda x, w: jnp.exp(2 * jnp.tanh(x @ w)), X, W, operation="tanh")
    assert "It is f32: f32 between products." in lines
    assert "that is 0 dot_general, which is bf16" in chain(lines)[1]


def test_a_value_that_is_kept_is_followed_to_who_keeps_it():
    lines = told(lambda x, w: jnp.sort(jnp.abs(x @ w)), X, W, operation="abs")
    assert "Its readers decided: returned in f32." in lines
    assert "sort" in chain(lines)[1]
    assert chain(lines)[-1] == "  The program returns it as output 0."


def test_a_long_chain_ends_in_dots():
    def fn(x, w):
        h = jnp.exp(x @ w)
        for _ in range(12):
            h = h * 1.5
        return h

    lines = chain(told(fn, X, W, operation="mul", number=11))
    assert len(lines) == 9 and lines[-1] == "  ..."


def test_a_long_way_to_linear_algebra_names_its_end():
    def fn(x):
        h = x.T @ x
        for _ in range(12):
            h = h * 1.5
        return jnp.linalg.cholesky(h)

    lines = chain(told(fn, X, operation="dot_general"))
    assert "cholesky" in lines[-2] and "steps later" in lines[-2]


# Programs that are cut


def test_a_chain_leads_into_calls_and_out_of_them():
    @jax.jit
    def helper(x, w):
        return 2 * (x @ w)

    lines = told(lambda x, w: helper(x, w) @ w, X, W, operation="mul")
    assert lines[0].startswith("Equation 0.0.1 mul: ")
    assert "goes to 1 dot_general" in chain(lines)[1]

    @jax.jit
    def negated(x):
        return -x

    lines = told(lambda x, w: negated(jnp.exp(x @ w)), X, W, operation="neg")
    assert "Operand 0: 1 exp makes it, held in f32, made in f32." in lines
    assert "that is 1 exp" in chain(lines)[1]


def turns(x, w):
    def turn(carry, _):
        return carry + 0.1 * jnp.tanh(carry @ w), None

    return lax.scan(turn, x, length=5)[0]


def test_a_loop_tells_how_its_carry_got_its_dtype():
    lines = told(turns, X, W, operation="scan")
    assert lines[1].startswith("It is a loop: its body is planned")
    (carried,) = [line for line in lines if "carried in" in line]
    assert "carried in f32: the loop keeps it over its turns" in carried
    assert 'with_full("turn")' in lines[-1]


def test_a_while_loop_and_a_branch_are_told():
    def fn(x, w):
        h = x @ w
        h = lax.cond(x[0, 0] > 0, jnp.exp, lambda h: h, h)
        return lax.while_loop(lambda h: h[0, 0] < 9, lambda h: h + 1, h)

    report = explained(fn, X, W)
    kinds = {}
    for row in report.equations:
        text = report.why(row) if row.identity else ""
        assert text.startswith(f"Equation {row.identity} ") or not row.identity
        kinds[row.operation] = text.splitlines()
    assert kinds["cond"][1].startswith("It is a branch: its bodies are planned")
    assert "keeps the dtype that it was traced in" in "\n".join(kinds["while"])


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="up")(x))
        x = nn.LayerNorm(name="norm")(x)
        return jax.nn.softmax(nn.Dense(16, name="down")(x))


@pytest.mark.slow
def test_every_equation_of_a_training_step_is_told():
    model = MLP()
    params = jax.eval_shape(model.init, jax.random.key(0), X)

    def loss(params, x):
        return jnp.mean(jax.checkpoint(model.apply)(params, x) ** 2)

    for policy in ("mixed_bfloat16", "mixed_float16", "float32", "fp8"):
        report = explained(jax.grad(loss), params, X, policy=policy)
        for row in report.equations:
            if row.identity:
                text = report.why(row)
                assert row.reason in text and "None" not in text
    assert "module MLP/up" in text or any(e.module for e in report.equations)


# Overruling


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "fn, operation",
    [
        (lambda x, w: jnp.exp(x @ w), "exp"),
        (lambda x, w: jnp.tanh(x @ w) @ w, "tanh"),
        (lambda x, w: jnp.tanh(x @ w) @ w, "dot_general"),
        (lambda x, w: x + 0.1 * jnp.tanh(x @ w), "add"),
        (lambda x, w: jnp.linalg.cholesky(x.T @ x), "dot_general"),
    ],
)
def test_what_the_last_line_says_overrules(fn, operation):
    report = explained(fn, X, W)
    row = next(e for e in report.equations if e.operation == operation)
    way = report.why(row).splitlines()[-1]
    assert way.startswith("To overrule it: policy.with_")
    written = way.removeprefix("To overrule it: ").split(" has ")[0]
    other = eval(written, {"policy": amp.get_policy("mixed_bfloat16")})
    changed = explained(fn, X, W, policy=other)
    again = next(e for e in changed.equations if e.operation == operation)
    assert again.is_in_half != row.is_in_half
    assert changed.why(again).splitlines()[-1] == (
        f"To overrule it: take {operation!r} out of the policy's lists."
    )


# What is asked for


def test_an_identity_is_text_a_tuple_or_a_row():
    report = explained(turns, X, W)
    (row,) = [e for e in report.equations if e.operation == "tanh"]
    assert report.why("0.0.1") == report.why((0, 0, 1)) == report.why(row)


@pytest.mark.parametrize(
    "identity, near", [("9", "are 0, "), ("0.0.9", "are 0.0."), ((0, 1, 0), "0.0.0")]
)
def test_a_wrong_identity_is_told_with_the_nearest(identity, near):
    report = explained(turns, X, W)
    with pytest.raises(ValueError) as raised:
        report.why(identity)
    text = str(raised.value)
    assert text.startswith(f"Report.why({identity!r}): ") and near in text


def test_what_is_no_identity_is_told():
    report = explained(turns, X, W)
    for wrong in (3, None, [0]):
        with pytest.raises(TypeError, match=r"Report\.why\(.*is text such as"):
            report.why(wrong)
    other = explained(lambda x: x + 1, X)
    with pytest.raises(ValueError, match="no equation of this report"):
        report.why(other.equations[0])
    returned = explained(lambda x: x, X, policy="bf16")
    for row in returned.equations:
        if not row.identity:
            with pytest.raises(ValueError, match="casts of what the program returns"):
                returned.why(row)


def test_a_report_that_was_read_from_data_has_no_plan():
    report = explained(turns, X, W)
    assert "_program" not in report.to_dict() and "_program" not in repr(report)
    for read in (
        amp.Report.from_json(report.to_json()),
        pickle.loads(pickle.dumps(report)),
    ):
        assert read == report and hash(read) == hash(report)
        with pytest.raises(ValueError, match=r"Report\.why\('0'\).*Explain the"):
            read.why("0")
    assert copy.deepcopy(report).why("0") == report.why("0")
