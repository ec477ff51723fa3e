"""The FFN's part of a model: experts, dense MLPs, and the router if the gate sits here. Knows no transport.

R rows of one stage from all attention ranks, D hidden, I width of an expert, E experts of this rank.
"""

import copy

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from afd_megatron.families.base import ModelShape
from afd_megatron.models.config import transformer_config
from afd_megatron.models.router import SoftmaxRouter
from afd_megatron.ops.experts import run_experts
from afd_megatron.routing import Routing
from afd_megatron.topology import contiguous_slice


class FfnModel(torch.nn.Module):
    """One FFN rank's experts and its slices of dense MLPs. Parameters are allocated, `load_ffn` fills them.

    The rank holds a contiguous slice of every layer, which is empty where there are more ranks than experts; the sum
    over the ranks is the layer's output.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroupCollection,
        *,
        role_rank: int,
        num_ffn: int,
        has_router: bool,
    ) -> None:
        super().__init__()
        config = transformer_config(shape, dtype)
        self.num_layers = shape.num_layers
        self.expert_ids = contiguous_slice(shape.num_experts, num_ffn, role_rank)
        self.dense_columns = contiguous_slice(shape.dense_width, num_ffn, role_rank)
        with torch.device(device):
            self.layers = torch.nn.ModuleList(
                MoeFfn(config, groups, self.expert_ids, has_router=has_router)
                if is_moe
                else _dense_mlp(config, groups, len(self.dense_columns))
                for is_moe in shape.is_moe_layer
            )
        self.requires_grad_(False).eval()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters by the names that the family's tensor rules give them."""
        return {
            f"decoder.layers.{layer}.mlp.{name}": parameter
            for layer, module in enumerate(self.layers)
            for name, parameter in module.named_parameters()
        }

    def experts(self, layer: int, hidden_RD: torch.Tensor, routing: Routing | None) -> torch.Tensor:
        """Return this rank's part of the layer's output, [R, D] in the model's dtype.

        `routing` comes along if the gate sits on attention; a dense layer has none.
        """
        module = self.layers[layer]
        if isinstance(module, MoeFfn):
            return module(hidden_RD, routing)
        assert routing is None, layer
        return module(hidden_RD)[0]


class MoeFfn(MegatronModule):
    """The experts `expert_ids` of one layer."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, expert_ids: range, *, has_router: bool
    ) -> None:
        super().__init__(config)
        self.router = SoftmaxRouter(config, groups) if has_router else None
        self.experts = LocalExperts(config, expert_ids)

    def forward(self, hidden_RD: torch.Tensor, routing: Routing | None) -> torch.Tensor:
        if self.router is not None:
            assert routing is None
            routing = self.router(hidden_RD)
        assert routing is not None
        return self.experts(hidden_RD, routing)


class LocalExperts(MegatronModule):
    """Experts as two stacked parameters, [E, 2 * I, D] and [E, D, I]."""

    def __init__(self, config: TransformerConfig, expert_ids: range) -> None:
        super().__init__(config)
        self._first_expert = expert_ids.start
        num_experts, hidden, width = len(expert_ids), config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = torch.nn.Parameter(torch.empty(num_experts, 2 * width, hidden, dtype=config.params_dtype))
        self.linear_fc2 = torch.nn.Parameter(torch.empty(num_experts, hidden, width, dtype=config.params_dtype))

    def forward(self, hidden_RD: torch.Tensor, routing: Routing) -> torch.Tensor:
        return run_experts(hidden_RD, routing, self.linear_fc1, self.linear_fc2, first_expert=self._first_expert)


def _dense_mlp(config: TransformerConfig, groups: ProcessGroupCollection, width: int) -> MLP:
    """Build Megatron's MLP on `width` inner columns, which it takes from the config."""
    config = copy.copy(config)
    config.ffn_hidden_size = width
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return MLP(config, submodules, ffn_hidden_size=width, tp_group=groups.tp)
