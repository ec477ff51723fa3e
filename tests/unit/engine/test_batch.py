from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_megatron.engine.batch import StageBatch, make_stages
from afd_megatron.engine.kv_blocks import BlockPool
from afd_megatron.engine.request import Request, SampledToken, SamplingParams
from afd_megatron.engine.scheduler import Schedule, Scheduler, SchedulerLimits
from afd_megatron.engine.text import TextCodec
from afd_megatron.plan import split_rows

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def make_schedule(codec: TextCodec, decoding: Sequence[int] = (), prompts: Sequence[int] = ()) -> Schedule:
    """Return a step in which requests with prompts of `decoding` tokens decode and those of `prompts` start."""
    scheduler = Scheduler(SchedulerLimits(40, 64, 10_000), BlockPool(1000, BLOCK_SIZE), codec, clock=lambda: 0.0)
    for lengths in (decoding, prompts):
        for num_prompt in lengths:
            first = 100 * scheduler.load
            sampling = SamplingParams(max_new_tokens=8)
            scheduler.add(Request(f"{first}", 0, tuple(range(first + 3, first + 3 + num_prompt)), sampling))
        schedule = scheduler.schedule()
        if lengths is decoding:
            scheduler.finish_step(schedule, [SampledToken(90 + row) for row in range(len(schedule.requests))])
    return schedule


def stages_of(schedule: Schedule, num_stages: int, bucket: int | None = None) -> tuple[StageBatch, ...]:
    real = split_rows(schedule.counts.num_rows, num_stages)
    padded = real if bucket is None else (bucket,) * num_stages
    return make_stages(schedule, real=real, padded=padded, block_size=BLOCK_SIZE, device=CPU)


def test_decode_rows_have_their_token_place_and_context(bare_codec: TextCodec) -> None:
    schedule = make_schedule(bare_codec, decoding=[5, 3])
    (stage,) = stages_of(schedule, 1)
    tables = schedule.block_table_BM
    assert stage.token_ids_T.tolist() == [90, 91]
    assert stage.positions_T.tolist() == [5, 3]
    assert stage.context_lens_B.tolist() == [6, 4]
    assert stage.block_table_BM.tolist() == tables.tolist()
    assert stage.cache_index_T.tolist() == [tables[0, 1] * BLOCK_SIZE + 1, tables[1, 0] * BLOCK_SIZE + 3]
    assert stage.sample_rows_N.tolist() == [0, 1] and stage.prefill == ()


def test_a_prompt_may_span_stages_and_only_its_end_is_sampled(bare_codec: TextCodec) -> None:
    first, second = stages_of(make_schedule(bare_codec, decoding=[2], prompts=[8]), 2)
    assert (first.num_rows, first.num_decode_rows, second.num_rows, second.num_decode_rows) == (5, 1, 4, 0)
    (head,), (tail,) = first.prefill, second.prefill
    assert (head.start, head.end, head.position, len(head.block_table_M)) == (1, 5, 0, 1)
    assert (tail.start, tail.end, tail.position, len(tail.block_table_M)) == (0, 4, 4, 2)
    assert tail.block_table_M[:1].tolist() == head.block_table_M.tolist()
    assert (first.sample_rows_N.tolist(), second.sample_rows_N.tolist()) == ([0], [3])


def test_padded_rows_write_to_scratch_attend_to_one_token_and_are_not_sampled(bare_codec: TextCodec) -> None:
    first, second = stages_of(make_schedule(bare_codec, decoding=[3, 4, 5]), 2, bucket=4)
    for stage, num_real in ((first, 2), (second, 1)):
        assert stage.num_rows == stage.num_decode_rows == 4
        for values, padding in (
            (stage.cache_index_T, 0),
            (stage.token_ids_T, 0),
            (stage.context_lens_B, 1),
            (stage.block_table_BM, 0),
        ):
            assert (values[num_real:] == padding).all() and (values[:num_real] != padding).any(-1).all()
        assert stage.sample_rows_N.tolist() == list(range(num_real))


def test_an_idle_rank_has_stages_of_padding_alone(bare_codec: TextCodec) -> None:
    for stage in stages_of(make_schedule(bare_codec), 3, bucket=2):
        assert (stage.num_rows, stage.num_decode_rows, len(stage.sample_rows_N)) == (2, 2, 0)
        assert stage.cache_index_T.tolist() == [0, 0]


def test_padding_a_step_with_prompt_rows_is_refused(bare_codec: TextCodec) -> None:
    with pytest.raises(AssertionError):
        stages_of(make_schedule(bare_codec, prompts=[3]), 1, bucket=4)


@pytest.mark.parametrize("num_rows,num_stages", [(0, 2), (1, 2), (2, 3), (3, 2), (5, 3), (7, 4)])
def test_stages_hold_the_rows_that_the_plan_gives_them(bare_codec: TextCodec, num_rows: int, num_stages: int) -> None:
    stages = stages_of(make_schedule(bare_codec, decoding=[2] * num_rows), num_stages)
    assert tuple(stage.num_rows for stage in stages) == split_rows(num_rows, num_stages)
    assert [id_ for stage in stages for id_ in stage.token_ids_T.tolist()] == [90 + row for row in range(num_rows)]


lengths = st.lists(st.integers(1, 20), max_size=6)


@settings(max_examples=100, deadline=None)
@given(decoding=lengths, prompts=lengths, num_stages=st.integers(1, 9))
def test_stages_together_are_the_one_stage_of_the_whole_step(
    bare_codec: TextCodec, decoding: list[int], prompts: list[int], num_stages: int
) -> None:
    schedule = make_schedule(bare_codec, decoding, prompts)
    (whole,) = stages_of(schedule, 1)
    stages = stages_of(schedule, num_stages)
    starts = np.cumsum([0, *(stage.num_rows for stage in stages)]).tolist()
    for name in ("token_ids_T", "positions_T", "cache_index_T", "block_table_BM", "context_lens_B"):
        assert torch.equal(torch.cat([getattr(stage, name) for stage in stages]), getattr(whole, name)), name
    sample_rows = [
        start + row for start, stage in zip(starts, stages, strict=False) for row in stage.sample_rows_N.tolist()
    ]
    assert sample_rows == whole.sample_rows_N.tolist() == list(schedule.sample_rows)
    assert prompt_rows(stages, starts) == prompt_rows((whole,), [0])
    for stage in stages:
        assert stage.num_rows == stage.num_decode_rows + sum(chunk.end - chunk.start for chunk in stage.prefill)


def prompt_rows(stages: Sequence[StageBatch], starts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return row, position and cache index of every prompt row, by the chunks' own positions and block tables."""
    rows = []
    for start, stage in zip(starts, stages, strict=False):
        for chunk in stage.prefill:
            for offset in range(chunk.end - chunk.start):
                block, place = divmod(chunk.position + offset, BLOCK_SIZE)
                cache_index = int(chunk.block_table_M[block]) * BLOCK_SIZE + place
                assert cache_index == stage.cache_index_T[chunk.start + offset]
                rows.append((start + chunk.start + offset, chunk.position + offset, cache_index))
    return rows
