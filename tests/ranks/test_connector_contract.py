"""What every connector must do: one suite for the reference in threads, gloo, and gloo with both roles per rank."""

import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from afd_megatron.connector import Ports, make_ports
from afd_megatron.connector.base import AttentionPort, ExchangeLayout, FfnPort
from afd_megatron.connector.message import Message
from afd_megatron.connector.reference import ReferenceAttentionPort, ReferenceExchange, ReferenceFfnPort
from afd_megatron.distributed import World
from afd_megatron.errors import ConfigError, PeerError, ProtocolError
from afd_megatron.pipeline import Kind, attention_actions, colocated_actions, ffn_actions
from afd_megatron.plan import PlanRules, RankCounts, StepPlan, make_plan
from afd_megatron.routing import Routing
from afd_megatron.topology import Role, Topology, contiguous_slices
from tests.ranks.harness import Ranks, as_topology, run_ranks

TIMEOUT_S = 20.0
SHORT_TIMEOUT_S = 0.5
NUM_EXPERTS = 7


@dataclass(frozen=True)
class Case:
    """Steps to run. `rows[step][attention rank]` are decode rows before padding; with `bucket` a step is padded."""

    topology: Topology
    rows: tuple[tuple[int, ...], ...]
    num_stages: int = 1
    num_layers: int = 2
    hidden_size: int = 8
    top_k: int = 0
    dtype: torch.dtype = torch.float32
    max_rows: int = 16
    bucket: int | None = None
    delay_s: float = 0.0
    ffn_scales: tuple[float, ...] = (0.37, -1.9, 3.1)
    is_routed: bool = False

    @property
    def layout(self) -> ExchangeLayout:
        layout = ExchangeLayout(
            self.hidden_size, self.top_k, self.dtype, self.num_layers - 1, self.num_stages, self.max_rows
        )
        if not self.is_routed:
            return layout
        slices = contiguous_slices(NUM_EXPERTS, self.topology.num_ffn)
        return layout._replace(expert_slices=slices, unrouted_layers=frozenset({1}))

    @property
    def plans(self) -> list[StepPlan]:
        buckets = () if self.bucket is None else (self.bucket,)
        rules = PlanRules(self.num_stages, self.topology.num_attention, self.max_rows, bool(buckets), buckets)
        return [
            make_plan(sequence, tuple(RankCounts(rows, 0) for rows in step), rules)
            for sequence, step in enumerate(self.rows)
        ]

    def hidden(self, sequence: int, layer: int, stage: int, attention: int, rows: int) -> torch.Tensor:
        """Rows that no other (step, layer, stage, rank) has."""
        first = ((sequence * 31 + layer) * 31 + stage) * 31 + attention
        values = torch.arange(rows * self.hidden_size, dtype=torch.float32).view(rows, self.hidden_size)
        return (torch.sin(values * 0.1) + first % 997).to(self.dtype)

    def routing(self, sequence: int, layer: int, stage: int, attention: int, rows: int) -> Routing | None:
        if not self.top_k or layer in self.layout.unrouted_layers:
            return None
        ids = torch.arange(rows * self.top_k, dtype=torch.int32).view(rows, self.top_k) + 7 * layer + attention
        if self.is_routed:
            ids = ids // 2 % NUM_EXPERTS
        return Routing(ids, (ids + sequence).float() / (stage + 3))

    def partial(self, ffn: int, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.float() * self.ffn_scales[ffn] + layer).to(self.dtype)

    def hits(self, ffn: int, layer: int, routing: Routing | None, rows: int) -> list[int]:
        """The rows that a rank gets, worked out row by row."""
        if not self.is_routed or routing is None:
            return list(range(rows))
        mine = set(self.layout.expert_slices[ffn])
        return [row for row, ids in enumerate(routing.topk_ids.tolist()) if mine & set(ids)]

    def combined(self, layer: int, hidden: torch.Tensor, routing: Routing | None) -> torch.Tensor:
        total = torch.zeros(hidden.shape)
        for ffn in range(self.topology.num_ffn):
            hits = self.hits(ffn, layer, routing, len(hidden))
            total[hits] = total[hits] + self.partial(ffn, layer, hidden[hits]).float()
        return total.to(self.dtype)


