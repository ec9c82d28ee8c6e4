"""The command line: `python -m jmp_amp explain package.module:function`.

`diagnose` runs the function and measures its numbers, `tune` looks for the policies
that keep its gradient accurate, `doctor` looks at the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import html
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jax

import jmp_amp
from jmp_amp import plots
from jmp_amp.doctor import examine
from jmp_amp.numerics.diagnose import diagnosis_tables
from jmp_amp.numerics.diagnose.diagnosing import diagnose
from jmp_amp.numerics.tune import tuning
from jmp_amp.numerics.tune.tuner import NoPoliciesError, tune
from jmp_amp.plan.program.cpu_target import TARGETS
from jmp_amp.policies.dtypes import AnyFn
from jmp_amp.policies.policy_map import PolicyMap, as_policy_map
from jmp_amp.reports import report_tables
from jmp_amp.reports.explaining import explain
from jmp_amp.training.loss_scale import LossScale, static_loss_scale

_EXPLAIN = """\
Prints what autocast would do to a function: the dtype of its operations and why, the
casts, the operations of matrix products in half precision, the bytes that are kept for
the backward pass. Nothing of the function is executed.

Its arguments come from a function next to it, by default <function>_args, which takes
nothing and returns a tuple of them, or such a tuple and a dictionary of keyword
arguments. A jax.ShapeDtypeStruct will do for an array.
"""

_DIAGNOSE = """\
Runs a function as it is and under the policy, and its gradient if it returns a loss.
Prints where a value first became infinite or NaN, what half precision cannot hold, the
loss scale and the policy that the numbers ask for. The exit status is 1 if the value, a
gradient or an operation's result from finite operands is not finite.

Its arguments are arrays: they come from a function next to it, as for `explain`. The
first one is what the gradient is taken of.
"""

_TUNE = """\
Looks for the policies by module that keep the error of a loss's gradient below a bound,
with as many matrix products in half precision as can be, and prints them as text that
--policy and amp.autocast read. The function runs some hundred times. The exit status is
1 if no policy meets the bound.

Its arguments are arrays: they come from a function next to it, as for `explain`. The
first one is what the gradient is taken of.
"""

_EXAMPLE = """\
example, for a function `loss(params, batch)` in train.py:

  def loss_args():            # in train.py too: what `loss` is called with
      return params, batch

  python -m jmp_amp explain train:loss
  python -m jmp_amp diagnose train:loss --policy mixed_float16 --html numbers.html

