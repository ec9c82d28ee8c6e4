"""Examples, run as their reader runs them."""

import os
import subprocess
import sys
from pathlib import Path

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
