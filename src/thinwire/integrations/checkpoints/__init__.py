"""Every handle in torch.distributed.checkpoint, for any number of ranks later.

`entries` names what a rank saves, `storage` reads it back, and `checkpoint` deals it out to the ranks there are now.
"""
