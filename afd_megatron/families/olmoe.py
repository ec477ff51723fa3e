"""OLMoE: norms over all heads of q and of k together, clipped q, k and v, softmax router, every layer MoE.

Source: transformers, models/olmoe.
"""

from collections.abc import Mapping

from afd_megatron.families import decoder
from afd_megatron.families.base import Family, ModelShape, QkNorm, RouterShape
from afd_megatron.families.fields import Fields
from afd_megatron.families.rope import read_rope


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    fields.require("attention_bias", False)
    num_heads = fields.count("num_attention_heads", 16)
    head_dim = max(1, fields.count("hidden_size") // num_heads)
    max_positions = fields.count("max_position_embeddings", 4096)
    width = fields.count("intermediate_size", 2048)
    return decoder.read_shape(
        fields,
        "olmoe",
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, head_dim, max_positions),
        is_moe_layer=(True,) * fields.count("num_hidden_layers"),
        num_experts=fields.count("num_experts", 64),
        moe_width=width,
        dense_width=width,
        router=RouterShape(fields.count("num_experts_per_tok", 8), fields.flag("norm_topk_prob", False)),
        qk_norm=QkNorm.FULL,
        qkv_clip=fields.number("clip_qkv") if config.get("clip_qkv") is not None else None,
    )


OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    read_shape=_read_shape,
    tensor_rules=decoder.tensor_rules,
    ignored=decoder.ignored,
)
