"""Multi-head latent attention over a paged cache of latents. Knows no requests, no FFN.

T rows of one stage, B decode rows, S context, N heads, P dims of a head without position, R rotated ones, V dims of a
head's values, C latent dims, D hidden. Source: DeepSeek-V2, arXiv 2405.04434, 2.1, absorbed projections there too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from afd_megatron.families.base import ModelShape
from afd_megatron.models.attention import ChunkInputs, Context, StageInputs
from afd_megatron.models.kv_cache import KvCache
from afd_megatron.models.rope import rotate

_LATENT_NORM_EPS = 1e-6  # of these two norms, whatever the model's own; as in transformers


class PagedLatentAttention(MegatronModule):
    """Latent attention by Megatron's names (MLASelfAttention), which itself expands the cache and needs a GPU.

    A cache entry is the row's normed latent and its rotated key. Decode rows attend to latents as one KV head, their
    queries taken through the key half of linear_kv_up_proj and what they attended to through its value half; the rows
    of a prompt's chunk attend to expanded keys and values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        shape: ModelShape,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        latent, rope_dim = shape.latent, shape.rope.num_dims
        assert latent is not None
        self.layer_number = layer_number
        self._latent, self._num_heads = latent, shape.num_heads // pg_collection.tp.size()
        yarn = shape.rope.yarn
        self._scale = shape.head_dim**-0.5 * (1.0 if yarn is None else yarn.latent_factor)
        hidden, head_dim, dtype = shape.hidden_size, shape.head_dim, config.params_dtype

        def column(size_in: int, size_out: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                size_in,
                size_out,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=pg_collection.tp,
            )

        if latent.q_rank is None:
            self.linear_q_proj = column(hidden, shape.num_heads * head_dim)
        else:
            self.linear_q_down_proj = torch.nn.Linear(hidden, latent.q_rank, bias=False, dtype=dtype)
            self.q_layernorm = WrappedTorchNorm(config, latent.q_rank, _LATENT_NORM_EPS)
            self.linear_q_up_proj = column(latent.q_rank, shape.num_heads * head_dim)
        self.linear_kv_down_proj = torch.nn.Linear(hidden, latent.kv_rank + rope_dim, bias=False, dtype=dtype)
        self.kv_layernorm = WrappedTorchNorm(config, latent.kv_rank, _LATENT_NORM_EPS)
        self.linear_kv_up_proj = column(latent.kv_rank, shape.num_heads * (latent.plain_dim + latent.v_dim))
        self.linear_proj = RowParallelLinear(
            shape.num_heads * latent.v_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=pg_collection.tp,
        )

    def forward(self, normed_TD: torch.Tensor, inputs: StageInputs, cache: KvCache) -> torch.Tensor:
        """Write the latents of all rows, then let each row attend to its context; return [T, D]."""
        layer = self.layer_number - 1
        plain_TNP, turned_TNR = self._queries(normed_TD, inputs)
        cache.write(layer, inputs.cache_index_T, self._entries(normed_TD, inputs))
        (entries,) = cache.layer(layer)
        context = inputs.contexts[None]
        num_decode = len(context.entry_BS)
        parts = []
        if num_decode:
            parts.append(self._attend_decode(plain_TNP[:num_decode], turned_TNR[:num_decode], entries, context))
        for chunk in context.chunks:
            query_TNH = torch.cat((plain_TNP[chunk.start : chunk.end], turned_TNR[chunk.start : chunk.end]), dim=-1)
            parts.append(self._attend_chunk(query_TNH, entries, chunk))
        attended_TX = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.linear_proj(attended_TX)[0]

    def _queries(self, normed_TD: torch.Tensor, inputs: StageInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each head's query without position [T, N, P], and the rotated rest [T, N, R]."""
        if self._latent.q_rank is None:
            query = self.linear_q_proj(normed_TD)[0]
        else:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(normed_TD)))[0]
        query_TNH = query.view(len(normed_TD), self._num_heads, -1)
        return query_TNH[..., : self._latent.plain_dim], self._turn(query_TNH[..., self._latent.plain_dim :], inputs)

    def _entries(self, normed_TD: torch.Tensor, inputs: StageInputs) -> torch.Tensor:
        """Return each row's cache entry [T, C + R]."""
        down_TX = self.linear_kv_down_proj(normed_TD)
        kv_rank = self._latent.kv_rank
        key_TR = self._turn(down_TX[:, None, kv_rank:], inputs)[:, 0]
        return torch.cat((self.kv_layernorm(down_TX[:, :kv_rank]), key_TR), dim=-1)

    def _turn(self, x_TNR: torch.Tensor, inputs: StageInputs) -> torch.Tensor:
        """Rotate; pairs that lie side by side are taken apart, for queries and keys alike."""
        if self._latent.has_pairs_side_by_side:
            x_TNR = torch.cat((x_TNR[..., 0::2], x_TNR[..., 1::2]), dim=-1)
        return rotate(x_TNR[:, :, None], inputs.cos_T1R, inputs.sin_T1R)[:, :, 0]

    def _attend_decode(
        self, plain_BNP: torch.Tensor, turned_BNR: torch.Tensor, entries: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """Return [B, N * V]."""
        latent = self._latent
        up_NXC = self.linear_kv_up_proj.weight.view(self._num_heads, -1, latent.kv_rank)
        key_NPC, value_NVC = up_NXC.split((latent.plain_dim, latent.v_dim), dim=1)
        absorbed_BNC = torch.bmm(plain_BNP.transpose(0, 1), key_NPC).transpose(0, 1)
        query_B1NX = torch.cat((absorbed_BNC, turned_BNR), dim=-1)[:, None]
        entry_B1SX = entries.index_select(0, context.entry_BS.view(-1)).view(*context.entry_BS.shape, -1)[:, None]
        attended_B1NC = F.scaled_dot_product_attention(
            query_B1NX, entry_B1SX, entry_B1SX[..., : latent.kv_rank], context.mask_B11S, scale=self._scale
        )
        attended_NBV = torch.bmm(attended_B1NC[:, 0].transpose(0, 1), value_NVC.transpose(1, 2))
        return attended_NBV.transpose(0, 1).reshape(len(plain_BNP), -1)

    def _attend_chunk(self, query_TNH: torch.Tensor, entries: torch.Tensor, chunk: ChunkInputs) -> torch.Tensor:
        """Return [rows of the chunk, N * V]."""
        latent = self._latent
        entry_SX = entries.index_select(0, chunk.entry_S)
        up_SNX = self.linear_kv_up_proj(entry_SX[:, : latent.kv_rank])[0].view(len(entry_SX), self._num_heads, -1)
        plain_SNP, value_SNV = up_SNX.split((latent.plain_dim, latent.v_dim), dim=-1)
        turned_SNR = entry_SX[:, None, latent.kv_rank :].expand(-1, self._num_heads, -1)
        attended_NTV = F.scaled_dot_product_attention(
            query_TNH.transpose(0, 1)[None],
            torch.cat((plain_SNP, turned_SNR), dim=-1).transpose(0, 1)[None],
            value_SNV.transpose(0, 1)[None],
            chunk.mask_CS,
            is_causal=chunk.mask_CS is None,
            scale=self._scale,
        )[0]
        return attended_NTV.transpose(0, 1).reshape(len(query_TNH), -1)
