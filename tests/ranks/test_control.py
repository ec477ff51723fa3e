"""The handshake, attention's exchange and the plan channel between ranks."""

import os
import time
from collections.abc import Iterator

import pytest
import torch

from afd_megatron.control import plans
from afd_megatron.control.exchange import AttentionExchange, StepEntry
from afd_megatron.control.handshake import gather, handshake
from afd_megatron.control.messages import SEAL, Tag
from afd_megatron.control.plans import PlanReceiver, PlanSender
from afd_megatron.distributed import World
from afd_megatron.errors import AfdError, PeerError, ProtocolError
from afd_megatron.plan import PlanRules, RankCounts, RunMode, StepPlan, make_plan, warmup_plan
from afd_megatron.topology import Topology
from tests.ranks.harness import Ranks, as_topology, run_ranks

TIMEOUT_S = 20.0
RULES = PlanRules(num_stages=2, num_attention=1, max_rows=64, graphs_enabled=True, buckets=(4, 8))
FIELDS = {"dtype": "float32", "hidden_size": "64", "gate": "ffn"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def shake_hands(world: World, fields_by_rank: list[dict[str, str]]) -> str | None:
    world = as_topology(world, Topology(1, 2))
    try:
        handshake(world, fields_by_rank[world.rank], timeout_s=TIMEOUT_S)
    except ProtocolError as error:
        return str(error)


def test_ranks_that_agree_shake_hands(ranks: Ranks) -> None:
    assert ranks.run(shake_hands, [FIELDS] * 3) == [None] * 3


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("odd_rank", [0, 2])
def test_mismatch_fails_on_every_rank_and_names_field_values_and_ranks(ranks: Ranks, field: str, odd_rank: int) -> None:
    fields_by_rank = [FIELDS] * 3
    fields_by_rank[odd_rank] = {**FIELDS, field: "odd"}
    messages = ranks.run(shake_hands, fields_by_rank)
    names = ["rank 0 (attention 0)", "rank 1 (ffn 0)", "rank 2 (ffn 1)"]
    odd, others = names.pop(odd_rank), ", ".join(names)
    values = [f"odd on {odd}", f"{FIELDS[field]} on {others}"]
    if odd_rank != 0:
        values.reverse()
    assert messages == [f"handshake: {field} is {' but '.join(values)}"] * 3


def test_all_fields_that_differ_or_are_missing_are_named(ranks: Ranks) -> None:
    fields_by_rank = [FIELDS, {**FIELDS, "gate": "attention"}, {"dtype": "float32", "gate": "ffn"}]
    for message in ranks.run(shake_hands, fields_by_rank):
        assert "gate is ffn on rank 0 (attention 0), rank 2 (ffn 1) but attention on rank 1 (ffn 0)" in message
        assert "hidden_size is 64 on rank 0 (attention 0), rank 1 (ffn 0) but missing on rank 2 (ffn 1)" in message
        assert "dtype" not in message


def gather_bytes(world: World) -> tuple[bytes, ...]:
    return gather(world, b"x" * (1000 * world.rank), timeout_s=TIMEOUT_S)


def test_rank_0_gathers_the_bytes_of_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(gather_bytes) == [(b"", b"x" * 1000, b"x" * 2000), (), ()]


def exchange_steps(world: World, num_steps: int) -> None:
    world = as_topology(world, Topology(3, 3, colocated=True))
    exchange = AttentionExchange(world, timeout_s=TIMEOUT_S)
    for step in range(num_steps):
        requests = {}
        if world.rank == 0:
            requests = {rank: f"request {step} for {rank}".encode() * step for rank in range(3) if (step + rank) % 2}
        entry = StepEntry(step, world.rank, 1 << 40, 2, 3, wants_stop=world.rank == 1, is_last=step == num_steps - 1)
        results = f"result {step} of {world.rank}".encode() * (1000 * (step == 2))
        exchanged = exchange.exchange(entry, requests, results)
        assert exchanged.entries == tuple(
            entry._replace(num_prefill_rows=rank, wants_stop=rank == 1) for rank in range(3)
        )
        has_requests = (step + world.rank) % 2
        assert exchanged.requests == f"request {step} for {world.rank}".encode() * step * has_requests
        wanted = tuple(f"result {step} of {rank}".encode() * (1000 * (step == 2)) for rank in range(3))
        assert exchanged.results == (wanted if world.rank == 0 else ())


def test_entries_go_to_all_ranks_requests_from_rank_0_and_results_to_it(ranks: Ranks) -> None:
    ranks.run(exchange_steps, 5)


def exchange_tokens(world: World) -> list[tuple[int, ...]]:
    world = as_topology(world, Topology(3, 3, colocated=True, attention_tp=3))
    exchange = AttentionExchange(world, timeout_s=TIMEOUT_S)
    taken = []
    for token_ids in ((7, 1 << 40), (), (5,)):
        exchange.exchange(StepEntry(1, 2, 3, 4, 5, wants_stop=False, is_last=False), {}, b"")
        if world.rank == 0:
            exchange.send_tokens(token_ids)
        else:
            taken.append(exchange.receive_tokens(len(token_ids)))
    return taken


def test_tokens_go_from_the_first_tp_rank_to_the_others(ranks: Ranks) -> None:
    assert ranks.run(exchange_tokens) == [[], *[[(7, 1 << 40), (), (5,)]] * 2]


def schedule_otherwise(world: World) -> str | None:
    world = as_topology(world, Topology(2, 1, attention_tp=2))
    if world is None or world.rank > 1:
        return None
    entry = StepEntry(1, 2, 3, 4, 5 + world.rank, wants_stop=bool(world.rank), is_last=False)
    with pytest.raises(ProtocolError) as error:
        AttentionExchange(world, timeout_s=TIMEOUT_S).exchange(entry, {}, b"")
    return str(error.value)


def test_tp_ranks_that_schedule_otherwise_are_an_error_on_both(ranks: Ranks) -> None:
    messages = ranks.run(schedule_otherwise)
    assert messages[0].startswith("rank 1 (attention 1): has StepEntry(num_decode_rows=1, num_prefill_rows=2, load=3,")
    assert "num_free=6" in messages[0] and "(expected StepEntry(" in messages[1]


def test_exchange_of_one_rank_needs_no_peer() -> None:
    world = World(0, Topology(1, 1), 0, timeout_s=TIMEOUT_S)
    entry = StepEntry(1, 2, 3, 4, 5, wants_stop=False, is_last=False)
    exchanged = AttentionExchange(world, timeout_s=TIMEOUT_S).exchange(entry, {0: b"request"}, b"result")
    assert exchanged == ((entry,), b"request", (b"result",))


def exchange_out_of_step(world: World) -> str | None:
    world = as_topology(world, Topology(2, 1))
    if world is None or world.rank > 1:
        return None
    exchange = AttentionExchange(world, timeout_s=TIMEOUT_S)
    exchange._sequence = 7 * world.rank
    entry = StepEntry(1, 2, 3, 4, 5, wants_stop=False, is_last=False)
    with pytest.raises(ProtocolError) as error:
        exchange.exchange(entry, {}, b"")
    return str(error.value)


def test_rank_at_another_exchange_is_an_error_on_both_sides(ranks: Ranks) -> None:
    messages = ranks.run(exchange_out_of_step)
    assert messages[0] == "rank 1 (attention 1): exchange 7 of attention ranks (expected 0)"
    assert messages[1] == "rank 0 (attention 0): exchange 0 of attention ranks (expected 7)"


def plans_of_a_job() -> list[StepPlan]:
    """Warm-up, capture, prefill, decode by replay, idle stages."""
    plans = [warmup_plan(0, 8, RULES)]
    plans.append(StepPlan(1, RunMode.CAPTURE, plans[0].stages, plans[0].phases))
    for sequence, counts in enumerate([(0, 60), (3, 9), (3, 0), (1, 0)], start=2):
        plans.append(make_plan(sequence, (RankCounts(*counts),), RULES))
    return plans


def follow_plans(world: World) -> list[StepPlan] | None:
    """Leader and FFN ranks of 1a2f; each FFN rank returns the plans it took until STOP."""
    world = as_topology(world, Topology(1, 2))
    if world.rank == 0:
        sender = PlanSender(world, RULES, timeout_s=TIMEOUT_S)
        for plan in plans_of_a_job():
            for _ in range(plan.sequence):
                sender.heartbeat()
            sender.publish(plan)
        return sender.stop()
    receiver = make_receiver(world)
    plans = []
    while (plan := receiver.next()) is not None:
        plans.append(plan)
    return plans


def make_receiver(world: World, **changes: float) -> PlanReceiver:
    timeouts = {"step_timeout_s": TIMEOUT_S, "heartbeat_timeout_s": TIMEOUT_S, **changes}
    return PlanReceiver(world, RULES, **timeouts)


def test_every_plan_arrives_once_in_order_among_heartbeats(ranks: Ranks) -> None:
    assert ranks.run(follow_plans) == [None, plans_of_a_job(), plans_of_a_job()]


def follow_one(world: World, sequences: list[int], ending: str) -> str | None:
    """FFN rank 0 of 1a1f takes a plan per number in `sequences`, then `ending`; returns the error that it meets."""
    world = as_topology(world, Topology(1, 1))
    if world is None:
        return None
    if world.rank == 0:
        sender = PlanSender(world, RULES, timeout_s=TIMEOUT_S)
        for sequence in sequences:
            sender.publish(make_plan(sequence, (RankCounts(1, 0),), RULES))
        return sender.abort("disk is full: " + "x" * 9999) if ending == "abort" else sender.stop()
    return error_of_next(make_receiver(world))


def error_of_next(receiver: PlanReceiver) -> str:
    with pytest.raises(AfdError) as error:
        while receiver.next() is not None:
            pass
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize(
    ("sequences", "ending", "message"),
    [
        ([0, 1, 1], "stop", "ProtocolError: step plan: sequence 1 (expected 2)"),
        ([0, 2], "stop", "ProtocolError: step plan: sequence 2 (expected 1)"),
        ([1], "stop", "ProtocolError: step plan: sequence 1 (expected 0)"),
        ([0], "abort", "AfdError: rank 0 (attention 0): aborts: disk is full: x"),
    ],
)
def test_repeated_or_skipped_plan_and_abort_are_errors(
    ranks: Ranks, sequences: list[int], ending: str, message: str
) -> None:
    assert ranks.run(follow_one, sequences, ending)[1].startswith(message)


def follow_bytes(world: World, frame: bytes) -> str | None:
    """FFN rank 0 of 1a1f takes one message of the plan channel; returns the error that it meets."""
    world = as_topology(world, Topology(1, 1))
    if world is None:
        return None
    if world.rank == 1:
        return error_of_next(make_receiver(world))
    data = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    world.wait(world.send(data, 1, Tag.PLAN), 1, "send", timeout_s=TIMEOUT_S)
    return None


def plan_frame(kind: int, body: bytes, *, num_bytes: int | None = None) -> bytes:
    frame = plans._FRAME.pack(kind, len(body) if num_bytes is None else num_bytes) + body
    return frame.ljust(plans._frame_num_bytes(RULES), b"\0") + SEAL


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (plan_frame(9, b""), "plan message of kind 9"),
        (plan_frame(1, b"", num_bytes=1 << 30), "plan message of kind 1, 1073741824 bytes"),
        (plan_frame(1, b"x" * 99), "step plan: "),
        (plan_frame(2, b"")[:40], "plan: not a whole message"),
    ],
)
def test_garbage_on_the_plan_channel_is_an_error(frame: bytes, message: str) -> None:
    error = run_ranks(follow_bytes, 2, frame)[1]
    assert error.startswith("ProtocolError: ")
    assert message in error


