"""The option with which a user vouches for what another's run imports and reads."""

from typing import Annotated

import typer

Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the code and read the text that the run names, although no command of yours "
        "is known to have named them.",
    ),
]
