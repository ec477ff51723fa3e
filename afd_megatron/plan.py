"""One step as data that every rank agrees on, and its bytes on the wire. Knows no tensors, no transport."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import chain
from typing import NamedTuple

from afd_megatron.errors import ProtocolError

PLAN_VERSION = 1

_HEAD = struct.Struct("<4sHHqBBHH")  # magic, version, size of head, sequence, mode, profile, stages, attention ranks
_MAGIC = b"AFDP"


class RunMode(IntEnum):
    """What attention asks of a step. FFN ranks follow it; `ffn_action` is the table."""

    WARMUP = 0
    CAPTURE = 1
    REPLAY = 2
    EAGER = 3


class Phase(IntEnum):
    """What an attention rank brings to a step. A rank with any prompt row is in PREFILL."""

    IDLE = 0
    PREFILL = 1
    DECODE = 2


class FfnAction(StrEnum):
    EAGER = "eager"
    CAPTURE = "capture"
    REPLAY = "replay"


class RankCounts(NamedTuple):
    """Rows one attention rank has scheduled for the coming step."""

    num_decode_rows: int
    num_prefill_rows: int

    @property
    def num_rows(self) -> int:
        return self.num_decode_rows + self.num_prefill_rows

    @property
    def phase(self) -> Phase:
        if self.num_prefill_rows:
            return Phase.PREFILL
        return Phase.DECODE if self.num_decode_rows else Phase.IDLE


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What turns counts into a plan; equal on all ranks (the handshake checks it).

    `buckets` are rows per rank and stage, ascending; only used with `graphs_enabled`.
    `max_rows` bounds the rows of one rank and stage. Each `attention_tp` attention ranks in a row serve the same
    requests, and of their stages each dispatches a shard of the rows.
    """

    num_stages: int
    num_attention: int
    max_rows: int
    graphs_enabled: bool = False
    buckets: tuple[int, ...] = ()
    attention_tp: int = 1