The exit status is 0 if all is well, 1 if something is not or the function raised, 2 for
a mistake in the command.
"""

_DOCTOR = """\
Prints what this machine computes with, which half dtype and recipe suit it and why, and
trains a small model in mixed precision beside f32. The exit status is 1 if something
does not hold.
"""


# What `add_subparsers` returns; argparse has no public name for it.
_Commands = Any


class _Mistake(Exception):
    """A mistake of the caller, in words."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    It is 2 for a caller's mistake; 1 if `doctor` finds that something does not hold,
    `diagnose` that something is not finite, or `tune` no policy. What the caller's
    function raises is raised here; as a command it ends with 1 and its traceback.

    Args:
      argv: the words of the command; by default those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jmp_amp",
        description="Mixed precision for JAX and Flax: looks at a function of yours.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"jmp_amp {jmp_amp.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(run=lambda options: parser.print_help() or 0)
    commands = parser.add_subparsers(metavar="command")
    _add_explain(commands)
    _add_diagnose(commands)
    _add_tune(commands)
    command = commands.add_parser(
        "doctor",
        help="print what this machine can do, and try it",
        description=_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_doctor)
    command.add_argument("--json", action="store_true", help="print it as JSON")
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except _Mistake as mistake:
        print(f"python -m jmp_amp: {mistake}", file=sys.stderr)
        return 2


def _add_explain(commands: _Commands) -> None:
    command = _about_a_function(
        commands,
        "explain",
        "print what autocast would do to a function",
        _EXPLAIN,
        "mixed_bfloat16",
        report_tables.SORTS,
    )
    command.set_defaults(run=_explain)
    command.add_argument(
        "--equations", action="store_true", help="print every equation too"
    )


def _add_diagnose(commands: _Commands) -> None:
    command = _about_a_function(
        commands,
        "diagnose",
        "run a function, and print what its numbers do",
        _DIAGNOSE,
        "mixed_float16",
        diagnosis_tables.SORTS,
    )
    command.set_defaults(run=_diagnose)
    command.add_argument(
        "--loss-scale",
        type=float,
        metavar="NUMBER",
        help="the loss scale that training had",
    )
    command.add_argument(
        "--has-aux", action="store_true", help="the function returns (loss, aux)"
    )


def _add_tune(commands: _Commands) -> None:
    command = _about_a_function(
        commands,
        "tune",
        "find the policies that keep a gradient accurate",
        _TUNE,
        "mixed_float16",
        tuning.SORTS,
    )
    command.set_defaults(run=_tune)
    command.add_argument(
        "--max-grad-error",
        type=float,
        default=0.01,
        metavar="NUMBER",
        help="the relative error that the gradient may have; default: %(default)s",
    )
    command.add_argument(
        "--has-aux", action="store_true", help="the function returns (loss, aux)"
    )


def _about_a_function(
    commands: _Commands,
    name: str,
    summary: str,
    description: str,
    policy: str,
    sorts: Iterable[str],
) -> argparse.ArgumentParser:
    """Returns the parser of a command with a function, its arguments and a policy."""
    command = commands.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("function", metavar="package.module:function")
    add(
        "--policy",
        default=policy,
        help="such as 'mixed_float16; **/head: float32'; default: %(default)s",
    )
    add("--args", metavar="NAME", help="the function that returns the arguments")
    what = "print all modules too, the largest figure first: "
    add("--sort", choices=[*sorts], help=f"{what}%(choices)s", metavar="FIGURE")
    add("--json", action="store_true", help="print the whole of it as JSON")
    add("--html", metavar="FILE", type=Path, help="write it as a page for a browser")
    add("--plot", metavar="FILE", type=Path, help="draw it: plan.png, plan.svg, ...")
    if name != "tune":
        add("--module", metavar="GLOB", help="print modules' equations: 'encoder/*'")
    add("--target", choices=TARGETS, help="what the plan is for; default: a GPU")
    return command


def _doctor(options: argparse.Namespace) -> int:
    found = examine()
    print(found.to_json() if options.json else found)
    return 0 if found.healthy else 1


def _explain(options: argparse.Namespace) -> int:
    policy = _policy(options.policy, "explain(fn, {})")
    shapes = "jax.ShapeDtypeStruct((8, 16), jnp.float32),"
    function, example = _functions(options.function, options.args, shapes)
    with _mistakes():
        explained = explain(function, policy, target=options.target)
    args, kwargs = _arguments(example)
    report = explained(*args, **kwargs)
    _show(report, options, plots.explain)
    if not options.json and (options.equations or options.module is not None):
        pattern = "**" if options.module is None else options.module
        print(f"\n{report.drill_down(pattern)}")
    return 0


def _diagnose(options: argparse.Namespace) -> int:
    policy = _policy(options.policy, "diagnose(fn, {})")
    function, example = _functions(
        options.function, options.args, "params, jnp.ones((8, 16))"
    )
    args, kwargs = _arrays(example, options)
    loss_scale = _loss_scale(options.loss_scale)
    with _mistakes(call="diagnose("):
        diagnosed = diagnose(
            function,
            policy,
            loss_scale=loss_scale,
            has_aux=options.has_aux,
            target=options.target,
        )
        found = diagnosed(*args, **kwargs)
    _show(found, options, plots.diagnose)
    if not options.json and options.module is not None:
        print(f"\n{found.drill_down(options.module)}")
    return 0 if found.is_finite else 1


def _tune(options: argparse.Namespace) -> int:
    policy = _policy(options.policy, "tune(fn, {})")
    function, example = _functions(
        options.function, options.args, "params, jnp.ones((8, 16))"
    )
    args, kwargs = _arrays(example, options)
    with _mistakes(call="tune("):
        tuned = tune(
            function,
            policy,
            max_grad_error=options.max_grad_error,
            has_aux=options.has_aux,
            progress=sys.stderr.isatty(),
            target=options.target,
        )
        try:
            found = tuned(*args, **kwargs)
        except NoPoliciesError as error:
            print(f"python -m jmp_amp: {error}", file=sys.stderr)
            return 1
    _show(found, options, plots.tune)
    if not options.json:
        print(f"\n--policy {str(found.policy)!r}")
    return 0


@contextlib.contextmanager
def _mistakes(of: str = "", call: str = "") -> Iterator[None]:
    """Makes mistakes of what `call` raises inside; other errors are not hidden."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not str(error).startswith(call):
            raise
        raise _Mistake(f"{of}{error}") from error


def _show(found: Any, options: argparse.Namespace, plot: Callable[[Any], Any]) -> None:
    """Prints a report, a diagnosis or a tuning, and writes the files asked for."""
    try:
        if options.plot is not None:
            plot(found).savefig(options.plot)
        if options.html is not None:
            title = f"<title>{html.escape(found.function)}</title>"
            page = f'<!doctype html>\n<meta charset="utf-8">\n{title}\n'
            options.html.write_text(page + found._repr_html_(), encoding="utf-8")
    except (ImportError, OSError, ValueError) as error:
        # No matplotlib, no such folder, no such kind of picture.
        raise _Mistake(f"{error}") from error
    if options.json:
        print(found.to_json(indent=1))
        return
    print(found)
    if options.sort is not None:
        print(f"\n{found.table(sort=options.sort)}")


def _policy(text: str, call: str) -> PolicyMap:
    with _mistakes("--policy: "):
        return as_policy_map(text, call)


def _loss_scale(number: float | None) -> LossScale | None:
    if number is None:
        return None
    with _mistakes("--loss-scale: "):
        return static_loss_scale(number)


def _functions(
    text: str, sibling: str | None, example_args: str
) -> tuple[AnyFn, Callable[[], object]]:
    """Returns the function that `text` names, and the one with its arguments.

    `example_args` is what that may return, for the error if there is none.
    """
    name, colon, path = text.partition(":")
    if not (name and colon and path):
        raise _Mistake(
            f"{text!r} names no function. Write the module, a colon and the function, "
            "as in package.module:function."
        )
    module = _imported(name)
    function = _attribute(module, path)
    if function is None:
        close = difflib.get_close_matches(path, dir(module), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise _Mistake(f"module {name!r} has no function {path!r}.{hint}")
    expected = sibling or f"{path}_args"
    example = _attribute(module, expected)
    if example is None:
        raise _Mistake(
            f"module {name!r} has no function {expected!r} that returns arguments for "
            f"{path!r}. Write one, as in "
            f"`def {expected.rpartition('.')[2]}(): return ({example_args})`, or name "
            "another one with --args."
        )
    for attribute, value in ((path, function), (expected, example)):
        if not callable(value):
            kind = type(value).__name__
            raise _Mistake(f"{name}:{attribute} is not a function, but {kind}.")
    return cast(AnyFn, function), cast(AnyFn, example)


def _imported(name: str) -> ModuleType:
    # `python -m` has the current folder on the path; other callers of `main` may not.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _Mistake(
            f"there is no module {error.name!r} here. Run this in the folder that it "
            "is in, or install it."
        ) from error
    except (TypeError, ValueError) as error:
        raise _Mistake(f"{name!r} is not the name of a module: {error}.") from error


def _attribute(module: ModuleType, path: str) -> object:
    value: object = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _arrays(
    example: Callable[[], object], options: argparse.Namespace
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Returns the arguments of a function that runs; raises if one has no values."""
    args, kwargs = _arguments(example)
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise _Mistake(
            f"{options.args or options.function + '_args'}() returned a "
            "jax.ShapeDtypeStruct, which has no values to measure. Return arrays."
        )
    return args, kwargs


def _arguments(
    example: Callable[[], object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    found = example()
    if isinstance(found, tuple):
        if len(found) == 2 and all(map(isinstance, found, (tuple, dict))):
            return found
        return found, {}
    raise _Mistake(
        f"{getattr(example, '__qualname__', example)}() returned "
        f"{type(found).__name__}. It has to return a tuple of arguments, such as "
        "(x,), or such a tuple and a dictionary of keyword arguments."
    )


def command() -> int:
    """Runs the command line of this process; 1 if the caller's function raised."""
    try:
        return main()
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(command())
