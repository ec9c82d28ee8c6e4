"""Gradients that are sums: they are summed in f32, and some leave an operation in f32.

What is read many times, as a bias is in each row of a batch, has the sum of all their
cotangents as its gradient. JAX sums in the dtype that is read. XLA, for CPUs and for
GPUs, adds up half numbers in half: after a few hundred of them the sum stands still.
Here the sum reads half and adds in f32.

A parameter is held in f32 and read in half. JAX differentiates the operation that reads
it to one in half that sums: the product of a training step that makes the gradient of a
weight, the sum over a batch that makes that of a bias. Devices add up their sums, in
half. With `Policy.reduce_dtype` these operations read half and write f32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_amp.plan.dataflow.values import Known, Origin, castable, is_move
from jmp_amp.plan.program import binding, jaxprs, meshes
from jmp_amp.plan.program.dimensions import is_larger
from jmp_amp.plan.program.jaxprs import Eqn, Literal, Primitive, Value, aval_of
from jmp_amp.plan.program.regions import Region
from jmp_amp.plan.rewrites.linear import linear_function, nonzero
from jmp_amp.plan.rewrites.rewriting import Dtypes
from jmp_amp.plan.tables.operations import (
    Also,
    Kind,
    Role,
    is_cheap,
    kind_of,
    named,
    role_of,
)
from jmp_amp.policies.dtypes import F32, is_half

# What explain says of an operation.
NOTE = "its gradient leaves in f32"
Bound = Callable[[Sequence[Value]], Sequence[jax.Array]]
# Those that are cheap: others choose or scatter some of many elements.
_ELEMENTWISE = (Kind.FUNCTION, Kind.ARITHMETIC, Kind.SELECTION)
_COPIES = named(Also.REPEATS)
# Their derivatives save no operand that is smaller than the result.
_LINEAR = (Role.ADDS, Role.SUBTRACTS, Role.MULTIPLIES, Role.CHOOSES)


def f32_gradients(
    eqn: Eqn, region: Region, views: Sequence[Known], held: Dtypes, reads: Dtypes
) -> tuple[int, ...]:
    """Returns the operands of an equation whose gradients leave it in f32.

    Args:
      eqn: the equation, which calls nothing.
      region: where it is.
      views: what is known of its operands.
      held, reads: the dtypes in which they are held, and in which they are read.
    """
    reduces = region.asked.reduce_dtype is not None
    return tuple(
        i
        for i, (v, view) in enumerate(zip(eqn.invars, views, strict=True))
        if view.origin == Origin.FREE
        and not isinstance(v, Literal)
        and castable(v)
        and is_half(reads[i])
        and (held[i] == F32 or is_half(held[i]))
        and _sums_for(eqn, i, reduces)
    )


def moves_parameter(eqn: Eqn, region: Region) -> bool:
    """Whether a cast of f32 goes before the move `eqn`: it is that after it."""
    if region.asked.reduce_dtype is None or not is_move(eqn):
        return False
    looks_up = role_of(eqn.primitive.name) in (Role.LOOKS_UP, Role.TAKES)
    # After a move that writes more than it reads, the cast is fused with its reader.
    read, written = (
        sum(aval_of(v).size for v in atoms) for atoms in (eqn.invars, eqn.outvars)
    )
    grows = is_larger(written, read, unless_known=False)
    return not (looks_up or grows or jaxprs.is_conversion(eqn))


def _sums_for(eqn: Eqn, i: int, reduces: bool) -> bool:
    """Whether the gradient of operand `i` is a sum; of products if a policy says so."""
    if kind_of(eqn.primitive.name) is Kind.PRODUCT:
        return reduces and not jaxprs.is_fixed(eqn)
    return is_repeated(eqn, i)


def is_repeated(eqn: Eqn, i: int) -> bool:
    """Whether each element of operand `i` makes several elements of the result.

    A lookup says for itself what it sums, see `summed_lookup`.
    """
    name = eqn.primitive.name
    repeats = name in _COPIES or kind_of(name) in _ELEMENTWISE
    if not (repeats and is_cheap(name)) or role_of(name) is Role.LOOKS_UP:
        return False
    read, written = (aval_of(v).size for v in (eqn.invars[i], eqn.outvars[0]))
    return is_larger(written, read, unless_known=True)


@jax.custom_jvp
def as_cast(value: jax.Array, cast: jax.Array) -> jax.Array:
    """Returns `cast`, which is `value` in half precision; its derivative is the cast's.

    A moved parameter is cast before the move, so that devices send each other half. The
    gradient goes another way, around the move in half.
    """
    return cast


@as_cast.defjvp
def _(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    value, cast = primals
    return as_cast(value, cast), tangents[0].astype(cast.dtype)


def with_f32_gradients(
    eqn: Eqn,
    bound: Bound,
    operands: Sequence[Value],
    held: Mapping[int, Value],
) -> Sequence[jax.Array]:
    """Returns the result of an equation, some of whose gradients are made in f32.

    Args:
      eqn: the equation.
      bound: runs it on operands, and on what follows them.
      operands: these, as the plan reads them.
      held: those whose gradient leaves in f32, as they are held, by their positions.
    """

    @jax.custom_jvp
    def run(given: list[Value], held: dict[int, jax.Array]) -> jax.Array:
        (result,) = bound(given)
        return result

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def derivative(
        primals: tuple[list[Value], dict[int, jax.Array]],
        tangents: tuple[list[Any], dict[int, Any]],
    ) -> tuple[jax.Array, jax.Array]:
        given, held = primals
        # Policies of `jax.checkpoint` see a product.
        (result,) = bound(given)
        wide = nonzero(tangents[1].items())
        # What is read in half has a tangent as well: it is that of `held`.
        others = ((i, t) for i, t in enumerate(tangents[0]) if i not in held)
        moving = nonzero(others)
        terms = [_summed(eqn, bound, given, i, t, result) for i, t in wide.items()]
        if moving:
            terms.append(_tangent(bound, given, moving))
        return result, functools.reduce(jnp.add, terms)

    return [run(list(operands), dict(held))]


def _tangent(
    bound: Bound, given: Sequence[Value], moving: Mapping[int, jax.Array]
) -> jax.Array:
    """Returns the tangent of the result, given those of some operands."""

    def of_moving(moving: Mapping[int, jax.Array]) -> jax.Array:
        (result,) = bound([moving.get(i, x) for i, x in enumerate(given)])
        return result

    return jax.jvp(of_moving, ({i: given[i] for i in moving},), (dict(moving),))[1]


def _summed(
    eqn: Eqn,
    bound: Bound,
    given: Sequence[Value],
    i: int,
    tangent: jax.Array,
    result: jax.Array,
) -> jax.Array:
    """Returns the tangent of the result, given that of operand `i` in f32.

    Its transpose is in f32.
    """
    half = given[i].dtype
    if kind_of(eqn.primitive.name) is Kind.PRODUCT:
        others = [x for j, x in enumerate(given) if j != i]
        product = _Product(eqn.primitive, tuple(eqn.params.items()), i, half, eqn)
        return _linear(product, tangent, others).astype(result.dtype)
    # JAX transposes the broadcast to a sum, in f32.
    if is_move(eqn):
        (moved,) = binding.bind(eqn, [tangent])
        return moved.astype(half)

    along = functools.partial(jnp.broadcast_to, shape=result.shape)

    def of_wide(given: Sequence[Value], tangent: jax.Array) -> jax.Array:
        wide = [along(x) if j == i else x for j, x in enumerate(given)]
        return _tangent(bound, wide, {i: along(tangent).astype(half)})

    if role_of(eqn.primitive.name) not in _LINEAR:
        # It would save the operand as large as the result.
        of_wide = jax.checkpoint(of_wide, prevent_cse=False)
    return of_wide(given, tangent)


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product with one moving operand, equal to all that are alike.

    Attributes:
      primitive, params: of the equation.
      operand: the position of the operand.
      half: the dtype of the operands.
      eqn: the equation.
    """

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    operand: int
    half: np.dtype
    eqn: Eqn = dataclasses.field(compare=False)

    def of(self, others: Sequence[Value], moving: jax.Array) -> jax.Array:
        operands = list(others)
        operands.insert(self.operand, moving)
        retyped = jaxprs.retyped(self.eqn, self.half)
        (made,) = binding.bind(self.eqn, operands, **retyped)
        return made


