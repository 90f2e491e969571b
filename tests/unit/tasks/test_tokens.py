"""Rows as text and back, for every task."""

import pytest
import torch

from tasks import TASKS
from tests.task_cases import PAIRS


@pytest.mark.parametrize(("name", "options"), PAIRS, ids=str)
def test_a_row_as_text_is_the_row_again(name, options):
    batch = (task := TASKS[name](**options)).batch(split="test", size=2)
    for part, row in zip(task.list_tasks(batch), batch.inputs, strict=True):
        shown = part.to_str_tokens(row)
        assert len(shown) == len(row)
        assert torch.equal(part.to_tokens(shown), row[None])
        assert torch.equal(part.to_tokens(" ".join(shown)), row[None])


def test_a_word_that_is_no_token_says_so():
    task = TASKS["copy"](seq_len=8, vocab_size=5)
    assert task.to_tokens("3 | 4").tolist() == [[3, task.to_tokens("|").item(), 4]]
    with pytest.raises(ValueError, match="text: '9' is not a token of copy"):
        task.to_tokens("3 9")
