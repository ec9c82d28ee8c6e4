"""Computing what is cheap a second time, so that it need not be stored in between.

A block of 8-bit codes is scaled by its largest number. All of a new moment is computed
before its first code is, and XLA writes it to memory in float32 for the while. Its last
operations are elementwise: done once more, from the gradient and the old codes, they
cost little beside what they read. One kernel then reads these and writes the largest
numbers, another reads them again and writes the codes.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.policies.dtypes import PyTree

# Elementwise, or another shape of the same elements: XLA computes these in the kernel
# that reads them. No sum, product of matrices, random number, loop or effect is here.
_CHEAP = frozenset(
    "abs add and bitcast_convert_type broadcast_in_dim ceil clamp convert_element_type "
    "copy copy_p cos div eq erf exp exp2 expm1 floor ge gt integer_pow iota is_finite "
    "le log log1p logistic lt max min mul ne neg nextafter not or pad pow pvary "
    "reduce_precision rem reshape round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin slice sqrt square squeeze "
    "stop_gradient sub tan tanh xor".split()
)
_CALLS = frozenset(("jit", "pjit"))

_Values = dict[jaxprs.Var, jaxprs.Value]


def in_two_passes(
    fn: Callable[[], PyTree],
    first_pass: Callable[[PyTree], PyTree],
    stored: Sequence[jax.Array],
) -> tuple[PyTree, PyTree]:
    """Returns `first_pass(fn())`, and `fn()` computed anew where that is cheap.

    XLA computes all of the former first. Elementwise operations are in the program
    twice. A sum, a product of matrices, a random number, a loop or a callback is there
    once, and the second pass reads its result.

    Args:
      fn: a function without arguments, called once. It is traced.
      first_pass: a function of the results of `fn`. Returns a pytree of arrays.
      stored: those arrays that `fn` reads and that are in memory, such as a state.
        Others, such as a gradient in another dtype, XLA may compute where it reads
        them.
    """
    body, as_results = _traced(fn)
    first: _Values = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
    given = [var for var, value in first.items() if _is_array(value)]
    for eqn in body.jaxpr.eqns:
        _run(eqn, first)
    ids = set(map(id, stored))
    held = [var for var in given if id(first[var]) in ids]
    # What comes out of the barrier is not known before the first pass is over, and that
    # `true` is true is not known at all: else XLA would see that both passes are one.
    found, true, arrays = jax.lax.optimization_barrier(
        (first_pass(as_results(first)), jnp.asarray(True), [first[v] for v in held])
    )
    again = dict(first)
    for var in given:
        again[var] = jnp.where(true, first[var], jnp.zeros_like(first[var]))
    again.update(zip(held, arrays, strict=True))
    for eqn in body.jaxpr.eqns:
        moved = any(_read(again, at) is not _read(first, at) for at in eqn.invars)
        if moved and _is_cheap(eqn):
            _run(eqn, again)
    return found, as_results(again)


def _traced(
    fn: Callable[[], PyTree],
) -> tuple[jaxprs.Body, Callable[[_Values], PyTree]]:
    """Returns the body of `fn`, and what makes its results of the values of a run."""
    traced: list[PyTree] = []

    def arrays() -> list[jax.Array]:
        leaves, structure = jax.tree.flatten(fn())
        others = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        traced.extend((structure, others))
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    body = jaxprs.body_of(jax.make_jaxpr(arrays)())
    structure, others = traced

    def as_results(values: _Values) -> PyTree:
        found = iter(
            binding.as_output(_read(values, atom), jaxprs.aval_of(atom))
            for atom in body.jaxpr.outvars
        )
        leaves = (next(found) if leaf is None else leaf for leaf in others)
        return structure.unflatten(leaves)

    return body, as_results


def _run(eqn: jaxprs.Eqn, values: _Values) -> None:
    with binding.source_of(eqn):
        found = binding.bind(eqn, [_read(values, atom) for atom in eqn.invars])
    values.update(zip(eqn.outvars, found, strict=True))


def _read(values: _Values, atom: jaxprs.Atom) -> jaxprs.Value:
    return atom.val if isinstance(atom, jaxprs.Literal) else values[atom]


def _is_cheap(eqn: jaxprs.Eqn) -> bool:
    """Whether `eqn`, and all of a function that it calls, is elementwise."""
    if eqn.primitive.name in _CALLS:
        (inner,) = jaxprs.inner_bodies(eqn)
        return all(map(_is_cheap, inner.body.jaxpr.eqns))
    return eqn.primitive.name in _CHEAP


def _is_array(value: jaxprs.Value) -> bool:
    """Whether `value` is an array of numbers: no scalar, PRNG key or reference."""
    aval = jax.typeof(value)
    is_plain = isinstance(aval, ShapedArray) and isinstance(aval.dtype, np.dtype)
    return is_plain and aval.shape != ()
