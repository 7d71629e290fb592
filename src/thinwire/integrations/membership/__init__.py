"""Which ranks take part, at which step each is, and its residual, also when ranks join and leave.

`state` is what a rank saves, `redistribution` reshards that to others, and `membership` has the ranks themselves.
"""
