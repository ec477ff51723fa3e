"""How step plans get from attention rank 0 to the FFN ranks. Knows no engine and no model."""

import struct
from contextlib import suppress
from enum import IntEnum

import torch
import torch.distributed as dist

from afd_megatron.control.messages import SEAL, Tag, sealed, unsealed
from afd_megatron.distributed import World
from afd_megatron.errors import AfdError, PeerError, ProtocolError
from afd_megatron.plan import PlanRules, StepPlan, check_plan, plan_num_bytes

_REASON_NUM_BYTES = 512
_ABORT_GRACE_S = 1.0
_FRAME = struct.Struct("<BxxxI")  # kind, bytes of the body


class _Kind(IntEnum):
    PLAN = 1
    HEARTBEAT = 2
    STOP = 3
    ABORT = 4


class PlanSender:
    """Attention rank 0's end of the plan channel. All FFN ranks get the same."""

    def __init__(self, world: World, rules: PlanRules, *, timeout_s: float) -> None:
        self._world = world
        self._num_bytes = _frame_num_bytes(rules)
        self._timeout_s = timeout_s
        self._pending: list[tuple[int, dist.Work]] = []

    def publish(self, plan: StepPlan) -> None:
        """Send the plan of the coming step; waits only for an FFN rank that has not taken the message before.

        Raises:
            PeerError: an FFN rank is gone, or does not take messages.
        """
        self._drain()
        self._send(_Kind.PLAN, plan.encode())

    def heartbeat(self) -> None:
        """Tell that this rank lives while it has no plan to send; raises as `publish` does."""
        self._drain()
        self._send(_Kind.HEARTBEAT, b"")

    def stop(self) -> None:
        """End the job; returns when the message has left. Raises as `publish` does."""
        self._send(_Kind.STOP, b"")
        self._drain()

    def abort(self, reason: str) -> None:
        """End the job as failed for all FFN ranks that can still be told; raises nothing."""
        with suppress(PeerError):
            self._send(_Kind.ABORT, reason.encode()[:_REASON_NUM_BYTES])
        while self._pending:
            peer, work = self._pending.pop(0)
            with suppress(PeerError):
                self._world.wait(work, peer, "abort", timeout_s=_ABORT_GRACE_S)

    def _send(self, kind: _Kind, body: bytes) -> None:
        frame = _FRAME.pack(kind, len(body)) + body
        data = sealed(frame.ljust(self._num_bytes, b"\0"))
        for peer in self._world.topology.ffn_ranks:
            self._pending.append((peer, self._world.send(data, peer, Tag.PLAN)))

    def _drain(self) -> None:
        while self._pending:
            peer, work = self._pending.pop(0)
            self._world.wait(work, peer, "taking of plans", timeout_s=self._timeout_s)


class PlanReceiver:
    """An FFN rank's end of the plan channel."""

    def __init__(self, world: World, rules: PlanRules, *, step_timeout_s: float, heartbeat_timeout_s: float) -> None:
        self._world = world
        self._rules = rules
        self._step_timeout_s = step_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._leader = world.topology.attention_ranks[0]
        self._sequence = 0
        self._buffer = torch.zeros(_frame_num_bytes(rules) + len(SEAL), dtype=torch.uint8)
        self._receive = world.post_receive(self._buffer, self._leader, Tag.PLAN)

    def next(self) -> StepPlan | None:
        """Wait for the next plan and return it, or None for the end of the job.

        There is no limit to the wait as long as heartbeats come; the first message, and the one after a plan, may take
        `step_timeout_s`.

        Raises:
            PeerError: attention rank 0 is gone or silent.
            ProtocolError: a message or plan that is not possible here, or not the next.
            AfdError: attention rank 0 aborts; carries its reason.
        """
        timeout_s = self._step_timeout_s
        while True:
            kind, body = self._take(timeout_s)
            if kind is not _Kind.HEARTBEAT:
                break
            timeout_s = self._heartbeat_timeout_s
        if kind is _Kind.STOP:
            return None
        name = self._world.topology.name(self._leader)
        if kind is _Kind.ABORT:
            raise AfdError(f"{name}: aborts: {body.decode(errors='replace')}")
        plan = StepPlan.decode(body)
        check_plan(plan, self._sequence, self._rules)
        self._sequence += 1
        return plan

    def _take(self, timeout_s: float) -> tuple[_Kind, bytes]:
        self._world.wait(self._receive, self._leader, "next plan or heartbeat", timeout_s=timeout_s)
        name = self._world.topology.name(self._leader)
        frame = unsealed(self._buffer, f"{name}: plan")
        number, num_bytes = _FRAME.unpack_from(frame)
        if number not in tuple(_Kind) or num_bytes > len(frame) - _FRAME.size:
            raise ProtocolError(f"{name}: plan message of kind {number}, {num_bytes} bytes (allowed kinds: 1 to 4)")
        if number not in (_Kind.STOP, _Kind.ABORT):
            self._buffer.zero_()
            self._receive = self._world.post_receive(self._buffer, self._leader, Tag.PLAN)
        return _Kind(number), frame[_FRAME.size : _FRAME.size + num_bytes]


def _frame_num_bytes(rules: PlanRules) -> int:
    return _FRAME.size + max(plan_num_bytes(rules.num_stages, rules.num_attention), _REASON_NUM_BYTES)
