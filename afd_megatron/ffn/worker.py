"""An FFN rank's life between steps: it takes a plan, runs it, and waits for the next. Knows no requests."""

from collections import Counter

from afd_megatron.control import PlanReceiver
from afd_megatron.ffn.step import FfnStep
from afd_megatron.observability.progress import Progress
from afd_megatron.plan import ffn_action


class FfnWorker:
    """Follows the plans of attention until they say stop."""

    def __init__(self, receiver: PlanReceiver, step: FfnStep, *, progress: Progress) -> None:
        self._receiver = receiver
        self._step = step
        self._progress = progress
        self.steps_by_action: Counter[str] = Counter()
        self.eager_reasons: Counter[str] = Counter()

    def run(self) -> None:
        """Run plans until STOP; raises what the receiver or a step raises."""
        while (plan := self._receiver.next()) is not None:
            action, reason = ffn_action(plan.mode, has_graph=False)
            self.steps_by_action[action] += 1
            if reason:
                self.eager_reasons[reason] += 1
            self._progress.begin_step(plan.sequence)
            self._step.run(plan)
