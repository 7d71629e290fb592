"""`thinwire check`: does everything work on this machine, with this device and this group?"""
