"""Draws the next tokens from logits. Knows no scheduling, no ranks: a draw depends on the request alone.

N rows, V vocabulary.
"""

import hashlib
from collections.abc import Sequence

import torch

from afd_megatron.engine.request import Request, SampledToken, SamplingParams

_GREEDY_BELOW = 1e-5  # a lower temperature is greedy, as in vLLM: the division would overflow


@torch.inference_mode()
def sample(
    logits_NV: torch.Tensor, requests: Sequence[Request], positions: Sequence[int], *, vocab_size: int
) -> list[SampledToken]:
    """Draw one token per row.

    Args:
        logits_NV: float32 [N, V]; columns from `vocab_size` on are padding and never win.
        requests: whose tokens they are, one per row.
        positions: of the new tokens in their sequences.
        vocab_size: real size of the vocabulary.

    Returns:
        The tokens in row order; logprobs are of the raw logits, before temperature and filters.
    """
    assert logits_NV.shape[0] == len(requests) == len(positions), (logits_NV.shape, len(requests), len(positions))
    logits_NV = logits_NV[:, :vocab_size]
    token_ids = logits_NV.argmax(dim=-1).tolist()  # the first, hence lowest, id on ties
    drawn = [row for row, request in enumerate(requests) if request.sampling.temperature >= _GREEDY_BELOW]
    if drawn:
        params = [requests[row].sampling for row in drawn]
        uniforms = [uniform(requests[row], positions[row]) for row in drawn]
        for row, token_id in zip(drawn, _draw(logits_NV[drawn], params, uniforms), strict=True):
            token_ids[row] = token_id
    sampled = [SampledToken(token_id) for token_id in token_ids]
    wanted = [row for row, request in enumerate(requests) if request.sampling.logprobs]
    if wanted:
        nums_top = [requests[row].sampling.logprobs for row in wanted]
        with_logprobs = _logprobs(logits_NV[wanted], [token_ids[row] for row in wanted], nums_top)
        for row, token in zip(wanted, with_logprobs, strict=True):
            sampled[row] = token
    return sampled


def uniform(request: Request, position: int) -> float:
    """Return the number in [0, 1) that decides one draw: a hash of (seed, request id, sample, position)."""
    counter = f"{request.sampling.seed}:{request.sample}:{position}:{request.id}"
    digest = hashlib.blake2b(counter.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _draw(logits_NV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """Draw by inverting the cumulative distribution over token ids.

    Source: vLLM v1 sampler: temperature, min-p, top-k, top-p, in this order, each on what the one before left.
    """
    vocab_size = logits_NV.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits_NV.device)[:, None]

    scores_NV = logits_NV.double() / column([each.temperature for each in params])
    if any(each.min_p for each in params):
        probs_NV = scores_NV.softmax(dim=-1)
        least_N1 = column([each.min_p for each in params]) * probs_NV.amax(dim=-1, keepdim=True)
        scores_NV = scores_NV.masked_fill(probs_NV < least_N1, -torch.inf)
    nums_kept = [min(each.top_k or vocab_size, vocab_size) for each in params]
    if min(nums_kept) < vocab_size or any(each.top_p < 1 for each in params):
        sorted_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
        last_N1 = column(nums_kept).long() - 1
        sorted_NV = sorted_NV.masked_fill(sorted_NV < sorted_NV.gather(1, last_N1), -torch.inf)
        probs_NV = sorted_NV.softmax(dim=-1)
        above_NV = probs_NV.cumsum(dim=-1) - probs_NV  # of the more likely ones; 0 for the first, which always stays
        top_p_N1 = column([each.top_p if each.top_p < 1 else torch.inf for each in params])  # the sum may round up to 1
        sorted_NV = sorted_NV.masked_fill(above_NV >= top_p_N1, -torch.inf)
        scores_NV = torch.empty_like(scores_NV).scatter_(1, order_NV, sorted_NV)
    cdf_NV = scores_NV.softmax(dim=-1).cumsum(dim=-1)
    cdf_NV = cdf_NV / cdf_NV[:, -1:]  # ends at exactly 1, above every uniform
    return torch.searchsorted(cdf_NV, column(uniforms), right=True)[:, 0].tolist()


def _logprobs(logits_NV: torch.Tensor, token_ids: Sequence[int], nums_top: Sequence[int]) -> list[SampledToken]:
    logprobs_NV = logits_NV.float().log_softmax(dim=-1)
    chosen = logprobs_NV.gather(1, torch.tensor(token_ids, device=logits_NV.device)[:, None])[:, 0].tolist()
    values_NK, ids_NK = logprobs_NV.topk(min(max(nums_top), logits_NV.shape[1]), dim=-1)
    top = [list(zip(ids, values, strict=True)) for ids, values in zip(ids_NK.tolist(), values_NK.tolist(), strict=True)]
    return [
        SampledToken(token_id, logprob, tuple(pairs[:num_top]))
        for token_id, logprob, pairs, num_top in zip(token_ids, chosen, top, nums_top, strict=True)
    ]
