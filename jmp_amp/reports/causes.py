"""From an equation to what decided its dtype: back to an operand, or on to a reader.

A pin, an option or an operand is the cause of one equation. Its own cause is another
one, and so on, until a class, a caller or the program decides.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jmp_amp.plan.choose.modes import Demand, Demands, Mode
from jmp_amp.plan.dataflow.ends import Ends, end_of_operands
from jmp_amp.plan.dataflow.facts import Made, made_from
from jmp_amp.plan.dataflow.values import Known, Origin, Trait
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Var
from jmp_amp.plan.program.source_code import users_calls
from jmp_amp.plan.tables.operations import PRODUCTS, RANKS, OpClass, Role, role_of
from jmp_amp.policies.dtypes import F32, is_half
from jmp_amp.reports.ways import (
    Frame,
    Loop,
    Place,
    Reader,
    Returned,
    Use,
    made_by,
    makers,
    readers,
)

# The ends that a pin looks for, and what begins there.
_ENDS_OF_PINS = {
    "index": (Ends.INDEX, "Here it becomes an index"),
    "solved": (Ends.SOLVED | Ends.FACTOR, "Here the linear algebra begins"),
    "distance": (Ends.DISTANCE, "Here it meets the sum of squares of a distance"),
    "moment": (Ends.MOMENT, "Here squared means and a second moment are subtracted"),
}
# The readers on a way to an end that are told; a longer way is cut short.
_MOST_PASSED = 4


def _is_low(operand: Known) -> bool:
    return operand.origin == Origin.LOW


def _is_full(operand: Known) -> bool:
    return operand.origin == Origin.FULL


# What a pin looks for among the operands: what that is to it, and whether one is it.
_OPERANDS_OF_PINS: Mapping[str, tuple[str, Callable[[Known], bool]]] = {
    "grid": ("is the grid", lambda operand: operand.is_constant),
    "solution": ("is the solution", lambda operand: Trait.SOLUTION in operand.traits),
}


class Cause(NamedTuple):
    """A step of a chain.

    Attributes:
      words: how the cause is reached, or that the chain ends.
      place: the equation that is the cause; None at the end of a chain.
    """

    words: str
    place: Place | None = None


def pin_id(at: Place) -> str | None:
    """Returns the id of the pin that decided an equation, if one did."""
    decision = at.planned.decision
    if decision is None or decision.pin is None or at.planned.option is not None:
        return None
    return decision.pin.id


def causes_of(at: Place) -> list[Cause]:
    """Returns the steps from an equation to its cause; none if its class decided.

    The last step is an equation that has a cause of its own, or the end of the chain.
    """
    planned, decision, standing = at.planned, at.planned.decision, at.standing
    if decision is None or standing is None:
        return []
    if planned.option is not None:
        return _to_reader(at, planned.option.readers)
    if planned.mode in (Mode.CONVERSION, Mode.AS_TRACED):
        return []
    pin = pin_id(at)
    if pin in _ENDS_OF_PINS:
        return _to_end(at, *_ENDS_OF_PINS[pin])
    if pin == "recursion":
        return [_to_loop(at)]
    if pin == "derivative":
        return [Cause("It is a derivative of", _derived_from(at))]
    if pin is not None:
        return _to_beginning(at, *_OPERANDS_OF_PINS[pin])
    if planned.rule.op_class is not OpClass.FOLLOW:
        return []
    if decision.is_between:
        return _to_operand(at, "is half", _is_low)
    if decision.dtype == F32 and standing.origin == Origin.FULL:
        return _to_operand(at, "is f32", _is_full)
    if is_half(decision.dtype) and standing.origin == Origin.LOW:
        return _to_operand(at, "is half", _is_low)
    return []


def _to_loop(at: Place) -> Cause:
    """Returns the step to the loop of the recursion that a product is in."""
    around = at.frame.caller
    while around is not None and not jaxprs.is_loop(around.eqn):
        around = around.frame.caller
    if around is None:
        return Cause("It has a matrix that a recursion of a loop multiplies by")
    return Cause(f"No activation stands between it and the carry of {around.label}")


def _derived_from(at: Place) -> Place:
    """Returns the product in f32 that another one is a derivative of."""
    frame = at.frame
    while frame.caller is not None:
        frame = frame.caller.frame
    calls = users_calls(at.eqn)
    return next(
        each
        for each in frame.all_places()
        if each.eqn.primitive.name in PRODUCTS
        and each.planned.dtype == F32
        and users_calls(each.eqn) == calls
    )


def _to_beginning(at: Place, what: str, is_it: Callable[[Known], bool]) -> list[Cause]:
    """Returns the steps back to what made the operand that a pin looks for."""
    steps: list[Cause] = []
    place: Place | None = at
    while place is not None:
        found = _to_operand(place, what, is_it)
        steps += found
        place = found[0].place if found else None
    return steps


def _to_operand(at: Place, what: str, is_it: Callable[[Known], bool]) -> list[Cause]:
    """Returns the step to the first operand that is the cause."""
    assert at.standing is not None
    for i, view in enumerate(at.standing.views):
        if not is_it(view):
            continue
        made = list(makers(at.frame, at.eqn.invars[i]))
        places = [each for each in made if isinstance(each, Place)]
        # Of two branches, one may have made it in half.
        alike = [p for p in places if _origin(p) == view.origin] or places
        if alike:
            return [Cause(f"Its operand {i} {what}; that is", alike[0])]
        told = made_by(made[0])
        if isinstance(made[0], Loop):
            told += f", since {carry_words(made[0])}"
        return [Cause(f"Its operand {i} {what}: {told}")]
    return []


def _origin(at: Place) -> Origin | None:
    decision = at.planned.decision
    return None if decision is None else decision.result.origin


def _to_reader(at: Place, wanted: Demand) -> list[Cause]:
    """Returns the steps to the reader that an option of an equation asks for."""
    if wanted & Demands.RETURNED:
        return _to_keeper(at, wanted)
    for each in at.readers():
        if steps := _by_reader(each, wanted):
            return steps
    # A norm takes half precision, though it computes in f32.
    enters = "Its result enters, in half, the scope of a policy, with"
    uses = [each for each in at.readers() if isinstance(each, Use)]
    return [Cause(enters, each.place) for each in uses[:1]]


def _to_keeper(at: Place, wanted: Demand) -> list[Cause]:
    """Returns the shortest way to the program or the loop that keeps a value in f32."""
    for way, each in _ways(at, _hands_on):
        if not isinstance(each, Use) and (kept := _by_reader(each, wanted)):
            return [*_steps(way), *kept]
    return []


def _ways(
    at: Place, passes: Callable[[Place], bool]
) -> Iterator[tuple[tuple[Place, ...], Reader]]:
    """Yields the readers of a result and, through equations that pass it on, of theirs.

    Each comes with the equations on the way to it; the shortest ways are first.
    """
    ways: dict[Place, tuple[Place, ...]] = {at: ()}
    queue = collections.deque([at])
    while queue:
        place = queue.popleft()
        for each in place.readers():
            is_use = isinstance(each, Use)
            if is_use and each.place in ways:
                continue
            yield ways[place], each
            if is_use and passes(each.place):
                ways[each.place] = (*ways[place], each.place)
                queue.append(each.place)


def _hands_on(at: Place) -> bool:
    return at.planned.dtype == F32 or at.planned.mode is Mode.PASSED_ON


def _steps(way: tuple[Place, ...]) -> list[Cause]:
    """Returns the steps along a way of readers, all or the first ones and the last."""
    first = way[:-1][:_MOST_PASSED]
    steps = [Cause("Its result goes to", place) for place in first]
    more = len(way) - 1 - len(first)
    told = f"{more} steps later it is read by" if more else "It is read by"
    return [*steps, *(Cause(told, last) for last in way[-1:])]


def _by_reader(each: Reader, wanted: Demand) -> list[Cause]:
    """Returns the step to a reader that wants a value as an option says, if it does."""
    returned = bool(wanted & Demands.RETURNED)
    if isinstance(each, Returned):
        return [Cause(f"The program returns it as output {each.number}")] * returned
    if isinstance(each, Loop):
        return [Cause(f"The loop {each.place.label} carries it")] * (not returned)
    planned = each.place.planned
    reads = planned.reads[each.position]
    is_it = reads is not None and reads != F32 and not returned
    is_it &= planned.mode not in (Mode.AS_HELD, Mode.CONVERSION)
    return [Cause("Its result goes to", each.place)] * is_it


def _to_end(at: Place, end: int, words: str) -> list[Cause]:
    """Returns the shortest way to the reader at which an end begins."""
    for way, each in _ways(at, lambda place: _passes(place, end)):
        if isinstance(each, Use) and _begins(each.place, end):
            return [*_steps((*way, each.place)), Cause(words)]
    return []


def _begins(at: Place, end: int) -> bool:
    """Whether a value gets an end from this reader, whatever reads its result."""
    ranks = end == Ends.INDEX and at.eqn.primitive.name in RANKS
    return ranks or bool(_end_of_operands(at, Ends.NONE) & end)


def _passes(at: Place, end: int) -> bool:
    """Whether an end of the results of an equation is one of its operands too."""
    if at.standing is None:
        return False
    return bool(_end_of_operands(at, at.standing.end & end) & end)


def _end_of_operands(at: Place, results: int) -> int:
    facts = [] if at.standing is None else at.standing.facts
    made = made_from(at.eqn, facts) if facts else Made.NOTHING
    return end_of_operands(at.eqn, results, facts, made)


def carry_words(loop: Loop) -> str:
    """Returns why a loop carries a value in its dtype."""
    at, i = loop.place, loop.position
    if at.planned.reads[i] is None:
        return "it is never cast"
    if jaxprs.is_while(at.eqn):
        return "a while_loop keeps the dtype that it was traced in"
    inner = at.inner_results[0]
    turn = i - at.carried.start
    known = _known_inside(inner, inner.input_carried(turn))
    if known is None:
        return "no equation reads it"
    if Trait.CARRIED in known.traits:
        return "the loop keeps it over its turns"
    if known.origin == Origin.FREE:
        return "it is made of arguments and constants alone, and keeps its dtype"
    dtype = "half" if known.origin == Origin.LOW else "f32"
    for each in makers(at.frame, at.eqn.invars[i]):
        if isinstance(each, Place) and _origin(each) == known.origin:
            return f"its start is {dtype}: {made_by(each)}"
    for each in makers(inner, inner.plan.body.jaxpr.outvars[turn]):
        if isinstance(each, Place) and _origin(each) == known.origin:
            adds = role_of(each.eqn.primitive.name) in (Role.ADDS, Role.SUBTRACTS)
            terms = [m for v in each.eqn.invars for m in makers(each.frame, v)]
            if adds and loop in terms:
                return f"each turn adds to it, as to a state: {made_by(each)}"
            return f"a turn makes it in {dtype}: {made_by(each)}"
    return f"its start or a turn makes it in {dtype}"


def _known_inside(frame: Frame, var: Var) -> Known | None:
    """Returns what the readers of an input of a body know of it; None without any."""
    for each in readers(frame, var):
        if isinstance(each, Use) and each.place.standing is not None:
            return each.place.standing.views[each.position]
    return None
