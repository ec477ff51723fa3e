"""Attention's part of a model: embedding, attention, norms, head, and the router if the gate sits here.

T rows of one stage, N rows whose logits are wanted, D hidden, V vocabulary. Knows no requests, no transport.
"""

from collections.abc import Callable

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from afd_megatron.engine.batch import StageBatch
from afd_megatron.families.base import ModelShape, QkNorm
from afd_megatron.models.attention import PagedSelfAttention, StageInputs, prepare_stage
from afd_megatron.models.config import transformer_config
from afd_megatron.models.kv_cache import KvCache
from afd_megatron.models.latent_attention import PagedLatentAttention
from afd_megatron.models.rope import Rotation
from afd_megatron.models.router import Router
from afd_megatron.routing import Routing


class AttentionModel(GPTModel):
    """A GPTModel without MLPs, run in half layers. Parameters are allocated, `load_attention` fills them.

    Per stage and step: `prepare_stage` and `embed`; per layer `attend`, `route`, and `finish` with what the FFN ranks
    returned; `logits` of the rows to sample.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroupCollection,
        *,
        has_router: bool,
    ) -> None:
        config = transformer_config(shape, dtype)
        with torch.device(device):
            super().__init__(
                config,
                _block_spec(shape),
                vocab_size=shape.vocab_size,
                max_sequence_length=shape.max_positions,
                parallel_output=False,
                share_embeddings_and_output_weights=shape.has_tied_embeddings,
                position_embedding_type="none",  # rotary factors are ours, by row
                pg_collection=groups,
            )
            for layer, is_moe in zip(self.decoder.layers, shape.is_moe_layer, strict=True):
                layer.mlp.router = Router(config, groups, shape.router) if has_router and is_moe else None
        self.requires_grad_(False).eval()
        self.num_layers = shape.num_layers
        self._dtype = dtype
        self._rotation = Rotation(shape.rope, dtype, device)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters by the names that the family's tensor rules give them."""
        return dict(self.named_parameters())

    def prepare_stage(self, stage: StageBatch, cache: KvCache) -> StageInputs:
        """Compute once per step what all layers of a stage need."""
        return prepare_stage(stage, self._rotation, block_size=cache.block_size, dtype=self._dtype)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, D]."""
        return self.embedding.word_embeddings(token_ids_T)

    def attend(
        self, layer: int, hidden_TD: torch.Tensor, inputs: StageInputs, cache: KvCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the first half of a layer; return the residual and the FFN's input, both [T, D]."""
        return self.decoder.layers[layer].attend(hidden_TD, inputs, cache)

    def route(self, layer: int, normed_TD: torch.Tensor) -> Routing | None:
        """Return the rows' experts; None in a dense layer, or if the gate sits on the FFN."""
        router: Callable[[torch.Tensor], Routing] | None = self.decoder.layers[layer].mlp.router
        return router(normed_TD) if router is not None else None

    def finish(self, layer: int, residual_TD: torch.Tensor, ffn_out_TD: torch.Tensor) -> torch.Tensor:
        """Run the second half of a layer, which adds what the FFN ranks returned; return hidden states [T, D]."""
        return residual_TD + ffn_out_TD

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, V] of rows that have left the last layer."""
        head = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(self.decoder.final_layernorm(hidden_ND), weight=head)[0].float()


class RemoteFfn(MegatronModule):
    """Stands where a layer's MLP was, which the FFN ranks hold; `router` is set if the gate sits on attention."""

    router: Router | None


class SplitLayer(TransformerLayer):
    """A transformer layer whose first half runs alone. (No bias, no dropout: the second half is one addition.)"""

    def attend(self, hidden_TD: torch.Tensor, inputs: StageInputs, cache: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
        residual_TD = hidden_TD + self.self_attention(self.input_layernorm(hidden_TD), inputs, cache)
        return residual_TD, self.pre_mlp_layernorm(residual_TD)


def _block_spec(shape: ModelShape) -> TransformerBlockSubmodules:
    layer = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=_attention_spec(shape),
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=RemoteFfn,
    )
    specs = [ModuleSpec(SplitLayer, submodules=layer)] * shape.num_layers
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


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
