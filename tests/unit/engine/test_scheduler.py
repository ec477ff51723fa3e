from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_megatron.engine.kv_blocks import BlockPool
from afd_megatron.engine.request import FinishReason, Request, Result, SampledToken, SamplingParams
from afd_megatron.engine.scheduler import Schedule, Scheduler, SchedulerLimits
from afd_megatron.engine.text import TextCodec
from afd_megatron.plan import RankCounts

EOS = 1  # of `bare_codec`, which also ends at 2
BLOCK_SIZE = 4


class FakeClock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_scheduler(
    codec: TextCodec,
    *,
    max_requests: int = 4,
    max_context: int = 64,
    prefill_chunk: int = 16,
    num_blocks: int = 65,
    clock: FakeClock | None = None,
) -> Scheduler:
    limits = SchedulerLimits(max_requests, max_context, prefill_chunk)
    return Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE), codec, clock=clock or FakeClock())


def make_request(
    request_id: str = "a",
    num_prompt: int = 3,
    max_new_tokens: int = 4,
    *,
    ignore_eos: bool = False,
    stop: tuple[str, ...] = (),
) -> Request:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, stop=stop)
    return Request(request_id, 0, tuple(range(10, 10 + num_prompt)), sampling)


def run_step(scheduler: Scheduler, token_ids: Sequence[int] | None = None) -> tuple[Schedule, list[Result]]:
    """Run a step that draws `token_ids`, or 50 for each row."""
    schedule = scheduler.schedule()
    token_ids = [50] * len(schedule.requests) if token_ids is None else token_ids
    return schedule, scheduler.finish_step(schedule, [SampledToken(token_id) for token_id in token_ids])


def run_all(scheduler: Scheduler, token_ids: Sequence[int] = ()) -> list[Result]:
    """Run one request to its end; it draws `token_ids`, then 50."""
    results: list[Result] = []
    drawn = iter(token_ids)
    while scheduler.has_work:
        schedule = scheduler.schedule()
        results += scheduler.finish_step(schedule, [SampledToken(next(drawn, 50)) for _ in schedule.requests])
    return results


def test_a_prompt_runs_first_and_then_its_tokens_one_by_one(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec)
    scheduler.add(make_request(num_prompt=3))
    prompt, _ = run_step(scheduler, [70])
    decode, _ = run_step(scheduler, [71])
    assert (prompt.token_ids_T.tolist(), prompt.positions_T.tolist()) == ([10, 11, 12], [0, 1, 2])
    assert (prompt.sample_rows, prompt.sample_positions) == ((2,), (3,))
    assert (decode.token_ids_T.tolist(), decode.positions_T.tolist()) == ([70], [3])
    assert (decode.sample_rows, decode.sample_positions) == ((0,), (4,))


def test_decode_rows_come_before_prompt_rows_in_a_mixed_step(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec)
    scheduler.add(make_request("a", 2))
    run_step(scheduler, [70])
    scheduler.add(make_request("b", 3))
    mixed, _ = run_step(scheduler, [71, 72])
    assert mixed.token_ids_T.tolist() == [70, 10, 11, 12]
    assert mixed.counts == RankCounts(num_decode_rows=1, num_prefill_rows=3)
    assert [request.id for request in mixed.requests] == ["a", "b"]


def test_prompts_are_cut_at_the_chunk_and_only_their_last_row_is_sampled(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec, prefill_chunk=4)
    scheduler.add(make_request("a", 6))
    scheduler.add(make_request("b", 3))
    first, _ = run_step(scheduler)
    second, _ = run_step(scheduler)
    third, _ = run_step(scheduler)
    assert (first.positions_T.tolist(), first.sample_rows) == ([0, 1, 2, 3], ())
    assert (second.positions_T.tolist(), second.sample_rows) == ([4, 5, 0, 1], (1,))
    assert (third.positions_T.tolist(), third.sample_rows) == ([6, 2], (0, 1))


def test_an_idle_scheduler_gives_an_empty_step(bare_codec: TextCodec) -> None:
    schedule, results = run_step(make_scheduler(bare_codec))
    assert schedule.counts == RankCounts(0, 0) and results == []


@pytest.mark.parametrize("eos", [1, 2])
def test_every_eos_id_ends_a_request_and_stays_in_its_tokens(bare_codec: TextCodec, eos: int) -> None:
    scheduler = make_scheduler(bare_codec)
    scheduler.add(make_request())
    (result,) = run_all(scheduler, [60, eos])
    assert (result.finish_reason, result.token_ids) == (FinishReason.STOP, (60, eos))


def test_ignore_eos_goes_on_to_the_length(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec)
    scheduler.add(make_request(ignore_eos=True))
    (result,) = run_all(scheduler, [EOS, EOS, EOS, EOS])
    assert (result.finish_reason, result.token_ids) == (FinishReason.LENGTH, (EOS,) * 4)


