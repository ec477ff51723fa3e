import json
from pathlib import Path

import pytest

from afd_megatron.config import SamplingConfig
from afd_megatron.engine.intake import Intake, JobInput, PromptLimits, read_input
from afd_megatron.engine.request import FinishReason, SamplingParams
from afd_megatron.engine.text import TextCodec
from afd_megatron.errors import CheckpointError, ConfigError

LIMITS = PromptLimits(vocab_size=300, max_context=40)
GOOD = b'{"id": "good", "prompt_token_ids": [1, 2]}'


def read(
    folder: Path,
    codec: TextCodec,
    *lines: bytes | dict[str, object],
    defaults: SamplingConfig | None = None,
    rate: float | None = None,
) -> JobInput:
    path = folder / "input.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return read_input(path, defaults or SamplingConfig(), codec, limits=LIMITS, request_rate=rate)


def read_error(folder: Path, codec: TextCodec, line: bytes | dict[str, object]) -> str:
    """Return the error of `line`, read after a good one, which must not suffer."""
    job = read(folder, codec, GOOD, line)
    assert [request.id for request in job.requests] == ["good"]
    (failure,) = job.failures
    assert failure.finish_reason is FinishReason.ERROR and failure.error is not None
    assert ":2: " in failure.error and "\n" not in failure.error
    return failure.error


