"""Reading jaxprs; this file and `binding` alone touch `jax.extend`.

A *body* here is an open jaxpr with its constants. Everything that depends on how JAX
spells an equation (which parameter holds the sub-jaxpr, what a loop carries) is in this
file, so that a JAX release that changes a spelling changes one function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.core import primitives

from jmp_amp.policies.dtypes import F32, is_half

Eqn = core.JaxprEqn
Var = core.Var
Literal = core.Literal
DropVar = core.DropVar
Primitive = core.Primitive
Atom = Var | Literal
Jaxpr = core.Jaxpr
ClosedJaxpr = core.ClosedJaxpr
# Hashable, and equal if made by the same calls of the same lines. Public in no module.
Traceback = Any
# An array, a tracer or a numpy array: whatever `primitive.bind` takes.
Value = Any

# The calls whose body is planned and staged again, with the parameter that holds it.
_BODY_PARAMETER = {
    primitives.jit_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    primitives.remat_p: "jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
}
CHECKPOINT = primitives.remat_p
# Not in `jax.extend`. The body of each is its parameter `jaxpr`.
_SHARD_MAP = "shard_map"
_METADATA_CALL = "xla_metadata_call"


class Body(NamedTuple):
    """An open jaxpr and the values of its `constvars`."""

    jaxpr: Jaxpr
    consts: tuple[Value, ...]


class Inner(NamedTuple):
    """A body of an equation, and the operand that each of its inputs comes from."""

    body: Body
    operands: Sequence[int]


def body_of(jaxpr: Jaxpr | ClosedJaxpr) -> Body:
    """Returns the parts of an open or closed jaxpr."""
    # JAX < 0.11: a ClosedJaxpr wraps a Jaxpr; later the two are one class.
    opened = cast(Jaxpr, getattr(jaxpr, "jaxpr", jaxpr))
    return Body(opened, tuple(getattr(jaxpr, "consts", ())))


def aval_of(atom: Atom) -> ShapedArray:
    """Returns the shape and the dtype of an operand or a result."""
    aval: Any = atom.aval
    return aval


def runs(eqn: Eqn) -> bool:
    """Whether somebody reads a result of `eqn`, or it has an effect."""
    return bool(eqn.effects) or is_read(eqn)


def is_read(eqn: Eqn) -> bool:
    """Whether somebody reads a result of `eqn`."""
    return any(not isinstance(v, core.DropVar) for v in eqn.outvars)


def returns_from_effects(body: Body) -> bool:
    """Whether a callback with an effect returns a value, in a body or inside of it.

    Reading a mutable array is none.
    """
    return any(
        any(returns_from_effects(each.body) for each in inner)
        if (inner := inner_bodies(eqn))
        else happens(eqn) and is_read(eqn)
        for eqn in body.jaxpr.eqns
    )


# The effect of a collective says which axis of a mesh it names, and no more. What is
# written to a mutable array is read from it.
_SILENT = frozenset(
    f"{name}Effect"
    for name in ("NamedAxis", "Read", "Write", "Accum", "InternalMutableArray")
)


def happens(eqn: Eqn) -> bool:
    """Whether it can be told how often `eqn` runs."""
    return any(type(each).__name__ not in _SILENT for each in eqn.effects)


def variables(atoms: Sequence[Atom]) -> list[Var]:
    """Returns the operands that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def has_effect(eqn: Eqn) -> bool:
    """Whether `eqn` does more than return results.

    The effect of a collective says which axis of a mesh it names, and no more.
    """
    return any(type(each).__name__ != "NamedAxisEffect" for each in eqn.effects)


# The effects of `jax.debug.print` and `jax.debug.callback`.
_SHOWS = frozenset(("DebugEffect", "OrderedDebugEffect"))


def is_print(eqn: Eqn) -> bool:
    """Whether `eqn` shows values, and neither returns nor keeps any.

    What is written to a mutable array is kept, and so is what `io_callback` is given.
    """
    effects = {type(each).__name__ for each in eqn.effects}
    return not eqn.outvars and bool(effects) and effects <= _SHOWS


def inner_programs(eqn: Eqn) -> list[Jaxpr | ClosedJaxpr]:
    """Returns the bodies of `eqn` as it holds them, see `inner_bodies`."""
    params = eqn.params
    if eqn.primitive is primitives.cond_p:
        return list(params["branches"])
    if eqn.primitive is primitives.while_p:
        return [params["cond_jaxpr"], params["body_jaxpr"]]
    return [params[_BODY_PARAMETER.get(eqn.primitive, "jaxpr")]]


