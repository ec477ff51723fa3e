"""Fills each role's model with its part of the weights. Knows no family, no file format.

D hidden, E experts of this rank, I its width of them.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from afd_megatron.errors import CheckpointError
from afd_megatron.families import family_of
from afd_megatron.families.base import Layout, ModelShape, TensorRule
from afd_megatron.models.attention_model import AttentionModel
from afd_megatron.models.ffn_model import FfnModel
from afd_megatron.models.quantized import DequantizedSource
from afd_megatron.models.sources import CPU, RandomSource, SafetensorsSource, WeightSource
from afd_megatron.models.torch_dist import TorchDistSource, find_checkpoint
from afd_megatron.topology import Role, contiguous_slice

log = logging.getLogger(__name__)
WeightKind = Literal["hf", "random", "torch_dist"]
_LINE_INTERVAL_S = 5.0
_EVERYTHING = slice(None)
_EXPERT_LAYOUTS = (Layout.EXPERT_GATE_UP, Layout.EXPERT_DOWN, Layout.EXPERT_PAIRS)
_EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Bytes of one role on one rank: held in all, by experts, by embedding and head, and read from the source."""

    weight_bytes: int
    expert_bytes: int
    embedding_bytes: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Part `index` of `count` contiguous ones."""

    index: int
    count: int

    def slice(self, size: int) -> slice:
        mine = contiguous_slice(size, self.count, self.index)
        return slice(mine.start, mine.stop)


class _Cut(NamedTuple):
    """Which part of the model a rank holds: of heads and inner columns, of experts, of the width of each of them."""

    shape: ModelShape
    columns: _Part
    experts: _Part = _Part(0, 1)
    expert_width: _Part = _Part(0, 1)

    @property
    def kv_heads(self) -> range:
        return self.shape.kv_heads(self.columns.index, self.columns.count)

    def kv_rows(self, size: int) -> slice:
        """Return the rows of the rank's KV heads in a tensor of `size` rows."""
        rows = size // self.shape.num_kv_heads
        return slice(self.kv_heads.start * rows, self.kv_heads.stop * rows)

    def expert_ids(self) -> range:
        return range(self.shape.num_experts)[self.experts.slice(self.shape.num_experts)]


