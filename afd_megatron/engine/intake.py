"""Reads the job's input lines and hands out requests as they arrive. Knows no ranks, no scheduling.

A line is `{"id", "prompt" | "prompt_token_ids" | "messages", sampling keys, "arrival_s"}` or of the OpenAI batch form.
A line that cannot be run becomes an error result, and the rest is done.
"""

import json
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from afd_megatron.config import SamplingConfig
from afd_megatron.engine.openai_batch import is_batch_line, read_batch_line
from afd_megatron.engine.records import check_each, check_keys, shown
from afd_megatron.engine.request import FinishReason, Request, Result, SamplingParams
from afd_megatron.engine.text import TextCodec
from afd_megatron.errors import AfdError, CheckpointError, ConfigError

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_KEYS = ("id", *_PROMPTS, "arrival_s", *SamplingConfig.model_fields)


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt may be: token ids below `vocab_size`, fewer tokens than `max_context`."""

    vocab_size: int
    max_context: int


class JobInput(NamedTuple):
    """The requests of a job by arrival, and the results of the lines that are at fault."""

    requests: list[Request]
    failures: list[Result]


class Intake:
    """The requests that have not arrived yet."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = deque(requests)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def next_arrival_s(self) -> float | None:
        """Seconds after job start at which the next request arrives; None if there is none."""
        return self._requests[0].arrival_s if self._requests else None

    def take_due(self, now_s: float) -> list[Request]:
        """Return, once, the requests that have arrived `now_s` seconds after job start."""
        due = list(takewhile(lambda request: request.arrival_s <= now_s, self._requests))
        for _ in due:
            self._requests.popleft()
        return due


def read_input(
    path: Path, defaults: SamplingConfig, codec: TextCodec, *, limits: PromptLimits, request_rate: float | None
) -> JobInput:
    """Read all lines of a job.

    Args:
        path: JSONL file.
        defaults: sampling where a line sets none; the limits of its fields hold for a line's values too.
        codec: makes token ids of text.
        limits: what a prompt may be.
        request_rate: mean arrivals per second with exponential gaps drawn from `defaults.seed`, or None for all at
            once; a line's `arrival_s` beats it.

    Raises:
        ConfigError: the file cannot be read, two lines have one id, or the defaults ask for stop strings without a
            tokenizer.
        CheckpointError: the tokenizer cannot be read.
    """
    if defaults.stop and not codec.has_tokenizer:
        raise ConfigError("sampling.stop: needs a tokenizer, the model folder has none (allowed: [])")
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    entries = [_read_entry(line, number) for number, line in enumerate(lines, start=1) if line.strip()]
    gaps, arrival_s = random.Random(defaults.seed), 0.0
    job = JobInput([], [])
    for entry in _with_unique_ids(entries, path):
        try:
            job.requests.extend(_read_requests(entry, arrival_s, defaults, codec, limits))
        except CheckpointError:
            raise
        except AfdError as error:
            text = f"{path}:{entry.line_number}: {error}"
            job.failures.append(Result(entry.id, 0, FinishReason.ERROR, error=text))
        arrival_s += gaps.expovariate(request_rate) if request_rate else 0.0
    job.requests.sort(key=lambda request: request.arrival_s)
    return job


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line: its id (the index where none was read), and its record in our form or what is wrong with it."""

    line_number: int
    id: str
    record: Mapping[str, object]
    error: str | None = None
    has_own_id: bool = False


def _read_entry(line: bytes, line_number: int) -> _Entry:
    entry = _Entry(line_number, str(line_number - 1), {})
    try:
        record = json.loads(line.decode(), parse_constant=_refuse_constant)
        json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but has no UTF-8
    except (ValueError, RecursionError) as error:
        return replace(entry, error=f"not a line of JSON: {error}")
    if not isinstance(record, dict):
        return replace(entry, error=f"{shown(record)} (allowed: a JSON object)")
    key = "custom_id" if is_batch_line(record) else "id"
    own_id = record.get(key)
    if isinstance(own_id, str) or type(own_id) is int:
        entry = replace(entry, id=str(own_id), has_own_id=True)
    elif own_id is not None:
        return replace(entry, error=f"{key}: {shown(own_id)} (allowed: a string)")
    try:
        return replace(entry, record=read_batch_line(record) if is_batch_line(record) else record)
    except AfdError as error:
        return replace(entry, error=str(error))


def _with_unique_ids(entries: Sequence[_Entry], path: Path) -> Iterator[_Entry]:
    """Yield the entries if no id stands twice; a line whose id could not be read gives way to another's id."""
    own_ids = {entry.id for entry in entries if entry.has_own_id}
    first_lines: dict[str, int] = {}
    for entry in entries:
        if entry.error is not None and not entry.has_own_id and entry.id in own_ids:
            entry = replace(entry, id=f"line {entry.line_number}")
        first = first_lines.setdefault(entry.id, entry.line_number)
        if first != entry.line_number:
            raise ConfigError(f"{path}:{entry.line_number}: id {shown(entry.id)} is that of line {first} too")
        yield entry


def _read_requests(
    entry: _Entry, arrival_s: float, defaults: SamplingConfig, codec: TextCodec, limits: PromptLimits
) -> list[Request]:
    """Return one request per sample."""
    if entry.error is not None:
        raise AfdError(entry.error)
    record = {key: value for key, value in entry.record.items() if value is not None}
    check_keys(record, _KEYS)
    arrival_s = _read_arrival(record.get("arrival_s", arrival_s))
    sampling = _read_sampling(record, defaults)
    if sampling.stop and not codec.has_tokenizer:
        raise AfdError("stop: needs a tokenizer, the model folder has none")
    token_ids = tuple(_read_prompt(record, codec, limits))
    if not 0 < len(token_ids) < limits.max_context:
        raise AfdError(f"prompt: {len(token_ids)} tokens (allowed: 1 to {limits.max_context - 1})")
    params = SamplingParams(**sampling.model_dump(exclude={"n"}))
    return [Request(entry.id, sample, token_ids, params, arrival_s) for sample in range(sampling.n)]


def _read_arrival(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise AfdError(f"arrival_s: {shown(value)} (allowed: seconds, 0 to 1e9)")
    return float(value)


def _read_sampling(record: Mapping[str, object], defaults: SamplingConfig) -> SamplingConfig:
    overrides = {key: record[key] for key in SamplingConfig.model_fields if key in record}
    try:
        return SamplingConfig.model_validate({**defaults.model_dump(), **overrides})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise AfdError(f"{'.'.join(map(str, first['loc']))}: {shown(first['input'])}: {first['msg']}") from error


def _read_prompt(record: Mapping[str, object], codec: TextCodec, limits: PromptLimits) -> Sequence[int]:
    given = [key for key in _PROMPTS if key in record]
    if len(given) != 1:
        raise AfdError(f"prompt: {' and '.join(given) or 'none'} given (allowed: one of {', '.join(_PROMPTS)})")
    key, value = given[0], record[given[0]]
    if key == "prompt":
        if not isinstance(value, str):
            raise AfdError(f"prompt: {shown(value)} (allowed: a string)")
        return codec.encode(value)
    if not isinstance(value, list):
        raise AfdError(f"{key}: {shown(value)} (allowed: a list)")
    if key == "messages":
        check_each(value, key, _is_message, 'an object with the strings "role" and "content"')
        return codec.encode_chat(value)
    allowed = f"integers from 0 to {limits.vocab_size - 1}"
    check_each(value, key, lambda item: type(item) is int and 0 <= item < limits.vocab_size, allowed)
    return value


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")
