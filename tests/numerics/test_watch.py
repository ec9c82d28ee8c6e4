"""An evaluator that an observer watches: every equation, in every construct."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jmp_amp as amp
from jmp_amp.numerics.measure.watch import bodies_inside, watched
from jmp_amp.plan.program import jaxprs
from tests.measures import compiled
from tests.programs import equations


def is_remat(eqn: Any) -> bool:
    return "differentiated" in eqn.params


class Sum:
    """Counts the runs of each equation and adds up its first result, in f32."""

    def __init__(self, jaxpr: Any):
        self.bodies = bodies_of(jaxprs.body_of(jaxpr), ())

    def zero(self) -> Any:
        return {"runs": jnp.zeros((), jnp.int32), "sum": jnp.zeros((), jnp.float32)}

    def of(self, result: jax.Array) -> Any:
        total = jnp.sum(result).astype(jnp.float32)
        return {"runs": jnp.ones((), jnp.int32), "sum": total}

    def skips(self, path: Any, index: int) -> bool:
        return False

    def nothing(self, path: Any) -> Any:
        inside = bodies_inside(self.bodies[path], path)
        return {
            name: self.zero()
            for p, body in inside.items()
            for name, _ in named(p, body)
        }

    def seen(self, path: Any, run: Any) -> Any:
        inside = bodies_inside(self.bodies[path], path)
        assert run.keys() == inside.keys()
        return {
            name: self.of(jnp.asarray(run[p][eqn.outvars[0]] if eqn.outvars else 0.0))
            for p, body in inside.items()
            for name, eqn in named(p, body)
        }

    def merged(self, before: Any, after: Any) -> Any:
        return jax.tree.map(jnp.add, before, after)

    def across(self, statistic: Any, axes: Any) -> Any:
        return jax.lax.psum(statistic, tuple(axes))


def bodies_of(body: Any, path: Any) -> dict[Any, Any]:
    """Returns a body and all bodies inside it, by the way to each of them."""
    found = {path: body}
    for index, eqn in enumerate(body.jaxpr.eqns):
        if jaxprs.runs(eqn):
            for number, inner in enumerate(jaxprs.inner_bodies(eqn)):
                found |= bodies_of(inner.body, (*path, index, number))
    return found


def named(path: Any, body: Any) -> list[tuple[str, Any]]:
    """Returns the equations of a body that hold no other body, and where each is."""
    return [
        (".".join(map(str, (*path, index))), eqn)
        for index, eqn in enumerate(body.jaxpr.eqns)
        if jaxprs.runs(eqn) and not jaxprs.inner_bodies(eqn)
    ]


def flat(found: Any) -> dict[str, Any]:
    """Returns the statistics of all equations; each belongs to one body only."""
    pairs = [pair for each in found.values() for pair in each.items()]
    assert len(dict(pairs)) == len(pairs)
    return dict(sorted(pairs))


def watch(fn: Any, *args: Any) -> tuple[Any, dict[str, tuple[int, float]]]:
    """Returns the outputs, and of each equation its runs and its sum."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    outputs, found = jax.jit(watched(jaxpr, Sum(jaxpr)))(*jax.tree.leaves(args))
    return outputs, {
        name: (int(each["runs"]), float(each["sum"]))
        for name, each in flat(found).items()
    }


def runs_and_sums(fn: Any, *args: Any) -> list[tuple[int, float]]:
    outputs, found = watch(fn, *args)
    expected = jax.tree.leaves(jax.jit(fn)(*args))
    for ours, plain in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(ours, plain)
    return list(found.values())


def test_equations_outside_of_all_bodies_are_seen_once():
    x = jnp.arange(4.0)
    _, found = watch(lambda x: jnp.sin(x) * 2.0, x)
    doubled = 2.0 * np.sin(np.arange(4.0)).sum()
    assert list(found) == ["0", "1"]
    assert found["0"] == (1, pytest.approx(doubled / 2, rel=1e-6))
    assert found["1"] == (1, pytest.approx(doubled, rel=1e-6))


def test_every_turn_of_a_scan_is_seen():
    def fn(x):
        def turn(c, x):
            return c + x, c * x

        return jax.lax.scan(turn, jnp.float32(1.0), x, reverse=True)

    # The carry before each turn: 1, 4, 6, 7 of 3, 2, 1, 0.
    after, product = [4.0, 6.0, 7.0, 7.0], [3.0, 8.0, 6.0, 0.0]
    found = runs_and_sums(fn, jnp.arange(4.0))
    assert sorted(found) == sorted([(4, sum(after)), (4, sum(product))])


