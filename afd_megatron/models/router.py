"""Which experts a row goes to; the same module for a gate on attention and on the FFN. Knows no experts, no role.

T rows, D hidden, E experts, K top-k.
"""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from afd_megatron.routing import Routing


class SoftmaxRouter(TopKRouter):
    """Megatron's router with everything in float32 and a defined winner between equal scores."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config, groups)
        self.weight.data = self.weight.data.float()

    def forward(self, normed_TD: torch.Tensor) -> Routing:
        """Return each row's experts, best first; between equal scores the lowest id wins."""
        score_TE = F.linear(normed_TD.float(), self.weight).softmax(dim=-1)
        # NOTE: topk may pick any of equal scores, a stable sort may not
        sorted_TE, ids_TE = score_TE.sort(dim=-1, descending=True, stable=True)
        weights_TK, ids_TK = sorted_TE[:, : self.topk], ids_TE[:, : self.topk]
        if not self.config.moe_router_pre_softmax:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return Routing(ids_TK.int(), weights_TK.contiguous())
