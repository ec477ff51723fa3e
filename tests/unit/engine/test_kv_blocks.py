import pytest

from afd_megatron.engine.kv_blocks import BlockPool


def test_the_scratch_block_is_never_handed_out() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    assert sorted(pool.allocate(8)) == [1, 2, 3, 4]


def test_a_part_of_a_block_counts_as_a_block() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    assert [len(pool.allocate(num_tokens)) for num_tokens in (16, 17)] == [1, 2]


def test_blocks_can_be_had_again_once_they_are_free() -> None:
    pool = BlockPool(num_blocks=3, block_size=1)
    blocks = pool.allocate(2)
    assert not pool.can_allocate(1)
    pool.free(blocks)
    assert sorted(pool.allocate(2)) == sorted(blocks)


def test_more_than_the_pool_holds_can_never_be_had() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    assert pool.can_ever_allocate(8) and not pool.can_ever_allocate(9)


def test_freeing_twice_is_refused() -> None:
    pool = BlockPool(num_blocks=3, block_size=1)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="is free already"):
        pool.free(blocks)


def test_freeing_the_scratch_block_is_refused() -> None:
    with pytest.raises(AssertionError, match="block 0 is free already"):
        BlockPool(num_blocks=3, block_size=1).free([0])


def test_allocating_more_than_is_free_is_refused() -> None:
    with pytest.raises(AssertionError):
        BlockPool(num_blocks=3, block_size=1).allocate(3)
