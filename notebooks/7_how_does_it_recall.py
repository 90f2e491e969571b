# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How does it recall?
#
# By which steps does a model of two attention blocks get from a key to the value that followed it,
# and does the answer really hang on them?
#
# A matrix that looks right is only a hint. Here each step is taken away, given back or redirected
# while everything else stays, and beside every such intervention stands a placebo: one of the same
# size where the step is not.

# %%
from pathlib import Path

import polars as pl
import torch

from analysis import mechanism
from analysis.base import Subject
from analysis.interventions import ablate, block_edges, patch, swap_values
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.training.experiment import carry_out
from lab.training.runs import Run
from tasks import TASKS

tables = pl.Config(
    float_precision=3, tbl_hide_column_data_types=True, tbl_hide_dataframe_shape=True
)

# %% [markdown]
# ## A model that recalls
#
# Eight key–value pairs, then every key once more: hard MQAR, small. `carry_out` trains the run, or
# returns at once when the folder holds it, finished.

# %%
task = TASKS["mqar"](seq_len=32, n_pairs=8, vocab_size=64)
model_config = ModelConfig(stack="AM*2", d_model=32)
train_config = TrainConfig(batch_size=64, max_steps=600, eval_every=25, test_rows=256)
run = Run(Path("runs/notebooks/attention"), task, model_config, train_config)
result = carry_out(run, Runtime(device="cpu"))
print(f"{result['accuracy']:.1%} right after {result['steps']} steps, chance {task.chance:.1%}")

# %% [markdown]
# A `Subject` is what every analysis takes: the task, the model in evaluation mode, and rows of the
# test split.

# %%
subject = Subject.of(run)
model, batch = subject.model, subject.batch
print(f"{len(batch.inputs)} rows of {task.seq_len} tokens, weights of step {subject.step}")

# %% [markdown]
# ## The library's own verdict
#
# `analysis.mechanism` runs the interventions below for any task with pairs and any mixer, with
# intervals, and puts a label on what it finds: induction, direct, positional, mixed or undecided.

# %%
restored, *edited = mechanism.measure(subject)
for found in (restored, *edited):
    words = mechanism.describe(found)
    print(f"{words.title}\n{words.says}\n")

# %% [markdown]
# Rows in which two keys changed places get the clean residual stream back, at one kind of position
# and one depth at a time. Where the values' line is at 1, the answer is carried by the value's
# position.

# %%
mechanism.draw(restored)

# %% [markdown]
# And what is left of the answer when single edges of a mixer's matrix are cut, or two values change
# places; the crosses are the placebos.

# %%
mechanism.draw(edited[0]) if edited else print("keys do not move the answer: nothing to edit")

# %% [markdown]
# ## The same by hand
#
# The rest of the notebook does it without the analysis, in the open. `batch.links` says where each
# pair's key, value and query stand, in store order, `[b q]`.

# %%
query, key, value = (batch.links[name] for name in ("query_pos", "key_pos", "value_pos"))
stored = batch.inputs.gather(1, value)  # the right answers, [b q]
rows = torch.arange(len(query))
print("row 0:", batch.inputs[0].tolist())
print("its first pair: key at", key[0, 0].item(), "value at", value[0, 0].item(), end=", ")
print("asked for at", query[0, 0].item())


# %%
@torch.no_grad()
def answers(inputs=batch.inputs):
    """Return what the model answers at each query, [b q], with the interventions in place."""
    return model(inputs).argmax(-1).gather(1, query)


def share(hits):
    """Return the share of True."""
    return hits.double().mean().item()


print(f"right without any intervention: {share(answers() == stored):.1%}")

# %% [markdown]
# ### Block an edge
#
# `block_edges` lets some positions not read some others, in one layer: the score is −∞ before the
# softmax. First each query is kept from its value; the placebo keeps it from another pair's value.
# Then each value is kept from its own key; the placebo keeps it from the key of the pair before,
# so the first pair is left out.


# %%
def blocked(layer, targets, sources):
    """Return the share of right answers about these pairs with the edges between them cut."""
    many = rows.repeat_interleave(targets.shape[1])
    with block_edges(model, layer, targets.flatten(), sources.flatten(), rows=many):
        right = answers() == stored
    return share(right[:, -targets.shape[1] :])


block = pl.DataFrame(
    [
        {
            "layer": layer,
            "query ↛ its value": blocked(layer, query, value),
            "query ↛ another value": blocked(layer, query, value.roll(1, 1)),
            "value ↛ its key": blocked(layer, value[:, 1:], key[:, 1:]),
            "value ↛ the key before": blocked(layer, value[:, 1:], key[:, :-1]),
        }
        for layer in range(2)
    ]
)
block

