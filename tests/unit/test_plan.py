"""The step plan: its bytes, how counts become one, what is refused, and the table of run modes."""

import itertools
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_megatron.errors import ProtocolError
from afd_megatron.plan import (
    FfnAction,
    Phase,
    PlanRules,
    RankCounts,
    RunMode,
    StageRows,
    StepPlan,
    check_plan,
    ffn_action,
    make_plan,
    plan_num_bytes,
    split_rows,
    warmup_plan,
)

RULES = PlanRules(num_stages=2, num_attention=2, max_rows=64, graphs_enabled=True, buckets=(4, 8, 16))
EAGER_RULES = replace(RULES, graphs_enabled=False, buckets=())


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    num_stages, num_attention = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    counts = st.tuples(*[st.integers(0, 2**31 - 1)] * num_attention)
    return StepPlan(
        sequence=draw(st.integers(0, 2**63 - 1)),
        mode=draw(st.sampled_from(RunMode)),
        stages=tuple(StageRows(draw(counts), draw(counts)) for _ in range(num_stages)),
        phases=tuple(draw(st.sampled_from(Phase)) for _ in range(num_attention)),
        profile=draw(st.booleans()),
    )


@settings(deadline=None)
@given(plans())
def test_bytes_decode_to_the_plan_they_encode(plan: StepPlan) -> None:
    data = plan.encode()
    assert len(data) == plan_num_bytes(plan.num_stages, plan.num_attention)
    assert StepPlan.decode(data) == plan


@settings(deadline=None)
@given(plans(), st.data())
def test_damaged_bytes_give_a_plan_or_a_protocol_error(plan: StepPlan, data: st.DataObject) -> None:
    damaged = bytearray(plan.encode())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    damaged = damaged[: data.draw(st.sampled_from([None, 0, 5, len(damaged) - 1]))]
    try:
        assert isinstance(StepPlan.decode(bytes(damaged)), StepPlan)
    except ProtocolError as error:
        assert str(error).startswith("step plan: ")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "expected b'AFDP' version 1"),
        (4, struct.pack("<H", 2), "version 2"),
        (16, b"\x09", "9 is not a valid RunMode"),
        (18, struct.pack("<H", 9), "bytes for 9 stages of 2 ranks"),
        (-1, b"\x07", "7 is not a valid Phase"),
    ],
)
def test_each_wrong_field_is_named(offset: int, value: bytes, message: str) -> None:
    data = bytearray(warmup_plan(0, 8, RULES).encode())
    offset %= len(data)
    data[offset : offset + len(value)] = value
    with pytest.raises(ProtocolError, match=message):
        StepPlan.decode(bytes(data))


@pytest.mark.parametrize(
    ("num_rows", "num_stages", "sizes"),
    [
        (0, 2, (0, 0)),
        (1, 2, (1, 0)),
        (2, 3, (1, 1, 0)),
        (3, 2, (2, 1)),
        (5, 3, (2, 2, 1)),
        (7, 4, (2, 2, 2, 1)),
    ],
)
def test_stages_differ_by_at_most_one_row(num_rows: int, num_stages: int, sizes: tuple[int, ...]) -> None:
    assert split_rows(num_rows, num_stages) == sizes


def test_step_with_a_prompt_row_is_eager_and_unpadded_for_all_ranks() -> None:
    plan = make_plan(3, (RankCounts(3, 0), RankCounts(1, 4)), RULES)
    assert (plan.sequence, plan.mode) == (3, RunMode.EAGER)
    assert plan.stages == (StageRows((2, 3), (2, 3)), StageRows((1, 2), (1, 2)))
    assert plan.phases == (Phase.DECODE, Phase.PREFILL)


def test_pure_decode_step_replays_in_one_bucket_on_idle_ranks_too() -> None:
    plan = make_plan(0, (RankCounts(9, 0), RankCounts(0, 0)), RULES)
    assert plan.mode is RunMode.REPLAY
    assert plan.stages == (StageRows((8, 8), (5, 0)), StageRows((8, 8), (4, 0)))
    assert plan.phases == (Phase.DECODE, Phase.IDLE)


def test_decode_above_every_bucket_or_without_graphs_is_eager() -> None:
    assert make_plan(0, (RankCounts(33, 0), RankCounts(0, 0)), RULES).mode is RunMode.EAGER
    assert make_plan(0, (RankCounts(3, 0), RankCounts(0, 0)), EAGER_RULES).mode is RunMode.EAGER


def test_tp_ranks_share_the_rows_of_each_stage() -> None:
    rules = replace(EAGER_RULES, num_attention=4, attention_tp=2)
    counts = (RankCounts(3, 6), RankCounts(3, 6), RankCounts(1, 0), RankCounts(1, 0))
    plan = make_plan(0, counts, rules)
    assert plan.stages == (StageRows((3, 2, 1, 0), (3, 2, 1, 0)), StageRows((2, 2, 0, 0), (2, 2, 0, 0)))
    assert plan.phases == (Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE)
    check_plan(plan, 0, rules)


