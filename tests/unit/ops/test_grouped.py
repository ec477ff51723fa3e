"""grouped_product: the kernel for CPU cores against its plain twin."""

from collections.abc import Iterator

import pytest
import torch

from afd_megatron.ops import grouped
from afd_megatron.ops.grouped import grouped_product, grouped_product_plain
from afd_megatron.ops.grouped_cpu import grouped_product_cpu


@pytest.fixture(autouse=True)
def keep_num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_groups(seed: int, counts: list[int], num_inner: int, num_outer: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x_PK = torch.randn(sum(counts), num_inner, generator=generator)
    matrix_GNK = torch.randn(len(counts), num_outer, num_inner, generator=generator) / num_inner**0.5
    return x_PK, torch.tensor(counts), matrix_GNK


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("counts", [[0], [1], [0, 0, 7, 0], [1, 2, 3, 4, 5], [8, 9, 0, 40], [64, 1]], ids=str)
@pytest.mark.parametrize(("num_inner", "num_outer"), [(1, 1), (20, 63), (33, 64), (96, 129)])
def test_kernel_equals_plain_twin(num_threads: int, counts: list[int], num_inner: int, num_outer: int) -> None:
    torch.set_num_threads(num_threads)
    x_PK, count_G, matrix_GNK = random_groups(sum(counts), counts, num_inner, num_outer)
    fast = grouped_product_cpu(x_PK, count_G.cumsum(0), matrix_GNK)
    torch.testing.assert_close(fast, grouped_product_plain(x_PK, count_G, matrix_GNK), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_row_of_the_kernel_depends_on_nothing_but_row_and_matrix(num_threads: int) -> None:
    x_PK, _, matrix_GNK = random_groups(1, [23], 100, 70)
    torch.set_num_threads(2)
    together = grouped_product_cpu(x_PK, torch.tensor([23]), matrix_GNK)
    torch.set_num_threads(num_threads)
    for first in (0, 1, 2, 3, 22):
        for last in {first + 1, min(first + 6, 23), 23}:
            part = grouped_product_cpu(x_PK[first:last], torch.tensor([last - first]), matrix_GNK)
            assert torch.equal(part, together[first:last]), (first, last)


def test_kernel_keeps_nan_and_infinity() -> None:
    x_PK, count_G, matrix_GNK = random_groups(2, [3, 3], 40, 8)
    x_PK[1, 7], x_PK[4, 7] = float("nan"), float("inf")
    fast = grouped_product_cpu(x_PK, count_G.cumsum(0), matrix_GNK)
    assert fast[1].isnan().all()
    assert fast[4].isinf().all()
    assert fast[[0, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("is_blas_slow", [False, True])
@pytest.mark.parametrize(
    ("counts", "num_inner", "dtype"),
    [([3, 2], 16, torch.float32), ([40, 50], 2048, torch.float32), ([3, 2], 16, torch.bfloat16)],
    ids=["kernel", "long rows in number", "bfloat16"],
)
def test_whichever_way_is_taken_equals_products_one_by_one(
    counts: list[int],
    num_inner: int,
    dtype: torch.dtype,
    is_blas_slow: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped, "_is_blas_slow_on_few_rows", lambda: is_blas_slow)
    x_PK, count_G, matrix_GNK = (values.to(dtype) for values in random_groups(3, counts, num_inner, 24))
    count_G = count_G.long()
    groups = x_PK.split(counts)
    expected = torch.cat([group @ matrix.t() for group, matrix in zip(groups, matrix_GNK, strict=True)])
    torch.testing.assert_close(grouped_product(x_PK, count_G, matrix_GNK), expected)


def test_rows_that_do_not_lie_in_order_are_read_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_is_blas_slow_on_few_rows", lambda: True)
    x_KP, count_G, matrix_GNK = random_groups(4, [16], 16, 5)
    torch.testing.assert_close(grouped_product(x_KP.t(), count_G, matrix_GNK)[:, 0], x_KP.t() @ matrix_GNK[0, 0])
