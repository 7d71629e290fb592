"""Exit codes."""

BAD_INPUT = 2
