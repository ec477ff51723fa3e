"""Attention's part of a model: embedding, attention, norms, head, and the router if the gate sits here.

T rows of one stage, N rows whose logits are wanted, D hidden, V vocabulary. Knows no requests, no transport.
"""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from afd_megatron.engine.batch import StageBatch
from afd_megatron.families.base import ModelShape, Staying
from afd_megatron.models.attention import StageInputs, prepare_stage
from afd_megatron.models.config import transformer_config
from afd_megatron.models.kv_cache import KvCache
from afd_megatron.models.rope import Rotation
from afd_megatron.models.split import block_spec, place_ffn
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
        stays: Staying,
    ) -> None:
        config = transformer_config(shape, dtype)
        with torch.device(device):
            super().__init__(
                config,
                block_spec(shape),
                vocab_size=shape.vocab_size,
                max_sequence_length=shape.max_positions,
                parallel_output=False,
                share_embeddings_and_output_weights=shape.has_tied_embeddings,
                position_embedding_type="none",  # rotary factors are ours, by row
                pg_collection=groups,
            )
            place_ffn(self.decoder.layers, shape, config, groups, stays)
        self.is_remote = shape.is_remote_layer(stays)
        self.requires_grad_(False).eval()
        self._dtype = dtype
        self._windows = set(shape.windows or (None,))
        self._rotation = Rotation(shape.rope, dtype, device)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters by the names that the family's tensor rules give them."""
        return dict(self.named_parameters())

    def prepare_stage(self, stage: StageBatch, cache: KvCache) -> StageInputs:
        """Compute once per step what all layers of a stage need."""
        return prepare_stage(stage, self._rotation, self._windows, block_size=cache.block_size, dtype=self._dtype)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, D]."""
        return self.embedding.word_embeddings(token_ids_T)

    def attend(
        self, layer: int, hidden_TD: torch.Tensor, inputs: StageInputs, cache: KvCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the first half of a layer; return the residual and the FFN's input, both [T, D]."""
        module = self.decoder.layers[layer]
        residual_TD = hidden_TD + module.self_attention(module.input_layernorm(hidden_TD), inputs, cache)
        return residual_TD, module.pre_mlp_layernorm(residual_TD)

    def route(self, layer: int, normed_TD: torch.Tensor) -> Routing | None:
        """Return the rows' experts; None in a dense layer, or if the gate sits on the FFN."""
        router = self.decoder.layers[layer].mlp.router
        return None if router is None else router(normed_TD)

    def add_shared(self, layer: int, residual_TD: torch.Tensor, normed_TD: torch.Tensor) -> torch.Tensor:
        """Return the residual with the output of the layer's shared experts, if they are here."""
        shared_experts = self.decoder.layers[layer].mlp.shared_experts
        return residual_TD if shared_experts is None else residual_TD + shared_experts(normed_TD)

    def own_ffn(self, layer: int, normed_TD: torch.Tensor) -> torch.Tensor:
        """Run the dense MLP of a layer whose FFN stays here; return [T, D]."""
        return self.decoder.layers[layer].mlp(normed_TD)[0]

    def finish(self, layer: int, residual_TD: torch.Tensor, ffn_out_TD: torch.Tensor) -> torch.Tensor:
        """Run the second half of a layer; return hidden states [T, D]. (No bias, no dropout: one addition.)"""
        return residual_TD + ffn_out_TD

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, V] of rows that have left the last layer."""
        head = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(self.decoder.final_layernorm(hidden_ND), weight=head)[0].float()
