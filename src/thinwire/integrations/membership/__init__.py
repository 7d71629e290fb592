"""Which ranks take part, where each of them stands, and what waits on it: what ranks that come and go leave behind.

`state` is what a rank saves, and `redistribution` deals that out to others. `together` does what several groups do on
all of their ranks or on none.
"""
