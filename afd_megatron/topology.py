"""Which rank has which role, and who are its peers. Knows no tensors, no process groups."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    ATTENTION = "attention"
    FFN = "ffn"


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of one job: attention ranks first, then FFN ranks; under `colocated` each rank is both.

    `num_attention` and `num_ffn` are free of each other, except that `colocated` wants them equal. Each `attention_tp`
    attention ranks in a row serve the same requests and share the heads, each `ffn_tp` FFN ranks hold the same experts
    and share their width.
    """

    num_attention: int
    num_ffn: int
    colocated: bool = False
    attention_tp: int = 1
    ffn_tp: int = 1

    def __post_init__(self) -> None:
        assert self.num_attention % self.attention_tp == self.num_ffn % self.ffn_tp == 0, self
        assert self.num_attention >= 1 and self.num_ffn >= 1, (self.num_attention, self.num_ffn)
        assert not self.colocated or self.num_attention == self.num_ffn, (self.num_attention, self.num_ffn)

    @property
    def world_size(self) -> int:
        return self.num_attention if self.colocated else self.num_attention + self.num_ffn

    @property
    def attention_ranks(self) -> range:
        """World ranks of attention, by role rank."""
        return range(self.num_attention)

    @property
    def ffn_ranks(self) -> range:
        """World ranks of FFN, by role rank."""
        first = 0 if self.colocated else self.num_attention
        return range(first, first + self.num_ffn)

    def roles(self, rank: int) -> tuple[Role, ...]:
        if self.colocated:
            return (Role.ATTENTION, Role.FFN)
        return (Role.ATTENTION,) if rank in self.attention_ranks else (Role.FFN,)

    def role_rank(self, rank: int, role: Role) -> int:
        ranks = self.attention_ranks if role is Role.ATTENTION else self.ffn_ranks
        return ranks.index(rank)

    def tp_ranks(self, attention: int) -> range:
        """Return the role ranks of attention that serve the same requests as role rank `attention`."""
        first = attention - attention % self.attention_tp
        return range(first, first + self.attention_tp)

    def name(self, rank: int) -> str:
        """How messages call a rank, for example `rank 3 (ffn 1)`."""
        parts = [f"{role} {self.role_rank(rank, role)}" for role in self.roles(rank)]
        return f"rank {rank} ({', '.join(parts)})"


def contiguous_slice(total: int, num_parts: int, index: int) -> range:
    """Return part `index` of `range(total)` cut in contiguous parts whose sizes differ by at most one, larger first."""
    assert 0 <= index < num_parts, (index, num_parts)
    size, extra = divmod(total, num_parts)
    start = index * size + min(index, extra)
    return range(start, start + size + (index < extra))


def contiguous_slices(total: int, num_parts: int) -> tuple[range, ...]:
    """Return all parts of `contiguous_slice`, in order."""
    return tuple(contiguous_slice(total, num_parts, index) for index in range(num_parts))
