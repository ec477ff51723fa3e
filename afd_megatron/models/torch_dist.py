"""Megatron's torch_dist checkpoints under HF names, for the loader of HF folders. Knows no role, no file format."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from afd_megatron.errors import CheckpointError
from afd_megatron.families import family_of
from afd_megatron.families.base import ModelShape, TensorRule
from afd_megatron.models.distcp import METADATA, DistcpFolder
from afd_megatron.models.megatron_tensors import Form, Run, Slab, forms, is_of_experts, is_padded, runs_of

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_NO_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")


class _Tensor(NamedTuple):
    """An HF tensor: where its rows lie in ours, and the slabs of ours, of each expert if it is a packed one."""

    shape: tuple[int, ...]
    runs: list[Run]
    slabs: list[tuple[Slab, ...]]
    is_packed: bool
    is_turned: bool


class TorchDistSource:
    """The tensors of a torch_dist checkpoint under their HF names; only the parts asked for are read from disk."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        """Find every tensor of the model in the checkpoint `folder`, the one with `.metadata`.

        Raises:
            CheckpointError: not readable, or tensors are missing, unexpected or of another shape; one line for each.
        """
        self.num_bytes_read = 0
        self._files = DistcpFolder(folder)
        rules = family_of(shape).tensor_rules(shape)
        found = {rule.name: _find_form(rule, shape, self._files.shapes) for rule in rules}
        self._check(folder, shape, rules, found)
        self._tensors: dict[str, _Tensor] = {}
        for rule in rules:
            self._tensors |= _hf_tensors(rule, shape, found[rule.name])
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        tensor = self._tensors[name]
        rows_first = (*part, *[slice(None)] * (len(tensor.shape) - len(part)))
        shape = tensor.shape
        if tensor.is_turned:
            rows_first, shape = _turned(rows_first), _turned(shape)
        spans = [range(size)[slice_] for size, slice_ in zip(shape, rows_first, strict=True)]
        dtype = self._files.dtypes[tensor.slabs[0][0].key]
        values = torch.empty([len(span) for span in spans], dtype=dtype)
        self.num_bytes_read += values.nbytes
        if not tensor.is_packed:
            self._fill(values, tensor.runs, tensor.slabs[0], spans)
            return values
        for ours, expert in zip(values, spans[0], strict=True):
            self._fill(ours, tensor.runs, tensor.slabs[expert], spans[1:])
        return values.transpose(-1, -2) if tensor.is_turned else values

    def _fill(self, values: torch.Tensor, runs: list[Run], slabs: tuple[Slab, ...], spans: list[range]) -> None:
        """Read the rows `spans[0]`, and of each what the other spans say."""
        rows, *rest = spans
        for run in runs:
            begin, end = (_num_before(run.rows, row) for row in (rows.start, rows.stop))
            for slab in slabs:
                first = max(run.first + begin, slab.first)
                stop = min(run.first + end, slab.first + slab.num_rows)
                if first >= stop:
                    continue
                ours = run.rows[first - run.first : stop - run.first]
                theirs = [*(range(i, i + 1) for i in slab.place), range(first - slab.first, stop - slab.first), *rest]
                part = values[ours.start - rows.start : ours.stop - rows.start : ours.step]
                self._files.fill(part[(None,) * len(slab.place)], slab.key, tuple(theirs))

    def _check(self, folder: Path, shape: ModelShape, rules: tuple[TensorRule, ...], found: Mapping[str, Form]) -> None:
        have, wanted = self._files.shapes, {key for form in found.values() for key in form.sizes}
        ignored = re.compile("|".join(_ignored(shape)))
        unexpected = {*have, *self._files.other_keys} - wanted
        faults = [f"{key}: missing" for form in found.values() for key in form.sizes if key not in have]
        faults += [f"{key}: unexpected" for key in sorted(unexpected) if not ignored.match(key)]
        for rule in rules:
            for key, size in found[rule.name].sizes.items():
                least = (
                    (min(have[key][0], size[0]), *have[key][1:]) if key in have and is_padded(rule) else have.get(key)
                )
                if least not in (None, size):
                    faults.append(f"{key}: shape {list(have[key])} (expected {list(size)})")
        if faults:
            raise CheckpointError("\n".join(f"{folder}: {fault}" for fault in dict.fromkeys(faults)))


def find_checkpoint(folder: Path) -> Path:
    """Return where a model folder has its torch_dist checkpoint: itself, or the newest iteration of a training.

    Raises:
        CheckpointError: there is none.
    """
    latest = folder / LATEST
    if (folder / METADATA).is_file():
        return folder
    if latest.is_file():
        name = latest.read_text().strip()
        names = [f"iter_{int(name):07d}" if name.isdecimal() else name]
        if names[0] != RELEASE and not name.isdecimal():
            raise CheckpointError(f"{latest}: {name!r} (allowed: a number or {RELEASE})")
    else:
        names = sorted((path.name for path in folder.glob("iter_*")), reverse=True)
    for name in names:
        if (folder / name / METADATA).is_file():
            return folder / name
    where = f"{names[0]}/{METADATA}" if latest.is_file() else f"{METADATA}, {LATEST} or iter_*/{METADATA}"
    raise CheckpointError(f"{folder}: no torch_dist checkpoint (allowed: {where})")


def _find_form(rule: TensorRule, shape: ModelShape, keys: Mapping[str, tuple[int, ...]]) -> Form:
    """Return the form of which there are keys, the first one if there is none."""
    present = (form for form in forms(rule, shape) if not form.sizes.keys().isdisjoint(keys))
    return next(present, None) or next(forms(rule, shape))


def _hf_tensors(rule: TensorRule, shape: ModelShape, form: Form) -> dict[str, _Tensor]:
    """Return the HF tensors of a rule; a packed one only where the family has no other."""
    if not rule.sources:
        assert rule.packed is not None
        runs = runs_of(rule, [rule.packed], 0, shape.num_kv_heads)
        tensor = _Tensor(rule.packed.shape, runs, list(form.slabs.values()), True, rule.is_turned)
        return {rule.packed.name: tensor}
    tensors = {}
    for index, source in enumerate(rule.sources):
        runs = runs_of(rule, rule.sources, index, shape.num_kv_heads)
        for expert, slabs in form.slabs.items():
            name = source.name.format(expert=expert) if is_of_experts(rule) else source.name
            tensors[name] = _Tensor(source.shape, runs, [slabs], False, False)
    return tensors


def _ignored(shape: ModelShape) -> list[str]:
    """Return patterns of keys that are no weights, or weights of what is not run."""
    patterns = [*(re.escape(prefix) for prefix in _NO_WEIGHTS), r".*\b_extra_state\b"]
    hf_ignored = family_of(shape).ignored(shape)
    if "lm_head.weight" in hf_ignored:
        patterns.append(r"output_layer\.weight$")
    if f"model.layers.{shape.num_layers}." in hf_ignored:
        patterns.append(r"mtp\.")
    return patterns


def _turned(parts: tuple) -> tuple:
    return (*parts[:-2], parts[-1], parts[-2])


def _num_before(rows: range, row: int) -> int:
    """Return how many of `rows` are below `row`."""
    return min(max(0, -(-(row - rows.start) // rows.step)), len(rows))
