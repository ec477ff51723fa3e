"""What families with grouped-query attention share: fields of their configs, names of their tensors.

Source: transformers, where these models are written after Llama. Knows no family, no torch, no Megatron.
"""

from collections.abc import Iterator
from typing import Any

from afd_megatron.families.base import HfTensor, Layout, ModelShape, QkNorm, RopeShape, TensorRule
from afd_megatron.families.fields import Fields
from afd_megatron.topology import Role


def read_shape(
    fields: Fields,
    family: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_positions: int,
    norm_eps: float,
    rope: RopeShape,
    **particular: Any,
) -> ModelShape:
    """Read the fields that all these families have, and refuse what none of them supports.

    Args:
        particular: the other fields of ModelShape, which a family reads by itself.

    Raises:
        ConfigError: a line for each fault of all fields read so far.
    """
    shape = ModelShape(
        family=family,
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=fields.count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size"),
        max_positions=max_positions,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        **particular,
    )
    fields.require("hidden_act", "silu")
    fields.require("quantization_config", None)
    fields.check(
        num_heads % num_kv_heads == 0,
        f"num_key_value_heads: {num_kv_heads} (allowed: a divisor of num_attention_heads {num_heads})",
    )
    router = shape.router
    fields.check(
        router.top_k <= shape.num_experts,
        f"num_experts_per_tok: {router.top_k} (allowed: 1 to the number of experts {shape.num_experts})",
    )
    if router.num_groups > 1:
        fields.check(
            shape.num_experts % router.num_groups == 0,
            f"n_group: {router.num_groups} (allowed: a divisor of the number of experts {shape.num_experts})",
        )
        fields.check(
            router.topk_groups * (shape.num_experts // router.num_groups) >= router.top_k,
            f"topk_group: {router.topk_groups} (allowed: enough groups for num_experts_per_tok {router.top_k})",
        )
        fields.check(
            router.topk_groups <= router.num_groups,
            f"topk_group: {router.topk_groups} (allowed: 1 to n_group {router.num_groups})",
        )
    fields.raise_faults()
    return shape


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Read which layers are MoE from `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(fields.count("num_hidden_layers")))


def ignored(shape: ModelShape) -> tuple[str, ...]:
    """Return what old files hold beside weights, and the copy that a tied head may be saved as."""
    return ("rotary_emb.inv_freq", *(("lm_head.weight",) if shape.has_tied_embeddings else ()))


def tensor_rules(
    shape: ModelShape, *, moe: str = "mlp.", expert_names: tuple[str, str, str] | None = None, shared: str = ""
) -> tuple[TensorRule, ...]:
    """Return the rules of the whole model.

    Args:
        moe: what stands before the tensors of a MoE layer's FFN.
        expert_names: gate, up and down of an expert, where they differ from those of a dense MLP.
        shared: what the shared experts are called, if there are any.
    """
    hidden = shape.hidden_size
    embedding = HfTensor("model.embed_tokens.weight", (shape.vocab_size, hidden))
    head = HfTensor("lm_head.weight", (shape.vocab_size, hidden))
    norm = HfTensor("model.norm.weight", (hidden,))
    rules = [TensorRule("embedding.word_embeddings.weight", (embedding,), Layout.COPY, Role.ATTENTION)]
    for layer, is_moe in enumerate(shape.is_moe_layer):
        ours, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        rules += _attention_rules(shape, ours, hf)
        if is_moe:
            rules += _moe_rules(shape, f"{ours}mlp.", hf + moe, expert_names or _MLP_NAMES)
            rules += _shared_rules(shape, f"{ours}mlp.", f"{hf}mlp.", shared)
        else:
            rules += _mlp_rules(f"{ours}mlp.", f"{hf}mlp.", shape.dense_width, hidden)
    rules.append(TensorRule("decoder.final_layernorm.weight", (norm,), Layout.COPY, Role.ATTENTION))
    if not shape.has_tied_embeddings:
        rules.append(TensorRule("output_layer.weight", (head,), Layout.COPY, Role.ATTENTION))
    return tuple(rules)


_MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def _attention_rules(shape: ModelShape, ours: str, hf: str) -> Iterator[TensorRule]:
    hidden = shape.hidden_size
    sizes = {"q": shape.num_heads * shape.head_dim, "k": shape.num_kv_heads * shape.head_dim}
    sizes["v"] = sizes["k"]
    copies = {
        "input_layernorm.weight": HfTensor(f"{hf}input_layernorm.weight", (hidden,)),
        "pre_mlp_layernorm.weight": HfTensor(f"{hf}post_attention_layernorm.weight", (hidden,)),
        "self_attention.linear_proj.weight": HfTensor(f"{hf}self_attn.o_proj.weight", (hidden, sizes["q"])),
    }
    if shape.qk_norm is not QkNorm.NONE:
        for part in ("q", "k"):
            size = shape.head_dim if shape.qk_norm is QkNorm.HEAD else sizes[part]
            source = HfTensor(f"{hf}self_attn.{part}_norm.weight", (size,))
            copies[f"self_attention.{part}_layernorm.weight"] = source
    for name, source in copies.items():
        yield TensorRule(ours + name, (source,), Layout.COPY, Role.ATTENTION)
    for kind, inner in (("weight", (hidden,)), ("bias", ())):
        if kind == "weight" or shape.has_qkv_bias:
            qkv = tuple(HfTensor(f"{hf}self_attn.{part}_proj.{kind}", (size, *inner)) for part, size in sizes.items())
            yield TensorRule(f"{ours}self_attention.linear_qkv.{kind}", qkv, Layout.QKV, Role.ATTENTION)


def _moe_rules(shape: ModelShape, ours: str, hf: str, names: tuple[str, str, str]) -> Iterator[TensorRule]:
    num_experts, hidden, width = shape.num_experts, shape.hidden_size, shape.moe_width
    router = HfTensor(f"{hf}gate.weight", (num_experts, hidden))
    yield TensorRule(f"{ours}router.weight", (router,), Layout.COPY, Role.FFN, is_router=True)
    if shape.router.has_bias:
        bias = HfTensor(f"{hf}gate.e_score_correction_bias", (num_experts,))
        yield TensorRule(f"{ours}router.expert_bias", (bias,), Layout.COPY, Role.FFN, is_router=True)
    gate_up, down = _mlp_sources(hf + "experts.{expert}.", names, width, hidden)
    packed_gate_up = HfTensor(f"{hf}experts.gate_up_proj", (num_experts, 2 * width, hidden))
    packed_down = HfTensor(f"{hf}experts.down_proj", (num_experts, hidden, width))
    yield TensorRule(f"{ours}experts.linear_fc1", gate_up, Layout.EXPERT_GATE_UP, Role.FFN, packed_gate_up)
    yield TensorRule(f"{ours}experts.linear_fc2", down, Layout.EXPERT_DOWN, Role.FFN, packed_down)


def _shared_rules(shape: ModelShape, ours: str, hf: str, shared: str) -> Iterator[TensorRule]:
    if shape.shared_width:
        yield from _mlp_rules(f"{ours}shared_experts.", f"{hf}{shared}.", shape.shared_width, shape.hidden_size)
    if shape.has_shared_gate:
        gate = HfTensor(f"{hf}{shared}_gate.weight", (1, shape.hidden_size))
        yield TensorRule(f"{ours}shared_experts.gate_weight", (gate,), Layout.COPY, Role.FFN)


def _mlp_rules(ours: str, hf: str, width: int, hidden: int) -> Iterator[TensorRule]:
    gate_up, down = _mlp_sources(hf, _MLP_NAMES, width, hidden)
    yield TensorRule(f"{ours}linear_fc1.weight", gate_up, Layout.GATE_UP, Role.FFN)
    yield TensorRule(f"{ours}linear_fc2.weight", down, Layout.DOWN, Role.FFN)


def _mlp_sources(
    hf: str, names: tuple[str, str, str], width: int, hidden: int
) -> tuple[tuple[HfTensor, HfTensor], tuple[HfTensor]]:
    gate, up = (HfTensor(f"{hf}{name}.weight", (width, hidden)) for name in names[:2])
    return (gate, up), (HfTensor(f"{hf}{names[2]}.weight", (hidden, width)),)
