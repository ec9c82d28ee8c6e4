"""Runs what CI does not run: the tests marked `nightly`, and other versions of JAX.

    python -m tests.nightly                all of it, folder by folder
    python -m tests.nightly zoo trains     some steps
    python -m tests.nightly --resume       what has not passed at this commit

A step is a folder of `tests/`, `.` for the files beside them, `trains` for what trains
for long and is compiled as a user does, or a version of JAX, see `.ci/versions`. After
each one its outcome is written, and at the end a summary is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

TOP = Path(__file__).parents[1]
STATE = TOP / ".pytest_cache" / "nightly.json"
VERSIONS = ("0.10.2", "0.11.2", "0.12.0")
# A group whose worker died would be waited for: none restarts.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup")
PYTEST += ("--max-worker-restart", "0")
# `tests/conftest.py` switches off optimisation, which pays for what runs for long.
OPTIMISED = "--xla_force_host_platform_device_count=8"
OPTIMISED += " --xla_cpu_collective_call_terminate_timeout_seconds=300"


class Step(NamedTuple):
    """What is run at once: a command, and variables of its environment.

    `command` is given `--junitxml=FILE` as its last argument.
    """

    command: tuple[str, ...]
    environment: dict[str, str]


class Outcome(NamedTuple):
    """How a step ended: its exit status, numbers of tests, and the ids that failed."""

    status: int
    passed: int
    skipped: int
    failed: list[str]
    minutes: float


def steps() -> dict[str, Step]:
    """Returns the steps by name."""
    folders = {
        path.parent.relative_to(TOP / "tests").parts[:1]
        for path in (TOP / "tests").rglob("test_*.py")
    }
    found = {}
    chosen = (*PYTEST, "-m", "nightly and not trains")
    for name in sorted(parts[0] for parts in folders if parts):
        found[name] = Step((*chosen, f"tests/{name}"), {})
    files = sorted(map(str, (TOP / "tests").glob("test_*.py")))
    found["."] = Step((*chosen, *files), {})
    trains = (*PYTEST, "-m", "trains", "tests")
    found["trains"] = Step(trains, {"XLA_FLAGS": OPTIMISED})
    for version in VERSIONS:
        found[version] = Step((".ci/versions", version, "--"), {})
    return found


def run(step: Step, scratch: Path) -> Outcome:
    """Runs a step and returns how it ended; it prints as it goes."""
    scratch.unlink(missing_ok=True)
    begin = time.monotonic()
    command = (*step.command, f"--junitxml={scratch}")
    done = subprocess.run(command, cwd=TOP, env=os.environ | step.environment)
    minutes = (time.monotonic() - begin) / 60
    if not scratch.exists():
        return Outcome(done.returncode or 1, 0, 0, ["no test was run"], minutes)
    cases = [*ElementTree.parse(scratch).iter("testcase")]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    # 5: a folder has no nightly tests.
    status = 0 if done.returncode == 5 else done.returncode
    passed = len(cases) - skipped - len(failed)
    return Outcome(status, passed, skipped, failed, minutes)


def summary(outcomes: dict[str, Outcome]) -> Table:
    """Returns a row for each step, and one for all of them."""
    shown = Table("step", "passed", "failed", "skipped", "minutes", box=None)
    for name, each in outcomes.items():
        failed = len(each.failed) or ("" if each.status == 0 else "stopped")
        cells = (each.passed, failed, each.skipped or "", f"{each.minutes:.1f}")
        shown.add_row(name, *map(str, cells))
    minutes = sum(each.minutes for each in outcomes.values())
    counts = (
        sum(each.passed for each in outcomes.values()),
        sum(len(each.failed) for each in outcomes.values()),
        sum(each.skipped for each in outcomes.values()),
    )
    shown.add_row("all", *map(str, counts), f"{minutes:.1f}")
    return shown


def commit() -> str:
    """Returns what is checked out, with `-dirty` where files have changes."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12")
    return subprocess.run(
        command, cwd=TOP, check=True, capture_output=True, text=True
    ).stdout.strip()


def main(
    arguments: Sequence[str] | None = None,
    known: dict[str, Step] | None = None,
    state: Path = STATE,
) -> int:
    """Runs steps and prints a summary; returns 0 where all of them passed."""
    known = steps() if known is None else known
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(known))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    if unknown := {*options.steps} - {*known}:
        parser.error(f"{min(unknown)} is no step. Steps: {', '.join(known)}")
    outcomes: dict[str, Outcome] = {}
    if options.resume:
        before = json.loads(state.read_text()) if state.exists() else {}
        if before.get("commit") != commit() or commit().endswith("-dirty"):
            parser.error(
                f"--resume: the last run was of {before.get('commit', 'nothing')}, "
                f"and this is {commit()}. Run without --resume."
            )
        outcomes = {name: Outcome(*each) for name, each in before["steps"].items()}
    state.parent.mkdir(exist_ok=True)
    for name in options.steps or known:
        if name in outcomes and outcomes[name].status == 0:
            continue
        print(f"\n== {name}", flush=True)
        outcomes[name] = run(known[name], state.with_suffix(".xml"))
        state.write_text(json.dumps({"commit": commit(), "steps": outcomes}))
    console = Console()
    console.print(summary(outcomes))
    for name, each in outcomes.items():
        for test in each.failed:
            console.print(f"{name}: {test}", markup=False, soft_wrap=True)
    return int(any(each.status for each in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
