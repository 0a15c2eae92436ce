"""The public calls, good arguments of each, and values that each argument refuses."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

import pagekeeper as pk
from model.engine import claimed, compute, manager, prefilled, request, store
from pagekeeper.params import (
    FullAttention,
    IndexerKCache,
    KVCacheQuantizationConfig,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
)

PROMPT = list(range(10, 30))
QUANTIZED = KVCacheQuantizationConfig()
NAN, INFINITE = float("nan"), float("inf")
LONG = "x" * 1_000_000
HASH = bytes(range(32))


class Scene:
    """A cache with requests in every state that a caller can name."""

    def __init__(self) -> None:
        self.kv: Any = manager(pages=16, page_size=4, max_batch_size=2)
        store(self.kv, PROMPT[:8])
        self.released = prefilled(self.kv, PROMPT[:5])
        self.stale = int(self.released.slot or 0)
        self.kv.release(self.released)
        self.idle = claimed(self.kv, PROMPT[:6])
        self.running = claimed(self.kv, PROMPT[:7])
        self.kv.alloc(self.running)
        self.padding, self.stranger = claimed(self.kv, [1]), request([1, 2])
        self.alone = request(PROMPT[:6])
        self.other = manager()
        self.foreign = claimed(self.other, [1])
        self.computed = prefilled(self.kv, PROMPT[8:14])
        self.pin = self.kv.pin(self.computed)
        self.copy = self.kv._core.start_copy(self.running, 0, 1)[0]
        self.planned = claimed(self.kv, PROMPT[14:])
        self.kv.alloc(self.planned)
        self.table = np.zeros((1, 2, 2, 8), np.int32)

    @cached_property
    def tiered(self) -> Any:
        """A cache with a host tier whose one request has KV."""
        options: Any = {"dtype": "float32", "n_kv_heads": 1, "head_dim": 1, "num_layers": 1, "page_size": 4}
        params = pk.MHAKVCacheParams(**options, kv_connector_config={"type": "rust_tiered"} | SMALL)
        memory = np.zeros((5, params.bytes_per_page), np.uint8)
        kv = pk.PagedKVCacheManager(params, None, 4, 2, buffers=[memory])
        kv.claim(self.alone)
        compute(kv, self.alone)
        return kv

    @cached_property
    def suspending(self) -> Any:
        """A cache whose one request is suspended."""
        self.tiered.suspend(self.alone).synchronize(10)
        self.tiered.poll_transfers()
        return self.tiered

    @cached_property
    def asleep(self) -> Any:
        self.tiered.release(self.alone)
        self.tiered.sleep()
        return self.tiered

    @cached_property
    def scheduling(self) -> Any:
        """The cache, with a scheduling pass open."""
        self.kv.start_scheduling()
        return self.kv

    @cached_property
    def pools(self) -> Any:
        return pk.PagedKVCacheManager(self.kv.params, None, 4, 2)


SMALL: dict[str, Any] = {"host_offload_max_gb": 2**-20}
Arguments = dict[str, Any]
PREFIX: Arguments = dict(
    tokens=PROMPT,
    salt="a",
    lora_id="a",
    lora_generation=1,
    mm_items=[(HASH, 0, 1)],
    prompt_embeds=[(HASH, 0, 1)],
    extra_ids=[0] * 20,
    overrides=[(0, 1)],
)
REQUEST: Arguments = dict(
    request_id="a",
    tokens=PROMPT,
    max_length=30,
    cache_salt="a",
    lora_id="a",
    lora_generation=1,
    mm_items=[(HASH, 0, 1)],
    prompt_embeds=[(HASH, 0, 1)],
    extra_ids=[0] * 20,
    token_overrides=[(0, 1)],
    no_read=False,
    no_store=False,
    max_new_tokens=3,
    retention=None,
    dkv_cache_hint=None,
    num_draft_tokens=0,
    beam_width=1,
    encoder_length=None,
)
HASHED: Arguments = PREFIX | dict(page_size=4, algo="ahash64", parent=bytes(8), seed="0" * 64)

PARAMS: Arguments = dict(
    dtype="float32",
    n_kv_heads=1,
    head_dim=8,
    num_layers=1,
    kind=FullAttention(),
    kvcache_quant_config=None,
    indexer=None,
    allow_kv_head_replication=False,
    page_size=4,
    devices="cpu",
    data_parallel_degree=1,
    enable_prefix_caching=True,
    enable_partial_reuse=True,
    copy_on_partial_reuse=True,
    store_partial_tails=True,
    kv_hash_algo="ahash64",
    kv_hash_seed="0" * 64,
    on_duplicate="adopt",
    eviction_policy="priority_lru",
    default_retention_priority=35,
    event_buffer_max_size=0,
    write_policy="selective",
    selective_min_hits=1,
    selective_min_priority=1,
    secondary_offload_min_priority=35,
    kv_connector_config="null",
    max_tokens=4096,
)
MLA_PARAMS: Arguments = {
    name: value
    for name, value in PARAMS.items()
    if name not in {"n_kv_heads", "head_dim", "allow_kv_head_replication"}
} | dict(kv_lora_rank=6, qk_rope_head_dim=2, num_q_heads=4)
STATE = RecurrentState("a", [2, 3], "float32")
STATE_PARAMS: Arguments = {
    name: value
    for name, value in PARAMS.items()
    if name not in {*MLA_PARAMS.keys() ^ PARAMS.keys(), "dtype", "kvcache_quant_config", "indexer"}
} | dict(states=[STATE], kind=Recurrent(8))
CONNECTOR: Arguments = dict(
    type="rust_tiered",
    host_offload_max_gb=1.0,
    disk_offload_dir="kv",
    disk_rank=0,
    disk_offload_max_gb=1.0,
    num_disk_workers=1,
    fsync="batch",
    block_store_endpoint="tcp://a:1",
    num_copy_lanes=1,
    host_pin_memory=True,
    host_numa_node=0,
)
MANAGER: Arguments = dict(
    session=None,
    total_num_pages=4,
    max_batch_size=2,
    available_bytes=None,
    max_seq_len=16,
    max_num_input_tokens=16,
    request_pages=None,
    reserve="chunk",
    allocate_pools=False,
    buffers=None,
    model_name="a",
    connector=None,
    weights_revision="a",
)

LOADED: Arguments = dict(
    max_batch_size=2,
    max_seq_len=16,
    session=None,
    available_cache_memory=2**20,
    is_di_enabled=False,
    model_name="a",
    weights_revision="a",
    page_size_multiple_of=1,
    max_num_input_tokens=16,
    layout="auto",
    num_draft_tokens=0,
    encoder_length=None,
    length_mix=None,
    allocate_pools=False,
)
CONFIG: Arguments = dict(
    kv_cache_page_size=128,
    kv_cache_format=None,
    indexer_kv_cache_format=None,
    state_pool_dtype=None,
    enable_dp_cross_replica_prefix_copy=True,
    attention_dp_events_gather_period_ms=5,
    kv_cache_hash_algo="ahash64",
    kv_cache_hash_seed=None,
    device_memory_utilization=0.9,
    layout="auto",
    window_size_shares=None,
    **{
        name: PARAMS[name]
        for name in (
            *(
                "enable_prefix_caching",
                "enable_partial_reuse",
                "copy_on_partial_reuse",
                "store_partial_tails",
            ),
            *("on_duplicate", "eviction_policy", "default_retention_priority", "max_tokens"),
            *("kv_connector_config", "write_policy", "selective_min_hits", "selective_min_priority"),
            *("secondary_offload_min_priority", "event_buffer_max_size"),
        )
    },
)

CALLS: dict[str, tuple[Callable[[Scene], Any], Callable[[Scene], Arguments]]] = {
    "claim": (lambda s: s.kv.claim, lambda s: dict(ctx=s.stranger, replica_idx=0)),
    "alloc": (lambda s: s.kv.alloc, lambda s: dict(batch=[s.idle], num_tokens=[1])),
    "alloc_dummy": (lambda s: s.kv.alloc_dummy, lambda s: dict(ctx=s.padding, replica_idx=0)),
    "runtime_inputs": (lambda s: s.kv.runtime_inputs, lambda s: dict(batches=[[s.running]], form="max")),
    "step": (lambda s: s.kv.step, lambda s: dict(batch=[s.running], new_tokens=[1], counts=[1])),
    "truncate": (lambda s: s.kv.truncate, lambda s: dict(ctx=s.running, length=1)),
    "preempt": (lambda s: s.kv.preempt, lambda s: dict(batch=[s.running])),
    "release": (lambda s: s.kv.release, lambda s: dict(batch=[s.running])),
    "suspend": (lambda s: s.tiered.suspend, lambda s: dict(batch=[s.alone])),
    "resume": (lambda s: s.suspending.resume, lambda s: dict(batch=[s.alone])),
    "sleep": (lambda s: s.other.sleep, lambda s: dict(timeout=0.0)),
    "flush": (lambda s: s.tiered.flush, lambda s: dict(timeout=0.0)),
    "wake": (lambda s: s.asleep.wake, lambda s: dict(buffers=[np.zeros((5, 32), np.uint8)])),
    "reset_prefix_cache": (lambda s: s.kv.reset_prefix_cache, lambda s: dict(weights_revision="a")),
    "contains": (lambda s: s.kv.contains, lambda s: dict(ctx=s.running)),
    "begin_step": (lambda s: s.kv.begin_step, lambda s: dict(now=1.0, completions=[s.copy])),
    "poll_transfers": (lambda s: s.kv.poll_transfers, lambda s: dict(completions=[s.copy])),
    "block_count": (lambda s: s.kv.block_count, lambda s: dict(replica_idx=0, group=None)),
    "analyze_prefix_reuse": (
        lambda s: s.kv.analyze_prefix_reuse,
        lambda s: PREFIX | dict(other_namespaces=False, replica_idx=0),
    ),
    "probe_prefix_match_length": (
        lambda s: s.kv.probe_prefix_match_length,
        lambda s: PREFIX | dict(replica_idx=0),
    ),
    "commit_and_get_block_hashes": (
        lambda s: s.kv.commit_and_get_block_hashes,
        lambda s: dict(ctx=s.running, group=None),
    ),
    "get_cache_indices": (lambda s: s.kv.get_cache_indices, lambda s: dict(ctx=s.running, group=None)),
    "get_batch_cache_indices": (
        lambda s: s.kv.get_batch_cache_indices,
        lambda s: dict(batch=[s.running], group=None),
    ),
    "slot_mapping": (lambda s: s.kv.slot_mapping, lambda s: dict(ctx=s.running, positions=[0], group=None)),
    "copy_block_offsets": (
        lambda s: s.kv.copy_block_offsets,
        lambda s: dict(out=s.table, slot=0, ctx=s.running, group=None),
    ),
    "disk_byte_count": (lambda s: s.kv.disk_byte_count, lambda s: dict(replica_idx=0)),
    "host_byte_count": (lambda s: s.kv.host_byte_count, lambda s: dict(replica_idx=0)),
    "fork": (lambda s: s.kv.fork, lambda s: dict(ctx=s.computed, request_id="child")),
    "get_latest_events": (lambda s: s.kv.get_latest_events, lambda s: dict(timeout=0.0)),
    "pin": (lambda s: s.kv.pin, lambda s: dict(ctx=s.computed)),
    "unpin": (lambda s: s.kv.unpin, lambda s: dict(pin=s.pin)),
    "prefetch": (lambda s: s.kv.prefetch, lambda s: PREFIX | dict(hint=None, replica_idx=0)),
    "session_hint": (
        lambda s: s.kv.session_hint,
        lambda s: dict(batch=[s.computed], hint="resume_soon", priority="high", duration_ms=1.0),
    ),
    "truncate_prefix": (lambda s: s.kv.truncate_prefix, lambda s: PREFIX | dict(replica_idx=0)),
    "get_buffers": (
        lambda s: s.pools.get_buffers,
        lambda s: dict(layer=0, layout="NHD", name="kv", group=None),
    ),
    "pages_view": (lambda s: s.pools.pages_view, lambda s: dict(group=None)),
    "pool_pointers": (lambda s: s.pools.pool_pointers, lambda s: dict(group=None)),
    "get_needed_blocks_one_step": (
        lambda s: s.kv.get_needed_blocks_one_step,
        lambda s: dict(batch=[s.idle], two_step_lookahead=False, group=None, summary=None, num_tokens=[1]),
    ),
    "get_remaining_blocks_to_completion": (
        lambda s: s.kv.get_remaining_blocks_to_completion,
        lambda s: dict(batch=[s.idle], group=None, summary=None, two_step_lookahead=False, num_tokens=[1]),
    ),
    "can_alloc": (lambda s: s.kv.can_alloc, lambda s: dict(batch=[s.idle], num_tokens=[1])),
    "can_satisfy": (lambda s: s.kv.can_satisfy, lambda s: dict(blocks=1, at_capacity=False)),
    "reuse_adjusted_compute": (
        lambda s: s.kv.reuse_adjusted_compute,
        lambda s: dict(batch=[s.idle], num_tokens=[1]),
    ),
    "chunk_tokens": (lambda s: s.kv.chunk_tokens, lambda s: dict(batch=[s.idle], num_tokens=[1])),
    "get_request_kv_block_budget": (
        lambda s: s.kv.get_request_kv_block_budget,
        lambda s: dict(ctx=s.idle),
    ),
    "shorten": (lambda s: s.kv.shorten, lambda s: dict(batch=[s.planned], num_tokens=[1])),
    "start_scheduling": (lambda s: s.kv.start_scheduling, lambda s: dict(now=1.0)),
    "scheduling_reserve": (
        lambda s: s.scheduling.scheduling_reserve,
        lambda s: dict(ctx=s.idle, blocks=1, group=None),
    ),
    "scheduling_remove": (lambda s: s.scheduling.scheduling_remove, lambda s: dict(ctx=s.running)),
    "scheduling_has_free_blocks": (
        lambda s: s.scheduling.scheduling_has_free_blocks,
        lambda s: dict(blocks=1, group=None),
    ),
    "take_page_fills": (lambda s: s.kv.take_page_fills, lambda s: dict(group=None)),
    "take_page_copies": (lambda s: s.kv.take_page_copies, lambda s: dict(group=None)),
    "PagedKVCacheManager": (lambda s: pk.PagedKVCacheManager, lambda s: MANAGER | dict(params=s.kv.params)),
    "load_kv_manager": (lambda s: pk.load_kv_manager, lambda s: LOADED | dict(params=s.kv.params)),
    "KVCacheConfig": (lambda s: pk.KVCacheConfig, lambda s: CONFIG),
    "MHAKVCacheParams": (lambda s: pk.MHAKVCacheParams, lambda s: PARAMS),
    "RecurrentKVCacheParams": (lambda s: RecurrentKVCacheParams, lambda s: STATE_PARAMS),
    "RecurrentState": (lambda s: RecurrentState, lambda s: dict(name="a", shape=[2, 3], dtype="float32")),
    "Recurrent": (lambda s: Recurrent, lambda s: dict(snapshot_interval=8, save_last_snapshot=True)),
    "MLAKVCacheParams": (lambda s: pk.MLAKVCacheParams, lambda s: MLA_PARAMS),
    "cache_dtype_for_encoding": (
        lambda s: pk.cache_dtype_for_encoding,
        lambda s: dict(quantization_encoding=None, kv_cache_format=None),
    ),
    "KVConnectorConfig": (lambda s: pk.KVConnectorConfig, lambda s: CONNECTOR),
    "TextContext": (lambda s: pk.TextContext, lambda s: REQUEST),
    "TextContext.update": (lambda s: s.running.update, lambda s: dict(token=1)),
    "TextContext.truncate": (lambda s: s.running.truncate, lambda s: dict(length=1)),
    "TokenBuffer": (lambda s: pk.TokenBuffer, lambda s: dict(tokens=PROMPT)),
    "RequestID": (lambda s: pk.RequestID, lambda s: dict(value="a")),
    "hash_blocks": (lambda s: pk.hash_blocks, lambda s: HASHED),
    "hash_blocks_batch": (
        lambda s: pk.hash_blocks_batch,
        lambda s: {"sequences": [PROMPT]} | {k: v for k, v in HASHED.items() if k != "tokens"},
    ),
}
"""A call, and good arguments of it."""

NOTHING: dict[str, Any] = {"None": None, "an object": object(), "a dict": {1: 1}}
NO_INTEGER: dict[str, Any] = {
    "a float": 1.0,
    "NaN": NAN,
    "infinity": INFINITE,
    "text": "1",
    "True": True,
    "a numpy bool": np.True_,
    "a numpy float": np.float64(1),
    "bytes": b"1",
}
HUGE: dict[str, Any] = {  # 5,000 digits are more than Python writes
    "2**64": 2**64,
    "-2**63 - 1": -(2**63) - 1,
    "200 bits": 2**200,
    "endless": 10**5000,
}
NEGATIVE: dict[str, Any] = {"-1": -1, "a numpy -1": np.int64(-1)}
NO_LIST: dict[str, Any] = {
    "a set": {1},
    "text": "12",
    "two axes": [[1]],
    "an array of two axes": np.array([[1]]),
    "floats": np.array([1.0]),
    "NaN": [NAN],
    "an array of NaN": np.array([NAN]),
    "a bool": [True],
    "bools": np.array([True]),
    "None": [None],
    "texts": ["1"],
    "objects": np.array([1, None]),
    "complex": np.array([1j]),
    "times": np.array([1], "M8[s]"),
}


def listed(values: dict[str, Any]) -> dict[str, Any]:
    return {f"[{name}]": [value] for name, value in values.items()}


REQUESTS: dict[str, Callable[[Scene], Any]] = {
    "None": lambda s: None,
    "a float": lambda s: 1.0,
    "NaN": lambda s: NAN,
    "text": lambda s: LONG,
    "True": lambda s: True,
    "2**64": lambda s: 2**64,
    "-1": lambda s: -1,
    "an object": lambda s: object(),
    "a slot that was never given": lambda s: 77,
    "a stale slot": lambda s: s.stale,
    "a stranger": lambda s: s.stranger,
    "a released request": lambda s: s.released,
    "another manager's request": lambda s: s.foreign,
}
BATCHES: dict[str, Callable[[Scene], Any]] = REQUESTS | {
    "a set": lambda s: {s.running},
    "a generator": lambda s: (ctx for ctx in [s.running]),
    "a dict": lambda s: {s.running: 1},
    "[None]": lambda s: [None],
    "[slot]": lambda s: [s.running.slot],
    "a list in a list": lambda s: [[s.running]],
    "a stranger behind a good one": lambda s: [s.running, s.stranger],
    "one twice": lambda s: [s.running, s.running],
    "one over and over": lambda s: [s.running] * 100_000,
    "a slot twice": lambda s: np.array([s.running.slot] * 2, np.int32),
    "slots of int64": lambda s: np.array([s.running.slot]),
    "slots of uint32": lambda s: np.array([s.running.slot], np.uint32),
    "slots of floats": lambda s: np.array([s.running.slot], float),
    "slots of another byte order": lambda s: np.array([s.running.slot], ">i4"),
    "a slot over and over": lambda s: np.broadcast_to(np.int32(s.running.slot), 100_000),
    "slots in two axes": lambda s: np.array([[s.running.slot]], np.int32),
    "a negative slot": lambda s: np.array([-1], np.int32),
    "the largest slot": lambda s: np.array([2**31 - 1], np.int32),
}
SPANS: dict[str, Any] = {
    "an object": object(),
    "a dict": {1: 1},
    "a number": 1,
    "[None]": [None],
    "numbers": [1],
    "two of three": [(HASH, 0)],
    "short": [(b"a", 0, 1)],
    "text": [("a" * 32, 0, 1)],
    "before the first": [(HASH, -1, 1)],
    "of no tokens": [(HASH, 0, 0)],
    "a negative length": [(HASH, 0, -1)],
    "a float": [(HASH, 0.0, 1)],
    "NaN": [(HASH, NAN, 1)],
    "True": [(HASH, True, 1)],
    "huge": [(HASH, 2**200, 1)],
    "beyond 64 bits": [(HASH, 2**63 - 1, 2**63 - 1)],
}
OVERRIDES: dict[str, Any] = {
    "an object": object(),
    "a dict": {1: 1},
    "a number": 1,
    "[None]": [None],
    "one of two": [(1,)],
    "three": [(1, 2, 3)],
    "a float": [(1, 1.0)],
    "NaN": [(1, NAN)],
    "True": [(1, True)],
    "a bool as index": [(True, 1)],
    "huge": [(1, 2**64)],
    "a huge index": [(2**200, 1)],
    "twice": [(1, 1), (1, 2)],
}
TOKENS = NO_LIST | listed(HUGE) | listed({"2**31": 2**31, "-2**31 - 1": -(2**31) - 1})
COUNT = NO_INTEGER | NEGATIVE | HUGE
SIZE = COUNT | {"0": 0, "2**63": 2**63, "an array": np.array([1, 1])}
FLAG = NOTHING | {"1": 1, "text": "no", "an array": np.array([True, True])}
WORD = NOTHING | {
    "unknown": "paper",
    "a number": 1,
    "a list": ["a"],
    "long": LONG,
    "an array": np.array([1, 1]),
}
TEXT: dict[str, Any] = {"a number": 1, "bytes": b"a", "a list": ["a"], "NaN": NAN, "a surrogate": "\ud800"}
ADDRESS = TEXT | {"nothing": "", "a NUL": "a\0", "True": True, "an object": object()}
REPLICAS = NOTHING | NO_INTEGER | NEGATIVE | HUGE | {"another": 1, "False": False, "0.0": 0.0}


def always(value: Any) -> Callable[[Scene], Any]:
    return lambda _: value


def fixed(values: dict[str, Any]) -> dict[str, Callable[[Scene], Any]]:
    """Values that are the same in every scene."""
    return {name: always(value) for name, value in values.items()}


def in_a_list(of_scene: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
    return lambda scene: [of_scene(scene)]


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


GIBIBYTES = without(NO_INTEGER, "a float", "a numpy float") | NEGATIVE | without(NOTHING, "None")
GIBIBYTES |= {"endless": 10**5000, "a list": [1.0], "an array": np.array([1.0])}

GOOD_HERE: dict[tuple[str, str], set[str]] = {
    ("RecurrentKVCacheParams", "kind"): {"of states"},
    ("RecurrentState", "name"): {"unknown", "long", "a companion that is not there"},
    ("load_kv_manager", "params"): {"None"},
    ("claim", "ctx"): {"a stranger", "a released request"},
    ("alloc_dummy", "ctx"): {"a stranger", "a released request"},
    ("contains", "ctx"): {"a stranger", "a released request", "another manager's request"},
    ("fork", "request_id"): {"None"},
    ("prefetch", "hint"): {"None", "an object", "a dict", "unknown", "a number", "long"},
    ("get_batch_cache_indices", "batch"): {
        "one twice",
        "one over and over",
        "a slot twice",
        "a slot over and over",
    },
}
"""What is bad elsewhere and means something here."""

BAD: dict[str, dict[str, Callable[[Scene], Any]]] = {
    "batch": BATCHES,
    "ctx": REQUESTS
    | {
        "no request": lambda s: [],
        "two requests": lambda s: [s.running, s.idle],
        "two slots": lambda s: np.array([0, 1], np.int32),
    },
    "batches": {
        "None": lambda s: None,
        "a number": lambda s: 1,
        "no batch": lambda s: [],
        "two replicas": lambda s: [[s.running], [s.idle]],
        "too many": lambda s: [[s.running, s.idle, s.padding]],
        "not planned": lambda s: [[s.idle]],
        "a dict": lambda s: {0: [s.running]},
    }
    | {f"[{name}]": in_a_list(value) for name, value in BATCHES.items()},
    "num_tokens": fixed(
        COUNT | NO_LIST | listed(HUGE | NEGATIVE) | {"0": 0, "[0]": [0], "two": [1, 1], "none": []}
    ),
    "new_tokens": fixed(TOKENS | without(COUNT, "-1", "a numpy -1") | {"two": [1, 1], "none": []}),
    "counts": fixed(
        NO_LIST | COUNT | listed(HUGE | NEGATIVE) | {"two": [1, 1], "none": [], "0": 0, "2": [2]}
    ),
    "length": fixed(COUNT | NOTHING | {"more than known": 99, "a list": [1]}),
    "now": fixed(
        without(NO_INTEGER, "a float", "a numpy float") | {"-1": -1, "endless": 10**5000, "a list": [1.0]}
    ),
    "completions": fixed(
        NO_LIST | COUNT | listed(HUGE | NEGATIVE) | {"unknown": [77], "an object": object()}
    ),
    "replica_idx": fixed(REPLICAS),
    "group": fixed({"text": "a", "a number": 0, "True": True, "a list": []}),
    "positions": fixed(NOTHING | NO_LIST | COUNT | listed(HUGE | NEGATIVE) | {"behind": [99]}),
    "out": fixed(
        NOTHING
        | {
            "int64": np.zeros((1, 2, 2, 8)),
            "three axes": np.zeros((2, 2, 8), np.int32),
            "too short": np.zeros((1, 2, 2, 1), np.int32),
        }
    ),
    "slot": fixed(COUNT | NOTHING | {"behind": 2}),
    "layer": fixed(without(SIZE, "0") | NOTHING | {"behind": 3, "a mask": np.array([True, False, False])}),
    "layout": fixed(NOTHING | {"unknown": "NWD", "a number": 1, "long": LONG}),
    "form": fixed(NOTHING | {"unknown": "paper", "a number": 1, "a list": ["max"], "long": LONG}),
    "tokens": fixed(NOTHING | TOKENS),
    "sequences": fixed(NOTHING | {"a number": 1, "one sequence": PROMPT} | listed(TOKENS)),
    "token": fixed(without(COUNT, "-1", "a numpy -1") | NOTHING | {"2**31": 2**31}),
    "salt": fixed(TEXT),
    "cache_salt": fixed(TEXT),
    "lora_id": fixed(without(TEXT, "a number") | HUGE | {"a float": 1.0, "True": True}),
    "lora_generation": fixed(COUNT | NOTHING),
    "mm_items": fixed(SPANS),
    "prompt_embeds": fixed(SPANS),
    "extra_ids": fixed(without(NO_LIST, "None") | listed(HUGE | NEGATIVE)),
    "overrides": fixed(OVERRIDES),
    "token_overrides": fixed(OVERRIDES),
    "request_id": fixed(NOTHING | {"a float": 1.0, "True": True, "200 bits": 2**200, "bytes": b"a"}),
    "max_length": fixed(SIZE | {"less than given": 19, "2**31": 2**31}),
    "max_new_tokens": fixed(without(SIZE, "0", "2**63")),
    "no_read": fixed(FLAG),
    "no_store": fixed(FLAG),
    "value": fixed({"a number": 1, "bytes": b"a", "a float": 1.0, "a list": ["a"]}),
    "page_size": fixed(SIZE | NOTHING | {"2**32": 2**32}),
    "algo": fixed(NOTHING | {"unknown": "md5", "a number": 1}),
    "parent": fixed({"short": b"a", "text": "0" * 16, "a number": 1}),
    "timeout": fixed(
        without(NO_INTEGER, "a float", "a numpy float", "infinity") | NEGATIVE | {"endless": 10**5000}
    ),
    "pin": fixed(COUNT | NOTHING | {"unknown": 77}),
    "hint": fixed(NOTHING | {"unknown": "later", "a number": 1, "long": LONG}),
    "priority": fixed(without(COUNT, "text") | NOTHING | {"101": 101, "unknown": "urgent"}),
    "duration_ms": fixed(without(NO_INTEGER, "a float", "a numpy float") | NEGATIVE | {"endless": 10**5000}),
    "retention": fixed(without(NOTHING, "None") | {"text": "high", "a number": 1}),
    "dkv_cache_hint": {},
    "num_draft_tokens": fixed(COUNT | NOTHING),
    "beam_width": fixed(SIZE | NOTHING | {"65536": 65536}),
    "two_step_lookahead": fixed(FLAG),
    "summary": fixed(
        without(NOTHING, "None")
        | {"a number": 1, "a hit": 7, "numbers": [1], "none": [], "text": "a", "two": [None, None]}
    )
    | {"no list": lambda s: s.kv.analyze_prefix_reuse(PROMPT)},
    "at_capacity": fixed(FLAG),
    "blocks": fixed(
        COUNT | NOTHING | NO_LIST | listed(HUGE | NEGATIVE) | {"two": [1, 1], "none": [], "a group": {"a": 1}}
    ),
    "event_buffer_max_size": fixed(COUNT | NOTHING),
    "connector": fixed(without(NOTHING, "None") | {"text": "disk", "a number": 1}),
    "other_namespaces": fixed(FLAG),
    "params": fixed(NOTHING | {"a class": pk.MHAKVCacheParams}),
    "session": {},
    "total_num_pages": fixed(SIZE | {"None": None}),
    "max_batch_size": fixed(SIZE | {"None": None, "over 2**20": 2**20 + 1}),
    "available_bytes": fixed(SIZE | {"beside a number of pages": 2**20}),
    "max_seq_len": fixed(SIZE),
    "max_num_input_tokens": fixed(SIZE),
    "request_pages": fixed(without(NOTHING, "None") | {"a number": 1, "of the only group": {"full": 1}}),
    "reserve": fixed(without(WORD, "long")),
    "allocate_pools": fixed(FLAG),
    "buffers": fixed(without(NOTHING, "None") | {"none": [], "a number": 1, "numbers": [1], "two": [1, 2]}),
    "model_name": fixed({"a number": 1, "bytes": b"a", "a list": ["a"]}),
    "weights_revision": fixed({"a number": 1, "bytes": b"a", "a list": ["a"]}),
    "kv_connector_config": fixed(without(WORD, "None") | {"True": True, "a long field": {LONG: 1}}),
    "max_tokens": fixed(SIZE),
    "available_cache_memory": fixed(SIZE | {"None": None, "of no device": []}),
    "is_di_enabled": fixed(FLAG | {"True": True}),
    "page_size_multiple_of": fixed(SIZE | NOTHING | {"3": 3}),
    "length_mix": fixed({"an object": object(), "a number": 1, "a list": [1], "of nothing": {}, "0": {0: 1}}),
    "kv_cache_page_size": fixed(SIZE | NOTHING),
    "indexer_kv_cache_format": fixed(without(WORD, "None")),
    "state_pool_dtype": fixed(without(WORD, "None")),
    "kv_cache_hash_algo": fixed(WORD),
    "kv_cache_hash_seed": fixed(
        {"short": "a", "no hex": "x" * 64, "a number": 1, "bytes": bytes(32), "long": LONG}
    ),
    "device_memory_utilization": fixed(
        without(NO_INTEGER, "a float", "a numpy float")
        | NEGATIVE
        | NOTHING
        | {"0": 0, "2": 2, "a list": [0.9]}
    ),
    "window_size_shares": fixed(without(WORD, "None", "a list") | {"none": [], "words": ["a"], "2": [2]}),
    "type": fixed(without(WORD, "None")),
    "host_offload_max_gb": fixed(GIBIBYTES | {"0": 0}),
    "disk_offload_dir": fixed(ADDRESS),
    "disk_rank": fixed(COUNT | NOTHING),
    "disk_offload_max_gb": fixed(GIBIBYTES),
    "num_disk_workers": fixed(SIZE | NOTHING),
    "fsync": fixed(WORD),
    "block_store_endpoint": fixed(ADDRESS),
    "write_policy": fixed(WORD),
    "selective_min_hits": fixed(SIZE | NOTHING),
    "secondary_offload_min_priority": fixed(COUNT | NOTHING | {"101": 101}),
    "selective_min_priority": fixed(COUNT | without(NOTHING, "None") | {"101": 101}),
    "num_copy_lanes": fixed(SIZE | NOTHING | {"65": 65}),
    "host_pin_memory": fixed(FLAG),
    "host_numa_node": fixed(COUNT),
    "dtype": fixed(WORD),
    "n_kv_heads": fixed(SIZE | NOTHING),
    "head_dim": fixed(SIZE | NOTHING),
    "num_layers": fixed(SIZE | NOTHING),
    "kind": fixed(WORD | {"full": "full", "a class": FullAttention, "of states": Recurrent()}),
    "encoder_length": fixed(SIZE | without(NOTHING, "None")),
    "states": fixed(WORD | {"none": [], "one twice": [STATE, STATE], "without a list": STATE}),
    "shape": fixed(WORD | {"none": [], "[0]": [0], "[-1]": [-1], "[1.0]": [1.0], "a number in it": ["1"]}),
    "snapshot_interval": fixed(SIZE | without(NOTHING, "None")),
    "save_last_snapshot": fixed(FLAG),
    "kvcache_quant_config": fixed(without(WORD, "None") | {"scales of what has none": QUANTIZED}),
    "indexer": fixed(
        without(WORD, "None") | {"a mask of three layers": IndexerKCache(layer_mask=[True] * 3)}
    ),
    "allow_kv_head_replication": fixed(FLAG),
    "kv_lora_rank": fixed(SIZE | NOTHING),
    "qk_rope_head_dim": fixed(COUNT | NOTHING),
    "num_q_heads": fixed(SIZE | without(NOTHING, "None")),
    "quantization_encoding": fixed(without(WORD, "None")),
    "kv_cache_format": fixed(without(WORD, "None")),
    "name": fixed(WORD | {"a companion that is not there": "kv_scales"}),
    "devices": fixed(WORD | {"none": [], "two": ["cpu", "cpu"]}),
    "data_parallel_degree": fixed(SIZE | NOTHING | {"2": 2}),
    "enable_prefix_caching": fixed(FLAG),
    "enable_partial_reuse": fixed(FLAG),
    "copy_on_partial_reuse": fixed(FLAG),
    "store_partial_tails": fixed(FLAG),
    "enable_dp_cross_replica_prefix_copy": fixed(FLAG),
    "attention_dp_events_gather_period_ms": fixed(SIZE | NOTHING | {"another period": 6}),
    "kv_hash_algo": fixed(WORD),
    "kv_hash_seed": fixed(
        {"short": "a", "no hex": "x" * 64, "a number": 1, "bytes": bytes(32), "long": LONG}
    ),
    "on_duplicate": fixed(WORD),
    "eviction_policy": fixed(WORD),
    "default_retention_priority": fixed(without(COUNT, "text") | NOTHING | {"101": 101, "unknown": "urgent"}),
    "seed": fixed({"short": b"a", "no hex": "x" * 64, "a number": 1}),
}
"""Values that an argument of this name refuses, wherever it stands."""


SAID_INSTEAD = {
    "ctx": r"\bslot\b|\brequest\b",
    "batch": r"\bslot\b|\brequests?\b",
    "batches": r"\bbatch\b|\bslot\b|\brequests?\b",
    "completions": r"\btransfer \d+\b",
    "algo": r"\bhash algorithm\b",
}
"""What says as well as the argument's name where the fault is: a request has a name of its own."""
