"""Pages from one cache into another, of a replica or of the other stage of disaggregated serving.

What is here plans and checks: which shard reads which bytes of which other shard, and whether two sides fit
each other. The bytes are the caller's to move. Nothing here needs torch; `metadata`, which the two sides send
each other, needs msgspec: `pip install 'pagekeeper[transfer]'`.

`pagekeeper.transfers` is something else: copies between a cache and its own tiers.
"""

from pagekeeper.errors import TransferMetadataError, TransferMismatchError
from pagekeeper.replica_transfer.copies import PageCopy, plan_copies
from pagekeeper.replica_transfer.heads import HeadRead, HeadShards, plan_reads
from pagekeeper.replica_transfer.shards import GroupShards

__all__ = [
    "GroupShards",
    "HeadRead",
    "HeadShards",
    "PageCopy",
    "TransferMetadataError",
    "TransferMismatchError",
    "plan_copies",
    "plan_reads",
]
