"""Every row of the table of operations is complete, and says of JAX what is true."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.tables.operations import (
    GROUPS,
    OPERATIONS,
    Cost,
    Kind,
    OpClass,
    Role,
    Saves,
)
from tests import measures

X, Y = jnp.linspace(0.2, 0.8, 7), jnp.linspace(0.3, 0.7, 7)
TWO_OPERANDS = "add add_any sub mul div rem pow atan2 max min".split()
# Not a function of `jax.lax` of the same name and operands.
SPELLED = {
    "add_any": lax.add,  # what JAX writes for the sum of two cotangents
    "acosh": lambda x: lax.acosh(x + 1.0),
    "clamp": lambda x: lax.clamp(0.3, x, 0.6),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "log2": jnp.log2,
    "reduce_max": lambda x: lax.reduce_max(x, (0,)),
    "reduce_min": lambda x: lax.reduce_min(x, (0,)),
    "reduce_sum": lambda x: lax.reduce_sum(x, (0,)),
    "select_n": lambda x: lax.select(x > 0.5, x, x),
}
# JAX makes them itself, or differentiates nothing.
NOT_WRITTEN = set(
    "add_any one_minus_square convert_element_type iota dim_as_value".split()
)
COMPUTED = [
    name
    for name, operation in OPERATIONS.items()
    if operation.row.cost is Cost.CHEAP
    and operation.kind not in (Kind.MOVE, Kind.COMPARISON)
    and name not in NOT_WRITTEN
]


def written(name):
    """A primitive as a function, and operands in its domain."""
    fn = SPELLED.get(name) or getattr(lax, name)
    return fn, (X, Y) if name in TWO_OPERANDS else (X,)


def test_every_row_is_complete():
    for group in GROUPS:
        assert group.rows and len(group.words.reason) > 10 and group.source
        for row in group.rows:
            assert isinstance(row.cost, Cost) and isinstance(row.saves, Saves)
            assert row.role is None or isinstance(row.role, Role)


def test_no_primitive_has_two_rows():
    names = [row.name for group in GROUPS for row in group.rows]
    assert len(names) == len(set(names)) == len(OPERATIONS)


def test_the_kind_of_an_operation_agrees_with_its_class():
    exact_or_elementwise = {
        Kind.MOVE,
        Kind.SELECTION,
        Kind.COMPARISON,
        Kind.ARITHMETIC,
    }
    for group in GROUPS:
        follows = group.op_class is OpClass.FOLLOW
        assert follows == (group.kind in exact_or_elementwise)
        assert (group.op_class is OpClass.LOW) == (group.kind is Kind.PRODUCT)
        assert group.op_class is not OpClass.KEEP


def test_an_operation_that_is_exact_saves_no_operand_but_to_compare_it():
    saving = {
        name
        for name, operation in OPERATIONS.items()
        if operation.kind in (Kind.MOVE, Kind.SELECTION, Kind.COMPARISON)
        and operation.row.saves is not Saves.NOTHING
    }
    # Their derivative is a mask of f32 numbers.
    assert saving == {"max", "min", "reduce_max", "reduce_min"}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_a_derivative_saves_is_what_jax_saves(name):
    fn, args = written(name)

    def residuals(*args):
        return jax.tree.leaves(jax.vjp(fn, *args)[1])

    kept = [leaf for leaf in residuals(*args) if leaf.size > 1]
    # Zeros in place of a cotangent are no value of the program.
    floats = [x for x in kept if jnp.issubdtype(x.dtype, jnp.floating) and x.any()]
    saves = OPERATIONS[name].row.saves
    assert bool(floats) == (saves is not Saves.NOTHING)
    results = jax.tree.leaves(fn(*args))
    if saves is Saves.RESULT and name in ("exp", "expm1", "sqrt"):
        scale = {"exp": results[0], "expm1": results[0] + 1, "sqrt": 0.5 / results[0]}
        np.testing.assert_allclose(floats[0], scale[name], rtol=1e-6)


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    "name", [n for n, o in OPERATIONS.items() if o.row.limits is not None]
)
def test_limits_are_those_of_the_primitive(name):
    limits = OPERATIONS[name].row.limits
    fn, args = written(name)
    if isinstance(limits, tuple):
        wide = (jnp.linspace(-50.0, 50.0, 1001),) * len(args)
        low, high = limits
        assert low <= fn(*wide).min() and fn(*wide).max() <= high
    else:
        expected = limits(*(np.asarray(a, np.float64) for a in args))
        np.testing.assert_allclose(fn(*args), expected, rtol=1e-5)


def saved_bytes(fn):
    """What is saved of a function of half activations that a product follows."""

    def loss(w, x):
        return jnp.mean(fn(jnp.tanh(x @ w) * 0.5) @ w), None

    policy = amp.Policy(output_dtype="bf16")
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return measures.traced(amp.autocast(loss, policy), shape, shape).saved_bytes


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "fn",
    [
        *(lax.acos, lax.asin, lax.atanh, lax.asinh, lax.erf_inv),
        lambda h: lax.acosh(h + 1.5),
        lambda h: jnp.log2(h + 1.5),
        lambda h: lax.atan2(h, h + 1.0),
    ],
)
def test_f32_functions_between_half_values_save_half_as_the_logarithm_does(fn):
    # But for a constant, the logarithm of the base.
    assert saved_bytes(fn) <= saved_bytes(lambda h: jnp.log(h + 1.5)) + 4


def test_a_primitive_without_a_row_runs_as_traced():
    (equation,) = (
        e
        for e in amp.explain(lambda x: lax.bessel_i0e(lax.nextafter(x, x)))(X).equations
        if e.operation == "nextafter"
    )
    assert "nextafter" not in OPERATIONS
    assert (equation.op_class, equation.dtype) == ("keep", "f32")


ROOT = Path(amp.__file__).parent
# Each with what its names are.
OTHER_LISTS = {
    "plan/tables/operations.py": "the table",
    "recipes.py": "Paddle's names of operations, with JAX's",
}


def lists_of_names(source):
    """The lines of a text that list several primitives of the table."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        words = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
        elif isinstance(node, ast.Set | ast.Tuple | ast.List):
            words = [getattr(each, "value", None) for each in node.elts]
        elif isinstance(node, ast.Dict):
            words = [getattr(each, "value", None) for each in node.keys]
        known = [word for word in words if word in OPERATIONS]
        if len(known) > 1 and 2 * len(known) > len(words):
            found.add(node.lineno)
    return sorted(found)


@pytest.mark.parametrize(
    "source",
    (
        'A = frozenset(("add", "sub"))',
        'A = "svd eigh other".split()',
        'if name in {"neg", "abs"}: pass',
        'A = {"exp": 1, "log": 2}',
    ),
)
def test_a_list_of_primitives_is_seen(source):
    assert lists_of_names(source) == [1]
    assert not lists_of_names('A = name == "add" or "Adds one to what is there"')


def test_a_property_of_a_primitive_stands_in_the_table_alone():
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in ROOT.rglob("*.py")
        if (lines := lists_of_names(path.read_text()))
    }
    assert set(found) == set(OTHER_LISTS), found
