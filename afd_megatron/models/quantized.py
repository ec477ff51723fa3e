"""Quantised tensors of a checkpoint as the plain ones they stand for. Knows no role, no family.

fp8 in blocks: NAME in float8_e4m3fn, NAME_scale_inv in float32 with one factor per block (DeepSeek-V3's checkpoints).
mxfp4: NAME_blocks uint8 [E, N, K / 32, 16], two values in a byte, the lower half first, and NAME_scales uint8
[E, N, K / 32] with the exponent of each 32 values; they stand for NAME [E, K, N] (GPT-OSS's checkpoints).
Source: OCP Microscaling Formats 1.0.
"""

from collections.abc import Mapping

import torch

from afd_megatron.models.sources import WeightSource

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCK_OF_MXFP4 = 32
_EXPONENT_BIAS = 127


class DequantizedSource:
    """Another source with its quantised tensors under their plain names and shapes, read in `dtype`."""

    def __init__(
        self, source: WeightSource, fp8_block: tuple[int, int] | None, dtype: torch.dtype = torch.float32
    ) -> None:
        """Wrap `source`; `fp8_block` is rows and columns of a block, None if there is no fp8."""
        self._dtype = dtype
        self._source = source
        self._fp8_block = fp8_block
        raw = source.shapes
        self._scaled = {name for name in raw if fp8_block and f"{name}_scale_inv" in raw}
        self._packed = {name.removesuffix("_blocks") for name in raw if name.endswith("_blocks")}
        self._packed = {name for name in self._packed if f"{name}_scales" in raw}
        hidden = {f"{name}_scale_inv" for name in self._scaled}
        hidden |= {f"{name}{kind}" for name in self._packed for kind in ("_blocks", "_scales")}
        shapes = {name: shape for name, shape in raw.items() if name not in hidden}
        for name in self._packed:
            num_experts, num_rows, num_blocks = raw[f"{name}_scales"]
            shapes[name] = (num_experts, num_blocks * _BLOCK_OF_MXFP4, num_rows)
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    @property
    def num_bytes_read(self) -> int:
        return self._source.num_bytes_read

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Return the part of a tensor, made of as few blocks as hold it."""
        if name in self._scaled:
            return self._read_fp8(name, part).to(self._dtype)
        if name in self._packed:
            return self._read_mxfp4(name, part).to(self._dtype)
        return self._source.read(name, part)

    def _read_mxfp4(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        experts, inputs, outputs = (*part, *[slice(None)] * 3)[:3]
        span = range(self.shapes[name][1])[inputs]
        blocks = slice(span.start // _BLOCK_OF_MXFP4, -(-span.stop // _BLOCK_OF_MXFP4))
        bytes_, scales = (
            self._source.read(f"{name}{kind}", (experts, outputs, blocks)) for kind in ("_blocks", "_scales")
        )
        values = dequantize_mxfp4(bytes_, scales).narrow(2, span.start % _BLOCK_OF_MXFP4, len(span))
        return values.transpose(1, 2)

    def _read_fp8(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        assert self._fp8_block is not None
        values = self._source.read(name, part).float()
        spans = [
            range(size)[slice_] for size, slice_ in zip(self.shapes[name], (*part, *[slice(None)] * 2), strict=False)
        ]
        blocks = [
            slice(span.start // size, -(-span.stop // size)) for span, size in zip(spans, self._fp8_block, strict=True)
        ]
        scales = self._source.read(f"{name}_scale_inv", tuple(blocks)).float()
        for dim, (span, size) in enumerate(zip(spans, self._fp8_block, strict=True)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, span.start % size, len(span))
        return values * scales


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., N, K] of uint8 blocks [..., N, K / 32, 16] and exponents [..., N, K / 32]."""
    values = torch.tensor(_FP4_VALUES, device=blocks.device)
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1)
    return torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - _EXPONENT_BIAS).flatten(-2)
