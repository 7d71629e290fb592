"""Tools beside the library: the command line, and the parts of `thinwire bench`, `plan` and `simulate`."""
