"""Where the tensors of a model come from: an HF folder, or a seed. Knows no role, no parameter of ours.

R rows read, over all dims but the last together; C elements read of each row.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from afd_megatron.errors import CheckpointError
from afd_megatron.families import family_of
from afd_megatron.families.base import ModelShape

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_CHUNK = 2**20  # random elements made at once: few enough for caches, enough to be worth a GPU's launches
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's constants as int64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


class WeightSource(Protocol):
    """Tensors by HF name. `shapes` has all of them; `num_bytes_read` counts what `read` returned so far."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def num_bytes_read(self) -> int: ...

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Return the part of a tensor, one slice per leading dimension, in the dtype of the source."""


class SafetensorsSource:
    """The safetensors of an HF folder, one file or shards; only the parts asked for are read from disk."""

    def __init__(self, folder: Path) -> None:
        """Read all headers.

        Raises:
            CheckpointError: no weights, or a file that is missing or damaged.
        """
        self.num_bytes_read = 0
        self._files: dict[str, safe_open] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: not readable as safetensors: {error}") from error
            for name in file.keys():  # noqa: SIM118 (no mapping)
                shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        values = self._files[name].get_slice(name)[part or ...]
        self.num_bytes_read += values.nbytes
        return values


class RandomSource:
    """Weights that follow from (seed, HF name, place in the tensor) alone. For measuring.

    Every cut of the model has the same values, bit for bit, on every device; no more is made than is read. They are
    uniform: matrices keep the scale of what they multiply, vectors have std 0.1, those of norms around 1.
    """

    def __init__(self, shape: ModelShape, seed: int, device: torch.device = CPU) -> None:
        """Give tensors of `shape`'s names and shapes, made on `device`."""
        self.num_bytes_read = 0
        self._seed = seed
        self._device = device
        rules = family_of(shape).tensor_rules(shape)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            tensor.name: tensor.shape for rule in rules for tensor in rule.tensors(shape.num_experts)
        }

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Return the part of a tensor in float32; beside it only indices of rows and a chunk or a row are held."""
        shape = self.shapes[name]
        everything = [slice(None)] * len(shape)
        *spans, columns = [range(size)[slice_] for size, slice_ in zip(shape, (*part, *everything), strict=False)]
        row_R = torch.zeros(1, dtype=torch.int64, device=self._device)
        for size, span in zip(shape, spans, strict=False):
            row_R = (row_R[:, None] * size + self._indices(span)).flatten()
        values = torch.empty([*map(len, spans), len(columns)], dtype=torch.float32, device=self._device)
        std = 1.2 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1
        values_RC = values.view(len(row_R), len(columns))
        _fill_uniform(values_RC, self._key(name), row_R * shape[-1], self._indices(columns), bound=3**0.5 * std)
        self.num_bytes_read += values.nbytes
        return values.add_(1) if len(shape) == 1 and "norm" in name else values

    def _indices(self, span: range) -> torch.Tensor:
        return torch.arange(span.start, span.stop, span.step, device=self._device)

    def _key(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def _fill_uniform(
    out_RC: torch.Tensor, key: int, start_R: torch.Tensor, offset_C: torch.Tensor, *, bound: float
) -> None:
    """Fill `out` with numbers in [-bound, bound), number `start + offset` of the sequence of `key`.

    It is the first 24 bits of that output of SplitMix64 seeded with `key`, taken as signed. Products of int64 wrap, and
    24 bits are exact in float32, on every device. Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014.
    """
    state_R, step_C = (start_R + 1) * _GOLDEN + key, offset_C * _GOLDEN
    num_rows = max(1, _CHUNK // max(1, len(step_C)))
    for out, starts in zip(out_RC.split(num_rows), state_R.split(num_rows), strict=True):
        state = starts[:, None] + step_C
        for shift, factor in _MIX:
            state ^= state.bitwise_right_shift(shift).bitwise_and_(2 ** (64 - shift) - 1)  # NOTE: >> keeps the sign
            state *= factor
        out.copy_(state.bitwise_right_shift_(40)).mul_(bound * 2**-23)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise CheckpointError(f"{folder}: no weights (allowed: {_SINGLE} or {INDEX})")
        return [folder / _SINGLE]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no list of shards: {error!r}") from error
