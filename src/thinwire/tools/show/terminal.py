"""Lines on the terminal, as they are."""

from rich.console import Console

ASCII = str.maketrans({"✓": "yes", "✗": "NO", "—": "-", "·": "|"})


def complain(command: str, reason: str) -> None:
    """Say on standard error why a command did not reach its end."""
    Console(stderr=True).print(f"thinwire {command}: {reason}", markup=False, highlight=False, soft_wrap=True)