# %% [markdown]
# ### Take something away, and give it back
#
# In the corrupt rows the first two keys have changed places. Whoever asks for the first key should
# now answer the second pair's value.

# %%
corrupt = batch.inputs.clone()
corrupt[rows, key[:, 0]] = batch.inputs[rows, key[:, 1]]
corrupt[rows, key[:, 1]] = batch.inputs[rows, key[:, 0]]
first_two = stored[:, :2]
moved = share(answers(corrupt)[:, :2] == first_two.flip(1))
print(f"answers about the first two keys that go with the key: {moved:.1%}")

# %% [markdown]
# Now the corrupt rows run with the clean residual stream put back at two positions, between the two
# blocks. `run_with_cache` takes it, `patch` gives it. Only the key tokens differ, and yet after
# block 0 it should not be the keys' positions that bring the clean answer back, if the values'
# positions have read them.

# %%
name = "blocks.1.hook_resid_pre"
with torch.no_grad():
    _, clean = model.run_with_cache(batch.inputs, name)


def restored_by(positions):
    """Return the share of clean answers with the clean stream at two positions a row."""
    with patch(model, name, clean[name], rows=rows.repeat(2), positions=positions.T.flatten()):
        return share(answers(corrupt)[:, :2] == first_two)


restore = {
    "nothing": share(answers(corrupt)[:, :2] == first_two),
    "their values": restored_by(value[:, :2]),
    "their keys": restored_by(key[:, :2]),
    "their queries": restored_by(query[:, :2]),
    "two other values (placebo)": restored_by(value[:, 2:4]),
}
for where, clean_answers in restore.items():
    print(f"{where:27} {clean_answers:.1%}")

# %% [markdown]
# ### Exchange two values
#
# `swap_values` leaves the matrix as it is and exchanges what two positions hold for the mixer to
# read. If the last step is "read what stands at that position", the answers about the first two
# keys change places too: the share of those that do. The placebo exchanges two other pairs' values.

# %%
swaps = []
for layer in range(2):
    row = {"layer": layer}
    for (one, other), kind in (((0, 1), "their values"), ((2, 3), "two other values")):
        with swap_values(model, layer, value[:, one], value[:, other]):
            row[f"{kind} exchanged"] = share(answers()[:, :2] == first_two.flip(1))
    swaps.append(row)
swaps = pl.DataFrame(swaps)
swaps

# %% [markdown]
# ### Ablate a head
#
# Each layer has one head. What it returns (`hook_z`) becomes the mean over the rows, everywhere or
# at one kind of position only: where the step should happen, and, as the placebo, at as many
# positions where it should not.


# %%
def ablated(layer, positions=None, how="mean"):
    """Return the share of right answers without a layer's head at these positions."""
    place = {}
    if positions is not None:
        many = rows.repeat_interleave(positions.shape[1])
        place = {"rows": many, "positions": positions.flatten()}
    with ablate(model, f"blocks.{layer}.mixer.hook_z", how, heads=[0], **place):
        return share(answers() == stored)


ablation = pl.DataFrame(
    [
        {
            "layer": layer,
            "everywhere": ablated(layer),
            "everywhere, resampled": ablated(layer, how="resample"),
            "at the keys": ablated(layer, key),
            "at the values": ablated(layer, value),
            "at the queries": ablated(layer, query),
        }
        for layer in range(2)
    ]
)
ablation

# %% [markdown]
# ## All of it at a glance

# %%
cut, swapped = block.to_dicts(), swaps.to_dicts()
print("label:", restored.label)
print(f"layer 0, value kept from its key: {cut[0]['value ↛ its key']:.1%} right,", end=" ")
print(f"from the key before: {cut[0]['value ↛ the key before']:.1%}")
print(f"layer 1, query kept from its value: {cut[1]['query ↛ its value']:.1%} right,", end=" ")
print(f"from another value: {cut[1]['query ↛ another value']:.1%}")
print("clean answers restored by", ", ".join(f"{k}: {v:.1%}" for k, v in restore.items()))
for kind in ("their values exchanged", "two other values exchanged"):
    print(f"layer 1, {kind}: {swapped[1][kind]:.1%} of answers change places")

# %% [markdown]
# ## Answer
#
# It reads twice. In layer 0 the value's position reads the token before it, its key; in layer 1 the
# query's position finds the value's by that key, and copies what stands there. Cut either edge and
# hardly an answer is right, cut as many others and nothing happens. After block 0 the clean stream
# at two values' positions brings the answers back, although only key tokens differ; and when two
# values change places in layer 1, nearly all answers go with them. That is induction, and so
# `mechanism` calls it. Measured on one tiny run from one seed: for another model, run it again.