@pytest.mark.parametrize(
    "line,error",
    [
        (b"{", "not a line of JSON"),
        (b"[1,2,3]", "[1, 2, 3] (allowed: a JSON object)"),
        (b"null", "null (allowed: a JSON object)"),
        (b'"text"', "allowed: a JSON object"),
        (b'{"prompt": "\xff"}', "not a line of JSON: 'utf-8' codec can't decode"),
        (b'{"prompt": "\\ud800"}', "not a line of JSON: 'utf-8' codec can't encode"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is no number"),
        (b"[" * 100_000, "not a line of JSON"),
        ({"id": "x"}, "prompt: none given (allowed: one of prompt, prompt_token_ids, messages)"),
        ({"prompt": "a", "messages": []}, "prompt: prompt and messages given"),
        ({"prompt": 5}, "prompt: 5 (allowed: a string)"),
        ({"prompt": ""}, "prompt: 0 tokens (allowed: 1 to 39)"),
        ({"prompt": "x" * 40}, "prompt: 40 tokens (allowed: 1 to 39)"),
        ({"prompt_token_ids": []}, "prompt: 0 tokens"),
        ({"prompt_token_ids": "12"}, "allowed: a list"),
        ({"prompt_token_ids": [1, 300]}, "prompt_token_ids.1: 300 (allowed: integers from 0 to 299)"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids.0: -1"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids.0: true"),
        ({"prompt_token_ids": [1.0]}, "prompt_token_ids.0: 1.0"),
        ({"messages": ["hi"]}, 'messages.0: "hi" (allowed: an object with the strings'),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages: role robot is unknown"),
        ({"id": [1], "prompt": "a"}, "id: [1] (allowed: a string)"),
        ({"id": True, "prompt": "a"}, "id: true (allowed: a string)"),
        ({"prompt": "a", "arrival_s": -1}, "arrival_s: -1 (allowed: seconds"),
        ({"prompt": "a", "arrival_s": "1"}, "arrival_s"),
        ({"prompt": "a", "arrival_s": 1e300}, "arrival_s"),
        ({"prompt": "a", "tempratur": 1}, 'unknown key "tempratur" (allowed: id, prompt'),
        ({"prompt": "a", "temperature": -1}, "temperature: -1: Input should be greater than or equal to 0"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": -1}, "top_k"),
        ({"prompt": "a", "min_p": 2}, "min_p"),
        ({"prompt": "a", "max_new_tokens": 1.5}, "max_new_tokens"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "n": 0}, "n: 0"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "stop": "END"}, "stop"),
        ({"prompt": "a", "stop": [""]}, "stop.0"),
        ({"custom_id": "x"}, "url: null (allowed: /v1/chat/completions, /v1/completions)"),
        ({"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}, 'method: "GET" (allowed: POST)'),
        ({"custom_id": "x", "url": ["/v1/completions"], "body": {}}, 'url: ["/v1/completions"] (allowed: '),
        ({"custom_id": "x", "url": "/v1/completions", "body": [1]}, "body: [1] (allowed: a JSON object)"),
        ({"custom_id": "x", "url": "/v1/completions", "body": {"messages": []}}, 'unknown key "messages"'),
        ({"custom_id": "x", "url": "/v1/chat/completions", "body": {}, "prompt": "a"}, 'unknown key "prompt"'),
        ({"custom_id": "x", "url": "/v1/completions", "body": {"prompt": ["a", "b"]}}, 'prompt_token_ids.0: "a"'),
        ({"custom_id": "x", "url": "/v1/chat/completions", "body": {"top_logprobs": 2}}, "top_logprobs: no effect"),
        (
            {"custom_id": "x", "url": "/v1/chat/completions", "body": {"logprobs": True, "top_logprobs": "2"}},
            'logprobs: "2"',
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_line_is_an_error_record_and_the_rest_is_done(
    tmp_path: Path, byte_codec: TextCodec, line: bytes | dict[str, object], error: str
) -> None:
    assert error in read_error(tmp_path, byte_codec, line)


def test_an_error_record_has_the_lines_id_or_else_its_index(tmp_path: Path, byte_codec: TextCodec) -> None:
    lines = [b"{", {"id": "x", "prompt": 5}, {"custom_id": "y", "body": 5}, {"prompt": 5}]
    assert [failure.id for failure in read(tmp_path, byte_codec, *lines).failures] == ["0", "x", "y", "3"]


def test_a_line_without_readable_id_gives_way_to_the_id_of_another(tmp_path: Path, byte_codec: TextCodec) -> None:
    job = read(tmp_path, byte_codec, b"{", {"id": "0", "prompt": "a"})
    assert [request.id for request in job.requests] == ["0"]
    assert [failure.id for failure in job.failures] == ["line 1"]


def test_bom_crlf_and_blank_lines_do_no_harm(tmp_path: Path, byte_codec: TextCodec) -> None:
    job = read(tmp_path, byte_codec, b'\xef\xbb\xbf{"prompt": "a"}\r', b"", b"  \r", b'{"prompt": "b"}\r', b"")
    assert [request.id for request in job.requests] == ["0", "3"] and job.failures == []


def test_an_empty_file_is_a_job_without_requests(tmp_path: Path, byte_codec: TextCodec) -> None:
    assert read(tmp_path, byte_codec) == ([], [])


def test_a_missing_file_is_a_config_error(tmp_path: Path, byte_codec: TextCodec) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
        read_input(tmp_path / "none.jsonl", SamplingConfig(), byte_codec, limits=LIMITS, request_rate=None)


@pytest.mark.parametrize(
    "lines",
    [
        ({"id": "1", "prompt": "a"}, {"prompt": "b"}),
        ({"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}),
        ({"id": "1", "prompt": "a"}, {"id": "1", "prompt": 5}),
        ({"id": "1", "prompt": "a"}, {"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "b"}}),
    ],
)
def test_duplicate_ids_refuse_the_job_with_both_lines(
    tmp_path: Path, byte_codec: TextCodec, lines: tuple[dict[str, object], ...]
) -> None:
    with pytest.raises(ConfigError, match=r'input\.jsonl:2: id "1" is that of line 1 too'):
        read(tmp_path, byte_codec, *lines)


def test_a_line_overrides_defaults_and_null_does_not(tmp_path: Path, byte_codec: TextCodec) -> None:
    defaults = SamplingConfig(temperature=0.5, top_k=7, seed=3, stop=("x",))
    line = {"prompt": "a", "temperature": 1, "top_k": None, "stop": ["y", "z"], "max_new_tokens": 0}
    (request,) = read(tmp_path, byte_codec, line, defaults=defaults).requests
    assert request.sampling == SamplingParams(temperature=1.0, top_k=7, seed=3, stop=("y", "z"), max_new_tokens=0)


def test_n_samples_are_n_requests_of_one_id(tmp_path: Path, byte_codec: TextCodec) -> None:
    requests = read(tmp_path, byte_codec, {"id": "a", "prompt": "p", "n": 3}).requests
    assert [(request.id, request.sample) for request in requests] == [("a", 0), ("a", 1), ("a", 2)]
    assert len({request.prompt_token_ids for request in requests}) == 1


@pytest.mark.parametrize(
    "body,sampling",
    [
        ({"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 4}, SamplingParams(0.5, 0.9, 0, 0.0, 5, 4)),
        ({"max_completion_tokens": 6, "stop": "END"}, SamplingParams(max_new_tokens=6, stop=("END",))),
        ({"model": "m", "stop": ["a", "b"], "logprobs": True}, SamplingParams(logprobs=1, stop=("a", "b"))),
        ({"logprobs": True, "top_logprobs": 4}, SamplingParams(logprobs=4)),
        ({"logprobs": False, "stop": None, "top_logprobs": None}, SamplingParams()),
    ],
)
def test_a_chat_of_the_openai_batch_form_is_read(
    tmp_path: Path, byte_codec: TextCodec, body: dict[str, object], sampling: SamplingParams
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **body}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (request,) = read(tmp_path, byte_codec, line).requests
    assert (request.id, request.sampling) == ("c", sampling)
    assert byte_codec.decode(request.prompt_token_ids) == "[user]hi[assistant]"


@pytest.mark.parametrize("prompt,token_ids", [([5, 6], (5, 6)), ("ab", None)])
def test_a_completion_of_the_openai_batch_form_is_read(
    tmp_path: Path, byte_codec: TextCodec, prompt: object, token_ids: tuple[int, ...] | None
) -> None:
    body = {"prompt": prompt, "logprobs": 2, "n": 2}
    requests = read(tmp_path, byte_codec, {"custom_id": "c", "url": "/v1/completions", "body": body}).requests
    expected = token_ids or tuple(byte_codec.encode("ab"))
    assert [request.prompt_token_ids for request in requests] == [expected] * 2
    assert requests[0].sampling.logprobs == 2


def test_without_tokenizer_token_ids_run_and_text_is_refused(tmp_path: Path, bare_codec: TextCodec) -> None:
    for refused in ({"prompt": "a"}, {"messages": []}, {"prompt_token_ids": [1], "stop": ["x"]}):
        assert "tokenizer" in read_error(tmp_path, bare_codec, refused)


def test_default_stop_strings_without_tokenizer_refuse_the_job(tmp_path: Path, bare_codec: TextCodec) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.stop: needs a tokenizer"):
        read(tmp_path, bare_codec, GOOD, defaults=SamplingConfig(stop=("x",)))


def test_a_broken_tokenizer_refuses_the_job_and_not_every_line(byte_folder: Path) -> None:
    (byte_folder / "tokenizer.json").write_text("{")
    (byte_folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        read(byte_folder, TextCodec(byte_folder), {"prompt": "a"})


def test_all_requests_arrive_at_once_without_a_rate(tmp_path: Path, bare_codec: TextCodec) -> None:
    intake = Intake(read(tmp_path, bare_codec, *[{"prompt_token_ids": [1]}] * 5).requests)
    assert len(intake.take_due(0.0)) == 5 and not intake and intake.next_arrival_s is None


def test_requests_arrive_at_the_rate_and_the_seed_decides_when(tmp_path: Path, bare_codec: TextCodec) -> None:
    lines: list[dict[str, object]] = [{"prompt_token_ids": [1]}] * 2000

    def arrivals(seed: int) -> list[float]:
        requests = read(tmp_path, bare_codec, *lines, defaults=SamplingConfig(seed=seed), rate=10.0).requests
        return [request.arrival_s for request in requests]

    assert arrivals(0)[-1] == pytest.approx(200, rel=0.15)
    assert arrivals(0) == arrivals(0) != arrivals(1)


def test_take_due_gives_each_request_once_in_order_of_arrival(tmp_path: Path, bare_codec: TextCodec) -> None:
    lines = [
        {"id": name, "prompt_token_ids": [1], "arrival_s": time} for name, time in (("c", 3), ("a", 0), ("b", 1.5))
    ]
    intake = Intake(read(tmp_path, bare_codec, *lines, rate=1.0).requests)
    taken = []
    for now_s, next_arrival_s in ((0.0, 1.5), (1.4, 1.5), (1.5, 3.0), (9.0, None)):
        taken.append([request.id for request in intake.take_due(now_s)])
        assert intake.next_arrival_s == next_arrival_s
    assert taken == [["a"], [], ["b"], ["c"]]
