"""The dense MLP, whole or in columns; the same module on either role. Knows no rank."""

import copy

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class SlicedMlp(MLP):
    """`width` inner columns of Megatron's MLP, which takes the width from the config."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, width: int) -> None:
        config = copy.copy(config)
        config.ffn_hidden_size = width
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, submodules, ffn_hidden_size=width, tp_group=groups.tp)
