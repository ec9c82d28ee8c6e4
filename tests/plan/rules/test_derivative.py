"""A derivative of a product that is pinned is pinned, where autocast is around both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.program import source_code
from tests.plan.rules import BF16, F32, W, X, planned


def squares(a, b):
    return (a**2).sum(1)[:, None] - 2 * (a @ b.T) + (b**2).sum(1)[None]


def kernel(x, w):
    h = jnp.tanh(x @ w) + 8
    return jnp.exp(-squares(h, h) / 5).mean()


def nearest(x, w):
    h = jnp.tanh(x @ w)
    return jnp.exp(h.sum(1)[:, None] - 2 * (h @ h.T)).mean()


def test_derivative():
    # The layer, the squares, their two derivatives, and that of the layer.
    gradient = jax.grad(kernel, 1)
    half = [BF16, F32, BF16, BF16, BF16]
    assert planned(gradient, X, W, of="dot_general") == [BF16, F32, F32, F32, BF16]
    assert planned(gradient, X, W, of="dot_general", without="derivative") == half
    found = planned(jax.grad(nearest, 1), X, W, of="dot_general")
    assert found == [BF16] * 5


def test_of_an_outer_product_in_f32_too():
    def covariance(x, w):
        h = jnp.tanh(x @ w) + 3
        m = h.mean(0)
        return jnp.sum((h.T @ h / 8 - jnp.einsum("i,j->ij", m, m)) ** 2)

    found = planned(jax.grad(covariance, 1), X, W, of="dot_general")
    assert found == [BF16] + [F32] * 6 + [BF16]


def two_of_one_line(x, w, order):
    h = jnp.tanh(x @ w)
    pairs = (h, h), (jnp.tanh(h), jnp.sin(h))
    made = [pairs[i][0] @ pairs[i][1].T for i in order]
    distances = (h**2).sum(1)[:, None] - 2 * made[order[0]] + (h**2).sum(1)[None]
    return jnp.exp(-distances).mean() + jnp.tanh(made[order[1]]).mean()


@pytest.mark.breadth(2)
@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["inline", "jit"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_derivative_is_that_of_its_own_product_of_a_line(order, how):
    @how
    def fn(x, w):
        return two_of_one_line(x, w, order)

    # In either order the distance, and its derivatives, alone.
    assert planned(fn, X, W, of="dot_general").count(F32) == 1
    found = planned(jax.grad(fn, 1), X, W, of="dot_general")
    assert (found.count(F32), found.count(BF16)) == (3, 5)


def test_another_product_of_one_einsum_is_no_derivative():
    def fn(x, w):
        gates = jax.nn.softmax(x @ w)[:, 0]
        return jnp.einsum("n,nd,df->nf", gates, jnp.tanh(x @ w), w)

    assert planned(fn, X, W, of="dot_general") == [BF16, BF16, F32, BF16]


def test_a_product_of_the_same_line_that_shares_no_factor_is_no_derivative():
    """It sums over what a derivative of the distances sums over."""

    def fn(x, w):
        h = jnp.tanh(x @ w)
        both = ("ij,kj->ik", h, h), ("ij,jk->ik", h, w)
        pairs, layer = [jnp.einsum(*each) for each in both]
        distances = (h**2).sum(1)[:, None] - 2 * pairs + (h**2).sum(1)[None]
        return jnp.exp(-distances), jnp.tanh(layer)

    assert planned(fn, X, W, of="dot_general") == [BF16, F32, BF16]


def test_a_helper_that_is_called_twice_is_no_derivative_of_itself():
    times = jax.jit(lambda a, b: a @ b.T)

    def fn(x, w):
        h = jnp.tanh(x @ w)
        pairs = (h**2).sum(1)[:, None] - 2 * times(h, h) + (h**2).sum(1)[None]
        return jnp.exp(-pairs), times(jnp.tanh(h), jnp.sin(h))

    assert planned(fn, X, W, of="dot_general") == [BF16, F32, BF16]


def test_what_has_no_source_is_no_derivative(monkeypatch):
    monkeypatch.setattr(source_code, "_users_calls", lambda traceback: ())
    found = planned(jax.grad(kernel, 1), X, W, of="dot_general")
    assert found == [BF16, F32, BF16, BF16, BF16]


def mapped(distances, x, w):
    h = jnp.tanh(x @ w) + 8
    rows = lax.map(lambda row: jnp.exp(-distances(row[None], h) / 5).mean(), h)
    return rows.mean()


def chosen(distances, x, w):
    h = jnp.tanh(x @ w) + 8
    ways = [lambda h, n=n: jnp.exp(-distances(h, h) / n).mean() for n in (5, 6)]
    return lax.cond(w[0, 0] > 9, ways[1], ways[0], h)


def whole(distances, x, w):
    h = jnp.tanh(x @ w) + 8
    return jnp.exp(-distances(h, h) / 5).mean()


def by_rows(distances, x, w):
    h = jnp.tanh(x @ w) + 8
    rows = jax.vmap(lambda row: jnp.exp(-distances(row[None], h) / 5).mean())(h)
    return rows.mean()


def exact(x, w):
    """The gradient of `kernel`, in f64 of numpy."""
    x, w = np.float64(x), np.float64(w)
    h = np.tanh(x @ w)
    distances = ((h[:, None] - h[None]) ** 2).sum(-1)
    weights = -np.exp(-distances / 5) / 5 / h.shape[0] ** 2
    slope = 4 * (weights.sum(1)[:, None] * h - weights @ h)
    return x.T @ (slope * (1 - h**2))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("half", ("bfloat16", "float16"))
@pytest.mark.parametrize("how", (lambda f: f, jax.jit, jax.checkpoint))
@pytest.mark.parametrize("program", (whole, mapped, by_rows, chosen))
def test_a_gradient_inside_is_as_exact_as_one_around(program, how, half):
    """Distances of points far from zero: their gradient is a difference of products."""
    rng = np.random.default_rng(0)
    x, w = (np.float32(rng.normal(size=(16, 16)) / d) for d in (1, 4))

    def loss(w):
        return program(how(squares), x, w)

    found = jax.jit(amp.autocast(jax.value_and_grad(loss), f"mixed_{half}"))(w)[1]
    error = np.linalg.norm(found - exact(x, w)) / np.linalg.norm(exact(x, w))
    assert error < 2 * float(jnp.finfo(half).eps)
