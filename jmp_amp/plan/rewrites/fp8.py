"""A matrix product of 8-bit floats, with its derivative; see `Fp8`.

An array becomes 8-bit floats and a scale: `q * scale` stands for it. XLA for NVIDIA
GPUs multiplies `q` as such where the product says so (`_dot`); elsewhere the restored
operands are multiplied, to the same numbers but for the order of sums. Policies of
`jax.checkpoint` see a product in both.

Around the product is an identity with a derivative. It is a `custom_jvp`, so forward
mode works, and it saves the 8-bit operands and their scales. The tangent is linear, so
it is not quantised: its transpose is a function of its own, which quantises the
cotangent once for both products of the backward pass.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.export import is_symbolic_dim
from jax.lax import DotAlgorithmPreset, Precision

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.dataflow.values import Trait, unfit
from jmp_amp.plan.program import binding, jaxprs, scope_text, source_code
from jmp_amp.plan.program.dimensions import Dimensions, is_larger, sides_of
from jmp_amp.plan.program.jaxprs import Eqn, Value, aval_of
from jmp_amp.plan.program.meshes import before_transpose
from jmp_amp.plan.rewrites.f32_gradients import linear_in_f32
from jmp_amp.plan.rewrites.linear import linear_function, nonzero
from jmp_amp.plan.rewrites.rewriting import Readers, Rewrite
from jmp_amp.plan.tables.operations import OpClass, Role, role_of
from jmp_amp.plan.tables.rules import asks_for_digits
from jmp_amp.policies.dtypes import BF16, F32
from jmp_amp.policies.fp8 import BLOCK, Fp8

# What policies of `jax.checkpoint` see quantised operands as.
NAMES = ("fp8_lhs", "fp8_rhs")
# Triton leaves a product with an algorithm alone, so that cuBLASLt gets it.
# JAX 0.12: `jax.export` and compilers without a GPU refuse 8 bits in an algorithm.
_HAS_ALGORITHMS = importlib.metadata.version("jax").startswith(("0.10.", "0.11."))
# XLA merges products that read and write no more, at a byte for each number that they
# read and two for a result.
_MERGED_BYTES = 64 * 2**20


def compute_capability() -> tuple[int, ...]:
    """Returns that of the least NVIDIA GPU at hand; without one, that of an H100."""
    found = (
        str(getattr(d, "compute_capability", "")).split(".") for d in jax.devices()
    )
    known = [tuple(map(int, n)) for n in found if all(map(str.isdigit, n))]
    return min(known, default=(9, 0))


def why_not(at: Standing) -> str | None:
    """Returns why a low operation does not run in 8 bits, in words.

    None if it does, or if the policy does not ask for it.
    """
    fp8 = at.region.policy.matmul
    if fp8 is None:
        return None
    if at.name == "conv_general_dilated":
        return "convolutions run in bf16"
    if at.name.startswith("ragged_dot"):
        return "the groups of a ragged product have no scales: bf16"
    if at.name != "dot_general":
        return None
    if any(aval_of(v).dtype != F32 for v in at.eqn.invars) or at.low != BF16:
        return "an operand has its dtype from the program"
    if unfit(at.operands, BF16) is not None or jaxprs.is_fixed(at.eqn):
        return "as the program asks"
    if asks_for_digits(at.eqn) is not None:
        return "precision was asked for"
    if any(Trait.TANGENT in v.traits for v in at.operands):
        return "a tangent of a derivative rule is not quantised"
    if Dimensions.of(at.eqn).batch[0]:
        return "batched: such products run in bf16"
    for name, size in sides_of(at.eqn)._asdict().items():
        if size % BLOCK or not size:
            # Write `16 * b` for a batch: `jax.export` knows of that what it needs.
            how = "may be" if is_symbolic_dim(size) else "is"
            return f"{name} = {size} {how} no multiple of {BLOCK}"
        if is_larger(fp8.min_size, size, unless_known=False):
            return f"{name} = {size} is below min_size = {fp8.min_size}"
    return None


def fp8_product(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a low product, if the policy asks for it and it fits."""
    fp8 = at.region.policy.matmul
    if fp8 is None or at.rule.op_class is not OpClass.LOW or why_not(at) is not None:
        return None
    return _Product(fp8).rewrite()


