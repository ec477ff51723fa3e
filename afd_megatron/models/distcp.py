"""Reads parts of the tensors in a folder of torch's distributed checkpoint. Knows no model, no key, no process group.

Such a folder has `.metadata`, a pickle that tells where each chunk of each tensor lies, and `.distcp` files in which a
chunk is what `torch.save` writes, from an offset on. Nothing of either is run: the pickle may name the classes below
and no other, and `torch.load` reads tensors alone. Chunks are mapped, so that only the bytes asked for leave the disk.
"""

import io
import math
import mmap
import pickle
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.utils import _create_file_view

from afd_megatron.errors import CheckpointError

METADATA = ".metadata"
_INDEX_CLASSES: dict[tuple[str, str], object] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
    )
} | {
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,  # Python 3.13
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): str,
}
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_UNUSED_CLASSES = {  # plans of the ranks that saved, which Megatron keeps to save again
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    *((_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
}


class _Chunk(NamedTuple):
    """A box of a tensor: where it starts and ends in each dim, and the place of its `torch.save` file."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int


class _File(NamedTuple):
    stream: io.FileIO
    data: mmap.mmap


class DistcpFolder:
    """The tensors of one folder by key. `shapes` and `dtypes` have all of them, `other_keys` what is no tensor."""

    def __init__(self, folder: Path) -> None:
        """Read `.metadata` and look whether the files are as long as it says.

        Raises:
            CheckpointError: no such folder, a pickle that is damaged or names other classes, a file cut short.
        """
        self._folder = folder
        index = _read_index(folder / METADATA)
        try:
            self._places = {
                key: _tensor_place(key, entry, index.storage_data)
                for key, entry in index.state_dict_metadata.items()
                if isinstance(entry, metadata.TensorStorageMetadata)
            }
            self.other_keys = frozenset(index.state_dict_metadata) - self._places.keys()
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder / METADATA}: no list of tensors: {error!r}") from error
        self.shapes: Mapping[str, tuple[int, ...]] = {key: place.shape for key, place in self._places.items()}
        self.dtypes: Mapping[str, torch.dtype] = {key: place.dtype for key, place in self._places.items()}
        self._files: dict[str, _File] = {}
        self._views: dict[_Chunk, torch.Tensor] = {}
        self._check_files()

    def fill(self, values: torch.Tensor, key: str, spans: tuple[range, ...]) -> None:
        """Fill `values`, in the dtype of the tensor, with the box of it that has these spans of its dims.

        Raises:
            CheckpointError: a chunk is missing, damaged, or not what `.metadata` says.
        """
        place, num_found = self._places[key], 0
        if values.dtype != place.dtype:
            raise CheckpointError(f"{self._folder}: {key}: {place.dtype}, beside others of {values.dtype}")
        data = values.unsqueeze(-1).view(torch.uint8)  # the bytes of a value are the last dim
        for chunk in place.touched(spans) if values.numel() else ():
            starts = [max(span.start, first) for span, first in zip(spans, chunk.start, strict=True)]
            stops = [min(span.stop, end) for span, end in zip(spans, chunk.stop, strict=True)]
            box = list(zip(starts, stops, strict=True))
            if any(start >= stop for start, stop in box):
                continue
            ours = tuple(slice(a - span.start, b - span.start) for (a, b), span in zip(box, spans, strict=True))
            theirs = tuple(slice(a - first, b - first) for (a, b), first in zip(box, chunk.start, strict=True))
            data[ours] = self._view(chunk, place.dtype)[theirs]
            num_found += math.prod(stop - start for start, stop in box)
        if num_found != values.numel():
            raise CheckpointError(f"{self._folder}: {key}: {values.numel() - num_found} values are in no file")

    def _check_files(self) -> None:
        ends: defaultdict[str, int] = defaultdict(int)
        for place in self._places.values():
            for chunk in place.chunks():
                ends[chunk.file] = max(ends[chunk.file], chunk.offset + chunk.num_bytes)
        for name, end in ends.items():
            path = self._folder / name
            if path.name != name:
                raise CheckpointError(f"{self._folder / METADATA}: file {name!r} (allowed: one in the same folder)")
            size = path.stat().st_size if path.is_file() else -1
            if size < end:
                fault = "missing" if size < 0 else f"{size} bytes (expected {end} or more)"
                raise CheckpointError(f"{path}: {fault}")

    def _view(self, chunk: _Chunk, dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes of a chunk as they lie in its mapped file, with the bytes of a value as last dim."""
        if chunk not in self._views:
            if chunk.file not in self._files:
                stream = io.FileIO(self._folder / chunk.file)
                self._files[chunk.file] = _File(stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
            try:
                self._views[chunk] = _map_tensor(self._files[chunk.file], chunk, dtype)
            except (RuntimeError, ValueError, OSError, pickle.UnpicklingError, AssertionError) as error:
                reason = str(error).splitlines()[0] if str(error) else repr(error)
                where = f"{self._folder / chunk.file}: at byte {chunk.offset}"
                raise CheckpointError(f"{where}: not the tensor that {METADATA} says: {reason}") from error
        return self._views[chunk]


class _Unused:
    """Stands for an object of the pickle that nobody reads."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _UNUSED_CLASSES:
            return _Unused
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _INDEX_CLASSES:
            raise CheckpointError(f"names {module}.{name} (allowed: classes of torch's distributed checkpoint)")
        return _INDEX_CLASSES[module, name]


class _TensorPlace:
    """A tensor and its chunks. Where all have size 1 in the first dims, as of experts, they are found by those."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[_Chunk]) -> None:
        self.shape, self.dtype = shape, dtype
        is_single = [all(chunk.stop[dim] - chunk.start[dim] == 1 for chunk in chunks) for dim in range(len(shape))]
        self._num_single = [*is_single, False].index(False)
        self._by_first: defaultdict[tuple[int, ...], list[_Chunk]] = defaultdict(list)
        for chunk in chunks:
            self._by_first[chunk.start[: self._num_single]].append(chunk)

    def chunks(self) -> Iterator[_Chunk]:
        for chunks in self._by_first.values():
            yield from chunks

    def touched(self, spans: tuple[range, ...]) -> Iterator[_Chunk]:
        """Return all chunks that share values with the box `spans`, and maybe some that do not."""
        for first in product(*spans[: self._num_single]):
            yield from self._by_first.get(first, ())


def _read_index(path: Path) -> metadata.Metadata:
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, LookupError) as error:
        raise CheckpointError(f"{path}: not readable: {error!r}") from error
    if not isinstance(index, metadata.Metadata):
        raise CheckpointError(f"{path}: a {type(index).__name__} (allowed: Metadata)")
    return index


def _tensor_place(
    key: str,
    entry: metadata.TensorStorageMetadata,
    storage: Mapping[metadata.MetadataIndex, filesystem._StorageInfo],
) -> _TensorPlace:
    chunks = []
    for box in entry.chunks:
        info = storage[metadata.MetadataIndex(key, box.offsets)]
        if vars(info).get("transform_descriptors"):
            raise CheckpointError(f"{key}: stored with {info.transform_descriptors} (allowed: plain chunks)")
        start = tuple(box.offsets)
        stop = tuple(first + size for first, size, _ in zip(start, box.sizes, entry.size, strict=True))
        chunks.append(_Chunk(start, stop, str(info.relative_path), int(info.offset), int(info.length)))
    return _TensorPlace(tuple(entry.size), entry.properties.dtype, chunks)


def _map_tensor(file: _File, chunk: _Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of a chunk's values in place. Its pickle is read, its values are not."""
    with FakeTensorMode():  # so that torch.load tells where the values lie instead of reading them
        tensor = torch.load(_create_file_view(file.stream, chunk.offset, chunk.num_bytes), weights_only=True)
    sizes = tuple(stop - start for start, stop in zip(chunk.start, chunk.stop, strict=True))
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != sizes:
        found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{found} (expected {dtype} {list(sizes)})")
    storage = tensor.untyped_storage()
    start = storage._checkpoint_offset
    if start + storage.nbytes() > chunk.num_bytes:
        raise ValueError(f"{storage.nbytes()} bytes from {start} on (allowed: up to {chunk.num_bytes})")
    with warnings.catch_warnings(action="ignore"):  # of a tensor that cannot be written, which nobody does
        data = torch.frombuffer(file.data, dtype=torch.uint8, count=storage.nbytes(), offset=chunk.offset + start)
    size = dtype.itemsize
    strides = [stride * size for stride in tensor.stride()]
    return data.as_strided([*sizes, size], [*strides, 1], tensor.storage_offset() * size)
