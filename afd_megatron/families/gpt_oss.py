"""GPT-OSS: sinks, a sliding window in every other layer, biases everywhere, a clamped activation, YaRN.

Source: transformers, models/gpt_oss.
"""

from collections.abc import Iterator, Mapping

from afd_megatron.families import decoder
from afd_megatron.families.base import ClampedSwiglu, Family, HfTensor, Layout, ModelShape, RouterShape, TensorRule
from afd_megatron.families.fields import Fields
from afd_megatron.families.rope import read_rope
from afd_megatron.topology import Role


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    fields.require("attention_bias", True)
    num_layers, head_dim = fields.count("num_hidden_layers"), fields.count("head_dim", 64)
    max_positions, width = fields.count("max_position_embeddings", 131072), fields.count("intermediate_size", 2880)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        fields.check(False, "rope_parameters: missing (allowed: an object)")
    return decoder.read_shape(
        fields,
        "gpt_oss",
        num_heads=fields.count("num_attention_heads", 64),
        num_kv_heads=fields.count("num_key_value_heads", 8),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, head_dim, max_positions, theta=150000.0),
        is_moe_layer=(True,) * num_layers,
        num_experts=fields.count("num_local_experts"),
        moe_width=width,
        dense_width=width,
        router=RouterShape(fields.count("num_experts_per_tok", 4), normalize_topk=True, has_logit_bias=True),
        has_qkv_bias=True,
        has_output_bias=True,
        has_expert_bias=True,
        has_sinks=True,
        windows=_windows(fields, num_layers),
        expert_activation=ClampedSwiglu(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.count("sliding_window", 128)
    kinds = fields.texts("layer_types", ("sliding_attention", "full_attention"))
    if not kinds:
        kinds = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers))
    fields.check(len(kinds) == num_layers, f"layer_types: {len(kinds)} (allowed: one for each of {num_layers} layers)")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _moe_rules(shape: ModelShape, ours: str, hf: str) -> Iterator[TensorRule]:
    num_experts, hidden, width = shape.num_experts, shape.hidden_size, shape.moe_width
    for kind, size in (("weight", (num_experts, hidden)), ("bias", (num_experts,))):
        router = HfTensor(f"{hf}mlp.router.{kind}", size)
        yield TensorRule(f"{ours}router.{kind}", (router,), Layout.COPY, Role.FFN, is_movable=True)
    for name, source, layout, size in (
        ("linear_fc1", "gate_up_proj", Layout.EXPERT_PAIRS, (hidden, 2 * width)),
        ("linear_fc2", "down_proj", Layout.EXPERT_DOWN, (width, hidden)),
    ):
        matrix = HfTensor(f"{hf}mlp.experts.{source}", (num_experts, *size))
        bias = HfTensor(f"{hf}mlp.experts.{source}_bias", (num_experts, size[1]))
        yield TensorRule(f"{ours}experts.{name}", (), layout, Role.FFN, matrix, is_turned=True)
        yield TensorRule(f"{ours}experts.{name}_bias", (), layout, Role.FFN, bias)


def _tensor_rules(shape: ModelShape) -> tuple[TensorRule, ...]:
    return decoder.tensor_rules(shape, _moe_rules)


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    read_shape=_read_shape,
    tensor_rules=_tensor_rules,
    ignored=decoder.ignored,
)
