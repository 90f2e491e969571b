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
# # The dynamic mask, as printed and as meant
#
# The paper's attention has a mask that is to learn which keys to keep: does it learn as printed,
# and what do the readings that can learn make of it?

# %% [markdown]
# ## What is printed
#
# The printed mask rounds a table l, one number a position, ones at the start, and closes the keys
# where round(l) is zero. `lab.errata` runs what is printed against what is meant. D1: no gradient
# passes a rounding. D2: the text multiplies the mask after the softmax, where rows no longer sum to
# one. D3: a single query, padding on the left, a row longer than the table.

# %%
import torch

import lab
from analysis import dynamic_mask
from lab import errata
from lab.models import build
from tasks import TASKS

for erratum in errata.run(["D1", "D2", "D3"]):
    print(f"{erratum.row}  printed: {erratum.printed_evidence}")
    print(f"    meant:   {erratum.meant_evidence}\n")

# %% [markdown]
# ## Four readings, one task
#
# `literal` is the printed one. `straight-through` rounds too and passes the gradient as if it did
# not. `soft` weighs a key by σ(l). `value`, the authors' later code, lets a key's own value decide.
# Each trains on the same rows from the same weights, for 400 steps at most: small recall, where one
# position in four holds a value that will be asked for. A mask's table is one number a position, so
# rows keep one length here. The recipe is a slow one, so that the masks have the time to move.

# %%
task = TASKS["mqar"](seq_len=16, n_pairs=4, vocab_size=32)
found = {}


def train(mask):
    """Train a model with such a mask, and keep what is found of the mask."""
    run = lab.train(
        task,
        stack="AM*2",
        d_model=32,
        options={"A.mask": mask},
        steps=400,
        out=f"runs/notebooks/mask-{mask}",
        lengthen=False,
        schedule="constant",
        batch_size=64,
        logit_scale=1.0,
        table_learning_rate=3e-3,
        eval_every=25,
        test_rows=256,
    )
    found[mask] = dynamic_mask.measure(run.subject)
    print(f"{mask}: {run.accuracy:.3f} right after {run.result['steps']} steps")
    return run.model


# %% [markdown]
# ## As printed: a mask that never moves
#
# `dynamic_mask.measure` gives the biases, the keys they keep, what they do to attention, and over
# the run's history how they came to be. For the literal mask the last says it all: the gradient is
# zero at every step, not small.

# %%
literal = train("literal")
*_, trajectory, history = found["literal"]
print(trajectory.says)
print(history.says)
history.figure()

# %% [markdown]
# So the trained model is a plain causal attention: put its other weights into one, and nothing
# changes.

# %%
plain = build("AM*2", vocab_size=32, d_model=32).eval()
plain.load_state_dict({n: w for n, w in literal.state_dict().items() if "mask" not in n})
tables = torch.cat([block.mixer.mask.l.detach() for block in literal.blocks])
with torch.no_grad():
    tokens = task.batch(split="test", size=64).inputs
    apart = (plain(tokens) - literal(tokens)).abs().max().item()
print(f"l is 1 in all {tables.numel():,} places: {bool((tables == 1).all())}")
print(f"logits of plain attention with the same weights: {apart:.0e} apart")

# %% [markdown]
# ## Straight-through: a mask that only closes
#
# Now a gradient reaches l, and l moves. But a closed key has no attention, so no gradient tells
# the mask what it lost: below ½ an entry stops, and stays. Which keys went?

# %%
train("straight-through")
_, selection, *_, effect, trajectory, _ = found["straight-through"]
print(trajectory.says)
trajectory.figure()

# %%
print(selection.says)
selection.figure()

# %% [markdown]
# No value that is asked for is closed, and queries attend to their answers twice as much as they
# would without the mask. Looked at by that alone, it does well. But recall also needs keys: a
# value has to find out whose it is. The last numbers tell what comes of that, the change of
# accuracy when a layer's mask is opened after training, nothing else being changed.

# %%
print(effect.says)
effect.figure()

# %% [markdown]
# ## Soft: a mask by degrees
#
# σ(l) never closes a key for good, so the gradient keeps coming. In this task values stand at odd
# positions of the first half, always: a table of positions can know that.

# %%
train("soft")
values, *_, effect, _, _ = found["soft"]
print(values.says)
values.figure()

# %%
print(effect.says)
effect.figure()

# %% [markdown]
# ## Value: each key for itself
#
# No table: the bias comes from the key's own value vector, so that it can follow a token wherever
# it stands, at any length.

# %%
train("value")
values, *_, effect, _, _ = found["value"]
print(values.says)
values.figure()

# %%
print(effect.says)
effect.figure()

# %% [markdown]
# The numbers that the answer rests on: accuracy, how far the masks moved (Euclidean, of the layer
# that moved furthest), the smallest share of keys that a head keeps, and the change of accuracy,
# in points, when the mask of layer 0 or of layer 1 is opened after training.

# %%
for mask, (_, selection, *_, effect, _, history) in found.items():
    right, moved = effect.accuracy.value, history.drifts[-1].max()
    kept = min(head.kept for head in selection.heads)
    opened = ", ".join(f"{100 * change.value:+.1f}" for change in effect.removal)
    print(f"{mask:16} {right:.3f} right, moved {moved:.2f}, keeps {kept:.0%}, opened {opened}")

# %% [markdown]
# ## Answer
#
# As printed it learns nothing: its gradient is exactly zero, l stays at one, and the trained model
# is plain causal attention. Straight-through learns, but can only close: on this tiny run it kept
# the values and closed keys of the first layer that the recall goes by, so that opening that layer
# afterwards helps, and it ends below the others. The soft and the value reading learn without that
# harm. Yet the literal one, which masks nothing, recalls as well: nothing here says that recall
# needs a mask.
