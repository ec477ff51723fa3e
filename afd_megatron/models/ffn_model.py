"""The FFN's part of a model: experts, shared and dense MLPs, and the router if the gate sits here. Knows no transport.

R rows of one stage from all attention ranks, D hidden, I this rank's width of an expert, E experts of this rank.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from afd_megatron.families.base import ModelShape, Staying
from afd_megatron.models.config import transformer_config
from afd_megatron.models.mlp import SharedExperts, SlicedMlp
from afd_megatron.models.router import Router
from afd_megatron.ops.experts import ExpertBias, run_experts
from afd_megatron.routing import Routing
from afd_megatron.topology import contiguous_slice


class FfnModel(torch.nn.Module):
    """One FFN rank's experts and its slices of shared and dense MLPs. Parameters are allocated, `load_ffn` fills them.

    Each `tp` ranks in a row hold the same contiguous slice of experts and share their width; all ranks share the width
    of shared and dense MLPs. A slice may be empty; the sum over the ranks is the layer's output.
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
        stays: Staying,
        tp: int = 1,
    ) -> None:
        super().__init__()
        config = transformer_config(shape, dtype)
        config.moe_ffn_hidden_size = len(contiguous_slice(shape.moe_width, tp, role_rank % tp))
        self.is_remote = shape.is_remote_layer(stays)
        self.role_rank, self.num_ffn, self.tp = role_rank, num_ffn, tp
        self.expert_ids = contiguous_slice(shape.num_experts, num_ffn // tp, role_rank // tp)
        dense_columns = contiguous_slice(shape.dense_width, num_ffn, role_rank)
        shared_columns = contiguous_slice(shape.shared_width, num_ffn, role_rank)
        with torch.device(device):
            self.layers = torch.nn.ModuleList(
                MoeFfn(shape, config, groups, self.expert_ids, len(shared_columns), stays)
                if is_moe
                else (SlicedMlp(config, groups, len(dense_columns)) if is_remote else torch.nn.Identity())
                for is_moe, is_remote in zip(shape.is_moe_layer, self.is_remote, strict=True)
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
    """The experts `expert_ids` of one layer, and `shared_width` inner columns of its shared experts."""

    def __init__(
        self,
        shape: ModelShape,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        expert_ids: range,
        shared_width: int,
        stays: Staying,
    ) -> None:
        super().__init__(config)
        self.router = None if stays.router else Router(config, groups, shape.router)
        self.experts = LocalExperts(shape, config, expert_ids)
        self.shared_experts = None
        if shape.shared_width and not stays.shared:
            self.shared_experts = SharedExperts(config, groups, shared_width, has_gate=shape.has_shared_gate)

    def forward(self, hidden_RD: torch.Tensor, routing: Routing | None) -> torch.Tensor:
        """Return [R, D] in the model's dtype, summed in float32 and rounded once."""
        if self.router is not None:
            assert routing is None
            routing = self.router(hidden_RD)
        assert routing is not None
        out_RD = self.experts(hidden_RD, routing)
        if self.shared_experts is not None:
            out_RD = out_RD + self.shared_experts(hidden_RD)
        return out_RD.to(hidden_RD.dtype)


class LocalExperts(MegatronModule):
    """Experts as two stacked parameters, [E, 2 * I, D] and [E, D, I], with biases if wanted; their sum is float32."""

    def __init__(self, shape: ModelShape, config: TransformerConfig, expert_ids: range) -> None:
        super().__init__(config)
        self._first_expert = expert_ids.start
        self._activation = shape.expert_activation
        num_experts, hidden, width = len(expert_ids), config.hidden_size, config.moe_ffn_hidden_size

        def parameter(*size: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(num_experts, *size, dtype=config.params_dtype))

        self.linear_fc1, self.linear_fc2 = parameter(2 * width, hidden), parameter(hidden, width)
        self._has_bias = shape.has_expert_bias
        if self._has_bias:
            self.linear_fc1_bias, self.linear_fc2_bias = parameter(2 * width), parameter(hidden)

    def forward(self, hidden_RD: torch.Tensor, routing: Routing) -> torch.Tensor:
        return run_experts(
            hidden_RD,
            routing,
            self.linear_fc1,
            self.linear_fc2,
            first_expert=self._first_expert,
            bias=ExpertBias(self.linear_fc1_bias, self.linear_fc2_bias) if self._has_bias else None,
            activation=self._activation,
        )
