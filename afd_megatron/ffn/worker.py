"""An FFN rank's life between steps: it takes a plan, runs it, and waits for the next. Knows no requests."""

from collections import Counter

from afd_megatron.control.plans import PlanReceiver
from afd_megatron.ffn.step import FfnStep
from afd_megatron.observability.progress import Progress
from afd_megatron.plan import ffn_action


class FfnWorker:
    """Follows the plans of attention until they say stop."""

    def __init__(self, receiver: PlanReceiver, step: FfnStep, *, progress: Progress) -> None:
        self._receiver = receiver
        self._step = step
        self._progress = progress
        self.steps: Counter[str] = Counter()  # by what was done, and why where that is not what the plan asked for

    def run(self) -> None:
        """Run plans until STOP; raises what the receiver or a step raises."""
        while (plan := self._receiver.next()) is not None:
            action, reason = ffn_action(plan.mode, has_graph=False)
            self.steps[action if reason is None else f"{action}: {reason}"] += 1
            self._progress.begin_step(plan.sequence)
            self._step.run(plan)
