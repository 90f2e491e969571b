"""The option with which a user vouches for what another's run imports and reads."""

from typing import Annotated

import typer

Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the code and read the text that the run names, even if you did not name them "
        "in a command.",
    ),
]
