"""The experts of one FFN rank on the rows it was sent: the fast way and its plain twin. Knows no module, no rank.

R rows, D hidden, I width of an expert, E experts of this rank, K top-k, P (row, expert) pairs that hit this rank.
"""

import torch
import torch.nn.functional as F

from afd_megatron.routing import Routing

_MAX_PADDING = 4  # rows computed per row wanted, above which padding costs more than calls one by one save


def run_experts(
    hidden_RD: torch.Tensor,
    routing: Routing,
    gate_up_EDX: torch.Tensor,
    down_EID: torch.Tensor,
    *,
    first_expert: int,
) -> torch.Tensor:
    """Return the weighted sum of this rank's experts per row, [R, D] in the dtype of `hidden_RD`, summed in float32.

    Pairs are sorted by expert. If the experts' loads are alike, each is padded to the largest and all run as one
    batched product, which uses all threads; otherwise experts run one by one, and only those that were hit. The loads
    are read on the host.

    Args:
        gate_up_EDX: [E, D, 2 * I], gate columns before up columns.
        down_EID: [E, I, D].
        first_expert: global id of expert 0 here; pairs of other ranks' experts are left out.
    """
    num_experts = len(gate_up_EDX)
    expert_P, row_P, weight_P = _own_pairs(routing, first_expert, num_experts)
    count_E = torch.bincount(expert_P, minlength=num_experts)
    counts = count_E.tolist()
    capacity = max(counts, default=0)
    x_PD = hidden_RD[row_P]
    if torch.get_num_threads() > 1 and num_experts * capacity <= _MAX_PADDING * len(row_P):
        start_E = count_E.cumsum(0) - count_E
        place_P = expert_P * capacity + torch.arange(len(row_P), device=row_P.device) - start_E[expert_P]
        x_ECD = x_PD.new_zeros(num_experts, capacity, x_PD.shape[1])
        x_ECD.flatten(0, 1).index_copy_(0, place_P, x_PD)
        y_ECD = _swiglu(x_ECD @ gate_up_EDX) @ down_EID
        y_PD = y_ECD.flatten(0, 1)[place_P]
    else:
        y_PD = torch.empty_like(x_PD)
        end = 0
        for expert, count in enumerate(counts):
            start, end = end, end + count
            if count:
                torch.mm(_swiglu(x_PD[start:end] @ gate_up_EDX[expert]), down_EID[expert], out=y_PD[start:end])
    sum_RD = torch.zeros(hidden_RD.shape, dtype=torch.float32, device=hidden_RD.device)
    return sum_RD.index_add_(0, row_P, y_PD * weight_P[:, None]).to(hidden_RD.dtype)


def run_experts_plain(
    hidden_RD: torch.Tensor,
    routing: Routing,
    gate_up_EDX: torch.Tensor,
    down_EID: torch.Tensor,
    *,
    first_expert: int,
) -> torch.Tensor:
    """Return what `run_experts` does, by one product per row and expert in float32."""
    sum_RD = torch.zeros(hidden_RD.shape, dtype=torch.float32, device=hidden_RD.device)
    for row, (ids_K, weights_K) in enumerate(zip(routing.topk_ids.tolist(), routing.topk_weights, strict=True)):
        for expert, weight in zip(ids_K, weights_K, strict=True):
            if 0 <= expert - first_expert < len(gate_up_EDX):
                inner_I = _swiglu(hidden_RD[row].float() @ gate_up_EDX[expert - first_expert].float())
                sum_RD[row] += weight * (inner_I @ down_EID[expert - first_expert].float())
    return sum_RD.to(hidden_RD.dtype)


def _own_pairs(
    routing: Routing, first_expert: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return local expert, row and weight of the pairs that hit this rank, by expert, then row."""
    expert_RK = routing.topk_ids.long() - first_expert
    row_P, choice_P = ((expert_RK >= 0) & (expert_RK < num_experts)).nonzero(as_tuple=True)
    expert_P, order_P = expert_RK[row_P, choice_P].sort(stable=True)
    row_P, choice_P = row_P[order_P], choice_P[order_P]
    return expert_P, row_P, routing.topk_weights[row_P, choice_P]


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
