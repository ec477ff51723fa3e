"""DeepSeek-V2: latent attention, softmax router, groups, shared experts, dense first layers.

Source: transformers, models/deepseek_v2.
"""

from collections.abc import Mapping
from functools import partial

from afd_megatron.families import decoder
from afd_megatron.families.base import Family, LatentShape, ModelShape, RouterShape, TensorRule
from afd_megatron.families.fields import Fields
from afd_megatron.families.rope import read_rope


def read_deepseek(
    fields: Fields, family: str, router: RouterShape, *, num_dense: int, has_pairs_side_by_side: bool
) -> ModelShape:
    """Read what DeepSeek-V2 and V3 have in common; `num_dense` is how many first layers are dense by default."""
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    fields.require("moe_layer_freq", 1)
    num_heads, max_positions = fields.count("num_attention_heads"), fields.count("max_position_embeddings", 4096)
    rope_dim, plain_dim = fields.count("qk_rope_head_dim", 64), fields.count("qk_nope_head_dim", 128)
    moe_width = fields.count("moe_intermediate_size")
    return decoder.read_shape(
        fields,
        family,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=plain_dim + rope_dim,
        max_positions=max_positions,
        norm_eps=1e-6,
        rope=read_rope(fields, rope_dim, max_positions),
        is_moe_layer=decoder.layers_after_dense(fields, num_dense),
        num_experts=fields.count("n_routed_experts"),
        moe_width=moe_width,
        dense_width=fields.count("intermediate_size"),
        router=router,
        latent=LatentShape(
            q_rank=fields.optional_count("q_lora_rank"),
            kv_rank=fields.count("kv_lora_rank", 512),
            plain_dim=plain_dim,
            v_dim=fields.count("v_head_dim", 128),
            has_pairs_side_by_side=has_pairs_side_by_side,
        ),
        shared_width=moe_width * fields.count("n_shared_experts", 0, least=0),
    )


def tensor_rules(shape: ModelShape) -> tuple[TensorRule, ...]:
    return decoder.tensor_rules(shape, partial(decoder.moe_rules, shared="shared_experts"))


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    fields.require("scoring_func", "softmax")
    fields.require("norm_topk_prob", False)
    is_grouped = fields.require("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    router = RouterShape(
        fields.count("num_experts_per_tok"),
        normalize_topk=False,
        num_groups=fields.count("n_group") if is_grouped else 1,
        topk_groups=fields.count("topk_group") if is_grouped else 1,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return read_deepseek(fields, "deepseek_v2", router, num_dense=0, has_pairs_side_by_side=True)


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    read_shape=_read_shape,
    tensor_rules=tensor_rules,
    ignored=decoder.ignored,
)