def open_weights(
    folder: Path,
    shape: ModelShape,
    kind: WeightKind = "hf",
    *,
    seed: int = 0,
    dequantized: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> WeightSource:
    """Return the weights of a model folder in the format `kind`, found complete, or random ones.

    Args:
        seed: of random ones.
        dequantized: the dtype in which quantised ones are read.
        device: on which random ones are made.

    Raises:
        CheckpointError: weights are missing, unexpected or of another shape; lists all of them.
    """
    if kind == "random":
        return RandomSource(shape, seed, device)
    if kind == "torch_dist":
        return TorchDistSource(find_checkpoint(folder), shape)
    source = DequantizedSource(SafetensorsSource(folder), shape.fp8_block, dequantized)
    check_complete(folder, source.shapes, shape)
    return source


def check_complete(folder: Path, shapes: Mapping[str, tuple[int, ...]], shape: ModelShape) -> None:
    """Compare a checkpoint's tensors with what the model needs.

    Raises:
        CheckpointError: one line per tensor that is missing, unexpected or of another shape.
    """
    family = family_of(shape)
    wanted: dict[str, tuple[int, ...]] = {}
    for rule in family.tensor_rules(shape):
        is_packed = rule.packed is not None and rule.packed.name in shapes
        tensors = [rule.packed] if rule.packed is not None and is_packed else rule.tensors(shape.num_experts)
        wanted.update(tensors)
    ignored = family.ignored(shape)
    unexpected = [name for name in shapes if name not in wanted and not any(part in name for part in ignored)]
    faults = [f"{name}: missing" for name in wanted if name not in shapes]
    faults += [f"{name}: unexpected" for name in sorted(unexpected)]
    faults += [
        f"{name}: shape {list(shapes[name])} (expected {list(size)})"
        for name, size in wanted.items()
        if shapes.get(name, size) != size
    ]
    if faults:
        raise CheckpointError("\n".join(f"{folder}: {fault}" for fault in faults))


def load_attention(model: AttentionModel, source: WeightSource, shape: ModelShape) -> LoadReport:
    """Fill an attention rank's model; nothing of the FFN is read but what of it stays here."""
    tensor_parallel = model.tensor_parallel
    cut = _Cut(shape, _Part(tensor_parallel.rank, tensor_parallel.size))
    return _load(model.weights(), Role.ATTENTION, source, cut)


def load_ffn(model: FfnModel, source: WeightSource, shape: ModelShape) -> LoadReport:
    """Fill an FFN rank's model; only its experts and its columns of them and of shared and dense MLPs are read."""
    ep_rank, tp_rank = divmod(model.role_rank, model.tp)
    experts, width = _Part(ep_rank, model.num_ffn // model.tp), _Part(tp_rank, model.tp)
    cut = _Cut(shape, _Part(model.role_rank, model.num_ffn), experts, width)
    return _load(model.weights(), Role.FFN, source, cut)


@torch.no_grad()
def _load(weights: Mapping[str, torch.Tensor], role: Role, source: WeightSource, cut: _Cut) -> LoadReport:
    before = source.num_bytes_read
    rules = {rule.name: rule for rule in family_of(cut.shape).tensor_rules(cut.shape)}
    wanted = {name for name, rule in rules.items() if rule.role is role and not rule.is_movable}
    assert wanted <= weights.keys() <= rules.keys(), wanted ^ weights.keys()
    next_line_s = time.monotonic() + _LINE_INTERVAL_S
    for index, (name, parameter) in enumerate(weights.items()):
        _FILL[rules[name].layout](parameter, rules[name], source, cut)
        if time.monotonic() >= next_line_s:
            next_line_s += _LINE_INTERVAL_S
            read_gb = (source.num_bytes_read - before) / 1e9
            log.info("%s weights: %d of %d tensors, %.1f GB read", role, index + 1, len(weights), read_gb)
    experts = [name for name in weights if rules[name].layout in _EXPERT_LAYOUTS]
    return LoadReport(
        weight_bytes=_num_bytes(weights.values()),
        expert_bytes=_num_bytes(weights[name] for name in experts),
        embedding_bytes=_num_bytes(weights[name] for name in _EMBEDDINGS if name in weights),
        read_bytes=source.num_bytes_read - before,
    )


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _fill_copy(parameter: torch.Tensor, rule: TensorRule, source: WeightSource, cut: _Cut) -> None:
    parameter.copy_(source.read(rule.sources[0].name, ()))


def _fill_rows(parameter: torch.Tensor, rule: TensorRule, source: WeightSource, cut: _Cut) -> None:
    for part, tensor in zip(parameter.chunk(len(rule.sources)), rule.sources, strict=True):
        part.copy_(source.read(tensor.name, (cut.columns.slice(tensor.shape[0]),)))


def _fill_columns(parameter: torch.Tensor, rule: TensorRule, source: WeightSource, cut: _Cut) -> None:
    (tensor,) = rule.sources
    parameter.copy_(source.read(tensor.name, (_EVERYTHING, cut.columns.slice(tensor.shape[1]))))


def _fill_vocab(parameter: torch.Tensor, rule: TensorRule, source: WeightSource, cut: _Cut) -> None:
    (tensor,) = rule.sources
    rows = range(tensor.shape[0])[cut.columns.index * len(parameter) :][: len(parameter)]
    parameter[: len(rows)] = source.read(tensor.name, (slice(rows.start, rows.stop),))
    parameter[len(rows) :] = 0


def _fill_qkv(parameter: torch.Tensor, rule: TensorRule, source: WeightSource, cut: _Cut) -> None:
    q, *kv = rule.sources
    parts = [source.read(q.name, (cut.columns.slice(q.shape[0]),))]
    parts += [source.read(tensor.name, (cut.kv_rows(tensor.shape[0]),)) for tensor in kv]
    by_group = [part.unflatten(0, (len(cut.kv_heads), -1)) for part in parts]
    parameter.copy_(torch.cat(by_group, dim=1).flatten(0, 1))


def _fill_kv_rows(parameter: torch.Tensor, rule: TensorRule, source: WeightSource, cut: _Cut) -> None:
    (tensor,) = rule.sources
    parameter.copy_(source.read(tensor.name, (cut.kv_rows(tensor.shape[0]),)))


def _fill_gate_up(parameter: torch.Tensor, rule: TensorRule, source: WeightSource, cut: _Cut) -> None:
    """Fill [E, 2 * I, D], one expert at a time."""
    width = cut.shape.moe_width
    mine = cut.expert_width.slice(width)
    for ours, expert in zip(parameter, cut.expert_ids(), strict=True):
        for index, half in enumerate(ours.chunk(2)):
            if _is_packed(rule, source):
                rows = slice(index * width + mine.start, index * width + mine.stop)
                half.copy_(_read_packed(rule, source, expert, (rows,)))
            else:
                half.copy_(source.read(rule.sources[index].name.format(expert=expert), (mine,)))


def _fill_down(parameter: torch.Tensor, rule: TensorRule, source: WeightSource, cut: _Cut) -> None:
    """Fill [E, D, I], one expert at a time, or [E, D] of what is added once for all slices of the width."""
    part = (_EVERYTHING, cut.expert_width.slice(cut.shape.moe_width))[: parameter.dim() - 1]
    if len(part) == 1 and cut.expert_width.index:
        parameter.zero_()
        return
    for ours, expert in zip(parameter, cut.expert_ids(), strict=True):
        if _is_packed(rule, source):
            ours.copy_(_read_packed(rule, source, expert, part))
        else:
            ours.copy_(source.read(rule.sources[0].name.format(expert=expert), part))


def _fill_pairs(parameter: torch.Tensor, rule: TensorRule, source: WeightSource, cut: _Cut) -> None:
    mine = cut.expert_width.slice(cut.shape.moe_width)
    for ours, expert in zip(parameter, cut.expert_ids(), strict=True):
        rows = _read_packed(rule, source, expert, (slice(2 * mine.start, 2 * mine.stop),))
        for half, start in zip(ours.chunk(2), (0, 1), strict=True):
            half.copy_(rows[start::2])


def _is_packed(rule: TensorRule, source: WeightSource) -> bool:
    return rule.packed is not None and rule.packed.name in source.shapes


def _read_packed(rule: TensorRule, source: WeightSource, expert: int, part: tuple[slice, ...]) -> torch.Tensor:
    """Return the part of one expert of a packed tensor, output rows first."""
    assert rule.packed is not None
    if rule.is_turned:
        part = (*part, _EVERYTHING)[1::-1]
    values = source.read(rule.packed.name, (slice(expert, expert + 1), *part))[0]
    return values.t() if rule.is_turned else values


_FILL: dict[Layout, Callable[[torch.Tensor, TensorRule, WeightSource, _Cut], None]] = {
    Layout.COPY: _fill_copy,
    Layout.ROWS: _fill_rows,
    Layout.COLUMNS: _fill_columns,
    Layout.VOCAB: _fill_vocab,
    Layout.QKV: _fill_qkv,
    Layout.KV_ROWS: _fill_kv_rows,
    Layout.EXPERT_GATE_UP: _fill_gate_up,
    Layout.EXPERT_DOWN: _fill_down,
    Layout.EXPERT_PAIRS: _fill_pairs,
}