def holding(eqn: Eqn, programs: Sequence[Jaxpr | ClosedJaxpr]) -> dict[str, object]:
    """Returns the parameters by which `eqn` holds other bodies in place of its own."""
    if eqn.primitive is primitives.cond_p:
        return {"branches": tuple(programs)}
    if eqn.primitive is primitives.while_p:
        return dict(zip(("cond_jaxpr", "body_jaxpr"), programs, strict=True))
    (program,) = programs
    return {_BODY_PARAMETER.get(eqn.primitive, "jaxpr"): program}


def with_programs(eqn: Eqn, programs: Sequence[Jaxpr | ClosedJaxpr]) -> Eqn:
    """Returns `eqn` with other bodies, which have the same inputs and outputs."""
    return eqn.replace(params={**eqn.params, **holding(eqn, programs)})


def with_equations(
    program: Jaxpr | ClosedJaxpr, eqns: Sequence[Eqn], outvars: Sequence[Atom]
) -> Any:
    """Returns an open or closed jaxpr with other equations and outputs."""
    changed: dict[str, Any] = {"eqns": list(eqns), "outvars": list(outvars)}
    if not isinstance(program, Jaxpr):
        # JAX < 0.11: a ClosedJaxpr wraps a Jaxpr.
        changed = {"jaxpr": body_of(program).jaxpr.replace(**changed)}
    return program.replace(**changed)


def inner_bodies(eqn: Eqn) -> tuple[Inner, ...]:
    """Returns the bodies of `eqn` that can be staged again with other dtypes.

    One for a call and a `scan`, one for each branch of a `cond`, condition and body of
    a `while`. None for every other equation, also for one that owns a jaxpr: it runs as
    it was traced.
    """
    primitive, params = eqn.primitive, eqn.params
    everything = range(len(eqn.invars))
    if primitive in _BODY_PARAMETER:
        return (Inner(body_of(params[_BODY_PARAMETER[primitive]]), everything),)
    named = primitive.name in (_SHARD_MAP, _METADATA_CALL)
    if named or primitive is primitives.scan_p:
        bodies = (Inner(body_of(params["jaxpr"]), everything),)
    elif primitive is primitives.cond_p:
        bodies = tuple(Inner(body_of(b), everything[1:]) for b in params["branches"])
    elif primitive is primitives.while_p:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        carry = everything[first + second :]
        bodies = (
            Inner(body_of(params["cond_jaxpr"]), [*everything[:first], *carry]),
            Inner(body_of(params["body_jaxpr"]), everything[first:]),
        )
    else:
        return ()
    # A mutable array is not a value: equations that read or write it run as traced.
    arrays = all(isinstance(v.aval, ShapedArray) for v in eqn.invars)
    return bodies if arrays else ()


def is_loop(eqn: Eqn) -> bool:
    return eqn.primitive in (primitives.scan_p, primitives.while_p)


def carried(eqn: Eqn) -> range:
    """Returns which operands of `eqn` a loop carries; its first results are theirs."""
    if eqn.primitive is primitives.while_p:
        start = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return range(start, len(eqn.invars))
    if eqn.primitive is primitives.scan_p:
        if "ft_in" in eqn.params:
            consts, carry, _ = eqn.params["ft_in"].unpack()
            start, count = len(consts.vals), len(carry.vals)
        else:  # JAX < 0.11: counts.
            start, count = eqn.params["num_consts"], eqn.params["num_carry"]
        return range(start, start + count)
    return range(0)


def first_carried(eqn: Eqn) -> int | None:
    """Returns which input of the body of a loop is the first that it carries."""
    if not is_loop(eqn):
        return None
    return carried(eqn).start - (eqn.params.get("cond_nconsts", 0))


def read_every_turn(eqn: Eqn) -> range:
    """Returns which operands of `eqn` every turn of a loop reads whole."""
    return range(carried(eqn).start if is_loop(eqn) else 0)


def is_jit(eqn: Eqn) -> bool:
    return eqn.primitive is primitives.jit_p


def is_custom_jvp(eqn: Eqn) -> bool:
    return eqn.primitive is primitives.custom_jvp_call_p


