"""Self-attention over a paged KV cache, on Megatron's projections. Knows no requests, no FFN.

T rows of one stage, B decode rows, C rows of a prompt's chunk, S context, G KV heads, Q query heads per KV head,
N = G * Q query heads, H head dim, R rotated dims of a head, D hidden, M blocks per request.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from afd_megatron.engine.batch import PrefillChunk, StageBatch
from afd_megatron.families.base import ModelShape, QkNorm
from afd_megatron.models.kv_cache import KvCache
from afd_megatron.models.rope import Rotation, rotate


class ChunkInputs(NamedTuple):
    """A prompt's rows `start..end - 1` of the stage, where their context lies, and what each row may see of it.

    `mask_CS` (bool) is None for a chunk that starts its prompt, which is plainly causal.
    """

    start: int
    end: int
    entry_S: torch.Tensor
    mask_CS: torch.Tensor | None


class StageInputs(NamedTuple):
    """What all layers of a stage share: rotary factors, cache entries to write and to read.

    `cos_T1R` and `sin_T1R` are those of `Rotation.factors`. A decode row reads `entry_BS` (int64) and adds `mask_B11S`
    (0 or -inf, model's dtype) to its scores.
    """

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor
    cache_index_T: torch.Tensor
    entry_BS: torch.Tensor
    mask_B11S: torch.Tensor
    chunks: tuple[ChunkInputs, ...]


def prepare_stage(stage: StageBatch, rotation: Rotation, *, block_size: int, dtype: torch.dtype) -> StageInputs:
    """Compute what the layers of a step share.

    No decode row waits for the device. On a CPU the context is cut to the longest row, elsewhere it is as wide as the
    block table, so that shapes depend on no value.
    """
    cos_TR, sin_TR = rotation.factors(stage.positions_T)
    entry_BS, mask_BS = _decode_context(stage, block_size)
    return StageInputs(
        cos_T1R=cos_TR[:, None],
        sin_T1R=sin_TR[:, None],
        cache_index_T=stage.cache_index_T,
        entry_BS=entry_BS,
        mask_B11S=torch.zeros_like(mask_BS, dtype=dtype).masked_fill_(~mask_BS, float("-inf"))[:, None, None],
        chunks=tuple(_chunk_context(chunk, block_size) for chunk in stage.prefill),
    )


class PagedSelfAttention(SelfAttention):
    """Megatron's self-attention with keys and values in a `KvCache`; rows are flat, each with its own position."""

    def __init__(self, config: TransformerConfig, *args: Any, shape: ModelShape, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._qk_norm, self._qkv_clip = shape.qk_norm, shape.qkv_clip
        if shape.qk_norm is QkNorm.FULL:  # Megatron made them for one head
            eps = config.layernorm_epsilon
            self.q_layernorm = WrappedTorchNorm(config, shape.num_heads * shape.head_dim, eps)
            self.k_layernorm = WrappedTorchNorm(config, shape.num_kv_heads * shape.head_dim, eps)

    def forward(self, normed_TD: torch.Tensor, inputs: StageInputs, cache: KvCache) -> torch.Tensor:
        """Write K and V of all rows, then let each row attend to its context; return [T, D]."""
        layer = self.layer_number - 1
        q_TGQH, k_TGH, v_TGH = self._project(normed_TD, inputs)
        cache.write(layer, inputs.cache_index_T, k_TGH, v_TGH)
        k_cache, v_cache = cache.layer(layer)
        num_decode = len(inputs.entry_BS)
        parts = []
        if num_decode:
            parts.append(_attend_decode(q_TGQH[:num_decode], k_cache, v_cache, inputs))
        for chunk in inputs.chunks:
            parts.append(_attend_chunk(q_TGQH[chunk.start : chunk.end], k_cache, v_cache, chunk))
        attended_TN = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.linear_proj(attended_TN)[0]

    def _project(self, normed_TD: torch.Tensor, inputs: StageInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k (normed and rotated) and v; linear_qkv's rows are q.. k v of one KV head after the other."""
        num_groups, head_dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        qkv_TGXH = self.linear_qkv(normed_TD)[0].view(len(normed_TD), num_groups, -1, head_dim)
        q_TGQH, k_TG1H, v_TG1H = qkv_TGXH.split((qkv_TGXH.shape[2] - 2, 1, 1), dim=2)
        if self._qk_norm is QkNorm.HEAD:
            q_TGQH, k_TG1H = self.q_layernorm(q_TGQH), self.k_layernorm(k_TG1H)
        elif self._qk_norm is QkNorm.FULL:
            q_TGQH = self.q_layernorm(q_TGQH.flatten(1)).view(q_TGQH.shape)
            k_TG1H = self.k_layernorm(k_TG1H.flatten(1)).view(k_TG1H.shape)
        if self._qkv_clip is not None:
            q_TGQH, k_TG1H, v_TG1H = (x.clamp(-self._qkv_clip, self._qkv_clip) for x in (q_TGQH, k_TG1H, v_TG1H))
        qk_TGXH = rotate(torch.cat((q_TGQH, k_TG1H), dim=2), inputs.cos_T1R, inputs.sin_T1R)
        return qk_TGXH[:, :, :-1], qk_TGXH[:, :, -1], v_TG1H[:, :, 0]


def _decode_context(stage: StageBatch, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache entry of every context position, int64 [B, S], and which positions count, bool [B, S].

    A position beyond the row's context stands for its first one, which is always written: its score is masked, and
    masking alone would not do, as 0 * NaN is NaN.
    """
    device = stage.context_lens_B.device
    block_table_BM, num_rows = stage.block_table_BM, stage.num_decode_rows
    num_positions = block_table_BM.shape[1] * block_size
    if device.type == "cpu" and num_rows:
        num_positions = int(stage.context_lens_B.max())
    position_S = torch.arange(num_positions, device=device)
    is_context_BS = position_S < stage.context_lens_B[:, None]
    position_BS = position_S * is_context_BS
    entry_BS = block_table_BM.gather(1, position_BS // block_size) * block_size + position_BS % block_size
    return entry_BS, is_context_BS


def _chunk_context(chunk: PrefillChunk, block_size: int) -> ChunkInputs:
    num_rows = chunk.end - chunk.start
    device = chunk.block_table_M.device
    position_S = torch.arange(chunk.position + num_rows, device=device)
    entry_S = chunk.block_table_M[position_S // block_size] * block_size + position_S % block_size
    mask_CS = position_S <= position_S[chunk.position :, None] if chunk.position else None
    return ChunkInputs(chunk.start, chunk.end, entry_S, mask_CS)


def _attend_decode(
    q_BGQH: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, inputs: StageInputs
) -> torch.Tensor:
    """Return [B, N * H]. The queries of a KV head stand where a sequence would, so K and V are not repeated."""
    k_BGSH, v_BGSH = (
        cache.index_select(0, inputs.entry_BS.view(-1)).view(*inputs.entry_BS.shape, *cache.shape[1:]).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    attended_BGQH = F.scaled_dot_product_attention(q_BGQH, k_BGSH, v_BGSH, attn_mask=inputs.mask_B11S)
    return attended_BGQH.reshape(len(q_BGQH), -1)


def _attend_chunk(
    q_CGQH: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, chunk: ChunkInputs
) -> torch.Tensor:
    """Return [C, N * H]."""
    q_GQCH = q_CGQH.permute(1, 2, 0, 3)
    num_queries = q_GQCH.shape[1]
    k_GQSH, v_GQSH = (
        cache.index_select(0, chunk.entry_S).transpose(0, 1)[:, None].expand(-1, num_queries, -1, -1)
        for cache in (k_cache, v_cache)
    )
    attended_GQCH = F.scaled_dot_product_attention(
        q_GQCH, k_GQSH, v_GQSH, attn_mask=chunk.mask_CS, is_causal=chunk.mask_CS is None
    )
    return attended_GQCH.permute(2, 0, 1, 3).reshape(len(q_CGQH), -1)
