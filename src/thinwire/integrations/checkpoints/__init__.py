"""Every handle in torch.distributed.checkpoint, for any number of ranks later.

`entries` names what a rank saves, `storage` reads it back, and `checkpoint` reshards it to the current ranks.
"""
