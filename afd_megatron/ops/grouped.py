"""Rows in groups, each group times its own matrix. Knows no routing, no experts. P rows, G groups, K inner, N outer."""

from functools import cache
from pathlib import Path

import torch

_NEAR_VALUES = 1 << 12  # float32 values of four rows that stay in a core's nearest cache beside what streams past


def grouped_product(x_PK: torch.Tensor, count_G: torch.Tensor, matrix_GNK: torch.Tensor) -> torch.Tensor:
    """Return y [P, N], a row of group g being `x_PK[p] @ matrix_GNK[g].T`, in the dtype of the arguments.

    Rows of a group follow each other, groups in order; `count_G` int64 holds their sizes, which sum to P.
    """
    num_rows, num_inner = x_PK.shape
    is_short = 4 * num_inner <= _NEAR_VALUES or num_rows * num_inner <= 4 * _NEAR_VALUES * len(count_G)
    if x_PK.device.type == "cpu" and x_PK.dtype == torch.float32 and is_short and _is_blas_slow_on_few_rows():
        from afd_megatron.ops.grouped_cpu import grouped_product_cpu  # numba is of no use elsewhere

        return grouped_product_cpu(x_PK.contiguous(), count_G.cumsum(0), matrix_GNK)
    return grouped_product_plain(x_PK, count_G, matrix_GNK)


def grouped_product_plain(x_PK: torch.Tensor, count_G: torch.Tensor, matrix_GNK: torch.Tensor) -> torch.Tensor:
    """Return what `grouped_product` does, one group after the other; reads `count_G` on the host."""
    y_PN = x_PK.new_empty(len(x_PK), matrix_GNK.shape[1])
    end = 0
    for group, count in enumerate(count_G.tolist()):
        start, end = end, end + count
        if count:
            torch.mm(x_PK[start:end], matrix_GNK[group].t(), out=y_PN[start:end])
    return y_PN


@cache
def _is_blas_slow_on_few_rows() -> bool:
    """Return whether packing a matrix takes longer than streaming it: so does MKL on cores that are not Intel's.

    Source: docs/perf/decode_cpu.md, measured on both. Another BLAS was not measured and is left as it is.
    """
    return torch.backends.mkl.is_available() and "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
