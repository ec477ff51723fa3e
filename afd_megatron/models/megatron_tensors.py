"""How a family's tensors lie in Megatron's checkpoints: keys, sizes, and which rows are which HF rows. Knows no file.

A rule of the family names one tensor of ours. In a checkpoint it is whole or in a stack of all layers, experts are
stacked or each by itself, and of gate rows over up rows each half may be a tensor of its own (`Form`). Megatron-core
0.16 writes all of these, by its settings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from afd_megatron.families.base import HfTensor, Layout, ModelShape, TensorRule

_LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts.experts."
_RENAMED = {
    "self_attention.sinks": "self_attention.core_attention.softmax_offset",
    "mlp.experts.linear_fc1": f"{_EXPERTS}linear_fc1.weight",
    "mlp.experts.linear_fc2": f"{_EXPERTS}linear_fc2.weight",
    "mlp.experts.linear_fc1_bias": f"{_EXPERTS}linear_fc1.bias",
    "mlp.experts.linear_fc2_bias": f"{_EXPERTS}linear_fc2.bias",
}
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_EXPERT_LAYOUTS = (Layout.EXPERT_GATE_UP, Layout.EXPERT_DOWN, Layout.EXPERT_PAIRS)


class Run(NamedTuple):
    """HF rows that lie one after the other in ours, the first of them at row `first`."""

    rows: range
    first: int


class Slab(NamedTuple):
    """Rows of ours, from `first` on, that are a tensor of the checkpoint, or what of it is at `place` of its dims."""

    key: str
    place: tuple[int, ...]
    first: int
    num_rows: int


class Form(NamedTuple):
    """One way to store a tensor of ours: its keys with their sizes, and the slabs of each expert, or of all (None)."""

    sizes: Mapping[str, tuple[int, ...]]
    slabs: Mapping[int | None, tuple[Slab, ...]]


def forms(rule: TensorRule, shape: ModelShape) -> Iterator[Form]:
    """Return all forms of a tensor, first the one that Megatron with TransformerEngine has by default."""
    if not rule.name.startswith(_LAYERS):
        yield _form(rule, shape, rule.name)
        return
    number, _, name = rule.name.removeprefix(_LAYERS).partition(".")
    layer = int(number)
    halves = ("_w", "_v")
    for tail in _tails(name, shape, layer):
        key = f"{_LAYERS}{layer}.{tail}"
        yield _form(rule, shape, key)
        yield _form(rule, shape, f"{_LAYERS}{tail}", layer=layer)
        if is_of_experts(rule):
            key = key.replace(_EXPERTS, _EXPERTS + "{expert}.")
            yield _form(rule, shape, key)
        if "linear_fc1." in tail and tail not in _FUSED_NORMS.values():
            yield _form(rule, shape, key, parts=halves)


def is_of_experts(rule: TensorRule) -> bool:
    """Return whether the first dim of ours is that of all experts."""
    return rule.layout in _EXPERT_LAYOUTS


def is_padded(rule: TensorRule) -> bool:
    """Return whether a checkpoint may have more rows: Megatron rounds the vocabulary up."""
    return rule.layout is Layout.VOCAB


def size_of(rule: TensorRule) -> tuple[int, ...]:
    """Return the size of ours in the whole model, [experts, rows, ...] or [rows, ...]."""
    if not rule.sources:
        assert rule.packed is not None
        experts, *size = rule.packed.shape
        return (experts, *(reversed(size) if rule.is_turned else size))
    size = [sum(source.shape[0] for source in rule.sources), *rule.sources[0].shape[1:]]
    if not is_of_experts(rule):
        return tuple(size)
    assert rule.packed is not None
    return (rule.packed.shape[0], *size)


def runs_of(rule: TensorRule, tensors: Sequence[HfTensor], index: int, num_kv_heads: int) -> list[Run]:
    """Return where the rows of the HF tensor `index` lie in ours, or in an expert of ours.

    Args:
        tensors: what ours is made of, the sources of the rule or the packed tensor alone.
    """
    if rule.packed in tensors:
        return _RUNS[rule.layout]([size_of(rule)[1]], 0, num_kv_heads)
    return _RUNS[rule.layout]([tensor.shape[0] for tensor in tensors], index, num_kv_heads)


def _form(
    rule: TensorRule, shape: ModelShape, key: str, *, layer: int | None = None, parts: tuple[str, ...] = ("",)
) -> Form:
    """Return the form with `key`, where `{expert}` stands for each, in a stack if `layer` is told, in `parts`."""
    size, has_experts = size_of(rule), is_of_experts(rule)
    is_by_expert = "{expert}" in key
    num_rows, *rest = size[1:] if has_experts else size
    num_rows //= len(parts)
    stack = () if layer is None else (shape.num_layers,)
    lead = (*stack, *(size[:1] if has_experts and not is_by_expert else ()))
    sizes: dict[str, tuple[int, ...]] = {}
    slabs: dict[int | None, tuple[Slab, ...]] = {}
    for expert in range(size[0]) if has_experts else (None,):
        place = (*(() if layer is None else (layer,)), *(() if expert is None or is_by_expert else (expert,)))
        keys = [key.format(expert=expert) + part for part in parts]
        sizes |= dict.fromkeys(keys, (*lead, num_rows, *rest))
        slabs[expert] = tuple(Slab(each, place, index * num_rows, num_rows) for index, each in enumerate(keys))
    return Form(sizes, slabs)


def _tails(name: str, shape: ModelShape, layer: int) -> tuple[str, ...]:
    """Return what a layer's tensor may be called: norms stand alone or are part of the layer that they feed."""
    is_latent = shape.latent is not None
    if name not in _FUSED_NORMS or (name.startswith("self_attention.") and not is_latent):
        return (_RENAMED.get(name, name),)
    both = (name, _FUSED_NORMS[name])
    stands_alone = {"input_layernorm.weight": is_latent, "pre_mlp_layernorm.weight": shape.is_moe_layer[layer]}
    return both if stands_alone.get(name, False) else both[::-1]


def _over_each_other(sizes: Sequence[int], index: int, num_kv_heads: int) -> list[Run]:
    return [Run(range(sizes[index]), sum(sizes[:index]))]


def _by_kv_head(sizes: Sequence[int], index: int, num_kv_heads: int) -> list[Run]:
    size, before, step = (rows // num_kv_heads for rows in (sizes[index], sum(sizes[:index]), sum(sizes)))
    return [Run(range(head * size, (head + 1) * size), head * step + before) for head in range(num_kv_heads)]


def _in_turns(sizes: Sequence[int], index: int, num_kv_heads: int) -> list[Run]:
    (size,) = sizes
    return [Run(range(0, size, 2), 0), Run(range(1, size, 2), size // 2)]


_RUNS: dict[Layout, Callable[[Sequence[int], int, int], list[Run]]] = {
    Layout.COPY: _over_each_other,
    Layout.ROWS: _over_each_other,
    Layout.COLUMNS: _over_each_other,
    Layout.VOCAB: _over_each_other,
    Layout.QKV: _by_kv_head,
    Layout.KV_ROWS: _over_each_other,
    Layout.EXPERT_GATE_UP: _over_each_other,
    Layout.EXPERT_DOWN: _over_each_other,
    Layout.EXPERT_PAIRS: _in_turns,
}
