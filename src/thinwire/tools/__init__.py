"""Tools beside the library: its command line, and what `thinwire bench`, `plan` and `simulate` are made of."""
