"""Random weights: values of the published generator, the same for every cut, spread as they should, no more made."""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family_configs import GPT_OSS, QWEN3_MOE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from afd_megatron.families import load_shape
from afd_megatron.families.base import ModelShape
from afd_megatron.models import sources
from afd_megatron.models.sources import RandomSource

VECTOR = "model.layers.0.self_attn.sinks"
NORM = "model.layers.0.input_layernorm.weight"
MATRIX = "model.layers.1.self_attn.q_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
MASK = 2**64 - 1


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """Has vectors, matrices, and experts packed in one tensor [8, 64, 96]."""
    return shape_of(GPT_OSS, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """Its packed experts [512, 4096, 4096] are 34 GB in float32, and have places beyond 2 ** 32."""
    sizes = {"num_local_experts": 512, "hidden_size": 4096, "intermediate_size": 2048}
    return shape_of(GPT_OSS | sizes, tmp_path_factory.mktemp("large"))


def shape_of(config: dict[str, object], folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    return load_shape(folder)


def splitmix64(seed: int) -> Iterator[int]:
    """Yield the generator's outputs as it is published, in Python's integers."""
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        mixed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        yield mixed ^ (mixed >> 31)


def plain(seed: int, name: str, shape: tuple[int, ...], place: int, num: int) -> torch.Tensor:
    """Return `num` values of a matrix or a tensor of experts from `place` on, made one by one."""
    key = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")
    outputs = splitmix64(key + place * 0x9E3779B97F4A7C15)
    top = [next(outputs) >> 40 for _ in range(num)]
    signed = torch.tensor([bits - 2**24 if bits >= 2**23 else bits for bits in top]).float()
    return signed * (math.sqrt(3) * 1.2 / math.sqrt(shape[-1]) / 2**23)


def test_plain_twin_gives_the_outputs_known_of_splitmix64() -> None:
    """Source: rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64."""
    outputs = splitmix64(1234567)
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [next(outputs) for _ in known] == known


@pytest.mark.parametrize("name", [MATRIX, EXPERTS])
@pytest.mark.parametrize("seed", [0, 17])
def test_values_are_those_of_splitmix64(small: ModelShape, name: str, seed: int) -> None:
    whole = RandomSource(small, seed).read(name, ())
    expected = plain(seed, name, tuple(whole.shape), 0, whole.numel()).view_as(whole)
    torch.testing.assert_close(whole, expected, atol=0, rtol=2**-23)  # the scale may be rounded another way


def test_values_beyond_place_2_to_32_are_those_of_splitmix64(large: ModelShape) -> None:
    row = RandomSource(large, 3).read(EXPERTS, (slice(511, 512), slice(4095, 4096)))
    expected = plain(3, EXPERTS, (512, 4096, 4096), 512 * 4096**2 - 4096, 4096).view_as(row)
    torch.testing.assert_close(row, expected, atol=0, rtol=2**-23)


@pytest.mark.parametrize("chunk", [1, 1000, 2**20])
@pytest.mark.parametrize("name", [VECTOR, NORM, MATRIX, EXPERTS])
def test_every_part_is_that_of_the_whole(
    small: ModelShape, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RandomSource(small, 1).read(name, ())
    monkeypatch.setattr(sources, "_CHUNK", chunk)
    source = RandomSource(small, 1)
    parts = list(random_parts(tuple(whole.shape), num=20))
    for part in parts:
        values = source.read(name, part)
        assert values.is_contiguous() and torch.equal(values, whole[part]), part
    assert source.num_bytes_read == sum(whole[part].nbytes for part in parts)


def random_parts(shape: tuple[int, ...], num: int) -> Iterator[tuple[slice, ...]]:
    """All, none, from the end, and `num` drawn ones, some with steps, of the first dims or of all."""
    yield ()
    yield (slice(3, 3),)
    yield (slice(-3, None),) * len(shape)
    generator = torch.Generator().manual_seed(5)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(num):
        starts = [draw(0, size) for size in shape[: draw(1, len(shape) + 1)]]
        sizes = shape[: len(starts)]
        yield tuple(slice(start, draw(start, size + 1), draw(1, 4)) for start, size in zip(starts, sizes, strict=True))


class NumElements(TorchDispatchMode):
    """Notes how many elements the largest new tensor of each dtype has; views share the size of what they show."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest[tensor.dtype] = max(self.largest.get(tensor.dtype, 0), size)
        return result


@pytest.mark.parametrize(
    ("part", "num_elements"),
    [((slice(5, 6), slice(0, 64)), 64 * 4096), ((slice(0, 512), slice(7, 9), slice(0, 100)), 512 * 2 * 100)],
)
def test_no_more_is_made_than_the_part_and_a_chunk(
    large: ModelShape, part: tuple[slice, ...], num_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_CHUNK", 2 * 4096)
    source = RandomSource(large, 1)
    with NumElements() as made:
        source.read(EXPERTS, part)
    assert made.largest[torch.float32] == num_elements
    assert made.largest[torch.int64] <= 2 * 4096
    assert made.largest.keys() == {torch.float32, torch.int64}


def test_mean_and_spread_are_those_of_a_uniform_distribution(large: ModelShape) -> None:
    for name, mean, std in [(EXPERTS, 0.0, 1.2 / 4096**0.5), (VECTOR, 0.0, 0.1), (NORM, 1.0, 0.1)]:
        values = RandomSource(large, 1).read(name, (slice(0, 1),) if name == EXPERTS else ()).double().flatten()
        unit = (values - mean) / (3**0.5 * std)
        assert unit.abs().max() <= 1 + 1e-5
        assert abs(unit.mean()) < 5 / (3 * len(unit)) ** 0.5
        assert abs(unit.square().mean() * 3 - 1) < 5 * (0.8 / len(unit)) ** 0.5  # variance of 3 u^2 is 4 / 5
    counts = torch.histc(values_of(large).double(), bins=256, min=-(3**0.5), max=3**0.5)
    mean_count = counts.sum() / 256
    assert (counts - mean_count).square().sum() / mean_count < 255 + 5 * (2 * 255) ** 0.5  # chi-squared


def values_of(shape: ModelShape, *, seed: int = 1, expert: int = 0, layer: int = 0) -> torch.Tensor:
    """Return an expert's 16.8 million values, scaled to std 1."""
    name = EXPERTS.replace("layers.0", f"layers.{layer}")
    return RandomSource(shape, seed).read(name, (slice(expert, expert + 1),))[0] * (4096**0.5 / 1.2)


def test_neighbours_are_not_correlated(large: ModelShape) -> None:
    """Of the same row, of rows near and far, experts, tensors and seeds: neither values nor their sizes."""
    flat = values_of(large).flatten()
    pairs = {f"{step} further": (flat[:-step], flat[step:]) for step in (1, 2, 7, 64, 4096, 2 * 4096, 64 * 4096)}
    others = {
        "expert": values_of(large, expert=1),
        "tensor": values_of(large, layer=1),
        "seed": values_of(large, seed=2),
    }
    pairs |= {what: (flat, other.flatten()) for what, other in others.items()}
    for what, (left, right) in pairs.items():
        limit = 5 / len(left) ** 0.5
        assert abs((left * right).mean(dtype=torch.float64)) < limit, what
        sizes = (left.square() - 1) * (right.square() - 1) / 0.8
        assert abs(sizes.mean(dtype=torch.float64)) < limit, what


def test_a_matrix_of_random_values_has_the_singular_values_of_independent_ones(large: ModelShape) -> None:
    """The largest of [1024, 1024] is near 2 * sqrt(1024); any order among rows or columns makes it larger."""
    matrix = values_of(large)[:1024, :1024]
    assert torch.linalg.matrix_norm(matrix, ord=2) / 1024**0.5 == pytest.approx(2.0, abs=0.05)


def test_no_pair_of_values_comes_twice(tmp_path: Path) -> None:
    """In no two places of all experts, nor with two seeds: the sequences of two tensors do not overlap."""
    shape = shape_of(QWEN3_MOE, tmp_path)
    tensors = [
        source.read(name, ()).flatten()
        for source in (RandomSource(shape, 1), RandomSource(shape, 2))
        for name in source.shapes
        if "up_proj" in name
    ]
    bits = [tensor.view(torch.int32).long() for tensor in tensors]
    pairs = torch.cat([(tensor[:-1] << 32) | (tensor[1:] & 0xFFFFFFFF) for tensor in bits])
    assert len(pairs) > 100_000 and len(pairs.unique()) == len(pairs)


def test_values_do_not_depend_on_what_was_read_before(small: ModelShape) -> None:
    source = RandomSource(small, 1)
    source.read(MATRIX, ())
    assert torch.equal(source.read(EXPERTS, ()), RandomSource(small, 1).read(EXPERTS, ()))
    assert not torch.equal(RandomSource(small, 2).read(EXPERTS, ()), source.read(EXPERTS, ()))
