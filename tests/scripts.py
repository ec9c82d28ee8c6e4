"""Examples, run as their reader runs them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_example(
    name: str, *arguments: str, columns: int = 120
) -> subprocess.CompletedProcess[str]:
    """Returns what `python examples/<name>.py` printed; a warning is an error there."""
    return subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / f"{name}.py", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def with_devices_of_its_own() -> dict[str, str]:
    """The environment of a process that says itself how many devices it has."""
    flags = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count")
    ]
    return os.environ | {"XLA_FLAGS": " ".join(flags)}


def refusal(capsys: pytest.CaptureFixture[str], run: Callable[[], object]) -> str:
    """Returns the error that `run` writes before it stops with status 2."""
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 2
    return capsys.readouterr().err
