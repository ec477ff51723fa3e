"""Order of one step as data. Knows no tensors, no ranks.

Layers outer, stages inner, ascending, on both sides. Attention takes the answer of (layer - 1, stage) right before it
attends to (layer, stage), so while one stage is with the FFN ranks the next one attends.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    ATTEND = "attend"
    DISPATCH = "dispatch"
    COMBINE = "combine"
    RECEIVE = "receive"
    EXPERTS = "experts"
    REPLY = "reply"


class Action(NamedTuple):
    kind: Kind
    layer: int
    stage: int


def attention_actions(num_layers: int, num_stages: int) -> Iterator[Action]:
    """Yield what an attention rank does in one step; a stage without rows is skipped by the caller."""
    for layer in range(num_layers):
        yield from _attention_layer(layer, num_stages)
    for stage in range(num_stages):
        yield Action(Kind.COMBINE, num_layers - 1, stage)


def ffn_actions(num_layers: int, num_stages: int) -> Iterator[Action]:
    """Yield what an FFN rank does in one step."""
    for layer in range(num_layers):
        yield from _ffn_layer(layer, num_stages)


def colocated_actions(num_layers: int, num_stages: int) -> Iterator[Action]:
    """Yield what a rank with both roles does in one step: all stages are dispatched before the first is received."""
    for layer in range(num_layers):
        yield from _attention_layer(layer, num_stages)
        yield from _ffn_layer(layer, num_stages)
    for stage in range(num_stages):
        yield Action(Kind.COMBINE, num_layers - 1, stage)


def num_credits(num_stages: int) -> int:
    """Return how many receive buffers a rank keeps per peer and direction: one per stage.

    Attention dispatches (layer + 1, stage) only after it combined (layer, stage), and the FFN frees the buffer of the
    dispatch right before it replies; attention frees that of the reply right before it dispatches the stage again. So
    buffer `stage` is free by then and no send ever waits for one. With fewer, colocated ranks deadlock.
    """
    return num_stages


def _attention_layer(layer: int, num_stages: int) -> Iterator[Action]:
    for stage in range(num_stages):
        if layer > 0:
            yield Action(Kind.COMBINE, layer - 1, stage)
        yield Action(Kind.ATTEND, layer, stage)
        yield Action(Kind.DISPATCH, layer, stage)


def _ffn_layer(layer: int, num_stages: int) -> Iterator[Action]:
    for stage in range(num_stages):
        yield Action(Kind.RECEIVE, layer, stage)
        yield Action(Kind.EXPERTS, layer, stage)
        yield Action(Kind.REPLY, layer, stage)
