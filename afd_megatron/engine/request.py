"""What is asked and what is answered, as data and as bytes. Knows no scheduling, no tokenizer, no files."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    INTERRUPTED = "interrupted"


class SampledToken(NamedTuple):
    """One drawn token; `logprob` and the most likely `top` (token id, logprob) only where they were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw the tokens of one request, and when to stop.

    Temperature 0 takes the most likely token; `top_k` 0, `top_p` 1 and `min_p` 0 are off. `logprobs` n > 0 asks for the
    log-softmax of each chosen token and of the n most likely ones.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 64
    seed: int = 0
    logprobs: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to decode; n samples of a prompt are n requests of one `id`. `arrival_s`: seconds after job start."""

    id: str
    sample: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float = 0.0

    @property
    def max_tokens(self) -> int:
        """Tokens this request may come to hold, prompt included."""
        return len(self.prompt_token_ids) + self.sampling.max_new_tokens

    def to_bytes(self) -> bytes:
        """Return one line of UTF-8 JSON, without the line break."""
        return _to_json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Request":
        values = json.loads(data)
        sampling = values.pop("sampling")
        sampling["stop"] = tuple(sampling["stop"])
        values["prompt_token_ids"] = tuple(values["prompt_token_ids"])
        return cls(**values, sampling=SamplingParams(**sampling))


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one request. `token_ids` hold the EOS, `text` does not; `text` is None without a tokenizer.

    The times are of the rank that served it and feed the metrics, not the record: `ttft_s` and `e2e_s` count from the
    arrival to the first token and to the end, `itl_s` are the gaps between tokens.
    """

    id: str
    sample: int
    finish_reason: FinishReason
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    logprobs: tuple[SampledToken, ...] | None = None
    error: str | None = None
    ttft_s: float | None = None
    itl_s: tuple[float, ...] = ()
    e2e_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def record(self) -> Mapping[str, object]:
        """Return the line of the output file."""
        return {
            "id": self.id,
            "sample": self.sample,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "logprobs": self.logprobs and [_logprob_record(token) for token in self.logprobs],
            "error": self.error,
        }

    def to_bytes(self) -> bytes:
        """Return one line of UTF-8 JSON, without the line break."""
        return _to_json({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Result":
        values = json.loads(data)
        values["finish_reason"] = FinishReason(values["finish_reason"])
        values["token_ids"] = tuple(values["token_ids"])
        values["itl_s"] = tuple(values["itl_s"])
        if values["logprobs"] is not None:
            values["logprobs"] = tuple(
                SampledToken(token_id, logprob, tuple((id_, value) for id_, value in top))
                for token_id, logprob, top in values["logprobs"]
            )
        return cls(**values)


def _to_json(values: Mapping[str, object]) -> bytes:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def _logprob_record(token: SampledToken) -> Mapping[str, object]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in token.top]
    return {"token_id": token.token_id, "logprob": token.logprob, "top": top}
