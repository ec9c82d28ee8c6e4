"""The same program has the same plan, wherever calls, branches and loops are written.

Idioms and models of the zoo are cut at random into calls, branches and turns, at any
depth, and the turns of their loops are written out, see `cutting`. Every product, and
every equation that is f32 for its own sake, keeps its dtype. In calls and branches the
other equations keep theirs too: there a value is handed on as it is.

Every fourth idiom is cut in one way, some by default. The slow tests cut each program
into calls and branches of all kinds, side by side and one in the other, and then into
turns of all kinds; what they find is `EXPECTED`, no more and no less.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

import jmp_amp as amp
from jmp_amp.plan.tables.operations import PRODUCTS
from jmp_amp.policies.dtypes import F32
from tests import zoo
from tests.idioms.table import IDIOMS
from tests.measures import HALF
from tests.plan import cutting
from tests.plan.cutting import Program, Row
from tests.plan.once import one_process, plan_of, planned, products, traced
from tests.programs import equations

pytestmark = one_process

# What must still be mended: the reason, and the ids of the tests that show it. With
# another JAX a program has other equations, and random cuts fall elsewhere in it.
SAME_CUTS = jax.__version__.startswith("0.10.")
EXPECTED: dict[str, str] = {
    "an axis of vmap hides which axes a product sums, and a branch that it selects": """
        expm_in_a_layer-vmap-bfloat16
    """,
    "a sum of squares that a loop stacks is no sum of squares": """
        vector_quantization-slices-float16
    """,
    "a carry that nobody reads begins with zeros: its product is one of constants": """
        physics_informed_loss-carry-bfloat16
    """,
    "what the backward pass of a loop keeps depends on the calls in its body": """
        energy_added_up_in_a_scan-helpers-bfloat16
        lstm-calls-bfloat16 lstm-calls-float16
    """,
    "a product of the first turn is not seen to be solved in the next one": """
        kalman_filter-unrolled-bfloat16 kalman_filter-unrolled-float16
        kalman_filter_from_an_argument-unrolled-bfloat16
        kalman_filter_from_an_argument-unrolled-float16
    """,
    "no carry tells that steps recur which are written out": """
        conjugate_gradients_of_fixed_length-unrolled-bfloat16
        conjugate_gradients_of_fixed_length-unrolled-float16
        power_iteration_of_fixed_length-unrolled-bfloat16
        power_iteration_of_fixed_length-unrolled-float16
    """,
    "an activation made the data of a step that is written before its loop": """
        inner_adam-peeled-bfloat16 inner_adam-peeled-float16
        inner_momentum-peeled-bfloat16 inner_momentum-peeled-float16
        power_iteration_of_fixed_length-peeled-bfloat16
        power_iteration_of_fixed_length-peeled-float16
    """,
}

# (primitive, reason) of equations that may have another dtype where a call begins or
# ends. A move is cast before or after it, with the same bits: what reads a result of a
# call more than once is not known in its body.
AT_BORDERS = frozenset(
    (move, "only f32 operations read it")
    for move in ("broadcast_in_dim", "slice", "squeeze", "transpose")
) | {("sort", "hands on what it gets")}

# Why an equation is f32 though it could be half: for the sake of those that read it, or
# of what it reads; or it computes with parameters, which are f32 anyway. Between two
# products it is half where a loop, which reads and writes memory, stores its result.
FOR_OTHERS = (
    "f32 between products",
    "hands on what it gets",
    "only parameters, inputs and constants",
    "only f32 operations read it",
    "an f32 operation reads it",
    "returned in f32",
    "kept over the turns of a loop",
    "only comparisons and prints read it",
    "an operand is f32",
)

Change = Callable[[Program, Any], Program]


def cuts(way: cutting.Way, *longest: int) -> Change:
    """Cuts into runs of at most so many equations, and these again."""

    def cut(program: Program, rng: Any) -> Program:
        for count in longest:
            program = cutting.into(program, rng, way, count)
        return program

    return cut


def mixed(ways: tuple[cutting.Way, ...], *longest: int) -> Change:
    """The same, each run in one of the ways."""

    def cut(program: Program, rng: Any) -> Program:
        return cuts(lambda piece: ways[rng.integers(len(ways))](piece), *longest)(
            program, rng
        )

    return cut


CALLS: dict[str, Change] = {
    "jit": cuts(jax.jit, 6),
    "checkpoint": cuts(jax.checkpoint, 6),
    "helpers": cuts(jax.jit, 8, 3),
    "long": cuts(jax.jit, 48),
    "remat": cuts(jax.checkpoint, 48),
    "branches": cuts(cutting.in_branches, 6),
}
CUT_IN = {"jit": jax.jit, "remat": jax.checkpoint, "branch": cutting.in_branches}
TURNS: dict[str, Change] = {
    "turn": cuts(cutting.in_a_turn, 12),
    "slices": cuts(cutting.in_a_turn_of_slices, 12),
    "carry": cuts(cutting.in_a_carry, 12),
}
LOOPS: dict[str, Change] = {
    "peeled": lambda program, rng: cutting.peeled(program),
    "unrolled": lambda program, rng: cutting.unrolled(program, 64),
}
ORDERS: dict[str, Change] = {
    "exchanged": lambda program, rng: cutting.exchanged(program),
}
CUTS = CALLS | TURNS
MIXED: dict[str, Change] = {
    "calls": mixed((jax.jit, jax.checkpoint, cutting.in_branches), 48, 6),
    "turns": mixed(tuple(cutting.TURNS.values()), 12),
}
CHANGES = CUTS | LOOPS | ORDERS | MIXED
# In these every equation keeps its dtype.
IN_PLACE = {*CALLS, *ORDERS, "calls"}


def is_strict(row: Row) -> bool:
    """Whether an equation is a product, or f32 for its own sake."""
    pinned = row.dtype == F32 and row.reason not in FOR_OTHERS
    return row.primitive in PRODUCTS or pinned


@functools.cache
def before(name: str, dtype: str) -> cutting.Rows:
    return cutting.decided_in(planned(name, dtype), traced(name).names)


def moved(name: str, way: str, dtype: str) -> list[tuple[Row, Row]]:
    """The equations that have another dtype in the changed program."""
    program, rng = traced(name), np.random.default_rng(HALF.index(dtype))
    changed = CHANGES[way](program, rng)
    if changed.closed is program.closed:
        return []
    return moved_to(changed, before(name, dtype), way, dtype)


def moved_to(
    changed: Program, was: cutting.Rows, way: str, dtype: str
) -> list[tuple[Row, Row]]:
    now = cutting.decided(changed, f"mixed_{dtype}")
    # The last turn of a loop may compute what nobody reads.
    assert was.keys() == {key for key in now if key in was}
    found = []
    for key, rows in was.items():
        strict = any(map(is_strict, rows | now[key]))
        if way not in IN_PLACE and not strict:
            continue
        first = sorted(rows, key=str)[0]
        if not strict and (first.primitive, first.reason) in AT_BORDERS:
            continue
        dtypes = {row.dtype for row in rows}
        if {row.dtype for row in now[key]} != dtypes:
            others = [row for row in now[key] if {row.dtype} != dtypes]
            found.append((first, min(others, key=str)))
    return found


def ids(reasons: dict[str, str]) -> dict[str, str]:
    return {each: why for why, text in reasons.items() for each in text.split()}


def case(*values: str, slow: bool = False) -> Any:
    """A parameter set; one that is expected to fail does."""
    name = "-".join(values)
    why = ids(EXPECTED).get(name)
    marks = [] if why is None else [pytest.mark.xfail(strict=SAME_CUTS, reason=why)]
    marks += [pytest.mark.slow] * slow
    return pytest.param(*values, id=name, marks=marks)


def is_cut(each: str) -> bool:
    return each.split("-")[1] in CUTS and each.split("-")[0] in IDIOMS


def names_with(pattern: str) -> list[str]:
    """The idioms whose text has a pattern in it."""
    return [n for n, i in IDIOMS.items() if re.search(pattern, inspect.getsource(i.fn))]


WITH_LOOPS = names_with(r"(?<!associative_)scan\(|fori_loop\(|lax\.map\(")
WITH_BRANCHES = names_with(r"lax\.(cond|switch)\(")


@pytest.mark.breadth(4)
@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    [
        case(name, [*CUTS][i % len(CUTS)], HALF[i // len(CUTS) % 2])
        for i, name in enumerate([*IDIOMS][::4])
    ]
    # What is found in other ways.
    + [case(*each.split("-"), slow=True) for each in ids(EXPECTED) if is_cut(each)],
)
def test_idiom_in_pieces_has_the_same_plan(name, way, dtype):
    assert not moved(name, way, dtype)


@pytest.mark.parametrize(
    ("name", "way"),
    [(WITH_LOOPS[0], "peeled"), (WITH_BRANCHES[0], "exchanged")],
)
def test_idiom_with_a_loop_or_a_branch_written_otherwise_has_the_same_plan(name, way):
    assert CHANGES[way](traced(name), None).closed is not traced(name).closed
    assert not moved(name, way, HALF[0])


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    [
        case(name, [*CUTS][number % len(CUTS)], HALF[number % 2])
        for number, name in enumerate([*zoo.MODELS][::6])
    ],
)
def test_model_in_pieces_has_the_same_plan(name, way, dtype):
    assert not moved(name, way, dtype)


@pytest.mark.slow
@pytest.mark.skipif(
    bool(EXPECTED) and not SAME_CUTS, reason="what is expected, JAX 0.10 has found"
)
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *((way, dtype) for way in ("calls", *LOOPS, *ORDERS) for dtype in HALF),
        # Of these only products and pinned equations keep their dtypes.
        ("turns", "bfloat16"),
    ],
)
def test_every_program_changed_in_each_way_has_the_same_plan(way, dtype):
    names = [*IDIOMS, *zoo.MODELS]
    found = {f"{n}-{way}-{dtype}" for n in names if moved(n, way, dtype)}
    assert found == {f"{n}-{way}-{dtype}" for n in names} & ids(EXPECTED).keys()


def everything(w, x):
    """Loops in both directions, a branch, a helper, and a loop in a loop."""

    def turn(carry, row):
        h = jnp.tanh(carry @ w) + row
        h = lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * w[i], h)
        return h, (h * row, jnp.sum(h))

    last, (rows, sums) = lax.scan(turn, x[0], x)
    first, (others, _) = lax.scan(turn, last, x, reverse=True)
    branches = [lambda v: v @ w, lambda v: v * 3.0, lambda v: -v]
    chosen = lax.switch(2 * jnp.int32(sums[0] < 99.0), branches, rows - others)
    half = jax.jit(lambda v: jnp.exp(v - jnp.max(v)) / 2.0)
    return (
        half(chosen),
        first,
        lax.while_loop(lambda v: v[0] < 9.0, lambda v: v + v, last),
    )


@functools.cache
def straight():
    """A program, its arguments, and its values."""
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.uniform(size=(4, 4)), jnp.float32) for _ in range(2)]
    return cutting.traced(everything, *args), args, jax.jit(everything)(*args)


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.slow] * (i % 3 != 2))
        for i, way in enumerate(CHANGES)
    ],
)
def test_changed_program_is_another_one_with_the_same_values(way):
    program, args, was = straight()
    changed = CHANGES[way](program, np.random.default_rng(0))
    operations = [
        sorted(eqn.primitive.name for eqn in equations(p.closed))
        for p in (program, changed)
    ]
    assert operations[0] != operations[1]
    now = jax.jit(core.jaxpr_as_fun(changed.closed))(*args)
    for one, other in zip(was, now, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    # Each equation is found again.
    rows = [cutting.decided(p, "mixed_bfloat16").keys() for p in (program, changed)]
    assert rows[0] and rows[0] <= rows[1]


# vmap


MAPPED = {name: HALF[i // 8 % 2] for i, name in enumerate(IDIOMS)}


def moved_by_vmap(name: str, dtype: str) -> bool:
    """Whether a product has another dtype if `vmap` is inside."""
    closed, idiom = traced(name).closed, IDIOMS[name]
    params = len(jax.tree.leaves(idiom.params(np.random.default_rng(0))))
    axes = [None if i < params else 0 for i in range(len(closed.in_avals))]
    args = [
        jax.ShapeDtypeStruct(a.shape if axis is None else (2, *a.shape), a.dtype)
        for a, axis in zip(closed.in_avals, axes, strict=True)
    ]
    inside = cutting.traced(jax.vmap(core.jaxpr_as_fun(closed), axes), *args)
    return products(planned(name, dtype)) != products(plan_of(inside.closed, dtype))


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    [case(name, "vmap", dtype) for name, dtype in [*MAPPED.items()][::8]],
)
def test_products_of_an_idiom_are_the_same_under_vmap(name, way, dtype):
    assert not moved_by_vmap(name, dtype)


@pytest.mark.slow
def test_products_of_every_idiom_are_the_same_under_vmap():
    found = {f"{n}-vmap-{d}" for n, d in MAPPED.items() if moved_by_vmap(n, d)}
    assert found == {each for each in ids(EXPECTED) if "-vmap-" in each}


# Short programs, cut often, and written in pieces by hand


def weighted(a, b, g):
    return g @ jnp.linalg.solve(a, b)


def weighted_in_a_scan(a, b, g):
    x = jnp.linalg.solve(a, b)
    return lax.scan(lambda _, row: (None, row @ x), None, g[:, None])[1][:, 0]


def weighted_in_a_turn(a, b, g):
    x = jnp.linalg.solve(a, b)
    return lax.scan(lambda _, each: (None, each @ x), None, g[None])[1][0]


def chosen(a, b, g):
    p = b[0, 0] > 0
    return g @ lax.cond(p, lambda: jnp.linalg.solve(a, b), lambda: jnp.tanh(b @ a))


def distance(a, b):
    return jnp.sum(a**2, 1)[:, None] - 2 * (a @ b.T) + jnp.sum(b**2, 1)[None]


def distance_of_a_product(call):
    product = call(lambda a, b: a @ b.T)
    norms = call(lambda a: jnp.sum(a**2, 1))
    return lambda a, b: norms(a)[:, None] - 2 * product(a, b) + norms(b)[None]


def step(y, z, w):
    return y + 1e-3 * (z @ w)


def steps(y, w, count=8, step=step):
    for _ in range(count):
        y = step(y, 1.0 * y, w)
    return y


def steps_by(call, count=8):
    return lambda y, w: steps(y, w, count, call(step))


def steps_in_a_scan(y, w, count=8):
    def turn(y, _):
        return step(y, 1.0 * y, w), None

    return lax.scan(turn, y, None, length=count)[0]


def steps_in_a_fori_loop(y, w, count=8):
    return lax.fori_loop(0, count, lambda _, y: step(y, 1.0 * y, w), y)


def normalized(x, w, scale):
    h = x @ w
    mean = jnp.mean(h**2, -1, keepdims=True)
    return (h * lax.rsqrt(mean + 1e-6) * scale[None]) @ w


def normalized_in_steps(call):
    times = call(lambda a, b: a * b)

    def fn(x, w, scale):
        h = x @ w
        r = lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        return times(times(h, r), scale[None]) @ w

    return fn


def gated(x, w, c):
    h, z = x @ w, jnp.tanh(x @ c)
    y = jnp.sum(h[:, :, None] * c[None], axis=-1)
    return (y * z) @ w


def covariance(p, f, q, b):
    for _ in range(2):
        p = f @ p @ f.T + q
        p = p - p @ jnp.linalg.solve(p + q, p)
    return jnp.linalg.solve(p, b)


def covariance_in_a_scan(p, f, q, b):
    def turn(p, _):
        p = f @ p @ f.T + q
        return p - p @ jnp.linalg.solve(p + q, p), None

    return jnp.linalg.solve(lax.scan(turn, p, None, length=2)[0], b)


def normal_equations(x, y):
    return jnp.linalg.solve(x.T @ x + jnp.eye(x.shape[1]), x.T @ y)


def normal_equations_by(call):
    product = call(lambda a, b: a @ b)

    def fn(x, y):
        t = x.T
        gram = product(t, x)
        return jnp.linalg.solve(gram + jnp.eye(x.shape[1]), product(t, y))

    return fn


def place(x, table):
    best = jax.nn.one_hot(jnp.argmax(x @ table, -1), 2048)
    return best @ jnp.arange(2048.0)


# A program, and the shapes of its arguments.
SHORT: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "solution": (weighted, [(8, 8), (8, 3), (8, 8)]),
    "choice": (chosen, [(8, 8), (8, 8), (8, 8)]),
    "distance": (distance, [(8, 4), (6, 4)]),
    "steps": (steps, [(8,), (8, 8)]),
    "norm": (normalized, [(6, 8), (8, 8), (8,)]),
    "gate": (gated, [(6, 8), (8, 8), (8, 8)]),
    "covariance": (covariance, [(8, 8), (8, 8), (8, 8), (8, 1)]),
    "gram": (normal_equations, [(16, 4), (16, 1)]),
    "place": (place, [(6, 8), (8, 2048)]),
}
# What no cut makes of them: loops, and helpers that are called repeatedly.
WRITTEN: dict[str, dict[str, Any]] = {
    "solution": {"scan": weighted_in_a_scan, "turn": weighted_in_a_turn},
    "distance": {"product": distance_of_a_product(jax.jit)},
    "steps": {
        "jit": steps_by(jax.jit),
        "checkpoint": steps_by(jax.checkpoint),
        "scan": steps_in_a_scan,
        "fori_loop": steps_in_a_fori_loop,
    },
    "norm": {"factors": normalized_in_steps(jax.jit)},
    "covariance": {"scan": covariance_in_a_scan},
    "gram": {
        "products": normal_equations_by(jax.jit),
        "checkpoint": normal_equations_by(jax.checkpoint),
    },
}
# Runs of at most so many equations, each in a call, and in which seeds.
PIECES: dict[str, Change] = {
    **{f"{name} of 2": cuts(way, 2) for name, way in CUT_IN.items()},
    **{f"{name} of 6": cuts(way, 6) for name, way in CUT_IN.items()},
    **ORDERS,
}
SEEDS = range(3)


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*(name, dtype), marks=[pytest.mark.slow] * (dtype != HALF[0]))
        for name in SHORT
        for dtype in HALF
    ],
)
def test_short_program_has_the_same_plan_in_all_pieces(name, dtype):
    fn, shapes = SHORT[name]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = cutting.traced(fn, *args)
    was = cutting.decided(program, f"mixed_{dtype}")
    for way, cut in PIECES.items():
        for seed in SEEDS[: 1 if way in ORDERS else None]:
            changed = cut(program, np.random.default_rng(seed))
            assert not moved_to(changed, was, "calls", dtype), (way, seed)


def by_place(
    fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: str
) -> dict[Any, list[set[Row]]]:
    """What is planned for the equations of a primitive with a shape of results.

    A product may be made of rows in another place.
    """
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    rows = cutting.decided(cutting.traced(fn, *args), f"mixed_{dtype}")
    found: dict[Any, list[set[Row]]] = {}
    for name, of_name in rows.items():
        primitive = next(iter(of_name)).primitive
        shape = () if primitive in PRODUCTS else name[-1].aval.shape
        found.setdefault((primitive, shape), []).append(of_name)
    return found


def paired(was: list[set[Row]], now: list[set[Row]]) -> list[tuple[set[Row], set[Row]]]:
    """The equations in one place, one by one; or all of them, in one and more turns."""
    if len(was) == len(now):
        return list(zip(was, now, strict=True))
    return [(set().union(*was), set().union(*now))]


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    [
        case(name, way, dtype)
        for name, others in WRITTEN.items()
        for way in others
        for dtype in HALF
    ],
)
def test_program_that_is_written_in_pieces_has_the_same_plan(name, way, dtype):
    fn, shapes = SHORT[name]
    was, now = (by_place(each, shapes, dtype) for each in (fn, WRITTEN[name][way]))
    in_turns = way in ("scan", "turn", "fori_loop")
    for place, rows in was.items():
        for old, new in paired(rows, now.get(place, [])):
            if not in_turns or any(map(is_strict, old | new)):
                assert {row.dtype for row in old} == {row.dtype for row in new}, place


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_program_that_is_written_in_pieces_has_the_same_values(name):
    fn, shapes = SHORT[name]
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    for other in WRITTEN[name].values():
        np.testing.assert_allclose(other(*args), fn(*args), rtol=2e-3, atol=2e-3)


STEPS: dict[str, Callable[..., Any]] = {
    "inline": lambda y, w: steps(y, w, 300),
    "jit": steps_by(jax.jit, 300),
    "checkpoint": steps_by(jax.checkpoint, 300),
    "scan": lambda y, w: steps_in_a_scan(y, w, 300),
    "fori_loop": lambda y, w: steps_in_a_fori_loop(y, w, 300),
}
# What is before the steps, or after them.
AROUND: dict[str, Callable[..., Any]] = {
    "argument": lambda walk, y, w: walk(y, w),
    "from_a_product": lambda walk, y, w: walk(y @ jnp.eye(8), w),
    "to_a_product": lambda walk, y, w: walk(y, w) @ jnp.eye(8),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("around", "way", "dtype"),
    [case(around, way, "bfloat16") for around in AROUND for way in STEPS],
)
def test_steps_of_an_integration_add_up_however_they_are_written(around, way, dtype):
    y, w = jnp.ones(8), 4 * jnp.eye(8)
    walk = functools.partial(AROUND[around], STEPS[way])
    moved = amp.autocast(walk, f"mixed_{dtype}")(y, w) - y
    np.testing.assert_allclose(moved, 1.004**300 - 1, rtol=0.01)
