"""The least to keep: a minimum cut between what is given and what is needed.

A value is two nodes with an edge of its bytes; to cut the edge is to keep the value.
What cannot be made again hangs on the source, and what a derivative needs on the sink.
What is made of a value has an edge from it that nothing cuts: it can be made again if
all that it is made of is there.

Source: the minimum cut of torch.compile (torch/_functorch/partitioners.py); the flow is
that of `scipy.sparse.csgraph.maximum_flow` (Dinic, 1970).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

# Capacities are 32-bit integers: all of them together stay below an edge that is never
# cut.
_TOTAL, _NEVER = 2**28, 2**30


class Cut(NamedTuple):
    """Which values are kept, and which are there in the backward pass without."""

    kept: np.ndarray
    made_again: np.ndarray


def minimum_cut(
    sizes: Sequence[int],
    edges: Sequence[tuple[int, int]],
    given: Sequence[int],
    needed: Sequence[int],
) -> Cut:
    """Returns the cut of the least size; of several, the one nearest to the needs.

    Args:
      sizes: what it costs to keep each value.
      edges: pairs of values, the second of which is made of the first.
      given: values that cannot be made again.
      needed: values that a derivative needs.

    Returns:
      Two arrays of bool, one for each value.
    """
    count = len(sizes)
    source, sink = 2 * count, 2 * count + 1
    unit = max(1, -(-sum(sizes) // _TOTAL))
    arcs = {(2 * a + 1, 2 * b): _NEVER for a, b in edges}
    arcs.update(((source, 2 * v), _NEVER) for v in given)
    arcs.update(((2 * v + 1, sink), _NEVER) for v in needed)
    arcs.update(((2 * v, 2 * v + 1), -(-sizes[v] // unit)) for v in range(count))
    starts, stops = np.array(list(arcs), np.int32).reshape(-1, 2).T
    capacities = np.array(list(arcs.values()), np.int32)
    graph = csr_matrix((capacities, (starts, stops)), shape=(2 * count + 2,) * 2)
    left = graph - maximum_flow(graph, source, sink).flow
    # What still leads to the sink: against the direction of what is left.
    backward = csr_matrix((left > 0).T)
    reached = np.zeros(2 * count + 2, bool)
    reached[breadth_first_order(backward, sink, return_predecessors=False)] = True
    into, out = reached[:-2:2], reached[1:-2:2]
    return Cut(out & ~into, out & into)
