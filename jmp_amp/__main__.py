"""Mixed precision for JAX and Flax: looks at a function of yours.

example, for a function `loss(params, batch)` in train.py:

  def loss_args():            # in train.py too: what `loss` is called with
      return params, batch

  python -m jmp_amp explain train:loss
  python -m jmp_amp diagnose train:loss --policy mixed_float16 --html numbers.html

The exit status is 0 if all is well, 1 if something is not or the function raised, 2 for
a mistake in the command.
"""

from __future__ import annotations

import argparse
import difflib
import html
import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

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
from jmp_amp.training.loss_scale import static_loss_scale

_SHAPES = "jax.ShapeDtypeStruct((8, 16), jnp.float32),"
_ARRAYS = "params, jnp.ones((8, 16))"


class _Mistake(ValueError):
    """A mistake of the caller, in words."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    It is 2 for a caller's mistake; 1 if `doctor` finds that something does not hold,
    `diagnose` that something is not finite, or `tune` no policy. What the caller's
    function raises is raised here; as a command it ends with 1 and its traceback.

    Args:
      argv: the words of the command; by default those of this process.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except (TypeError, ValueError) as error:
        # Other errors are of the caller's own code: they are not hidden.
        ours = isinstance(error, _Mistake) or str(error).startswith(f"{options.name}(")
        if not ours:
            raise
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1 if isinstance(error, NoPoliciesError) else 2


def _parser() -> argparse.ArgumentParser:
    description, _, example = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m jmp_amp",
        description=description,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"jmp_amp {jmp_amp.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(run=lambda options: parser.print_help() or 0, name="")
    commands = parser.add_subparsers(metavar="command")

    def command(run: AnyFn, summary: str, told: str) -> argparse.ArgumentParser:
        name = run.__name__.removeprefix("_")
        added = commands.add_parser(
            name,
            help=summary,
            description=inspect.getdoc(run),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run, name=name)
        added.add_argument("--json", action="store_true", help=f"print {told} as JSON")
        return added

    def of_function(
        run: AnyFn, summary: str, policy: str, sorts: Collection[str]
    ) -> Callable[..., argparse.Action]:
        add = command(run, summary, "the whole of it").add_argument
        add("function", metavar="package.module:function")
        policies = "such as 'mixed_float16; **/head: float32'; default: %(default)s"
        add("--policy", default=policy, help=policies)
        add("--args", metavar="NAME", help="the function that returns the arguments")
        figures = "print all modules too, the largest figure first: %(choices)s"
        add("--sort", choices=[*sorts], metavar="FIGURE", help=figures)
        add(
            "--html", metavar="FILE", type=Path, help="write it as a page for a browser"
        )
        add(
            "--plot", metavar="FILE", type=Path, help="draw it: plan.png, plan.svg, ..."
        )
        add("--target", choices=TARGETS, help="what the plan is for; default: a GPU")
        return add

    what = "print what autocast would do to a function"
    add = of_function(_explain, what, "mixed_bfloat16", report_tables.SORTS)
    modules = dict(metavar="GLOB", help="print modules' equations: 'encoder/*'")
    add("--module", **modules)
    add("--equations", action="store_true", help="print every equation too")

    what = "run a function, and print what its numbers do"
    add = of_function(_diagnose, what, "mixed_float16", diagnosis_tables.SORTS)
    add("--module", **modules)
    number = dict(type=float, metavar="NUMBER")
    add("--loss-scale", **number, help="the loss scale that training had")
    aux = dict(action="store_true", help="the function returns (loss, aux)")
    add("--has-aux", **aux)

    what = "find the policies that keep a gradient accurate"
    add = of_function(_tune, what, "mixed_float16", tuning.SORTS)
    bound = "the relative error that the gradient may have; default: %(default)s"
    add("--max-grad-error", **number, default=0.01, help=bound)
    add("--has-aux", **aux)

    command(_doctor, "print what this machine can do, and try it", "it")
    return parser


def _explain(options: argparse.Namespace) -> int:
    """Prints what autocast would do to a function: the dtype of its operations and why,
    the casts, the operations of matrix products in half precision, the bytes that are
    kept for the backward pass. Nothing of the function is executed.

    Its arguments come from a function next to it, by default <function>_args, which
    takes nothing and returns a tuple of them, or such a tuple and a dictionary of
    keyword arguments. A jax.ShapeDtypeStruct will do for an array.
    """
    function, policy, args, kwargs = _called(options, _SHAPES)
    report = explain(function, policy, target=options.target)(*args, **kwargs)
    if options.equations and options.module is None:
        options.module = "**"
    _show(report, options, options.module)
    return 0


def _diagnose(options: argparse.Namespace) -> int:
    """Runs a function as it is and under the policy, and its gradient if it returns a
    loss. Prints where a value first became infinite or NaN, what half precision cannot
    hold, the loss scale and the policy that the numbers ask for. The exit status is 1
    if the value, a gradient or an operation's result from finite operands is not
    finite.

    Its arguments are arrays: they come from a function next to it, as for `explain`.
    The first one is what the gradient is taken of.
    """
    function, policy, args, kwargs = _called(options, _ARRAYS)
    loss_scale = options.loss_scale
    if loss_scale is not None:
        loss_scale = _parsed("--loss-scale", static_loss_scale, loss_scale)
    settings = dict(has_aux=options.has_aux, target=options.target)
    diagnosed = diagnose(function, policy, loss_scale=loss_scale, **settings)
    found = diagnosed(*args, **kwargs)
    _show(found, options, options.module)
    return 0 if found.is_finite else 1


def _tune(options: argparse.Namespace) -> int:
    """Looks for the policies by module that keep the error of a loss's gradient below a
    bound, with as many matrix products in half precision as can be, and prints them as
    text that --policy and amp.autocast read. The function runs some hundred times. The
    exit status is 1 if no policy meets the bound.

    Its arguments are arrays: they come from a function next to it, as for `explain`.
    The first one is what the gradient is taken of.
    """
    function, policy, args, kwargs = _called(options, _ARRAYS)
    found = tune(
        function,
        policy,
        max_grad_error=options.max_grad_error,
        has_aux=options.has_aux,
        progress=sys.stderr.isatty(),
        target=options.target,
    )(*args, **kwargs)
    _show(found, options)
    if not options.json:
        print(f"\n--policy {str(found.policy)!r}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    """Prints what this machine computes with, which half dtype and recipe suit it and
    why, and trains a small model in mixed precision beside f32. The exit status is 1 if
    something does not hold.
    """
    found = examine()
    print(found.to_json() if options.json else found)
    return 0 if found.healthy else 1


def _show(found: Any, options: argparse.Namespace, module: str | None = None) -> None:
    """Prints a report, a diagnosis or a tuning, and writes the files asked for."""
    try:
        if options.plot is not None:
            getattr(plots, options.name)(found).savefig(options.plot)
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
    if module is not None:
        print(f"\n{found.drill_down(module)}")


def _called(
    options: argparse.Namespace, example_args: str
) -> tuple[AnyFn, PolicyMap, tuple[object, ...], dict[str, object]]:
    """Returns the function that is named, its policy, and what to call it with.

    Args:
      example_args: what the function of arguments may return, for the error if there
        is none.
    """
    call = f"{options.name}(fn, {{}})"
    policy = _parsed("--policy", as_policy_map, options.policy, call)
    name, _, path = options.function.partition(":")
    if not (name and path) or name.startswith("."):
        raise _Mistake(
            f"{options.function!r} names no function. Write the module, a colon and "
            "the function, as in package.module:function."
        )
    module = _imported(name)
    close = difflib.get_close_matches(path, dir(module), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    function = _attribute(module, path, f"{path!r}.{hint}")
    sibling = options.args or f"{path}_args"
    example = _attribute(
        module,
        sibling,
        f"{sibling!r} that returns arguments for {path!r}. Write one, as in `def "
        f"{sibling.rpartition('.')[2]}(): return ({example_args})`, or name another "
        "one with --args.",
    )
    found = example()
    if not isinstance(found, tuple):
        raise _Mistake(
            f"{sibling}() returned {type(found).__name__}. It has to return a tuple of "
            "arguments, such as (x,), or such a tuple and a dictionary of keyword "
            "arguments."
        )
    if len(found) == 2 and all(map(isinstance, found, (tuple, dict))):
        return function, policy, *found
    return function, policy, found, {}


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


def _attribute(module: ModuleType, path: str, told: str) -> AnyFn:
    """Returns a function of a module; `told` names it, and what to do without it."""
    try:
        value = operator.attrgetter(path)(module)
    except AttributeError as error:
        raise _Mistake(f"module {module.__name__!r} has no function {told}") from error
    if not callable(value):
        kind = type(value).__name__
        raise _Mistake(f"{module.__name__}:{path} is not a function, but {kind}.")
    return value


def _parsed(option: str, parse: AnyFn, *given: object) -> Any:
    try:
        return parse(*given)
    except (TypeError, ValueError) as error:
        raise _Mistake(f"{option}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
