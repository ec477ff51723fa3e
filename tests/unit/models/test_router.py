"""The router: transformers' choice and weights, and its own rule between equal scores."""

import pytest
import torch
from family_configs import QWEN3_MOE
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from afd_megatron.families import family_for
from afd_megatron.models.config import transformer_config
from afd_megatron.models.router import Router


def make_router(groups: ProcessGroupCollection, dtype: torch.dtype = torch.float32, **overrides: object) -> Router:
    config = QWEN3_MOE | overrides
    shape = family_for(config).read_shape(config)
    return Router(transformer_config(shape, dtype), groups, shape.router).requires_grad_(False)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_router_equals_transformers(norm_topk_prob: bool, groups: ProcessGroupCollection) -> None:
    router = make_router(groups, norm_topk_prob=norm_topk_prob)
    theirs = Qwen3MoeTopKRouter(Qwen3MoeConfig(**QWEN3_MOE | {"norm_topk_prob": norm_topk_prob}))
    hidden_TD = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    router.weight.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(2)) * 0.15)
    theirs.weight.data.copy_(router.weight)
    with torch.no_grad():
        _, weights_TK, ids_TK = theirs(hidden_TD)
    ids, weights = router(hidden_TD)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids.long(), ids_TK)
    torch.testing.assert_close(weights, weights_TK)


@pytest.mark.parametrize("num_experts", [255, 256, 257, 512])
def test_equal_scores_choose_the_lowest_ids_on_every_call(num_experts: int, groups: ProcessGroupCollection) -> None:
    router = make_router(groups, num_experts=num_experts, num_experts_per_tok=8)
    router.weight.zero_()
    router.weight[num_experts // 2 :, 0] = 1.0
    hidden_TD = torch.ones(33, 64)
    hidden_TD[::2] *= -1
    upper, lower = torch.arange(8) + num_experts // 2, torch.arange(8)
    for _ in range(3):
        ids_TK = router(hidden_TD).topk_ids
        assert (ids_TK[1::2] == upper).all() and (ids_TK[::2] == lower).all()


def test_router_stays_float32_in_a_bfloat16_model(groups: ProcessGroupCollection) -> None:
    """Scores that differ by less than bfloat16 can tell keep their order."""
    router = make_router(groups, torch.bfloat16)
    assert router.weight.dtype == torch.float32
    router.weight.zero_()
    router.weight[:, 0] = 1.0 + torch.arange(8) * 1e-4
    ids_TK, weights_TK = router(torch.ones(1, 64, dtype=torch.bfloat16))
    assert ids_TK.tolist() == [[7, 6]] and weights_TK.dtype == torch.float32
