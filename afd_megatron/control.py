"""What ranks tell each other besides hidden states: settings at the start, attention's counts, the step plans.

Every message has a fixed size and ends in a seal, so that a shorter one is noticed. Knows no engine and no model.
"""

import struct
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from afd_megatron.distributed import World
from afd_megatron.errors import AfdError, PeerError, ProtocolError
from afd_megatron.plan import PlanRules, StepPlan, check_plan, plan_num_bytes

_HANDSHAKE_TAG, _PLAN_TAG, _ENTRY_TAG, _SIZE_TAG, _BLOB_TAG = range(1, 6)  # from 16 on: the connector's
_HANDSHAKE_NUM_BYTES = 8192
_REASON_NUM_BYTES = 512
_ABORT_GRACE_S = 1.0
_SEAL = b"AFD1SEAL"
_FRAME = struct.Struct("<BxxxI")  # kind, bytes of the body
_ENTRY = struct.Struct("<qQiiqii??")  # sequence, bytes of the blob that follows, then the fields of StepEntry
_SIZE = struct.Struct("<Q")


def handshake(world: World, fields: Mapping[str, str], *, timeout_s: float) -> None:
    """Compare what the protocol depends on with all other ranks.

    Raises:
        ProtocolError: ranks differ; the same on every rank, naming each field with its values and their ranks.
        PeerError: a rank is gone or late.
    """
    text = "\0".join(part for item in sorted(fields.items()) for part in item).encode()
    assert len(text) <= _HANDSHAKE_NUM_BYTES - 4, len(text)
    record = struct.pack(f"<I{_HANDSHAKE_NUM_BYTES - 4}s", len(text), text)
    outgoing = {rank: record for rank in range(world.topology.world_size) if rank != world.rank}
    num_bytes = dict.fromkeys(outgoing, len(record))
    records = _swap(world, outgoing, num_bytes, tag=_HANDSHAKE_TAG, what="handshake", timeout_s=timeout_s)
    by_rank = {world.rank: dict(fields)}
    for rank, data in records.items():
        parts = data[4 : 4 + int.from_bytes(data[:4], "little")].decode(errors="replace").split("\0")
        by_rank[rank] = dict(zip(parts[::2], parts[1::2], strict=False))
    differences = _differences(world, by_rank)
    if differences:
        raise ProtocolError(f"handshake: {'; '.join(differences)}")


def gather(world: World, data: bytes, *, timeout_s: float) -> tuple[bytes, ...]:
    """Send `data` to rank 0, and return there what all ranks have sent, by rank; empty on other ranks.

    Raises:
        PeerError: a rank is gone or late.
    """
    what = "gather"
    if world.rank != 0:
        _swap(world, {0: _SIZE.pack(len(data))}, {}, tag=_SIZE_TAG, what=what, timeout_s=timeout_s)
        _swap(world, {0: data}, {}, tag=_BLOB_TAG, what=what, timeout_s=timeout_s)
        return ()
    peers = range(1, world.topology.world_size)
    sizes = _swap(world, {}, dict.fromkeys(peers, _SIZE.size), tag=_SIZE_TAG, what=what, timeout_s=timeout_s)
    num_bytes = {peer: _SIZE.unpack(size)[0] for peer, size in sizes.items()}
    received = _swap(world, {}, num_bytes, tag=_BLOB_TAG, what=what, timeout_s=timeout_s)
    return (data, *(received[peer] for peer in peers))


class StepEntry(NamedTuple):
    """What an attention rank tells the others before a step.

    `load`: tokens its requests have yet to run. `num_waiting`: requests without a place. `num_free`: places without a
    request. `wants_stop`: it was asked to end early. `is_last`: there is no more work; only rank 0's counts.
    """

    num_decode_rows: int
    num_prefill_rows: int
    load: int
    num_waiting: int
    num_free: int
    wants_stop: bool
    is_last: bool


class Exchanged(NamedTuple):
    """Entries by attention rank; the requests for this rank; on rank 0 the results by attention rank, else none."""

    entries: tuple[StepEntry, ...]
    requests: bytes
    results: tuple[bytes, ...]


