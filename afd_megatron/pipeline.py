"""Order of one step as data. Knows no tensors, no ranks.

Layers outer, stages inner, ascending, on both sides. Attention takes the answer of (layer - 1, stage) right before it
attends to (layer, stage), so while one stage is with the FFN ranks the next one attends. `is_remote` has a flag per
layer: the FFN of the others stays on attention.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    ATTEND = "attend"
    OWN_FFN = "own ffn"
    DISPATCH = "dispatch"
    COMBINE = "combine"
    RECEIVE = "receive"
    EXPERTS = "experts"
    REPLY = "reply"


class Action(NamedTuple):
    kind: Kind
    layer: int
    stage: int


def attention_actions(is_remote: Sequence[bool], num_stages: int) -> Iterator[Action]:
    """Yield what an attention rank does in one step; a stage without rows is skipped by the caller."""
    for layer in range(len(is_remote)):
        yield from _attention_layer(is_remote, layer, num_stages)
    yield from _last_answers(is_remote, num_stages)


def ffn_actions(is_remote: Sequence[bool], num_stages: int) -> Iterator[Action]:
    """Yield what an FFN rank does in one step."""
    for layer in range(len(is_remote)):
        yield from _ffn_layer(is_remote, layer, num_stages)


def colocated_actions(is_remote: Sequence[bool], num_stages: int) -> Iterator[Action]:
    """Yield what a rank with both roles does in one step: all stages are dispatched before the first is received."""
    for layer in range(len(is_remote)):
        yield from _attention_layer(is_remote, layer, num_stages)
        yield from _ffn_layer(is_remote, layer, num_stages)
    yield from _last_answers(is_remote, num_stages)


def num_credits(num_stages: int) -> int:
    """Return how many receive buffers a rank keeps per peer and direction: one per stage.

    Attention dispatches a stage only after it combined what it dispatched of it before, and the FFN frees the buffer of
    the dispatch right before it replies; attention frees that of the reply right before it dispatches the stage again.
    So buffer `stage` is free by then and no send ever waits for one. With fewer, colocated ranks deadlock.
    """
    return num_stages


def _attention_layer(is_remote: Sequence[bool], layer: int, num_stages: int) -> Iterator[Action]:
    for stage in range(num_stages):
        if layer > 0 and is_remote[layer - 1]:
            yield Action(Kind.COMBINE, layer - 1, stage)
        yield Action(Kind.ATTEND, layer, stage)
        yield Action(Kind.DISPATCH if is_remote[layer] else Kind.OWN_FFN, layer, stage)


def _ffn_layer(is_remote: Sequence[bool], layer: int, num_stages: int) -> Iterator[Action]:
    for stage in range(num_stages if is_remote[layer] else 0):
        yield Action(Kind.RECEIVE, layer, stage)
        yield Action(Kind.EXPERTS, layer, stage)
        yield Action(Kind.REPLY, layer, stage)


def _last_answers(is_remote: Sequence[bool], num_stages: int) -> Iterator[Action]:
    for stage in range(num_stages if is_remote[-1] else 0):
        yield Action(Kind.COMBINE, len(is_remote) - 1, stage)
