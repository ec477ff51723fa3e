"""A small config.json of every family, with what is special about it switched on."""

QWEN3_MOE: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "torch_dtype": "float32",
}
_COMMON = {
    key: QWEN3_MOE[key]
    for key in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("max_position_embeddings", "rms_norm_eps", "rope_theta", "num_experts_per_tok", "moe_intermediate_size"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "tie_word_embeddings", "hidden_act"),
    )
} | {"num_hidden_layers": 3}
QWEN2_MOE = _COMMON | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
}
OLMOE = _COMMON | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "num_experts": 8,
    "intermediate_size": 48,
    "clip_qkv": 0.9,
}
GLM4_MOE = _COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 24,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.8,
    "use_qk_norm": True,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
}
_LATENT = _COMMON | {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.4,
}
DEEPSEEK_V2 = _LATENT | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK_V3 = _LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
GPT_OSS = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 48,
    "head_dim": 16,
    "num_local_experts": 8,
    "sliding_window": 20,
    "attention_bias": True,
    "swiglu_limit": 1.1,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
MIXTRAL = _COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 48,
    "num_local_experts": 8,
    "sliding_window": None,
}
FAMILIES = {
    str(config["model_type"]): config
    for config in (QWEN3_MOE, QWEN2_MOE, OLMOE, GLM4_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, MIXTRAL)
}
