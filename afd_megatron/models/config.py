"""Turns a ModelShape into Megatron's TransformerConfig. Knows no family, no role."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from afd_megatron.families.base import ModelShape, QkNorm


def transformer_config(shape: ModelShape, dtype: torch.dtype, *, tp: int = 1) -> TransformerConfig:
    """Return the whole model's config: plain torch modules without TransformerEngine, nothing initialised.

    Where `tp` attention ranks are more than there are KV heads, several ranks hold the same one, and for Megatron each
    copy is a head.
    """
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=max(shape.num_kv_heads, tp),
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=1,  # slices of experts are cut by us
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.dense_width,
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.router.top_k,
        moe_ffn_hidden_size=shape.moe_width,
        moe_layer_freq=[int(is_moe) for is_moe in shape.is_moe_layer],
        moe_router_pre_softmax=not shape.router.normalize_topk,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm is not QkNorm.NONE,
        add_qkv_bias=shape.has_qkv_bias,
        add_bias_linear=shape.has_output_bias,  # of o_proj; families with it have no dense MLP
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,  # allocates on the default device, which the models set, instead of on CUDA
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
