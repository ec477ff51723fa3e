"""Attention's half of a step: attend, dispatch, combine, and the logits at its end. Knows no requests, no transport.

T rows of one stage on this rank, X of them that it dispatches, N rows whose logits are wanted, D hidden, V vocabulary.
"""

from typing import Protocol

import torch

from afd_megatron.connector.base import AttentionPort
from afd_megatron.engine.batch import StageBatch
from afd_megatron.models.attention_model import AttentionModel
from afd_megatron.models.kv_cache import KvCache
from afd_megatron.observability.progress import Progress
from afd_megatron.pipeline import Kind, attention_actions, colocated_actions
from afd_megatron.plan import StepPlan


class FfnHalf(Protocol):
    """The FFN's half of a step, driven from here on a rank that has both roles."""

    def begin_step(self, plan: StepPlan) -> None: ...

    def act(self, kind: Kind, layer: int, stage: int) -> None: ...


class AttentionStep:
    """Runs the plans of one attention rank; with `ffn` it also drives this rank's FFN half (colocated)."""

    def __init__(
        self,
        model: AttentionModel,
        cache: KvCache,
        port: AttentionPort,
        *,
        progress: Progress,
        ffn: FfnHalf | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._port = port
        self._progress = progress
        self._ffn = ffn

    @torch.inference_mode()
    def run(self, plan: StepPlan, stages: tuple[StageBatch, ...]) -> torch.Tensor:
        """Run one step and return the logits float32 [N, V] of every stage's `sample_rows_N`, stages in order."""
        with self._model.tensor_parallel.naming_peers():
            return self._run(plan, stages)

    def _run(self, plan: StepPlan, stages: tuple[StageBatch, ...]) -> torch.Tensor:
        model, port = self._model, self._port
        port.begin_step(plan)
        if self._ffn is not None:
            self._ffn.begin_step(plan)
        inputs = [model.prepare_stage(stage, self._cache) for stage in stages]
        hidden = [model.embed(stage.token_ids_T) for stage in stages]
        residual, normed = list(hidden), list(hidden)
        actions = attention_actions if self._ffn is None else colocated_actions
        for kind, layer, stage in actions(model.is_remote, plan.num_stages):
            if kind in (Kind.RECEIVE, Kind.EXPERTS, Kind.REPLY):
                assert self._ffn is not None
                self._ffn.act(kind, layer, stage)
                continue
            if not stages[stage].num_rows:
                continue
            self._progress.begin_action(kind, layer, stage)
            if kind is Kind.ATTEND:
                residual[stage], normed[stage] = model.attend(layer, hidden[stage], inputs[stage], self._cache)
            elif kind is Kind.DISPATCH:
                shard_XD = model.shard(normed[stage])
                port.dispatch(layer, stage, shard_XD, model.route(layer, shard_XD))
                residual[stage] = model.add_shared(layer, residual[stage], normed[stage])  # while the rows are away
            elif kind is Kind.OWN_FFN:
                hidden[stage] = model.run_dense(layer, residual[stage], normed[stage])
            else:
                hidden[stage] = model.finish(residual[stage], port.combine(layer, stage))
        rows = [hidden_TD[stage.sample_rows_N] for hidden_TD, stage in zip(hidden, stages, strict=True)]
        return model.logits(torch.cat(rows))
