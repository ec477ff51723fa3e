"""torch_dist checkpoints: both ways of the conversion, what Megatron writes and reads, and what is refused."""

import json
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from family_configs import FAMILIES
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_models import as_hf, load_by_megatron, save_by_megatron
from models_for_tests import CPU, OneProcess, Rows, make_random_model, make_random_qwen3_moe, make_stage
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from afd_megatron.errors import CheckpointError, ConfigError
from afd_megatron.families import load_shape
from afd_megatron.families.base import Staying
from afd_megatron.models.convert import convert, write_hf
from afd_megatron.models.ffn_model import FfnModel
from afd_megatron.models.torch_dist import TorchDistSource, find_checkpoint
from afd_megatron.models.weights import load_ffn, open_weights
from tests.ranks.harness import Ranks

MEGATRON_CONFIGS = {  # one MoE layer, one dense
    name: FAMILIES[name] | {"num_hidden_layers": 2} | ({} if name == "deepseek_v3" else {"mlp_only_layers": [1]})
    for name in ("qwen2_moe", "qwen3_moe", "deepseek_v3")
}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An HF folder and what it is as torch_dist."""
    folder = make_random_qwen3_moe(tmp_path_factory.mktemp("qwen"), seed=21, mlp_only_layers=[1])
    output = folder / "converted"
    convert(folder, output, "torch_dist", ignore)
    return folder, output


def ignore(num_done: int, num_all: int) -> None:
    pass


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    source = open_weights(folder, load_shape(folder), "torch_dist")
    return {name: source.read(name, ()) for name in source.shapes}


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def save_plain(folder: Path, state: Mapping[str, object]) -> None:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def load_plain(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors with torch alone."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_from_torch_dist_tensor_by_tensor(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "hf", 1, FAMILIES[family])
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "megatron", "torch_dist", ignore)
    assert_equal(read_all(tmp_path / "megatron"), tensors)
    convert(tmp_path / "megatron", tmp_path / "back", "hf", ignore)
    assert_equal(load_file(tmp_path / "back/model.safetensors"), tensors)
    assert json.loads((tmp_path / "back/config.json").read_text()) == FAMILIES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_slice_of_any_tensor_is_that_of_the_whole(family: str, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "hf", 2, FAMILIES[family])
    convert(folder, tmp_path / "megatron", "torch_dist", ignore)
    source = open_weights(tmp_path / "megatron", load_shape(folder), "torch_dist")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in load_file(folder / "model.safetensors").items():
        bounds = [torch.randint(size + 1, (2,), generator=generator).sort().values.tolist() for size in tensor.shape]
        part = tuple(slice(*bound) for bound in bounds)
        for dims in range(len(part) + 1):
            before = source.num_bytes_read
            values = source.read(name, part[:dims])
            assert torch.equal(values, tensor[part[:dims]]), (name, part)
            assert source.num_bytes_read - before == values.nbytes


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"ep": 2}, {}),
        ({"tp": 2}, {}),
        ({"ep": 2}, {"singleton_local_shards": True}),
        ({"tp": 2}, {"singleton_local_shards": True}),
    ],
)
@pytest.mark.parametrize("family", MEGATRON_CONFIGS)
def test_what_megatron_saves_on_two_ranks_is_read_as_megatron_reads_it(
    family: str, sizes: dict, settings: dict, two_ranks: Ranks, tmp_path: Path, groups: ProcessGroupCollection
) -> None:
    shape = load_shape(make_random_model(tmp_path, 1, MEGATRON_CONFIGS[family]))
    two_ranks.run(save_by_megatron, tmp_path / "iter_0000020", shape, sizes, settings)
    keys = FileSystemReader(tmp_path / "iter_0000020").read_metadata().state_dict_metadata
    assert any(key.endswith("experts.7.linear_fc1.weight_w") for key in keys) == bool(settings)
    state = load_by_megatron(tmp_path / "iter_0000020", shape, groups, settings)
    assert_equal(read_all(tmp_path), as_hf(state, shape))


def test_a_stack_of_layers_is_read_as_megatron_reads_it(
    two_ranks: Ranks, tmp_path: Path, groups: ProcessGroupCollection
) -> None:
    """Megatron stacks the layers of a model whose layers are all the same and told to be by a number."""
    shape = load_shape(make_random_qwen3_moe(tmp_path, 1, num_hidden_layers=3))
    settings = {"moe_layer_freq": 1}
    two_ranks.run(save_by_megatron, tmp_path / "iter_0000020", shape, {"ep": 2}, settings)
    keys = FileSystemReader(tmp_path / "iter_0000020").read_metadata().state_dict_metadata
    assert keys["decoder.layers.mlp.experts.experts.linear_fc1.weight"].size == (3, 8, 96, 64)
    state = load_by_megatron(tmp_path / "iter_0000020", shape, groups, settings)
    assert_equal(read_all(tmp_path), as_hf(state, shape))


@pytest.mark.parametrize("family", MEGATRON_CONFIGS)
def test_megatron_reads_what_the_conversion_writes(family: str, tmp_path: Path, groups: ProcessGroupCollection) -> None:
    folder = make_random_model(tmp_path / "hf", 4, MEGATRON_CONFIGS[family])
    convert(folder, tmp_path / "megatron", "torch_dist", ignore)
    shape = load_shape(folder)
    state = load_by_megatron(tmp_path / "megatron/release", shape, groups, {}, has_engine_keys=True)
    assert_equal(as_hf(state, shape), load_file(folder / "model.safetensors"))
