"""What attention rank 0 does beside serving: hand out requests, collect results, lead the FFN ranks. Knows no model."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from afd_megatron.control.exchange import StepEntry
from afd_megatron.control.plans import PlanSender
from afd_megatron.engine.balance import choose_rank
from afd_megatron.engine.clock import JobClock
from afd_megatron.engine.intake import Intake
from afd_megatron.engine.request import Request, Result
from afd_megatron.engine.results import ResultWriter
from afd_megatron.observability.progress import JobProgress
from afd_megatron.plan import StepPlan

_NUM_AHEAD = 2  # requests that may wait at a rank beyond its free places, so that a freed place is taken at once


class Leader:
    """The job's side of attention rank 0: its input, its output and, unless colocated, the plans of the FFN ranks.

    `sender` is None where every rank makes the plan by itself.
    """

    def __init__(
        self,
        intake: Intake,
        writer: ResultWriter,
        sender: PlanSender | None,
        *,
        clock: JobClock,
        heartbeat_interval_s: float,
        progress: JobProgress,
    ) -> None:
        self._intake = intake
        self._writer = writer
        self._sender = sender
        self._clock = clock
        self._heartbeat_interval_s = heartbeat_interval_s
        self._progress = progress
        self._queue: deque[Request] = deque()
        self._num_unanswered = 0
        self._unseen: dict[int, list[Request]] = {}  # handed out after the entries seen last were written
        self.results: list[Result] = []
        self.num_unstarted = 0

    @property
    def is_done(self) -> bool:
        """True once every request of the input has its record."""
        return not self._intake and not self._queue and not self._num_unanswered

    def hand_out(self, entries: Sequence[StepEntry]) -> dict[int, list[Request]]:
        """Return new requests by DP rank: each goes to the least loaded of those with room for it.

        A request waits here and not at a rank, so that a rank whose requests end early takes the next one.

        Args:
            entries: what each DP rank told in the last exchange.
        """
        self._queue += self._intake.take_due(self._clock())
        loads = [entry.load for entry in entries]
        room = [entry.num_free + _NUM_AHEAD - entry.num_waiting for entry in entries]
        for rank, requests in self._unseen.items():
            loads[rank] += sum(request.max_tokens for request in requests)
            room[rank] -= len(requests)
        by_rank: dict[int, list[Request]] = {}
        while self._queue and (open_ranks := [rank for rank, places in enumerate(room) if places > 0]):
            request = self._queue.popleft()
            rank = open_ranks[choose_rank([loads[rank] for rank in open_ranks])]
            loads[rank] += request.max_tokens
            room[rank] -= 1
            by_rank.setdefault(rank, []).append(request)
            self._num_unanswered += 1
        self._unseen = by_rank
        return by_rank

    def take(self, results: Iterable[Result]) -> None:
        """Write the records of finished requests."""
        for result in results:
            self._num_unanswered -= 1
            self.record(result)

    def record(self, result: Result) -> None:
        self._writer.write(result)
        self.results.append(result)
        self._progress.count(result.num_tokens, self._clock())

    def publish(self, plan: StepPlan) -> None:
        if self._sender is not None:
            self._sender.publish(plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tell the FFN ranks that the job ends, and why if it failed; close the output."""
        if self._sender is not None:
            if error is None:
                self._sender.stop()
            else:
                self._sender.abort(f"{type(error).__name__}: {error}")
        self._progress.close()
        self._writer.close()

    def close_intake(self) -> None:
        """Hand out nothing more; requests that wait here are counted and stay without a record."""
        self.num_unstarted = len(self._intake) + len(self._queue)
        self._intake = Intake(())
        self._queue.clear()

    def wait_idle(self, stop: threading.Event) -> None:
        """Tell the FFN ranks that all is well, and wait for the next arrival, the next heartbeat or `stop`."""
        if self._sender is not None:
            self._sender.heartbeat()
        arrival_s = self._intake.next_arrival_s
        gap_s = self._heartbeat_interval_s if arrival_s is None else arrival_s - self._clock()
        stop.wait(min(max(gap_s, 0.0), self._heartbeat_interval_s))
