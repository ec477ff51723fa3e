"""One step's rows as tensors, cut into stages and padded. Knows requests and KV blocks, no model, no roles.

T rows of one stage (in helpers: of the whole step), P places for them with padding, B decode rows, N rows to sample,
M blocks per request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from afd_megatron.engine.scheduler import Schedule


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

    `token_ids_T`, `positions_T`: int64 [T]. `cache_index_T`: int64 [T], block * block_size + offset that the row's K
    and V are written to; padded rows write to scratch block 0. `block_table_BM`: int64 [B, M], unused entries 0.
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


def make_stages(
    schedule: Schedule, *, real: Sequence[int], padded: Sequence[int], block_size: int, device: torch.device
) -> tuple[StageBatch, ...]:
    """Return a step's rows cut in order into stages of `real[stage]` rows, each padded to `padded[stage]`.

    A prompt's rows may span stages, later rows in later stages. Only a step without prompt rows may be padded.
    All stages are views of the same few tensors on `device`.
    """
    num_decode, num_rows = len(schedule.block_table_BM), len(schedule.token_ids_T)
    assert sum(real) == num_rows, (real, num_rows)
    assert tuple(real) == tuple(padded) or num_rows == num_decode, (real, padded, num_decode)
    starts, places = np.cumsum((0, *real)), np.cumsum((0, *padded))  # of stages: in the schedule, in the tensors
    places_T = np.concatenate([place + np.arange(count) for place, count in zip(places, real, strict=False)])
    num_places = places[-1]
    num_decode_places = num_places if num_rows == num_decode else num_decode

    rows_3P = np.zeros((3, num_places), np.int64)
    rows_3P[:, places_T] = schedule.token_ids_T, schedule.positions_T, _cache_index(schedule, block_size)
    block_table_BM = np.zeros((num_decode_places, schedule.block_table_BM.shape[1]), np.int64)
    block_table_BM[places_T[:num_decode]] = schedule.block_table_BM
    context_lens_B = rows_3P[1, :num_decode_places] + 1
    sample_rows_N = np.array(schedule.sample_rows, np.int64)
    sample_bounds = np.searchsorted(sample_rows_N, starts)
    sample_rows_N -= np.repeat(starts[:-1], np.diff(sample_bounds))

    token_ids_P, positions_P, cache_index_P = torch.from_numpy(rows_3P).to(device)
    tables_BM, lens_B, samples_N = (
        torch.from_numpy(values).to(device) for values in (block_table_BM, context_lens_B, sample_rows_N)
    )
    chunks = _chunks_by_stage(schedule, starts, block_size, device)
    stages = []
    for stage, prefill in enumerate(chunks):
        rows = slice(places[stage], places[stage + 1])
        decode_rows = slice(*np.minimum((rows.start, rows.stop), num_decode_places))
        stages.append(
            StageBatch(
                token_ids_T=token_ids_P[rows],
                positions_T=positions_P[rows],
                cache_index_T=cache_index_P[rows],
                block_table_BM=tables_BM[decode_rows],
                context_lens_B=lens_B[decode_rows],
                prefill=tuple(prefill),
                sample_rows_N=samples_N[sample_bounds[stage] : sample_bounds[stage + 1]],
            )
        )
    return tuple(stages)


def _cache_index(schedule: Schedule, block_size: int) -> np.ndarray:
    """Return where each row's K and V go, int64 [T]."""
    num_decode = len(schedule.block_table_BM)
    block_T, offset_T = np.divmod(schedule.positions_T, block_size)
    parts = [schedule.block_table_BM[np.arange(num_decode), block_T[:num_decode]]]
    end = num_decode
    for prompt in schedule.prompts:
        start, end = end, end + prompt.num_rows
        parts.append(prompt.block_table_M[block_T[start:end]])
    return np.concatenate(parts) * block_size + offset_T


def _chunks_by_stage(
    schedule: Schedule, starts: np.ndarray, block_size: int, device: torch.device
) -> list[list[PrefillChunk]]:
    """Cut the prompts' rows at the borders of stages; `starts` holds those borders."""
    by_stage: list[list[PrefillChunk]] = [[] for _ in starts[1:]]
    end = len(schedule.block_table_BM)
    for prompt in schedule.prompts:
        start, end = end, end + prompt.num_rows
        table_M = torch.from_numpy(prompt.block_table_M).to(device)
        for stage, (stage_start, stage_end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
            first, last = max(start, stage_start), min(end, stage_end)
            if first < last:
                position = prompt.position + first - start
                num_blocks = -(-(position + last - first) // block_size)
                chunk = PrefillChunk(first - stage_start, last - stage_start, position, table_M[:num_blocks])
                by_stage[stage].append(chunk)
    return by_stage
