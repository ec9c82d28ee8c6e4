"""Blocks: consecutive equations, of which the backward pass makes some again.

A block is differentiated as one: of what its equations make, the cut is kept, and what
cannot be made again. It is consecutive, so that the cotangents of a value are added up
in the order of the program.
"""

from __future__ import annotations

import bisect
import collections
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np

from jmp_amp.plan.choose.flows import Flow
from jmp_amp.plan.choose.held import Held
from jmp_amp.plan.plan import Block, Key, Plan, Result
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import elements_of, is_larger
from jmp_amp.plan.program.jaxprs import Eqn, Var, aval_of
from jmp_amp.plan.saved.cut import Cut, minimum_cut
from jmp_amp.plan.saved.needs import Part, is_cheap, part_of
from jmp_amp.plan.saved.values import NEEDED, Node, Path, Values
from jmp_amp.plan.tables.operations import Also, Role, named, role_of

# A barrier costs launches, of 2 microseconds each on an H100: about as long as it takes
# to write and to read this.
_BARRIER_BYTES = 3 * 2**19
_ONCE = named(Also.ONCE)
# JAX goes through all equations of a block for each value that it keeps.
_LONGEST = 256


class Saving(enum.Enum):
    """What differentiation saves of what a body computes."""

    NOTHING = "nothing: it is computed again, or has a derivative of its own"
    BESIDE = "for a backward pass in the same computation, which XLA sees with it"
    IN_LOOP = "for a backward pass in another loop"

    def inside(self, eqn: Eqn) -> Saving:
        """Returns what is saved of the bodies of a call, a loop or a branch."""
        is_written_out = part_of(eqn) is Part.HELPER
        if is_written_out or not jaxprs.saves_residuals(eqn):
            return Saving.NOTHING
        if self is Saving.NOTHING:
            return self
        return Saving.IN_LOOP if jaxprs.is_loop(eqn) else self


class Blocks(NamedTuple):
    """The blocks of a body.

    Attributes:
      blocks: these.
      needs: which inputs of the body its backward pass needs.
      rounded: f32 values that are to be kept in half.
    """

    blocks: tuple[Block, ...] = ()
    needs: tuple[bool, ...] | None = None
    rounded: frozenset[Var] = frozenset()


def find_blocks(flow: Flow, plan: Plan, held: Held, saving: Saving) -> Blocks:
    """Returns the blocks of a body.

    Args:
      flow: the forward pass over it.
      plan: its plan, without blocks.
      held: the dtypes of its variables, and which are arguments of the program.
      saving: what differentiation saves of it.
    """
    if saving is Saving.NOTHING:
        return Blocks()
    in_loop = saving is Saving.IN_LOOP
    values = Values(flow, plan, held, in_loop)
    # Arguments and constants are alive anyway. What is made of them alone is made once:
    # XLA sees both uses, and JAX makes what is the same in all turns before a loop.
    # What is made of a slice is made again.
    there = [
        node.is_free and not (in_loop and node.path and node.is_slice)
        for node in values.nodes
    ]
    sections = _sections(values.ends)
    cut, again = _cut(values, there, sections, in_loop)
    breaks = list(_breaks(values.nodes, _merged(_spans(values, again))))
    if breaks:
        sections = _sections(values.ends, breaks)
        cut, again = _cut(values, there, sections, in_loop)
    needs = tuple(
        cut.kept[i] or (there[i] and _is_read_backward(values.nodes[i], again))
        for i in values.inputs
    )
    rounded = frozenset(
        node.key[0]
        for i, node in enumerate(values.nodes)
        if in_loop and cut.kept[i] and _rounds(node)
    )
    return Blocks(tuple(_blocks(values, plan, again, cut, saving)), needs, rounded)


def _rounds(node: Node) -> bool:
    """Whether a value is kept in half: one operation on half values made it."""
    return node.may_round and not (node.is_free or node.keeps_result)


def _cut(
    values: Values,
    there: Sequence[bool],
    sections: Callable[[int], int],
    in_loop: bool,
) -> tuple[Cut, set[int]]:
    """Returns the cut of the values, and those of them that are made again.

    Args:
      values: of a body.
      there: which of them are alive anyway.
      sections: the section of each position. What one section makes, no other section
        makes again.
      in_loop: whether what may be kept in half is.
    """
    given, needed, edges, sizes = [], [], [], []
    for i, node in enumerate(values.nodes):
        free = there[i] or node.anyway
        # Of two of one size, the one that is written anyway.
        size = node.size // 2 + 2 if in_loop and _rounds(node) else node.size
        sizes.append(0 if free else 4 * size + (not node.is_written))
        if there[i]:
            continue
        edges += [(j, i) for j in set(node.made_of) if not there[j]]
        here = sections(node.position)
        node.crosses = node.again and any(sections(at) != here for at, _ in node.uses)
        if node.crosses or not node.again:
            given.append(i)
        if node.is_needed:
            needed.append(i)
    cut = minimum_cut(sizes, edges, given, needed)
    again = {
        i
        for i, node in enumerate(values.nodes)
        if cut.made_again[i] and node.path and not there[i]
    }
    return cut, again


def _sections(ends: Sequence[int], breaks: Sequence[int] = ()) -> Callable[[int], int]:
    """Returns what tells the section of a position: an end has one of its own."""
    starts = sorted({*ends, *(at + 1 for at in ends), *breaks})
    return functools.partial(bisect.bisect_right, starts)


