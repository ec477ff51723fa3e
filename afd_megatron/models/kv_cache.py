"""Keys and values of one attention rank in blocks. Knows no requests, no model code.

T rows, G KV heads, H head dim.
"""

import torch

from afd_megatron.families.base import ModelShape


class KvCache:
    """K and V of every layer as [num_blocks * block_size, G, H]; block 0 is scratch.

    Memory is not cleared: an entry that no row has written holds anything, NaN included, and must not be read.
    """

    def __init__(
        self, shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        entries = (shape.num_layers, 2, num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
        self._entries = torch.empty(entries, dtype=dtype, device=device)
        self._layers = [tuple(layer.unbind()) for layer in self._entries.unbind()]

    @property
    def num_bytes(self) -> int:
        return self._entries.nbytes

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer, each [num_blocks * block_size, G, H]."""
        k, v = self._layers[layer]
        return k, v

    def write(self, layer: int, cache_index_T: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor) -> None:
        """Store each row's K and V at its index (block * block_size + offset)."""
        k, v = self._layers[layer]
        k.index_copy_(0, cache_index_T, k_TGH)
        v.index_copy_(0, cache_index_T, v_TGH)
