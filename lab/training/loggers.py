"""Loggers: TensorBoard or Weights & Biases, which get every step of a run besides metrics.jsonl."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from secrets import token_hex

from lab.files import RunError, find_inside, read, write
from lab.training.loop import Row
from lab.training.run import Run

Log = Callable[[Row], None]


def check_installed(logger: str | None) -> None:
    """Check that the package of a logger is installed.

    Raises:
        ValueError: if it is not; the message says how to install it.
    """
    if logger is not None and find_spec(logger) is None:
        raise ValueError(
            f"log={logger}: the package {logger} is not installed; "
            f"`pip install 'wonderful-lab[{logger}]'` installs it"
        )


def open_logger(logger: str | None, run: Run, first_step: int) -> AbstractContextManager[Log]:
    """Return a context that yields the function to call with every row.

    Args:
        logger: "tensorboard" writes event files into the run folder's `tensorboard/`; "wandb" logs
            to the project wonderful-lab, or that of WANDB_PROJECT, and keeps its files in the run
            folder; None does nothing.
        run: what is trained.
        first_step: steps already taken; later ones in the log are replaced.

    Raises:
        RunError: when the logger refuses, e.g. without a login.
    """
    openers = {"tensorboard": _open_tensorboard, "wandb": _open_wandb}
    return openers[logger](run, first_step) if logger else _open_nothing()


@contextmanager
def _open_nothing() -> Iterator[Log]:
    yield lambda row: None


@contextmanager
def _open_tensorboard(run: Run, first_step: int) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    home = find_inside(run.path, "tensorboard")
    home.mkdir(exist_ok=True)
    with SummaryWriter(str(home), purge_step=first_step + 1 if first_step else None) as writer:
        if not first_step:
            settings = json.dumps(run.to_dict(), indent=2, ensure_ascii=False)
            writer.add_text("config", "\n".join(f"    {line}" for line in settings.splitlines()))

        def log(row: Row) -> None:
            for tag, value in list_scalars(row).items():
                writer.add_scalar(tag, value, row.step)

        yield log


@contextmanager
def _open_wandb(run: Run, first_step: int) -> Iterator[Log]:
    import wandb

    # A resumed run goes on in the run that it began there, so the id is kept.
    kept = find_inside(run.path, "wandb-id")
    if not kept.exists():
        write(kept, token_hex(4))
    try:
        logged = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "wonderful-lab"),
            id=read(kept, 64).decode(),
            resume="allow",
            name=run.path.name,
            dir=run.path,
            config=run.to_dict(),
            settings=wandb.Settings(console="off"),
        )
    except wandb.Error as error:
        raise RunError(f"log=wandb: {error}") from error
    with logged:
        yield lambda row: logged.log(list_scalars(row), step=row.step)


def list_scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row by tag: train/loss, validation/accuracy, test/accuracy, …"""
    scalars = {}
    for name, value in vars(row).items():
        if name == "step" or not isinstance(value, int | float):
            continue
        split, _, what = name.partition("_")
        scalars[f"{split}/{what}" if split in ("validation", "test") else f"train/{name}"] = value
    return scalars
