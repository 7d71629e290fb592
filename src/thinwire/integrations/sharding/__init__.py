"""Sharded models: `shard` lets replicas of FSDP2's shards exchange gradients.

`fsdp` has all that we read of FSDP, `arrivals` puts what it delivers through the recipe, `layout` says which shard this
rank holds, and `recut` cuts what waits for another number of shards.
"""