def test_a_while_loop_is_seen_and_so_is_its_condition():
    def fn(x):
        return jax.lax.while_loop(lambda x: x < 20.0, lambda x: x * 3.0, x)

    # 1, 3, 9, 27: three turns, four tests, of which three hold.
    assert runs_and_sums(fn, 1.0) == [(4, 3.0), (3, 39.0)]


def test_only_the_branch_that_runs_is_seen():
    def fn(i, x):
        return jax.lax.switch(i, [jnp.sin, lambda x: x + 1.0, jnp.cos], x)

    _, found = watch(fn, jnp.int32(1), jnp.float32(2.0))
    branches = {k: v for k, v in found.items() if k.count(".") == 2}
    assert [runs for runs, _ in branches.values()] == [0, 1, 0]
    assert [total for _, total in branches.values()] == [0.0, 3.0, 0.0]


def test_loops_in_loops_and_branches_in_them_are_seen():
    def fn(x):
        def inner(c, x):
            return jax.lax.cond(x > 1.0, lambda: c + x, lambda: c), None

        def outer(c, x):
            return jax.lax.scan(inner, c, x)[0], None

        return jax.lax.scan(outer, jnp.float32(0.0), x.reshape(2, 3))[0]

    found = runs_and_sums(fn, jnp.arange(6.0))
    # Of 0 ... 5, four are above 1: sums 2, 5, 9, 14.
    assert (4, 30.0) in found
    assert max(runs for runs, _ in found) == 6


def test_two_calls_of_one_function_are_two():
    @jax.jit
    def double(x):
        return x * 2.0

    _, found = watch(lambda x: double(double(x)), jnp.float32(1.0))
    assert found == {"0.0.0": (1, 2.0), "1.0.0": (1, 4.0)}


def test_a_custom_derivative_rule_is_one_equation_and_a_checkpoint_is_entered():
    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (cube(x), x), lambda x, g: (3 * x**2 * g,))

    def fn(x):
        return cube(jax.checkpoint(lambda x: jnp.square(x) + 1.0)(x))

    _, found = watch(fn, jnp.float32(1.0))
    assert found == {"0.0.0": (1, 1.0), "0.0.1": (1, 2.0), "1": (1, 8.0)}


def test_a_body_that_runs_once_is_seen_with_the_one_around_and_others_alone():
    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvps(lambda g, ans, x: 3 * x**2 * g)

    def fn(x):
        x = jax.jit(jnp.sin)(cube(x))
        x = jax.checkpoint(lambda x: jax.jit(jnp.cos)(x) + 1.0, prevent_cse=False)(x)
        x = jax.checkpoint(lambda x: jax.jit(jnp.tan)(x) * 2.0)(x)
        return jax.lax.cond(x > 0.0, lambda: jax.jit(jnp.exp)(x), lambda: x)

    jaxpr = jax.make_jaxpr(fn)(jnp.float32(1.0))
    _, found = jax.jit(watched(jaxpr, Sum(jaxpr)))(jnp.float32(1.0))
    primitives = {
        name: eqn.primitive.name
        for path, body in Sum(jaxpr).bodies.items()
        for name, eqn in named(path, body)
    }
    here, checkpoint, *branches = (
        [primitives[name] for name in each] for each in found.values()
    )
    assert {"integer_pow", "sin", "cos", "add"} < set(here)
    assert sorted(checkpoint) == ["mul", "tan"]
    assert sorted(branches) == [[], ["exp"]]


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_are_merged_loops_in_them_too(check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("d")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma
    )
    def fn(x):
        y = x * 2.0
        total = jax.lax.psum(y, "d")
        return jax.lax.scan(lambda c, _: (c + total, None), y, None, length=3)[0]

    x = np.arange(16.0, dtype=np.float32)
    found = runs_and_sums(fn, jnp.asarray(x))
    assert (8, 2 * x.sum()) in found
    # Each turn adds the sums over even and odd places to 8 pairs.
    turns = [2 * x.sum() + n * 8 * 2 * x.sum() for n in (1, 2, 3)]
    assert (24, sum(turns)) in found


def test_effects_happen_once(capfd):
    def fn(x):
        jax.debug.print("seen {x}", x=x)
        return x + 1.0

    watch(fn, jnp.float32(1.0))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen 1.0") == 1


