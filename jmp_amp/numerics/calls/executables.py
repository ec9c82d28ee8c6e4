"""Programs that were compiled before, and are used again.

A program is traced at every call: a function may close over what has changed since.
What XLA is given then says whether it is the same program. Nothing else does: not the
function, and not the shapes of its arguments.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from jmp_amp.numerics.calls.losses import check_traced
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Body

# Traces a function, and begins to compile it: the function, its arguments, and the
# options for the compiler, which are asked for when it was traced.
Compile = Callable[..., Future[jax.stages.Compiled]]

# Three programs of a diagnosis are large, and two are small.
_MOST = 15
# The text of a constant takes as long as half of the time to compile it.
_LARGE_CONSTANTS = 1 << 22
# Objects of Python that the text stands for, but does not tell apart: callbacks, what
# shards a custom call, and constants that are hidden arguments.
_OBJECTS = re.compile(
    r"custom_call @(?:\w*callback|CustomSPMDPartitioning|InspectSharding)"
    r"|stablehlo\.(?:send|recv)\b|\bjax\.const\b"
)


class Executables:
    """The last programs that a function was compiled to. Threads may share them."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[Hashable, Future[jax.stages.Compiled]]
        self._known = collections.OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def compiling(self, call: str) -> Iterator[Compile]:
        """Threads compile here, while the caller traces the next program.

        XLA holds no lock of Python. `call` is the caller's as written, for errors.
        """
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            # A mesh or a device that is the default is that of a new array too.
            default = jnp.zeros(()).sharding
        with ThreadPoolExecutor(max_workers=3) as pool:

            def compile_(
                fn: Callable[..., Any], *args: Any, options: Callable[[], dict]
            ) -> Future[jax.stages.Compiled]:
                # The text does not say which inputs were left out.
                traced = jax.jit(fn, keep_unused=True).trace(*args)
                check_traced(traced, args, call)
                lowered, how = traced.lower(), options()
                key = _key(traced, lowered, how, args)
                begin = functools.partial(
                    pool.submit, lowered.compile, compiler_options=how
                )
                return begin() if key is None else self.once((key, default), begin)

            yield compile_

    def once(
        self, key: Hashable, begin: Callable[[], Future[jax.stages.Compiled]]
    ) -> Future[jax.stages.Compiled]:
        """Returns what `begin` began when it was first called for the key.

        It is called again if that failed.
        """
        with self._lock:
            known = self._known.pop(key, None)
            if known is None or (known.done() and known.exception() is not None):
                known = begin()
            self._known[key] = known
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        return known


def _key(
    traced: jax.stages.Traced,
    lowered: jax.stages.Lowered,
    options: dict[str, Any],
    args: Sequence[Any],
) -> Hashable:
    """Returns what is equal for equal programs only; None if nothing is known to be."""
    bodies = [*_bodies(jaxprs.body_of(traced.jaxpr))]
    if sum(map(_constants, bodies)) > _LARGE_CONSTANTS:
        return None
    text = lowered.as_text()
    if _OBJECTS.search(text):
        return None
    return (
        hashlib.sha256(text.encode()).digest(),
        tuple(sorted(options.items())),
        # The text tells no keys of `jax.random` from integers.
        (lowered.in_tree, *traced.jaxpr.in_avals),
        (lowered.out_tree, *traced.jaxpr.out_avals),
        # It numbers devices, and does not say which they are.
        tuple(getattr(x, "sharding", None) for x in jax.tree.leaves(args)),
        tuple(place for body in bodies for place in _places(body)),
    )


def _bodies(body: Body, seen: set[int] | None = None) -> Iterator[Body]:
    """Yields a body and those inside of it, each once."""
    seen = set() if seen is None else seen
    if id(body.jaxpr) not in seen:
        seen.add(id(body.jaxpr))
        yield body
        for eqn in body.jaxpr.eqns:
            for inner in jaxprs.owned_bodies(eqn):
                yield from _bodies(inner, seen)


def _constants(body: Body) -> int:
    """Returns the bytes of the constants of a body."""
    # JAX can be told to hold all constants in literals.
    literals = (
        atom.val
        for eqn in body.jaxpr.eqns
        for atom in eqn.invars
        if isinstance(atom, jaxprs.Literal)
    )
    return sum(getattr(x, "nbytes", 0) for x in (*body.consts, *literals))


def _places(body: Body) -> Iterator[Hashable]:
    """Yields the devices that equations of a body name."""
    for eqn in body.jaxpr.eqns:
        for value in eqn.params.values():
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Mesh | Sharding | jax.Device):
                    yield each
