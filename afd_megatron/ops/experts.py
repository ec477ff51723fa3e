"""The experts of one FFN rank on the rows it was sent: the fast way and its plain twin. Knows no module, no rank.

R rows, D hidden, I width of an expert, X = 2 * I, E experts of this rank, K top-k, P (row, choice) pairs whose expert
is here.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from afd_megatron.families.base import ClampedSwiglu
from afd_megatron.ops.grouped import grouped_product
from afd_megatron.routing import Routing


class ExpertBias(NamedTuple):
    """What is added to the products of each expert."""

    gate_up_EX: torch.Tensor
    down_ED: torch.Tensor


def run_experts(
    hidden_RD: torch.Tensor,
    routing: Routing,
    gate_up_EXD: torch.Tensor,
    down_EDI: torch.Tensor,
    *,
    first_expert: int,
    bias: ExpertBias | None = None,
    activation: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """Return the weighted sum of this rank's experts per row, float32 [R, D], in the order of the row's choices.

    Args:
        gate_up_EXD: [E, 2 * I, D], gate before up.
        down_EDI: [E, D, I].
        first_expert: global id of expert 0 here; pairs of other ranks' experts are left out.
        activation: None for SwiGLU.
    """
    num_rows, top_k = routing.topk_ids.shape
    expert_P, pair_P = _own_pairs(routing, first_expert, len(gate_up_EXD))
    x_PD = hidden_RD[pair_P // top_k]
    count_E = torch.bincount(expert_P, minlength=len(gate_up_EXD))
    gate_up_PX = grouped_product(x_PD, count_E, gate_up_EXD)
    if bias is not None:
        gate_up_PX += bias.gate_up_EX[expert_P]
    y_PD = grouped_product(_activate(gate_up_PX, activation), count_E, down_EDI)
    if bias is not None:
        y_PD += bias.down_ED[expert_P]
    weight_P = routing.topk_weights.flatten()[pair_P]
    y_RKD = torch.zeros(num_rows, top_k, hidden_RD.shape[1], dtype=torch.float32, device=hidden_RD.device)
    y_RKD.flatten(0, 1).index_copy_(0, pair_P, y_PD.float().mul_(weight_P[:, None]))
    return y_RKD.sum(dim=1)


def run_experts_plain(
    hidden_RD: torch.Tensor,
    routing: Routing,
    gate_up_EXD: torch.Tensor,
    down_EDI: torch.Tensor,
    *,
    first_expert: int,
    bias: ExpertBias | None = None,
    activation: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """Return what `run_experts` does, row by row and expert by expert in float32."""
    sum_RD = torch.zeros(hidden_RD.shape, dtype=torch.float32, device=hidden_RD.device)
    for row, (ids_K, weights_K) in enumerate(zip(routing.topk_ids.tolist(), routing.topk_weights, strict=True)):
        for expert, weight in zip(ids_K, weights_K, strict=True):
            local = expert - first_expert
            if 0 <= local < len(gate_up_EXD):
                gate_up_X = gate_up_EXD[local].float() @ hidden_RD[row].float()
                if bias is not None:
                    gate_up_X += bias.gate_up_EX[local]
                y_D = down_EDI[local].float() @ _activate(gate_up_X, activation)
                sum_RD[row] += weight * (y_D if bias is None else y_D + bias.down_ED[local])
    return sum_RD


def _own_pairs(routing: Routing, first_expert: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local expert and the index row * K + choice of the pairs whose expert is here, by expert, then row."""
    expert = routing.topk_ids.flatten().long() - first_expert
    pair_P = ((expert >= 0) & (expert < num_experts)).nonzero()[:, 0]
    expert_P, order_P = expert[pair_P].sort(stable=True)
    return expert_P, pair_P[order_P]


def _activate(gate_up: torch.Tensor, activation: ClampedSwiglu | None) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is None:
        return F.silu(gate).mul_(up)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
