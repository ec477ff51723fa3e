"""An attention rank's life between steps: exchange, plan, run, sample, finish. Knows no model code, no transport."""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch

from afd_megatron.attention.leader import Leader
from afd_megatron.attention.step import AttentionStep
from afd_megatron.control.exchange import AttentionExchange, StepEntry
from afd_megatron.engine.batch import make_stages
from afd_megatron.engine.clock import JobClock
from afd_megatron.engine.request import Request, Result, SampledToken
from afd_megatron.engine.sampler import sample
from afd_megatron.engine.scheduler import Schedule, Scheduler
from afd_megatron.observability.progress import Progress
from afd_megatron.plan import PlanRules, RankCounts, RunMode, StepPlan, make_plan, warmup_plan


class BatchShape(NamedTuple):
    """What turns a schedule into tensors and logits into tokens on this rank."""

    block_size: int
    vocab_size: int
    device: torch.device


class AttentionWorker:
    """Serves requests on one attention rank; the one with a `leader` is rank 0 and serves the job as well.

    In each round all attention ranks exchange what they have scheduled and come to the same plan from it. What is
    handed out with an exchange is scheduled in the next round. TP ranks do the same with the same requests, but draw
    and report only on the first of them. `stop` asks for an early end.
    """

    def __init__(
        self,
        role_rank: int,
        scheduler: Scheduler,
        step: AttentionStep,
        exchange: AttentionExchange,
        *,
        rules: PlanRules,
        shape: BatchShape,
        clock: JobClock,
        leader: Leader | None,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        first = role_rank - role_rank % rules.attention_tp
        self._tp_ranks = range(first, first + rules.attention_tp)
        self._is_first = role_rank == first
        self._scheduler = scheduler
        self._step = step
        self._exchange = exchange
        self._rules = rules
        self._shape = shape
        self._clock = clock
        self._leader = leader
        self._progress = progress
        self._stop = stop
        self._sequence = 0
        self._entries: tuple[StepEntry, ...] = ()
        self._finished: list[Result] = []
        self.steps: Counter[str] = Counter()
        self.duration_s = 0.0
        self.was_interrupted = False

    def warm_up(self, num_rows: int) -> None:
        """Run a dummy step of `num_rows` rows per attention rank, which no metric counts."""
        schedule = self._scheduler.schedule()
        self._run_plan(warmup_plan(self._sequence, num_rows, self._rules), schedule)
        self._scheduler.finish_step(schedule, ())

    def run(self) -> None:
        """Serve until the leader says that every request has its record."""
        self._clock.start()
        while self._round():
            pass
        self.duration_s = self._clock()

    def _round(self) -> bool:
        """Do one exchange and, if any rank has rows, one step; return whether there is more to do."""
        handed_out = self._hand_out()
        schedule = self._scheduler.schedule()
        exchanged = self._exchange.exchange(self._entry(schedule), handed_out, self._take_finished())
        self._entries = exchanged.entries
        if self._leader is not None:
            self._leader.take(Result.from_bytes(line) for data in exchanged.results for line in data.splitlines())
        self._add(Request.from_bytes(line) for line in exchanged.requests.splitlines())
        if self._entries[0].is_last:
            return False
        if any(entry.wants_stop for entry in self._entries) and not self.was_interrupted:
            self._interrupt()
            return True
        counts = tuple(RankCounts(entry.num_decode_rows, entry.num_prefill_rows) for entry in self._entries)
        if any(count.num_rows for count in counts):
            self._run_step(schedule, counts)
        else:
            self._scheduler.finish_step(schedule, ())
            if self._leader is not None and not handed_out and not self._leader.is_done:
                self._leader.wait_idle(self._stop)
        return True

    def _hand_out(self) -> dict[int, bytes]:
        """Return new requests by attention rank, the same for TP ranks. None before the first exchange."""
        if self._leader is None or not self._entries:
            return {}
        tp = len(self._tp_ranks)
        by_dp = {dp: _join(requests) for dp, requests in self._leader.hand_out(self._entries[::tp]).items()}
        return {dp * tp + shard: requests for dp, requests in by_dp.items() for shard in range(tp)}

    def _add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            result = self._scheduler.add(request, self._clock() - request.arrival_s)
            if result is not None:
                self._finish(result)

    def _finish(self, *results: Result) -> None:
        if self._leader is not None:
            self._leader.take(results)
        elif self._is_first:
            self._finished += results

    def _take_finished(self) -> bytes:
        data = _join(self._finished)
        self._finished.clear()
        return data

    def _entry(self, schedule: Schedule) -> StepEntry:
        counts = schedule.counts
        return StepEntry(
            num_decode_rows=counts.num_decode_rows,
            num_prefill_rows=counts.num_prefill_rows,
            load=self._scheduler.load,
            num_waiting=self._scheduler.num_waiting,
            num_free=self._scheduler.num_free,
            wants_stop=self._stop.is_set(),
            is_last=self._leader is not None and self._leader.is_done,
        )

    def _run_step(self, schedule: Schedule, counts: tuple[RankCounts, ...]) -> None:
        plan = make_plan(self._sequence, counts, self._rules)
        logits_NV = self._run_plan(plan, schedule)
        if self._is_first:
            sampled = sample(logits_NV, schedule.requests, schedule.sample_positions, vocab_size=self._shape.vocab_size)
            self._exchange.send_tokens([token.token_id for token in sampled])
        else:
            sampled = [SampledToken(token_id) for token_id in self._exchange.receive_tokens(len(schedule.requests))]
        self._finish(*self._scheduler.finish_step(schedule, sampled))

    def _run_plan(self, plan: StepPlan, schedule: Schedule) -> torch.Tensor:
        """Publish and run a plan; return the logits float32 [N, V] of the schedule's sample rows."""
        if self._leader is not None:
            self._leader.publish(plan)
        self._progress.begin_step(plan.sequence)
        self._sequence += 1
        self.steps[plan.mode.name.lower()] += 1
        if plan.mode is not RunMode.WARMUP:
            self.steps["prefill" if plan.has_prefill else "decode"] += 1
        stages = make_stages(
            schedule,
            real=[sum(stage.real[rank] for rank in self._tp_ranks) for stage in plan.stages],
            padded=[sum(stage.padded[rank] for rank in self._tp_ranks) for stage in plan.stages],
            block_size=self._shape.block_size,
            device=self._shape.device,
        )
        return self._step.run(plan, stages)

    def _interrupt(self) -> None:
        self.was_interrupted = True
        if self._leader is not None:
            self._leader.close_intake()
        self._finish(*self._scheduler.interrupt())


def _join(items: Iterable[Request | Result]) -> bytes:
    """Return one line of JSON per item; JSON escapes line breaks, so lines hold."""
    return b"\n".join(item.to_bytes() for item in items)
