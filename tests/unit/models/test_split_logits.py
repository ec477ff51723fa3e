"""The two halves against transformers: logits at several positions, by prefill in chunks and by decode."""

from pathlib import Path

import pytest
import torch
from family_configs import DEEPSEEK_V2, DEEPSEEK_V3, FAMILIES, GLM4_MOE, GPT_OSS, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from megatron.core.process_groups_config import ProcessGroupCollection
from models_for_tests import OneProcess, Rows, make_random_model, make_stage
from transformers import AutoModelForCausalLM

NUM_TOKENS = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, object]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe not normalised": QWEN3_MOE | {"norm_topk_prob": False},
    "qwen3_moe tied": QWEN3_MOE | {"tie_word_embeddings": True},
    "qwen3_moe dense in between": QWEN3_MOE | {"mlp_only_layers": [0, 2]},
    "qwen3_moe sparse step 2": QWEN3_MOE | {"decoder_sparse_step": 2},
    "qwen3_moe one kv head and rope base": QWEN3_MOE | {"num_key_value_heads": 1, "rope_theta": 1000000.0},
    "qwen3_moe yarn": QWEN3_MOE | {"rope_scaling": YARN},
    "qwen3_moe yarn of other bounds": QWEN3_MOE | {"rope_scaling": YARN | {"beta_fast": 4, "truncate": False}},
    "qwen2_moe": QWEN2_MOE,
    "qwen2_moe normalised, tied": QWEN2_MOE | {"norm_topk_prob": True, "tie_word_embeddings": True},
    "qwen2_moe no bias": QWEN2_MOE | {"qkv_bias": False},
    "olmoe": OLMOE,
    "olmoe not clipped": OLMOE | {"clip_qkv": None, "norm_topk_prob": True},
    "olmoe all heads": OLMOE | {"num_key_value_heads": 4},
    "glm4_moe": GLM4_MOE,
    "glm4_moe plain": GLM4_MOE | {"use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1},
    "glm4_moe all rotated, not normalised": GLM4_MOE | {"partial_rotary_factor": 1.0, "norm_topk_prob": False},
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2 greedy, no query latent": DEEPSEEK_V2 | {"topk_method": "greedy", "q_lora_rank": None},
    "deepseek_v2 yarn": DEEPSEEK_V2 | {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3 halves, not normalised": DEEPSEEK_V3 | {"rope_interleave": False, "norm_topk_prob": False},
    "deepseek_v3 yarn": DEEPSEEK_V3 | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    "deepseek_v3 yarn without mscale": DEEPSEEK_V3 | {"rope_scaling": YARN},
    "deepseek_v3 one group of 3, tied": DEEPSEEK_V3 | {"n_group": 3, "topk_group": 1, "tie_word_embeddings": True},
    "gpt_oss": GPT_OSS,
    "gpt_oss windows everywhere": GPT_OSS | {"layer_types": ["sliding_attention"] * 3, "sliding_window": 7},
    "gpt_oss no window, tied": GPT_OSS | {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    "mixtral": MIXTRAL,
    "mixtral window, tied": MIXTRAL | {"sliding_window": 30, "tie_word_embeddings": True, "head_dim": 24},
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
    folder = make_random_model(tmp_path / "model", 1, VARIANTS[variant])
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
@pytest.mark.parametrize("family", FAMILIES)
def test_partial_sums_of_ffn_ranks_give_the_same_logits(
    family: str, num_ffn: int, gate_on_attention: bool, tmp_path: Path, groups: ProcessGroupCollection
) -> None:
    folder = make_random_model(tmp_path / "model", 3, FAMILIES[family] | {"mlp_only_layers": [1]})
    token_ids = some_tokens(4, 12)
    model = OneProcess(folder, groups, num_ffn=num_ffn, gate_on_attention=gate_on_attention)
    logits = model.logits(make_stage(prefill=[Rows(token_ids, 0, [1, 2, 3])]))
    torch.testing.assert_close(logits, reference_logits(folder, token_ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_caches_the_latent_and_one_rotated_key(
    family: str, tmp_path: Path, groups: ProcessGroupCollection
) -> None:
    config = FAMILIES[family]
    model = OneProcess(make_random_model(tmp_path / "model", 3, config), groups, num_blocks=7)
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert model.cache.num_bytes == config["num_hidden_layers"] * 7 * model.cache.block_size * width * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_near_float32(family: str, tmp_path: Path, groups: ProcessGroupCollection) -> None:
    """A part that is computed in the wrong dtype raises; one that is computed wrongly is far off."""
    folder = make_random_model(tmp_path / "model", 5, FAMILIES[family])
    token_ids, table = some_tokens(6, 21), [1, 2, 3, 4, 5, 6]
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = OneProcess(folder, groups, num_ffn=2, dtype=dtype)
        model.logits(make_stage(prefill=[Rows(token_ids[:20], 0, table)]))
        logits[dtype] = model.logits(make_stage(decode=[Rows(token_ids[20:], 20, table)]))[0]
    assert logits[torch.bfloat16].dtype == torch.float32
    near = torch.cosine_similarity(logits[torch.bfloat16], logits[torch.float32], dim=0)
    assert near > 0.95, near
