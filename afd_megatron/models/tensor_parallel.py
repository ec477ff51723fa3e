"""What attention ranks that share the heads do together. Knows no layer, no requests.

T rows of a stage, of which each TP rank dispatches a shard of X; D hidden, N rows, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F

from afd_megatron.errors import PeerError
from afd_megatron.plan import split_rows
from afd_megatron.topology import contiguous_slice


class TensorParallel:
    """The TP ranks of one attention rank, which call the same things in the same order; one rank alone sends nothing.

    Every rank has all rows of a stage. Only what is with the FFN ranks lies in shards, as `split_rows` cuts them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    @contextmanager
    def naming_peers(self) -> Iterator[None]:
        """Run collectives, also those of Megatron's modules.

        Raises:
            PeerError: one of the other ranks is gone or late.
        """
        try:
            yield
        except RuntimeError as error:
            if "gloo" not in str(error):
                raise
            peers = [rank for rank in dist.get_process_group_ranks(self._group) if rank != dist.get_rank()]
            names = f"{'one of ' * (len(peers) > 1)}rank {', '.join(map(str, peers))}"
            raise PeerError(f"{names}: sum or gather of TP ranks: connection lost or not done in time") from error

    def shard(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, a view [X, D]; none where there are fewer rows than ranks."""
        mine = contiguous_slice(len(x_TD), self.size, self.rank)
        return x_TD[mine.start : mine.stop]

    def gather(self, shard_XD: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the rows of all shards [T, D]."""
        if self.size == 1:
            return shard_XD
        num_places = -(-num_rows // self.size)
        padded = F.pad(shard_XD, (0, 0, 0, num_places - len(shard_XD)))
        places = padded.new_empty(self.size, *padded.shape)
        dist.all_gather(list(places), padded, group=self._group)
        if num_rows == self.size * num_places:
            return places.flatten(0, 1)
        return torch.cat([rows[:count] for rows, count in zip(places, split_rows(num_rows, self.size), strict=True)])

    def gather_columns(self, part_NX: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks [N, V], those of the first one first."""
        if self.size == 1:
            return part_NX
        parts = part_NX.new_empty(self.size, *part_NX.shape)
        dist.all_gather(list(parts), part_NX.contiguous(), group=self._group)
        return parts.transpose(0, 1).flatten(1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x


class SharedRmsNorm(torch.nn.Module):
    """RMS norm over all heads, of which each rank has some; where several ranks have the same, all heads have copies.

    So the mean of squares over all copies is that over the heads.
    """

    def __init__(self, size: int, eps: float, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype))
        self._eps = eps
        self._tensor_parallel = TensorParallel(group)

    def forward(self, x_TX: torch.Tensor) -> torch.Tensor:
        x = x_TX.float()
        square_T1 = self._tensor_parallel.sum(x.square().mean(dim=-1, keepdim=True)) / self._tensor_parallel.size
        return (x * torch.rsqrt(square_T1 + self._eps)).to(x_TX.dtype) * self.weight
