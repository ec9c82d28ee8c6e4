"""A product is half if a number makes its result a small step in all turns together."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, array, planned


def euler(step, turns):
    def program(w, y):
        return jax.lax.fori_loop(0, turns, lambda _, y: y - step * (w @ y), y)

    return program


def test_small_steps():
    Y = array(16)
    small, many, large = euler(1e-3, 400), euler(1e-2, 100), euler(0.1, 400)
    assert planned(small, W, Y, of="dot_general") == [BF16]
    assert planned(small, W, Y, of="dot_general", without="small_steps") == [F32]
    assert planned(many, W, Y, of="dot_general") == [F32]
    assert planned(large, W, Y, of="dot_general") == [F32]


def test_the_turns_of_a_loop_are_taken_in_each_turn_of_the_loop_around_it():
    def program(w, y):
        def steps(_, y):
            return jax.lax.fori_loop(0, 400, lambda _, y: y - 1e-3 * (w @ y), y)

        return jax.lax.fori_loop(0, 10, steps, y)

    assert planned(program, W, array(16), of="dot_general") == [F32]


def test_a_number_that_multiplies_no_term_makes_no_step():
    def program(w, y):
        return jax.lax.fori_loop(0, 5, lambda _, y: 1e-3 * jnp.dot(w, y), y)

    assert planned(program, W, array(16), of="dot_general") == [F32]


def test_a_while_that_counts_to_a_number_has_so_many_turns():
    def counted(end):
        def program(w, y):
            def turn(carry):
                i, last, y = carry
                return i + 1, end(last), y - 1e-3 * (w @ y)

            return jax.lax.while_loop(lambda c: c[0] < c[1], turn, (0, 400, y))[2]

        return program

    Y = array(16)
    assert planned(counted(lambda last: last), W, Y, of="dot_general") == [BF16]
    assert planned(counted(lambda last: last + 1), W, Y, of="dot_general") == [F32]
