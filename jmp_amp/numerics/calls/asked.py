"""What `tune` is asked for: its arguments, checked before anything runs."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Iterator, Sequence

import jax
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jmp_amp.numerics.calls.losses import LossCall
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap, as_policy_map

# Shows what is being done.
Say = Callable[[str], None]


def checked_bound(bound: object) -> float:
    """Returns a bound on the gradient error, if it is a positive, finite number."""
    written = f"tune(fn, max_grad_error={bound!r}): the bound is a"
    remedy = "Give the relative error that the gradient may have, such as 0.01."
    if isinstance(bound, bool) or not isinstance(bound, numbers.Real):
        raise TypeError(f"{written} number, found {type(bound).__name__}. {remedy}")
    value = float(bound)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{written} positive number. {remedy}")
    return value


def checked_candidates(candidates: object) -> tuple[Policy, ...]:
    """Returns the policies that modules may get, if they go from cheap to dear."""
    written = f"tune(fn, candidates={candidates!r})"
    if isinstance(candidates, str | Policy | PolicyMap) or not isinstance(
        candidates, Sequence
    ):
        raise TypeError(
            f"{written}: wanted a tuple of policies, from cheap to dear, such as "
            '("mixed_bfloat16", "float32").'
        )
    if not candidates:
        raise ValueError(
            f"{written}: there is no policy to give to a module. The usual one is "
            '("float32",).'
        )
    checked = []
    for each in candidates:
        found = as_policy_map(each, "tune(fn, candidates=({},))")
        if found.entries:
            raise TypeError(
                f"{written}: {str(found)!r} is a map. A candidate is one policy."
            )
        checked.append(found.default)
    sizes = [each.compute_dtype.itemsize for each in checked]
    if sizes != sorted(sizes):
        raise ValueError(
            f"{written}: candidates go from cheap to dear, because a module gets the "
            "first that is accurate enough. Put float32 last."
        )
    return tuple(checked)


def check_loss(loss: LossCall) -> None:
    """Raises a TypeError if a function returns no real scalar."""
    if loss.loss is None:
        returned = jax.tree.map(str, loss.call.traced.jaxpr.out_avals)
        raise TypeError(
            f"{loss.written}: fn has to return one real floating-point scalar, the "
            f"loss, but its results are {', '.join(returned) or 'no arrays'}. Tune the "
            "loss function; one that returns (loss, aux) wants has_aux=True."
        )


@contextlib.contextmanager
def shown(progress: bool) -> Iterator[Say]:
    """Shows what is being done, or nothing."""
    if not progress:
        yield lambda text: None
        return
    columns = (SpinnerColumn(), TextColumn("tune: {task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("tracing", total=None)
        yield lambda text: bar.update(task, description=text, refresh=True)
