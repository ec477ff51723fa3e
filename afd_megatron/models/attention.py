"""Self-attention over a paged KV cache, on Megatron's projections. Knows no requests, no FFN.

T rows of one stage, B decode rows, C rows of a prompt's chunk, S context, G KV heads, Q query heads per KV head,
N = G * Q query heads, H head dim, R rotated dims of a head, D hidden, M blocks per request.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from afd_megatron.engine.batch import PrefillChunk, StageBatch
from afd_megatron.families.base import ModelShape, QkNorm
from afd_megatron.models.kv_cache import KvCache
from afd_megatron.models.rope import Rotation, rotate
from afd_megatron.models.tensor_parallel import SharedRmsNorm


class ChunkInputs(NamedTuple):
    """A prompt's rows `start..end - 1` of the stage, where their context lies, and what each row may see of it.

    `mask_CS` (bool) is None for a chunk that starts its prompt and sees all of it, which is plainly causal.
    """

    start: int
    end: int
    entry_S: torch.Tensor
    mask_CS: torch.Tensor | None


class Context(NamedTuple):
    """What the rows of a stage may see through one window: decode rows, and the chunks of prompts.

    A decode row reads `entry_BS` (int64) and adds `mask_B11S` (0 or -inf, model's dtype) to its scores.
    """

    entry_BS: torch.Tensor
    mask_B11S: torch.Tensor
    chunks: tuple[ChunkInputs, ...]


class StageInputs(NamedTuple):
    """What all layers of a stage share: rotary factors, cache entries to write, and contexts by window (None: all).

    `cos_T1R` and `sin_T1R` are those of `Rotation.factors`.
    """

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor
    cache_index_T: torch.Tensor
    contexts: dict[int | None, Context]


def prepare_stage(
    stage: StageBatch, rotation: Rotation, windows: Collection[int | None], *, block_size: int, dtype: torch.dtype
) -> StageInputs:
    """Compute what the layers of a step share.

    No decode row waits for the device. On a CPU the context is cut to the longest row, elsewhere it is as wide as the
    block table, so that shapes depend on no value.
    """
    cos_TR, sin_TR = rotation.factors(stage.positions_T)
    contexts = {}
    for window in windows:
        entry_BS, mask_BS = _decode_context(stage, block_size, window)
        contexts[window] = Context(
            entry_BS,
            torch.zeros_like(mask_BS, dtype=dtype).masked_fill_(~mask_BS, float("-inf"))[:, None, None],
            tuple(_chunk_context(chunk, block_size, window) for chunk in stage.prefill),
        )
    return StageInputs(cos_TR[:, None], sin_TR[:, None], stage.cache_index_T, contexts)


class PagedSelfAttention(SelfAttention):
    """Megatron's self-attention with keys and values in a `KvCache`; rows are flat, each with its own position."""

    def __init__(self, config: TransformerConfig, *args: Any, shape: ModelShape, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._qk_norm, self._qkv_clip = shape.qk_norm, shape.qkv_clip
        self._window = shape.windows[self.layer_number - 1] if shape.windows else None
        self.sinks = None
        num_heads, num_groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        if shape.has_sinks:
            self.sinks = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
        if shape.qk_norm is QkNorm.FULL:  # Megatron made them for one head
            self.q_layernorm, self.k_layernorm = (
                SharedRmsNorm(
                    count * shape.head_dim, config.layernorm_epsilon, self.pg_collection.tp, config.params_dtype
                )
                for count in (num_heads, num_groups)
            )

    def forward(self, normed_TD: torch.Tensor, inputs: StageInputs, cache: KvCache) -> torch.Tensor:
        """Write K and V of all rows, then let each row attend to its context; return [T, D]."""
        layer = self.layer_number - 1
        q_TGQH, k_TGH, v_TGH = self._project(normed_TD, inputs)
        cache.write(layer, inputs.cache_index_T, k_TGH, v_TGH)
        k_cache, v_cache = cache.layer(layer)
        context = inputs.contexts[self._window]
        num_decode = len(context.entry_BS)
        sink_GQ = None if self.sinks is None else self.sinks.view(q_TGQH.shape[1:3])
        parts = []
        if num_decode:
            parts.append(_attend_decode(q_TGQH[:num_decode], k_cache, v_cache, context, sink_GQ))
        for chunk in context.chunks:
            parts.append(_attend_chunk(q_TGQH[chunk.start : chunk.end], k_cache, v_cache, chunk, sink_GQ))
        attended_TN = parts[0] if len(parts) == 1 else torch.cat(parts)
        out_TD, bias_D = self.linear_proj(attended_TN)
        return out_TD if bias_D is None else out_TD + bias_D

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


def _decode_context(stage: StageBatch, block_size: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache entry of every position a row sees, int64 [B, S], and which of them count, bool [B, S].

    A position beyond the row's context stands for the first one it sees, which is always written: its score is masked,
    and masking alone would not do, as 0 * NaN is NaN.
    """
    lens_B, block_table_BM = stage.context_lens_B, stage.block_table_BM
    num_positions = block_table_BM.shape[1] * block_size
    if lens_B.device.type == "cpu" and stage.num_decode_rows:
        num_positions = int(lens_B.max())
    first_B1 = torch.zeros_like(lens_B)[:, None]
    if window is not None:
        num_positions = min(num_positions, window)
        first_B1 = (lens_B - window).clamp_min(0)[:, None]
    offset_S = torch.arange(num_positions, device=lens_B.device)
    is_context_BS = first_B1 + offset_S < lens_B[:, None]
    position_BS = first_B1 + offset_S * is_context_BS
    entry_BS = block_table_BM.gather(1, position_BS // block_size) * block_size + position_BS % block_size
    return entry_BS, is_context_BS


def _chunk_context(chunk: PrefillChunk, block_size: int, window: int | None) -> ChunkInputs:
    end = chunk.position + chunk.end - chunk.start
    first = 0 if window is None else max(0, chunk.position - window + 1)
    position_S = torch.arange(first, end, device=chunk.block_table_M.device)
    entry_S = chunk.block_table_M[position_S // block_size] * block_size + position_S % block_size
    if end == len(position_S) == chunk.end - chunk.start and (window is None or end <= window):
        return ChunkInputs(chunk.start, chunk.end, entry_S, None)
    row_C1 = position_S[chunk.position - first :, None]
    mask_CS = position_S <= row_C1
    if window is not None:
        mask_CS &= position_S > row_C1 - window
    return ChunkInputs(chunk.start, chunk.end, entry_S, mask_CS)


def _attend_decode(
    q_BGQH: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: Context, sink_GQ: torch.Tensor | None
) -> torch.Tensor:
    """Return [B, N * H]. The queries of a KV head stand where a sequence would, so K and V are not repeated."""
    entry_BS = context.entry_BS
    k_BGSH, v_BGSH = (
        cache.index_select(0, entry_BS.view(-1)).view(*entry_BS.shape, *cache.shape[1:]).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    attended_BGQH = _attend(q_BGQH, k_BGSH, v_BGSH, context.mask_B11S, sink_GQ)
    return attended_BGQH.reshape(len(q_BGQH), -1)


def _attend_chunk(
    q_CGQH: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, chunk: ChunkInputs, sink_GQ: torch.Tensor | None
) -> torch.Tensor:
    """Return [C, N * H]."""
    q_GQCH = q_CGQH.permute(1, 2, 0, 3)
    num_queries = q_GQCH.shape[1]
    k_GQSH, v_GQSH = (
        cache.index_select(0, chunk.entry_S).transpose(0, 1)[:, None].expand(-1, num_queries, -1, -1)
        for cache in (k_cache, v_cache)
    )
    sink_GQ1 = None if sink_GQ is None else sink_GQ[:, :, None]
    attended_GQCH = _attend(q_GQCH, k_GQSH, v_GQSH, chunk.mask_CS, sink_GQ1)
    return attended_GQCH.permute(2, 0, 1, 3).reshape(len(q_CGQH), -1)


def _attend(
    q_XYZH: torch.Tensor,
    k_XYSH: torch.Tensor,
    v_XYSH: torch.Tensor,
    mask: torch.Tensor | None,
    sink_YZ: torch.Tensor | None,
) -> torch.Tensor:
    """Return what each query attends to, [X, Y, Z, H]; without a mask it sees the keys up to its own place.

    A sink is one more key, which only a dim of its own in each query meets, and whose value is 0.
    """
    if sink_YZ is None:
        return F.scaled_dot_product_attention(q_XYZH, k_XYSH, v_XYSH, attn_mask=mask, is_causal=mask is None)
    scale = q_XYZH.shape[-1] ** -0.5
    sink_XYZ1 = (sink_YZ / scale).expand(q_XYZH.shape[:3])[..., None]
    k_XYSH, v_XYSH = F.pad(k_XYSH, (0, 1, 0, 1)), F.pad(v_XYSH, (0, 0, 0, 1))
    k_XYSH[..., -1, -1] = 1
    if mask is None:
        mask = torch.ones(q_XYZH.shape[2], k_XYSH.shape[2] - 1, dtype=torch.bool, device=q_XYZH.device).tril()
    mask = F.pad(mask, (0, 1), value=mask.dtype is torch.bool)
    query = torch.cat((q_XYZH, sink_XYZ1), dim=-1)
    return F.scaled_dot_product_attention(query, k_XYSH, v_XYSH, attn_mask=mask, scale=scale)
