"""A disk behind the host, in dictionaries: blocks by name, which come and go through units of the host."""

from collections.abc import Sequence

from model.cache import Order


class Disk:
    """Blocks by name, in so many slots, 0 if there is no disk; `policy` is the manager's `eviction_policy`.

    Blocks get their slots when they go to the host, and are read when it has lost them. Copies begin one
    after the other, and all end at `end_copies`.
    """

    def __init__(self, slots: int, policy: str) -> None:
        self.slots, self.policy = slots, policy
        self.blocks: Order[int] = Order(policy)
        self.written: dict[int, None] = {}
        """Blocks that are here, in the order in which they were written."""
        self.writing: list[list[int]] = []
        """Blocks that are being written, in runs. They cannot be read yet."""
        self.before: dict[int, int] = {}
        """Of each block that was ever part of a prompt, the one before it."""
        self.read: list[list[int]] = []
        """Blocks that are being read, in runs."""
        self.stored = self.loaded = self.evictions = 0

    def __contains__(self, name: int) -> bool:
        return name in self.written and not any(name in run for run in self.writing)

    def learn(self, names: Sequence[int]) -> None:
        """These follow each other in a prompt."""
        self.before.update(zip(names[1:], names, strict=False))

    def write(self, names: Sequence[int]) -> None:
        """They go to the host. What is here already is not written."""
        self.writing.append([])
        for name in names if self.slots else ():
            if name in self.written:
                continue
            if len(self.written) == self.slots:
                if not self.blocks:
                    continue
                victim = self.blocks.pop()
                del self.written[victim]
                self.evictions += 1
            self.written[name] = None
            self.writing[-1].append(name)

    def load(self, names: Sequence[int]) -> None:
        """They are found again, and not evicted while they are read."""
        self.blocks.found.update(names)
        for name in names:
            self.blocks.remove(name)
        self.read.append(list(names))

    def end_copies(self) -> None:
        """What was read was used just now, and then what was written."""
        for run in [*self.read, *self.writing]:
            for name in reversed(run):
                self.blocks.push(name)
        self.loaded += sum(map(len, self.read))
        self.stored += sum(map(len, self.writing))
        self.read, self.writing = [], []

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
        """Blocks in the order in which they go after a restart.

        A block was used when the last of those that follow it was written; the deeper goes first.
        """
        used = {name: when for when, name in enumerate(self.written)}
        by_depth = sorted(self.written, key=self.depth, reverse=True)
        for name in by_depth:
            before = self.before.get(name)
            if before in used:
                used[before] = max(used[before], used[name])
        return sorted(by_depth, key=used.__getitem__)

    def depth(self, name: int) -> int:
        """How many blocks are before it."""
        depth = 0
        while name in self.before:
            name, depth = self.before[name], depth + 1
        return depth
