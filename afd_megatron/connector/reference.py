"""The exchange within one process: the oracle of every other connector, and `local`. Knows no processes, no bytes.

The ends may live in threads of their own or be driven in turn by one.
"""

from collections import defaultdict
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from afd_megatron.connector.base import AttentionPort, Dispatched, ExchangeLayout, FfnPort, TrafficCounters
from afd_megatron.errors import PeerError, ProtocolError
from afd_megatron.plan import StepPlan
from afd_megatron.routing import Routing
from afd_megatron.topology import Topology


class Mail(NamedTuple):
    """A stage's rows on their way, with what they are."""

    sequence: int
    layer: int
    hidden_TD: torch.Tensor
    routing: Routing | None


class ReferenceExchange:
    """What lies between the ends.

    With `copies` False a tensor is handed over as it is, and its sender leaves it alone until the stage is combined.
    """

    def __init__(
        self, topology: Topology, layout: ExchangeLayout, *, timeout_s: float = 30.0, copies: bool = True
    ) -> None:
        self.topology = topology
        self.layout = layout
        self._timeout_s = timeout_s
        self._copies = copies
        self._boxes: defaultdict[tuple[str, int, int, int], SimpleQueue[Mail]] = defaultdict(SimpleQueue)

    def post(self, way: str, attention: int, ffn: int, *, stage: int, mail: Mail) -> None:
        if self._copies:
            routing = mail.routing and Routing(*(tensor.clone() for tensor in mail.routing))
            mail = mail._replace(hidden_TD=mail.hidden_TD.clone(), routing=routing)
        self._boxes[way, attention, ffn, stage].put(mail)

    def take(self, way: str, attention: int, ffn: int, *, layer: int, stage: int, sequence: int) -> Mail:
        ranks = self.topology.attention_ranks[attention], self.topology.ffn_ranks[ffn]
        where = f"{self.topology.name(ranks[way == 'reply'])}: step {sequence}, layer {layer}, stage {stage}"
        try:
            mail = self._boxes[way, attention, ffn, stage].get(timeout=self._timeout_s)
        except Empty as error:
            raise PeerError(f"{where}, {way}: not done within {self._timeout_s:g} s") from error
        for name, value, wanted in (("sequence", mail.sequence, sequence), ("layer", mail.layer, layer)):
            if value != wanted:
                raise ProtocolError(f"{where}: message has {name} {value} (expected {wanted})")
        return mail


class ReferenceAttentionPort(AttentionPort):
    """Attention's end of the exchange; see `base` for its use."""

    def __init__(self, exchange: ReferenceExchange, role_rank: int) -> None:
        self.traffic = TrafficCounters()
        self._exchange = exchange
        self._role_rank = role_rank
        self._hits: dict[tuple[int, int], torch.Tensor | None] = {}

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan

    def dispatch(self, layer: int, stage: int, hidden_TD: torch.Tensor, routing: Routing | None) -> None:
        rows = self._plan.stages[stage].padded[self._role_rank]
        assert len(hidden_TD) == rows, (hidden_TD.shape, rows)
        for ffn in range(self._exchange.topology.num_ffn if rows else 0):
            hits = self._exchange.layout.rows_of(ffn, layer, routing)
            self._hits[stage, ffn] = hits
            mail = Mail(self._plan.sequence, layer, hidden_TD, routing)
            if hits is not None:
                mail = mail._replace(hidden_TD=hidden_TD[hits], routing=routing and routing.rows(hits))
            self._exchange.post("dispatch", self._role_rank, ffn, stage=stage, mail=mail)
            self.traffic.sent(len(mail.hidden_TD), _num_bytes(mail))

    def combine(self, layer: int, stage: int) -> torch.Tensor:
        rows = self._plan.stages[stage].padded[self._role_rank]
        total_TD = torch.zeros(rows, self._exchange.layout.hidden_size)
        for ffn in range(self._exchange.topology.num_ffn if rows else 0):
            mail = self._exchange.take(
                "reply", self._role_rank, ffn, layer=layer, stage=stage, sequence=self._plan.sequence
            )
            self.traffic.received(len(mail.hidden_TD), _num_bytes(mail))
            hits = self._hits[stage, ffn]
            if hits is None and self._exchange.topology.num_ffn == 1:
                return mail.hidden_TD
            total_TD[slice(None) if hits is None else hits] += mail.hidden_TD.float()
        return total_TD.to(self._exchange.layout.dtype)

    def close(self) -> None:
        """Nothing is held."""


class ReferenceFfnPort(FfnPort):
    """The FFN's end of the exchange; see `base` for its use."""

    def __init__(self, exchange: ReferenceExchange, role_rank: int) -> None:
        self.traffic = TrafficCounters()
        self._exchange = exchange
        self._role_rank = role_rank
        self._rows: dict[tuple[int, int], int] = {}  # received, by stage and attention rank

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan

    def receive(self, layer: int, stage: int) -> Dispatched:
        mails = []
        for attention, rows in enumerate(self._plan.stages[stage].padded):
            if rows:
                mail = self._exchange.take(
                    "dispatch", attention, self._role_rank, layer=layer, stage=stage, sequence=self._plan.sequence
                )
                self.traffic.received(len(mail.hidden_TD), _num_bytes(mail))
                self._rows[stage, attention] = len(mail.hidden_TD)
                mails.append(mail)
        if len(mails) == 1:
            return Dispatched(mails[0].hidden_TD, mails[0].routing)
        hidden_RD = torch.cat([mail.hidden_TD for mail in mails])
        routing = [mail.routing for mail in mails if mail.routing is not None]
        return Dispatched(hidden_RD, Routing(*map(torch.cat, zip(*routing, strict=True))) if routing else None)

    def reply(self, layer: int, stage: int, partial_RD: torch.Tensor) -> None:
        senders = [attention for attention, rows in enumerate(self._plan.stages[stage].padded) if rows]
        sizes = [self._rows[stage, attention] for attention in senders]
        for attention, partial_TD in zip(senders, partial_RD.split(sizes), strict=True):
            mail = Mail(self._plan.sequence, layer, partial_TD, None)
            self._exchange.post("reply", attention, self._role_rank, stage=stage, mail=mail)
            self.traffic.sent(len(partial_TD), _num_bytes(mail))

    def close(self) -> None:
        """Nothing is held."""


def _num_bytes(mail: Mail) -> int:
    return sum(tensor.nbytes for tensor in (mail.hidden_TD, *(mail.routing or ())))