def test_the_program_of_a_gradient_computes_the_same_and_every_equation_is_seen():
    def block(x, w):
        h = jax.nn.gelu(x @ w)
        return h + jax.nn.softmax(h, axis=-1), None

    def loss(ws, x):
        return jnp.mean(jax.lax.scan(jax.checkpoint(block), x, ws)[0] ** 2)

    ws = jax.random.normal(jax.random.key(0), (3, 8, 8)) / 3
    x = jax.random.normal(jax.random.key(1), (4, 8))
    step = jax.value_and_grad(amp.autocast(loss))
    jaxpr = jax.make_jaxpr(step)(ws, x)
    # A cast to half and back is no cast in a plain program: XLA drops it.
    outputs, found = compiled(watched(jaxpr, Sum(jaxpr)))(ws, x)
    value, gradient = compiled(step)(ws, x)
    np.testing.assert_array_equal(outputs[0], value)
    np.testing.assert_array_equal(outputs[1], gradient)
    assert {int(each["runs"]) for each in flat(found).values()} == {1, 3}


def test_examples_of_a_loop_that_is_mapped_end_when_each_of_them_does():
    def fn(limit):
        return jax.lax.while_loop(lambda c: c < limit, lambda c: c * 2.0, 1.0)

    limits = jnp.asarray([1.0, 5.0, 3.0])
    found = runs_and_sums(jax.vmap(fn), limits)
    # The longest has three turns, and a test before each and at the end.
    assert sorted({runs for runs, _ in found}) == [1, 3, 4]
    outputs, _ = watch(jax.vmap(fn), limits)
    np.testing.assert_array_equal(outputs[0], [1.0, 8.0, 4.0])


def test_a_checkpoint_of_a_function_with_constants_is_entered_in_a_gradient():
    matrix = np.arange(9.0, dtype=np.float32).reshape(3, 3)
    times = jax.jit(lambda x: x @ matrix)

    def loss(w):
        return jnp.sum(jax.checkpoint(lambda w: jnp.sin(times(w)))(w))

    w = jnp.ones((2, 3)) / 8
    outputs, found = watch(jax.grad(loss), w)
    product = np.ones((2, 3)) / 8 @ matrix
    expected = np.cos(product) @ matrix.T
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-5)
    assert (1, pytest.approx(product.sum(), rel=1e-5)) in found.values()


def test_an_observer_that_holds_arrays_sees_into_the_checkpoints_of_a_gradient():
    class Above(Sum):
        """Adds up how many numbers are above each of some bounds."""

        bounds = jnp.asarray([-10.0, 0.0])

        def zero(self) -> Any:
            return jnp.zeros(2)

        def of(self, result: jax.Array) -> Any:
            numbers = result.astype(jnp.float32)
            above = numbers.ravel()[:, None] > self.bounds[None]
            return jnp.sum(above.astype(jnp.float32), axis=0)

    def loss(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x) * 2.0)(x))

    x = jnp.asarray([-1.0, 1.0, 2.0])
    jaxpr = jax.make_jaxpr(jax.grad(loss))(x)
    outputs, found = jax.jit(watched(jaxpr, Above(jaxpr)))(x)
    np.testing.assert_allclose(outputs[0], 2 * np.cos(x), rtol=1e-6)
    counts = {tuple(each.tolist()) for each in flat(found).values()}
    # sin(x) has two numbers above 0, cos(x) too; cotangents are ones and twos.
    assert (3.0, 2.0) in counts and (3.0, 3.0) in counts
    # It still computes again: XLA may not merge it with the forward pass.
    program = jax.make_jaxpr(watched(jaxpr, Above(jaxpr)))(x)
    again = [e.params["differentiated"] for e in equations(program) if is_remat(e)]
    assert again == [e.params["differentiated"] for e in jaxpr.eqns if is_remat(e)]
    assert True in again


def test_a_sharded_map_in_a_loop_is_seen_in_every_turn():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("d")
    double = jax.shard_map(lambda x: x * 2.0, mesh=mesh, in_specs=rows, out_specs=rows)

    def fn(x):
        return jax.lax.scan(lambda c, _: (double(c), None), x, None, length=3)[0]

    x = np.arange(16.0, dtype=np.float32)
    assert (24, (2 + 4 + 8) * x.sum()) in runs_and_sums(fn, jnp.asarray(x))


def test_a_sharded_map_in_another_one_is_seen():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def double(x):
        return jax.lax.scan(lambda c, _: (c * 2.0, None), x, None, length=2)[0]

    def inner(x):
        columns = PartitionSpec(None, "b")
        specs = {"in_specs": columns, "out_specs": columns, "axis_names": {"b"}}
        return jax.shard_map(double, **specs)(x)

    rows = PartitionSpec("a")
    specs = {"in_specs": rows, "out_specs": rows, "axis_names": {"a"}}
    fn = jax.jit(jax.shard_map(inner, mesh=mesh, **specs))
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    found = runs_and_sums(fn, jnp.asarray(x))
    # Two turns on each of 8 devices.
    assert (16, 6 * x.sum()) in found
