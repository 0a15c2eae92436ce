"""Blocks of which the cache has a part: what a request left partly filled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence

from model.pool import Content, Pool
from model.requests import Request, Token


def is_plain(tokens: Sequence[object]) -> bool:
    """Whether the tokens are nothing but that: no image lies on them."""
    return not any(isinstance(token, tuple) for token in tokens)


class Tails(ABC):
    """Tails are stored in each pool's `tree` like blocks, under all tokens up to where they end."""

    page_size: int
    pools: list[Pool]
    counts: Counter[str]
    stores_tails = False

    @property
    def of_blocks(self) -> list[int]:
        """The groups whose pages are blocks."""
        return [group for group, pool in enumerate(self.pools) if pool.has_blocks]

    @abstractmethod
    def publishes(self, request: Request) -> bool:
        """Whether what the request computes is stored."""

    def is_tail(self, content: Content) -> bool:
        return len(content[1]) % self.page_size > 0

    def blocks_in(self, pool: Pool) -> dict[Content, int]:
        """What a pool has stored, without tails."""
        return {content: page for content, page in pool.tree.items() if not self.is_tail(content)}

    def is_whole(self, content: Content) -> bool:
        """Whether every group of blocks has it."""
        return all(content in self.pools[group].tree for group in self.of_blocks)

    def siblings(self, namespace: object, tokens: Sequence[Token]) -> Iterator[Content]:
        """What the first group of blocks has of the block in which the tokens end, also with other tokens.

        Images are no part of it.
        """
        first = (len(tokens) - 1) // self.page_size * self.page_size
        for content in list(self.pools[self.of_blocks[0]].tree):
            space, other = content
            follows = space == namespace and other[:first] == tuple(tokens[:first])
            if follows and 0 < len(other) - first <= self.page_size and is_plain(other[first:]):
                yield content

    def store_tail(self, request: Request) -> int | None:
        """The request gives its pages back: what it has computed of a block stays. Gives the first page."""
        computed = min(request.processed, len(request.known))
        block, rest = divmod(computed, self.page_size)
        tokens = tuple(request.tokens[:computed])
        if not rest or not self.stores_tails or not self.publishes(request):
            return None
        if request.offered != block or request.over:
            return None
        rows = [request.rows[group] for group in self.of_blocks]
        if not is_plain(tokens[-rest:]) or any(len(row) <= block for row in rows):
            return None
        pools, pages = [self.pools[group] for group in self.of_blocks], [row[block] for row in rows]
        for pool, page in zip(pools, pages, strict=True):
            if pool.references[page] != 1 or page in pool.stored:
                return None
        content = request.namespace, tokens
        if any(other[1][:computed] == tokens for other in self.siblings(*content)):
            return None
        shorter = self.longest_tail_in(content)
        kept = request.kept(block, self.page_size)
        for pool, page in zip(pools, pages, strict=True):
            pool.store(content, page)
            if kept is not None:
                pool.retain(page, *kept)
        self.counts["stored_tails"] += 1
        if shorter is not None:
            self.drop_tail(shorter)
        return pages[0]

    def longest_tail_in(self, content: Content) -> Content | None:
        """The longest tail that the last block of `content` begins with."""
        namespace, tokens = content
        tails = [
            other
            for other in self.siblings(namespace, tokens)
            if self.is_tail(other) and tokens[: len(other[1])] == other[1]
        ]
        return max(tails, key=lambda other: len(other[1]), default=None)

    def replace_tail(self, content: Content) -> None:
        """Every group has this block now: it stands for its tail, too."""
        tail = self.longest_tail_in(content)
        if is_plain(content[1][-self.page_size :]) and tail is not None:
            self.drop_tail(tail)

    def drop_tail(self, content: Content) -> None:
        for pool in self.pools:
            if content in pool.tree:
                pool.forget(pool.tree[content])
