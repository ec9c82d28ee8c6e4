"""What a trace found out about the results of a call, and how they are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jmp_amp.policies.dtypes import PyTree
from jmp_amp.transform.refusals import check_result
from jmp_amp.transform.successors import Successor

Unflatten = Callable[[Sequence[object]], PyTree]

# In the slot of an output: the next result of the program, the next nnx object.
ARRAY, OBJECT = object(), object()


class Input(NamedTuple):
    """In the slot of an output that is one of the inputs."""

    position: int


class Outputs(NamedTuple):
    """What a trace found out about the results of a call; holds no tracers.

    Attributes:
      unflatten: makes the results of their leaves.
      width: the number of these leaves.
      slots: for every leaf of the results, and then for every leaf of the nnx objects,
        where its value comes from: `ARRAY`, `OBJECT`, an `Input`, or the value.
      states: as in `TracedCall`.
      successors: by their places in `slots`, what may take that of a half array.
      merged: as in `nnx_modules.Written`.
    """

    unflatten: Unflatten
    width: int
    slots: list[object]
    states: list[np.dtype | None]
    successors: dict[int, Successor]
    merged: Callable[[Sequence[object]], list[object]]

    def returned(
        self, call: str, inputs: Sequence[PyTree], results: Sequence[PyTree]
    ) -> PyTree:
        """Returns the results of the call, and writes to nnx objects.

        Args:
          call: the caller's call as written, for errors.
          inputs, results: those of the program.
        """
        for slot in self.slots[: self.width]:
            if slot is not ARRAY and slot is not OBJECT:
                check_result(slot, call)
        filled = self._filled(inputs, results)
        made = iter(self.merged(filled[self.width :]))
        leaves = [next(made) if x is OBJECT else x for x in filled[: self.width]]
        return self.unflatten(leaves)

    def dtypes(
        self, inputs: Sequence[PyTree], results: Sequence[PyTree]
    ) -> list[np.dtype | None]:
        """Returns those of what is in the slots; None of what is no array."""
        filled = self._filled(inputs, results)
        return [
            x.dtype if slot is ARRAY or isinstance(slot, Input) else None
            for x, slot in zip(filled, self.slots, strict=True)
        ]

    def seen(self, inputs: Sequence[PyTree], results: Sequence[PyTree]) -> PyTree:
        """Returns the results of the call, and None in place of nnx objects."""
        filled = self._filled(inputs, results)[: self.width]
        return self.unflatten([None if x is OBJECT else x for x in filled])

    def _filled(
        self, inputs: Sequence[PyTree], results: Sequence[PyTree]
    ) -> list[PyTree]:
        """Returns what is in the slots."""
        remaining = iter(results)
        return [
            next(remaining)
            if slot is ARRAY
            else inputs[slot.position]
            if isinstance(slot, Input)
            else slot
            for slot in self.slots
        ]
