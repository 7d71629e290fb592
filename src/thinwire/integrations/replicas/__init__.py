"""Whole replicas: `attach` for those in DistributedDataParallel (`ddp`), and `replicate` for those without.

`asked` says what `attach` was asked for, `managed` what DDP reduces, and `copies` what becomes of our hooks in a copy.
`plain_steps` watches while DDP works without a hook, and `agreement` has ranks compare where they stand before its
first collective. `profiling` measures a DDP model and plans for it.
"""
