"""Where the tensors of a model come from: an HF folder, or a seed. Knows no role, no parameter of ours."""

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

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


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
    """Weights drawn from (seed, HF name), so that every cut of the model has the same values. For measuring.

    Matrices keep the scale of what they multiply, norms are spread around 1.
    """

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self.num_bytes_read = 0
        self._seed = seed
        rules = family_of(shape).tensor_rules(shape)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            tensor.name: tensor.shape for rule in rules for tensor in rule.tensors(shape.num_experts)
        }

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        shape = self.shapes[name]
        if len(shape) == 3:  # expert by expert, as they are read
            experts = range(shape[0])[part[0] if part else slice(None)]
            values = torch.stack([self._draw(f"{name} {expert}", shape[1:])[part[1:]] for expert in experts])
        else:
            values = self._draw(name, shape)[part]
        self.num_bytes_read += values.nbytes
        return values

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        values = torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1))
        return values.mul_(1.2 / shape[-1] ** 0.5) if len(shape) > 1 else values.mul_(0.1).add_("norm" in name)


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
