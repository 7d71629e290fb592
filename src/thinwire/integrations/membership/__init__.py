"""Which ranks take part, at which step each is, and its residual, also when ranks join and leave.

`state` is what a rank saves, and `redistribution` reshards that to others. `together` does what several groups do on
all of their ranks or on none.
"""
