"""`python -m lab` is `lab`."""

import os
import sys

# `python -m` searches the working directory first, where the user's files may have the names of
# our packages. It may also be the folder that the lab itself is in.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from lab.cli import main

main()
