"""Loss scaling in a run of two processes that each see half of the devices.

The processes are real: `jax.distributed` on this machine, collectives by gloo.
"""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import process_worker
from tests.scripts import with_devices_of_its_own
from tests.training.test_sharded_scaling import EPS, SCALE

ROOT = Path(__file__).parents[2]
PROCESSES, DEVICES = 2, 4
TIMEOUT = 240.0  # seconds; a machine with nothing else to do needs fifteen


def run_together(commands: Sequence[Sequence[str]], timeout: float) -> list[str]:
    """Returns what the commands print, run at the same time.

    Raises:
      AssertionError: with the output of all of them, if one fails or if they are not
        done after `timeout` seconds. None of them is left running.
    """
    environment = with_devices_of_its_own() | {"JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        # Files, since a pipe that nobody reads stops its writer when it is full.
        outputs = [Path(folder, str(number)) for number in range(len(commands))]
        errors = [Path(folder, f"{number}.err") for number in range(len(commands))]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for command, output, error in zip(commands, outputs, errors, strict=True):
                with output.open("wb") as out, error.open("wb") as err:
                    running.append(
                        subprocess.Popen(
                            command, cwd=ROOT, env=environment, stdout=out, stderr=err
                        )
                    )
            deadline = time.monotonic() + timeout
            codes: list[int | None] = [None] * len(running)
            while None in codes and time.monotonic() < deadline:
                codes = [process.poll() for process in running]
                if any(codes):  # the others would wait for it until their own timeout
                    break
                time.sleep(0.05)
        finally:
            for process in running:
                process.kill()
                process.wait()
        written = [path.read_text(errors="replace") for path in outputs]
        if any(code != 0 for code in codes):
            shown = [
                f"-- process {number}: {_outcome(code)}\n{text}\n"
                f"{errors[number].read_text(errors='replace')[-6000:]}"
                for number, (code, text) in enumerate(zip(codes, written, strict=True))
            ]
            raise AssertionError("\n".join(["the processes did not end well", *shown]))
        return written


def _outcome(code: int | None) -> str:
    return "was still running, and was killed" if code is None else f"exit code {code}"


@functools.cache
def outcome() -> list[dict[str, Any]] | AssertionError:
    # Kept, but not listened on, while the coordinator listens on it: gRPC shares a port
    # with whoever is willing to, and nobody else is given it in the meantime.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        worker = [sys.executable, "-m", "tests.process_worker"]
        commands = [
            [*worker, *map(str, (process, PROCESSES, port, DEVICES))]
            for process in range(PROCESSES)
        ]
        try:
            written = run_together(commands, TIMEOUT)
        except AssertionError as error:
            return error  # once is enough: the other tests need not wait for it again
    # Among the lines of gloo, which says how many peers it has found.
    lines = [line for text in written for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def results() -> list[dict[str, Any]]:
    """What each of the processes has in the end, by the name of the run."""
    found = outcome()
    if isinstance(found, AssertionError):
        raise found
    assert len(found) == PROCESSES
    return found


# One worker of pytest-xdist starts the processes, for all of the tests.
pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]


def test_the_processes_have_the_same_parameters_and_the_same_scale():
    first, second = (result["fsdp"] for result in results())
    assert first["digest"] == second["digest"]
    assert first["moments"] == second["moments"]
    assert first["losses"] == second["losses"]
    assert first["metrics"] == second["metrics"]
    assert first["metrics"] == {
        "scale": SCALE,  # halved by the bad step, doubled by three good ones
        "finite": True,
        "skipped_total": 1,
        "skipped_in_a_row": 0,
        "applied": 4,
    }


def test_a_bad_number_in_one_process_skips_the_step_in_both():
    found = [result["fsdp"] for result in results()]
    assert [result["bad_here"] for result in found] == [False, True]
    for result in found:
        assert result["kept"]
        assert result["scale_of_the_bad_step"] == [SCALE / 2] * DEVICES


def test_two_processes_train_as_one_does():
    found, alone = results()[0]["fsdp"], process_worker.RUNS["fsdp"]()
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=EPS)
    assert found["metrics"] == alone["metrics"]
    for key, expected in alone["params"].items():
        np.testing.assert_allclose(found["params"][key], expected, atol=EPS)


def test_replicas_in_two_processes_agree_over_the_axis_that_is_named():
    for result in results():
        assert result["replicas"]["scale"] == [SCALE / 2] * DEVICES


def test_replicas_in_two_processes_part_without_it():
    first, second = (result["replicas that do not agree"] for result in results())
    assert first["scale"] == [SCALE] * DEVICES
    assert sorted(second["scale"]) == [SCALE / 2, *[SCALE] * (DEVICES - 1)]


def test_a_process_that_fails_ends_the_others_and_what_they_wrote_is_shown():
    waits = "import time; print('waiting', flush=True); time.sleep(600)"
    fails = "import sys, time; time.sleep(1); print('so far'); sys.exit('no such port')"
    commands = [[sys.executable, "-c", program] for program in (waits, fails)]
    with pytest.raises(AssertionError) as caught:
        run_together(commands, TIMEOUT)
    message = str(caught.value)
    assert "process 0: was still running, and was killed\nwaiting" in message
    assert "process 1: exit code 1\nso far" in message
    assert "no such port" in message
