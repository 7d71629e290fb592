"""Beside the library: the command line, what measures it, and the papers' claims. The library imports none of it."""
