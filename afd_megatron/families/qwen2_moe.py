"""Qwen2-MoE: biases on q, k and v, softmax router, shared experts behind a gate of their own.

Source: transformers, models/qwen2_moe.
"""

from collections.abc import Mapping
from functools import partial

from afd_megatron.families import decoder
from afd_megatron.families.base import Family, ModelShape, RouterShape, TensorRule
from afd_megatron.families.fields import Fields
from afd_megatron.families.rope import read_rope


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    fields.require("use_sliding_window", False)
    num_heads = fields.count("num_attention_heads", 16)
    head_dim = max(1, fields.count("hidden_size") // num_heads)
    max_positions = fields.count("max_position_embeddings", 32768)
    return decoder.read_shape(
        fields,
        "qwen2_moe",
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", 16),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=1e-6,
        rope=read_rope(fields, head_dim, max_positions),
        is_moe_layer=decoder.sparse_layers(fields),
        num_experts=fields.count("num_experts", 60),
        moe_width=fields.count("moe_intermediate_size", 1408),
        dense_width=fields.count("intermediate_size", 5632),
        router=RouterShape(fields.count("num_experts_per_tok", 4), fields.flag("norm_topk_prob", False)),
        has_qkv_bias=fields.flag("qkv_bias", True),
        shared_width=fields.count("shared_expert_intermediate_size", 5632),
        has_shared_gate=True,
    )


def _tensor_rules(shape: ModelShape) -> tuple[TensorRule, ...]:
    return decoder.tensor_rules(shape, partial(decoder.moe_rules, shared="shared_expert"))


QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    read_shape=_read_shape,
    tensor_rules=_tensor_rules,
    ignored=decoder.ignored,
)
