"""Quantised checkpoints give the logits of the plain ones they stand for, and only the parts wanted are read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_configs import DEEPSEEK_V3, GPT_OSS
from megatron.core.process_groups_config import ProcessGroupCollection
from models_for_tests import OneProcess, Rows, make_random_model, make_stage
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from afd_megatron.families import load_shape
from afd_megatron.models.convert import convert
from afd_megatron.models.quantized import dequantize_mxfp4
from afd_megatron.models.weights import open_weights

TOKENS = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCK = (16, 24)  # of neither rank's slice a divisor, and the last ones are cut


def logits_of(folder: Path, groups: ProcessGroupCollection, num_ffn: int) -> torch.Tensor:
    model = OneProcess(folder, groups, num_ffn=num_ffn)
    return model.logits(make_stage(prefill=[Rows(TOKENS, 0, [1, 2, 3, 4, 5])]))


def write_fp8(plain: Path, folder: Path) -> Path:
    """Save the model in `plain` with scaled blocks, and put what they stand for in its place."""
    tensors = load_file(plain / "model.safetensors")
    scaled = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "_proj" in name:
            values, scales = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), []
            for row in range(0, tensor.shape[0], BLOCK[0]):
                scales.append([])
                for column in range(0, tensor.shape[1], BLOCK[1]):
                    place = (slice(row, row + BLOCK[0]), slice(column, column + BLOCK[1]))
                    scale = tensor[place].abs().max() / 448
                    values[place] = (tensor[place] / scale).to(torch.float8_e4m3fn)
                    tensor[place] = values[place].float() * scale
                    scales[-1].append(scale)
            scaled |= {name: values, f"{name}_scale_inv": torch.tensor(scales)}
        else:
            scaled[name] = tensor
    save_file(tensors, plain / "model.safetensors")
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(scaled, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("num_ffn", [1, 3])
def test_fp8_in_blocks_equals_the_plain_checkpoint(
    num_ffn: int, tmp_path: Path, groups: ProcessGroupCollection
) -> None:
    plain = make_random_model(tmp_path / "plain", 1, DEEPSEEK_V3)
    before = logits_of(plain, groups, num_ffn)
    scaled = write_fp8(plain, tmp_path / "scaled")
    expected = logits_of(plain, groups, num_ffn)
    assert (expected - before).abs().max() > 1e-3  # rounding shows
    torch.testing.assert_close(logits_of(scaled, groups, num_ffn), expected, atol=1e-5, rtol=0)


def test_a_slice_of_fp8_reads_its_rows_and_their_blocks_alone(tmp_path: Path) -> None:
    plain = make_random_model(tmp_path / "plain", 1, DEEPSEEK_V3)
    folder = write_fp8(plain, tmp_path / "scaled")
    source = open_weights(folder, load_shape(folder))
    name = "model.layers.0.mlp.gate_proj.weight"
    assert source.shapes[name] == (96, 64)
    values = source.read(name, (slice(30, 35),))
    assert source.num_bytes_read == 5 * 64 + 2 * 3 * 4
    assert torch.equal(values, load_file(plain / "model.safetensors")[name][30:35])


def write_mxfp4(plain: Path, folder: Path) -> Path:
    """Save the model in `plain` with random packed experts, and put what they stand for in its place."""
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(plain / "model.safetensors")
    packed = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_inner, num_outer = tensor.shape
            size = (num_experts, num_outer, num_inner // 32)
            blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(123, 126, size, dtype=torch.uint8, generator=generator)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        else:
            packed[name] = tensor
    save_file(tensors, plain / "model.safetensors")
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(packed, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("num_ffn", [1, 3])
def test_mxfp4_equals_the_plain_checkpoint(num_ffn: int, tmp_path: Path, groups: ProcessGroupCollection) -> None:
    plain = make_random_model(tmp_path / "plain", 1, GPT_OSS | {"intermediate_size": 64})
    packed = write_mxfp4(plain, tmp_path / "packed")
    expected = logits_of(plain, groups, num_ffn)
    torch.testing.assert_close(logits_of(packed, groups, num_ffn), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("inputs", [slice(10, 30), slice(30, 40), slice(32, 64), slice(None)])
def test_a_slice_of_mxfp4_reads_its_blocks_alone(inputs: slice, tmp_path: Path) -> None:
    plain = make_random_model(tmp_path / "plain", 1, GPT_OSS | {"intermediate_size": 64})
    source = open_weights(write_mxfp4(plain, tmp_path / "packed"), load_shape(plain))
    name = "model.layers.1.mlp.experts.down_proj"
    part = (slice(1, 3), inputs, slice(5, 12))
    values = source.read(name, part)
    span = range(64)[inputs]
    num_blocks = (span.stop - 1) // 32 - span.start // 32 + 1
    assert source.num_bytes_read == 2 * 7 * num_blocks * (16 + 1)
    assert torch.equal(values, load_file(plain / "model.safetensors")[name][part])


def test_mxfp4_has_all_values_and_exponents() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    scales = torch.arange(120, 136, dtype=torch.uint8).view(16, 1)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    assert torch.equal(dequantize_mxfp4(blocks, scales), expected)


@pytest.mark.parametrize(
    ("config", "write"),
    [(DEEPSEEK_V3, write_fp8), (GPT_OSS | {"intermediate_size": 64}, write_mxfp4)],
    ids=["fp8", "mxfp4"],
)
def test_a_conversion_to_torch_dist_has_quantised_weights_in_bfloat16(
    config: dict, write: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    plain = make_random_model(tmp_path / "plain", 1, config)
    before = load_file(plain / "model.safetensors")
    quantised = write(plain, tmp_path / "quantised")
    convert(quantised, tmp_path / "megatron", "torch_dist", lambda *_: None)
    source = open_weights(tmp_path / "megatron", load_shape(plain), "torch_dist")
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_quantised = not torch.equal(tensor, before[name])
        expected = tensor.bfloat16() if is_quantised else tensor
        found = source.read(name, ())
        assert found.dtype == expected.dtype and torch.equal(found, expected), name
    assert json.loads((tmp_path / "megatron/config.json").read_text()) == config
