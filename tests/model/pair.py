"""A manager with real bytes and the model of its tiers, which serve the same requests one after the other.

Each copy is over before the next call, so that the outcome does not depend on threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pagekeeper as pk
from model.engine import manager
from model.three_tiers import Found, ThreeTiers
from model.visits import Names, conversation
from pagekeeper.traces import read_trace


@dataclass
class Request:
    """Prompt and output as tokens, and a name for each full block of both."""

    tokens: Any
    prompt: int
    names: list[int]

    @property
    def output(self) -> int:
        return len(self.tokens) - self.prompt


class Pair:
    """A manager with a host tier, perhaps before a disk, and the model of all; `min_hits` is for "selective".

    Args:
        page_size: of the cache.
        pages: on the device.
        units: in host memory.
        policy: which blocks go next.
        write_policy: when blocks go to the host.
        min_hits: for "selective".
        place: the directory of the disk tier; None is none.
        slots: blocks that it has room for, at least; a few more may be.
    """

    def __init__(
        self,
        page_size: int,
        pages: int,
        units: int,
        policy: str,
        write_policy: str,
        min_hits: int = 2,
        place: Path | None = None,
        slots: int = 0,
    ) -> None:
        self.page_size = page_size
        self.name = f"{policy}, {pages} pages, {units} units, {slots} slots"
        self.memory = np.full((pages + 1, page_size), -1)
        memory = self.memory.view(np.uint8)
        disk: dict[str, Any] = {}
        if place is not None:
            slot = -(-memory.shape[1] // 4096) * 4096 + 256
            disk = {
                "disk_offload_dir": place,
                "disk_offload_max_gb": slot * (slots + 16) / 2**30,
                "fsync": "none",
            }
        config = pk.KVConnectorConfig(
            type="rust_tiered", host_offload_max_gb=units * memory.shape[1] / 2**30, **disk
        )
        self.new_manager = partial(
            manager,
            pages,
            page_size,
            n_kv_heads=1,
            head_dim=1,
            num_layers=1,
            kv_connector_config=config,
            buffers=[memory],
            eviction_policy=policy,
            write_policy=write_policy,
            selective_min_hits=min_hits,
            model_name="m",
        )
        self.kv = self.new_manager()
        slots = self.counted("disk_units")
        self.model = ThreeTiers(page_size, pages, units, policy, write_policy, min_hits, slots)
        self.found = Found(0, 0)
        """In all requests together."""

    def counted(self, name: str) -> int:
        return self.kv.metrics().get(f"connector_{name}", 0)

    def restart(self) -> None:
        """Stops the manager when all is written, and makes another one."""
        assert self.kv.flush()
        self.check()
        self.kv.shutdown()
        self.memory[:] = -1
        self.kv = self.new_manager()
        self.model.restart()

    def serve(self, request: Request) -> None:
        """The model and the manager find the same blocks in the same places."""
        expected = self.model.serve(request.names, request.prompt, request.output)
        assert self.serve_for_real(request) == expected, self.name
        counted = self.kv.metrics()
        assert counted["evictions"] == self.model.device.evictions, self.name
        assert counted["connector_host_evicted_blocks"] == self.model.host.evictions, self.name
        assert counted.get("connector_disk_evicted_blocks", 0) == self.model.disk.evictions, self.name
        self.found = Found(*map(sum, zip(self.found, expected, strict=True)))

    def serve_for_real(self, request: Request) -> Found:
        """The prompt in one forward, all of the output in a second, as accepted drafts would be."""
        ctx = pk.TextContext("one", request.tokens[: request.prompt])
        self.kv.claim(ctx)
        found = self.find(ctx)
        first = ctx.processed_length // self.page_size
        assert (self.memory[self.row(ctx)[:first]] == np.array(request.names[:first])[:, None]).all()
        output = request.tokens[request.prompt :]
        self.compute(ctx, request.names, first)
        self.kv.step(ctx, output, len(output))
        self.settle()
        if len(output):
            self.kv.alloc(ctx)
            self.settle()
            self.compute(ctx, request.names, request.prompt // self.page_size)
            self.kv.step(ctx, (), 0)
            self.settle()
        self.kv.release(ctx)
        return found

    def find(self, ctx: pk.TextContext) -> Found:
        """Plans the prompt's forward, after all loads that there are."""
        device = host = disk = known = 0
        while True:
            filled = self.counted("host_filled_blocks")
            blocks = self.kv.alloc(ctx).block_ids
            loaded = 0 if ctx.active_length else len(blocks)
            host += loaded
            device += (ctx.cached_prefix_length - known) // self.page_size - loaded
            known = ctx.cached_prefix_length
            ready = self.settle()
            filled = self.counted("host_filled_blocks") - filled
            host, disk = host - filled, disk + filled
            if ctx.active_length:
                return Found(device, host, disk)
            assert ready == [ctx.request_id]

    def compute(self, ctx: pk.TextContext, names: list[int], first: int) -> None:
        """Writes the number of each full block's prefix into its page, and -1 into a partial one."""
        pages = np.array(self.row(ctx)[first:])
        values = [*names[first : first + len(pages)], -1][: len(pages)]
        self.memory[pages] = np.array(values)[:, None]

    def row(self, ctx: pk.TextContext) -> list[int]:
        pages: list[int] = self.kv.get_cache_indices(ctx)[0]
        return pages

    def settle(self) -> list[object]:
        """Waits for every copy, those to the disk too; gives the requests that waited for one."""
        ready: list[object] = []
        self.kv.flush()
        while self.kv.metrics()["copies_in_flight"]:
            ready += self.kv.poll_transfers()
            self.kv.flush()
        return ready

    def check(self) -> None:
        """The books of both agree in the end, and the manager's with themselves."""
        counted, device, host = self.kv.metrics(), self.model.device, self.model.host
        assert counted["cached_blocks"] == len(device.stored)
        assert counted["loaded_blocks"] == counted["connector_host_loaded_blocks"] == host.loaded
        assert counted["connector_host_stored_blocks"] == host.stored
        assert counted["connector_host_blocks"] == len(host.blocks)
        disk, names = self.model.disk, ("stored_blocks", "loaded_blocks", "blocks", "dropped_busy")
        expected = [disk.stored, disk.loaded, len(disk.written), 0]
        assert [self.counted(f"disk_{name}") for name in names] == expected
        self.kv.verify()


def conversation_requests(shared_dir: Path, page_size: int) -> Iterator[Request]:
    for visit in conversation(shared_dir, Names(), page_size):
        yield Request(visit.tokens(), visit.prompt, visit.names)


def agent_requests(shared_dir: Path, page_size: int) -> Iterator[Request]:
    """The agents' requests by time; a block's name comes from its tokens themselves."""
    names = Names()
    for request in read_trace([shared_dir / "traces" / "agent"]):
        tokens = np.concatenate([request.prompt.array(), request.output.array()])
        blocks = tokens[: len(tokens) // page_size * page_size].reshape(-1, page_size)
        yield Request(tokens, len(request.prompt), names.chain(block.tobytes() for block in blocks))
