"""Reading what a transformed function computes in: the dtypes of its jaxpr."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import pytest
from jax.extend import core

import jmp_amp as amp

F32, BF16, F16 = "float32", "bfloat16", "float16"
# In a table of programs: the half dtype of the case.
HALF = "half"
F16_IF_SLOW = pytest.param(F16, marks=pytest.mark.slow)


def with_rule(product: Callable[..., Any]) -> Any:
    """A product with a derivative rule of its own, which is two such products."""

    @jax.custom_jvp
    def ruled(x, w):
        return product(x, w)

    @ruled.defjvp
    def derivative(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return ruled(x, w), product(dx, w) + product(x, dw)

    return ruled


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of the jaxprs inside it, calls before bodies."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def dtypes_of(
    fn: Callable[..., Any], *args: Any, primitive: str
) -> list[tuple[str, ...]]:
    """The dtypes of the float operands and then of the results of each `primitive`."""
    program = jax.make_jaxpr(fn)(*args)
    return [_floats(e) for e in equations(program) if e.primitive.name == primitive]


def products(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The dtype of the operands of each matrix product, in their order."""
    rows = dtypes_of(fn, *args, primitive="dot_general")
    assert all(row[0] == row[1] for row in rows)
    return [row[0] for row in rows]


def results_of(fn: Callable[..., Any], *args: Any, primitive: str) -> list[str]:
    """The dtypes of the first result of each `primitive`."""
    return [row[-1] for row in dtypes_of(fn, *args, primitive=primitive)]


def planned(
    fn: Callable[..., Any], *args: Any, primitive: str, policy: Any = "mixed_bfloat16"
) -> list[str]:
    """The dtypes of the first float result of each `primitive` under a policy."""
    rows = dtypes_of(amp.autocast(fn, policy), *args, primitive=primitive)
    return [row[-1] for row in rows if row]


def reason_of(
    fn: Callable[..., Any], *args: Any, operation: str, policy: Any = "mixed_bfloat16"
) -> str:
    """Why the last equation of a name has its dtype under a policy."""
    report = amp.explain(fn, policy)(*args)
    return [e.reason for e in report.equations if e.operation == operation][-1]


def saved(fn: Callable[..., Any], arg: Any, shape: tuple[int, ...]) -> list[str]:
    """The dtypes of the arrays of a shape that a backward pass keeps; none is made."""
    backward = jax.eval_shape(lambda x: jax.vjp(fn, x)[1], arg)
    return [x.dtype.name for x in jax.tree.leaves(backward) if x.shape == shape]


def casts_of(fn: Callable[..., Any], *args: Any) -> list[tuple[str, ...]]:
    """The conversions between two float dtypes, as (shape, from, to)."""
    return [
        (str(eqn.outvars[0].aval.shape), *row)
        for eqn, row in (
            (eqn, [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)])
            for eqn in equations(jax.make_jaxpr(fn)(*args))
            if eqn.primitive.name == "convert_element_type"
        )
        if all(jax.numpy.issubdtype(d, jax.numpy.inexact) for d in row)
        and row[0] != row[1]
        for row in [[d.name for d in row]]
    ]


class Planned(NamedTuple):
    """A row of a table of programs, see `plans`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    dtypes: dict[str, Any]
    why: Mapping[str, str]
    half: str | None


def plans(
    fn: Callable[..., Any],
    *args: Any,
    why: Mapping[str, str] | None = None,
    half: str | None = None,
    **dtypes: Any,
) -> Planned:
    """Returns a row of a table of programs.

    Args:
      fn: the program.
      args: its arguments; by default an activation (8, 16) and a matrix (16, 16).
      why: by primitive, the reason of the last of its equations.
      half: the only half dtype to plan for; by default it is bf16, and f16 in the slow
        tests.
      dtypes: by primitive, what each of its equations of floats reads and makes: one
        dtype, or a tuple. `[..., F32]` is the end of that list, `{F32}` its set.
    """
    default = [jax.ShapeDtypeStruct((n, 16), jax.numpy.float32) for n in (8, 16)]
    return Planned(fn, args or tuple(default), dtypes, why or {}, half)


def each_plan(table: Mapping[str, Planned]) -> pytest.MarkDecorator:
    """Parameters `row` and `half` of a test that calls `check_plan`."""
    cases = []
    for name, row in table.items():
        for half in (row.half,) if row.half else (BF16, F16):
            marks = [pytest.mark.slow] * (half == F16 and row.half is None)
            cases.append(pytest.param(row, half, marks=marks, id=f"{name}-{half}"))
    return pytest.mark.parametrize(("row", "half"), cases)


def check_plan(row: Planned, half: str) -> None:
    """Asserts that a program has the dtypes, and the reasons, of its row."""
    program = jax.make_jaxpr(amp.autocast(row.fn, f"mixed_{half}"))(*row.args)
    found, expected = {}, {}
    for primitive, wanted in row.dtypes.items():
        eqns = (e for e in equations(program) if e.primitive.name == primitive)
        dtypes = [d[0] if len({*d}) == 1 else d for d in map(_floats, eqns) if d]
        told = [_named(d, half) for d in wanted if d is not ...]
        if isinstance(wanted, set):
            dtypes, told = ({*each} for each in (dtypes, told))
        elif wanted[0] is ...:
            dtypes = dtypes[-len(told) :]
        found[primitive], expected[primitive] = dtypes, told
    assert found == expected, f"{found} for {expected}"
    for operation, reason in row.why.items():
        policy = f"mixed_{half}"
        why = reason_of(row.fn, *row.args, operation=operation, policy=policy)
        assert why == reason, f"{operation}: {why!r} for {reason!r}"


def _named(dtypes: Any, half: str) -> Any:
    """Returns dtypes of a row with that of the case for `HALF`."""
    if isinstance(dtypes, tuple):
        return tuple(_named(each, half) for each in dtypes)
    return half if dtypes == HALF else dtypes


def _floats(eqn: Any) -> tuple[str, ...]:
    names = ((v.aval.dtype, v.aval.dtype.name) for v in (*eqn.invars, *eqn.outvars))
    return tuple(n for d, n in names if jax.numpy.issubdtype(d, jax.numpy.inexact))