def is_complex(eqn: Eqn) -> bool:
    """Whether an operand or a result of an equation is complex."""
    return any(
        getattr(getattr(v.aval, "dtype", None), "kind", "") == "c"
        for v in (*eqn.invars, *eqn.outvars)
    )


def is_custom_vjp(eqn: Eqn) -> bool:
    return eqn.primitive is primitives.custom_vjp_call_p


def is_floating(atom: Atom) -> bool:
    """Whether an operand or a result is an array of real or complex numbers.

    A mutable array is none: it has a dtype and is no value.
    """
    return isinstance(atom.aval, ShapedArray) and _is_inexact(atom.aval.dtype)


# Asked for each operand of each equation, of a handful of dtypes.
@functools.cache
def _is_inexact(dtype: np.dtype) -> bool:
    return jax.numpy.issubdtype(dtype, np.inexact)


def is_mutable(atom: Atom) -> bool:
    """Whether an operand or a result is a mutable array: a place, not a value."""
    return not isinstance(atom.aval, ShapedArray) and hasattr(atom.aval, "dtype")


def is_checkpoint(eqn: Eqn) -> bool:
    return eqn.primitive is CHECKPOINT


def is_branch(eqn: Eqn) -> bool:
    return eqn.primitive is primitives.cond_p


def is_while(eqn: Eqn) -> bool:
    return eqn.primitive is primitives.while_p


def saves_residuals(eqn: Eqn) -> bool:
    """Whether the derivative of the call `eqn` saves residuals of its body."""
    return not (is_checkpoint(eqn) or is_custom_jvp(eqn))


def is_conversion(eqn: Eqn) -> bool:
    return eqn.primitive is primitives.convert_element_type_p


def is_shard_map(eqn: Eqn) -> bool:
    return eqn.primitive.name == _SHARD_MAP


def scope_text(eqn: Eqn) -> str:
    """Returns the name scopes of `eqn`, outermost first, joined by slashes."""
    return str(eqn.source_info.name_stack)


def is_fixed(eqn: Eqn) -> bool:
    """Whether a parameter of `eqn` binds it to the dtypes that it was traced with."""
    precision = eqn.params.get("precision")
    return (
        # A dot algorithm names the dtypes it multiplies and accumulates in.
        isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)
        # The bits of one dtype are not those of another.
        or eqn.primitive is primitives.bitcast_convert_type_p
        # The body of a reduction or a scatter was traced with them.
        or any(True for _ in core.jaxprs_in_params(eqn.params))
    )


def sums_half_in_f32(eqn: Eqn) -> bool:
    """Whether `eqn` is a product of half operands that asks for an f32 result."""
    floats = [aval_of(v).dtype for v in eqn.invars if is_floating(v)]
    return (
        "preferred_element_type" in eqn.params
        and bool(floats)
        and all(map(is_half, floats))
        and aval_of(eqn.outvars[0]).dtype == F32
    )


def retyped(eqn: Eqn, dtype: np.dtype) -> dict[str, object]:
    """Returns the parameters of `eqn` that say in which dtype its result is."""
    names = ("preferred_element_type", "out_dtype")
    return {name: dtype for name in names if eqn.params.get(name) is not None}


def repetitions(eqn: Eqn) -> int:
    """Returns how often the bodies of `eqn` run, if the program tells; else 1.

    The turns of a `scan`, the shards of a `shard_map`; a `while` does not tell.
    """
    if eqn.primitive is primitives.scan_p:
        return eqn.params["length"]
    if is_shard_map(eqn):
        sizes = dict(eqn.params["mesh"].shape)
        return math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
    return 1


def owned_bodies(eqn: Eqn) -> list[Body]:
    """Returns every body among the parameters of `eqn`, also those run as traced."""
    return list(map(body_of, core.jaxprs_in_params(eqn.params)))


def solution(eqn: Eqn) -> tuple[Any, Sequence[int]] | None:
    """Returns the body that solves linear equations, and its operands in `eqn`.

    None if `eqn` solves none. The other bodies tell the derivative what is solved.
    """
    if eqn.primitive.name != "custom_linear_solve":
        return None
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    known = range(sum(lengths), len(eqn.invars))
    return eqn.params["jaxprs"].solve, [*range(start, start + lengths.solve), *known]


def running_bodies(eqn: Eqn) -> list[Body]:
    """Returns the bodies of `eqn` that run when it does."""
    if solved := solution(eqn):
        return [body_of(solved[0])]
    return owned_bodies(eqn)
