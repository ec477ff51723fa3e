"""Writes results as they finish, the summary at the end, and computes its metrics. Knows no ranks, no scheduling."""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from afd_megatron.engine.request import FinishReason, Result
from afd_megatron.errors import AfdError, ConfigError


class ResultWriter:
    """The output file: one line of JSON per result, on disk when `write` returns.

    A line is written at once, so a killed job leaves whole lines and at most one torn last one.

    Raises:
        ConfigError: the file holds something and `overwrite` is false, another job writes it, or it cannot be written.
            (A job that is refused after its output was opened leaves an empty file, which is in nobody's way.)
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self._path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
            if path.is_file() and path.stat().st_size:
                if not overwrite:
                    raise ConfigError(f"{path}: exists already (allowed: another job.output, or --overwrite)")
                self._file.truncate(0)
        except BlockingIOError as error:
            raise ConfigError(f"{path}: another job writes it (allowed: another job.output)") from error
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error

    def write(self, result: Result) -> None:
        """Add the record of `result`.

        Raises:
            AfdError: the disk is full or failed; names the result that is lost.
        """
        line = memoryview(json.dumps(result.record(), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        try:
            while line:  # a disk that fills up takes a part first, and refuses the rest with a reason
                line = line[self._file.write(line) :]
        except OSError as error:
            raise AfdError(f"{self._path}: result {result.id!r} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "ResultWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """Write the summary whole or not at all.

    Raises:
        AfdError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(summary, file, ensure_ascii=False, allow_nan=False, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise AfdError(f"{path}: summary cannot be written: {error.strerror}") from error


def benchmark_metrics(results: Sequence[Result], duration_s: float) -> dict[str, float]:
    """Return the figures of a job of `duration_s` under the keys of vLLM's benchmark, over completed requests.

    Two identities hold exactly, both by Little's law, with requests in the system averaged over time:
    output_throughput = mean_concurrency x output_throughput_per_user, where a user waits from arrival to end, and
    decode_throughput = mean_decode_concurrency x 1000 / mean_itl_ms, where the time to the first token, and the first
    tokens, are left out.

    Source: vLLM, benchmarks/serve.py: tpot of a request is its time after the first token per token after the first.
    """
    completed = [result for result in results if result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]
    answered = [result for result in completed if result.ttft_s is not None]
    ttft_s = np.array([result.ttft_s for result in answered], np.float64)
    itl_s = np.array([gap_s for result in answered for gap_s in result.itl_s], np.float64)
    tpot_s = np.array([sum(result.itl_s) / len(result.itl_s) for result in answered if result.itl_s], np.float64)
    e2el_s = np.array([result.e2e_s for result in completed], np.float64)
    total_output = sum(result.num_tokens for result in completed)
    reasons = [result.finish_reason for result in results]
    metrics: dict[str, float] = {
        "completed": len(completed),
        "failed": reasons.count(FinishReason.ERROR),
        "interrupted": reasons.count(FinishReason.INTERRUPTED),
        "duration": duration_s,
        "total_input": sum(result.num_prompt_tokens for result in completed),
        "total_output": total_output,
        "request_throughput": _ratio(len(completed), duration_s),
        "output_throughput": _ratio(total_output, duration_s),
        "output_throughput_per_user": _ratio(total_output, e2el_s.sum()),
        "mean_concurrency": _ratio(e2el_s.sum(), duration_s),
        "decode_throughput": _ratio(itl_s.size, duration_s),
        "mean_decode_concurrency": _ratio(itl_s.sum(), duration_s),
    }
    for name, values_s in (("ttft", ttft_s), ("tpot", tpot_s), ("itl", itl_s), ("e2el", e2el_s)):
        values_ms = 1000 * values_s if values_s.size else np.zeros(1)
        metrics[f"mean_{name}_ms"] = float(values_ms.mean())
        metrics[f"median_{name}_ms"] = float(np.median(values_ms))
        metrics[f"p99_{name}_ms"] = float(np.percentile(values_ms, 99))
    return metrics


def _ratio(amount: float, per: float) -> float:
    return float(amount / per) if per else 0.0
