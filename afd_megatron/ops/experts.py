"""The experts of one FFN rank on the rows it was sent: the fast way and its plain twin. Knows no module, no rank.

R rows, D hidden, I width of an expert, X = 2 * I, E experts of this rank, C rows of the busiest of them, K top-k,
P (row, choice) pairs whose expert is here.
"""

import torch
import torch.nn.functional as F

from afd_megatron.routing import Routing

_MAX_PADDING = 4  # rows computed per row wanted, above which padding costs more than calls one by one


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
    batched product, which keeps all threads busy; otherwise those that were hit run one by one. The loads are read on
    the host. A row's sum is in the order of its choices, whichever way it was computed.

    Args:
        gate_up_EDX: [E, D, 2 * I], gate columns before up columns.
        down_EID: [E, I, D].
        first_expert: global id of expert 0 here; pairs of other ranks' experts are left out.
    """
    num_rows, top_k = routing.topk_ids.shape
    expert_P, pair_P = _own_pairs(routing, first_expert, len(gate_up_EDX))
    x_PD = hidden_RD[pair_P // top_k]
    counts = torch.bincount(expert_P, minlength=len(gate_up_EDX))
    capacity = max(counts.tolist(), default=0)
    if torch.get_num_threads() > 1 and len(counts) * capacity <= _MAX_PADDING * len(pair_P):
        y_PD = _run_padded(x_PD, expert_P, counts, gate_up_EDX, down_EID, capacity=capacity)
    else:
        y_PD = _run_one_by_one(x_PD, counts, gate_up_EDX, down_EID)
    weight_P = routing.topk_weights.flatten()[pair_P]
    y_RKD = torch.zeros(num_rows, top_k, hidden_RD.shape[1], dtype=torch.float32, device=hidden_RD.device)
    y_RKD.flatten(0, 1).index_copy_(0, pair_P, y_PD * weight_P[:, None])
    return y_RKD.sum(dim=1).to(hidden_RD.dtype)


def run_experts_plain(
    hidden_RD: torch.Tensor,
    routing: Routing,
    gate_up_EDX: torch.Tensor,
    down_EID: torch.Tensor,
    *,
    first_expert: int,
) -> torch.Tensor:
    """Return what `run_experts` does, row by row and expert by expert in float32."""
    sum_RD = torch.zeros(hidden_RD.shape, dtype=torch.float32, device=hidden_RD.device)
    for row, (ids_K, weights_K) in enumerate(zip(routing.topk_ids.tolist(), routing.topk_weights, strict=True)):
        for expert, weight in zip(ids_K, weights_K, strict=True):
            if 0 <= expert - first_expert < len(gate_up_EDX):
                inner_I = _swiglu(hidden_RD[row].float() @ gate_up_EDX[expert - first_expert].float())
                sum_RD[row] += weight * (inner_I @ down_EID[expert - first_expert].float())
    return sum_RD.to(hidden_RD.dtype)


def _own_pairs(routing: Routing, first_expert: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local expert and the index row * K + choice of the pairs whose expert is here, by expert, then row."""
    expert = routing.topk_ids.flatten().long() - first_expert
    pair_P = ((expert >= 0) & (expert < num_experts)).nonzero()[:, 0]
    expert_P, order_P = expert[pair_P].sort(stable=True)
    return expert_P, pair_P[order_P]


def _run_padded(
    x_PD: torch.Tensor,
    expert_P: torch.Tensor,
    counts_E: torch.Tensor,
    gate_up_EDX: torch.Tensor,
    down_EID: torch.Tensor,
    *,
    capacity: int,
) -> torch.Tensor:
    start_E = counts_E.cumsum(0) - counts_E
    place_P = torch.arange(len(x_PD), device=x_PD.device) - start_E[expert_P] + expert_P * capacity
    x_ECD = x_PD.new_zeros(len(counts_E), capacity, x_PD.shape[1])
    x_ECD.flatten(0, 1).index_copy_(0, place_P, x_PD)
    y_ECD = _swiglu(x_ECD @ gate_up_EDX) @ down_EID
    return y_ECD.flatten(0, 1)[place_P]


def _run_one_by_one(
    x_PD: torch.Tensor, counts_E: torch.Tensor, gate_up_EDX: torch.Tensor, down_EID: torch.Tensor
) -> torch.Tensor:
    y_PD = torch.empty_like(x_PD)
    end = 0
    for expert, count in enumerate(counts_E.tolist()):
        start, end = end, end + count
        if count:
            torch.mm(_swiglu(x_PD[start:end] @ gate_up_EDX[expert]), down_EID[expert], out=y_PD[start:end])
    return y_PD


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
