import json
from pathlib import Path

import numpy as np
import pytest

from afd_megatron.engine.kv_blocks import BlockPool
from afd_megatron.engine.request import FinishReason, Request, Result, SampledToken, SamplingParams
from afd_megatron.engine.results import ResultWriter, benchmark_metrics, write_summary
from afd_megatron.engine.scheduler import Scheduler, SchedulerLimits
from afd_megatron.engine.text import TextCodec
from afd_megatron.errors import AfdError, ConfigError


def make_result(request_id: str = "a", text: str | None = None) -> Result:
    return Result(request_id, 0, FinishReason.STOP, text=text, token_ids=(5, 1), num_prompt_tokens=3)


def test_a_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        for number in range(3):
            writer.write(make_result(str(number), "line\nbreak\u2028 🙂"))
            records = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
            assert [record["id"] for record in records] == [str(written) for written in range(number + 1)]
    assert records[0]["text"] == "line\nbreak\u2028 🙂"


def test_an_output_that_exists_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("kept")
    with pytest.raises(ConfigError, match="exists already"):
        ResultWriter(path)
    assert path.read_text() == "kept"


def test_an_output_that_another_job_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path):
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=r"out\.jsonl: another job writes it"):
                ResultWriter(path, overwrite=overwrite)
    ResultWriter(path).close()


def test_overwrite_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    ResultWriter(path, overwrite=True).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("name", ["missing/out.jsonl", "."])
def test_an_output_that_cannot_be_written_is_a_config_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        ResultWriter(tmp_path / name, overwrite=True)


def test_a_full_disk_is_told_with_the_result_that_is_lost() -> None:
    with (
        ResultWriter(Path("/dev/full"), overwrite=True) as writer,
        pytest.raises(AfdError, match="result 'a' cannot be written: No space left on device"),
    ):
        writer.write(make_result())


def test_closing_twice_does_no_harm(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path / "out.jsonl")
    writer.close()
    writer.close()


def test_the_summary_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.summary.json"
    write_summary(path, {"status": "ok"})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_summary(path, {"status": "fault", "value": float("nan")})
    assert json.loads(path.read_text()) == {"status": "ok"}


def test_metrics_of_two_requests_are_those_worked_out_by_hand() -> None:
    results = [
        Result("a", 0, FinishReason.STOP, None, (5, 6, 1), 10, ttft_s=1.0, itl_s=(0.5, 1.5), e2e_s=3.0),
        Result("b", 0, FinishReason.LENGTH, None, (5,), 20, ttft_s=2.0, e2e_s=2.0),
        Result("c", 0, FinishReason.ERROR, error="no"),
        Result("d", 0, FinishReason.INTERRUPTED, None, (5,), 40, ttft_s=9.0, e2e_s=9.0),
    ]
    metrics = benchmark_metrics(results, duration_s=4.0)
    expected = {
        "completed": 2,
        "failed": 1,
        "interrupted": 1,
        "duration": 4.0,
        "total_input": 30,
        "total_output": 4,
        "request_throughput": 0.5,
        "output_throughput": 1.0,
        "mean_ttft_ms": 1500.0,
        "median_ttft_ms": 1500.0,
        "p99_ttft_ms": 1990.0,
        "mean_tpot_ms": 1000.0,
        "mean_itl_ms": 1000.0,
        "p99_itl_ms": 1490.0,
        "mean_e2el_ms": 2500.0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_metrics_of_no_results_are_zero_and_json() -> None:
    metrics = benchmark_metrics([], duration_s=0.0)
    assert set(metrics.values()) == {0}
    json.dumps(metrics, allow_nan=False)


def test_throughput_is_concurrency_times_the_users_rate(bare_codec: TextCodec) -> None:
    """Concurrency is counted here step by step, so that the identities are not true by construction."""
    rng = np.random.default_rng(0)
    now_s, request_seconds, decode_seconds = 0.0, 0.0, 0.0
    scheduler = Scheduler(SchedulerLimits(4, 64, 8), BlockPool(100, 4), bare_codec, clock=lambda: now_s)
    results: list[Result] = []
    num_added, decoding = 0, set[str]()
    while num_added < 40 or scheduler.has_work:
        for _ in range(min(int(rng.integers(0, 3)), 40 - num_added)):
            sampling = SamplingParams(max_new_tokens=int(rng.integers(1, 20)))
            scheduler.add(Request(str(num_added), 0, tuple(range(10, 10 + int(rng.integers(1, 30)))), sampling))
            num_added += 1
        step_s = float(rng.uniform(0.01, 0.2))
        now_s += step_s
        request_seconds += (num_added - len(results)) * step_s
        decode_seconds += len(decoding) * step_s
        schedule = scheduler.schedule()
        finished = scheduler.finish_step(schedule, [SampledToken(50) for _ in schedule.requests])
        decoding = (decoding | {request.id for request in schedule.requests}) - {result.id for result in finished}
        results += finished
    metrics = benchmark_metrics(results, now_s)
    concurrency, decode_concurrency = request_seconds / now_s, decode_seconds / now_s
    assert metrics["completed"] == 40
    assert metrics["mean_concurrency"] == pytest.approx(concurrency, rel=1e-9)
    assert metrics["mean_decode_concurrency"] == pytest.approx(decode_concurrency, rel=1e-9)
    assert metrics["output_throughput"] == pytest.approx(concurrency * metrics["output_throughput_per_user"], rel=1e-9)
    assert metrics["decode_throughput"] == pytest.approx(decode_concurrency * 1000 / metrics["mean_itl_ms"], rel=1e-9)
    assert metrics["decode_throughput"] * now_s == pytest.approx(metrics["total_output"] - 40)


def test_an_empty_output_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    with ResultWriter(path) as writer:
        writer.write(make_result())
    assert path.read_text()
