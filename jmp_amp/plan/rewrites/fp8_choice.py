"""Which matrix products run in 8-bit floats, and why the others do not; see `Fp8`."""

from __future__ import annotations

from jax.export import is_symbolic_dim

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.dataflow.values import Trait, unfit
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import Sides, is_larger, sides_of
from jmp_amp.plan.program.jaxprs import Eqn, aval_of
from jmp_amp.plan.tables.rules import asks_for_digits
from jmp_amp.policies.dtypes import BF16, F32
from jmp_amp.policies.fp8 import BLOCK, Fp8


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
    return _misfit(sides_of(at.eqn), at.eqn, fp8)


def _misfit(sides: Sides, eqn: Eqn, fp8: Fp8) -> str | None:
    (_, _), (batched, _) = eqn.params["dimension_numbers"]
    if batched:
        return "batched: such products run in bf16"
    for name, size in sides._asdict().items():
        if size % BLOCK or not size:
            # Write `16 * b` for a batch: `jax.export` knows of that what it needs.
            how = "may be" if is_symbolic_dim(size) else "is"
            return f"{name} = {size} {how} no multiple of {BLOCK}"
        if is_larger(fp8.min_size, size, unless_known=False):
            return f"{name} = {size} is below min_size = {fp8.min_size}"
    return None
