"""Turns a line of the OpenAI batch form into a record of our own form. Knows no defaults, no tokenizer."""

from collections.abc import Mapping

from afd_megatron.config import SamplingConfig
from afd_megatron.engine.records import check_keys, shown
from afd_megatron.errors import AfdError

_LINE_KEYS = ("custom_id", "method", "url", "body")
_BODY_KEYS = ("model", "max_tokens", *(key for key in SamplingConfig.model_fields if key != "max_new_tokens"))
_KEYS_BY_URL = {
    "/v1/chat/completions": ("messages", "max_completion_tokens", "top_logprobs", *_BODY_KEYS),
    "/v1/completions": ("prompt", *_BODY_KEYS),
}


def is_batch_line(record: Mapping[str, object]) -> bool:
    return "custom_id" in record or "body" in record


def read_batch_line(record: Mapping[str, object]) -> dict[str, object]:
    """Return prompt or messages, and the sampling keys, under the names of our form; their values are not judged.

    `model` is ignored, as a job has one. A chat's `logprobs: true` is 1 unless `top_logprobs` gives more.

    Raises:
        AfdError: another method or url, no body, or a key that the url does not know.
    """
    check_keys(record, _LINE_KEYS)
    if record.get("method", "POST") != "POST":
        raise AfdError(f"method: {shown(record['method'])} (allowed: POST)")
    body, url = record.get("body"), record.get("url")
    if not isinstance(url, str) or url not in _KEYS_BY_URL:
        raise AfdError(f"url: {shown(url)} (allowed: {', '.join(_KEYS_BY_URL)})")
    if not isinstance(body, dict):
        raise AfdError(f"body: {shown(body)} (allowed: a JSON object)")
    body = {key: value for key, value in body.items() if value is not None}
    check_keys(body, _KEYS_BY_URL[url])
    body.pop("model", None)
    for key in ("max_tokens", "max_completion_tokens"):
        if key in body:
            body["max_new_tokens"] = body.pop(key)
    if "messages" in _KEYS_BY_URL[url]:
        _read_chat_logprobs(body)
    if isinstance(body.get("stop"), str):
        body["stop"] = [body["stop"]]
    if isinstance(body.get("prompt"), list):
        body["prompt_token_ids"] = body.pop("prompt")
    return body


def _read_chat_logprobs(body: dict[str, object]) -> None:
    wanted, num_top = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise AfdError(f"logprobs: {shown(wanted)} (allowed: true, false)")
    if num_top is not None and not wanted:
        raise AfdError("top_logprobs: no effect without logprobs (allowed: logprobs true)")
    if wanted:
        body["logprobs"] = num_top or 1
