"""One step's rows as tensors, cut into stages and padded. Knows requests and KV blocks, no model, no roles.

T rows of one stage, B decode rows of it, M blocks per request.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows `start..end - 1` of a stage: consecutive prompt tokens of one request, the first at `position`.

    Each row attends to positions 0 up to its own. `block_table_M` int64 [M] covers position + (end - start) tokens.
    """

    start: int
    end: int
    position: int
    block_table_M: torch.Tensor


@dataclass(frozen=True, slots=True)
class StageBatch:
    """Rows of one stage on one attention rank: decode rows (padded ones last), then prefill rows.

    `token_ids_T`, `positions_T`: int64 [T]. `cache_index_T`: int64 [T], block * block_size + offset that the row's K and
    V are written to; padded rows write to scratch block 0. `block_table_BM`: int64 [B, M], unused entries 0.
    `context_lens_B`: int64 [B], tokens a decode row attends to, itself included (1 for a padded row).
    `sample_rows_N`: int64 [N], rows whose logits are wanted, in the schedule's order.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    cache_index_T: torch.Tensor
    block_table_BM: torch.Tensor
    context_lens_B: torch.Tensor
    prefill: tuple[PrefillChunk, ...]
    sample_rows_N: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.token_ids_T.shape[0]

    @property
    def num_decode_rows(self) -> int:
        return self.context_lens_B.shape[0]
