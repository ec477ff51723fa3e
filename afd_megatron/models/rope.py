"""Rotary positions: factors, and the turn itself. Knows no model.

T rows, G x X heads, H head dim, R rotated dims of a head.
"""

import math

import torch

from afd_megatron.families.base import RopeShape, YarnShape


class Rotation:
    """The factors that turn queries and keys of a model, in its dtype, on its device."""

    def __init__(self, shape: RopeShape, dtype: torch.dtype, device: torch.device) -> None:
        # computed on the CPU as in transformers, so that all devices have the same frequencies
        self._frequency_R = rope_frequencies(shape).repeat(2).to(device)
        self._factor = 1.0 if shape.yarn is None else shape.yarn.attention_factor
        self._dtype = dtype

    def factors(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [T, R] in the model's dtype; a pair's angle is at i (-sin there) and at i + R / 2."""
        angle_TR = positions_T[:, None].float() * self._frequency_R
        sin_TR = angle_TR.sin()
        sin_TR[:, : sin_TR.shape[1] // 2].neg_()
        return angle_TR.cos().mul_(self._factor).to(self._dtype), sin_TR.mul_(self._factor).to(self._dtype)


def rotate(x_TGXH: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Turn pairs (i, i + R / 2) of the first R dims of every head by the row's factors."""
    num_dims = cos_T1R.shape[-1]
    x_TGXR = x_TGXH[..., :num_dims]
    first, second = x_TGXR.chunk(2, dim=-1)
    rotated = torch.cat((second, first), dim=-1).mul_(sin_T1R[:, :, None]).addcmul_(x_TGXR, cos_T1R[:, :, None])
    return rotated if num_dims == x_TGXH.shape[-1] else torch.cat((rotated, x_TGXH[..., num_dims:]), dim=-1)


def rope_frequencies(shape: RopeShape) -> torch.Tensor:
    """Return the angle per position of each pair of dims, float32 [R / 2].

    With YaRN, fast pairs keep theirs, slow ones are stretched by the factor, those between are blended.
    Source: transformers, modeling_rope_utils; arXiv 2309.00071, 3.2.
    """
    period = shape.theta ** (torch.arange(0, shape.num_dims, 2, dtype=torch.float32) / shape.num_dims)
    yarn = shape.yarn
    if yarn is None:
        return 1.0 / period
    low, high = _turns_to_dim(yarn.beta_fast, shape, yarn), _turns_to_dim(yarn.beta_slow, shape, yarn)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.num_dims - 1)
    pair = torch.arange(shape.num_dims // 2, dtype=torch.float32)
    stretched = ((pair - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return 1.0 / (yarn.factor * period) * stretched + 1.0 / period * (1 - stretched)


def _turns_to_dim(num_turns: float, shape: RopeShape, yarn: YarnShape) -> float:
    """Return the (fractional) pair that turns so often over the original context."""
    turns = math.log(yarn.original_max_positions / (num_turns * 2 * math.pi))
    return shape.num_dims * turns / (2 * math.log(shape.theta))
