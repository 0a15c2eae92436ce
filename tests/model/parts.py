"""Parts of blocks that a request goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.copying import Copying
from model.pool import NULL, Content, Group, Pool
from model.requests import Part, Plan, Request
from model.tails import is_plain
from model.windows import Recurrent


class Parts(Copying):
    """Finds the block that has the most of what comes next, and gives its page or a copy of it."""

    def __init__(
        self,
        page_size: int,
        groups: Sequence[Group],
        *,
        parts: bool = False,
        copy_parts: bool = True,
        tails: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(page_size, groups, **options)
        parts = parts and not any(isinstance(pool.kind, Recurrent) for pool in self.pools)
        self.parts = parts
        self.copy_parts = copy_parts
        self.stores_tails = parts and tails

    def find_part(self, request: Request, start: int, end: int, taken: set[Content]) -> Part | None:
        """Behind token `start`, where a hit of `end` blocks ends, or the request stands if that is 0.

        The last token known is always computed. `taken` is what others of the batch take over.
        """
        block, rest = divmod(start, self.page_size)
        has_more = any(len(request.rows[group]) > block for group in self.of_blocks)
        if rest or max(request.offered, end) != block or has_more:
            return None
        known = request.known
        if not is_plain(known[start : start + self.page_size]):
            return None
        last = min(start + self.page_size, len(known)) - 1
        best = None
        for content in self.siblings(request.namespace, known[: start + 1]):
            run = 0
            while start + run < min(last, len(content[1])) and content[1][start + run] == known[start + run]:
                run += 1
            if run and self._is_usable(content, taken):
                rank = -run, content[1]
                best = min(best or (rank, content), (rank, content))
        if best is None:
            return None
        (run, tokens), content = best
        whole = self.is_tail(content) and len(tokens) == start - run
        takes = not self.copy_parts or (whole and not request.no_store and self._is_idle(content))
        return Part(content, -run, takes)

    def _is_usable(self, content: Content, taken: set[Content]) -> bool:
        if self.copy_parts:
            return self.is_whole(content)
        return self._is_idle(content) and content not in taken and not self._leads_on(content)

    def _is_idle(self, content: Content) -> bool:
        pools = [self.pools[group] for group in self.of_blocks]
        return all(pool.tree.get(content) in pool.idle for pool in pools)

    def _leads_on(self, content: Content) -> bool:
        namespace, tokens = content
        return any(
            space == namespace and len(other) > len(tokens) and other[: len(tokens)] == tokens
            for space, other in self._remembered()
            if not self.is_tail(content)
        )

    def enter_part(self, plan: Plan, before: Sequence[Plan]) -> None:
        """The last of a batch that would take over a block does; the others get copies."""
        for other in before:
            if plan.part and plan.part.takes_over and plan.part == other.part:
                other.part = plan.part._replace(takes_over=False)
                for group in self.of_blocks:
                    other.fresh[group] += 1

    def takes_over_a_hit(self, plans: Sequence[Plan]) -> bool:
        """Whether a block is to be taken over that is another's hit."""
        hits = {
            plan.request.content(block, self.page_size)
            for plan in plans
            for block in range(plan.request.offered, plan.end)
        }
        return any(plan.part and plan.part.takes_over and plan.part.content in hits for plan in plans)

    def claim_parts(self, plans: Sequence[Plan]) -> None:
        """Before any page is handed out, so that none of these pages is."""
        for plan in plans:
            if plan.part and not plan.part.takes_over:
                plan.sources = [pool.tree.get(plan.part.content, NULL) for pool in self.pools]
                for group in self.of_blocks:
                    self.pools[group].touch(plan.sources[group])
        for plan in plans:
            if plan.part:
                self._go_on(plan.request, plan.part, plan.start)

    def _go_on(self, request: Request, part: Part, start: int) -> None:
        if part.takes_over:
            for group in reversed(self.of_blocks):
                pool = self.pools[group]
                page = pool.tree[part.content]
                pool.hold(page)
                pool.forget(page)
                request.rows[group].append(page)
                if not self.is_tail(part.content):
                    self.told.removed(group, part.content)
        request.cached += part.run
        request.processed = start
        self.counts["late_reused_tokens" if request.admitted else "reused_tokens"] += part.run
        self.counts["partial_hits"] += 1
        self.counts["partial_tokens"] += part.run
        self.slide(request)

    def copy_part(self, pool: Pool, source: int, destination: int) -> None:
        pool.touch(destination)
        self.page_copies.append((pool, [source, destination]))
        self.counts["page_copies"] += 1
