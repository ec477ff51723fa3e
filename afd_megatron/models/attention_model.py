"""Attention's part of a model: embedding, attention, norms, head, and the router if the gate sits here.

T rows of one stage, X of them that this TP rank dispatches, N rows whose logits are wanted, D hidden, V vocabulary.
Knows no requests, no transport.
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
from afd_megatron.models.tensor_parallel import TensorParallel
from afd_megatron.routing import Routing


class AttentionModel(GPTModel):
    """A GPTModel without MLPs, run in half layers. Parameters are allocated, `load_attention` fills them.

    Per stage and step: `prepare_stage` and `embed`; per layer `attend`, `route` the rank's shard of rows, and `finish`
    with what the FFN ranks returned for it; `logits` of the rows to sample.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroupCollection,
        stays: Staying,
    ) -> None:
        self.tensor_parallel = TensorParallel(groups.tp)
        tp = self.tensor_parallel.size
        config = transformer_config(shape, dtype, tp=tp)
        with torch.device(device):
            super().__init__(
                config,
                block_spec(shape),
                vocab_size=-(-shape.vocab_size // tp) * tp,
                max_sequence_length=shape.max_positions,
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
        if shared_experts is None:
            return residual_TD
        return residual_TD + self.tensor_parallel.sum(shared_experts(normed_TD))

    def run_dense(self, layer: int, residual_TD: torch.Tensor, normed_TD: torch.Tensor) -> torch.Tensor:
        """Run the second half of a layer whose dense MLP stays here; return hidden states [T, D]."""
        return residual_TD + self.tensor_parallel.sum(self.decoder.layers[layer].mlp(normed_TD)[0])

    def shard(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows that this rank dispatches, [X, D]."""
        return self.tensor_parallel.shard(normed_TD)

    def finish(self, residual_TD: torch.Tensor, ffn_out_XD: torch.Tensor) -> torch.Tensor:
        """Run the second half of a layer; return hidden states [T, D]. (No bias, no dropout: one addition.)"""
        return residual_TD + self.tensor_parallel.gather(ffn_out_XD, len(residual_TD))

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, V] of rows that have left the last layer; columns from V on are padding."""
        head = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        part_NX = self.output_layer(self.decoder.final_layernorm(hidden_ND), weight=head)[0]
        return self.tensor_parallel.gather_columns(part_NX).float()
