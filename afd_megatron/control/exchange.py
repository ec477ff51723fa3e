"""What attention ranks tell each other around a step: counts, requests, results, tokens. Knows no model."""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from afd_megatron.control.messages import Tag, swap
from afd_megatron.distributed import World
from afd_megatron.errors import ProtocolError

_ENTRY = struct.Struct("<qQiiqii??")  # sequence, bytes of the blob that follows, then the fields of StepEntry


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
    """Attention ranks meet before each step: entries go from all to all, requests from rank 0, results to rank 0.

    TP ranks that serve the same requests schedule the same, each by itself; tokens are drawn by the first of them.
    """

    def __init__(self, world: World, *, timeout_s: float) -> None:
        self._world = world
        self._timeout_s = timeout_s
        self._sequence = 0
        self._tp_ranks = world.topology.tp_ranks(world.rank)

    def exchange(self, entry: StepEntry, requests: Mapping[int, bytes], results: bytes) -> Exchanged:
        """Exchange with all other attention ranks, which must call this as often.

        Args:
            requests: on rank 0, what it has for each attention rank; ranks without any may be left out.
            results: what this rank has for rank 0.

        Raises:
            PeerError: an attention rank is gone or late.
            ProtocolError: an attention rank is at another exchange than this one, or has scheduled otherwise than this
                one though both serve the same requests.
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
            tag=Tag.BLOB,
        )
        self._sequence += 1
        for peer in self._tp_ranks:
            if entries[peer][:-2] != entry[:-2]:
                name = self._world.topology.name(peer)
                raise ProtocolError(f"{name}: has {entries[peer]} (expected {entry}, as both serve the same requests)")
        if rank != leader:
            return Exchanged(entries, received.get(leader, b""), ())
        received[leader] = results
        return Exchanged(entries, requests.get(0, b""), tuple(received.get(peer, b"") for peer in ranks))

    def send_tokens(self, token_ids: Sequence[int]) -> None:
        """Tell the other TP ranks what this rank, the first of them, drew; raises as `receive_tokens` does."""
        data = struct.pack(f"<{len(token_ids)}q", *token_ids)
        self._swap({peer: data for peer in self._tp_ranks[1:]}, {}, tag=Tag.TOKENS)

    def receive_tokens(self, count: int) -> tuple[int, ...]:
        """Return the token ids that the first TP rank drew.

        Raises:
            PeerError: a TP rank is gone or late.
        """
        first = self._tp_ranks[0]
        return struct.unpack(f"<{count}q", self._swap({}, {first: 8 * count}, tag=Tag.TOKENS)[first])

    def _swap_entries(
        self, entry: StepEntry, blob_num_bytes: Mapping[int, int]
    ) -> tuple[tuple[StepEntry, ...], dict[int, int]]:
        """Return all entries by attention rank, and the size of the blob that each peer has for this rank."""
        outgoing = {peer: _ENTRY.pack(self._sequence, size, *entry) for peer, size in blob_num_bytes.items()}
        incoming = self._swap(outgoing, dict.fromkeys(outgoing, _ENTRY.size), tag=Tag.ENTRY)
        entries, num_bytes = {self._world.rank: entry}, {}
        for peer, data in incoming.items():
            sequence, num_bytes[peer], *fields = _ENTRY.unpack(data)
            if sequence != self._sequence:
                name = self._world.topology.name(peer)
                raise ProtocolError(f"{name}: exchange {sequence} of attention ranks (expected {self._sequence})")
            entries[peer] = StepEntry(*fields)
        return tuple(entries[peer] for peer in sorted(entries)), num_bytes

    def _swap(self, outgoing: Mapping[int, bytes], num_bytes: Mapping[int, int], *, tag: Tag) -> dict[int, bytes]:
        what = f"exchange {self._sequence} of attention ranks"
        return swap(self._world, outgoing, num_bytes, tag=tag, what=what, timeout_s=self._timeout_s)
