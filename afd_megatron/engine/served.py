"""One request on the rank that serves it, from its arrival to its result. Knows no other request, no tensors."""

from dataclasses import dataclass, field
from itertools import pairwise

from afd_megatron.engine.request import FinishReason, Request, Result, SampledToken
from afd_megatron.engine.text import TextCodec, TextStream


@dataclass(slots=True)
class ServedRequest:
    """A request and all that became of it so far.

    `limit` is the number of tokens it may come to hold, prompt included, cut to the context. `slot` and `blocks` are
    its place while it runs, `num_computed` the prompt tokens that have run.
    """

    request: Request
    arrived_s: float
    limit: int
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    token_ids: list[int] = field(default_factory=list)
    _times_s: list[float] = field(default_factory=list)
    _logprobs: list[SampledToken] = field(default_factory=list)
    _stream: TextStream | None = None
    _text: str | None = None
    _has_eos: bool = False

    @property
    def num_prompt_left(self) -> int:
        return len(self.request.prompt_token_ids) - self.num_computed

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Prompt tokens left to compute and tokens left to generate."""
        return self.limit - self.num_computed - len(self.token_ids)

    def append(self, token: SampledToken, codec: TextCodec, now_s: float) -> FinishReason | None:
        """Add a drawn token; return why the request is done, None if it is not."""
        self.token_ids.append(token.token_id)
        self._times_s.append(now_s)
        if self.request.sampling.logprobs:
            self._logprobs.append(token)
        if token.token_id in codec.eos_token_ids and not self.request.sampling.ignore_eos:
            self._has_eos = True
            return FinishReason.STOP
        if self.request.sampling.stop and self._meets_stop_string(token.token_id, codec):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.limit else None

    def result(self, reason: FinishReason, codec: TextCodec, now_s: float, error: str | None = None) -> Result:
        """Return what there is by now, as the answer."""
        text = self._text
        if text is None and reason is not FinishReason.ERROR:
            text = codec.decode(self.token_ids[: len(self.token_ids) - self._has_eos])
        times_s = self._times_s
        return Result(
            id=self.request.id,
            sample=self.request.sample,
            finish_reason=reason,
            text=text,
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=len(self.request.prompt_token_ids),
            logprobs=tuple(self._logprobs) if self.request.sampling.logprobs else None,
            error=error,
            ttft_s=times_s[0] - self.arrived_s if times_s else None,
            itl_s=tuple(later - earlier for earlier, later in pairwise(times_s)),
            e2e_s=now_s - self.arrived_s,
        )

    def _meets_stop_string(self, token_id: int, codec: TextCodec) -> bool:
        """Decode on; if that completes a stop string, keep the text before the first one."""
        if self._stream is None:
            self._stream = TextStream(codec)
        num_seen = len(self._stream.text)
        self._stream.push(token_id)
        text = self._stream.text
        starts = [text.find(stop, max(0, num_seen - len(stop) + 1)) for stop in self.request.sampling.stop]
        found = [start for start in starts if start >= 0]
        if found:
            self._text = text[: min(found)]
        return bool(found)
