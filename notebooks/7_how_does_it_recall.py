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
# and does the answer really depend on them?
#
# A matrix that looks right is only a hint. Here we remove, restore or redirect each step while
# everything else stays the same. Every intervention has a placebo: an intervention of the same size
# at a place where the step does not happen.

# %%
import polars as pl
import torch

import lab
from analysis import mechanism
from analysis.interventions import ablate, block_edges, patch, swap_values
from tasks import TASKS

tables = pl.Config(
    float_precision=3, tbl_hide_column_data_types=True, tbl_hide_dataframe_shape=True
)

# %% [markdown]
# ## A model that recalls
#
# Eight key–value pairs, then every key once more: a small version of hard MQAR. `lab.train` trains
# the run, or returns at once if the folder already holds the finished run.

# %%
task = TASKS["mqar"](seq_len=32, n_pairs=8, vocab_size=64)
run = lab.train(task, stack="AM*2", d_model=32, steps=600, out="runs/notebooks/attention")
print(f"{run.accuracy:.1%} right after {run.result['steps']} steps, chance {task.chance:.1%}")

# %% [markdown]
# A `Subject` is what every analysis takes: the task, the model in evaluation mode, and rows of the
# test split.

# %%
subject = run.subject
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
    print(f"{found.title}\n{found.says}\n")

# %% [markdown]
# In the corrupt rows two keys have changed places. The clean residual stream is restored in them at
# one kind of position and one depth at a time. Where the values' line is at 1, the value's position
# carries the answer.

# %%
restored.figure()

# %% [markdown]
# The next figure shows what is left of the answer when single edges of a mixer's matrix are
# blocked, or when two values change places. The crosses are the placebos.

# %%
edited[0].figure() if edited else print("keys do not move the answer: nothing to edit")

# %% [markdown]
# ## The same by hand
#
# The rest of the notebook repeats this step by step without the analysis. `batch.links` holds the
# positions of each pair's key, value and query, in the order of storing, `[b q]`.

# %%
query, key, value = (batch.links[name] for name in ("query_pos", "key_pos", "value_pos"))
stored = batch.inputs.gather(1, value)  # the right answers, [b q]
rows = torch.arange(len(query))
print("row 0:", batch.inputs[0].tolist())
print("its first pair: key at", key[0, 0].item(), "value at", value[0, 0].item(), end=", ")
print("asked for at", query[0, 0].item())


# %%
@torch.no_grad()
def answer_queries(inputs=batch.inputs):
    """Return what the model answers at each query, [b q], with the interventions in place."""
    return model(inputs).argmax(-1).gather(1, query)


def compute_share(hits):
    """Return the share of True."""
    return hits.double().mean().item()


print(f"right without any intervention: {compute_share(answer_queries() == stored):.1%}")

# %% [markdown]
# ### Block an edge
#
# `block_edges` keeps some positions from reading others in one layer: their score is −∞ before the
# softmax. First we keep each query from its value; the placebo keeps it from another pair's value.
# Then we keep each value from its own key; the placebo keeps it from the key of the pair before, so
# the first pair is left out.


# %%
def block_and_score(layer, targets, sources):
    """Return the share of right answers about these pairs with the edges between them blocked."""
    many = rows.repeat_interleave(targets.shape[1])
    with block_edges(model, layer, targets.flatten(), sources.flatten(), rows=many):
        right = answer_queries() == stored
    return compute_share(right[:, -targets.shape[1] :])


block = pl.DataFrame(
    [
        {
            "layer": layer,
            "query ↛ its value": block_and_score(layer, query, value),
            "query ↛ another value": block_and_score(layer, query, value.roll(1, 1)),
            "value ↛ its key": block_and_score(layer, value[:, 1:], key[:, 1:]),
            "value ↛ the key before": block_and_score(layer, value[:, 1:], key[:, :-1]),
        }
        for layer in range(2)
    ]
)
block

