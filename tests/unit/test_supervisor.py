"""No process outlives its job, whoever dies first. Cases run in processes of their own: `supervise` adopts orphans."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from afd_megatron.supervisor import Ending, process_start

SUPERVISE = """\
import json, os, sys
from afd_megatron.supervisor import supervise
print(json.dumps(supervise([sys.executable, "-c", sys.argv[1]], os.environ, float(sys.argv[2]))), flush=True)
"""
SAY = "import os, signal, subprocess, sys, time; print(os.getpid(), flush=True); "
SLEEP = "time.sleep(60)"


@contextmanager
def supervised(code: str, grace_s: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    """Start a process that supervises `python -c code`."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, code, str(grace_s)], stdout=subprocess.PIPE, text=True, process_group=0
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def ending(process: subprocess.Popen[str]) -> Ending:
    return Ending(*json.loads(next_line(process)))


def wait_until_gone(pid: int) -> None:
    """Return when `pid` has ended; the test's own timeout is the limit."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        with os.fdopen(descriptor):
            select.select([descriptor], [], [])
    assert process_start(pid) is None


@pytest.mark.parametrize(
    ("code", "exit_code"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_the_exit_code_is_the_commands(code: str, exit_code: int) -> None:
    with supervised(code) as process:
        assert ending(process) == Ending(exit_code, was_stopped=False, was_killed=False)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_command_in_peace(signum: signal.Signals) -> None:
    code = SAY + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); print('ready', flush=True); " + SLEEP
    with supervised(code) as process:
        next_line(process), next_line(process)
        process.send_signal(signum)
        assert ending(process) == Ending(4, was_stopped=True, was_killed=False)


def test_what_does_not_stop_in_the_grace_time_is_killed() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SAY + SLEEP
    with supervised(code, grace_s=0.1) as process:
        pid = int(next_line(process))
        process.terminate()
        assert ending(process) == Ending(-9, was_stopped=True, was_killed=True)
        assert process_start(pid) is None


def test_what_outlives_the_command_is_stopped() -> None:
    child = f"import time; {SLEEP}"
    code = SAY + f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); os._exit(0)"
    with supervised(code) as process:
        next_line(process)
        orphan = int(next_line(process))
        assert ending(process) == Ending(0, was_stopped=False, was_killed=False)
        assert process_start(orphan) is None


def test_the_command_ends_when_its_supervisor_is_killed() -> None:
    with supervised(SAY + SLEEP) as process:
        pid = int(next_line(process))
        process.kill()
        wait_until_gone(pid)


def test_an_ignored_signal_stays_ignored() -> None:
    code = f"import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.argv.pop(0); exec({SUPERVISE!r})"
    command = [sys.executable, "-c", code, "-", "import sys; print('up', flush=True); sys.stdin.read()", "60"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert next_line(process) == "up\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdin is not None
        process.stdin.close()
        assert ending(process) == Ending(0, was_stopped=False, was_killed=False)


def test_the_start_of_a_process_tells_it_from_another_of_the_same_pid() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert process_start(process.pid) is None
    assert process_start(os.getpid()) != process_start(1)
