"""Messages between ranks: bytes of a known size, and a seal, so that a shorter one is noticed. Knows no content.

A tag belongs to one kind of message; the connector's are from 16 on.
"""

from collections.abc import Mapping
from enum import IntEnum

import torch

from afd_megatron.distributed import World
from afd_megatron.errors import ProtocolError

SEAL = b"AFD1SEAL"


class Tag(IntEnum):
    HANDSHAKE = 1
    PLAN = 2
    ENTRY = 3
    SIZE = 4
    BLOB = 5
    TOKENS = 6


def swap(
    world: World,
    outgoing: Mapping[int, bytes],
    num_bytes: Mapping[int, int],
    *,
    tag: Tag,
    what: str,
    timeout_s: float,
) -> dict[int, bytes]:
    """Send to each peer of `outgoing`, take `num_bytes[peer]` from each peer there, and return them by peer."""
    buffers = {peer: torch.zeros(size + len(SEAL), dtype=torch.uint8) for peer, size in num_bytes.items()}
    receives = [(peer, world.post_receive(buffer, peer, tag)) for peer, buffer in buffers.items()]
    sends = [(peer, world.send(sealed(data), peer, tag)) for peer, data in outgoing.items()]
    for peer, work in (*receives, *sends):
        world.wait(work, peer, what, timeout_s=timeout_s)
    return {peer: unsealed(buffer, f"{world.topology.name(peer)}: {what}") for peer, buffer in buffers.items()}


def sealed(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data + SEAL), dtype=torch.uint8)


def unsealed(buffer: torch.Tensor, what: str) -> bytes:
    """Return a copy of a message without its seal; a shorter message than `buffer` has none at its end."""
    data = buffer.numpy().tobytes()
    if not data.endswith(SEAL):
        raise ProtocolError(f"{what}: not a whole message of {len(data)} bytes")
    return data[: -len(SEAL)]
