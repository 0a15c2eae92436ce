"""A disk behind the host, in dictionaries: blocks by name, which come and go through units of the host."""

from collections.abc import Sequence

from model.cache import Order


class Disk:
    """Blocks by name, in so many slots, 0 if there is no disk; `policy` is the manager's `eviction_policy`.

    Blocks are written when they have come to the host, and read when it has lost them. Copies begin one after
    the other, and all end at `end_copies`.
    """

    def __init__(self, slots: int, policy: str) -> None:
        self.slots, self.policy = slots, policy
        self.blocks: Order[int] = Order(policy)
        self.written: dict[int, None] = {}
        """Blocks that are here, in the order in which they were written."""
        self.read: list[list[int]] = []
        """Blocks that are being read, in runs."""
        self.stored = self.loaded = self.evictions = 0

    def __contains__(self, name: int) -> bool:
        return name in self.written

    def write(self, names: Sequence[int]) -> None:
        """They have come to the host. What is here already is not written; what is new was used just now."""
        new = []
        for name in names if self.slots else ():
            if name in self.written:
                continue
            if len(self.written) == self.slots:
                victim = self.blocks.pop()
                del self.written[victim]
                self.evictions += 1
            self.written[name] = None
            new.append(name)
        for name in reversed(new):
            self.blocks.push(name)
        self.stored += len(new)

    def load(self, names: Sequence[int]) -> None:
        """They are found again, and not evicted while they are read."""
        self.blocks.found.update(names)
        for name in names:
            self.blocks.remove(name)
        self.read.append(list(names))

    def end_reads(self) -> None:
        """What was read was used just now."""
        for run in self.read:
            for name in reversed(run):
                self.blocks.push(name)
            self.loaded += len(run)
        self.read = []

    def touch(self, names: Sequence[int]) -> None:
        """A prefix was used on the device. The block at its end goes before those that lead to it."""
        for name in reversed(names):
            if name in self.blocks:
                self.blocks.remove(name)
                self.blocks.push(name)

    def restart(self) -> None:
        """What was found again is not remembered, and who was used when."""
        self.blocks = Order(self.policy)
        for name in self.order_after_restart():
            self.blocks.push(name)
        self.stored = self.loaded = self.evictions = 0

    def order_after_restart(self) -> Sequence[int]:
        """Blocks in the order in which they go after a restart: that in which they were written."""
        return list(self.written)