def _breaks(nodes: Sequence[Node], spans: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yields where long spans are broken: where the fewest bytes cross.

    These are bytes of values that could be made again. Others are kept in any case.
    """
    crossing: collections.Counter[int] = collections.Counter()
    for node in nodes:
        if node.again and node.path and node.uses:
            crossing[node.position + 1] += node.size
            crossing[max(at for at, _ in node.uses) + 1] -= node.size
    last = max(crossing, default=0)
    sizes = list(itertools.accumulate(crossing[at] for at in range(last + 1)))
    for start, stop in spans:
        while stop - start > _LONGEST:
            places = range(start + _LONGEST // 2, start + _LONGEST + 1)
            start = min(places, key=lambda at: (sizes[at], -at))
            yield start


def _is_read_backward(node: Node, again: Set[int]) -> bool:
    return any(use == NEEDED or use in again for _, use in node.uses)


def _blocks(
    values: Values,
    plan: Plan,
    again: Set[int],
    cut: Cut,
    saving: Saving,
) -> Iterator[Block]:
    """Yields the blocks in which the nodes `again` are made again."""
    nodes = values.nodes
    inside = _made_inside(nodes)
    spans = _merged(_spans(values, again))
    for (start, stop), (limit, _) in itertools.pairwise(
        [*spans, (len(plan.equations), 0)]
    ):
        within = inside(start, stop)
        made = [i for i in within if i in again]
        apart = saving is Saving.BESIDE and _is_kept_by_xla(made, nodes)
        if apart:
            stop = _nearest_end(plan, start, stop, limit)
            within = inside(start, stop)
            made = [i for i in within if i in again]
        kept, results = _kept([nodes[i] for i in within if cut.kept[i]])
        read = {j for i in within for j in nodes[i].made_of}
        around = {
            nodes[j].key[0]
            for j in read
            if nodes[j].position < start and (nodes[j].is_free or nodes[j].crosses)
        }
        yield Block(
            start,
            stop,
            kept,
            results,
            frozenset(nodes[i].path for i in made if nodes[i].operation),
            frozenset(around),
            apart,
        )


def _made_inside(nodes: Sequence[Node]) -> Callable[[int, int], list[int]]:
    """Returns what tells the nodes that a span of equations makes."""
    made_at: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        made_at.setdefault(node.position, []).append(i)
    return lambda start, stop: [
        i for at in range(start, stop) for i in made_at.get(at, ())
    ]


def _kept(
    nodes: Sequence[Node],
) -> tuple[dict[Path, frozenset[Key]], frozenset[Result]]:
    """Returns `Block.kept` and `Block.results` of the nodes that a block keeps."""
    kept, results = dict[Path, set[Key]](), set[Result]()
    for node in nodes:
        if node.keeps_result and node.dtype is not None:
            shape = aval_of(node.key[0]).shape
            results.add(Result(node.operation, node.dtype, shape))
        else:
            kept.setdefault(node.path[:-1], set()).add(node.key)
    return {path: frozenset(keys) for path, keys in kept.items()}, frozenset(results)


def _spans(values: Values, again: Set[int]) -> Iterator[tuple[int, int]]:
    """Yields where a block has to be: from what it makes again to what reads it."""
    for at in values.derived:
        yield at, at + 1
    for i in again:
        node = values.nodes[i]
        read = (at for at, use in node.uses if use == NEEDED or use in again)
        yield node.position, max(read, default=node.position) + 1


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns spans that do not overlap, in their order."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            first, last = merged.pop()
            start, stop = first, max(stop, last)
        merged.append((start, stop))
    return merged


def _nearest_end(plan: Plan, start: int, stop: int, limit: int) -> int:
    """Returns the end of a block, up to `limit`, that the fewest elements pass.

    The cotangents of what leaves a block are in memory before the block is computed
    again. A sum has fewer of them than its terms.
    """
    eqns = plan.body.jaxpr.eqns
    last = stop
    while last < limit and part_of(eqns[last]) is not Part.END and is_cheap(eqns[last]):
        last += 1
    leaving = _leaving(plan, start, last)
    return min(range(stop, last + 1), key=lambda end: leaving[end - start - 1])


def _leaving(plan: Plan, start: int, stop: int) -> list[int]:
    """Returns how many elements leave each span from `start` on, up to `stop`."""
    found, total, leaves = list[int](), 0, set[Var]()
    for at, eqn in enumerate(plan.body.jaxpr.eqns[start:stop], start):
        for var in eqn.outvars:
            if jaxprs.is_floating(var) and plan.last_read.get((var, None), -1) > at:
                leaves.add(var)
                total += elements_of(aval_of(var).shape)
        read = {atom for atom in eqn.invars if isinstance(atom, Var)}
        for var in read & leaves:
            if plan.last_read[var, None] == at:
                leaves.remove(var)
                total -= elements_of(aval_of(var).shape)
        found.append(total)
    return found


def _is_large(node: Node) -> bool:
    """Whether it takes longer to write and read a value than to start more kernels."""
    size = aval_of(node.key[0]).size * np.dtype(node.dtype).itemsize
    return is_larger(size, _BARRIER_BYTES, unless_known=True)


def _is_kept_by_xla(made: Sequence[int], nodes: Sequence[Node]) -> bool:
    """Whether XLA would keep what is made again, if it saw both computations as one.

    What most operations make it makes again by itself, fused with what reads it. What a
    product reads it has in memory. It computes dear functions once for all readers, and
    before a softmax every function: several kernels read what the softmax takes the
    maximum of.
    """
    functions: set[int] = set()
    for i in made:
        node = nodes[i]
        is_dear = node.operation in _ONCE and _is_large(node)
        if is_dear or node.is_operand:
            return True
        is_of_function = not functions.isdisjoint(node.made_of)
        if is_of_function and node.operation == "reduce_max":
            return True
        if is_of_function or role_of(node.operation) is Role.CURVES:
            functions.add(i)
    return False
