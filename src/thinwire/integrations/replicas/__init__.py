"""Whole replicas: `attach` for those in DistributedDataParallel (`ddp`), and `replicate` for those without.

`asked` says what `attach` was asked for and what DDP reduces. `plain_steps` watches while DDP works without a hook.
`profiling` measures a DDP model and plans for it.
"""
