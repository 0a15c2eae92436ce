"""Whether a cache fits, before it is made: the memory for it, how it is divided, what there is room for.

`pagekeeper.load_kv_manager` then makes it.
"""

from pagekeeper.planning.plan import CachePlan, calculate_max_num_blocks, plan_cache
from pagekeeper.planning.planners import (
    MemoryPlanner,
    ModelConfig,
    ModelConfigWithKVCache,
    PagedMemoryPlanner,
)

__all__ = [
    "CachePlan",
    "MemoryPlanner",
    "ModelConfig",
    "ModelConfigWithKVCache",
    "PagedMemoryPlanner",
    "calculate_max_num_blocks",
    "plan_cache",
]
