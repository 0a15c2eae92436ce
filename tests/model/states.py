"""Groups whose pages hold no tokens: states, of which a row has one a block at most, and pages to work in."""

from collections.abc import Sequence

from model.copying import Copying
from model.pool import NULL, Pool
from model.requests import Plan, Request
from model.windows import Cross, Lasting, Recurrent


class States(Copying):
    """What requests do with the pages of such groups."""

    def blocks(self, tokens: int) -> int:
        """That hold so many tokens."""
        return -(-tokens // self.page_size)

    def state_block(self, position: int) -> int:
        """The block in whose place the state after so many tokens lies."""
        return max(position - 1, 0) // self.page_size

    def has_states(self, request: Request, position: int, newest: int) -> bool:
        """Whether the request has the states after so many tokens.

        Live pages have those after the `newest` token that is computed or on the way; any other page was left
        behind at the end of its block.
        """
        if position in (0, newest):
            return True
        block = self.state_block(position)
        rows = zip(self.pools, request.rows, strict=True)
        states = [row[block] for pool, row in rows if isinstance(pool.kind, Recurrent)]
        return not states or (position % self.page_size == 0 and all(states))

    def fresh_states(self, request: Request, pool: Pool, row: Sequence[int], start: int) -> int:
        """New pages that a forward from `start` on takes, but for copies."""
        if isinstance(pool.kind, Lasting):
            return 0 if row else pool.kind.lasting(request.encoder, self.page_size)
        return int(start == 0)

    def must_copy_state(self, plan: Plan, group: int, leaving: int) -> bool:
        """Whether a forward goes on from a copy of its state: others have it, or are going to."""
        request, pool = plan.request, self.pools[group]
        if not isinstance(pool.kind, Recurrent) or not plan.start:
            return False
        if plan.end or self.is_snapshot(request, pool.kind, plan.start):
            return True
        return self.must_copy(pool, request.rows[group][self.state_block(plan.start)], leaving)

    def is_snapshot(self, request: Request, kind: Recurrent, position: int) -> bool:
        """Whether the request leaves its state after so many tokens to others."""
        return self.publishes(request) and kind.keeps(position, request.context, self.page_size)

    def take_states(self, plan: Plan, group: int) -> None:
        """The live page comes to the block of the last token that the forward computes.

        It may be a new page: of zeros at the beginning, else a copy. What is stored, or going to be, stays
        where it is until the forward behind it is done; a page that others hold is theirs.
        """
        request, pool = plan.request, self.pools[group]
        row, kind = request.rows[group], pool.kind
        new = self.take_pages(pool, plan.fresh[group])
        row += new
        if not isinstance(kind, Cross):
            self.fill(pool, new)
        if not isinstance(kind, Recurrent):
            return
        old, newest = self.state_block(plan.start), self.state_block(plan.start + plan.active)
        before = row[old]
        stays = before in pool.stored or self.is_snapshot(request, kind, plan.start)
        if plan.copied[group]:
            if stays:
                pool.hold(before)
            self.copy_on_write(pool, row, old)
        live, row[old] = row[old], before if stays and plan.copied[group] else NULL
        row += [NULL] * (newest + 1 - len(row))
        row[newest] = live

    def drop_states(self, request: Request, position: int) -> None:
        """Lets go of the states after more tokens."""
        for pool, row in zip(self.pools, request.rows, strict=True):
            if isinstance(pool.kind, Recurrent):
                for page in filter(None, row[self.blocks(position) :]):
                    pool.let_go(page)
                del row[self.blocks(position) :]

    def take_page_fills(self, pool: Pool) -> list[int]:
        """They are zeroed now, each once, but for those that were given back since."""
        fills = dict.fromkeys(page for where, page in self.page_fills if where is pool)
        self.page_fills = [fill for fill in self.page_fills if fill[0] is not pool]
        held = [page for page in fills if pool.references[page] or pool.touched[page]]
        if pool.slab is not None:
            pool.foreign |= fills.keys() - set(held)  # of whoever takes them next
        return held
