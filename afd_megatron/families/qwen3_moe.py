"""Qwen3-MoE: GQA with norms on q and k, softmax router, SwiGLU experts, dense layers in between.

Source: transformers, models/qwen3_moe. Knows no torch, no Megatron.
"""

from collections.abc import Iterator, Mapping

from afd_megatron.families.base import Family, HfTensor, Layout, ModelShape, TensorRule
from afd_megatron.families.fields import Fields
from afd_megatron.topology import Role


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers")
    sparse_step, dense_layers = fields.count("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
    # transformers 5 saves the first of these names, older versions the second
    num_experts = fields.count("num_local_experts" if "num_local_experts" in config else "num_experts")
    shape = ModelShape(
        family="qwen3_moe",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", 4),
        head_dim=fields.count("head_dim", hidden_size // num_heads),
        vocab_size=fields.count("vocab_size"),
        max_positions=fields.count("max_position_embeddings", 32768),
        is_moe_layer=tuple(i not in dense_layers and (i + 1) % sparse_step == 0 for i in range(num_layers)),
        num_experts=num_experts,
        top_k=fields.count("num_experts_per_tok", 8),
        moe_width=fields.count("moe_intermediate_size", 768),
        dense_width=fields.count("intermediate_size", 6144),
        normalize_topk=fields.flag("norm_topk_prob", False),
        rope_theta=_rope_theta(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        has_qk_norm=True,
        has_qkv_bias=False,
    )
    _refuse_unsupported(fields, shape)
    fields.raise_faults()
    return shape


def _rope_theta(fields: Fields) -> float:
    """Read the base of the rotary frequencies, which transformers 5 keeps in `rope_parameters`, 4 beside it."""
    section = fields.section("rope_parameters")
    if section is None:
        return fields.number("rope_theta", 10000.0)
    section.require("rope_parameters.rope_type", "default")
    section.require("rope_parameters.partial_rotary_factor", 1.0, 1)
    return section.number("rope_parameters.rope_theta", fields.number("rope_theta", 10000.0))


def _refuse_unsupported(fields: Fields, shape: ModelShape) -> None:
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    fields.require("partial_rotary_factor", 1.0, 1)
    fields.require("quantization_config", None)
    scaling = fields.section("rope_scaling")
    if scaling is not None:
        scaling.require("rope_scaling.rope_type", "default")
        scaling.require("rope_scaling.type", "default")
    fields.check(
        shape.num_heads % shape.num_kv_heads == 0,
        f"num_key_value_heads: {shape.num_kv_heads} (allowed: a divisor of num_attention_heads {shape.num_heads})",
    )
    fields.check(
        shape.top_k <= shape.num_experts,
        f"num_experts_per_tok: {shape.top_k} (allowed: 1 to num_experts {shape.num_experts})",
    )
    fields.check(shape.head_dim % 2 == 0, f"head_dim: {shape.head_dim} (allowed: even)")


def _tensor_rules(shape: ModelShape) -> tuple[TensorRule, ...]:
    attention, hidden = Role.ATTENTION, shape.hidden_size
    embedding = HfTensor("model.embed_tokens.weight", (shape.vocab_size, hidden))
    head = HfTensor("lm_head.weight", (shape.vocab_size, hidden))
    norm = HfTensor("model.norm.weight", (hidden,))
    rules = [TensorRule("embedding.word_embeddings.weight", (embedding,), Layout.COPY, attention)]
    for layer, is_moe in enumerate(shape.is_moe_layer):
        rules += _attention_rules(shape, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
        mlp_rules = _moe_rules if is_moe else _dense_rules
        rules += mlp_rules(shape, f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp.")
    rules.append(TensorRule("decoder.final_layernorm.weight", (norm,), Layout.COPY, attention))
    if not shape.has_tied_embeddings:
        rules.append(TensorRule("output_layer.weight", (head,), Layout.COPY, attention))
    return tuple(rules)


def _ignored(shape: ModelShape) -> tuple[str, ...]:
    """Return what old files hold beside weights, and the copy that a tied head may be saved as."""
    return ("rotary_emb.inv_freq", *(("lm_head.weight",) if shape.has_tied_embeddings else ()))


def _attention_rules(shape: ModelShape, ours: str, hf: str) -> Iterator[TensorRule]:
    hidden, head_dim = shape.hidden_size, shape.head_dim
    q_size, kv_size = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    copies = {
        "input_layernorm.weight": HfTensor(f"{hf}input_layernorm.weight", (hidden,)),
        "pre_mlp_layernorm.weight": HfTensor(f"{hf}post_attention_layernorm.weight", (hidden,)),
        "self_attention.q_layernorm.weight": HfTensor(f"{hf}self_attn.q_norm.weight", (head_dim,)),
        "self_attention.k_layernorm.weight": HfTensor(f"{hf}self_attn.k_norm.weight", (head_dim,)),
        "self_attention.linear_proj.weight": HfTensor(f"{hf}self_attn.o_proj.weight", (hidden, q_size)),
    }
    for name, source in copies.items():
        yield TensorRule(ours + name, (source,), Layout.COPY, Role.ATTENTION)
    qkv = tuple(
        HfTensor(f"{hf}self_attn.{part}_proj.weight", (size, hidden))
        for part, size in (("q", q_size), ("k", kv_size), ("v", kv_size))
    )
    yield TensorRule(f"{ours}self_attention.linear_qkv.weight", qkv, Layout.QKV, Role.ATTENTION)


def _dense_rules(shape: ModelShape, ours: str, hf: str) -> Iterator[TensorRule]:
    gate_up, down = _mlp_sources(hf, shape.dense_width, shape.hidden_size)
    yield TensorRule(f"{ours}linear_fc1.weight", gate_up, Layout.GATE_UP, Role.FFN)
    yield TensorRule(f"{ours}linear_fc2.weight", down, Layout.DOWN, Role.FFN)


def _moe_rules(shape: ModelShape, ours: str, hf: str) -> Iterator[TensorRule]:
    num_experts, hidden, width = shape.num_experts, shape.hidden_size, shape.moe_width
    router = HfTensor(f"{hf}gate.weight", (num_experts, hidden))
    gate_up, down = _mlp_sources(hf + "experts.{expert}.", width, hidden)
    packed_gate_up = HfTensor(f"{hf}experts.gate_up_proj", (num_experts, 2 * width, hidden))
    packed_down = HfTensor(f"{hf}experts.down_proj", (num_experts, hidden, width))
    yield TensorRule(f"{ours}router.weight", (router,), Layout.COPY, Role.FFN, is_router=True)
    yield TensorRule(f"{ours}experts.linear_fc1", gate_up, Layout.EXPERT_GATE_UP, Role.FFN, packed_gate_up)
    yield TensorRule(f"{ours}experts.linear_fc2", down, Layout.EXPERT_DOWN, Role.FFN, packed_down)


def _mlp_sources(hf: str, width: int, hidden: int) -> tuple[tuple[HfTensor, HfTensor], tuple[HfTensor]]:
    gate, up = (HfTensor(f"{hf}{part}_proj.weight", (width, hidden)) for part in ("gate", "up"))
    return (gate, up), (HfTensor(f"{hf}down_proj.weight", (hidden, width)),)


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_shape=_read_shape,
    tensor_rules=_tensor_rules,
    ignored=_ignored,
)
