"""The FFN's half of a step: receive, experts, reply. Knows no requests, no scheduler, no transport.

R rows of one stage from all attention ranks, D hidden.
"""

import torch

from afd_megatron.connector.base import Dispatched, FfnPort
from afd_megatron.models.ffn_model import FfnModel
from afd_megatron.observability.progress import Progress
from afd_megatron.pipeline import Kind, ffn_actions
from afd_megatron.plan import StepPlan


class FfnStep:
    """Runs the plans of one FFN rank."""

    def __init__(self, model: FfnModel, port: FfnPort, *, progress: Progress) -> None:
        self._model = model
        self._port = port
        self._progress = progress
        self._plan: StepPlan | None = None
        self._received: dict[int, Dispatched] = {}
        self._partial_RD: dict[int, torch.Tensor] = {}

    def run(self, plan: StepPlan) -> None:
        """Run one step."""
        self.begin_step(plan)
        for kind, layer, stage in ffn_actions(self._model.is_remote, plan.num_stages):
            self.act(kind, layer, stage)

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan
        self._port.begin_step(plan)

    @torch.inference_mode()
    def act(self, kind: Kind, layer: int, stage: int) -> None:
        """Do one action of the step begun last; a stage without rows is skipped."""
        assert self._plan is not None
        if not self._plan.stages[stage].num_rows:
            return
        self._progress.begin_action(kind, layer, stage)
        if kind is Kind.RECEIVE:
            self._received[stage] = self._port.receive(layer, stage)
        elif kind is Kind.EXPERTS:
            hidden_RD, routing = self._received[stage]
            self._partial_RD[stage] = self._model.experts(layer, hidden_RD, routing)
        else:
            self._port.reply(layer, stage, self._partial_RD[stage])
