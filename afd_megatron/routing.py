"""Where rows of a stage go, as tensors. Knows no router, no transport."""

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """Which experts a row goes to: `topk_ids` int32 [rows, K], `topk_weights` float32 [rows, K]."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def rows(self, index_N: torch.Tensor) -> "Routing":
        """Return the routing of some rows."""
        return Routing(self.topk_ids[index_N], self.topk_weights[index_N])
