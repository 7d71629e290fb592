"""`python -m thinwire`."""

from thinwire_lab.cli import main

main()
