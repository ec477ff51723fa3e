"""Mixtral: plain grouped-query attention, every layer MoE, weights of the chosen experts normalised.

Source: transformers, models/mixtral; names as its checkpoints have them.
"""

from collections.abc import Mapping
from functools import partial

from afd_megatron.families import decoder
from afd_megatron.families.base import Family, ModelShape, RouterShape, TensorRule
from afd_megatron.families.fields import Fields
from afd_megatron.families.rope import read_rope


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    num_layers, num_heads = fields.count("num_hidden_layers"), fields.count("num_attention_heads", 32)
    head_dim = fields.count("head_dim", max(1, fields.count("hidden_size") // num_heads))
    max_positions, width = fields.count("max_position_embeddings", 131072), fields.count("intermediate_size", 14336)
    window = fields.optional_count("sliding_window")
    return decoder.read_shape(
        fields,
        "mixtral",
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", 8),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, head_dim, max_positions, theta=1e6),
        is_moe_layer=(True,) * num_layers,
        num_experts=fields.count("num_local_experts", 8),
        moe_width=width,
        dense_width=width,
        router=RouterShape(fields.count("num_experts_per_tok", 2), normalize_topk=True),
        windows=(window,) * num_layers if window else None,
    )


def _tensor_rules(shape: ModelShape) -> tuple[TensorRule, ...]:
    rules = partial(decoder.moe_rules, prefix="block_sparse_moe.", names=("w1", "w3", "w2"))
    return decoder.tensor_rules(shape, rules)


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    read_shape=_read_shape,
    tensor_rules=_tensor_rules,
    ignored=decoder.ignored,
)
