"""The two ends of the exchange: what an attention step and an FFN step may ask of a transport. Knows no transport.

T rows of one stage on one attention rank, R rows of one stage from all of them in rank order, D hidden, K top-k.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from afd_megatron.plan import StepPlan
from afd_megatron.routing import Routing


class Dispatched(NamedTuple):
    """One stage as it arrived: `hidden_RD` in the model's dtype; `routing` only if the gate sits on attention."""

    hidden_RD: torch.Tensor
    routing: Routing | None


class ExchangeLayout(NamedTuple):
    """What a port must know about the messages; `top_k` is 0 if the gate sits on the FFN.

    Where it is not, rows of `unrouted_layers` (dense ones) still travel without routing, and to every FFN rank.
    `last_layer` is the last one whose rows travel at all. With `expert_slices`, the experts of each FFN rank, a rank
    gets those rows alone that chose one of them.
    """

    hidden_size: int
    top_k: int
    dtype: torch.dtype
    last_layer: int
    num_stages: int
    max_rows: int
    unrouted_layers: frozenset[int] = frozenset()
    expert_slices: tuple[range, ...] | None = None

    def is_routed(self, layer: int) -> bool:
        return self.expert_slices is not None and layer not in self.unrouted_layers

    def rows_of(self, ffn: int, layer: int, routing: Routing | None) -> torch.Tensor | None:
        """Return the rows that go to an FFN rank, int64, ascending; None for all of them."""
        if self.expert_slices is None or routing is None:
            return None
        mine, ids_TK = self.expert_slices[ffn], routing.topk_ids
        return ((ids_TK >= mine.start) & (ids_TK < mine.stop)).any(dim=1).nonzero()[:, 0]


@dataclass(slots=True)
class TrafficCounters:
    """Rows and payload bytes this end has sent and received so far: padded rows, once per peer they went to."""

    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def sent(self, rows: int, num_bytes: int) -> None:
        self.rows_sent += rows
        self.bytes_sent += num_bytes

    def received(self, rows: int, num_bytes: int) -> None:
        self.rows_received += rows
        self.bytes_received += num_bytes


class AttentionPort(ABC):
    """Attention's end. Per step: `begin_step`, then dispatch and combine in the order of `pipeline`.

    A (layer, stage) in which this rank has 0 padded rows sends and takes no message.
    """

    traffic: TrafficCounters

    @abstractmethod
    def begin_step(self, plan: StepPlan) -> None:
        """Prepare for the messages of `plan`. No message of the last step may be outstanding."""

    @abstractmethod
    def dispatch(self, layer: int, stage: int, hidden_TD: torch.Tensor, routing: Routing | None) -> None:
        """Send every FFN rank the stage's rows, or those that hit its experts.

        Never waits for a peer; the arguments may be reused on return.
        """

    @abstractmethod
    def combine(self, layer: int, stage: int) -> torch.Tensor:
        """Wait for every FFN rank's partial sum and return their sum [T, D] in the model's dtype.

        Partials are added in float32, in FFN-rank order. The result stays valid until the next dispatch of the stage.

        Raises:
            PeerError: a peer is gone or late; names peer, layer and stage.
            ProtocolError: a message is not the one expected.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait until the last messages have left, and let the buffers go. A second call does nothing."""


class FfnPort(ABC):
    """The FFN's end. Per step: `begin_step`, then receive and reply in the order of `pipeline`.

    A (layer, stage) in which no attention rank has padded rows is neither received nor replied to.
    """

    traffic: TrafficCounters

    @abstractmethod
    def begin_step(self, plan: StepPlan) -> None:
        """Prepare for the messages of `plan`. No message of the last step may be outstanding."""

    @abstractmethod
    def receive(self, layer: int, stage: int) -> Dispatched:
        """Wait for the stage of every attention rank that has rows in it; valid until `reply` of the same stage.

        Raises:
            PeerError: a peer is gone or late; names peer, layer and stage.
            ProtocolError: a message is not the one expected.
        """

    @abstractmethod
    def reply(self, layer: int, stage: int, partial_RD: torch.Tensor) -> None:
        """Send each attention rank the rows of `partial_RD` (model's dtype) that it sent. Never waits for a peer."""

    @abstractmethod
    def close(self) -> None:
        """Wait until the last messages have left, and let the buffers go. A second call does nothing."""
