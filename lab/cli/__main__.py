"""`python -m lab.cli` is `lab`."""

from lab.cli.app import main

main()
