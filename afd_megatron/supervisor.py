"""Runs a command until the last process it started is gone, whatever happens to either side. Knows no job, no ranks."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5


class Ending(NamedTuple):
    """How a command ended: `exit_code` is minus the signal that killed it, if one did.

    `was_stopped`: a signal or a lost launcher asked for the end. `was_killed`: after the grace time it took SIGKILL.
    """

    exit_code: int
    was_stopped: bool
    was_killed: bool


def supervise(command: Sequence[str], environ: Mapping[str, str], grace_s: float) -> Ending:
    """Run `command` in a process group of its own and return when all its descendants are gone.

    SIGTERM, SIGINT, SIGHUP and the loss of a `deepspeed` process above this one become one SIGTERM to the group; what
    still runs `grace_s` seconds later is killed, and so is what outlives the command. The command gets a SIGTERM if
    this process dies. Call once, on the main thread and before another one starts: it changes the signal mask.
    """
    # A signal that was ignored when this process began (nohup, a shell's background job) stays ignored.
    stops = {
        stop for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(stop) != signal.SIG_IGN
    }
    waited = stops | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    launchers = _launchers_above(os.getppid())

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)

    process = subprocess.Popen(command, env=environ, process_group=0, preexec_fn=prepare)
    group = _Group(process.pid, grace_s)
    was_stopped = False
    while group.reap():
        received = signal.sigtimedwait(waited, _POLL_S)
        if (received and received.si_signo in stops) or any(process_start(pid) != start for pid, start in launchers):
            was_stopped = True
        if was_stopped or group.exit_code is not None:
            group.stop()
    process.returncode = group.exit_code  # `reap` took it, Popen shall not look for it
    assert group.exit_code is not None
    return Ending(group.exit_code, was_stopped, group.was_killed)


def process_start(pid: int) -> int | None:
    """Return when process `pid` began, in clock ticks since boot, or None if it is gone: pids are used again."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


@dataclass
class _Group:
    """The processes under a group leader, which become ours when their parents die (PR_SET_CHILD_SUBREAPER)."""

    leader: int
    grace_s: float
    exit_code: int | None = None
    was_killed: bool = False
    _deadline: float | None = field(default=None, init=False)

    def reap(self) -> bool:
        """Collect who has ended and return whether anyone is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.leader:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def stop(self) -> None:
        """Ask the group to end; when asked again after the grace time, kill it."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.grace_s
            self._signal(signal.SIGTERM)
        elif time.monotonic() >= self._deadline:
            self.was_killed = True
            self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.leader, signum)


def _launchers_above(pid: int) -> list[tuple[int, int | None]]:
    """Return pid and start of each DeepSpeed process from `pid` upwards; their end is the end of the job."""
    chain = []
    while (fields := _stat(pid)) and b"deepspeed" in Path(f"/proc/{pid}/cmdline").read_bytes():
        chain.append((pid, process_start(pid)))
        pid = int(fields[1])
    return chain


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before it may hold blanks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