class AttentionExchange:
    """Attention ranks meet before each step: entries go from all to all, requests from rank 0, results to rank 0."""

    def __init__(self, world: World, *, timeout_s: float) -> None:
        self._world = world
        self._timeout_s = timeout_s
        self._sequence = 0

    def exchange(self, entry: StepEntry, requests: Mapping[int, bytes], results: bytes) -> Exchanged:
        """Exchange with all other attention ranks, which must call this as often.

        Args:
            requests: on rank 0, what it has for each attention rank; ranks without any may be left out.
            results: what this rank has for rank 0.

        Raises:
            PeerError: an attention rank is gone or late.
            ProtocolError: an attention rank is at another exchange than this one.
        """
        rank, ranks = self._world.rank, self._world.topology.attention_ranks
        leader = ranks[0]
        blobs = {peer: results if peer == leader else b"" for peer in ranks if peer != rank}
        if rank == leader:
            blobs = {peer: requests.get(peer - leader, b"") for peer in blobs}
        entries, num_bytes = self._swap_entries(entry, {peer: len(blob) for peer, blob in blobs.items()})
        received = self._swap(
            {peer: blob for peer, blob in blobs.items() if blob},
            {peer: size for peer, size in num_bytes.items() if size},
            tag=_BLOB_TAG,
        )
        self._sequence += 1
        if rank != leader:
            return Exchanged(entries, received.get(leader, b""), ())
        received[leader] = results
        return Exchanged(entries, requests.get(0, b""), tuple(received.get(peer, b"") for peer in ranks))

    def _swap_entries(
        self, entry: StepEntry, blob_num_bytes: Mapping[int, int]
    ) -> tuple[tuple[StepEntry, ...], dict[int, int]]:
        """Return all entries by attention rank, and the size of the blob that each peer has for this rank."""
        outgoing = {peer: _ENTRY.pack(self._sequence, size, *entry) for peer, size in blob_num_bytes.items()}
        incoming = self._swap(outgoing, dict.fromkeys(outgoing, _ENTRY.size), tag=_ENTRY_TAG)
        entries, num_bytes = {self._world.rank: entry}, {}
        for peer, data in incoming.items():
            sequence, num_bytes[peer], *fields = _ENTRY.unpack(data)
            if sequence != self._sequence:
                name = self._world.topology.name(peer)
                raise ProtocolError(f"{name}: exchange {sequence} of attention ranks (expected {self._sequence})")
            entries[peer] = StepEntry(*fields)
        return tuple(entries[peer] for peer in sorted(entries)), num_bytes

    def _swap(self, outgoing: Mapping[int, bytes], num_bytes: Mapping[int, int], *, tag: int) -> dict[int, bytes]:
        what = f"exchange {self._sequence} of attention ranks"
        return _swap(self._world, outgoing, num_bytes, tag=tag, what=what, timeout_s=self._timeout_s)


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
        data = _sealed(frame.ljust(self._num_bytes, b"\0"))
        for peer in self._world.topology.ffn_ranks:
            self._pending.append((peer, self._world.send(data, peer, _PLAN_TAG)))

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
        self._buffer = torch.zeros(_frame_num_bytes(rules) + len(_SEAL), dtype=torch.uint8)
        self._receive = world.post_receive(self._buffer, self._leader, _PLAN_TAG)

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
        frame = _unsealed(self._buffer, f"{name}: plan")
        number, num_bytes = _FRAME.unpack_from(frame)
        if number not in tuple(_Kind) or num_bytes > len(frame) - _FRAME.size:
            raise ProtocolError(f"{name}: plan message of kind {number}, {num_bytes} bytes (allowed kinds: 1 to 4)")
        if number not in (_Kind.STOP, _Kind.ABORT):
            self._buffer.zero_()
            self._receive = self._world.post_receive(self._buffer, self._leader, _PLAN_TAG)
        return _Kind(number), frame[_FRAME.size : _FRAME.size + num_bytes]


def _differences(world: World, by_rank: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a line per field that is not the same on all ranks."""
    lines = []
    for field in sorted({field for fields in by_rank.values() for field in fields}):
        ranks_by_value: dict[str, list[str]] = {}
        for rank, fields in sorted(by_rank.items()):
            ranks_by_value.setdefault(fields.get(field, "missing"), []).append(world.topology.name(rank))
        if len(ranks_by_value) > 1:
            values = (f"{value} on {', '.join(names)}" for value, names in ranks_by_value.items())
            lines.append(f"{field} is {' but '.join(values)}")
    return lines


def _frame_num_bytes(rules: PlanRules) -> int:
    return _FRAME.size + max(plan_num_bytes(rules.num_stages, rules.num_attention), _REASON_NUM_BYTES)


def _swap(
    world: World,
    outgoing: Mapping[int, bytes],
    num_bytes: Mapping[int, int],
    *,
    tag: int,
    what: str,
    timeout_s: float,
) -> dict[int, bytes]:
    """Send to each peer of `outgoing`, take `num_bytes[peer]` from each peer there, and return them by peer."""
    buffers = {peer: torch.zeros(size + len(_SEAL), dtype=torch.uint8) for peer, size in num_bytes.items()}
    receives = [(peer, world.post_receive(buffer, peer, tag)) for peer, buffer in buffers.items()]
    sends = [(peer, world.send(_sealed(data), peer, tag)) for peer, data in outgoing.items()]
    for peer, work in (*receives, *sends):
        world.wait(work, peer, what, timeout_s=timeout_s)
    return {peer: _unsealed(buffer, f"{world.topology.name(peer)}: {what}") for peer, buffer in buffers.items()}


def _sealed(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data + _SEAL), dtype=torch.uint8)


def _unsealed(buffer: torch.Tensor, what: str) -> bytes:
    """Return a copy of a message without its seal; a shorter message than `buffer` has none at its end."""
    data = buffer.numpy().tobytes()
    if not data.endswith(_SEAL):
        raise ProtocolError(f"{what}: not a whole message of {len(data)} bytes")
    return data[: -len(_SEAL)]
