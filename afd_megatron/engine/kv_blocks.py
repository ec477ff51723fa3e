"""Which KV blocks are free. Knows no tensors, no requests."""


class BlockPool:
    """Blocks 1 up to `num_blocks` - 1; block 0 is scratch, where padded rows write, and is never handed out.

    A request takes at admission all blocks it may ever need, so a running one never waits for a block and nothing is
    preempted.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2 and block_size >= 1, (num_blocks, block_size)
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._is_taken = [False] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_allocate(self, num_tokens: int) -> bool:
        """Whether the empty pool would have room."""
        return self.num_blocks_for(num_tokens) <= self.num_usable

    def can_allocate(self, num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) <= self.num_free

    def allocate(self, num_tokens: int) -> list[int]:
        """Take the blocks that hold `num_tokens`, in the order of their positions."""
        assert self.can_allocate(num_tokens), (num_tokens, self.num_free)
        blocks = [self._free.pop() for _ in range(self.num_blocks_for(num_tokens))]
        for block in blocks:
            self._is_taken[block] = True
        return blocks

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self._is_taken[block], f"block {block} is free already"
            self._is_taken[block] = False
        self._free.extend(reversed(blocks))