class Barriers(NamedTuple):
    """Where XLA is kept from fusing a product with what is around it.

    A barrier costs the fusion: they stand only where it does harm.

    Attributes:
      result: a gelu reads it, see `gelus`. XLA makes a product with gelu and then fails
        to compile if the product itself is kept too, as for a backward pass in a loop.
      cotangent: a bias is added to the product in f32. XLA would keep the f32 cotangent
        for the bias and quantise the same one: twice the bytes.
      operands: another product reads one of them, as the queries, keys and values of an
        attention read the same array. XLA would make one product of these, whose scales
        differ. It leaves large ones alone.
    """

    result: bool = False
    cotangent: bool = False
    operands: bool = False


def barriers_of(eqn: Eqn, readers: Readers) -> Barriers:
    """Returns those of a product, by what reads its result and its operands."""
    (result,) = eqn.outvars
    biased = any(
        role_of(reader.primitive.name) is Role.ADDS
        and len(jaxprs.variables(reader.invars)) > 1
        and F32 in reads
        for reader, reads in readers.of(result)
    )
    size = sum(aval_of(v).size for v in (*eqn.invars, result, result))
    others = (other for atom in eqn.invars for other, _ in readers.of(atom))
    shared = any(o is not eqn and o.primitive is eqn.primitive for o in others)
    is_small = not is_larger(size, _MERGED_BYTES, unless_known=False)
    return Barriers(result in readers.before_tanh, biased, shared and is_small)


class Quantised(NamedTuple):
    """An array as 8-bit floats `q` of its shape, and a scale: f32, a scalar."""

    q: jax.Array
    scale: jax.Array

    def restored(self, dtype: np.dtype) -> jax.Array:
        """Returns the array in `dtype`: exact in bf16, as the scale is a power of two.

        XLA finds an 8-bit product in this form too, unless Triton gets it before: a
        cast, times a scale in the same dtype, then the product.
        """
        return self.q.astype(dtype) * self.scale.astype(dtype)


def quantised(fp8: Fp8, operands: Sequence[Value]) -> list[Quantised]:
    """Returns the operands of a product in 8 bits, each in a scope of its own."""
    found = []
    for i, x in enumerate(operands):
        with scope_text.noted("quantised", i):
            found.append(quantise(jax.lax.stop_gradient(x), fp8.forward_dtype))
    return found


def quantise(x: jax.Array, dtype: np.dtype) -> Quantised:
    """Returns a floating array in 8 bits, rounded to nearest even in f32.

    An infinity becomes the largest number; NaN stays NaN.
    """
    # Magnitudes are exact in the dtype of the array.
    scale = scale_of(jnp.max(jnp.abs(x)).astype(F32), dtype)
    limit = float(jnp.finfo(dtype).max)
    # Most 8-bit formats have no infinity: a plain cast makes NaN of large numbers.
    q = jnp.clip(x.astype(F32) / scale, -limit, limit).astype(dtype)
    return Quantised(q, scale)


