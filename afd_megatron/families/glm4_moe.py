"""GLM-4-MoE: half of each head rotated, sigmoid router with a bias for the choice, shared experts, first layers dense.

Source: transformers, models/glm4_moe. Its layers for predicting several tokens are not run.
"""

from collections.abc import Mapping
from functools import partial

from afd_megatron.families import decoder
from afd_megatron.families.base import Family, ModelShape, QkNorm, TensorRule
from afd_megatron.families.fields import Fields
from afd_megatron.families.rope import read_rope


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    num_heads = fields.count("num_attention_heads", 96)
    head_dim = fields.count("head_dim", max(1, fields.count("hidden_size") // num_heads))
    max_positions = fields.count("max_position_embeddings", 131072)
    moe_width = fields.count("moe_intermediate_size", 1408)
    return decoder.read_shape(
        fields,
        "glm4_moe",
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", 8),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, head_dim, max_positions, rotary_share=0.5),
        is_moe_layer=decoder.layers_after_dense(fields, 1),
        num_experts=fields.count("n_routed_experts", 128),
        moe_width=moe_width,
        dense_width=fields.count("intermediate_size", 10944),
        router=decoder.read_sigmoid_router(fields, num_groups=1, topk_groups=1, scale=1.0),
        qk_norm=QkNorm.HEAD if fields.flag("use_qk_norm", False) else QkNorm.NONE,
        has_qkv_bias=fields.flag("attention_bias", False),
        shared_width=moe_width * fields.count("n_shared_experts", 1, least=0),
    )


def _tensor_rules(shape: ModelShape) -> tuple[TensorRule, ...]:
    return decoder.tensor_rules(shape, partial(decoder.moe_rules, shared="shared_experts"))


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read_shape=_read_shape,
    tensor_rules=_tensor_rules,
    ignored=decoder.ignored_and_next_layer,
)
