"""Ranks, roles, names and slices."""

import pytest

from afd_megatron.topology import Role, Topology, contiguous_slice


def test_attention_ranks_come_first() -> None:
    topology = Topology(3, 2)
    assert (list(topology.attention_ranks), list(topology.ffn_ranks), topology.world_size) == ([0, 1, 2], [3, 4], 5)
    assert [topology.roles(rank) for rank in (2, 3)] == [(Role.ATTENTION,), (Role.FFN,)]
    assert (topology.role_rank(2, Role.ATTENTION), topology.role_rank(4, Role.FFN)) == (2, 1)


def test_colocated_rank_has_both_roles_under_one_number() -> None:
    topology = Topology(2, 2, colocated=True)
    assert topology.world_size == 2
    assert topology.roles(1) == (Role.ATTENTION, Role.FFN)
    assert topology.role_rank(1, Role.FFN) == topology.role_rank(1, Role.ATTENTION) == 1


def test_tp_ranks_lie_side_by_side() -> None:
    topology = Topology(6, 4, attention_tp=3, ffn_tp=2)
    assert [list(topology.tp_ranks(rank)) for rank in (0, 2, 3, 5)] == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    with pytest.raises(AssertionError):
        Topology(3, 1, attention_tp=2)


def test_rank_is_called_by_number_and_role() -> None:
    assert Topology(2, 2).name(3) == "rank 3 (ffn 1)"
    assert Topology(2, 2, colocated=True).name(1) == "rank 1 (attention 1, ffn 1)"


@pytest.mark.parametrize(("num_attention", "num_ffn", "colocated"), [(0, 1, False), (1, 0, False), (2, 1, True)])
def test_impossible_topology_is_refused(num_attention: int, num_ffn: int, colocated: bool) -> None:
    with pytest.raises(AssertionError):
        Topology(num_attention, num_ffn, colocated)


@pytest.mark.parametrize("total", [0, 1, 7, 8, 256])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_slices_are_contiguous_complete_and_differ_by_at_most_one(total: int, num_parts: int) -> None:
    parts = [contiguous_slice(total, num_parts, index) for index in range(num_parts)]
    assert [item for part in parts for item in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(map(len, parts), reverse=True) == list(map(len, parts))
