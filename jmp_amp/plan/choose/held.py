"""The dtypes in which a body holds its values, as far as they are settled."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jmp_amp.plan.choose.flows import Flow, carry_dtype
from jmp_amp.plan.choose.modes import Demand, Demands, Dtypes, demand_of
from jmp_amp.plan.choose.uses import Use
from jmp_amp.plan.dataflow.values import Known, Origin, may_round, traced_dtype
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import as_number
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, Var, aval_of
from jmp_amp.plan.program.regions import Region
from jmp_amp.policies.dtypes import F32, is_half


class Held:
    """The dtypes that the variables of a body are held in, as far as it is settled."""

    def __init__(self, flow: Flow, inputs: Dtypes, alive: Sequence[bool]):
        """Begins with the inputs; `alive` says which are arguments of the program."""
        jaxpr = flow.body.jaxpr
        self.flow = flow
        self.dtypes: dict[Var, np.dtype | None] = {
            **dict(zip(jaxpr.invars, inputs, strict=True)),
            **{var: traced_dtype(var) for var in jaxpr.constvars},
        }
        inputs_alive = (v for v, each in zip(jaxpr.invars, alive, strict=True) if each)
        self._alive = {*jaxpr.constvars, *inputs_alive}

    def of(self, atom: Atom) -> np.dtype | None:
        return traced_dtype(atom) if isinstance(atom, Literal) else self.dtypes[atom]

    def is_alive(self, atom: Atom) -> bool:
        """Whether a value is an argument of the program or a constant."""
        return isinstance(atom, Literal) or atom in self._alive

    def free_in_f32(self) -> frozenset[Var]:
        """Returns the free f32 variables, see `Plan.cast_per_use`."""
        # The gradients of each use of one are cast to f32 and then summed.
        return frozenset(
            v
            for v, known in self.flow.known.items()
            if known.origin == Origin.FREE and self.dtypes[v] == F32
        )

    def handed_out(self, atom: Atom, use: Use) -> np.dtype | None:
        """Returns the dtype of an output of a body: half, if nobody reads it in f32."""
        region = self.flow.region
        dtype = self._handed_on(atom, region, use.demand)
        known = self.flow.of(atom)
        if known is None or known.origin == Origin.FREE:
            return dtype
        low = region.policy.compute_dtype
        half = (use.demand & Demands.DTYPES) == demand_of(low) and may_round(known)
        return low if half and dtype == F32 else dtype

    def handed_to(
        self, eqn: Eqn, views: Sequence[Known], uses: Sequence[Use]
    ) -> Dtypes:
        """Returns the dtype of each operand of a call."""
        carried = jaxprs.carried(eqn)
        return tuple(
            carry_dtype(view, eqn.invars[i])
            if i in carried
            else self.handed_in(eqn, i, view, use.demand)
            for i, (view, use) in enumerate(zip(views, uses, strict=True))
        )

    def handed_in(
        self, eqn: Eqn, position: int, view: Known, demand: Demand
    ) -> np.dtype | None:
        """Returns the dtype of the operand of a call at a position.

        If the body reads an activation in one dtype only, it gets the cast that the
        other consumers share; a checkpoint or a user's rule would keep the wider one. A
        loop adds up the gradients of its turns in the dtype in which it gets the value:
        n roundings to half are wrong by up to n eps / 2, so many turns get it in f32.
        """
        atom = eqn.invars[position]
        dtype = self._handed_on(atom, view.region, demand)
        if dtype is None or view.origin == Origin.FREE:
            return dtype
        low = view.region.policy.compute_dtype
        if position in jaxprs.read_every_turn(eqn) and aval_of(atom).dtype == F32:
            if as_number(jaxprs.repetitions(eqn)) * float(jnp.finfo(low).eps) > 1 / 8:
                return F32
        wanted = demand & Demands.DTYPES
        keeps = jaxprs.is_checkpoint(eqn) or jaxprs.is_custom_jvp(eqn)
        if wanted == Demands.F32 and view.is_shared and not keeps:
            return F32
        half = wanted == demand_of(low) and may_round(view)
        return low if half and dtype == F32 else dtype

    def _handed_on(self, atom: Atom, region: Region, demand: Demand) -> np.dtype | None:
        """Returns the dtype of a value that goes into or out of a body."""
        dtype, known = self.of(atom), self.flow.of(atom)
        if dtype is None or known is None:
            return dtype
        leaves = not known.region.holds(region)
        is_f32 = (demand & Demands.DTYPES) == Demands.F32
        if leaves and not is_f32 and not known.is_constant:
            output = known.region.policy.output_dtype
            return output if is_half(output) else dtype
        return dtype
