"""One packed message of the exchange: header, payload, and the header again as its seal. Knows no transport.

A transport may deliver a shorter message without a word; then the seal at the planned end is an older one.
"""

import struct
from typing import NamedTuple

import torch

from afd_megatron.connector.base import ExchangeLayout
from afd_megatron.errors import ProtocolError
from afd_megatron.routing import Routing

_HEADER = struct.Struct("<4sIQqIIIIQ16x")  # magic, version, then the fields of Header; 64 bytes, so payload is aligned
_MAGIC = b"AFDM"
_VERSION = 1
_ALIGNMENT = 8


class Header(NamedTuple):
    """What a message says about itself. `top_k` is 0 if no routing travels, `num_bytes` is the payload's size."""

    job: int
    sequence: int
    layer: int
    stage: int
    rows: int
    top_k: int
    num_bytes: int


class Message:
    """A buffer for the messages of one stage and peer, allocated once at the ceiling of `layout`.

    The payload is hidden [rows, D] in the model's dtype, then, with `top_k`, ids int32 and weights float32 [rows, K].
    """

    def __init__(self, layout: ExchangeLayout, top_k: int, job: int) -> None:
        self._layout = layout
        self._top_k = top_k
        self._job = job
        self._row_bytes = layout.hidden_size * layout.dtype.itemsize
        capacity = layout.max_rows
        self.buffer = torch.empty(2 * _HEADER.size + self._payload_bytes(capacity, top_k), dtype=torch.uint8)
        self._bytes = memoryview(self.buffer.numpy())
        num_bytes = capacity * self._row_bytes
        hidden = self.buffer[_HEADER.size : _HEADER.size + num_bytes].view(layout.dtype)
        self._hidden_TD = hidden.view(capacity, layout.hidden_size)

    def payload_bytes(self, rows: int, layer: int) -> int:
        return self._payload_bytes(rows, self._top_k_of(layer))

    def pack(
        self, sequence: int, layer: int, stage: int, hidden_TD: torch.Tensor, routing: Routing | None
    ) -> torch.Tensor:
        """Write a message and return the part of `buffer` to send, uint8.

        Raises:
            ProtocolError: more rows than the ceiling, which the receiver could not survive.
        """
        rows = hidden_TD.shape[0]
        if rows > self._layout.max_rows:
            raise ProtocolError(
                f"step {sequence}, layer {layer}, stage {stage}:"
                f" {rows} rows to send (allowed: up to {self._layout.max_rows})"
            )
        assert (routing is not None) == bool(self._top_k_of(layer)), (routing, self._top_k, layer)
        self.hidden(rows).copy_(hidden_TD)
        if routing is not None:
            for place, source in zip(self._routing(rows), routing, strict=True):
                place.copy_(source)
        header = self._encode(sequence, layer, stage, rows)
        end = _HEADER.size + self.payload_bytes(rows, layer)
        self._bytes[: _HEADER.size] = header
        self._bytes[end : end + _HEADER.size] = header
        return self.buffer[: end + _HEADER.size]

    def check(self, sequence: int, layer: int, stage: int, rows: int, *, sender: str, is_ceiling: bool = False) -> int:
        """Check that the message in `buffer` is the one given; return its rows, which may be fewer than a ceiling.

        Raises:
            ProtocolError: another message, or a shorter one; names sender, layer, stage and both values.
        """
        if is_ceiling:
            rows = min(rows, Header(*_HEADER.unpack(self._bytes[: _HEADER.size])[2:]).rows)
        expected = self._encode(sequence, layer, stage, rows)
        end = _HEADER.size + self.payload_bytes(rows, layer)
        if self._bytes[: _HEADER.size] == expected and self._bytes[end : end + _HEADER.size] == expected:
            return rows
        where = f"{sender}: step {sequence}, layer {layer}, stage {stage}"
        magic, version, *fields = _HEADER.unpack(self._bytes[: _HEADER.size])
        if (magic, version) != (_MAGIC, _VERSION):
            raise ProtocolError(f"{where}: {magic!r} version {version} (expected {_MAGIC!r} version {_VERSION})")
        header = Header(*fields)
        for name, value, wanted in zip(Header._fields, header, _HEADER.unpack(expected)[2:], strict=True):
            if value != wanted:
                raise ProtocolError(f"{where}: message has {name} {value} (expected {wanted})")
        raise ProtocolError(f"{where}: message is shorter than its header says ({header.num_bytes} bytes expected)")

    def hidden(self, rows: int) -> torch.Tensor:
        """Return hidden [rows, D], a view of the buffer."""
        return self._hidden_TD[:rows]

    def routing(self, rows: int, layer: int) -> Routing | None:
        """Return the routing of the rows as views of the buffer; None if none travels."""
        return self._routing(rows) if self._top_k_of(layer) else None

    def _top_k_of(self, layer: int) -> int:
        return 0 if layer in self._layout.unrouted_layers else self._top_k

    def _payload_bytes(self, rows: int, top_k: int) -> int:
        return self._routing_offset(rows) + rows * top_k * 8

    def _routing_offset(self, rows: int) -> int:
        return -(-rows * self._row_bytes // _ALIGNMENT) * _ALIGNMENT

    def _routing(self, rows: int) -> Routing:
        start, size = _HEADER.size + self._routing_offset(rows), rows * self._top_k * 4
        ids = self.buffer[start : start + size].view(torch.int32)
        weights = self.buffer[start + size : start + 2 * size].view(torch.float32)
        return Routing(ids.view(rows, self._top_k), weights.view(rows, self._top_k))

    def _encode(self, sequence: int, layer: int, stage: int, rows: int) -> bytes:
        top_k = self._top_k_of(layer)
        header = Header(self._job, sequence, layer, stage, rows, top_k, self._payload_bytes(rows, top_k))
        return _HEADER.pack(_MAGIC, _VERSION, *header)
