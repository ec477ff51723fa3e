"""Random weights made on a GPU are those made on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from family_configs import GPT_OSS

from afd_megatron.families import load_shape
from afd_megatron.models.sources import RandomSource

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
LARGE = GPT_OSS | {"num_local_experts": 512, "hidden_size": 4096, "intermediate_size": 2048}
GPU = torch.device("cuda")


def source_of(config: dict[str, object], folder: Path, device: torch.device) -> RandomSource:
    (folder / "config.json").write_text(json.dumps(config))
    return RandomSource(load_shape(folder), 1, device)


@pytest.mark.gpu
def test_every_tensor_is_bit_for_bit_that_of_the_cpu(tmp_path: Path) -> None:
    on_cpu, on_gpu = (source_of(GPT_OSS, tmp_path, device) for device in (torch.device("cpu"), GPU))
    for name in on_cpu.shapes:
        values = on_gpu.read(name, ())
        assert values.is_cuda and torch.equal(values.cpu(), on_cpu.read(name, ())), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "part",
    [(slice(511, 512), slice(-700, None)), (slice(3, 400, 99), slice(5, 77), slice(1, None, 3))],
    ids=["beyond place 2 ** 32", "with steps"],
)
def test_parts_of_large_experts_are_bit_for_bit_those_of_the_cpu(part: tuple[slice, ...], tmp_path: Path) -> None:
    on_cpu, on_gpu = (source_of(LARGE, tmp_path, device) for device in (torch.device("cpu"), GPU))
    assert torch.equal(on_gpu.read(EXPERTS, part).cpu(), on_cpu.read(EXPERTS, part))


@pytest.mark.gpu
def test_a_gpu_holds_little_beside_the_values(tmp_path: Path) -> None:
    """1.07 GB of experts are made with less than 64 MB more at the peak."""
    source = source_of(LARGE, tmp_path, GPU)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    values = source.read(EXPERTS, (slice(16),))
    assert torch.cuda.max_memory_allocated() - before < values.nbytes + 64e6
