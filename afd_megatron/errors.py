"""What can go wrong, by whose hand. Knows no module of the package.

An `AfdError` is something the user can mend: one line `where: what (allowed)`, shown without a traceback.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of the job, as seen from `deepspeed`."""

    OK = 0
    CONFIG = 2
    SOME_FAILED = 3
    INTERRUPTED = 4
    FAULT = 13


class AfdError(Exception):
    """A fault with a cause the user can act on. `exit_code` is the status of the process that meets it."""

    exit_code = ExitCode.FAULT


class ConfigError(AfdError):
    """A job file or command line that cannot be run; the message may hold several lines, one per fault."""

    exit_code = ExitCode.CONFIG


class CheckpointError(AfdError):
    """A model folder that is not what its config says; the message lists every tensor at fault."""

    exit_code = ExitCode.CONFIG


class ProtocolError(AfdError):
    """Two ranks disagree: a message, plan or setting is not the one expected."""


class PeerError(AfdError):
    """A peer is gone or did not answer in time."""