def test_tp_ranks_replay_equal_shards_whose_last_rows_are_padding() -> None:
    rules = replace(RULES, num_attention=4, attention_tp=2)
    plan = make_plan(0, (RankCounts(13, 0),) * 2 + (RankCounts(0, 0),) * 2, rules)
    assert plan.mode is RunMode.REPLAY
    assert plan.stages == (StageRows((4,) * 4, (4, 3, 0, 0)), StageRows((4,) * 4, (4, 2, 0, 0)))
    warm_up = warmup_plan(0, 5, rules)
    assert warm_up.stages == (StageRows((2, 1, 2, 1), (0,) * 4), StageRows((1, 1, 1, 1), (0,) * 4))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=2),
    st.lists(st.sampled_from([0, 0, 1, 60]), min_size=2, max_size=2),
    st.integers(1, 4),
)
def test_every_plan_made_is_possible_and_holds_all_rows(decode: list[int], prefill: list[int], tp: int) -> None:
    counts = tuple(RankCounts(*pair) for pair in zip(decode, prefill, strict=True))
    rules = replace(RULES, num_attention=2 * tp, attention_tp=tp)
    plan = make_plan(7, tuple(count for count in counts for _ in range(tp)), rules)
    check_plan(plan, 7, rules)
    for dp, count in enumerate(counts):
        shards = [stage.real[dp * tp : (dp + 1) * tp] for stage in plan.stages]
        assert sum(map(sum, shards)) == count.num_rows
        assert tuple(map(sum, shards)) == split_rows(count.num_rows, rules.num_stages)


def test_layouts_of_the_same_sum_have_different_keys() -> None:
    keys = {
        StepPlan(0, RunMode.REPLAY, stages, ()).key
        for stages in [
            (StageRows((4, 4), (0, 0)),),
            (StageRows((7, 1), (0, 0)),),
            (StageRows((4,), (0,)), StageRows((4,), (0,))),
            (StageRows((8,), (0,)),),
        ]
    }
    assert len(keys) == 4


def test_warm_up_step_has_rows_on_every_rank_and_none_real() -> None:
    plan = warmup_plan(0, 5, RULES)
    check_plan(plan, 0, EAGER_RULES)
    assert plan.stages == (StageRows((3, 3), (0, 0)), StageRows((2, 2), (0, 0)))


@pytest.mark.parametrize(
    ("changes", "rules", "message"),
    [
        ({"sequence": 4}, RULES, r"sequence 4 \(expected 5\)"),
        ({"sequence": 6}, RULES, r"sequence 6 \(expected 5\)"),
        ({}, replace(RULES, num_stages=3), r"2 stages of 2 ranks \(expected 3 of 2\)"),
        ({"stages": (StageRows((65, 1), (1, 1)),) * 2}, RULES, "attention 0, stage 0: 1 real of 65 padded rows"),
        ({"stages": (StageRows((1, 1), (1, 2)),) * 2}, RULES, "attention 1, stage 0: 2 real of 1 padded rows"),
        ({"stages": (StageRows((1, 1), (-1, 1)),) * 2}, RULES, "attention 0, stage 0: -1 real of 1 padded rows"),
        ({"mode": RunMode.REPLAY}, EAGER_RULES, "mode REPLAY with graphs disabled"),
        ({"mode": RunMode.CAPTURE}, EAGER_RULES, "mode CAPTURE with graphs disabled"),
    ],
)
def test_impossible_plan_is_refused(changes: dict, rules: PlanRules, message: str) -> None:
    plan = make_plan(5, (RankCounts(3, 1), RankCounts(2, 0)), EAGER_RULES)
    with pytest.raises(ProtocolError, match=message):
        check_plan(replace(plan, **changes), 5, rules)


def test_run_mode_decides_what_the_ffn_does_in_every_combination() -> None:
    table = {
        (mode, has_graph): ffn_action(mode, has_graph) for mode, has_graph in itertools.product(RunMode, (True, False))
    }
    assert table == {
        (RunMode.WARMUP, True): (FfnAction.EAGER, None),
        (RunMode.WARMUP, False): (FfnAction.EAGER, None),
        (RunMode.CAPTURE, True): (FfnAction.CAPTURE, None),
        (RunMode.CAPTURE, False): (FfnAction.CAPTURE, None),
        (RunMode.REPLAY, True): (FfnAction.REPLAY, None),
        (RunMode.REPLAY, False): (FfnAction.EAGER, "no graph for the layout"),
        (RunMode.EAGER, True): (FfnAction.EAGER, None),
        (RunMode.EAGER, False): (FfnAction.EAGER, None),
    }
