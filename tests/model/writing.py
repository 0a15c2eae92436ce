"""Which blocks of a device go to the tier behind it, and when: the three write policies."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice


class WriteThrough:
    """All blocks, when they are published.

    Like the other policies it is told what happens on the device, to blocks in the order of their prefix, and
    each time gives those that go to the tier now, in that order.

    Args:
        priority: gives a block's.
        min_hits: "selective_min_hits" of the manager.
        min_priority: the priority from which a block goes, of the manager too; None is no such priority.
    """

    def __init__(self, priority: Callable[[int], int], min_hits: int, min_priority: int | None) -> None:
        self.priority = priority
        self.min_hits = min_hits
        self.min_priority = min_priority

    def matters(self, block: int) -> bool:
        return self.min_priority is not None and self.priority(block) >= self.min_priority

    def published(self, blocks: Sequence[int]) -> Sequence[int]:
        """They are new on the device."""
        return blocks

    def hit(self, blocks: Sequence[int]) -> Sequence[int]:
        """They were found on the device."""
        return ()

    def took(
        self, pages: int, *, unused: int, idle: int, next_to_go: Iterable[int], in_copies: int = 0
    ) -> Sequence[int]:
        """A call took so many pages, at least one.

        Args:
            pages: so many.
            unused: pages that were never taken.
            idle: others that nobody holds.
            next_to_go: the blocks of these, in the order in which they would be evicted.
            in_copies: blocks that this gave and that are still being copied.
        """
        return ()

    def not_copied(self, blocks: Iterable[int]) -> None:
        """Of what `took` gave, the tier did not get these."""


class Selective(WriteThrough):
    """Blocks that matter, when they are published, and all at their hit of that number since."""

    def __init__(self, priority: Callable[[int], int], min_hits: int, min_priority: int | None) -> None:
        super().__init__(priority, min_hits, min_priority)
        self.hits: Counter[int] = Counter()

    def published(self, blocks: Sequence[int]) -> Sequence[int]:
        for block in blocks:
            del self.hits[block]
        return [block for block in blocks if self.matters(block)]

    def hit(self, blocks: Sequence[int]) -> Sequence[int]:
        self.hits.update(blocks)
        return [block for block in blocks if self.hits[block] == self.min_hits]


class OnEvict(WriteThrough):
    """Blocks that matter and are going to be evicted, each once since it was published."""

    def __init__(self, priority: Callable[[int], int], min_hits: int, min_priority: int | None) -> None:
        super().__init__(priority, min_hits, min_priority)
        self.ahead = 0
        """Pages that the next call may take: the most that one took, less a sixteenth for each call since."""
        self.gone: set[int] = set()

    def published(self, blocks: Sequence[int]) -> Sequence[int]:
        self.gone.difference_update(blocks)
        return ()

    def took(
        self, pages: int, *, unused: int, idle: int, next_to_go: Iterable[int], in_copies: int = 0
    ) -> Sequence[int]:
        """The next call should find its pages unused, or their blocks in the tier.

        Copies hold at most an eighth of the idle pages, so that the others can be taken meanwhile.
        """
        self.ahead = max(pages, self.ahead - self.ahead // 16)
        if unused >= self.ahead:
            return ()
        looked_at = islice(next_to_go, max(0, min(self.ahead, idle // 8 - in_copies)))
        going = [block for block in looked_at if self.matters(block) and block not in self.gone]
        self.gone.update(going)
        return going[::-1]

    def not_copied(self, blocks: Iterable[int]) -> None:
        self.gone.difference_update(blocks)


WRITE_POLICIES = {"write_through": WriteThrough, "selective": Selective, "on_evict": OnEvict}
