"""Dense MLP and shared experts, whole or in columns; the same modules on either role. R rows, D hidden."""

import copy

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class SlicedMlp(MLP):
    """`width` inner columns of Megatron's MLP, which takes the width from the config and knows no other columns."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, width: int) -> None:
        config = copy.copy(config)
        config.ffn_hidden_size = width
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, submodules, ffn_hidden_size=width, tp_group=groups.expt_tp)


class SharedExperts(SlicedMlp):
    """`width` inner columns of the experts that every row passes; with a gate each row has a weight of its own."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, width: int, *, has_gate: bool
    ) -> None:
        super().__init__(config, groups, width)
        self.gate_weight = None
        if has_gate:
            self.gate_weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        out_RD = super().forward(hidden_RD)[0]
        return out_RD if self.gate_weight is None else out_RD * F.linear(hidden_RD, self.gate_weight).sigmoid()