def test_zero_new_tokens_end_at_once_without_a_step(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec)
    result = scheduler.add(make_request(max_new_tokens=0))
    assert result is not None and not scheduler.has_work
    assert (result.finish_reason, result.token_ids) == (FinishReason.LENGTH, ())


def test_one_new_token_ends_with_the_prompts_step(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec)
    scheduler.add(make_request(max_new_tokens=1))
    _, (result,) = run_step(scheduler, [60])
    assert (result.finish_reason, result.token_ids) == (FinishReason.LENGTH, (60,))


def test_the_context_ends_a_request_before_its_new_tokens_do(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec, max_context=8)
    scheduler.add(make_request(num_prompt=5, max_new_tokens=100))
    (result,) = run_all(scheduler)
    assert (result.finish_reason, result.num_tokens) == (FinishReason.LENGTH, 3)


def test_text_ends_before_the_first_stop_string_and_before_the_eos(byte_codec: TextCodec) -> None:
    scheduler = make_scheduler(byte_codec)
    scheduler.add(make_request(max_new_tokens=40, stop=("ND", "END", "ND s")))
    spoken = byte_codec.encode("words END so")
    (result,) = run_all(scheduler, spoken)
    assert (result.text, result.finish_reason) == ("words ", FinishReason.STOP)
    assert list(result.token_ids) == spoken[: len("words END")]
    scheduler.add(make_request(max_new_tokens=40, stop=("END",)))
    (result,) = run_all(scheduler, [*byte_codec.encode("words EN"), 0])
    assert (result.text, result.finish_reason) == ("words EN", FinishReason.STOP)


def test_a_request_waits_for_a_place_and_takes_it_when_another_finishes(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec, max_requests=1)
    scheduler.add(make_request("a", max_new_tokens=2))
    scheduler.add(make_request("b"))
    ids = [[request.id for request in run_step(scheduler)[0].requests] for _ in range(3)]
    assert ids == [["a"], ["a"], ["b"]]


def test_a_request_waits_for_blocks_although_places_are_free(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec, num_blocks=3)
    scheduler.add(make_request("a", num_prompt=3, max_new_tokens=2))
    scheduler.add(make_request("b", num_prompt=3, max_new_tokens=1))
    ids = [[request.id for request in run_step(scheduler)[0].requests] for _ in range(3)]
    assert ids == [["a"], ["a"], ["b"]]


def test_a_request_that_can_never_fit_is_an_error_and_the_next_one_runs(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec, num_blocks=3)
    refused = scheduler.add(make_request("a", num_prompt=5, max_new_tokens=4))
    assert refused is not None and refused.finish_reason is FinishReason.ERROR
    assert refused.error is not None and "9 (allowed: up to 8, all of engine.kv_blocks)" in refused.error
    scheduler.add(make_request("b", num_prompt=5, max_new_tokens=3))
    assert [result.id for result in run_all(scheduler)] == ["b"]


@pytest.mark.parametrize("num_prompt", [0, 8, 9])
def test_a_prompt_that_leaves_no_room_for_a_token_is_an_error(bare_codec: TextCodec, num_prompt: int) -> None:
    result = make_scheduler(bare_codec, max_context=8).add(make_request(num_prompt=num_prompt))
    assert result is not None and result.error is not None and "(allowed: 1 to 7" in result.error


def test_interrupt_ends_running_and_waiting_requests_and_frees_their_blocks(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec, max_requests=1, num_blocks=3)
    scheduler.add(make_request("a", num_prompt=3, max_new_tokens=5))
    scheduler.add(make_request("b"))
    run_step(scheduler, [60])
    scheduler.schedule()
    results = scheduler.interrupt()
    assert [(result.id, result.token_ids) for result in results] == [("a", (60,)), ("b", ())]
    assert {result.finish_reason for result in results} == {FinishReason.INTERRUPTED}
    assert not scheduler.has_work and scheduler.load == 0
    scheduler.add(make_request("c", num_prompt=3, max_new_tokens=5))
    assert len(run_all(scheduler)) == 1


def test_load_counts_prompt_tokens_and_new_tokens_that_are_left(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec, max_requests=1, prefill_chunk=2)
    scheduler.add(make_request("a", num_prompt=3, max_new_tokens=2))
    scheduler.add(make_request("b", num_prompt=1, max_new_tokens=1))
    loads = [scheduler.load]
    while scheduler.has_work:
        run_step(scheduler)
        loads.append(scheduler.load)
    assert loads == [7, 5, 3, 2, 0]


