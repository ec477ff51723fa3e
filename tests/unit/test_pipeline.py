"""The order of a step never deadlocks with the buffers it says it needs: a simulation of all ranks of a job.

A channel is one direction between two ranks. It has a number of receive buffers: a message needs a free one to be sent,
and holds it until the FFN rank is about to reply, or the attention rank about to dispatch the stage again.
"""

import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_megatron.pipeline import Kind, attention_actions, colocated_actions, ffn_actions, num_credits
from afd_megatron.topology import Role, Topology


class Move(Enum):
    SEND = auto()
    TAKE = auto()
    FREE = auto()


class Step(NamedTuple):
    move: Move
    channel: tuple[str, int, int]
    message: tuple[int, int]


Rows = tuple[tuple[int, ...], ...]
"""Rows by stage and attention rank."""


def program(topology: Topology, rank: int, rows: Rows, is_remote: Sequence[bool]) -> Iterator[Step]:
    """Yield what `rank` does on its channels; stages without rows and what a rank sends to itself have none."""
    roles = topology.roles(rank)
    order = attention_actions if roles == (Role.ATTENTION,) else ffn_actions
    for kind, layer, stage in (colocated_actions if len(roles) == 2 else order)(is_remote, len(rows)):
        attention = [peer for peer in topology.attention_ranks if rows[stage][peer] and peer != rank]
        ffn = [peer for peer in topology.ffn_ranks if peer != rank]
        message = (layer, stage)
        if kind is Kind.DISPATCH and rows[stage][rank]:
            for peer in ffn:
                if any(is_remote[:layer]):
                    before = max(earlier for earlier in range(layer) if is_remote[earlier])
                    yield Step(Move.FREE, ("reply", peer, rank), (before, stage))
                yield Step(Move.SEND, ("dispatch", rank, peer), message)
        elif kind is Kind.COMBINE and rows[stage][rank]:
            yield from (Step(Move.TAKE, ("reply", peer, rank), message) for peer in ffn)
        elif kind is Kind.RECEIVE:
            yield from (Step(Move.TAKE, ("dispatch", peer, rank), message) for peer in attention)
        elif kind is Kind.REPLY:
            for peer in attention:
                yield Step(Move.FREE, ("dispatch", peer, rank), message)
                yield Step(Move.SEND, ("reply", rank, peer), message)


class Outcome(NamedTuple):
    is_finished: bool
    has_send_waited: bool


def simulate(topology: Topology, rows: Rows, is_remote: Sequence[bool], *, credits: int, seed: int) -> Outcome:
    """Let the ranks go on in random order until all are done or none can."""
    ranks = range(topology.world_size)
    programs = [deque(program(topology, rank, rows, is_remote)) for rank in ranks]
    free: defaultdict[tuple[str, int, int], int] = defaultdict(lambda: credits)
    messages: defaultdict[tuple[str, int, int], deque[tuple[int, int]]] = defaultdict(deque)
    chance = random.Random(seed)
    has_send_waited = False
    while any(programs):
        able = []
        for rank in ranks:
            if programs[rank]:
                move, channel, _ = programs[rank][0]
                must_wait = (move is Move.SEND and not free[channel]) or (move is Move.TAKE and not messages[channel])
                has_send_waited |= move is Move.SEND and must_wait
                able += [] if must_wait else [rank]
        if not able:
            return Outcome(False, has_send_waited)
        move, channel, message = programs[chance.choice(able)].popleft()
        if move is Move.SEND:
            free[channel] -= 1
            messages[channel].append(message)
        elif move is Move.TAKE:
            assert messages[channel].popleft() == message, "both ends have the same order"
        else:
            free[channel] += 1
    return Outcome(True, has_send_waited)


def full_rows(topology: Topology, num_stages: int) -> Rows:
    return ((1,) * topology.num_attention,) * num_stages


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Topology, Rows]:
    num_attention = draw(st.integers(1, 3))
    is_colocated = draw(st.booleans())
    topology = Topology(num_attention, num_attention if is_colocated else draw(st.integers(1, 3)), is_colocated)
    stage = st.tuples(*[st.integers(0, 1)] * num_attention)
    return topology, tuple(draw(st.lists(stage, min_size=1, max_size=4)))


@settings(deadline=None)
@given(jobs(), st.lists(st.booleans(), min_size=1, max_size=4), st.integers(0, 2**32))
def test_no_send_ever_waits_with_a_buffer_per_stage(
    job: tuple[Topology, Rows], is_remote: list[bool], seed: int
) -> None:
    topology, rows = job
    outcome = simulate(topology, rows, is_remote, credits=num_credits(len(rows)), seed=seed)
    assert outcome == Outcome(is_finished=True, has_send_waited=False)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_colocated_ranks_deadlock_with_one_buffer_less(num_stages: int, num_ranks: int) -> None:
    topology = Topology(num_ranks, num_ranks, colocated=True)
    credits = num_credits(num_stages) - 1
    assert not simulate(topology, full_rows(topology, num_stages), [True], credits=credits, seed=1).is_finished


@pytest.mark.parametrize(("num_stages", "credits"), [(3, 1), (5, 2)])
def test_split_ranks_deadlock_with_less_than_half_the_buffers(num_stages: int, credits: int) -> None:
    topology = Topology(1, 1)
    assert not simulate(topology, full_rows(topology, num_stages), [True] * 2, credits=credits, seed=1).is_finished


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_split_sends_wait_with_one_buffer_less(num_stages: int) -> None:
    topology = Topology(2, 2)
    rows = full_rows(topology, num_stages)
    assert any(
        simulate(topology, rows, [True] * 2, credits=num_stages - 1, seed=seed).has_send_waited for seed in range(20)
    )


@pytest.mark.parametrize("actions", [attention_actions, ffn_actions, colocated_actions])
def test_every_action_comes_once_per_layer_and_stage(actions) -> None:
    listed = list(actions([True] * 3, 2))
    kinds = {kind for kind, _, _ in listed}
    assert len(listed) == len(set(listed)) == len(kinds) * 3 * 2


def test_next_stage_attends_while_one_is_with_the_ffn() -> None:
    order = [(kind, stage) for kind, layer, stage in attention_actions([True] * 2, 2) if layer == 0]
    assert order == [
        (Kind.ATTEND, 0),
        (Kind.DISPATCH, 0),
        (Kind.ATTEND, 1),
        (Kind.DISPATCH, 1),
        (Kind.COMBINE, 0),
        (Kind.COMBINE, 1),
    ]


def test_a_layer_whose_ffn_stays_is_neither_sent_nor_waited_for() -> None:
    is_remote = [False, True, False]
    kinds = [kind for kind, _, _ in attention_actions(is_remote, 1)]
    assert kinds == [
        *(Kind.ATTEND, Kind.OWN_FFN),
        *(Kind.ATTEND, Kind.DISPATCH),
        *(Kind.COMBINE, Kind.ATTEND, Kind.OWN_FFN),
    ]
    assert {layer for _, layer, _ in ffn_actions(is_remote, 1)} == {1}
