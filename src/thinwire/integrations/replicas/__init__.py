"""Whole replicas: `attach` for those in DistributedDataParallel (`ddp`), and `replicate` for those without.

`managed` says what DDP reduces, `plain_steps` watches while it works without a hook, and `agreement` has ranks compare
where they stand before its first collective. `profiling` measures a DDP model and plans for it.
"""
