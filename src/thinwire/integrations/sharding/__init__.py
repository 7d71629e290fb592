"""Sharded models: `shard` lets replicas of FSDP2's shards exchange gradients. `scatter` is for models without replicas.

`fsdp` has all that we read of FSDP, `backward` follows its backward passes and puts what they deliver through the
recipe, and `contributions` keeps what its reduce-scatter would have sent. `layout` says which shard this rank holds,
and reshards residuals for another number of shards. `gathering`, `lane` and `copies` gather parameters.
"""
