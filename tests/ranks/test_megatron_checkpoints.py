"""torch_dist checkpoints against Megatron itself, which saves them on two ranks and loads them; and jobs on them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family_configs import FAMILIES
from megatron_models import as_hf, load_by_megatron, save_by_megatron
from models_for_tests import make_random_model, make_random_qwen3_moe
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from afd_megatron.families import load_shape
from afd_megatron.models.convert import convert
from afd_megatron.models.weights import open_weights
from tests.ranks.harness import Ranks
from tests.ranks.jobs import decode, job_values, read_summary, split, tokens

CONFIGS = {  # one MoE layer, one dense
    name: FAMILIES[name] | {"num_hidden_layers": 2} | ({} if name == "deepseek_v3" else {"mlp_only_layers": [1]})
    for name in ("qwen2_moe", "qwen3_moe", "deepseek_v3")
}
SINGLE = {"singleton_local_shards": True}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("settings", [{}, SINGLE], ids=["stacked", "single"])
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}], ids=["ep2", "tp2"])
@pytest.mark.parametrize("family", CONFIGS)
def test_what_megatron_saves_on_two_ranks_is_read_as_megatron_reads_it(
    family: str, sizes: dict, settings: dict, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Once with all experts in one tensor, once with a tensor for each half of each expert."""
    shape = load_shape(make_random_model(tmp_path, 1, CONFIGS[family]))
    folder = tmp_path / "iter_0000020"
    two_ranks.run(save_by_megatron, folder, shape, sizes, settings)
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert any(key.endswith("experts.7.linear_fc1.weight_w") for key in keys) == (settings is SINGLE)
    [state] = one_rank.run(load_by_megatron, folder, shape, settings)
    assert_reads(tmp_path, as_hf(state, shape))


def test_a_stack_of_layers_is_read_as_megatron_reads_it(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """Megatron stacks the layers if the config tells by a number, not by a list, which of them are MoE."""
    shape = load_shape(make_random_qwen3_moe(tmp_path, 1, num_hidden_layers=3))
    folder, settings = tmp_path / "iter_0000020", {"moe_layer_freq": 1}
    two_ranks.run(save_by_megatron, folder, shape, {"ep": 2}, settings)
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert keys["decoder.layers.mlp.experts.experts.linear_fc1.weight"].size == (3, 8, 96, 64)
    [state] = one_rank.run(load_by_megatron, folder, shape, settings)
    assert_reads(tmp_path, as_hf(state, shape))


@pytest.mark.parametrize("family", CONFIGS)
def test_megatron_reads_what_the_conversion_writes(family: str, one_rank: Ranks, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "hf", 4, CONFIGS[family])
    convert(folder, tmp_path / "megatron", "torch_dist", lambda *_: None)
    shape = load_shape(folder)
    [state] = one_rank.run(load_by_megatron, tmp_path / "megatron/release", shape, {}, True)
    assert_equal(as_hf(state, shape), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_job_on_torch_dist_gives_the_tokens_of_the_hf_folder(family: str, one_rank: Ranks, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "hf", 5, FAMILIES[family])
    convert(folder, tmp_path / "megatron", "torch_dist", lambda *_: None)
    generator = torch.Generator().manual_seed(7)
    lines = [
        {"id": str(length), "prompt_token_ids": torch.randint(0, 128, (length,), generator=generator).tolist()}
        for length in (1, 9, 30)
    ]
    local = {"connector": {"kind": "local"}, "sampling": {"max_new_tokens": 12, "ignore_eos": True}}
    values = job_values(folder, tmp_path / "a", lines, local)
    expected = tokens(decode(one_rank, values))
    num_bytes = sum(report["read_bytes"] for report in read_summary(values)["ranks"])
    values = job_values(tmp_path / "megatron", tmp_path / "b", lines, local)
    values["model"]["load"] = "torch_dist"
    assert tokens(decode(one_rank, values)) == expected
    assert sum(report["read_bytes"] for report in read_summary(values)["ranks"]) == num_bytes
    sections = split(1, 2, stages=2, tp=(2, 2)) | {"sampling": local["sampling"]}
    values = job_values(tmp_path / "megatron", tmp_path / "c", lines, sections)
    values["model"]["load"] = "torch_dist"
    with Ranks(6) as ranks:
        assert tokens(decode(ranks, values)) == expected


def assert_reads(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    source = open_weights(folder, load_shape(folder), "torch_dist")
    assert_equal({name: source.read(name, ()) for name in source.shapes}, expected)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
