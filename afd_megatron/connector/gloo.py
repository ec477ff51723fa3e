"""The exchange over gloo, for ranks of one job on CPU tensors. Knows no model, no requests.

Per (layer, stage, peer) one message. Each (peer, stage) has its own buffers, allocated once, and its own tag, so that a
receive stands posted before its message is sent: the attention rank posts before it dispatches, the FFN rank when it
begins the step and then when it is done with the layer before. All receives are posted at the ceiling. What a rank with
both roles sends to itself stays in the buffer that it was packed in.
"""

import torch
import torch.distributed as dist

from afd_megatron.connector.base import AttentionPort, Dispatched, ExchangeLayout, FfnPort, TrafficCounters
from afd_megatron.connector.message import Message
from afd_megatron.distributed import World
from afd_megatron.plan import StepPlan
from afd_megatron.routing import Routing
from afd_megatron.topology import Role

_FIRST_TAG = 16  # below it are the tags of control


class GlooAttentionPort(AttentionPort):
    """Attention's end of the exchange; `outgoing` and `incoming` are for the FFN's end of the same rank alone."""

    def __init__(self, world: World, layout: ExchangeLayout, *, timeout_s: float) -> None:
        self.traffic = TrafficCounters()
        self._world = world
        self._layout = layout
        self._timeout_s = timeout_s
        self._role_rank = world.topology.role_rank(world.rank, Role.ATTENTION)
        self._peers = world.topology.ffn_ranks
        stages = range(layout.num_stages)
        self.outgoing = [self._messages(are_different=layout.expert_slices is not None) for _ in stages]
        self.incoming = [{peer: Message(layout, 0, world.job_id) for peer in self._peers} for _ in stages]
        self._total_TD = [torch.empty(layout.max_rows, layout.hidden_size) for _ in stages]
        self._sends: list[dict[int, dist.Work]] = [{} for _ in stages]
        self._receives: list[dict[int, dist.Work]] = [{} for _ in stages]
        self._hits: list[dict[int, torch.Tensor | None]] = [{} for _ in stages]

    def begin_step(self, plan: StepPlan) -> None:
        self._sequence = plan.sequence
        self._rows = [stage.padded[self._role_rank] for stage in plan.stages]

    def dispatch(self, layer: int, stage: int, hidden_TD: torch.Tensor, routing: Routing | None) -> None:
        rows, world = self._rows[stage], self._world
        assert hidden_TD.shape == (rows, self._layout.hidden_size), (hidden_TD.shape, rows)
        if not rows:
            return
        what = f"step {self._sequence}, layer {layer}, stage {stage}, dispatch"
        for peer, work in self._sends[stage].items():  # done for long: the peer has answered it
            world.wait(work, peer, what, timeout_s=self._timeout_s)
        data = None
        for ffn, peer in enumerate(self._peers):
            message, hits = self.outgoing[stage][peer], self._layout.rows_of(ffn, layer, routing)
            self._hits[stage][peer] = hits
            rows_TD, mine = (hidden_TD, routing) if hits is None else (hidden_TD[hits], routing and routing.rows(hits))
            if data is None or self._layout.expert_slices is not None:
                data = message.pack(self._sequence, layer, stage, rows_TD, mine)
            self.traffic.sent(len(rows_TD), message.payload_bytes(len(rows_TD), layer))
            if peer != world.rank:
                answer = self.incoming[stage][peer].buffer
                self._receives[stage][peer] = world.post_receive(answer, peer, _tag(stage, is_reply=True))
                self._sends[stage][peer] = world.send(data, peer, _tag(stage, is_reply=False))

    def combine(self, layer: int, stage: int) -> torch.Tensor:
        rows, world = self._rows[stage], self._world
        what = f"step {self._sequence}, layer {layer}, stage {stage}, combine"
        total_TD = self._total_TD[stage][:rows]
        for peer in self._peers if rows else ():
            answer, hits = self.incoming[stage][peer], self._hits[stage][peer]
            if peer != world.rank:
                world.wait(self._receives[stage][peer], peer, what, timeout_s=self._timeout_s)
            num_rows = rows if hits is None else len(hits)
            answer.check(self._sequence, layer, stage, num_rows, sender=world.topology.name(peer))
            self.traffic.received(num_rows, answer.payload_bytes(num_rows, layer))
            if len(self._peers) == 1 and hits is None:
                return answer.hidden(rows)
            if peer == self._peers[0]:
                total_TD.zero_()
            if hits is None:
                total_TD += answer.hidden(rows)
            else:
                total_TD.index_add_(0, hits, answer.hidden(num_rows).float())
        return total_TD.to(self._layout.dtype)

    def close(self) -> None:
        _finish_sends(self._world, self._sends, timeout_s=self._timeout_s)

    def _messages(self, *, are_different: bool) -> dict[int, Message]:
        """Return a stage's message by peer: one for all of them, or one for each."""
        count = len(self._peers) if are_different else 1
        messages = [Message(self._layout, self._layout.top_k, self._world.job_id) for _ in range(count)]
        return {peer: messages[index % count] for index, peer in enumerate(self._peers)}


