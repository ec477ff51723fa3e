"""Which rows an attention rank runs in a step, and which requests that ends. Knows no tensors, no model, no peers.

T rows of a step, B decode rows of it, M blocks per request.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from afd_megatron.engine.kv_blocks import BlockPool
from afd_megatron.engine.request import FinishReason, Request, Result, SampledToken
from afd_megatron.engine.served import ServedRequest
from afd_megatron.engine.text import TextCodec
from afd_megatron.plan import RankCounts


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one attention rank: requests that run at once, tokens of a request, prompt rows of a step."""

    max_requests: int
    max_context: int
    prefill_chunk: int


class PromptRows(NamedTuple):
    """Consecutive prompt tokens of one request that run in a step, the first at `position`; blocks int64 [M]."""

    slot: int
    position: int
    num_rows: int
    block_table_M: np.ndarray


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's rows: a decode row of every request whose prompt is done, then rows of prompts.

    `token_ids_T`, `positions_T` int64 [T]; `block_table_BM` int64 [B, M], unused entries 0. `sample_rows` are the rows
    whose next token is drawn, ascending; `slots`, `requests` and `sample_positions` (of the new token) go with them.
    """

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    block_table_BM: np.ndarray
    prompts: tuple[PromptRows, ...]
    sample_rows: tuple[int, ...]
    sample_positions: tuple[int, ...]
    slots: tuple[int, ...]
    requests: tuple[Request, ...]

    @property
    def counts(self) -> RankCounts:
        num_decode_rows = len(self.block_table_BM)
        return RankCounts(num_decode_rows, len(self.token_ids_T) - num_decode_rows)


class Scheduler:
    """Continuous batching on one attention rank: first come, first served, by places and by blocks.

    `clock` gives seconds and is read for the times in results only.
    """

    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, codec: TextCodec, *, clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._codec = codec
        self._clock = clock
        self._waiting: deque[ServedRequest] = deque()
        self._num_waiting_tokens = 0
        self._running: dict[int, ServedRequest] = {}  # by slot, in order of admission
        self._free_slots = list(range(limits.max_requests))
        self._in_flight: Schedule | None = None
        self._last_tokens = np.zeros(limits.max_requests, np.int64)
        self._positions = np.zeros(limits.max_requests, np.int64)
        self._block_tables = np.zeros((limits.max_requests, pool.num_blocks_for(limits.max_context)), np.int64)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        """Places for requests; whether there are blocks too, admission decides."""
        return len(self._free_slots)

    @property
    def load(self) -> int:
        """Outstanding tokens: prompt tokens left to compute and tokens left to generate."""
        return self._num_waiting_tokens + sum(served.num_tokens_left for served in self._running.values())

    def add(self, request: Request, waited_s: float = 0.0) -> Result | None:
        """Queue a request that arrived `waited_s` ago; return its result if it needs no step or can never run."""
        now_s = self._clock()
        served = ServedRequest(request, now_s - waited_s, min(request.max_tokens, self._limits.max_context))
        error = self._reason_to_refuse(served)
        if error is not None:
            return served.result(FinishReason.ERROR, self._codec, now_s, error)
        if request.sampling.max_new_tokens == 0:
            return served.result(FinishReason.LENGTH, self._codec, now_s)
        self._waiting.append(served)
        self._num_waiting_tokens += served.limit
        return None

    def schedule(self) -> Schedule:
        """Return the rows of the next step, possibly none; `finish_step` must follow before the next call."""
        assert self._in_flight is None, "the last step is not finished"
        slots = [slot for slot, served in self._running.items() if not served.num_prompt_left]
        sample_rows = list(range(len(slots)))
        token_ids, positions = self._last_tokens[slots], self._positions[slots]
        block_table_BM = self._block_tables[slots]
        prompts: list[PromptRows] = []
        prompt_ids: list[int] = []
        prompt_positions: list[int] = []
        for served, num_rows in self._take_prompts():
            start, end = served.num_computed, served.num_computed + num_rows
            prompts.append(PromptRows(served.slot, start, num_rows, self._block_tables[served.slot].copy()))
            prompt_ids += served.request.prompt_token_ids[start:end]
            prompt_positions += range(start, end)
            if num_rows == served.num_prompt_left:
                sample_rows.append(len(block_table_BM) + len(prompt_ids) - 1)
                slots.append(served.slot)
        sampling = [self._running[slot] for slot in slots]
        self._in_flight = Schedule(
            token_ids_T=np.concatenate((token_ids, np.array(prompt_ids, np.int64))),
            positions_T=np.concatenate((positions, np.array(prompt_positions, np.int64))),
            block_table_BM=block_table_BM,
            prompts=tuple(prompts),
            sample_rows=tuple(sample_rows),
            sample_positions=tuple([served.num_tokens for served in sampling]),
            slots=tuple(slots),
            requests=tuple([served.request for served in sampling]),
        )
        return self._in_flight

    def finish_step(self, schedule: Schedule, sampled: Sequence[SampledToken]) -> list[Result]:
        """Take the tokens drawn for `schedule.requests`; return the results of the requests they end."""
        assert schedule is self._in_flight, "not the schedule in flight"
        assert len(sampled) == len(schedule.slots), (len(sampled), len(schedule.slots))
        self._in_flight = None
        now_s = self._clock()
        for prompt in schedule.prompts:
            self._running[prompt.slot].num_computed += prompt.num_rows
        slots = list(schedule.slots)
        self._last_tokens[slots] = [token.token_id for token in sampled]
        self._positions[slots] = schedule.sample_positions
        results = []
        for slot, token in zip(slots, sampled, strict=True):
            reason = self._running[slot].append(token, self._codec, now_s)
            if reason is not None:
                results.append(self._finish(slot, reason, now_s))
        return results

    def interrupt(self) -> list[Result]:
        """End every request, running ones with the tokens they have; drop the step in flight."""
        self._in_flight = None
        now_s = self._clock()
        results = [self._finish(slot, FinishReason.INTERRUPTED, now_s) for slot in list(self._running)]
        results += [served.result(FinishReason.INTERRUPTED, self._codec, now_s) for served in self._waiting]
        self._waiting.clear()
        self._num_waiting_tokens = 0
        return results

    def _reason_to_refuse(self, served: ServedRequest) -> str | None:
        num_prompt, max_context = len(served.request.prompt_token_ids), self._limits.max_context
        if not 0 < num_prompt < max_context:
            return f"prompt: {num_prompt} tokens (allowed: 1 to {max_context - 1}, below engine.max_context)"
        if not self._pool.can_ever_allocate(served.limit):
            usable = self._pool.num_usable * self._pool.block_size
            return f"prompt and new tokens: {served.limit} (allowed: up to {usable}, all of engine.kv_blocks)"
        return None

    def _take_prompts(self) -> Iterator[tuple[ServedRequest, int]]:
        """Yield the prompts of this step and how many of their rows; admit requests as long as rows are left."""
        num_left = self._limits.prefill_chunk
        unfinished = deque([served for served in self._running.values() if served.num_prompt_left])
        while num_left and (unfinished or self._can_admit()):
            served = unfinished.popleft() if unfinished else self._admit()
            num_rows = min(num_left, served.num_prompt_left)
            num_left -= num_rows
            yield served, num_rows

    def _can_admit(self) -> bool:
        return bool(self._waiting and self._free_slots) and self._pool.can_allocate(self._waiting[0].limit)

    def _admit(self) -> ServedRequest:
        served = self._waiting.popleft()
        self._num_waiting_tokens -= served.limit
        served.slot = self._free_slots.pop()
        served.blocks = self._pool.allocate(served.limit)
        self._block_tables[served.slot] = 0
        self._block_tables[served.slot, : len(served.blocks)] = served.blocks
        self._running[served.slot] = served
        return served

    def _finish(self, slot: int, reason: FinishReason, now_s: float) -> Result:
        served = self._running.pop(slot)
        self._free_slots.append(slot)
        self._pool.free(served.blocks)
        return served.result(reason, self._codec, now_s)
