"""A matrix product of 8-bit floats, with its derivative; see `Fp8`.

The product is a plain `dot_general` of the restored operands: XLA folds the scales into
a product of 8-bit floats, and policies of `jax.checkpoint` see a product. Around it is
an identity with a derivative. It is a `custom_jvp`, so forward mode works. What it
saves are the 8-bit operands and their scales.

The cotangent of the result is quantised where it comes in, once for both products of
the backward pass. The tangent is not: it is linear. An identity that treats tangents
and cotangents differently is a linear equation that is solved by itself, but whose
transpose is solved by quantising.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.program import binding, jaxprs, scope_text, source_code
from jmp_amp.plan.program.jaxprs import Eqn, Value
from jmp_amp.plan.rewrites.f32_gradients import linear_in_f32
from jmp_amp.plan.rewrites.fp8_barriers import Barriers, barriers_of
from jmp_amp.plan.rewrites.fp8_choice import why_not
from jmp_amp.plan.rewrites.quantising import Quantised, quantise
from jmp_amp.plan.rewrites.rewriting import Readers, Rewrite
from jmp_amp.plan.tables.operations import OpClass
from jmp_amp.policies.dtypes import BF16, F32
from jmp_amp.policies.fp8 import Fp8

# What policies of `jax.checkpoint` see quantised operands as.
NAMES = ("fp8_lhs", "fp8_rhs")
_DEFAULT, _HIGHEST = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST


def fp8_product(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a low product, if the policy asks for it and it fits."""
    fp8 = at.region.policy.matmul
    if fp8 is None or at.rule.op_class is not OpClass.LOW or why_not(at) is not None:
        return None
    return _rewrite(fp8, Barriers())


@functools.lru_cache(maxsize=256)
def _rewrite(fp8: Fp8, barriers: Barriers) -> Rewrite:
    def beside(eqn: Eqn, readers: Readers) -> Rewrite:
        return _rewrite(fp8, barriers_of(eqn, readers))

    def bind(
        eqn: Eqn,
        dtype: np.dtype | None,
        operands: Sequence[Value],
        held: Mapping[int, Value] = MappingProxyType({}),
    ) -> Sequence[jax.Array]:
        moving = [held.get(i, x) for i, x in enumerate(operands)]
        return [_Product(eqn, fp8, barriers).of(*moving, *quantised(fp8, operands))]

    formats = f"{fp8.forward} x {fp8.forward} -> bf16"
    return Rewrite(bind, reason=formats, fp8=fp8, beside=beside, bind_f32=bind)


def quantised(fp8: Fp8, operands: Sequence[Value]) -> list[Quantised]:
    """Returns the operands of a product in 8 bits, each in a scope of its own."""
    found = []
    for i, (x, name) in enumerate(zip(operands, NAMES, strict=True)):
        with scope_text.noted("quantised", i):
            x = quantise(jax.lax.stop_gradient(x), fp8.forward_dtype)
            found.append(x.to_keep(name))
    return found


