"""What attention keeps of past rows on one attention rank, in blocks. Knows no requests, no model code.

T rows, G KV heads of this TP rank, H head dim, C latent dims, R rotated dims.
"""

import math

import torch

from afd_megatron.errors import ConfigError
from afd_megatron.families.base import ModelShape


class KvCache:
    """K and V of every layer, each [num_blocks * block_size, G, H], or one latent with the rotated key, [.., C + R].

    Block 0 is scratch.

    Memory is not cleared: an entry that no row has written holds anything, NaN included, and must not be read.

    Raises:
        ConfigError: the device has not enough memory.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tp: int = 1,
    ) -> None:
        self.block_size = block_size
        num_parts, size = 2, torch.Size((len(shape.kv_heads(0, tp)), shape.head_dim))
        if shape.latent is not None:
            num_parts, size = 1, torch.Size((shape.latent.kv_rank + shape.rope.num_dims,))
        entries = (shape.num_layers, num_parts, num_blocks * block_size, *size)
        try:
            self._entries = torch.empty(entries, dtype=dtype, device=device)
        except RuntimeError as error:
            size = math.prod(entries) * dtype.itemsize / 1e9
            raise ConfigError(f"engine.kv_blocks: {num_blocks - 1} take {size:.1f} GB, which are not there") from error
        self._layers = [layer.unbind() for layer in self._entries.unbind()]

    @property
    def num_bytes(self) -> int:
        return self._entries.nbytes

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return K and V of a layer, or its latents."""
        return self._layers[layer]

    def write(self, layer: int, cache_index_T: torch.Tensor, *values: torch.Tensor) -> None:
        """Store each row's K and V, or its latent, at its index (block * block_size + offset)."""
        for entries, value in zip(self._layers[layer], values, strict=True):
            entries.index_copy_(0, cache_index_T, value)
