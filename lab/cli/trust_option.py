"""The option by which a user lets someone else's run import its code and read its text."""

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