class AttentionSide:
    """Drives a port as an attention step does, and checks each answer as late as it must still be valid."""

    def __init__(self, case: Case, port: AttentionPort, role_rank: int) -> None:
        self.case, self.port, self.role_rank = case, port, role_rank
        self._answers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin_step(self, plan: StepPlan) -> None:
        self.plan = plan
        self.port.begin_step(plan)

    def act(self, kind: Kind, layer: int, stage: int) -> None:
        rows = self.plan.stages[stage].padded[self.role_rank]
        place = (self.plan.sequence, layer, stage, self.role_rank, rows)
        if kind is Kind.DISPATCH:
            self.check_answer(stage)
            hidden, routing = self.case.hidden(*place), self.case.routing(*place)
            self.port.dispatch(layer, stage, hidden, routing)
            hidden.fill_(float("nan"))
            if routing is not None:
                routing.topk_ids.fill_(-1)
        elif kind is Kind.COMBINE:
            wanted = self.case.combined(layer, self.case.hidden(*place), self.case.routing(*place))
            self._answers[stage] = (self.port.combine(layer, stage), wanted)

    def check_answer(self, stage: int) -> None:
        if stage in self._answers:
            answer, wanted = self._answers.pop(stage)
            assert answer.dtype == self.case.dtype
            assert torch.equal(answer, wanted), (stage, answer, wanted)

    def end_step(self) -> None:
        for stage in range(self.case.num_stages):
            self.check_answer(stage)


class FfnSide:
    """Drives a port as an FFN step does, and checks what it received right before the reply."""

    def __init__(self, case: Case, port: FfnPort, role_rank: int) -> None:
        self.case, self.port, self.role_rank = case, port, role_rank
        self.received: dict = {}

    def begin_step(self, plan: StepPlan) -> None:
        self.plan = plan
        self.port.begin_step(plan)

    def act(self, kind: Kind, layer: int, stage: int) -> None:
        if not self.plan.stages[stage].num_rows:
            return
        if kind is Kind.RECEIVE:
            self.received[stage] = self.port.receive(layer, stage)
        elif kind is Kind.REPLY:
            hidden, routing = self.received.pop(stage)
            places = [
                (self.plan.sequence, layer, stage, attention, rows)
                for attention, rows in enumerate(self.plan.stages[stage].padded)
                if rows
            ]
            sent = [self.case.routing(*place) for place in places]
            hits = [
                self.case.hits(self.role_rank, layer, part, place[-1]) for part, place in zip(sent, places, strict=True)
            ]
            rows = [self.case.hidden(*place)[kept] for place, kept in zip(places, hits, strict=True)]
            assert torch.equal(hidden, torch.cat(rows))
            if sent[0] is not None:
                wanted = [[values[kept] for values in part] for part, kept in zip(sent, hits, strict=True)]
                for index, dtype in enumerate((torch.int32, torch.float32)):
                    assert routing[index].dtype == dtype
                    assert torch.equal(routing[index], torch.cat([part[index] for part in wanted]))
            else:
                assert routing is None
            partial = self.case.partial(self.role_rank, layer, hidden)
            self.port.reply(layer, stage, partial)
            partial.fill_(float("nan"))