class GlooFfnPort(FfnPort):
    """The FFN's end of the exchange; `attention` is the other end of a rank that has both roles."""

    def __init__(
        self, world: World, layout: ExchangeLayout, *, timeout_s: float, attention: GlooAttentionPort | None = None
    ) -> None:
        self.traffic = TrafficCounters()
        self._world = world
        self._timeout_s = timeout_s
        self._layout = layout
        self._peers = world.topology.attention_ranks
        stages = range(layout.num_stages)
        self._incoming = [{peer: Message(layout, layout.top_k, world.job_id) for peer in self._peers} for _ in stages]
        self._outgoing = [{peer: Message(layout, 0, world.job_id) for peer in self._peers} for _ in stages]
        if attention is not None:
            for stage in stages:
                self._incoming[stage][world.rank] = attention.outgoing[stage][world.rank]
                self._outgoing[stage][world.rank] = attention.incoming[stage][world.rank]
        capacity = layout.max_rows * len(self._peers)
        self._hidden_RD = [torch.empty(capacity, layout.hidden_size, dtype=layout.dtype) for _ in stages]
        self._sends: list[dict[int, dist.Work]] = [{} for _ in stages]
        self._receives: list[dict[int, dist.Work]] = [{} for _ in stages]

    def begin_step(self, plan: StepPlan) -> None:
        self._sequence = plan.sequence
        self._rows = [
            {peer: rows for peer, rows in zip(self._peers, stage.padded, strict=True) if rows} for stage in plan.stages
        ]
        self._received_rows: list[dict[int, int]] = [{} for _ in plan.stages]
        for stage, rows_by_peer in enumerate(self._rows):
            for peer in rows_by_peer:
                self._post_receive(stage, peer)

    def receive(self, layer: int, stage: int) -> Dispatched:
        world, hidden, routing = self._world, [], []
        what = f"step {self._sequence}, layer {layer}, stage {stage}, receive"
        for peer, rows in self._rows[stage].items():
            message = self._incoming[stage][peer]
            if peer != world.rank:
                world.wait(self._receives[stage][peer], peer, what, timeout_s=self._timeout_s)
            sender, can_be_fewer = world.topology.name(peer), self._layout.is_routed(layer)
            num_rows = message.check(self._sequence, layer, stage, rows, sender=sender, is_ceiling=can_be_fewer)
            self._received_rows[stage][peer] = num_rows
            self.traffic.received(num_rows, message.payload_bytes(num_rows, layer))
            hidden.append(message.hidden(num_rows))
            routing.append(message.routing(num_rows, layer))
        if len(hidden) == 1:
            return Dispatched(hidden[0], routing[0])
        num_rows = sum(map(len, hidden))
        hidden_RD = torch.cat(hidden, out=self._hidden_RD[stage][:num_rows])
        if routing[0] is None:
            return Dispatched(hidden_RD, None)
        return Dispatched(hidden_RD, Routing(*map(torch.cat, zip(*routing, strict=True))))

    def reply(self, layer: int, stage: int, partial_RD: torch.Tensor) -> None:
        world, rows_by_peer = self._world, self._received_rows[stage]
        assert len(partial_RD) == sum(rows_by_peer.values()), (partial_RD.shape, rows_by_peer)
        what = f"step {self._sequence}, layer {layer}, stage {stage}, reply"
        for (peer, rows), partial_TD in zip(
            rows_by_peer.items(), partial_RD.split(list(rows_by_peer.values())), strict=True
        ):
            message = self._outgoing[stage][peer]
            if peer in self._sends[stage]:  # done for long: the peer has sent the next stage since
                world.wait(self._sends[stage][peer], peer, what, timeout_s=self._timeout_s)
            data = message.pack(self._sequence, layer, stage, partial_TD, None)
            self.traffic.sent(rows, message.payload_bytes(rows, layer))
            if layer < self._layout.last_layer:
                self._post_receive(stage, peer)
            if peer != world.rank:
                self._sends[stage][peer] = world.send(data, peer, _tag(stage, is_reply=True))

    def close(self) -> None:
        _finish_sends(self._world, self._sends, timeout_s=self._timeout_s)

    def _post_receive(self, stage: int, peer: int) -> None:
        if peer != self._world.rank:
            buffer = self._incoming[stage][peer].buffer
            self._receives[stage][peer] = self._world.post_receive(buffer, peer, _tag(stage, is_reply=False))


def _finish_sends(world: World, sends: list[dict[int, dist.Work]], *, timeout_s: float) -> None:
    """Wait until the last messages have left; one that is forgotten before is never sent."""
    for sends_by_peer in sends:
        while sends_by_peer:
            peer, work = sends_by_peer.popitem()
            world.wait(work, peer, "last message", timeout_s=timeout_s)


def _tag(stage: int, *, is_reply: bool) -> int:
    return _FIRST_TAG + 2 * stage + is_reply
