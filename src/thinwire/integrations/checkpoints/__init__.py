"""Every handle in torch.distributed.checkpoint, for any number of ranks later.

`storage` names what a rank saves and reads it back, and `checkpoint` reshards it to the current ranks.
"""