@dataclass(frozen=True, slots=True)
class StageRows:
    """Rows of one stage by attention rank: `padded` is what travels, `real` is what counts."""

    padded: tuple[int, ...]
    real: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.padded)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The one decision about a step. `key` names the graph that may serve it: the full layout, never a sum."""

    sequence: int
    mode: RunMode
    stages: tuple[StageRows, ...]
    phases: tuple[Phase, ...]
    profile: bool = False

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        return tuple(stage.padded for stage in self.stages)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def has_prefill(self) -> bool:
        return Phase.PREFILL in self.phases

    @property
    def num_attention(self) -> int:
        return len(self.phases)

    def encode(self) -> bytes:
        """Return the fixed little-endian layout of this plan; `plan_num_bytes` gives its size."""
        head = _HEAD.pack(
            _MAGIC,
            PLAN_VERSION,
            _HEAD.size,
            self.sequence,
            self.mode,
            self.profile,
            self.num_stages,
            self.num_attention,
        )
        rows = [count for stage in self.stages for pair in zip(stage.padded, stage.real, strict=True) for count in pair]
        return head + struct.pack(f"<{len(rows)}i{len(self.phases)}B", *rows, *self.phases)

    @classmethod
    def decode(cls, data: bytes) -> "StepPlan":
        """Read what `encode` wrote.

        Raises:
            ProtocolError: wrong magic, version, size or a value outside its range.
        """
        if len(data) < _HEAD.size:
            raise ProtocolError(f"step plan: {len(data)} bytes (at least {_HEAD.size} expected)")
        magic, version, head_size, sequence, mode, profile, num_stages, num_attention = _HEAD.unpack_from(data)
        if (magic, version, head_size) != (_MAGIC, PLAN_VERSION, _HEAD.size):
            raise ProtocolError(f"step plan: {magic!r} version {version} (expected {_MAGIC!r} version {PLAN_VERSION})")
        if len(data) != plan_num_bytes(num_stages, num_attention):
            raise ProtocolError(f"step plan: {len(data)} bytes for {num_stages} stages of {num_attention} ranks")
        num_counts = 2 * num_stages * num_attention
        values = struct.unpack_from(f"<{num_counts}i{num_attention}B", data, _HEAD.size)
        stages = []
        for stage in range(num_stages):
            counts = values[2 * stage * num_attention : 2 * (stage + 1) * num_attention]
            stages.append(StageRows(padded=counts[0::2], real=counts[1::2]))
        try:
            phases = tuple(Phase(value) for value in values[num_counts:])
            return cls(sequence, RunMode(mode), tuple(stages), phases, bool(profile))
        except ValueError as error:
            raise ProtocolError(f"step plan: {error}") from error


def plan_num_bytes(num_stages: int, num_attention: int) -> int:
    return _HEAD.size + (8 * num_stages + 1) * num_attention


def split_rows(num_rows: int, num_stages: int) -> tuple[int, ...]:
    """Return the rows of each stage: contiguous, sizes differ by at most one, larger first. Also those of TP shards."""
    size, extra = divmod(num_rows, num_stages)
    return tuple(size + (stage < extra) for stage in range(num_stages))


def make_plan(sequence: int, counts: tuple[RankCounts, ...], rules: PlanRules) -> StepPlan:
    """Return the plan of a step from what each attention rank scheduled; pure, so every rank comes to the same.

    A step with any prompt row, or without graphs, or above every bucket is EAGER and travels unpadded. Otherwise every
    rank and stage is padded to one common bucket, the smallest that holds the largest need.
    """
    tp = rules.attention_tp
    assert len(counts) == rules.num_attention, (counts, rules)
    rows_by_dp = [split_rows(count.num_rows, rules.num_stages) for count in counts[::tp]]
    stages = [[split_rows(num_rows, tp) for num_rows in stage] for stage in zip(*rows_by_dp, strict=True)]
    largest = max(shards[0] for stage in stages for shards in stage)
    assert largest <= rules.max_rows, (largest, rules.max_rows)
    phases = tuple(count.phase for count in counts)
    bucket = next((bucket for bucket in rules.buckets if bucket >= largest), None)
    if not rules.graphs_enabled or bucket is None or Phase.PREFILL in phases:
        real = [tuple(chain.from_iterable(stage)) for stage in stages]
        return StepPlan(sequence, RunMode.EAGER, tuple(StageRows(rows, rows) for rows in real), phases)
    padded = (bucket,) * rules.num_attention
    real = [tuple(chain.from_iterable(_filled(sum(shards), bucket, tp) for shards in stage)) for stage in stages]
    return StepPlan(sequence, RunMode.REPLAY, tuple(StageRows(padded, rows) for rows in real), phases)


def warmup_plan(sequence: int, num_rows: int, rules: PlanRules) -> StepPlan:
    """Return a dummy step of `num_rows` padded rows of each DP rank, none of them real."""
    num_dp, nothing = rules.num_attention // rules.attention_tp, (0,) * rules.num_attention
    shards = [split_rows(size, rules.attention_tp) * num_dp for size in split_rows(num_rows, rules.num_stages)]
    rows = tuple(StageRows(padded, nothing) for padded in shards)
    return StepPlan(sequence, RunMode.WARMUP, rows, (Phase.IDLE,) * rules.num_attention)


def check_plan(plan: StepPlan, sequence: int, rules: PlanRules) -> None:
    """Check that `plan` is number `sequence` and possible under `rules`.

    Raises:
        ProtocolError: a repeated or skipped number, another layout, or rows outside 0..max_rows.
    """
    if plan.sequence != sequence:
        raise ProtocolError(f"step plan: sequence {plan.sequence} (expected {sequence})")
    layout = (plan.num_stages, plan.num_attention)
    if layout != (rules.num_stages, rules.num_attention):
        raise ProtocolError(
            f"step plan {sequence}: {layout[0]} stages of {layout[1]} ranks"
            f" (expected {rules.num_stages} of {rules.num_attention})"
        )
    for stage, rows in enumerate(plan.stages):
        for rank, (padded, real) in enumerate(zip(rows.padded, rows.real, strict=True)):
            if not 0 <= real <= padded <= rules.max_rows:
                raise ProtocolError(
                    f"step plan {sequence}: attention {rank}, stage {stage}: {real} real of {padded} padded rows"
                    f" (allowed: 0 <= real <= padded <= {rules.max_rows})"
                )
    if plan.mode in (RunMode.CAPTURE, RunMode.REPLAY) and not rules.graphs_enabled:
        raise ProtocolError(f"step plan {sequence}: mode {plan.mode.name} with graphs disabled")


def ffn_action(mode: RunMode, has_graph: bool) -> tuple[FfnAction, str | None]:
    """Return what an FFN rank does under `mode`, and why if that is not what was asked. (DESIGN: run modes.)"""
    if mode is RunMode.CAPTURE:
        return FfnAction.CAPTURE, None
    if mode is RunMode.REPLAY:
        return (FfnAction.REPLAY, None) if has_graph else (FfnAction.EAGER, "no graph for the layout")
    return FfnAction.EAGER, None


def _filled(num_rows: int, bucket: int, tp: int) -> Iterator[int]:
    """Yield the real rows of each shard of `bucket` rows; padding comes last, so the first shards are full."""
    for shard in range(tp):
        yield min(max(num_rows - shard * bucket, 0), bucket)
