"""What `diagnose` and `tune` differentiate: arguments of nnx, and positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_amp as amp

X = jnp.ones((2, 3))


def assert_gradients_are(found, wanted):
    """Their keys are the key paths in `wanted`, their magnitudes those in it."""
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    wanted = {jax.tree_util.keystr(path): float(abs(x).max()) for path, x in paths}
    assert list(found) == list(wanted)
    for key, gradient in found.items():
        assert gradient.amax == pytest.approx(wanted[key], rel=1e-5), key


# Arrays and variables that stand in several places


def linear(seed=0):
    return nnx.Linear(3, 3, rngs=nnx.Rngs(seed))


class Pair(nnx.Module):
    """Two layers with one kernel, and with two biases that share an array."""

    def __init__(self):
        self.a, self.b = linear(), linear(1)
        self.b.kernel = self.a.kernel
        self.b.bias = nnx.Param(self.a.bias[...])

    def __call__(self, x):
        return self.a(2.0 * self.b(x))


def behind(online, target, x):
    return jnp.mean((3.0 * online(x) - jax.lax.stop_gradient(target(x))) ** 2)


def between(a, b, x):
    return jnp.mean((3.0 * a(x) - b(x)) ** 2)


ONLINE, PAIR = linear(), Pair()


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("loss", "args", "argnums"),
    [
        (behind, (ONLINE, nnx.clone(ONLINE), X), 0),
        (between, (ONLINE, nnx.clone(ONLINE), X), (1, 0)),
        (lambda pair, x: jnp.sum(pair(x)), (PAIR, X), 0),
        (between, (PAIR.a, PAIR.b, X), (0, 1)),
        (between, (PAIR.a, PAIR.b, X), (1, 0)),
        # What the function closes over is a constant, also if it is given too.
        (lambda model, x: jnp.sum(model(x) * ONLINE(x)), (ONLINE, X), 0),
    ],
    ids=["target", "both", "tied", "tied arguments", "tied, backward", "closed over"],
)
def test_a_variable_has_one_gradient_and_an_array_that_two_share_has_two(
    loss, args, argnums
):
    d = amp.diagnose(loss, "float32", argnums=argnums)(*args)
    wanted = nnx.grad(loss, argnums=argnums)(*args)
    assert_gradients_are(d.gradients, wanted)


@pytest.mark.slow
def test_the_loss_scale_of_a_network_with_a_target_is_that_of_its_gradient():
    target = nnx.clone(ONLINE)
    d, alone = (
        amp.diagnose(behind, "mixed_float16")(*args)
        for args in ((ONLINE, target, X), (ONLINE, linear(), X))
    )
    assert d.loss_scale == alone.loss_scale and d.advice == alone.advice == ()
    tuning = amp.tune(behind, max_grad_error=0.5)(ONLINE, target, X)
    half, wanted = (
        nnx.jit(nnx.grad(fn))(ONLINE, target, X)
        for fn in (amp.autocast(behind, "mixed_float16"), behind)
    )
    leaves = zip(jax.tree.leaves(half), jax.tree.leaves(wanted), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in leaves]
    distance = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
    size = np.sqrt(sum(np.sum(b**2) for _, b in pairs))
    assert tuning.error == pytest.approx(distance / size, rel=0.01) and tuning.error > 0


@pytest.mark.parametrize("argnums", [pytest.param(0, marks=pytest.mark.slow), (0, 1)])
def test_trees_that_share_arrays_and_variables_have_gradients_of_their_own(argnums):
    z, variable = jnp.ones(3), nnx.Param(jnp.ones(3))

    def loss(a, b):
        plain = 2.0 * jnp.sum(a["z"]) + 5.0 * jnp.sum(b["z"])
        return plain + 3.0 * jnp.sum(a["v"][...]) + 7.0 * jnp.sum(b["v"][...])

    args = ({"z": z, "v": variable}, {"z": z, "v": variable})
    d = amp.diagnose(loss, "float32", argnums=argnums)(*args)
    assert_gradients_are(d.gradients, jax.grad(loss, argnums=argnums)(*args))


# States and variables as arguments


class Scaled(nnx.Module):
    def __init__(self):
        self.layer, self.scale = linear(), nnx.BatchStat(jnp.float32(2.0))

    def __call__(self, x):
        return self.layer(x) * self.scale[...]


GRAPH, STATE = nnx.split(Scaled())


def merged(state, x):
    return jnp.sum(nnx.merge(GRAPH, state)(x))


OF_STATES = {
    "state": (merged, (STATE, X), 0),
    "several": (
        lambda v, g, s, gs, d, x: (
            jnp.sum(v[...] ** 2)
            + merged(s, x)
            + jnp.sum(nnx.merge(*gs)(2.0 * x))
            + jnp.sum(d["a"][...] ** 2 * d["b"])
        ),
        (
            *(nnx.Param(jnp.ones(3)), GRAPH, STATE, (GRAPH, STATE)),
            *({"a": nnx.Param(jnp.ones(3)), "b": jnp.ones(3)}, X),
        ),
        (0, 2, 3, 4),
    ),
    "DiffState": (merged, (STATE, X), nnx.DiffState(0, nnx.Param)),
    "beside a module": (
        lambda m, s, v, x: jnp.sum(m(x)) + merged(s, x) + jnp.sum(v[...]),
        (Scaled(), STATE, nnx.BatchStat(jnp.ones(3)), X),
        (0, 1, 2),
    ),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", OF_STATES)
def test_states_and_variables_have_the_gradients_of_value_and_grad(name):
    loss, args, argnums = OF_STATES[name]
    d = amp.diagnose(loss, "float32", argnums=argnums)(*args)
    is_graph = name in ("DiffState", "beside a module")
    grad = nnx.grad if is_graph else jax.grad
    wanted = grad(loss, argnums=argnums)(*args)
    assert_gradients_are(d.gradients, wanted)
    _, ours = amp.value_and_grad(loss, argnums=argnums)(*args)
    assert_gradients_are(d.gradients, ours)


def test_a_state_is_an_argument_of_a_function_without_a_gradient_and_is_tuned():
    d = amp.diagnose(lambda state, x: nnx.merge(GRAPH, state)(x))(STATE, X)
    assert d.gradients == {} and d.value.shape == (2, 3)
    tuning = amp.tune(merged, max_grad_error=0.1)(STATE, X)
    assert tuning.error < 0.1


# Positions


def test_only_a_function_with_a_gradient_needs_an_argument_by_position():
    assert amp.diagnose(lambda *, x: x * 2.0)(x=jnp.ones(2)).value.tolist() == [2, 2]
    assert amp.diagnose(lambda: jnp.ones(2))().gradients == {}
    assert amp.diagnose(lambda x: x * 2.0, argnums=1)(jnp.ones(2)).gradients == {}

    def loss(*, x):
        return jnp.sum(x)

    with pytest.raises(ValueError, match=r"diagnose\(loss\): argnums=0, but .* by pos"):
        amp.diagnose(loss)(x=jnp.ones(2))
    with pytest.raises(ValueError, match=r"tune\(fn\): argnums=0, but .* by position"):
        amp.tune(loss, max_grad_error=0.1)(x=jnp.ones(2))


def test_an_argument_that_is_named_twice_is_refused_before_anything_runs():
    def loss(w, x):
        raise AssertionError("it ran")

    for argnums in ((0, 0), (1, -1, -1), (np.int32(0), nnx.DiffState(0, nnx.Param))):
        with pytest.raises(ValueError, match=r"^diagnose\(fn\): .* twice.* Name each"):
            amp.diagnose(loss, argnums=argnums)
        with pytest.raises(ValueError, match=r"^tune\(fn\): .* twice.* Name each"):
            amp.tune(loss, argnums=argnums, max_grad_error=0.1)
    # How many arguments there are is known when it is called.
    with pytest.raises(ValueError, match=r"^diagnose\(loss\): .* the argument 0 twice"):
        amp.diagnose(loss, argnums=(0, -2))(1.0, 2.0)
    with pytest.raises(ValueError, match=r"^tune\(fn\): .* the argument 0 twice"):
        amp.tune(loss, argnums=(0, -2), max_grad_error=0.1)(1.0, 2.0)


# Functions that JAX cannot differentiate


def looped(x):
    return jax.lax.while_loop(lambda y: y < 9.0, lambda y: 2.0 * y, jnp.sum(x))


def called_back(x):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(lambda x: np.float32(x.sum()), shape, x)


def without_a_rule(x):
    return jnp.sum(jax.lax.linalg.schur(jnp.outer(x, x))[0])


@pytest.mark.breadth(2)
@pytest.mark.parametrize("loss", [looped, called_back, without_a_rule])
def test_a_scalar_without_a_gradient_is_told_what_diagnoses_it(loss):
    with pytest.raises((ValueError, NotImplementedError)) as of_jax:
        jax.grad(loss)(X[0])
    for name, measured in (
        (f"diagnose({loss.__name__})", amp.diagnose(loss)),
        ("tune(fn)", amp.tune(loss, max_grad_error=0.1)),
    ):
        with pytest.raises(ValueError, match="cannot differentiate it") as told:
            measured(X[0])
        text = str(told.value)
        assert text.startswith(f"{name}: the function returns one real scalar")
        assert str(of_jax.value).rstrip(".") in text and "diagnoses the forw" in text


@pytest.mark.slow
def test_a_function_that_returns_such_a_scalar_in_a_list_is_diagnosed():
    fns = looped, called_back, without_a_rule
    d = amp.diagnose(lambda x: [fn(x) for fn in fns], "float32")(X[0])
    # 3, 6, 12; the outer product of three ones with itself.
    np.testing.assert_allclose(np.abs(d.value), [12.0, 3.0, 3.0], rtol=1e-6)


def test_an_error_of_a_rule_of_the_program_is_its_own():
    @jax.custom_jvp
    def fn(x):
        return x

    @fn.defjvp
    def derivative(primals, tangents):
        raise ValueError("of the user")

    for measured in (amp.diagnose, functools.partial(amp.tune, max_grad_error=0.1)):
        with pytest.raises(ValueError, match=r"^of the user"):
            measured(lambda x: jnp.sum(fn(x)))(X)
