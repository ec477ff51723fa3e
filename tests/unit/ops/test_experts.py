"""run_experts against its plain twin."""

import pytest
import torch

from afd_megatron.ops.experts import run_experts, run_experts_plain
from afd_megatron.routing import Routing

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 32, 20, 3


def random_experts(seed: int, num_experts: int = NUM_EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up_EXD = torch.randn(num_experts, 2 * WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
    return gate_up_EXD, torch.randn(num_experts, HIDDEN, WIDTH, generator=generator) / WIDTH**0.5


def random_rows(seed: int, num_rows: int, allowed: list[int]) -> tuple[torch.Tensor, Routing]:
    """Return rows whose experts are drawn from `allowed`."""
    generator = torch.Generator().manual_seed(seed)
    hidden_RD = torch.randn(num_rows, HIDDEN, generator=generator)
    picks = [torch.randperm(len(allowed), generator=generator)[:TOP_K] for _ in range(num_rows)]
    ids_RK = torch.tensor(allowed)[torch.stack(picks)] if num_rows else torch.empty(0, TOP_K)
    return hidden_RD, Routing(ids_RK.int(), torch.rand(num_rows, TOP_K, generator=generator))


@pytest.mark.parametrize("num_rows", [0, 1, 5, 64])
@pytest.mark.parametrize(("first", "last"), [(0, 8), (3, 6), (5, 5)])
def test_fast_way_equals_plain_twin(num_rows: int, first: int, last: int) -> None:
    gate_up_EXD, down_EDI = (weights[first:last] for weights in random_experts(1))
    hidden_RD, routing = random_rows(num_rows, num_rows, list(range(NUM_EXPERTS)))
    fast = run_experts(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=first)
    plain = run_experts_plain(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=first)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)


def test_slices_of_the_experts_add_up_to_all_of_them() -> None:
    gate_up_EXD, down_EDI = random_experts(2)
    hidden_RD, routing = random_rows(3, 16, list(range(NUM_EXPERTS)))
    whole = run_experts(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=0)
    bounds = ((0, 3), (3, 6), (6, 8))
    parts = [run_experts(hidden_RD, routing, gate_up_EXD[lo:hi], down_EDI[lo:hi], first_expert=lo) for lo, hi in bounds]
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=1e-5)


def test_rank_whose_experts_get_no_row_adds_nothing() -> None:
    gate_up_EXD, down_EDI = (weights[3:6] for weights in random_experts(12))
    hidden_RD, routing = random_rows(13, 8, [0, 1, 2, 6, 7])
    assert not run_experts(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=3).any()


@pytest.mark.parametrize("num_rows", [1, 40])
def test_experts_without_rows_read_no_garbage(num_rows: int) -> None:
    gate_up_EXD, down_EDI = random_experts(4)
    hidden_RD, routing = random_rows(5, num_rows, [1, 4, 6])
    expected = run_experts_plain(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=0)
    for expert in (0, 2, 3, 5, 7):
        gate_up_EXD[expert] = down_EDI[expert] = float("nan")
    dirty = [torch.full((size,), float("nan")) for size in (2**k for k in range(4, 17)) for _ in range(4)]
    del dirty
    torch.testing.assert_close(
        run_experts(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=0), expected, atol=1e-5, rtol=1e-5
    )


def test_a_row_of_garbage_does_not_reach_other_rows() -> None:
    gate_up_EXD, down_EDI = random_experts(6)
    hidden_RD, routing = random_rows(7, 12, list(range(NUM_EXPERTS)))
    expected = run_experts_plain(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=0)
    hidden_RD[4] = float("nan")
    fast = run_experts(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=0)
    others = [row for row in range(12) if row != 4]
    torch.testing.assert_close(fast[others], expected[others], atol=1e-5, rtol=1e-5)
    assert fast[4].isnan().all()


def test_bfloat16_sum_is_rounded_once() -> None:
    """With equal experts the sum is that of float32 weights; rounding each part would lose some of it."""
    gate_up_EXD, down_EDI = (weights[:1].expand(NUM_EXPERTS, -1, -1).bfloat16() for weights in random_experts(8))
    hidden_RD, routing = random_rows(9, 32, list(range(NUM_EXPERTS)))
    hidden_RD = hidden_RD.bfloat16()
    alone = Routing(routing.topk_ids[:, :1], torch.ones(32, 1))
    one_RD = run_experts(hidden_RD, alone, gate_up_EXD, down_EDI, first_expert=0).float()
    summed = run_experts(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=0)
    weight_R = routing.topk_weights.sum(dim=1)
    torch.testing.assert_close(summed.float(), one_RD * weight_R[:, None], rtol=2**-8, atol=0)


def test_two_experts_swapped_change_the_result() -> None:
    gate_up_EXD, down_EDI = random_experts(10)
    hidden_RD, routing = random_rows(11, 8, list(range(NUM_EXPERTS)))
    right = run_experts(hidden_RD, routing, gate_up_EXD, down_EDI, first_expert=0)
    swapped = [1, 0, *range(2, NUM_EXPERTS)]
    wrong = run_experts(hidden_RD, routing, gate_up_EXD[swapped], down_EDI[swapped], first_expert=0)
    assert (right - wrong).abs().max() > 0.1
