"""Where a rank is in its work, and how far the job is. Knows no tensors, no transport."""

import logging
import sys
from dataclasses import dataclass

from tqdm import tqdm

log = logging.getLogger(__name__)
_LINE_INTERVAL_S = 5.0


@dataclass(slots=True)
class Progress:
    """The step, and the action, layer and stage within it, that this rank is at; None outside of a step."""

    step: int | None = None
    action: str | None = None
    layer: int | None = None
    stage: int | None = None

    def begin_step(self, step: int) -> None:
        self.step, self.action, self.layer, self.stage = step, None, None, None

    def begin_action(self, action: str, layer: int, stage: int) -> None:
        self.action, self.layer, self.stage = action, layer, stage

    def __str__(self) -> str:
        if self.step is None:
            return "before the first step"
        if self.action is None:
            return f"step {self.step}"
        return f"step {self.step}, layer {self.layer}, stage {self.stage}, {self.action}"


class JobProgress:
    """Counts finished requests before the user's eyes: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._num_done = 0
        self._num_tokens = 0
        self._next_line_s = _LINE_INTERVAL_S
        self._bar = tqdm(total=num_requests, unit="request", disable=not sys.stderr.isatty())

    def count(self, num_tokens: int, elapsed_s: float) -> None:
        """Take note of a request that finished `elapsed_s` after the job's start with `num_tokens` generated tokens."""
        self._num_done += 1
        self._num_tokens += num_tokens
        rate = self._num_tokens / max(elapsed_s, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self._bar.update()
        if self._bar.disable and (elapsed_s >= self._next_line_s or self._num_done == self._num_requests):
            self._next_line_s = elapsed_s + _LINE_INTERVAL_S
            log.info("%d of %d requests, %.0f tokens/s", self._num_done, self._num_requests, rate)

    def close(self) -> None:
        self._bar.close()
