"""What all ranks tell each other before the first step and after the last one. Knows no engine and no model."""

import struct
from collections.abc import Mapping

from afd_megatron.control.messages import Tag, swap
from afd_megatron.distributed import World
from afd_megatron.errors import ProtocolError

_HANDSHAKE_NUM_BYTES = 8192
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
    records = swap(world, outgoing, num_bytes, tag=Tag.HANDSHAKE, what="handshake", timeout_s=timeout_s)
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
        swap(world, {0: _SIZE.pack(len(data))}, {}, tag=Tag.SIZE, what=what, timeout_s=timeout_s)
        swap(world, {0: data}, {}, tag=Tag.BLOB, what=what, timeout_s=timeout_s)
        return ()
    peers = range(1, world.topology.world_size)
    sizes = swap(world, {}, dict.fromkeys(peers, _SIZE.size), tag=Tag.SIZE, what=what, timeout_s=timeout_s)
    num_bytes = {peer: _SIZE.unpack(size)[0] for peer, size in sizes.items()}
    received = swap(world, {}, num_bytes, tag=Tag.BLOB, what=what, timeout_s=timeout_s)
    return (data, *(received[peer] for peer in peers))


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
