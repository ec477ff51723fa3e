"""Turns HF folders into Megatron's torch_dist checkpoints and back, tensor by tensor. Knows no role, no process group.

Neither way holds the model: towards torch_dist one expert or one other tensor is in memory at a time, towards
safetensors one file.
"""

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from safetensors.torch import save_file
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from afd_megatron.errors import ConfigError
from afd_megatron.families import family_of, load_shape
from afd_megatron.families.base import HfTensor, ModelShape, TensorRule
from afd_megatron.models.megatron_tensors import forms, is_of_experts, runs_of, size_of
from afd_megatron.models.sources import INDEX, WeightSource
from afd_megatron.models.torch_dist import LATEST, RELEASE
from afd_megatron.models.weights import open_weights

Format = Literal["hf", "torch_dist"]
OnProgress = Callable[[int, int], None]
_CONFIG = "config.json"
_KEPT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_NOT_KEPT = (_CONFIG, INDEX, LATEST, "metadata.json")
_BYTES_PER_FILE = 5 * 10**9
# Megatron asks for it before it makes its own state dict: there is a key for each layer, and experts are stacked.
_COMMON = {
    "checkpoint_version": 3.0,
    "iteration": 0,
    "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": True},
}


def convert(folder: Path, output: Path, to: Format, on_progress: OnProgress) -> None:
    """Write the model of `folder`, in the other format, to `output`, with its config and its tokenizer.

    Values keep their dtype; quantised ones become bfloat16. `output` appears when it is complete.

    Args:
        on_progress: called with the number of bytes written and of all bytes, of values alone.

    Raises:
        ConfigError: the model is not supported, or `output` exists.
        CheckpointError: the weights are not what the config says.
    """
    if output.exists():
        raise ConfigError(f"{output}: exists (allowed: a new folder)")
    shape = load_shape(folder)
    source = open_weights(folder, shape, "hf" if to == "torch_dist" else "torch_dist", dequantized=torch.bfloat16)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        _copy_config(folder, model)
        if to == "torch_dist":
            write_torch_dist(source, shape, model / RELEASE, on_progress)
            (model / LATEST).write_text(RELEASE)
        else:
            write_hf(source, model, on_progress)
        model.rename(output)


def write_torch_dist(source: WeightSource, shape: ModelShape, folder: Path, on_progress: OnProgress) -> None:
    """Write a torch_dist checkpoint to the new `folder`, with the keys that Megatron has with TransformerEngine."""
    writer = dcp.FileSystemWriter(folder, thread_count=1)
    with warnings.catch_warnings(action="ignore"):  # of no process group, which is what no_dist says
        dcp.save({}, storage_writer=writer, planner=_Planner(source, shape, on_progress), no_dist=True)
    torch.save(_COMMON, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist"), str(folder))


def write_hf(
    source: WeightSource, folder: Path, on_progress: OnProgress, *, bytes_per_file: int = _BYTES_PER_FILE
) -> None:
    """Write all tensors of `source` as safetensors, with an index if there is more than one file."""
    shells = {
        name: torch.empty(size, dtype=_dtype(source, name), device="meta") for name, size in source.shapes.items()
    }
    split = split_torch_state_dict_into_shards(shells, max_shard_size=bytes_per_file)
    num_all, num_done = sum(shell.nbytes for shell in shells.values()), 0
    for file, names in split.filename_to_tensors.items():
        tensors = {name: source.read(name, ()).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        num_done += sum(tensor.nbytes for tensor in tensors.values())
        on_progress(num_done, num_all)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class _Part(NamedTuple):
    """A tensor of ours, or one expert of it, and the HF tensors that it is made of."""

    rule: TensorRule
    expert: int | None
    tensors: tuple[HfTensor, ...]


class _Planner(dcp.DefaultSavePlanner):
    """Plans chunks of tensors that are not there yet, and makes each when its turn has come to be written."""

    def __init__(self, source: WeightSource, shape: ModelShape, on_progress: OnProgress) -> None:
        super().__init__()
        self._source, self._num_kv_heads, self._on_progress = source, shape.num_kv_heads, on_progress
        self._num_done = self._num_all = 0
        self._parts: dict[MetadataIndex, tuple[_Part, torch.dtype]] = {}
        self._items: list[planner.WriteItem] = []
        for rule in family_of(shape).tensor_rules(shape):
            self._add(rule, shape)

    def create_local_plan(self) -> planner.SavePlan:
        return planner.SavePlan(self._items, planner_data={})

    def resolve_data(self, write_item: planner.WriteItem) -> torch.Tensor:
        part, dtype = self._parts[write_item.index]
        values = self._make(part, dtype)
        self._num_done += values.nbytes
        self._on_progress(self._num_done, self._num_all)
        return values

    def _add(self, rule: TensorRule, shape: ModelShape) -> None:
        """Plan a chunk for each expert, or one for all."""
        key, size = next(iter(next(forms(rule, shape)).sizes.items()))
        is_packed = rule.packed is not None and rule.packed.name in self._source.shapes
        tensors = (rule.packed,) if rule.packed is not None and is_packed else rule.sources
        names = [tensor.name for tensor in (tensors if is_packed else rule.tensors(shape.num_experts))]
        dtype = reduce(torch.promote_types, (_dtype(self._source, name) for name in names))
        for expert in range(size[0]) if is_of_experts(rule) else (None,):
            offsets = torch.Size([expert or 0, *[0] * (len(size) - 1)])
            sizes = torch.Size(size if expert is None else (1, *size[1:]))
            data = planner.TensorWriteData(
                ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype), torch.Size(size)
            )
            item = planner.WriteItem(MetadataIndex(key, offsets), planner.WriteItemType.SHARD, tensor_data=data)
            self._items.append(item)
            self._parts[item.index] = _Part(rule, expert, tensors), dtype
            self._num_all += sizes.numel() * dtype.itemsize

    def _make(self, part: _Part, dtype: torch.dtype) -> torch.Tensor:
        rule, expert, tensors = part
        size = size_of(rule)
        values = torch.empty(size if expert is None else size[1:], dtype=dtype)
        for index, tensor in enumerate(tensors):
            if tensor is rule.packed:
                assert expert is not None
                (theirs,) = self._source.read(tensor.name, (slice(expert, expert + 1),))
                theirs = theirs.t() if rule.is_turned else theirs
            else:
                theirs = self._source.read(tensor.name.format(expert=expert), ())
            for rows, first in runs_of(rule, tensors, index, self._num_kv_heads):
                values[first : first + len(rows)] = theirs[rows.start : rows.stop : rows.step]
        return values if expert is None else values[None]


def _dtype(source: WeightSource, name: str) -> torch.dtype:
    """Return what `read` gives a tensor in; no row is read."""
    return source.read(name, (slice(0, 0),)).dtype


def _copy_config(folder: Path, output: Path) -> None:
    """Copy config and tokenizer; of the config not how weights were quantised, as they are not any more."""
    config = json.loads((folder / _CONFIG).read_bytes())
    config.pop("quantization_config", None)
    (output / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(folder.iterdir()):
        if path.suffix in _KEPT_SUFFIXES and path.name not in _NOT_KEPT:
            shutil.copy(path, output)
