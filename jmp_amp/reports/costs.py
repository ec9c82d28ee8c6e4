"""The costs of operations, read from their shapes; nothing is executed.

Multiplications and additions of matrix products, and the residuals that differentiation
keeps for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jmp_amp.plan.dataflow.dead_code import inputs_read
from jmp_amp.plan.program import binding, jaxprs, scope_text
from jmp_amp.plan.program.dimensions import as_counted
from jmp_amp.plan.program.jaxprs import Atom, Body, Eqn, Var
from jmp_amp.plan.rewrites.fp8 import NAMES
from jmp_amp.plan.saved.needs import KEPT


class Matmuls(NamedTuple):
    """Matrix products and their operations, in all and in half precision."""

    total: int = 0
    in_half: int = 0
    flops: int = 0
    flops_in_half: int = 0


def added_up(costs: Iterable[Matmuls]) -> Matmuls:
    """Returns the sum of the costs of products."""
    return Matmuls(*map(sum, zip(Matmuls(), *costs, strict=True)))


def matmuls_as_traced(body: Body, times: int) -> Matmuls:
    """Returns the matrix products of a body that runs `times` times as traced."""
    return added_up(cost for _, cost in products_as_traced(body, times))


def products_as_traced(
    body: Body, times: int, around: tuple[Eqn, ...] = ()
) -> Iterator[tuple[tuple[Eqn, ...], Matmuls]]:
    """Yields the matrix products of a body that runs `times` times as traced.

    Each is an equation behind those of `around` that it is inside of, with its cost.
    """
    for eqn in body.jaxpr.eqns:
        here = (*around, eqn)
        dtypes = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        cost = matmul_of(eqn, dtypes, times)
        if cost.total:
            yield here, cost
        yield from products_inside(eqn, times, here)


def products_inside(
    eqn: Eqn, times: int, around: tuple[Eqn, ...] = ()
) -> Iterator[tuple[tuple[Eqn, ...], Matmuls]]:
    """Yields the products in the bodies of an equation, see `products_as_traced`."""
    if eqn.primitive.name == "pallas_call":
        return  # written for one block of a grid
    for inner in jaxprs.running_bodies(eqn):
        yield from products_as_traced(inner, times * turns_of(eqn), around)


def matmul_of(eqn: Eqn, dtypes: Sequence[np.dtype | None], times: int) -> Matmuls:
    """Returns the cost of one equation: zeros if it is no product of floats.

    Args:
      eqn: an equation.
      dtypes: for each operand, the dtype it is read in.
      times: how often the equation runs.
    """
    flops = _flops(eqn)
    if flops is None or not jnp.issubdtype(_aval(eqn.outvars[0]).dtype, jnp.inexact):
        return Matmuls()
    half = all(dtype is not None and dtype.itemsize <= 2 for dtype in dtypes[:2])
    return Matmuls(1, int(half), flops * times, flops * times * half)


def _flops(eqn: Eqn) -> int | None:
    """Returns the operations of a matrix product or convolution, else None.

    A multiplication and an addition are two. A convolution is counted as XLA counts it:
    products with padding, or with the zeros of a dilated input, are not work.
    """
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return _dot_flops(eqn, contracted)
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        flops = _dot_flops(eqn, contracted)
        if set(numbers.lhs_ragged_dimensions) & set(contracted):
            # The groups share the contracted dimension: each sums over its part.
            flops //= max(_shape(eqn.invars[2])[-1], 1)
        return flops
    if eqn.primitive.name == "conv_general_dilated":
        return _convolution_flops(eqn)
    return None


def _dot_flops(eqn: Eqn, contracted: Sequence[int]) -> int:
    terms = math.prod(_shape(eqn.invars[0])[d] for d in contracted)
    return 2 * math.prod(_shape(eqn.outvars[0])) * terms


def _convolution_flops(eqn: Eqn) -> int:
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] > 1:
        # The groups lie along the batch of the image, which the result has not.
        assert eqn.params["feature_group_count"] == 1
    kernel, result = _shape(eqn.invars[1]), _shape(eqn.outvars[0])
    batch, features, *_ = (result[d] for d in numbers.out_spec)
    flops = 2 * batch * features * kernel[numbers.rhs_spec[1]]
    return flops * math.prod(_pairs(eqn, d) for d in range(len(result) - 2))


def _pairs(eqn: Eqn, d: int) -> int:
    """Returns how many products the spatial dimension `d` of a convolution makes.

    Of all pairs of a result and an element of the window, those that meet an element of
    the image, not padding and not a zero of its dilation.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    image, kernel = map(_shape, eqn.invars)
    last = (image[numbers.lhs_spec[d + 2]] - 1) * params["lhs_dilation"][d]
    results = np.arange(_shape(eqn.outvars[0])[numbers.out_spec[d + 2]])
    begins = results * params["window_strides"][d] - params["padding"][d][0]
    pairs = 0
    for element in range(kernel[numbers.rhs_spec[d + 2]]):
        place = begins + element * params["rhs_dilation"][d]
        is_element = place % params["lhs_dilation"][d] == 0
        pairs += int(np.count_nonzero(is_element & (place >= 0) & (place <= last)))
    return pairs


