"""The command line: `python -m jmp_amp explain package.module:function`, `doctor`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import cast

from jmp_amp.doctor import examine
from jmp_amp.policies.dtypes import AnyFn
from jmp_amp.policies.policy_map import as_policy_map
from jmp_amp.reports.report import explain

_EXPLAIN = """\
Prints what autocast would do to a function: the dtype of its operations and why, the
casts, the operations of matrix products in half precision, the bytes that are kept for
the backward pass. Nothing of the function is executed.

Its arguments come from a function next to it, by default <function>_args, which takes
nothing and returns a tuple of them, or such a tuple and a dictionary of keyword
arguments. A jax.ShapeDtypeStruct will do for an array.
"""

_DOCTOR = """\
Prints what this machine computes with, which half dtype and recipe suit it and why, and
trains a small model in mixed precision beside f32. The exit status is 1 if something
does not hold.
"""


class _Mistake(Exception):
    """A mistake of the caller, in words."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    It is 2 for a caller's mistake; 1 if `doctor` finds that something does not hold.

    Args:
      argv: the words of the command; by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m jmp_amp")
    commands = parser.add_subparsers(metavar="command", required=True)
    command = commands.add_parser(
        "explain",
        help="print what autocast would do to a function",
        description=_EXPLAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_explain)
    add = command.add_argument
    add("function", metavar="package.module:function")
    add(
        "--policy",
        default="mixed_bfloat16",
        help="such as 'mixed_float16; **/head: float32'; default: %(default)s",
    )
    add("--args", metavar="NAME", help="the function that returns the arguments")
    add("--json", action="store_true", help="print the whole report as JSON")
    add("--equations", action="store_true", help="print every equation too")
    add("--module", metavar="GLOB", help="print these modules' equations: 'encoder/*'")
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


def _doctor(options: argparse.Namespace) -> int:
    found = examine()
    print(found.to_json() if options.json else found)
    return 0 if found.healthy else 1


def _explain(options: argparse.Namespace) -> int:
    try:
        policy = as_policy_map(options.policy, "explain(fn, {})")
    except (TypeError, ValueError) as error:
        raise _Mistake(f"--policy: {error}") from error
    function, example = _functions(options.function, options.args)
    try:
        explained = explain(function, policy)
    except (TypeError, ValueError) as error:
        raise _Mistake(str(error)) from error
    args, kwargs = _arguments(example)
    report = explained(*args, **kwargs)
    print(report.to_json(indent=1) if options.json else report)
    if not options.json and (options.equations or options.module is not None):
        pattern = "**" if options.module is None else options.module
        print(f"\n{report.drill_down(pattern)}")
    return 0


def _functions(text: str, sibling: str | None) -> tuple[AnyFn, Callable[[], object]]:
    """Returns the function that `text` names, and the one with its arguments."""
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
            f"`def {expected.rpartition('.')[2]}(): return "
            "(jax.ShapeDtypeStruct((8, 16), jnp.float32),)`, or name another one "
            "with --args."
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


if __name__ == "__main__":
    sys.exit(main())
