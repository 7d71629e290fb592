"""Numbers as codes of a few bits, and back."""
