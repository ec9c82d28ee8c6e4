"""A term that two sums have in common cancels in their difference."""

import jax
import jax.numpy as jnp
import pytest

from tests.plan.rules import BF16, F32, W, X, needed, planned


def stored_across(h, y, w):
    """Reads a sum again behind a product, which it is made of."""
    return jnp.exp(h) @ w, jnp.cos(y @ w - y)


@needed(of="add", gets=[F32], nearest=[BF16])
def test_change(needs, x, w):
    h = x @ w
    y = h + h @ w
    return stored_across(y - (h if needs else x @ w.T), y, w)


def less(y, h):
    return y - h


WAYS = {
    "jit": jax.jit(less),
    "negated": lambda y, h: y - jnp.where(h > 0, h, h),
    "parts": lambda y, h: y[1:] - y[:-1],
    "a join": lambda y, h: (j := jnp.stack([y, h]))[0] - j[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_found_wherever_it_is(way):
    def fn(x, w):
        h = x @ w
        y = h + h @ w
        return stored_across(WAYS[way](y, h), y, w)

    assert planned(fn, X, W, of="add") == [F32]
    assert planned(fn, X, W, of="add", without="change") == [BF16]


def test_a_change_is_found_of_what_a_branch_returns():
    def fn(x, w):
        h = x @ w
        y = jax.lax.cond(jnp.sum(x) > 0, lambda: h + h @ w, lambda: h + h @ w.T)
        return stored_across(y - h, y, w)

    assert planned(fn, X, W, of="add") == [F32, F32]
    assert planned(fn, X, W, of="add", without="change") == [BF16, BF16]
