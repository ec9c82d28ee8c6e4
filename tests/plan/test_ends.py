"""What leads to linear algebra keeps its digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.dataflow.ends import Destinations, Ends
from jmp_amp.plan.dataflow.facts import of_arguments
from jmp_amp.plan.program import jaxprs
from tests.measures import compiled, relative_error
from tests.programs import planned, reason_of
from tests.rounding import BF16, POLICIES, W, X, eps

F32, HALF = "float32", "bfloat16"
N = X.shape[0]
each_policy = pytest.mark.parametrize("policy", POLICIES)
Y = jnp.sin(X.sum(1))


# What linear algebra reads


def kernel(a, b):
    """Rasmussen and Williams 2006, equation 4.9, of squared distances by a product."""
    far = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return jnp.exp(-0.5 * jnp.maximum(far, 0.0) / a.shape[1]) + 1e-2 * jnp.eye(N)


def solved(matrix):
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix), Y)


def network(x, w):
    return jax.nn.relu(jnp.tanh(x @ w) @ w)


def covariance(h):
    return h.T @ h / N + 1e-2 * jnp.eye(16)


def normalized(h):
    return h * lax.rsqrt(jnp.mean(h**2, 1, keepdims=True) + 1e-6)


def residual(x, w):
    h = x @ w
    for _ in range(2):
        h = h + jnp.tanh(normalized(h) @ w) @ w
    return h


def filtered(x, w):
    """Kalman 1960, in a loop."""
    see = w[:8]

    def turn(carry, y):
        mean, cov = w @ carry[0], w @ carry[1] @ w.T + jnp.eye(16)
        cov = (cov + cov.T) / 2
        spread = see @ cov @ see.T + jnp.eye(8)
        gain = jnp.linalg.solve(spread, see @ cov).T
        return (mean + gain @ (y - see @ mean), cov - gain @ see @ cov), mean

    return lax.scan(turn, (jnp.zeros(16), jnp.eye(16)), x[:, :8])[1]


def riccati(x, w):
    """The recursion of a linear regulator, whose state is solved in the next turn."""
    b = w[:, :4]

    def turn(cost, _):
        gain = jnp.linalg.solve(jnp.eye(4) + b.T @ cost @ b, b.T @ cost @ w)
        return jnp.eye(16) + w.T @ cost @ (w - b @ gain), None

    return lax.scan(turn, jnp.eye(16), length=3)[0]


def regulator(x, w):
    """The same of a learned model: its matrices are the Jacobian of a network."""
    a = jax.jacfwd(lambda state: jnp.tanh(state @ w) @ w)(x[0])
    b = a[:, :4]

    def turn(cost, _):
        gain = jnp.linalg.solve(jnp.eye(4) + b.T @ cost @ b, b.T @ cost @ a)
        return jnp.eye(16) + a.T @ cost @ a - a.T @ cost @ b @ gain, None

    return lax.scan(turn, jnp.eye(16), length=3)[0]


# The dtype of each product, but for those inside of a solver.
SOLVED = {
    "kernel": (lambda x, w: solved(kernel(x, x)), [F32]),
    "kernel_of_a_network": (
        lambda x, w: solved(kernel(h := network(x, w), h)),
        [HALF, HALF, F32],
    ),
    "normal_equations": (
        lambda x, w: jnp.linalg.solve(x.T @ x + jnp.eye(16), x.T @ Y),
        [F32, F32],
    ),
    "normal_equations_beside_a_layer": (
        lambda x, w: (
            jnp.linalg.solve((a := x.T @ x) + jnp.eye(16), x.T @ Y),
            jnp.tanh(a @ w),
        ),
        # A product with the matrix of a system counts as one with its solution.
        [F32, F32, F32],
    ),
    "normal_equations_by_einsum": (
        lambda x, w: jnp.linalg.solve(
            jnp.einsum("ni,nj->ij", x, x) + jnp.eye(16), jnp.einsum("ni,n->i", x, Y)
        ),
        [F32, F32],
    ),
    "linear_kernel_of_a_network": (
        lambda x, w: jnp.linalg.inv((h := network(x, w)) @ h.T + jnp.eye(N)),
        [HALF, HALF, F32],
    ),
    "covariance_of_a_network": (
        lambda x, w: jnp.linalg.eigvalsh(covariance(network(x, w))),
        [HALF, HALF, F32],
    ),
    "filter": (filtered, [F32] * 10),
    "riccati": (riccati, [F32] * 7),
    "riccati_of_a_network": (regulator, [HALF] * 3 + [F32] * 9),
    "a_covariance_that_is_mapped": (
        lambda x, w: jnp.linalg.slogdet(w @ jnp.diag(x[0]) @ w.T + jnp.eye(16))[1],
        [F32, F32],
    ),
    "a_factor_of_a_solution": (
        lambda x, w: jnp.exp(x @ w) @ jnp.linalg.solve(w, x[0]),
        [F32, F32],
    ),
    "a_product_of_solutions": (
        lambda x, w: jnp.linalg.inv(w) / 3 @ w @ x[0],
        [F32, F32],
    ),
    "moments_around_a_solution": (
        lambda x, w: x.T @ x - jnp.linalg.solve(w, w) @ (x.T @ x[::-1]),
        [F32, F32, F32],
    ),
    "a_power_of_a_matrix": (lambda x, w: jnp.linalg.inv(w @ w + jnp.eye(16)), [F32]),
    # A network whose last layer is a matrix, or a mean: a layer is in half.
    "a_predicted_matrix": (
        lambda x, w: jnp.linalg.inv((x @ w)[:, :N] + jnp.eye(N)),
        [HALF],
    ),
    "a_predicted_mean": (
        lambda x, w: jax.scipy.linalg.solve_triangular(
            jnp.eye(N), (jnp.tanh(x @ w) @ w)[:, 0] - Y, lower=True
        ),
        [HALF, HALF],
    ),
    # The last layer is not told from `x.T @ (weights * x)`.
    "a_network_of_columns": (
        lambda x, w: solved(kernel(h := (w.T @ jnp.tanh(w.T @ x.T)).T, h)),
        [HALF, F32, F32],
    ),
    "a_network_of_norms": (
        lambda x, w: solved(kernel(h := jnp.tanh(normalized(x @ w) @ w), h)),
        [HALF, HALF, F32],
    ),
    "products_of_activations": (
        lambda x, w: jnp.linalg.inv(covariance((h := x @ w) @ h.T @ h)),
        [HALF, HALF, HALF, F32],
    ),
    "a_head_of_solutions": (
        lambda x, w: network(x, w) @ w @ jnp.linalg.solve(w, w),
        [HALF, HALF, HALF, HALF],
    ),
    "orthogonal_layers": (
        lambda x, w: jnp.tanh(x @ jnp.linalg.inv(w + jnp.eye(16))) @ jnp.linalg.inv(w),
        [HALF, HALF],
    ),
    "an_orthogonal_layer_that_is_whitened": (
        lambda x, w: (
            jnp.tanh((h := jnp.tanh(x @ w) @ jnp.linalg.inv(w)) @ w)
            @ jnp.linalg.inv(covariance(h))
        ),
        [HALF, HALF, HALF, F32, HALF],
    ),
    "a_network_of_eigenvectors": (
        lambda x, w: network(x + jnp.linalg.eigh(w)[1][:N], w),
        [HALF, HALF],
    ),
    "a_residual_network": (
        lambda x, w: (h := residual(x, w)) @ jnp.linalg.inv(covariance(h)),
        [HALF, HALF, HALF, HALF, HALF, F32, HALF],
    ),
    "a_layer_of_two_axes": (
        lambda x, w: jnp.linalg.inv(
            jnp.einsum(
                "nij,ijk->nk",
                jnp.tanh(x @ w).reshape(N, 4, 4),
                w[:, :N].reshape(4, 4, N),
            )
        ),
        [HALF, HALF],
    ),
    "a_spectrum": (lambda x, w: jnp.fft.fft(x @ x.T).real, [HALF]),
}


def kinds(fn, policy, *args):
    rows = amp.explain(fn, policy)(*args).equations
    names = {"f32": F32, "bf16": HALF}
    return [names[row.dtype] for row in rows if row.operation == "dot_general"]


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", SOLVED)
def test_products_that_linear_algebra_reads_are_f32(name):
    fn, expected = SOLVED[name]
    assert kinds(fn, BF16, X, W) == expected


def test_what_the_next_turn_solves_is_no_stream():
    body = jaxprs.body_of(jax.make_jaxpr(riccati)(X, W))
    loop = next(e for e in body.jaxpr.eqns if e.primitive.name == "scan")
    destinations = Destinations()
    facts = of_arguments(body)
    found = destinations.of(body, (Ends.NONE,), facts)
    inside = destinations.facts.of(body, facts).inner[body.jaxpr.eqns.index(loop)]
    ((carry,),) = destinations.outputs(loop, found, inside)
    assert carry & Ends.FACTOR and not carry & Ends.STREAM


def test_what_layers_add_up_for_linear_algebra_is_f32_and_a_layer_is_half():
    def fn(x, w):
        h = x @ w
        h = h + jnp.tanh(h @ w) @ w
        h = h + jnp.tanh(h @ w) @ w
        return jnp.linalg.inv(jnp.cos(h)[:, :N] + h[:, N:])

    rows = amp.explain(fn)(X, W).equations
    found = [(e.operation, e.dtype) for e in rows if e.operation in "cos add"]
    # The first sum is stored across a product.
    assert found[:3] == [("add", "bf16"), ("add", "f32"), ("cos", "f32")]
    assert kinds(fn, BF16, X, W) == [HALF] * 5


def test_the_policy_of_a_user_wins():
    fn = SOLVED["kernel"][0]
    assert kinds(fn, "p=f32,c=bf16,o=f32,low=dot_general", X, W) == [HALF]


def loss_of(fn):
    def loss(x, w):
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(fn(x, w)))

    return loss


@pytest.mark.breadth(2)
@each_policy
@pytest.mark.parametrize("name", ["kernel", "filter", "normal_equations"])
def test_what_has_no_layer_is_that_of_f32(name, policy):
    def gradients(fn):
        return jax.jit(jax.grad(loss_of(fn), argnums=(0, 1)))(X + 3.0, W)

    fn = SOLVED[name][0]
    found, expected = gradients(amp.autocast(fn, policy)), gradients(fn)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_explain_tells_why():
    text = "linear algebra reads it: an error grows by the condition number"
    assert reason_of(SOLVED["kernel"][0], X, W, operation="dot_general") == text


# Distances


def distances(a, b):
    return (a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)[None]


DISTANCES = {
    "of_one_input": (lambda x, w: distances(x, x), [F32]),
    "of_two": (lambda x, w: distances(x, w), [F32]),
    "of_the_product_first": (
        lambda x, w: -2 * (x @ w.T) + ((x**2).sum(1)[:, None] + (w**2).sum(1)[None]),
        [F32],
    ),
    "of_features": (lambda x, w: distances(network(x, w), w), [HALF, HALF, F32]),
    "by_norms_of_einsum": (
        lambda x, w: jnp.einsum("nd,nd->n", x, x)[:, None] - 2 * x @ w.T,
        [F32, F32],
    ),
    "by_products_of_itself": (
        lambda x, w: (x * x).sum(1)[:, None] - 2 * x @ w.T,
        [F32],
    ),
    "a_similarity_and_a_bias": (
        lambda x, w: (h := x @ w) @ h.T + (h * jnp.sin(h)).sum(1)[:, None],
        [HALF, HALF],
    ),
    "a_power": (lambda x, w: (w @ w)[:N] - 2 * x @ w.T, [HALF, HALF]),
    "a_layer": (lambda x, w: x @ w + (x**2).sum(1)[:, None], [HALF]),
    "a_similarity": (lambda x, w: jax.nn.softmax(x @ x.T), [HALF]),
    "a_function_of_a_similarity": (
        lambda x, w: jnp.exp(x @ x.T) - x.sum(1)[:, None],
        [HALF],
    ),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", DISTANCES)
def test_distances_by_a_product_are_f32(name):
    fn, expected = DISTANCES[name]
    assert kinds(fn, BF16, X, W) == expected


@pytest.mark.breadth(1)
@each_policy
def test_neighbours_far_from_the_origin_are_found(policy):
    def neighbours(x):
        return lax.top_k(-distances(x, x), 3)[1]

    far = X[:, :3] + 50.0
    exact = ((np.float64(far)[:, None] - np.float64(far)[None]) ** 2).sum(2)
    expected = np.sort(np.argsort(exact)[:, :3])
    found = np.sort(amp.autocast(neighbours, policy)(far))
    np.testing.assert_array_equal(found, expected)


# Targets


def inverse_transform(x):
    """Kapturowski et al. 2019, appendix A.2, with eps = 1e-3."""
    root = jnp.sqrt(1 + 4e-3 * (jnp.abs(x) + 1 + 1e-3))
    return jnp.sign(x) * (((root - 1) / 2e-3) ** 2 - 1)


def bootstrapped(x, w):
    """A loss whose target is made of the network itself."""
    target = lax.stop_gradient(inverse_transform((x[::-1] @ w).max(1)))
    return jnp.mean(((x @ w)[:, 0] - target) ** 2)


def test_a_target_is_f32_behind_its_product():
    for primitive in ("sign", "sqrt", "mul", "sub"):
        assert set(planned(bootstrapped, X, W, primitive=primitive)) == {F32}


@pytest.mark.breadth(1)
@each_policy
def test_the_gradient_of_a_product_with_a_solution_is_planned_from_outside(policy):
    """Its cotangent, the number 1, is a literal and a factor of a product."""

    def fn(x):
        return Y @ jnp.linalg.solve(x.T @ x + jnp.eye(N), Y)

    x = X[:, :N]
    found = compiled(amp.autocast(jax.grad(fn), policy))(x)
    # What linear algebra reads keeps its digits; the products behind it round.
    assert relative_error(found, jax.jit(jax.grad(fn))(x)) < eps(policy)