class _Product(NamedTuple):
    """A product of two bf16 arrays, given as quantised.

    Attributes:
      eqn: the `dot_general`.
      fp8: how it multiplies.
      barriers: where XLA is kept from fusing it.
    """

    eqn: Eqn
    fp8: Fp8
    barriers: Barriers

    def of(
        self, lhs: jax.Array, rhs: jax.Array, left: Quantised, right: Quantised
    ) -> jax.Array:
        """Returns the product.

        Args:
          lhs, rhs: it is differentiated with respect to them, and their gradients have
            their dtypes: bf16 or f32.
          left, right: the same, quantised.
        """

        @jax.custom_jvp
        def product(
            lhs: jax.Array,
            rhs: jax.Array,
            left: Quantised,
            right: Quantised,
            result: jax.Array,
        ) -> jax.Array:
            return result

        @functools.partial(product.defjvp, symbolic_zeros=True)
        def derivative(
            primals: tuple[jax.Array, jax.Array, Quantised, Quantised, jax.Array],
            tangents: Sequence[jax.Array | SymbolicZero],
        ) -> tuple[jax.Array, jax.Array]:
            lhs, rhs, left, right, result = primals
            once = _differentiable_once(_place(self.eqn))
            scales = once(left.scale, right.scale, lhs, rhs)
            kept = left.for_derivative(scales[0]), right.for_derivative(scales[1])
            again = product(lhs, rhs, left.read_again(), right.read_again(), result)
            return again, self.tangent(kept, tangents[:2])

        result = jax.lax.stop_gradient(self.forward(left, right))
        return product(lhs, rhs, left, right, result)

    def forward(self, left: Quantised, right: Quantised) -> jax.Array:
        left, right = self.apart(left.read_again(), right.read_again())
        precision = _DEFAULT if self.fp8.fast_accumulation else _HIGHEST
        result = self.dot(left.restored(BF16), right.restored(BF16), precision)
        return jax.lax.optimization_barrier(result) if self.barriers.result else result

    def apart(self, *operands: Quantised) -> tuple[Quantised, ...]:
        """Returns operands that XLA does not put beside those of other products."""
        if not self.barriers.operands:
            return operands
        return jax.lax.optimization_barrier(operands)

    def tangent(
        self,
        operands: tuple[Quantised, Quantised],
        tangents: Sequence[jax.Array | SymbolicZero],
    ) -> jax.Array:
        """Returns the tangent; its transpose is a product of 8-bit floats.

        Args:
          operands: both, quantised.
          tangents: of both; one of them may be a `SymbolicZero`.
        """
        moving = {
            i: t for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)
        }

        # Differentiation saves the arguments of a checkpoint: 8-bit floats and scales.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def tangent(
            operands: tuple[Quantised, ...], moving: dict[int, jax.Array]
        ) -> jax.Array:
            operands = self.apart(*operands)
            terms = []
            for i, moved in moving.items():
                other = operands[1 - i].restored(BF16)
                product = functools.partial(self.linear, i, other)
                if moved.dtype == F32:
                    terms.append(linear_in_f32(product, moved, BF16, [other]))
                else:
                    terms.append(product(moved))
            return self.quantised_backward(functools.reduce(jnp.add, terms))

        return tangent(operands, moving)

    def linear(self, i: int, other: jax.Array, moving: jax.Array) -> jax.Array:
        """Returns the product of a tangent of operand `i` and the other operand."""
        pair = (moving, other) if i == 0 else (other, moving)
        return self.dot(*pair, _HIGHEST)

    def quantised_backward(self, tangent: jax.Array) -> jax.Array:
        """Returns a tangent; its cotangent becomes 8-bit floats, times a scale."""

        def quantised(cotangent: jax.Array) -> jax.Array:
            if self.barriers.cotangent:
                cotangent = jax.lax.optimization_barrier(cotangent)
            return quantise(cotangent, self.fp8.backward_dtype).restored(BF16)

        return jax.lax.custom_linear_solve(
            lambda x: x,
            tangent,
            solve=lambda _, tangent: tangent,
            transpose_solve=lambda _, cotangent: quantised(cotangent),
        )

    def dot(
        self, lhs: jax.Array, rhs: jax.Array, precision: jax.lax.Precision
    ) -> jax.Array:
        (result,) = binding.bind(
            self.eqn,
            (lhs, rhs),
            precision=(precision, precision),
            preferred_element_type=BF16,
        )
        return result


def _place(eqn: Eqn) -> str:
    """Returns where a product is, in words."""
    module = scope_text.without_policies(jaxprs.scope_text(eqn)).strip("/")
    source = source_code.source_line(eqn)
    found = [f"in {module}"] * bool(module) + [f"at {source}"] * (source is not None)
    return " ".join(found)


@functools.lru_cache(maxsize=256)
def _differentiable_once(place: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns a function that returns both scales, and cannot be differentiated.

    To differentiate it is to differentiate a product a second time, which is an error:
    without it the second derivative would be that of constants, silently zero.
    """

    @jax.custom_jvp
    def differentiable_once(
        left: jax.Array, right: jax.Array, lhs: jax.Array, rhs: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return left, right

    @differentiable_once.defjvp
    def refuse(primals: object, tangents: object) -> NoReturn:
        raise NotImplementedError(
            f"a second derivative of the fp8 product {place}: rounding to 8 bits has "
            "first derivatives only. Use another policy where a function is "
            'differentiated twice: autocast(fn, "mixed_bfloat16"), or for a module '
            'PolicyMap("fp8", {"**/module": "mixed_bfloat16"}).'
        )

    return differentiable_once