def serve(case: Case, ports: Ports, role_ranks: tuple[int | None, int | None]) -> None:
    """Run all steps of a case on one rank, in the order of its roles."""
    sides: dict[Role, AttentionSide | FfnSide] = {}
    actions: Callable = colocated_actions
    if ports.attention is not None:
        sides[Role.ATTENTION] = AttentionSide(case, ports.attention, role_ranks[0])
        actions = attention_actions if ports.ffn is None else actions
    if ports.ffn is not None:
        sides[Role.FFN] = FfnSide(case, ports.ffn, role_ranks[1])
        actions = ffn_actions if ports.attention is None else actions
    delays = random.Random(str(role_ranks))
    for plan in case.plans:
        for side in sides.values():
            side.begin_step(plan)
        for kind, layer, stage in actions([True] * case.num_layers, case.num_stages):
            if case.delay_s:
                time.sleep(case.delay_s * delays.choice((0, 0, 0, 1)))
            is_ffn = kind in (Kind.RECEIVE, Kind.EXPERTS, Kind.REPLY)
            sides[Role.FFN if is_ffn else Role.ATTENTION].act(kind, layer, stage)
        if Role.ATTENTION in sides:
            sides[Role.ATTENTION].end_step()


def serve_gloo(world: World, case: Case) -> tuple[int, int, int, int] | None:
    """Run a case on this rank; return rows and bytes sent by the attention end, then by the FFN end."""
    world = as_topology(world, case.topology)
    if world is None:
        return None
    ports = make_ports("gloo", world, case.layout, timeout_s=TIMEOUT_S)
    roles = case.topology.roles(world.rank)
    serve(case, ports, tuple(case.topology.role_rank(world.rank, role) if role in roles else None for role in Role))
    for port in ports:
        if port is not None:
            port.close()
    return traffic(ports)


def serve_reference(case: Case) -> list[tuple[int, int, int, int]]:
    """Run a case on threads of this process."""
    exchange = ReferenceExchange(case.topology, case.layout, timeout_s=TIMEOUT_S)
    attention = [ReferenceAttentionPort(exchange, rank) for rank in range(case.topology.num_attention)]
    ffn = [ReferenceFfnPort(exchange, rank) for rank in range(case.topology.num_ffn)]
    if case.topology.colocated:
        jobs = [(Ports(*pair), (rank, rank)) for rank, pair in enumerate(zip(attention, ffn, strict=True))]
    else:
        jobs = [(Ports(port, None), (rank, None)) for rank, port in enumerate(attention)]
        jobs += [(Ports(None, port), (None, rank)) for rank, port in enumerate(ffn)]
    with ThreadPoolExecutor(len(jobs)) as threads:
        for done in [threads.submit(serve, case, *job) for job in jobs]:
            done.result()
    return [traffic(ports) for ports, _ in jobs]


def traffic(ports: Ports) -> tuple[int, int, int, int]:
    counts = [(port.traffic.rows_sent, port.traffic.bytes_sent) if port else (0, 0) for port in ports]
    return (*counts[0], *counts[1])


Run = Callable[[Case], list]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(5) as ranks:
        yield ranks