def scale_of(largest: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the scale that brings a magnitude to the largest number of a format.

    It is rounded up to a power of two, by the bits: `exp2` is not exact.

    Args:
      largest: f32, magnitudes; where it is 0 or not finite the scale is 1.
      dtype: the format.

    Returns:
      f32 of the shape of `largest`, at least the smallest normal number.
    """
    finfo, limit = jnp.finfo(F32), jnp.float32(jnp.finfo(dtype).max)
    usable = jnp.isfinite(largest) & (largest > 0)
    scale = jnp.where(usable, largest, limit) / limit
    scale = jnp.maximum(scale, finfo.smallest_normal)
    mantissa = np.uint32((1 << finfo.nmant) - 1)
    bits = (jax.lax.bitcast_convert_type(scale, jnp.uint32) + mantissa) & ~mantissa
    return jax.lax.bitcast_convert_type(bits, F32)


def _apart(x: Any, is_apart: bool) -> Any:
    """Returns a value that XLA does not fuse with what makes it, if it `is_apart`."""
    return jax.lax.optimization_barrier(x) if is_apart else x


_Both = Sequence[Quantised]
_Moving = Mapping[int, jax.Array]


class _Product(NamedTuple):
    """A product of two bf16 arrays, as it is multiplied.

    Attributes:
      fp8: as the policy asks.
      barriers: where XLA is kept from fusing it.
      restores: whether the operands are restored first on every device, and JAX derives
        the backward products. The numbers are the same: `diagnose` reads this form, and
        GPUs without units for 8 bits run it.
      eqn: the `dot_general`, once it is bound.
    """

    fp8: Fp8
    barriers: Barriers = Barriers()
    restores: bool = False
    eqn: Any = None

    def rewrite(self) -> Rewrite:
        """Returns the rewrite that binds this product."""
        return Rewrite(
            self.bind,
            reason=f"{self.fp8.forward} x {self.fp8.forward} -> bf16",
            fp8=self.fp8,
            beside=self.beside,
            takes_held=True,
            measured=None if self.restores else self._replace(restores=True).rewrite(),
        )

    def beside(self, eqn: Eqn, readers: Readers) -> Rewrite:
        """Returns the rewrite with the barriers that suit what is around."""
        return self._replace(barriers=barriers_of(eqn, readers)).rewrite()

    def bind(self, eqn: Eqn, _: Any, operands: Any) -> list[jax.Array]:
        """Runs the product; see `Rewrite`.

        What a policy of `jax.checkpoint` saves of floats that the program itself reads
        too, `jax.checkpoint` rounds by `lax.reduce_precision`, for which e4m3 ends at
        240: of larger numbers, up to 448, it makes NaN (jax/_src/ad_checkpoint.py,
        `_insert_reduce_precision`). So the program reads `both`, and `kept` is saved.
        """
        # GPUs multiply 8 bits from 8.9 on.
        restores = self.restores or compute_capability() < (8, 9)
        how = self._replace(restores=restores, eqn=eqn)

        @jax.custom_jvp
        def product(pair: Any, both: Any, kept: Any, result: jax.Array) -> jax.Array:
            return result

        @functools.partial(product.defjvp, symbolic_zeros=True)
        def derivative(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
            pair, both, kept, result = primals
            kept = _once(_place(eqn))(kept, pair)
            # Its arguments are saved: 8-bit floats and scales.
            tangent = jax.checkpoint(how.tangent, prevent_cse=False)
            moving = nonzero(enumerate(tangents[0]))
            return product(pair, both, both, result), tangent(kept, moving)

        both = quantised(self.fp8, [x.astype(BF16) for x in operands])
        names = zip(both, NAMES, strict=True)
        kept = [Quantised(*(checkpoint_name(x, n) for x in each)) for each, n in names]
        sharding = eqn.params["out_sharding"]
        result = how.dot(Dimensions.of(eqn), both, BF16, sharding, True)
        # Gradients have the dtypes of these: bf16 or f32.
        return [product(list(operands), both, kept, jax.lax.stop_gradient(result))]

    def tangent(self, operands: _Both, moving: _Moving) -> jax.Array:
        """Returns the tangent; its transpose multiplies 8-bit floats.

        Args:
          operands: both, quantised.
          moving: the tangents of both or of one, by their positions.
        """
        operands = _apart(operands, self.barriers.operands)
        restored = [x.restored(BF16) for x in operands]

        def linear(i: int, t: jax.Array) -> jax.Array:
            pair = [t.astype(BF16) if i == j else x for j, x in enumerate(restored)]
            return binding.bind(self.eqn, pair, **jaxprs.retyped(self.eqn, BF16))[0]

        def in_f32(i: int, t: jax.Array) -> jax.Array:
            half = functools.partial(linear, i)
            return linear_in_f32(half, t, BF16, restored) if t.dtype == F32 else half(t)

        if not self.restores:
            return linear_function(
                lambda ts: [functools.reduce(jnp.add, map(linear, moving, ts))],
                functools.partial(self.gradients, operands, moving),
                [*moving.values()],
                [x.scale for x in operands],
            )[0]
        return jax.lax.custom_linear_solve(
            lambda x: x,
            functools.reduce(jnp.add, map(in_f32, moving, moving.values())),
            solve=lambda _, tangent: tangent,
            transpose_solve=lambda _, g: self.cotangent(g).restored(BF16),
        )

    def gradients(self, operands: _Both, moving: _Moving, back: Any) -> list[jax.Array]:
        """Returns those of the operands that move, of the cotangent of the result."""
        found, g = [], self.cotangent(*back)
        for i, tangent in moving.items():
            dimensions, order = Dimensions.of(self.eqn).transposed(i)
            pair = [g, operands[1 - i]] if i == 0 else [operands[1 - i], g]
            sharding = before_transpose(tangent, order)
            made = self.dot(dimensions, pair, tangent.dtype, sharding, False)
            found.append(jax.lax.transpose(made, order))
        return found

    def cotangent(self, g: jax.Array) -> Quantised:
        return quantise(_apart(g, self.barriers.cotangent), self.fp8.backward_dtype)

    def dot(
        self, by: Dimensions, both: _Both, dtype: Any, sharding: Any, forward: bool
    ) -> jax.Array:
        """Returns a product of 8-bit floats, times their scales.

        Args:
          by: the dimensions.
          both: the operands.
          dtype: of the result.
          sharding: of the result, as `jax.lax.dot_general` takes it.
          forward: whether it is the forward product, not one of the backward pass.
        """
        fast = forward and self.fp8.fast_accumulation
        precision = Precision.DEFAULT if fast else Precision.HIGHEST
        algorithm = DotAlgorithmPreset["ANY_F8_ANY_F8_F32" + "_FAST_ACCUM" * fast]
        algorithm = algorithm if _HAS_ALGORITHMS else precision

        def multiplied(a: Any, b: Any, terms: Any, how: Any) -> jax.Array:
            numbers = terms, by.batch
            made = jax.lax.dot_general(a, b, numbers, how, dtype, out_sharding=sharding)
            return _apart(made, forward and self.barriers.result)

        def in_8_bits(both: _Both) -> jax.Array:
            (a, left), (b, right) = both
            terms, scale = by.terms, (left * right).astype(dtype)
            if a.ndim == b.ndim == 2 and terms == ((1,), (0,)):
                # Shardy would make it a plain `dot`, which has no algorithm.
                b, terms = b.T, ((1,), (1,))
            made = multiplied(a, b, terms, algorithm)
            if a.ndim - 1 not in terms[0]:
                return made * scale
            # The gradient of a weight reads activations by columns, so XLA lays out the
            # results of products alike. By rows the scale is no part of the product.
            return (made.T * scale).T

        def restored(dtype: np.dtype, both: _Both) -> jax.Array:
            a, b = (x.restored(dtype) for x in both)
            return multiplied(a, b, by.terms, precision)

        both = _apart(both, forward and self.barriers.operands)
        platforms = {} if self.restores else {"cuda": in_8_bits}
        # XLA for CPUs makes programs of bf16 x bf16 -> f32 that fail when they run.
        on_cpu = {"cpu": functools.partial(restored, F32)} if dtype == F32 else {}
        half = functools.partial(restored, BF16)
        return jax.lax.platform_dependent(both, **platforms, **on_cpu, default=half)


def _place(eqn: Eqn) -> str:
    """Returns where a product is, in words."""
    module = scope_text.without_policies(jaxprs.scope_text(eqn)).strip("/")
    source = source_code.source_line(eqn)
    found = [f"in {module}"] * bool(module) + [f"at {source}"] * (source is not None)
    return " ".join(found)


@functools.lru_cache(maxsize=256)
def _once(place: str) -> Callable[[Any, Any], Any]:
    """Returns an identity of 8-bit operands in which no pair can be differentiated.

    To differentiate it is to differentiate a product a second time, which is an error:
    without it the second derivative would be that of constants, silently zero.
    """

    @jax.custom_jvp
    def once(kept: Any, pair: Any) -> Any:
        return kept

    @once.defjvp
    def refuse(primals: object, tangents: object) -> NoReturn:
        raise NotImplementedError(
            f"a second derivative of the fp8 product {place}: rounding to 8 bits has "
            "first derivatives only. Use another policy where a function is "
            'differentiated twice: autocast(fn, "mixed_bfloat16"), or for a module '
            'PolicyMap("fp8", {"**/module": "mixed_bfloat16"}).'
        )

    return once
