"""A product whose result returns to a carry by arithmetic alone is f32."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, array, planned

B = array(16)


def turns(step):
    def program(a, b):
        return jax.lax.fori_loop(0, 30, lambda _, x: step(a, x, b), jnp.zeros(16))

    return program


def test_recursion():
    richardson = turns(lambda a, x, b: x + 0.5 * (b - a @ x))
    recurrent = turns(lambda a, x, b: x + 0.5 * jnp.tanh(b - a @ x))

    assert planned(richardson, W, B, of="dot_general") == [F32]
    assert planned(richardson, W, B, of="dot_general", without="recursion") == [BF16]
    assert planned(recurrent, W, B, of="dot_general") == [BF16]


def test_a_gate_is_an_activation_and_a_step_size_is_none():
    def gated(a, x, b):
        return x + jax.nn.sigmoid(x) * (b - a @ x)

    def clipped(a, x, b):
        step = b - a @ x
        return x + jnp.minimum(1.0, 1 / jnp.max(jnp.abs(step))) * step

    assert planned(turns(gated), W, B, of="dot_general") == [BF16]
    assert planned(turns(clipped), W, B, of="dot_general") == [F32]


def test_a_limit_is_an_activation_if_it_is_an_integer_too():
    """JAX 0.12 writes the zero of a `relu` in a sharded map so."""

    def limited(a, x, b):
        zeros = jnp.zeros(16, jnp.int32).astype(jnp.float32)
        return x + jnp.maximum(b - a @ x, zeros)

    assert planned(turns(limited), W, B, of="dot_general") == [BF16]


def test_the_way_back_may_take_several_turns():
    def program(a, b):
        def turn(carry, _):
            x, y = carry
            return (y + b, a @ x), None

        return jax.lax.scan(turn, (b, b), length=9)[0]

    def ends(a, b):
        def turn(carry, _):
            x, y = carry
            return (jnp.tanh(y) + b, a @ x), None

        return jax.lax.scan(turn, (b, b), length=9)[0]

    assert planned(program, W, B, of="dot_general") == [F32]
    assert planned(ends, W, B, of="dot_general") == [BF16]


def test_a_loop_inside_may_take_several_turns_to_hand_a_result_back():
    def program(a, b):
        def turn(carry, _):
            first, second, _ = carry
            return (first, first, second), None

        def around(_, x):
            return jax.lax.scan(turn, (a @ x, b, b), length=3)[0][2]

        return jax.lax.fori_loop(0, 9, around, b)

    assert planned(program, W, B, of="dot_general") == [F32]


def test_training_in_a_loop_stays_half():
    """A layer behind an activation of weights that the loop trains."""

    def program(w, v, x):
        def loss(w, v):
            return jnp.mean((jnp.tanh(x @ w) @ v - x) ** 2)

        def turn(_, carry):
            steps = jax.grad(loss, (0, 1))(*carry)
            return tuple(p - 0.1 * g for p, g in zip(carry, steps, strict=True))

        return jax.lax.fori_loop(0, 100, turn, (w, v))

    found = planned(program, W, W, array(8, 16), of="dot_general")
    assert len(found) > 3 and set(found) == {BF16}


def test_a_policy_that_names_it_overrules():
    import jmp_amp as amp

    def power(a, b):
        return jax.lax.scan(lambda v, _: (a @ v, None), b, length=9)[0]

    for policy, dtype in (
        (amp.get_policy("mixed_bfloat16"), F32),
        (amp.get_policy("mixed_bfloat16").with_low("dot_general"), BF16),
        (amp.get_policy("mixed_bfloat16").with_low("scan"), BF16),
    ):
        report = amp.explain(power, policy)(W, B)
        (row,) = [each for each in report.equations if each.matmuls]
        assert row.dtype == {F32: "f32", BF16: "bf16"}[dtype]
