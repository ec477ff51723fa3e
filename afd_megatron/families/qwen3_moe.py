"""Qwen3-MoE: norms on each head of q and k, softmax router, dense layers in between.

Source: transformers, models/qwen3_moe.
"""

from collections.abc import Mapping

from afd_megatron.families import decoder
from afd_megatron.families.base import Family, ModelShape, QkNorm, RouterShape
from afd_megatron.families.fields import Fields
from afd_megatron.families.rope import read_rope


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    num_heads = fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", max(1, fields.count("hidden_size") // num_heads))
    max_positions = fields.count("max_position_embeddings", 32768)
    return decoder.read_shape(
        fields,
        "qwen3_moe",
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", 4),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=1e-6,
        rope=read_rope(fields, head_dim, max_positions),
        is_moe_layer=decoder.sparse_layers(fields),
        # transformers 5 saves the first of these names, older versions the second
        num_experts=fields.count("num_local_experts" if "num_local_experts" in config else "num_experts"),
        moe_width=fields.count("moe_intermediate_size", 768),
        dense_width=fields.count("intermediate_size", 6144),
        router=RouterShape(fields.count("num_experts_per_tok", 8), fields.flag("norm_topk_prob", False)),
        qk_norm=QkNorm.HEAD,
    )


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_shape=_read_shape,
    tensor_rules=decoder.tensor_rules,
    ignored=decoder.ignored,
)