@pytest.fixture(params=["reference", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "reference":
        return serve_reference
    return functools.partial(request.getfixturevalue("ranks").run, serve_gloo)


@pytest.fixture(params=["1a1f", "2a1f", "1a2f", "3a2f", "2a3f", "2c", "3c"])
def topology(request: pytest.FixtureRequest) -> Topology:
    return parse_topology(request.param)


def parse_topology(name: str) -> Topology:
    """Read `3a2f`, or `3c` for three colocated ranks."""
    if name.endswith("c"):
        return Topology(int(name[:-1]), int(name[:-1]), colocated=True)
    num_attention, num_ffn = name.rstrip("f").split("a")
    return Topology(int(num_attention), int(num_ffn))


def uneven_rows(topology: Topology, num_steps: int = 4) -> tuple[tuple[int, ...], ...]:
    """Steps with idle ranks, fewer rows than stages, an idle step, and rows that differ between ranks."""
    steps = [(5, 0, 1), (0, 7, 2), (0, 0, 0), (1, 1, 16)]
    return tuple(steps[step % len(steps)][: topology.num_attention] for step in range(num_steps))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_rows_come_back_as_the_sum_of_all_ffn_ranks(run: Run, topology: Topology, num_stages: int) -> None:
    run(Case(topology, uneven_rows(topology), num_stages=num_stages))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_routing_travels_with_its_rows(run: Run, topology: Topology, num_stages: int) -> None:
    run(Case(topology, uneven_rows(topology), num_stages=num_stages, top_k=3))


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("top_k", [1, 3])
def test_rows_travel_to_the_ranks_of_their_experts_alone(
    run: Run, topology: Topology, num_stages: int, top_k: int
) -> None:
    """Every other layer is not routed, and goes to all."""
    steps = uneven_rows(topology, 8)
    case = Case(topology, steps, num_stages=num_stages, num_layers=3, top_k=top_k, is_routed=True)
    counts, all_counts = run(case), run(replace(case, is_routed=False))
    if topology.num_ffn > 1:
        assert counts[0][0] < all_counts[0][0] and counts[0][1] < all_counts[0][1]


def test_bfloat16_of_odd_width_travels_with_routing_and_adds_in_float32(run: Run, topology: Topology) -> None:
    run(Case(topology, uneven_rows(topology), num_stages=2, top_k=1, hidden_size=7, dtype=torch.bfloat16))


def test_padded_rows_travel_as_planned(run: Run, topology: Topology) -> None:
    rows = (3,) * topology.num_attention
    counts = run(Case(topology, (rows,), num_stages=2, num_layers=2, bucket=4))
    assert counts[0][0] == 4 * 2 * 2 * topology.num_ffn


def test_partials_are_added_in_the_order_of_ffn_ranks(run: Run) -> None:
    case = Case(Topology(2, 3), ((4, 4),), ffn_scales=(1e8, 1.0, -1e8))
    hidden = case.hidden(0, 0, 0, 0, 4)
    other_order = (case.partial(0, 0, hidden) + case.partial(2, 0, hidden)) + case.partial(1, 0, hidden)
    assert not torch.equal(case.combined(0, hidden, None), other_order)
    run(case)


def test_wrong_value_is_noticed_by_this_suite() -> None:
    case = Case(Topology(1, 2), ((4,),))
    with pytest.raises(AssertionError):
        serve_with_scales = replace(case, ffn_scales=(0.37, 0.38))
        exchange = ReferenceExchange(case.topology, case.layout)
        sides = [AttentionSide(case, ReferenceAttentionPort(exchange, 0), 0)]
        ffn = [FfnSide(serve_with_scales, ReferenceFfnPort(exchange, rank), rank) for rank in range(2)]
        for side in (*sides, *ffn):
            side.begin_step(case.plans[0])
        sides[0].act(Kind.DISPATCH, 0, 0)
        for side in ffn:
            side.act(Kind.RECEIVE, 0, 0)
            side.act(Kind.REPLY, 0, 0)
        sides[0].act(Kind.COMBINE, 0, 0)
        sides[0].end_step()


@pytest.mark.parametrize("topology", ["1a1f", "2c"], indirect=True)
def test_stages_of_tens_of_megabytes_do_not_deadlock(ranks: Ranks, topology: Topology) -> None:
    rows = (9000,) * topology.num_attention
    ranks.run(serve_gloo, Case(topology, (rows,), num_stages=2, hidden_size=1024, max_rows=4500))


def test_random_delays_over_hundreds_of_messages_change_nothing(run: Run, topology: Topology) -> None:
    run(Case(topology, uneven_rows(topology, 60), num_stages=2, num_layers=3, delay_s=0.001))


@pytest.mark.parametrize("topology", ["1a2f"], indirect=True)
def test_random_delays_over_2000_steps_change_nothing(ranks: Ranks, topology: Topology) -> None:
    ranks.run(serve_gloo, Case(topology, uneven_rows(topology, 2000), num_stages=2, delay_s=0.0002), timeout_s=150.0)


def rss_growth(world: World, case: Case) -> int:
    serve_gloo(world, replace(case, rows=((case.max_rows, case.max_rows),) * 4))
    before = rss_bytes()
    serve_gloo(world, case)
    return rss_bytes() - before


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_flat_over_many_lengths(ranks: Ranks) -> None:
    rows = tuple((1 + 7 * step % 250, 1 + 11 * step % 250) for step in range(300))
    case = Case(Topology(2, 2), rows, hidden_size=256, max_rows=250)
    growths = ranks.run(rss_growth, case)
    num_bytes_moved = sum(map(sum, rows)) * 256 * 4
    assert max(growths) < 24 << 20 < num_bytes_moved, growths


def reply_wrongly(world: World, case: Case, change: str) -> str | None:
    """Attention of 1a1f against a peer that answers with something else; returns the error that it meets."""
    world = as_topology(world, case.topology)
    if world is None:
        return None
    if world.rank == 0:
        port = make_ports("gloo", world, case.layout, timeout_s=TIMEOUT_S).attention
        side = AttentionSide(case, port, 0)
        side.begin_step(case.plans[0])
        side.act(Kind.DISPATCH, 1, 0)
        with pytest.raises(ProtocolError) as error:
            side.act(Kind.COMBINE, 1, 0)
        return str(error.value)
    request = Message(case.layout, case.top_k, world.job_id)
    world.wait(world.post_receive(request.buffer, 0, 16), 0, "dispatch", timeout_s=TIMEOUT_S)
    send_wrongly(world, 0, 17, Message(case.layout, 0, world.job_id), change)
    return None


def dispatch_wrongly(world: World, case: Case, change: str) -> str | None:
    """FFN of 1a1f against a peer that sends something else than planned; returns the error that it meets."""
    world = as_topology(world, case.topology)
    if world is None:
        return None
    if world.rank == 1:
        port = make_ports("gloo", world, case.layout, timeout_s=TIMEOUT_S).ffn
        side = FfnSide(case, port, 0)
        side.begin_step(case.plans[0])
        with pytest.raises(ProtocolError) as error:
            side.act(Kind.RECEIVE, 1, 0)
        return str(error.value)
    send_wrongly(world, 1, 16, Message(case.layout, case.top_k, world.job_id), change)
    return None


def send_wrongly(world: World, peer: int, tag: int, message: Message, change: str) -> None:
    """Send what step 0, layer 1, stage 0 with 4 rows has, but for one thing."""
    values = {"sequence": 0, "layer": 1, "stage": 0, "rows": 4}
    if change in values:
        values[change] += 1
    if change == "job":
        message = Message(message._layout, message._top_k, world.job_id ^ 1)
    if change == "top_k":
        message = Message(message._layout, message._top_k + 1, world.job_id)
    hidden = torch.zeros(values.pop("rows"), message._layout.hidden_size)
    routing = None
    if message._top_k:
        ids = torch.zeros(len(hidden), message._top_k, dtype=torch.int32)
        routing = Routing(ids, ids.float())
    data = message.pack(**values, hidden_TD=hidden, routing=routing)
    if change == "magic":
        data[0] = 0
    if change == "shorter":
        data = data[:100].clone()
    world.wait(world.send(data, peer, tag), peer, "send", timeout_s=TIMEOUT_S)


WRONG = {
    "sequence": "has sequence 1 (expected 0)",
    "layer": "has layer 2 (expected 1)",
    "stage": "has stage 1 (expected 0)",
    "rows": "has rows 5 (expected 4)",
    "job": "has job",
    "top_k": "has top_k",
    "magic": "expected b'AFDM'",
    "shorter": "shorter than its header says",
}


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("receiver", ["attention", "ffn"])
def test_unplanned_message_is_an_error_that_names_peer_layer_and_stage(
    ranks: Ranks, receiver: str, change: str
) -> None:
    case = Case(Topology(1, 1), ((4,),), num_layers=9)
    function, index, name = (
        (reply_wrongly, 0, "rank 1 (ffn 0)")
        if receiver == "attention"
        else (dispatch_wrongly, 1, "rank 0 (attention 0)")
    )
    message = ranks.run(function, case, change)[index]
    assert message.startswith(f"{name}: step 0, layer 1, stage 0: ")
    assert WRONG[change] in message


def test_sender_refuses_more_rows_than_the_ceiling() -> None:
    layout = Case(Topology(1, 1), ()).layout
    with pytest.raises(ProtocolError, match=r"step 3, layer 1, stage 0: 17 rows to send \(allowed: up to 16\)"):
        Message(layout, 0, 1).pack(3, 1, 0, torch.zeros(17, 8), None)


def combine_without_answer(world: World, case: Case, fault: str) -> tuple[str, float] | None:
    """Attention of 1a2f whose second FFN rank is dead or silent; returns the error and the seconds until it."""
    world = as_topology(world, case.topology)
    ports = make_ports("gloo", world, case.layout, timeout_s=SHORT_TIMEOUT_S if fault == "late" else TIMEOUT_S)
    plan = case.plans[0]
    if world.rank == 2:
        if fault == "dead":
            os._exit(1)
        return None
    if world.rank == 1:
        side = FfnSide(case, ports.ffn, 0)
        side.begin_step(plan)
        side.act(Kind.RECEIVE, 0, 1)
        side.act(Kind.REPLY, 0, 1)
        return None
    side = AttentionSide(case, ports.attention, 0)
    side.begin_step(plan)
    start = time.monotonic()
    with pytest.raises(PeerError) as error:
        side.act(Kind.DISPATCH, 0, 1)
        side.act(Kind.COMBINE, 0, 1)
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize(("fault", "reason"), [("dead", "connection lost"), ("late", "not done within 0.5 s")])
def test_peer_without_answer_is_named_in_time(fault: str, reason: str) -> None:
    case = Case(Topology(1, 2), ((4,),), num_stages=2)
    dying = (2,) if fault == "dead" else ()
    message, waited_s = run_ranks(combine_without_answer, 3, case, fault, dying=dying)[0]
    assert message.startswith("rank 2 (ffn 1): ")
    assert reason in message
    assert waited_s < TIMEOUT_S / 2
    if fault == "late":
        assert "step 0, layer 0, stage 1, combine" in message


def test_reference_names_a_late_peer() -> None:
    case = Case(Topology(1, 1), ((4,),))
    exchange = ReferenceExchange(case.topology, case.layout, timeout_s=0.01)
    side = AttentionSide(case, ReferenceAttentionPort(exchange, 0), 0)
    side.begin_step(case.plans[0])
    side.act(Kind.DISPATCH, 0, 0)
    with pytest.raises(PeerError, match=r"^rank 1 \(ffn 0\): step 0, layer 0, stage 0, reply: not done within 0.01 s"):
        side.act(Kind.COMBINE, 0, 0)


def local_world() -> World:
    return World(0, Topology(1, 1, colocated=True), 0, timeout_s=TIMEOUT_S)


def test_local_hands_tensors_over_without_a_copy() -> None:
    case = Case(local_world().topology, ((4,),))
    ports = make_ports("local", local_world(), case.layout, timeout_s=TIMEOUT_S)
    hidden = torch.ones(4, 8)
    for port in ports:
        port.begin_step(case.plans[0])
    ports.attention.dispatch(0, 0, hidden, None)
    received = ports.ffn.receive(0, 0).hidden_RD
    ports.ffn.reply(0, 0, received)
    assert ports.attention.combine(0, 0).data_ptr() == received.data_ptr() == hidden.data_ptr()


def test_unknown_connector_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"connector.kind: smoke is unknown \(allowed: gloo, local\)"):
        make_ports("smoke", local_world(), Case(Topology(1, 1), ()).layout, timeout_s=TIMEOUT_S)


def test_reference_runs_in_threads_of_one_process() -> None:
    before = threading.active_count()
    serve_reference(Case(Topology(3, 2), uneven_rows(Topology(3, 2))))
    assert threading.active_count() == before
