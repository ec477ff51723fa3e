"""Whole models of Megatron itself, saved and loaded by its own dist_checkpointing, for tests. Knows no role.

Without TransformerEngine, on CPUs: what Megatron asks of CUDA on the way is answered here.
"""

import dataclasses
import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from afd_megatron.distributed import World
from afd_megatron.families.base import ModelShape
from afd_megatron.models.config import transformer_config

State = Mapping[str, torch.Tensor]


def save_by_megatron(
    world: World, folder: Path, shape: ModelShape, sizes: Mapping[str, int], settings: Mapping[str, object]
) -> None:
    """Save random weights from all ranks of the world, which share the model by `sizes` ("tp" or "ep": all ranks).

    Args:
        settings: of the checkpoint, as `sharded_state_dict` knows them, and `moe_layer_freq` of the model.
    """
    groups = _groups(sizes)
    model = build(shape, groups, sizes, settings)
    generator = torch.Generator().manual_seed(world.rank)
    with torch.no_grad():
        for values in model.state_dict().values():  # parameters, the bias of a router, and nothings
            if values is not None:
                values.copy_(torch.randn(values.shape, generator=generator))
    sharded = model.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp, **settings})
    folder.mkdir(exist_ok=True)
    world.barrier()
    with _without_cuda(), _with_children():
        dist_checkpointing.save(sharded, str(folder))


def load_by_megatron(
    world: World, folder: Path, shape: ModelShape, settings: Mapping[str, object], has_engine_keys: bool = False
) -> dict[str, torch.Tensor]:
    """Return the state dict of the whole model on a rank alone, loaded by Megatron.

    Args:
        has_engine_keys: the checkpoint has the keys of a model with TransformerEngine.
    """
    groups = _groups({})
    model = build(shape, groups, {}, settings, has_engine_keys)
    sharded = model.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp, **settings})
    wanted = {key: value for key, value in sharded.items() if "_extra_state" not in key}
    with _without_cuda():
        return dist_checkpointing.load(wanted, str(folder))


def build(
    shape: ModelShape,
    groups: ProcessGroupCollection,
    sizes: Mapping[str, int],
    settings: Mapping[str, object],
    has_engine_keys: bool = False,
) -> GPTModel:
    """Return a model whose weights are not set."""
    config = _config(shape, sizes, {key: value for key, value in settings.items() if key == "moe_layer_freq"})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", pp_rank=0)
    for layer, is_moe in zip(spec.layer_specs, shape.is_moe_layer, strict=True):
        layer.submodules.self_attention.submodules.core_attention = (
            IdentityOp  # has no weights, and not every kind works
        )
        if has_engine_keys:
            keys = _engine_keys(shape, is_moe)
            layer.submodules = dataclasses.replace(layer.submodules, sharded_state_dict_keys_map=keys)
    with _without_cuda(), patch("megatron.core.transformer.multi_latent_attention.HAVE_TE", False):
        return GPTModel(
            config,
            spec,
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_positions,
            parallel_output=False,
            position_embedding_type="none",
            pg_collection=groups,
        )