# Jitted, to be traced once for all products of the same shapes.
@functools.partial(jax.jit, static_argnums=0)
def _linear(
    product: _Product, tangent: jax.Array, others: Sequence[jax.Array]
) -> jax.Array:
    """Returns a product of a tangent and of what else it reads."""
    floats = [x for x in others if is_half(x.dtype)]
    multiplied = functools.partial(product.of, others)
    return linear_in_f32(multiplied, tangent, product.half, floats)


def linear_in_f32(
    product: Callable[[jax.Array], jax.Array],
    tangent: jax.Array,
    half: np.dtype,
    others: Sequence[jax.Array],
) -> jax.Array:
    """Returns a product of a tangent; its transpose makes f32 of half operands.

    Args:
      product: of an operand in half precision, linear.
      tangent: of this operand, f32.
      half: the dtype of the operand.
      others: what else the product reads.
    """
    operand = jax.eval_shape(lambda x: x.astype(half), tangent)
    made = jax.eval_shape(product, operand)

    def transposed(cotangent: jax.Array) -> jax.Array:
        back = binding.trace(
            lambda x: jax.linear_transpose(product, operand)(x), [cotangent]
        )
        (found,) = _products_in_f32(jaxprs.body_of(back), [cotangent])
        return found

    (result,) = linear_function(
        lambda xs: [product(xs[0].astype(half))],
        lambda xs: [transposed(xs[0].astype(made.dtype))],
        [tangent],
        others,
    )
    return result


def product_in_f32(eqn: Eqn, operands: Sequence[Value]) -> list[jax.Array]:
    """Runs a product of half operands: its result is f32.

    XLA for CPUs makes programs of some that fail when they run (`rewrites.cpu`), so
    there the operands are cast. XLA for GPUs has no convolution of half operands with
    an f32 result and casts the operands too: on one device the result is half, and is
    cast. Several devices would add up what a convolution returns, before the cast.
    """
    is_convolution = eqn.primitive.name == "conv_general_dilated"
    is_rounded = is_convolution and not meshes.are_partitioned(operands)

    def product(casts: bool, made: np.dtype, *operands: jax.Array) -> jax.Array:
        if casts:
            operands = tuple(x.astype(F32) if is_half(x.dtype) else x for x in operands)
        (result,) = binding.bind(eqn, operands, preferred_element_type=made)
        return result.astype(F32)

    on_cpu = functools.partial(product, True, F32)
    made = operands[0].dtype if is_rounded else F32
    elsewhere = functools.partial(product, False, made)
    return [jax.lax.platform_dependent(*operands, cpu=on_cpu, default=elsewhere)]


def _products_in_f32(body: jaxprs.Body, args: Sequence[Value]) -> list[Value]:
    """Runs the transpose of a product: its result, and all behind it, is f32."""
    values = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
    values.update(zip(body.jaxpr.invars, args, strict=True))

    def read(atom: jaxprs.Atom) -> Value:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in body.jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        is_product = kind_of(eqn.primitive.name) is Kind.PRODUCT
        run = product_in_f32 if is_product else binding.bind
        results = run(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in body.jaxpr.outvars]
