"""The two halves against transformers: logits at several positions, by prefill in chunks and by decode."""

from pathlib import Path

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from models_for_tests import OneProcess, Rows, make_random_qwen3_moe, make_stage
from transformers import AutoModelForCausalLM

NUM_TOKENS = 64
VARIANTS: dict[str, dict[str, object]] = {
    "normalised": {"norm_topk_prob": True},
    "not_normalised": {"norm_topk_prob": False},
    "tied": {"tie_word_embeddings": True},
    "dense_in_between": {"mlp_only_layers": [0, 2]},
    "sparse_step_2": {"decoder_sparse_step": 2},
    "one_kv_head_and_rope_base": {"num_key_value_heads": 1, "rope_theta": 1000000.0},
}


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def some_tokens(seed: int, count: int = NUM_TOKENS) -> list[int]:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_at_first_second_and_last_position(
    variant: str, tmp_path: Path, groups: ProcessGroupCollection
) -> None:
    folder = make_random_qwen3_moe(tmp_path / "model", seed=1, **VARIANTS[variant])
    token_ids = some_tokens(2)
    expected = reference_logits(folder, token_ids)
    model = OneProcess(folder, groups)
    table = list(range(20, 4, -1))
    prompt = model.logits(make_stage(prefill=[Rows(token_ids[:1], 0, table)]))
    chunk = model.logits(make_stage(prefill=[Rows(token_ids[1:63], 1, table)]))
    decoded = model.logits(make_stage(decode=[Rows(token_ids[63:], 63, table)]))
    for position, logits in ((0, prompt[0]), (1, chunk[0]), (63, decoded[0])):
        torch.testing.assert_close(logits, expected[position], atol=1e-4, rtol=0)


@pytest.mark.parametrize("gate_on_attention", [False, True])
@pytest.mark.parametrize("num_ffn", [2, 3])
def test_partial_sums_of_ffn_ranks_give_the_same_logits(
    num_ffn: int, gate_on_attention: bool, tmp_path: Path, groups: ProcessGroupCollection
) -> None:
    folder = make_random_qwen3_moe(tmp_path / "model", seed=3, mlp_only_layers=[1])
    token_ids = some_tokens(4, 12)
    model = OneProcess(folder, groups, num_ffn=num_ffn, gate_on_attention=gate_on_attention)
    logits = model.logits(make_stage(prefill=[Rows(token_ids, 0, [1, 2, 3])]))
    torch.testing.assert_close(logits, reference_logits(folder, token_ids), atol=1e-4, rtol=0)
