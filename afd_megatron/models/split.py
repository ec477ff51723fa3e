"""What the attention role's GPT model is made of: layers without MLP, or with what of it stays. Knows no weights."""

from collections.abc import Iterable

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from afd_megatron.families.base import ModelShape, QkNorm, Staying
from afd_megatron.models.attention import PagedSelfAttention
from afd_megatron.models.latent_attention import PagedLatentAttention
from afd_megatron.models.mlp import SharedExperts, SlicedMlp
from afd_megatron.models.router import Router
from afd_megatron.topology import contiguous_slice


class RemoteFfn(MegatronModule):
    """Stands where a layer's MLP was, which the FFN ranks hold, with what of it stays."""

    router: Router | None
    shared_experts: SharedExperts | None


def block_spec(shape: ModelShape) -> TransformerBlockSubmodules:
    """Return the decoder's spec; its layers' attention runs over a paged cache, their FFN is elsewhere."""
    layer = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=_attention_spec(shape),
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=RemoteFfn,
    )
    specs = [ModuleSpec(TransformerLayer, submodules=layer)] * shape.num_layers
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


def place_ffn(
    layers: Iterable[TransformerLayer],
    shape: ModelShape,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    stays: Staying,
) -> None:
    """Give the layers what of their FFN stays on attention, cut to the rank's columns."""
    dense_width, shared_width = (
        len(contiguous_slice(width, groups.tp.size(), groups.tp.rank()))
        for width in (shape.dense_width, shape.shared_width)
    )
    for layer, is_moe in zip(layers, shape.is_moe_layer, strict=True):
        if stays.dense and not is_moe:
            layer.mlp = SlicedMlp(config, groups, dense_width)
            continue
        has_shared = is_moe and stays.shared and shape.shared_width
        layer.mlp.router = Router(config, groups, shape.router) if is_moe and stays.router else None
        layer.mlp.shared_experts = (
            SharedExperts(config, groups, shared_width, has_gate=shape.has_shared_gate) if has_shared else None
        )


def _attention_spec(shape: ModelShape) -> ModuleSpec:
    if shape.latent is not None:
        return ModuleSpec(PagedLatentAttention, {"shape": shape})
    qk_norm = None if shape.qk_norm is QkNorm.NONE else WrappedTorchNorm
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=IdentityOp,  # PagedSelfAttention's own forward does it
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(PagedSelfAttention, {"attn_mask_type": AttnMaskType.causal, "shape": shape}, submodules)