# %% [markdown]
# ### Corrupt the rows, and restore the residual stream
#
# In the corrupt rows the first two keys have changed places. The right answer to the query for the
# first key is now the second pair's value.

# %%
corrupt = batch.inputs.clone()
corrupt[rows, key[:, 0]] = batch.inputs[rows, key[:, 1]]
corrupt[rows, key[:, 1]] = batch.inputs[rows, key[:, 0]]
first_two = stored[:, :2]
moved = compute_share(answer_queries(corrupt)[:, :2] == first_two.flip(1))
print(f"answers about the first two keys that go with the key: {moved:.1%}")

# %% [markdown]
# Now we run the corrupt rows with the clean residual stream restored at two positions between the
# two blocks: `run_with_cache` records it, `patch` writes it. Only the key tokens differ. But if the
# values' positions have read them in block 0, restoring the keys' positions after that block should
# not bring the clean answer back.

# %%
name = "blocks.1.hook_resid_pre"
with torch.no_grad():
    _, clean = model.run_with_cache(batch.inputs, name)


def patch_and_score(positions):
    """Return the share of clean answers with the clean stream at two positions a row."""
    with patch(model, name, clean[name], rows=rows.repeat(2), positions=positions.T.flatten()):
        return compute_share(answer_queries(corrupt)[:, :2] == first_two)


restore = {
    "nothing": compute_share(answer_queries(corrupt)[:, :2] == first_two),
    "their values": patch_and_score(value[:, :2]),
    "their keys": patch_and_score(key[:, :2]),
    "their queries": patch_and_score(query[:, :2]),
    "two other values (placebo)": patch_and_score(value[:, 2:4]),
}
for where, clean_answers in restore.items():
    print(f"{where:27} {clean_answers:.1%}")

# %% [markdown]
# ### Exchange two values
#
# `swap_values` leaves the matrix as it is and exchanges the values that two positions offer to the
# mixer. If the last step reads what is at that position, the answers about the first two keys
# change places too. The table shows the share that do. The placebo exchanges the values of two
# other pairs.

# %%
swaps = []
for layer in range(2):
    row = {"layer": layer}
    for (one, other), kind in (((0, 1), "their values"), ((2, 3), "two other values")):
        with swap_values(model, layer, value[:, one], value[:, other]):
            row[f"{kind} exchanged"] = compute_share(answer_queries()[:, :2] == first_two.flip(1))
    swaps.append(row)
swaps = pl.DataFrame(swaps)
swaps

# %% [markdown]
# ### Ablate a head
#
# Each layer has one head. We replace its output (`hook_z`) by the mean over the rows, everywhere or
# only at one kind of position: where the step should happen and, as a placebo, at as many positions
# where it should not.


# %%
def ablate_and_score(layer, positions=None, how="mean"):
    """Return the share of right answers with a layer's head ablated at these positions."""
    place = {}
    if positions is not None:
        many = rows.repeat_interleave(positions.shape[1])
        place = {"rows": many, "positions": positions.flatten()}
    with ablate(model, f"blocks.{layer}.mixer.hook_z", how, heads=[0], **place):
        return compute_share(answer_queries() == stored)


ablation = pl.DataFrame(
    [
        {
            "layer": layer,
            "everywhere": ablate_and_score(layer),
            "everywhere, resampled": ablate_and_score(layer, how="resample"),
            "at the keys": ablate_and_score(layer, key),
            "at the values": ablate_and_score(layer, value),
            "at the queries": ablate_and_score(layer, query),
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
# query's position finds the value's position by that key and copies its token. With either edge
# blocked hardly any answer is right; with as many other edges blocked nothing changes. After block
# 0 the clean stream at two values' positions brings the answers back, although only key tokens
# differ. When two values change places in layer 1, nearly all answers go with them. That is
# induction, the label that `mechanism` gives. All this holds for one tiny run from one seed;
# measure other models again.
