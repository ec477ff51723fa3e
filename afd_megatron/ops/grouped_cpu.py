"""Products of few rows each with many matrices on CPU cores, in float32. Knows no routing, no experts.

P rows in all, G groups, K inner, N outer.
"""

import numba
import torch

_BLOCK = 64  # rows of a matrix that stay in a core's cache while the rows of a group pass
_PASS = 8  # rows of a group that stay in the nearest cache while such a block passes
_FASTMATH = {"reassoc", "nsz", "contract"}  # vector sums; unlike with "fast", NaN and infinity keep their meaning


def grouped_product_cpu(x_PK: torch.Tensor, end_G: torch.Tensor, matrix_GNK: torch.Tensor) -> torch.Tensor:
    """Return what `grouped_product` does. All tensors are contiguous, `end_G` int64, the others float32.

    Matrices are streamed from memory once as they lie; a BLAS packs each before it multiplies, which takes longer than
    the product itself when there are 2 to 16 rows. A row's result depends on the row and the matrix alone, neither on
    the other rows of its group nor on the number of threads.
    """
    y_PN = x_PK.new_empty(len(x_PK), matrix_GNK.shape[1])
    num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num_threads)
    _multiply(x_PK.numpy(), end_G.numpy(), matrix_GNK.numpy(), num_threads, y_PN.numpy())
    return y_PN


@numba.njit(fastmath=_FASTMATH, inline="always")
def _tile(x_PK, rows, matrix_NK, n, y_PN):  # type: ignore[no-untyped-def]
    """Compute column n of 4 rows of y. One code for all rows, so that each is summed in the same order."""
    r0, r1, r2, r3 = rows
    x0, x1, x2, x3, weight = x_PK[r0], x_PK[r1], x_PK[r2], x_PK[r3], matrix_NK[n]
    y0 = y1 = y2 = y3 = x_PK.dtype.type(0)
    for k in range(x_PK.shape[1]):
        y0 += x0[k] * weight[k]
        y1 += x1[k] * weight[k]
        y2 += x2[k] * weight[k]
        y3 += x3[k] * weight[k]
    y_PN[r0, n], y_PN[r1, n], y_PN[r2, n], y_PN[r3, n] = y0, y1, y2, y3


@numba.njit("void(f4[:,::1], i8[::1], f4[:,:,::1], i8, f4[:,::1])", parallel=True, cache=True, fastmath=_FASTMATH)
def _multiply(x_PK, end_G, matrix_GNK, num_threads, y_PN):  # type: ignore[no-untyped-def]
    """Deal blocks of the matrices to the threads in turn, so that uneven groups keep all of them busy."""
    num_groups, num_columns = matrix_GNK.shape[0], matrix_GNK.shape[1]
    num_blocks = (num_columns + _BLOCK - 1) // _BLOCK
    for thread in numba.prange(num_threads):
        for task in range(thread, num_groups * num_blocks, num_threads):
            group, block = task // num_blocks, task % num_blocks
            start, end = end_G[group - 1] if group else 0, end_G[group]
            columns = range(block * _BLOCK, min((block + 1) * _BLOCK, num_columns))
            for first in range(start, end, _PASS):
                for n in columns:
                    for r in range(first, min(first + _PASS, end), 4):
                        rows = (r, min(r + 1, end - 1), min(r + 2, end - 1), min(r + 3, end - 1))
                        _tile(x_PK, rows, matrix_GNK[group], n, y_PN)