def test_times_count_from_the_arrival(bare_codec: TextCodec) -> None:
    clock = FakeClock()
    scheduler = make_scheduler(bare_codec, clock=clock)
    scheduler.add(make_request(max_new_tokens=3), waited_s=2.0)
    for now_s in (101.0, 101.5, 103.5):
        clock.now_s = now_s
        _, results = run_step(scheduler)
    (result,) = results
    assert (result.ttft_s, result.itl_s, result.e2e_s) == (3.0, (0.5, 2.0), 5.5)


def test_logprobs_are_kept_only_where_they_were_asked_for(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec)
    asking = SamplingParams(max_new_tokens=1, logprobs=1)
    scheduler.add(Request("a", 0, (5,), asking))
    scheduler.add(make_request("b", max_new_tokens=1))
    token = SampledToken(60, -0.5, ((60, -0.5),))
    results = scheduler.finish_step(scheduler.schedule(), [token, SampledToken(61)])
    assert [result.logprobs for result in results] == [(token,), None]


def test_a_second_step_before_the_first_is_finished_is_refused(bare_codec: TextCodec) -> None:
    scheduler = make_scheduler(bare_codec)
    scheduler.schedule()
    with pytest.raises(AssertionError, match="the last step is not finished"):
        scheduler.schedule()


class Planned(NamedTuple):
    """A request of a random job: when it comes, and after how many tokens it draws an EOS."""

    added_at: int
    num_prompt: int
    max_new_tokens: int
    eos_after: int


@settings(max_examples=150, deadline=None)
@given(
    job=st.lists(
        st.builds(Planned, st.integers(0, 12), st.integers(1, 20), st.integers(0, 12), st.integers(0, 12)), max_size=20
    ),
    max_requests=st.integers(1, 5),
    prefill_chunk=st.integers(1, 9),
    num_blocks=st.integers(2, 20),
)
def test_every_request_ends_once_within_the_limits_and_every_token_runs_once_in_a_block_of_its_own(
    bare_codec: TextCodec, job: list[Planned], max_requests: int, prefill_chunk: int, num_blocks: int
) -> None:
    """Token ids tell whose they are and where: 1000 x (index + 1) + position."""
    max_context, step = 24, 0
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(
        SchedulerLimits(max_requests, max_context, prefill_chunk), pool, bare_codec, clock=FakeClock()
    )
    results: list[Result] = []
    rows_run: list[int] = []
    while scheduler.has_work or step <= 12:
        for index, planned in enumerate(job):
            if planned.added_at == step:
                prompt = tuple(range(1000 * (index + 1), 1000 * (index + 1) + planned.num_prompt))
                sampling = SamplingParams(max_new_tokens=planned.max_new_tokens)
                refused = scheduler.add(Request(str(index), 0, prompt, sampling))
                results += [refused] if refused else []
        schedule = scheduler.schedule()
        assert schedule.counts.num_decode_rows <= max_requests
        assert schedule.counts.num_prefill_rows <= prefill_chunk
        assert (schedule.token_ids_T % 1000 == schedule.positions_T).all()
        check_blocks(schedule)
        rows_run += schedule.token_ids_T.tolist()
        sampled = []
        for request, position in zip(schedule.requests, schedule.sample_positions, strict=True):
            is_eos = position - len(request.prompt_token_ids) == job[int(request.id)].eos_after
            sampled.append(SampledToken(EOS if is_eos else 1000 * (int(request.id) + 1) + position))
        results += scheduler.finish_step(schedule, sampled)
        step += 1
        assert step < 1000, "a request never ends"
    assert sorted(int(result.id) for result in results) == list(range(len(job)))
    assert pool.num_free == num_blocks - 1 and scheduler.load == 0
    expected_rows: list[int] = []
    for result in results:
        planned, first = job[int(result.id)], 1000 * (int(result.id) + 1)
        if result.finish_reason is not FinishReason.ERROR:
            room = max_context - planned.num_prompt
            assert result.num_tokens == min(planned.max_new_tokens, planned.eos_after + 1, room)
            num_rows = planned.num_prompt + result.num_tokens - 1 if result.num_tokens else 0
            expected_rows += range(first, first + num_rows)
    assert sorted(rows_run) == sorted(expected_rows)


def check_blocks(schedule: Schedule) -> None:
    """Check that no block is in two tables and that every row has one."""
    tables = [*schedule.block_table_BM, *(prompt.block_table_M for prompt in schedule.prompts)]
    nums_rows = [1] * len(schedule.block_table_BM) + [prompt.num_rows for prompt in schedule.prompts]
    taken = [block for table in tables for block in table.tolist() if block]
    assert len(taken) == len(set(taken))
    table_by_row = [table for table, num_rows in zip(tables, nums_rows, strict=True) for _ in range(num_rows)]
    for table, position in zip(table_by_row, schedule.positions_T.tolist(), strict=True):
        assert table[position // BLOCK_SIZE] != 0