def idle_then_work(world: World) -> list[StepPlan | None] | None:
    """The leader of 1a1f sends heartbeats for longer than any deadline, then a plan, then STOP."""
    world = as_topology(world, Topology(1, 1))
    if world.rank == 0:
        sender = PlanSender(world, RULES, timeout_s=TIMEOUT_S)
        for _ in range(12):
            sender.heartbeat()
            time.sleep(0.15)
        sender.publish(plans_of_a_job()[0])
        return sender.stop()
    receiver = make_receiver(world, step_timeout_s=1.5, heartbeat_timeout_s=1.5)
    return [receiver.next(), receiver.next()]


def test_idle_wait_has_no_limit_while_heartbeats_come() -> None:
    assert run_ranks(idle_then_work, 2)[1] == [plans_of_a_job()[0], None]


def follow_silence(world: World, ending: str) -> str | None:
    """The leader of 1a1f sends a plan and maybe a heartbeat, then falls silent; returns the FFN rank's error."""
    world = as_topology(world, Topology(1, 1))
    if world.rank == 0:
        sender = PlanSender(world, RULES, timeout_s=TIMEOUT_S)
        sender.publish(plans_of_a_job()[0])
        if ending != "after a plan":
            sender.heartbeat()
        sender._drain()
        if ending == "death":
            os._exit(1)
        return None
    return error_of_next(make_receiver(world, step_timeout_s=1.0, heartbeat_timeout_s=0.2))


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("after a plan", "not done within 1 s"),
        ("after a heartbeat", "not done within 0.2 s"),
        ("death", "connection lost"),
    ],
)
def test_silent_or_dead_leader_is_named(ending: str, reason: str) -> None:
    error = run_ranks(follow_silence, 2, ending, dying=(0,) if ending == "death" else ())[1]
    assert error == f"PeerError: rank 0 (attention 0): next plan or heartbeat: {reason}"


def send_to_the_deaf(world: World) -> str | None:
    world = as_topology(world, Topology(1, 1))
    if world.rank == 1:
        return None
    sender = PlanSender(world, RULES, timeout_s=0.2)
    sender.heartbeat()
    with pytest.raises(PeerError) as error:
        sender.heartbeat()
    sender.abort("goes on without a word")
    return str(error.value)


def test_ffn_rank_that_takes_no_plans_is_named() -> None:
    assert run_ranks(send_to_the_deaf, 2)[0] == "rank 1 (ffn 0): taking of plans: not done within 0.2 s"


def shake_hands_with_the_late(world: World) -> str | None:
    world = as_topology(world, Topology(1, 2))
    if world.rank == 2:
        return None
    with pytest.raises(PeerError) as error:
        handshake(world, FIELDS, timeout_s=0.5)
    return str(error.value)


def test_rank_that_is_late_for_the_handshake_is_named() -> None:
    assert run_ranks(shake_hands_with_the_late, 3)[0] == "rank 2 (ffn 1): handshake: not done within 0.5 s"
