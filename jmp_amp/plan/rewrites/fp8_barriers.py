"""Where XLA is kept from fusing an fp8 product with what is around it."""

from __future__ import annotations

from typing import NamedTuple

from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import is_larger
from jmp_amp.plan.program.jaxprs import Eqn, aval_of
from jmp_amp.plan.rewrites.rewriting import Readers
from jmp_amp.plan.tables.operations import Role, role_of
from jmp_amp.policies.dtypes import BF16, F32

# XLA merges small products (xla_gpu_dot_merger_threshold_mb). It was seen to leave
# those alone that read and write 72 MiB.
_MERGED_BYTES = 64 * 2**20


class Barriers(NamedTuple):
    """Where XLA is kept from fusing a product with what is around it.

    A barrier costs the fusion: they stand only where it does harm.

    Attributes:
      result: a gelu reads it, see `gelus`. XLA makes a product with gelu and then fails
        to compile if the product itself is kept too, as for a backward pass in a loop.
      cotangent: a bias is added to the product in f32. XLA would keep the f32 cotangent
        for the bias and quantise the same one: twice the bytes.
      operands: another product reads one of them, as the queries, keys and values of an
        attention read the same array. XLA would make one product of these, in bf16: the
        scales of what it puts side by side differ. It leaves large ones alone.
    """

    result: bool = False
    cotangent: bool = False
    operands: bool = False


def barriers_of(eqn: Eqn, readers: Readers) -> Barriers:
    """Returns the barriers of a product, by what reads its result and its operands."""
    (result,) = eqn.outvars
    biased = any(
        role_of(reader.primitive.name) is Role.ADDS
        and len(jaxprs.variables(reader.invars)) > 1
        and F32 in reads
        for reader, reads in readers.of(result)
    )
    return Barriers(result in readers.before_tanh, biased, _may_be_merged(eqn, readers))


def _may_be_merged(eqn: Eqn, readers: Readers) -> bool:
    """Whether XLA may make one product of this one and another of the same operand."""
    arrays = map(aval_of, (*eqn.invars, *eqn.outvars))
    size = sum(x.size for x in arrays) * BF16.itemsize
    return not is_larger(size, _MERGED_BYTES, unless_known=False) and any(
        other is not eqn and other.primitive is eqn.primitive
        for atom in eqn.invars
        for other, _ in readers.of(atom)
    )
