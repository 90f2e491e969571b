"""`lab save-pretrained`: a run's model in the format of Hugging Face's transformers."""

from pathlib import Path
from typing import Annotated

import typer

from lab.cli.messages import refuse, report_failures, report_usage_errors, say
from lab.cli.trust_option import Trust


def save_pretrained(
    path: Annotated[Path, typer.Argument(help="A run folder.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write: new, or empty.")],
    step: Annotated[
        int | None, typer.Option(help="Save the weights after this step.", show_default="the last")
    ] = None,
    trust: Trust = False,
) -> None:
    """Save a run's model for Hugging Face's transformers.

    `AutoModelForCausalLM.from_pretrained` loads it after `import lab.huggingface`. Needs the extra
    `hf`.
    """
    from lab.peers import explain_missing
    from lab.training.run import Run

    missing = explain_missing("transformers")
    if missing is not None:
        raise refuse(missing, 2)
    from transformers.utils.logging import disable_progress_bar

    from lab.huggingface.saving import save_run

    disable_progress_bar()
    with report_failures(), report_usage_errors():
        save_run(Run.open(path, trust=trust), folder, step)
    say(folder)
