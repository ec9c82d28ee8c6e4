"""diagnose and tune of arrays that a mesh shards: the figures are those of one device.

Sums of small integers are exact in any order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_amp as amp

AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def integers(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), jnp.float32)


def squares(w, x):
    return jnp.sum((x @ w) ** 2)


def magnitudes(w, x):
    return jnp.sum(jnp.abs(x @ w))


def scanned(w, x):
    def turn(h, _):
        return h - 1.0, jax.checkpoint(jnp.abs)(h)

    h, rows = jax.lax.scan(turn, x @ w, None, 3)
    return jnp.sum(h) + jnp.sum(rows)


def branched(w, x):
    y = x @ w
    return jnp.sum(jax.lax.cond(jnp.sum(w) > 1e6, jnp.negative, jnp.abs, y))


def repeated(w, x):
    def turn(state):
        return state[0] + 1, jnp.abs(state[1])

    # It has no gradient.
    y = jax.lax.stop_gradient(x @ w)
    return magnitudes(w, x), jax.lax.while_loop(lambda s: s[0] < 2, turn, (0, y))[1]


PROGRAMS = {"while": repeated, "scan": scanned, "cond": branched}


def figures(sites, operations):
    return [
        (
            *(s.operation, s.direction, s.dtype, s.size, s.times, s.zeros),
            *(s.amax, s.amin, s.exponents, s.error),
        )
        for s in sites
        if s.operation in operations
    ]


@functools.cache
def alone(name):
    w, x = integers((8, 8), 1), integers((16, 8), 0)
    has_aux = name == "while"
    diagnosed = amp.diagnose(PROGRAMS[name], "mixed_bfloat16", has_aux=has_aux)
    return diagnosed, diagnosed(w, x), w, x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        # "while" with explicit axes is left out: its collectives wait for each other on
        # a CPU of two cores, once in some ten runs of all tests, until XLA ends the
        # process.
        ("while", "auto"),
        ("scan", "auto"),
        ("cond", "explicit"),
    ],
)
def test_sharded_arrays_have_the_figures_of_whole_ones(name, axes):
    diagnosed, whole, w, x = alone(name)
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AXES[axes],) * 2)
    placed = [
        jax.device_put(each, NamedSharding(mesh, PartitionSpec(*spec)))
        for each, spec in ((w, (None, "model")), (x, ("data", None)))
    ]
    found = diagnosed(*placed)
    operations = {s.operation for s in whole.sites}
    if axes == "explicit":
        # JAX makes other derivatives for it, that move arrays elsewhere.
        operations -= {"broadcast_in_dim", "convert_element_type"}
    assert figures(found.sites, operations) == figures(whole.sites, operations)
    operations -= {"convert_element_type"}
    assert figures(found.reference, operations) == figures(whole.reference, operations)
    assert found.gradients == whole.gradients
    for site in (*found.sites, *found.reference):
        assert site.size == site.zeros + site.nonfinite + sum(site.exponents.values())


@pytest.mark.breadth(1)
@pytest.mark.parametrize("axes", AXES)
def test_tune_measures_sharded_arrays(axes):
    w, x = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))
    mesh = jax.make_mesh((8,), ("data",), (AXES[axes],))
    placed = [
        jax.device_put(each, NamedSharding(mesh, PartitionSpec(*spec)))
        for each, spec in ((w, ()), (x, ("data",)))
    ]
    found = amp.tune(squares, "mixed_bfloat16", max_grad_error=1e-6)(*placed)
    half = jax.jit(jax.grad(amp.autocast(squares, "mixed_bfloat16")))
    compiled = half.lower(*placed).compile({"xla_allow_excess_precision": False})
    low, full = compiled(*placed), jax.jit(jax.grad(squares))(*placed)
    error = np.linalg.norm(low - full) / np.linalg.norm(full)
    np.testing.assert_allclose(found.error_before, error, rtol=1e-5)
    assert found.error <= 1e-6 < error


def chosen(w, h):
    return jax.lax.cond(jnp.sum(w) > 1e6, jnp.negative, jax.checkpoint(jnp.abs), h)


# Programs whose inside the compiler may shard as it likes, on a mesh that is explicit.
INSIDE = {
    "product": lambda w, x: jnp.abs(x @ w),
    "cond in a scan": lambda w, x: jax.lax.scan(
        lambda h, _: (h - 1.0, chosen(w, h)), x @ w, None, 3
    )[1].sum(0),
    "while": lambda w, x: jax.lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.abs(s[1])), (0, x @ w)
    )[1],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_loss"),
    [
        ("product", False),
        pytest.param("while", False, marks=pytest.mark.slow),
        pytest.param("cond in a scan", True, marks=pytest.mark.slow),
    ],
)
def test_inside_of_auto_axes_the_figures_are_those_of_whole_arrays(name, is_loss):
    inner, rows = INSIDE[name], PartitionSpec("data", None)
    w, x = integers((8, 8), 1), integers((16, 8), 0)

    def repeated(inner):
        def fn(w, x):
            turn = lambda _, a: (None, inner(w, a * x))  # noqa: E731
            both = jax.lax.scan(turn, None, jnp.float32([1.0, 2.0]))[1]
            return jnp.sum(both) if is_loss else both

        return amp.diagnose(fn, "mixed_bfloat16")

    alone = repeated(inner)(w, x)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), (AxisType.Explicit,))):
        found = repeated(jax.sharding.auto_axes(inner, out_sharding=rows))(
            jax.device_put(w, PartitionSpec()), jax.device_put(x, rows)
        )
    operations = {"dot_general", "abs", "sub", "neg", "sign"}
    assert len(figures(found.sites, operations)) >= 2
    assert figures(found.sites, operations) == figures(alone.sites, operations)
    assert figures(found.reference, operations) == figures(alone.reference, operations)
    assert found.gradients == alone.gradients


def until_large(x):
    """Doubles each row until it is large, so some rows stay while others go on."""
    body = lambda row: row * 2.0  # noqa: E731
    return jax.lax.while_loop(lambda row: jnp.sum(row) < 8.0, body, x)


LOOPS = {
    "of the array": lambda w, x: jax.lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.abs(s[1])), (0, x @ w)
    )[1],
    "of each row": lambda w, x: jax.vmap(until_large)(jnp.abs(x @ w) + 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_while_runs_beside_its_reference_where_types_have_shardings(loop):
    w, x = integers((8, 8), 1), integers((16, 8), 0)
    alone = amp.diagnose(loop, "mixed_bfloat16")(w, x)
    mesh = jax.make_mesh((1, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        found = amp.diagnose(loop, "mixed_bfloat16")(
            jax.device_put(w, PartitionSpec(None, "model")),
            jax.device_put(x, PartitionSpec("data", None)),
        )
    operations = {"dot_general", "abs", "mul"}
    assert len(figures(found.sites, operations)) >= 2
    assert figures(found.sites, operations) == figures(alone.sites, operations)
    assert figures(found.reference, operations) == figures(alone.reference, operations)


def test_tune_measures_what_is_inside_of_auto_axes():
    w, x = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))
    rows = PartitionSpec("data", None)

    def fn(w, x):
        product = jax.sharding.auto_axes(lambda w, x: x @ w, out_sharding=rows)
        return jnp.sum(product(w, x) ** 2)

    with jax.set_mesh(jax.make_mesh((8,), ("data",), (AxisType.Explicit,))):
        placed = jax.device_put(w, PartitionSpec()), jax.device_put(x, rows)
        found = amp.tune(fn, "mixed_bfloat16", max_grad_error=1e-6)(*placed)
        half = jax.jit(jax.grad(amp.autocast(fn, "mixed_bfloat16"))).lower(*placed)
        low = half.compile({"xla_allow_excess_precision": False})(*placed)
    full = 2 * np.asarray(x, np.float64).T @ (np.asarray(x, np.float64) @ w)
    error = np.linalg.norm(low - full) / np.linalg.norm(full)
    np.testing.assert_allclose(found.error_before, error, rtol=1e-3)
    assert found.error <= 1e-6 < error


@pytest.mark.breadth(1)
@pytest.mark.parametrize("kind", AXES.values(), ids=AXES)
def test_a_sharded_map_is_counted_whatever_the_axes_of_its_mesh_are(kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    rows = PartitionSpec("d")
    w, x = integers((8, 8), 0), integers((16, 8), 1)

    @jax.shard_map(mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows)
    def each(w, x):
        return jnp.abs(x @ w)

    def loss(w, x):
        # The next test is one of a gradient in a mesh of automatic axes.
        y = each(w, x)
        return y if kind == AxisType.Auto else jnp.sum(y)

    sharded = jax.device_put(x, NamedSharding(mesh, rows))
    replicated = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
    (found,) = (
        s
        for s in amp.diagnose(loss, "mixed_float16")(replicated, sharded).sites
        if s.operation == "abs"
    )
    exact = np.abs(np.asarray(x, np.float64) @ np.asarray(w, np.float64))
    assert (found.size, found.zeros) == (exact.size, np.sum(exact == 0))
    assert found.amax == exact.max()


@pytest.mark.slow
def test_zeros_for_another_branch_are_no_sites_in_a_sharded_map():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("d")

    @jax.shard_map(mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows)
    def each(w, x):
        is_first = jax.lax.axis_index("d") == 0
        return jax.lax.cond(is_first, lambda y: y * 2.5, jnp.exp, x @ w)

    d = amp.diagnose(lambda w, x: jnp.sum(each(w, x)), "float32")(
        jnp.ones((4, 4)), jnp.ones((16, 4))
    )
    backward = [s for s in d.sites if s.direction == "backward"]
    # Factors are 2.5 or e ** 4, cotangents 1.
    assert backward and not any(s.zeros for s in backward if s.operation == "pvary")
