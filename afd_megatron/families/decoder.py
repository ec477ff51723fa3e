"""What the families share: fields of their configs, names of their tensors. Knows no family, no torch, no Megatron.

Source: transformers, where these models are written after Llama, those with latent attention after DeepSeek-V2.
"""

from collections.abc import Callable, Iterator
from typing import Any

from afd_megatron.families.base import HfTensor, Layout, ModelShape, QkNorm, RopeShape, RouterShape, Score, TensorRule
from afd_megatron.families.fields import Fields
from afd_megatron.topology import Role


def read_shape(
    fields: Fields,
    family: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_positions: int,
    norm_eps: float,
    rope: RopeShape,
    **particular: Any,
) -> ModelShape:
    """Read the fields that all these families have, and refuse what none of them supports.

    Args:
        particular: the other fields of ModelShape, which a family reads by itself.

    Raises:
        ConfigError: a line for each fault of all fields read so far.
    """
    shape = ModelShape(
        family=family,
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=fields.count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size"),
        max_positions=max_positions,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        fp8_block=_read_quantization(fields),
        **particular,
    )
    fields.require("hidden_act", "silu")
    fields.check(
        num_heads % num_kv_heads == 0,
        f"num_key_value_heads: {num_kv_heads} (allowed: a divisor of num_attention_heads {num_heads})",
    )
    router = shape.router
    fields.check(
        router.top_k <= shape.num_experts,
        f"num_experts_per_tok: {router.top_k} (allowed: 1 to the number of experts {shape.num_experts})",
    )
    if router.num_groups > 1:
        fields.check(
            shape.num_experts % router.num_groups == 0,
            f"n_group: {router.num_groups} (allowed: a divisor of the number of experts {shape.num_experts})",
        )
        fields.check(
            router.topk_groups * (shape.num_experts // router.num_groups) >= router.top_k,
            f"topk_group: {router.topk_groups} (allowed: enough groups for num_experts_per_tok {router.top_k})",
        )
        fields.check(
            router.topk_groups <= router.num_groups,
            f"topk_group: {router.topk_groups} (allowed: 1 to n_group {router.num_groups})",
        )
    fields.raise_faults()
    return shape


def _read_quantization(fields: Fields) -> tuple[int, int] | None:
    """Read how the checkpoint is quantised; return the blocks of fp8. Activations are never quantised."""
    section = fields.section("quantization_config")
    if section is None or section.require("quantization_config.quant_method", "fp8", "mxfp4") == "mxfp4":
        return None
    section.require("quantization_config.fmt", "e4m3")
    sizes = section.indices("quantization_config.weight_block_size")
    is_block = len(sizes) == 2 and min(sizes) > 0
    fields.check(
        is_block, f"quantization_config.weight_block_size: {list(sizes)} (allowed: rows and columns of a block)"
    )
    return (sizes[0], sizes[1]) if is_block else None


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Read which layers are MoE from `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(fields.count("num_hidden_layers")))


def layers_after_dense(fields: Fields, num_dense: int) -> tuple[bool, ...]:
    """Read which layers are MoE from `first_k_dense_replace`, by default all but the first `num_dense`."""
    num_dense = fields.count("first_k_dense_replace", num_dense, least=0)
    return tuple(layer >= num_dense for layer in range(fields.count("num_hidden_layers")))


def read_sigmoid_router(fields: Fields, *, num_groups: int, topk_groups: int, scale: float) -> RouterShape:
    """Read the router of DeepSeek-V3, with what absent fields mean: a bias for the choice, groups by their two best."""
    return RouterShape(
        fields.count("num_experts_per_tok", 8),
        fields.flag("norm_topk_prob", True),
        Score.SIGMOID,
        has_bias=True,
        num_groups=fields.count("n_group", num_groups),
        topk_groups=fields.count("topk_group", topk_groups),
        group_top=2,
        scale=fields.number("routed_scaling_factor", scale),
    )


def ignored(shape: ModelShape) -> tuple[str, ...]:
    """Return what old files hold beside weights, and the copy that a tied head may be saved as."""
    return ("rotary_emb.inv_freq", *(("lm_head.weight",) if shape.has_tied_embeddings else ()))


def ignored_and_next_layer(shape: ModelShape) -> tuple[str, ...]:
    """Return the same and the layer after the last, which predicts several tokens and is not run."""
    return (*ignored(shape), f"model.layers.{shape.num_layers}.")


_MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def moe_rules(
    shape: ModelShape,
    ours: str,
    hf: str,
    *,
    prefix: str = "mlp.",
    names: tuple[str, str, str] = _MLP_NAMES,
    shared: str = "",
) -> Iterator[TensorRule]:
    """Return the rules of a MoE layer's FFN.

    Args:
        ours: what stands before our names.
        hf: what stands before the layer's HF names.
        prefix: what stands before those of router and experts.
        names: gate, up and down of an expert.
        shared: what the shared experts are called, if there are any.
    """
    num_experts, hidden, width = shape.num_experts, shape.hidden_size, shape.moe_width
    router = HfTensor(f"{hf}{prefix}gate.weight", (num_experts, hidden))
    yield TensorRule(f"{ours}router.weight", (router,), Layout.COPY, Role.FFN, is_movable=True)
    if shape.router.has_bias:
        bias = HfTensor(f"{hf}{prefix}gate.e_score_correction_bias", (num_experts,))
        yield TensorRule(f"{ours}router.expert_bias", (bias,), Layout.COPY, Role.FFN, is_movable=True)
    gate_up, down = _mlp_sources(f"{hf}{prefix}experts.{{expert}}.", names, width, hidden)
    packed_gate_up = HfTensor(f"{hf}{prefix}experts.gate_up_proj", (num_experts, 2 * width, hidden))
    packed_down = HfTensor(f"{hf}{prefix}experts.down_proj", (num_experts, hidden, width))
    yield TensorRule(f"{ours}experts.linear_fc1", gate_up, Layout.EXPERT_GATE_UP, Role.FFN, packed_gate_up)
    yield TensorRule(f"{ours}experts.linear_fc2", down, Layout.EXPERT_DOWN, Role.FFN, packed_down)
    if shape.shared_width:
        yield from _mlp_rules(f"{ours}shared_experts.", f"{hf}mlp.{shared}.", shape.shared_width, hidden)
    if shape.has_shared_gate:
        gate = HfTensor(f"{hf}mlp.{shared}_gate.weight", (1, hidden))
        yield TensorRule(f"{ours}shared_experts.gate_weight", (gate,), Layout.COPY, Role.FFN, is_movable=True)


def tensor_rules(
    shape: ModelShape, moe_rules: Callable[[ModelShape, str, str], Iterator[TensorRule]] = moe_rules
) -> tuple[TensorRule, ...]:
    """Return the rules of the whole model, those of a MoE layer's FFN as `moe_rules(shape, ours, hf)` has them."""
    hidden = shape.hidden_size
    vocab = (shape.vocab_size, hidden)
    rules = [_rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", *vocab, layout=Layout.VOCAB)]
    for layer, is_moe in enumerate(shape.is_moe_layer):
        ours, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        rules += _norm_rules(shape, ours, hf)
        attention_rules = _attention_rules if shape.latent is None else _latent_rules
        rules += attention_rules(shape, f"{ours}self_attention.", f"{hf}self_attn.")
        if is_moe:
            rules += moe_rules(shape, f"{ours}mlp.", hf)
        else:
            rules += _mlp_rules(f"{ours}mlp.", f"{hf}mlp.", shape.dense_width, hidden)
    rules.append(_rule("decoder.final_layernorm.weight", "model.norm.weight", hidden))
    if not shape.has_tied_embeddings:
        rules.append(_rule("output_layer.weight", "lm_head.weight", *vocab, layout=Layout.VOCAB))
    return tuple(rules)


def _norm_rules(shape: ModelShape, ours: str, hf: str) -> Iterator[TensorRule]:
    for name, source in (("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "post_attention_layernorm")):
        yield _rule(f"{ours}{name}.weight", f"{hf}{source}.weight", shape.hidden_size)


def _attention_rules(shape: ModelShape, ours: str, hf: str) -> Iterator[TensorRule]:
    hidden = shape.hidden_size
    sizes = {"q": shape.num_heads * shape.head_dim, "k": shape.num_kv_heads * shape.head_dim}
    sizes["v"] = sizes["k"]
    if shape.qk_norm is not QkNorm.NONE:
        for part in ("q", "k"):
            is_whole = shape.qk_norm is QkNorm.HEAD
            layout = Layout.COPY if is_whole else Layout.ROWS if part == "q" else Layout.KV_ROWS
            size = shape.head_dim if is_whole else sizes[part]
            yield _rule(f"{ours}{part}_layernorm.weight", f"{hf}{part}_norm.weight", size, layout=layout)
    for kind, inner in (("weight", (hidden,)), ("bias", ())):
        if kind == "weight" or shape.has_qkv_bias:
            qkv = tuple(HfTensor(f"{hf}{part}_proj.{kind}", (size, *inner)) for part, size in sizes.items())
            yield TensorRule(f"{ours}linear_qkv.{kind}", qkv, Layout.QKV, Role.ATTENTION)
    yield _rule(f"{ours}linear_proj.weight", f"{hf}o_proj.weight", hidden, sizes["q"], layout=Layout.COLUMNS)
    if shape.has_output_bias:
        yield _rule(f"{ours}linear_proj.bias", f"{hf}o_proj.bias", hidden)
    if shape.has_sinks:
        yield _rule(f"{ours}sinks", f"{hf}sinks", shape.num_heads, layout=Layout.ROWS)


def _latent_rules(shape: ModelShape, ours: str, hf: str) -> Iterator[TensorRule]:
    latent, hidden, num_heads = shape.latent, shape.hidden_size, shape.num_heads
    assert latent is not None
    query = num_heads * shape.head_dim
    if latent.q_rank is None:
        yield _rule(f"{ours}linear_q_proj.weight", f"{hf}q_proj.weight", query, hidden, layout=Layout.ROWS)
    else:
        yield _rule(f"{ours}linear_q_down_proj.weight", f"{hf}q_a_proj.weight", latent.q_rank, hidden)
        yield _rule(f"{ours}q_layernorm.weight", f"{hf}q_a_layernorm.weight", latent.q_rank)
        yield _rule(f"{ours}linear_q_up_proj.weight", f"{hf}q_b_proj.weight", query, latent.q_rank, layout=Layout.ROWS)
    down = latent.kv_rank + shape.rope.num_dims
    yield _rule(f"{ours}linear_kv_down_proj.weight", f"{hf}kv_a_proj_with_mqa.weight", down, hidden)
    yield _rule(f"{ours}kv_layernorm.weight", f"{hf}kv_a_layernorm.weight", latent.kv_rank)
    up = num_heads * (latent.plain_dim + latent.v_dim)
    yield _rule(f"{ours}linear_kv_up_proj.weight", f"{hf}kv_b_proj.weight", up, latent.kv_rank, layout=Layout.ROWS)
    out = num_heads * latent.v_dim
    yield _rule(f"{ours}linear_proj.weight", f"{hf}o_proj.weight", hidden, out, layout=Layout.COLUMNS)


def _rule(ours: str, hf: str, *size: int, layout: Layout = Layout.COPY) -> TensorRule:
    return TensorRule(ours, (HfTensor(hf, size),), layout, Role.ATTENTION)


def _mlp_rules(ours: str, hf: str, width: int, hidden: int) -> Iterator[TensorRule]:
    gate_up, down = _mlp_sources(hf, _MLP_NAMES, width, hidden)
    yield TensorRule(f"{ours}linear_fc1.weight", gate_up, Layout.ROWS, Role.FFN, is_movable=True)
    yield TensorRule(f"{ours}linear_fc2.weight", down, Layout.COLUMNS, Role.FFN, is_movable=True)


def _mlp_sources(
    hf: str, names: tuple[str, str, str], width: int, hidden: int
) -> tuple[tuple[HfTensor, HfTensor], tuple[HfTensor]]:
    gate, up = (HfTensor(f"{hf}{name}.weight", (width, hidden)) for name in names[:2])
    return (gate, up), (HfTensor(f"{hf}{names[2]}.weight", (hidden, width)),)
