"""`python -m thinwire`."""

from thinwire.tools.cli import main

main()
