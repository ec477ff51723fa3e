"""GLM-4-MoE: half of each head rotated, sigmoid router with a bias for the choice, shared experts, first layers dense.

Source: transformers, models/glm4_moe. Its layers for predicting several tokens are not run.
"""

from collections.abc import Mapping
from functools import partial

from afd_megatron.families import decoder
from afd_megatron.families.base import Family, ModelShape, QkNorm, RouterShape, Score, TensorRule
from afd_megatron.families.fields import Fields
from afd_megatron.families.rope import read_rope


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    num_layers, num_heads = fields.count("num_hidden_layers", 46), fields.count("num_attention_heads", 96)
    head_dim = fields.count("head_dim", max(1, fields.count("hidden_size", 4096) // num_heads))
    max_positions = fields.count("max_position_embeddings", 131072)
    first_moe = fields.count("first_k_dense_replace", 1, least=0)
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
        is_moe_layer=tuple(layer >= first_moe for layer in range(num_layers)),
        num_experts=fields.count("n_routed_experts", 128),
        moe_width=moe_width,
        dense_width=fields.count("intermediate_size", 10944),
        router=RouterShape(
            fields.count("num_experts_per_tok", 8),
            fields.flag("norm_topk_prob", True),
            Score.SIGMOID,
            has_bias=True,
            num_groups=fields.count("n_group", 1),
            topk_groups=fields.count("topk_group", 1),
            group_top=2,
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        qk_norm=QkNorm.HEAD if fields.flag("use_qk_norm", False) else QkNorm.NONE,
        has_qkv_bias=fields.flag("attention_bias", False),
        shared_width=moe_width * fields.count("n_shared_experts", 1, least=0),
    )


def _tensor_rules(shape: ModelShape) -> tuple[TensorRule, ...]:
    return decoder.tensor_rules(shape, partial(decoder.moe_rules, shared="shared_experts"))


def _ignored(shape: ModelShape) -> tuple[str, ...]:
    return (*decoder.ignored(shape), f"model.layers.{shape.num_layers}.")


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read_shape=_read_shape,
    tensor_rules=_tensor_rules,
    ignored=_ignored,
)
