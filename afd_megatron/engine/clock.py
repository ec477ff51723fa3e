"""The job's time: seconds since serving began on this rank. Knows nothing else."""

import time


class JobClock:
    """Seconds since `start`, which all ranks call right after a common exchange; 0 before it."""

    def __init__(self) -> None:
        self._started_s: float | None = None

    def start(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self) -> float:
        return 0.0 if self._started_s is None else time.monotonic() - self._started_s