def as_hf(state: State, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return the tensors of a Qwen2-MoE, Qwen3-MoE or DeepSeek-V3, written out by hand from Megatron's modules."""
    named = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for layer, is_moe in enumerate(shape.is_moe_layer):
        prefix = f"decoder.layers.{layer}."
        ours = {key.removeprefix(prefix): values for key, values in state.items() if key.startswith(prefix)}
        theirs = {
            "input_layernorm.weight": ours["input_layernorm.weight"],
            "post_attention_layernorm.weight": ours["pre_mlp_layernorm.weight"],
            "self_attn.o_proj.weight": ours["self_attention.linear_proj.weight"],
            **(_latent_as_hf(ours) if shape.latent else _attention_as_hf(ours, shape)),
            **(_experts_as_hf(ours, shape) if is_moe else _mlp_as_hf(ours, "mlp.", "mlp.")),
        }
        named |= {f"model.layers.{layer}.{name}": values for name, values in theirs.items()}
    return named


def _attention_as_hf(ours: State, shape: ModelShape) -> dict[str, torch.Tensor]:
    named = {}
    size = shape.num_heads // shape.num_kv_heads * shape.head_dim
    for kind in ("weight", "bias"):
        if f"self_attention.linear_qkv.{kind}" in ours:
            groups = ours[f"self_attention.linear_qkv.{kind}"].chunk(shape.num_kv_heads)
            named[f"self_attn.q_proj.{kind}"] = torch.cat([group[:size] for group in groups])
            named[f"self_attn.k_proj.{kind}"] = torch.cat([group[size : size + shape.head_dim] for group in groups])
            named[f"self_attn.v_proj.{kind}"] = torch.cat([group[-shape.head_dim :] for group in groups])
    for part in ("q", "k"):
        if f"self_attention.{part}_layernorm.weight" in ours:
            named[f"self_attn.{part}_norm.weight"] = ours[f"self_attention.{part}_layernorm.weight"]
    return named


def _latent_as_hf(ours: State) -> dict[str, torch.Tensor]:
    names = {
        "q_a_proj": "linear_q_down_proj",
        "q_a_layernorm": "q_layernorm",
        "q_b_proj": "linear_q_up_proj",
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_a_layernorm": "kv_layernorm",
        "kv_b_proj": "linear_kv_up_proj",
    }
    return {f"self_attn.{hf}.weight": ours[f"self_attention.{name}.weight"] for hf, name in names.items()}


def _experts_as_hf(ours: State, shape: ModelShape) -> dict[str, torch.Tensor]:
    named = {"mlp.gate.weight": ours["mlp.router.weight"]}
    if shape.router.has_bias:
        named["mlp.gate.e_score_correction_bias"] = ours["mlp.router.expert_bias"]
    for expert in range(shape.num_experts):
        named |= _mlp_as_hf(ours, f"mlp.experts.local_experts.{expert}.", f"mlp.experts.{expert}.")
    if shape.has_shared_gate:
        named["mlp.shared_expert_gate.weight"] = ours["mlp.shared_experts.gate_weight"]
    if shape.shared_width:
        hf = "mlp.shared_expert." if shape.has_shared_gate else "mlp.shared_experts."
        named |= _mlp_as_hf(ours, "mlp.shared_experts.", hf)
    return named


def _mlp_as_hf(ours: State, module: str, hf: str) -> dict[str, torch.Tensor]:
    gate, up = ours[f"{module}linear_fc1.weight"].chunk(2)
    down = ours[f"{module}linear_fc2.weight"]
    return {f"{hf}gate_proj.weight": gate, f"{hf}up_proj.weight": up, f"{hf}down_proj.weight": down}


def _engine_keys(shape: ModelShape, is_moe: bool) -> dict[str, str]:
    """Return how keys differ from the names of our modules in a model with TransformerEngine, which fuses norms."""
    attention = "self_attention."
    keys = {"input_layernorm.": f"{attention}linear_qkv.layer_norm_"}
    if shape.latent:
        keys = {
            f"{attention}{part}_layernorm.": f"{attention}linear_{part}_up_proj.layer_norm_" for part in ("q", "kv")
        }
    return keys if is_moe else keys | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _config(shape: ModelShape, sizes: Mapping[str, int], more: Mapping[str, object]) -> TransformerConfig:
    base = transformer_config(shape, torch.float32)
    settings = {field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.init} | {
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "expert_tensor_parallel_size": sizes.get("tp", 1),
        "expert_model_parallel_size": sizes.get("ep", 1),
        "moe_shared_expert_intermediate_size": shape.shared_width or None,
        "moe_shared_expert_gate": shape.has_shared_gate,
        "moe_router_enable_expert_bias": shape.router.has_bias,
        "moe_router_score_function": shape.router.score.value,
    }
    if shape.latent is None:
        return TransformerConfig(**settings | more)
    return MLATransformerConfig(
        **settings
        | more
        | {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope", "rotary_scaling_factor": 1.0},
        q_lora_rank=shape.latent.q_rank,
        kv_lora_rank=shape.latent.kv_rank,
        qk_head_dim=shape.latent.plain_dim,
        qk_pos_emb_head_dim=shape.rope.num_dims,
        v_head_dim=shape.latent.v_dim,
    )


def _groups(sizes: Mapping[str, int]) -> ProcessGroupCollection:
    """Return groups in which all ranks share in one way, and each is alone in all others."""
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    everyone = dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    tp, ep = (everyone if name in sizes else alone for name in ("tp", "ep"))
    dp = alone if "tp" in sizes else everyone
    return ProcessGroupCollection(
        tp=tp, cp=alone, pp=alone, dp=dp, dp_cp=dp, tp_cp=tp, ep=ep, expt_tp=tp, tp_ep=everyone, expt_dp=alone,
        tp_dp_cp=everyone, embd=None, pos_embd=None,
    )  # fmt: skip


@contextmanager
def _without_cuda() -> Iterator[None]:
    with patch("torch.cuda.synchronize", lambda: None), patch("torch.cuda.current_device", lambda: torch.device("cpu")):
        yield


@contextmanager
def _with_children() -> Iterator[None]:
    """Let a rank of the harness start processes, as `save` does; they end before it returns."""
    config = multiprocessing.current_process()._config
    before = config.get("daemon")
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = before
