"""Loading by role: who holds what, layouts of the checkpoint, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from models_for_tests import OneProcess, Rows, make_random_qwen3_moe, make_stage
from safetensors.torch import load_file, save_file

from afd_megatron.errors import CheckpointError
from afd_megatron.families import load_shape
from afd_megatron.models import weights
from afd_megatron.models.sources import SafetensorsSource
from afd_megatron.models.weights import open_weights

TOKENS = [5, 77, 3, 120, 9]


def logits_of(folder: Path, groups: ProcessGroupCollection, num_ffn: int = 1) -> torch.Tensor:
    return OneProcess(folder, groups, num_ffn=num_ffn).logits(make_stage(prefill=[Rows(TOKENS, 0, [1, 2])]))


@pytest.mark.parametrize("num_ffn", [1, 3, 10])
def test_roles_hold_disjoint_parts_whose_union_is_the_checkpoint(
    num_ffn: int, tmp_path: Path, groups: ProcessGroupCollection
) -> None:
    """More FFN ranks than experts leave some with their columns of dense layers alone."""
    folder = make_random_qwen3_moe(tmp_path, seed=1, mlp_only_layers=[2], is_packed=num_ffn == 3)
    model = OneProcess(folder, groups, num_ffn=num_ffn)
    attention, *ffn = model.reports
    assert attention.expert_bytes == 0 and attention.embedding_bytes == 2 * 128 * 64 * 4
    assert all(report.embedding_bytes == 0 for report in ffn)
    ids = [expert for rank in model.ffn for expert in rank.expert_ids]
    assert ids == list(range(8))
    tensors = load_file(folder / "model.safetensors")
    held = [report.weight_bytes for report in model.reports]
    routers = 3 * 8 * 64 * 4  # every FFN rank has the router of each MoE layer
    assert sum(held) - (num_ffn - 1) * routers == sum(tensor.nbytes for tensor in tensors.values())
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    assert sum(report.expert_bytes for report in ffn) == experts
    assert [report.read_bytes for report in model.reports] == held, "a rank reads its part and no more"


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_file_layout_gives_the_same_model(
    num_shards: int, is_packed: bool, tmp_path: Path, groups: ProcessGroupCollection
) -> None:
    plain = make_random_qwen3_moe(tmp_path / "plain", seed=2)
    other = make_random_qwen3_moe(tmp_path / "other", seed=2, is_packed=is_packed, num_shards=num_shards)
    torch.testing.assert_close(logits_of(other, groups, num_ffn=2), logits_of(plain, groups, num_ffn=2), atol=0, rtol=0)


def test_two_experts_swapped_change_the_logits(tmp_path: Path, groups: ProcessGroupCollection) -> None:
    folder = make_random_qwen3_moe(tmp_path, seed=3, num_hidden_layers=1, num_experts_per_tok=4)
    right = logits_of(folder, groups)
    tensors = load_file(folder / "model.safetensors")
    renamed = {"experts.0.": "experts.1.", "experts.1.": "experts.0."}
    swapped = {}
    for name, tensor in tensors.items():
        part = next((part for part in renamed if part in name), None)
        swapped[name.replace(part, renamed[part]) if part else name] = tensor
    save_file(swapped, folder / "model.safetensors")
    assert (logits_of(folder, groups) - right).abs().max() > 1e-2


def test_bfloat16_file_is_converted_on_load(tmp_path: Path, groups: ProcessGroupCollection) -> None:
    folder = make_random_qwen3_moe(tmp_path, seed=4)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    model = OneProcess(folder, groups)
    weight = model.attention.weights()["embedding.word_embeddings.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, tensors["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_head_in_the_file_is_ignored_only_if_tied(is_tied: bool, tmp_path: Path) -> None:
    folder = make_random_qwen3_moe(tmp_path, seed=5, tie_word_embeddings=is_tied)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    open_weights(folder, load_shape(folder))
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    if is_tied:
        open_weights(folder, load_shape(folder))
    else:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: missing"):
            open_weights(folder, load_shape(folder))


def test_every_fault_of_a_checkpoint_is_listed_at_once(tmp_path: Path) -> None:
    folder = make_random_qwen3_moe(tmp_path, seed=6)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.9.input_layernorm.weight"] = torch.ones(64)
    tensors["model.layers.0.mlp.experts.2.down_proj.weight_scale_inv"] = torch.ones(1)
    tensors["model.layers.3.mlp.gate.weight"] = torch.ones(7, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        open_weights(folder, load_shape(folder))
    assert [line.removeprefix(f"{folder}: ") for line in str(raised.value).splitlines()] == [
        "model.layers.1.mlp.experts.7.up_proj.weight: missing",
        "model.norm.weight: missing",
        "model.layers.0.mlp.experts.2.down_proj.weight_scale_inv: unexpected",
        "model.layers.9.input_layernorm.weight: unexpected",
        "model.layers.3.mlp.gate.weight: shape [7, 64] (expected [8, 64])",
    ]


def test_packed_experts_fewer_than_the_config_says_are_refused(tmp_path: Path) -> None:
    folder = make_random_qwen3_moe(tmp_path, seed=7, is_packed=True)
    config = json.loads((folder / "config.json").read_text()) | {"num_experts": 9}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj: shape \[8, 96, 64\] \(expected \[9, 96, 64\]\)"):
        open_weights(folder, load_shape(folder))


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        SafetensorsSource(tmp_path)


def test_missing_shard_and_damaged_file_are_refused(tmp_path: Path) -> None:
    folder = make_random_qwen3_moe(tmp_path, seed=8, num_shards=2)
    shard = folder / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: not readable"):
        SafetensorsSource(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: not readable"):
        SafetensorsSource(folder)


def test_damaged_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match="no list of shards"):
        SafetensorsSource(tmp_path)


def test_a_long_load_tells_how_far_it_is(
    tmp_path: Path, groups: ProcessGroupCollection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_random_qwen3_moe(tmp_path / "model", seed=1)
    monkeypatch.setattr(weights, "_LINE_INTERVAL_S", 0.0)
    caplog.set_level("INFO", "afd_megatron.models.weights")
    OneProcess(folder, groups)
    assert re.fullmatch(r"attention weights: 1 of \d+ tensors, 0\.0 GB read", caplog.messages[0])
    assert re.fullmatch(r"ffn weights: (\d+) of \1 tensors, 0\.0 GB read", caplog.messages[-1])