def turns_of(eqn: Eqn) -> int:
    """Returns how often the bodies of `eqn` run; a symbolic number counts as one."""
    return as_counted([jaxprs.repetitions(eqn)])[0]


def _shape(atom: Atom) -> tuple[int, ...]:
    return as_counted(_aval(atom).shape)


def _aval(atom: Atom) -> ShapedArray:
    return cast(ShapedArray, atom.aval)


class Residual(NamedTuple):
    """A value that is kept for the backward pass.

    Attributes:
      makers: the calls that contain its equation, outermost first, and the equation;
        none for an argument. The first is the loop, if it was moved out of one.
      size: in bytes.
      shape: its sizes, symbolic ones as 1.
      dtype: its dtype.
      of_argument: whether it is an argument, as it is or in another dtype.
    """

    makers: tuple[Eqn, ...]
    size: int
    shape: tuple[int, ...]
    dtype: np.dtype
    of_argument: bool


def saved_for_backward(
    fn: Callable[..., Sequence[jax.Array]],
    args: Sequence[jax.typing.ArrayLike | jax.ShapeDtypeStruct],
    differentiated: Sequence[int],
) -> list[Residual]:
    """Returns the residuals of `jax.vjp(fn)`, without constants.

    It is what differentiation saves, before XLA decides to compute it again, but for
    what no more than a derivative of the backward pass would read. Arguments are among
    them, though they take no memory that was not there before.

    Args:
      fn: a function of arrays.
      args: arrays or their shapes and dtypes.
      differentiated: the positions of the arguments to differentiate.
    """

    def residuals(*args: jax.Array) -> list[jax.Array]:
        def of_moving(*moving: jax.Array) -> Sequence[jax.Array]:
            given = dict(zip(differentiated, moving, strict=True))
            return fn(*(given.get(i, x) for i, x in enumerate(args)))

        results, backward = jax.vjp(of_moving, *(args[i] for i in differentiated))
        leaves, structure = jax.tree.flatten(backward)
        cotangents = jax.tree.map(_zero_cotangent, results)

        def run(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(jax.tree.unflatten(structure, leaves)(cotangents))

        # Only the backward pass of a `while_loop` says that there is none.
        program = binding.trace(run, leaves)
        read = inputs_read(program)
        if_differentiated = inputs_read(program, is_differentiated=True)
        # What a derivative of the backward pass alone would read XLA leaves out.
        return [
            x
            for x, runs, derives in zip(leaves, read, if_differentiated, strict=True)
            if runs or not derives
        ]

    jaxpr = jaxprs.body_of(binding.trace(residuals, args)).jaxpr
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    loops = _loops_of_moved(jaxpr.eqns)
    arguments = set(jaxpr.invars)
    kept = dict.fromkeys(
        v for v in jaxprs.variables(jaxpr.outvars) if v in made or v in arguments
    )
    avals = map(jaxprs.aval_of, kept)
    return [
        Residual(
            _with_loop(_makers(made, var), loops) if var in made else (),
            math.prod(as_counted(aval.shape)) * aval.dtype.itemsize,
            as_counted(aval.shape),
            aval.dtype,
            _origin(made, var) in arguments,
        )
        for var, aval in zip(kept, avals, strict=True)
    ]


def _loops_of_moved(eqns: Sequence[Eqn]) -> dict[Var, Eqn]:
    """Returns what was moved out of a loop: a result -> the loop.

    JAX computes once, before a loop, what all of its turns keep alike. Of the name
    scopes it leaves those inside of the body: not even `jvp` is around them.
    """
    found: dict[Var, Eqn] = {}
    loop = None
    for eqn in reversed(eqns):
        if scope_text.is_derived(jaxprs.scope_text(eqn)):
            loop = eqn if jaxprs.is_loop(eqn) else loop
        elif loop is not None:
            found.update(dict.fromkeys(eqn.outvars, loop))
    return found


def _with_loop(makers: tuple[Eqn, ...], loops: dict[Var, Eqn]) -> tuple[Eqn, ...]:
    loop = loops.get(makers[0].outvars[0])
    return makers if loop is None else (loop, *makers)


def _zero_cotangent(result: jax.Array) -> jax.Array | np.ndarray:
    if jnp.issubdtype(result.dtype, jnp.inexact):
        return jnp.zeros_like(result)
    return np.zeros(result.shape, jax.dtypes.float0)


def _origin(made: dict[Var, Eqn], atom: Atom) -> Atom:
    """Returns the value that `atom` is a copy of, in another dtype; or `atom` itself.

    A copy may be made in the body of a call, or in every turn of a loop of that turn's
    slice of an array.
    """
    if isinstance(atom, jaxprs.Literal) or atom not in made:
        return atom
    eqn = made[atom]
    if _hands_on(eqn):
        return _origin(made, eqn.invars[eqn.outvars.index(atom)])
    if _is_quantised(eqn):
        return _origin(made, _quantised(made, atom))
    bodies = jaxprs.inner_bodies(eqn)
    if not bodies:
        return atom
    body, operands = bodies[-1]
    inside = {v: inner for inner in body.jaxpr.eqns for v in inner.outvars}
    found = _origin(inside, body.jaxpr.outvars[eqn.outvars.index(atom)])
    if found not in body.jaxpr.invars:
        return atom
    operand = operands[body.jaxpr.invars.index(found)]
    return (
        atom if operand in jaxprs.carried(eqn) else _origin(made, eqn.invars[operand])
    )


def _is_quantised(eqn: Eqn) -> bool:
    """Whether an equation names 8 bits of an array, see `_quantised`."""
    return eqn.primitive.name == "name" and eqn.params["name"] in NAMES


def _quantised(made: dict[Var, Eqn], atom: Atom) -> Atom:
    """Returns the array of which a rewrite made 8 bits.

    Its gradient is stopped first.
    """
    while not isinstance(atom, jaxprs.Literal) and atom in made:
        eqn = made[atom]
        atom = eqn.invars[0]
        if eqn.primitive.name == "stop_gradient":
            break
    return atom


# A checkpoint rounds what it keeps to its own dtype. Each result of a barrier is one of
# its operands.
_COPIES = ("reduce_precision", "optimization_barrier")


def _hands_on(eqn: Eqn) -> bool:
    """Whether the results of an equation are its operands, in their or other dtypes."""
    name = eqn.primitive.name
    is_kept = name == "name" and eqn.params["name"] == KEPT
    return jaxprs.is_conversion(eqn) or is_kept or name in _COPIES


def _makers(made: dict[Var, Eqn], var: Var) -> tuple[Eqn, ...]:
    eqn = made[var]
    if _hands_on(eqn):
        source = eqn.invars[eqn.outvars.index(var)]
        if not isinstance(source, jaxprs.Literal) and source in made:
            return _makers(made, source)  # it saves nothing new
    bodies = jaxprs.inner_bodies(eqn)
    if not bodies:
        return (eqn,)
    jaxpr = bodies[-1].body.jaxpr
    inside = {v: inner for inner in jaxpr.eqns for v in inner.outvars}
    returned = jaxpr.outvars[eqn.outvars.index(var)]
    if isinstance(returned, jaxprs.Literal) or returned not in inside:
        return (eqn,)
    return (eqn, *_makers(inside, returned))
