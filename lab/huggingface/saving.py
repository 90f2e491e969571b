"""Saving the model of a run in the format of Hugging Face's transformers."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lab.files import RunError, explain_write_errors, new_folder, write
from lab.huggingface.configuration import LabConfig
from lab.huggingface.model import LabForCausalLM
from lab.training.run import Run
from tasks.next_byte import Bytes


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that turns text into its UTF-8 bytes and back; byte 0 pads and ends.

    Rows are padded on the left. Text holds no byte 0, and no byte is added to it.

    >>> tokenizer = build_byte_tokenizer()
    >>> tokenizer("é!")["input_ids"]
    [195, 169, 33]
    >>> tokenizer.decode([195, 169, 33])
    'é!'
    """
    characters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE({c: byte for byte, c in characters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=characters[0],
        eos_token=characters[0],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


CARD = """---
library_name: transformers
tags: [wonderful-lab]
---

# {task}: {stack}

A model of the Wonderful Matrices lab, trained for {steps:,} steps. {result}

```python
import lab.huggingface  # registers the lab's models
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")
```

Its task, with all options:

```json
{options}
```
"""


def convert(run: Run, step: int | None = None) -> LabForCausalLM:
    """Return a run's model as a Hugging Face model in evaluation mode.

    Args:
        run: the run.
        step: weights of this step; None: the last ones.

    Raises:
        RunError: when there are no such weights.
        ValueError: for a model with a mixer of your own, or one that reads vectors.
    """
    if run.task.vectors:
        raise ValueError(f"{run.path}: its model reads vectors, a causal language model tokens")
    config = LabConfig.from_model_config(run.model, run.task.vocab_size)
    if isinstance(run.task, Bytes):
        config.pad_token_id = config.eos_token_id = 0
    chosen = max(run.list_steps(), default=0) if step is None else step
    model = LabForCausalLM(config)
    model.model.load_state_dict(run.load_model(chosen).state_dict())
    return model.eval()


def save_run(run: Run, folder: Path, step: int | None = None) -> None:
    """Write a run's model, a card, and for the task `bytes` a tokenizer, into a new folder.

    The folder appears when all of it is on the disk.

    Raises:
        RunError: when there are no such weights, or the folder is not empty or cannot be written.
        ValueError: for a model with a mixer of your own.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"folder={folder}: must be new or empty")
    model = convert(run, step)
    with explain_write_errors(folder), new_folder(folder.absolute()) as temporary:
        model.save_pretrained(temporary)
        if isinstance(run.task, Bytes):
            build_byte_tokenizer().save_pretrained(temporary)
        write(temporary / "README.md", _describe(run, folder, step))


def _describe(run: Run, folder: Path, step: int | None) -> str:
    """Return the model card."""
    result = run.read_result()
    said = "Its run has not ended."
    if result is not None and step in (None, result["steps"]):
        said = f"Accuracy on its test split: {result['accuracy']:.3f}."
    elif step is not None:
        said = "These are weights from within its training."
    options = {**run.task.describe(), "seed": run.train.seed}
    options.pop("path", None)  # a path on this machine, which is private
    return CARD.format(
        task=run.task.name,
        stack=run.model.stack,
        steps=max(run.list_steps(), default=0) if step is None else step,
        result=said,
        folder=folder.name,
        options=json.dumps(options, indent=2),
    )
