"""Which experts a row goes to; the same module for a gate on attention and on the FFN. Knows no experts, no role.

T rows, D hidden, E experts, K top-k, O groups of experts.
"""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from afd_megatron.families.base import RouterShape, Score
from afd_megatron.routing import Routing


class Router(TopKRouter):
    """Megatron's router with everything in float32 and a defined winner between equal scores."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, shape: RouterShape) -> None:
        super().__init__(config, groups)
        self._shape = shape
        self.weight.data = self.weight.data.float()
        self.expert_bias = self._bias() if shape.has_bias else None
        self.bias = self._bias() if shape.has_logit_bias else None

    def forward(self, normed_TD: torch.Tensor) -> Routing:
        """Return each row's experts, best first; between equal scores the lowest id wins."""
        shape = self._shape
        logits_TE = F.linear(normed_TD.float(), self.weight, self.bias)
        score_TE = logits_TE.softmax(dim=-1) if shape.score is Score.SOFTMAX else logits_TE.sigmoid()
        choice_TE = score_TE if self.expert_bias is None else score_TE + self.expert_bias
        if shape.num_groups > 1:
            choice_TE = self._of_best_groups(choice_TE)
        # NOTE: topk may pick any of equal scores, a stable sort may not
        ids_TK = choice_TE.argsort(dim=-1, descending=True, stable=True)[:, : shape.top_k]
        weights_TK = score_TE.gather(1, ids_TK)
        if shape.normalize_topk:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        return Routing(ids_TK.int(), weights_TK * shape.scale)

    def _bias(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(len(self.weight), dtype=torch.float32))

    def _of_best_groups(self, choice_TE: torch.Tensor) -> torch.Tensor:
        """Return the scores with those outside of each row's best groups at -inf."""
        shape = self._shape
        choice_TOX = choice_TE.unflatten(1, (shape.num_groups, -1))
        group_TO = choice_TOX.topk(shape.group_top, dim=-1).values.sum(dim=-1)
        best = group_TO.argsort(dim=-1, descending=True, stable=True)[:, : shape.topk_groups]
        is_best_TO = torch.zeros_like(group_TO, dtype=torch.bool).scatter_(1, best, True)
        return choice_TOX.masked_fill(~is_best_TO[:, :, None], -torch.inf).flatten(1)
