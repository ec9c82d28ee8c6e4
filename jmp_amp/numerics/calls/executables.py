"""How programs that are measured are compiled, and used again.

Every rounding is kept.

A program is traced at every call: a function may close over what has changed since.
What XLA is given then says whether it is the same program. Nothing else does: not the
function, and not the shapes of its arguments.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from jmp_amp.numerics.calls.losses import check_traced
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Body

# XLA may drop a cast to half and its inverse, and its CPU compiler does.
_EXACT: dict[str, Any] = {"xla_allow_excess_precision": False}
# LLVM's own optimisations take most of the time to compile for a CPU.
# Kernels that are split among several modules take longer, in all.
_FAST: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if version("jax").startswith("0.10."):  # JAX < 0.11: later ones have no other kind.
    _FAST["xla_cpu_use_fusion_emitters"] = False
_Compiling = Future[jax.stages.Compiled]
# Traces a function, and begins to compile it: the function, its arguments, and the
# options for the compiler, which are asked for when it was traced.
Compile = Callable[..., _Compiling]

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
        self._known: dict[Hashable, _Compiling] = {}
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
            ) -> _Compiling:
                # The text does not say which inputs were left out.
                traced = jax.jit(fn, keep_unused=True).trace(*args)
                check_traced(traced, args, call)
                lowered, how = traced.lower(), options()
                key = _key(traced, lowered, how, args)

                def begin() -> _Compiling:
                    return pool.submit(lowered.compile, compiler_options=how)

                return begin() if key is None else self.once((key, default), begin)

            yield compile_

    def once(self, key: Hashable, begin: Callable[[], _Compiling]) -> _Compiling:
        """Returns what `begin` began for the key; it begins again if that failed."""
        with self._lock:
            known = self._known.pop(key, None)
            if known is None or (known.done() and known.exception() is not None):
                known = begin()
            self._known[key] = known
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        return known


def _key(
    traced: jax.stages.Traced,
    lowered: jax.stages.Lowered,
    options: dict[str, Any],
    args: Sequence[Any],
) -> Hashable:
    """Returns what is equal for equal programs only; None if nothing is known to be."""
    bodies = [*_bodies(jaxprs.body_of(traced.jaxpr))]
    eqns = [eqn for body in bodies for eqn in body.jaxpr.eqns]
    constants = [x for body in bodies for x in body.consts]
    # JAX can be told to hold all constants in literals.
    atoms = (atom for eqn in eqns for atom in eqn.invars)
    constants += (atom.val for atom in atoms if isinstance(atom, jaxprs.Literal))
    if sum(getattr(x, "nbytes", 0) for x in constants) > _LARGE_CONSTANTS:
        return None
    text = lowered.as_text()
    if _OBJECTS.search(text):
        return None
    named = jax.tree.leaves([list(eqn.params.values()) for eqn in eqns])
    return (
        hashlib.sha256(text.encode()).digest(),
        tuple(sorted(options.items())),
        # The text tells no keys of `jax.random` from integers.
        (lowered.in_tree, *traced.jaxpr.in_avals),
        (lowered.out_tree, *traced.jaxpr.out_avals),
        # It numbers devices, and does not say which they are.
        tuple(getattr(x, "sharding", None) for x in jax.tree.leaves(args)),
        tuple(x for x in named if isinstance(x, Mesh | Sharding | jax.Device)),
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


def compiler_options(fast: bool = False) -> dict[str, Any]:
    """Returns the options for `jax.stages.Lowered.compile`.

    `fast` is for a program that runs seldom or is small: on a CPU it is compiled fast
    then, and runs about four times as long.
    """
    return _EXACT | _FAST if fast and jax.default_backend() == "cpu" else _EXACT


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Programs run here to their end, and compiled, whatever JAX was told to debug.

    With `jax_debug_nans` JAX stops at the value that is looked for.
    """
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
        yield
