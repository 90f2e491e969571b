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
# # Which values does IFA use?
#
# Inner function attention looks its values up: each token scores a few rows of a table with learned
# keys, and its value is itself times the row that wins. Which rows do the tokens of a trained model
# choose, and does it matter which?

# %%
import polars as pl
import torch
from torch.nn import functional as F

import lab
from analysis import value_usage
from analysis.interventions import ablate
from analysis.scoring import scored
from lab.models import build
from tasks import TASKS

tables = pl.Config(
    float_precision=3, tbl_hide_column_data_types=True, tbl_hide_dataframe_shape=True
)

# %% [markdown]
# ## Can the choice be learned at all?
#
# As printed, the keys start at zero and only the indices of the best scores are used (`literal`).
# Then all scores tie, and nothing can break the tie: no gradient reaches the keys. One backward
# pass on untrained models tells. A weight by the softmax of the scores lets the gradient through;
# keys that are zero still hide it from the queries, for the first step.

# %%
task = TASKS["mqar"](seq_len=32, n_pairs=8, vocab_size=64)
batch = task.batch(size=64)


def length(gradient):
    """Return the norm of a gradient in words; there may be none."""
    return "none" if gradient is None else f"{gradient.norm().item():.2g}"


rows = []
for retrieval in ("literal", "softmax"):
    for key_init in ("zeros", "normal"):
        options = {"I.n_values": 4, "I.retrieval": retrieval, "I.key_init": key_init}
        model = build("IM*2", vocab_size=task.vocab_size, d_model=32, options=options)
        logits = model(batch.inputs)
        F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
        mixer = model.blocks[0].mixer
        rows.append(
            {
                "retrieval": retrieval,
                "keys start": key_init,
                "gradient of the keys": length(mixer.value_keys.grad),
                "of the queries": length(mixer.value_query.weight.grad),
            }
        )
print(pl.DataFrame(rows))

# %% [markdown]
# ## Two runs
#
# Both weigh by the softmax; each of two layers has four values, and a token takes one. Normal keys
# are trained until recall is solved. Zero keys are trained a little, to see how the tie ends.

# %%
options, out = {"I.n_values": 4}, "runs/notebooks/ifa"
run = lab.train(task, stack="IM*2", d_model=32, options=options, steps=800, out=out)
options, out = {"I.n_values": 4, "I.key_init": "zeros"}, "runs/notebooks/ifa-zeros"
zeros = lab.train(task, stack="IM*2", d_model=32, options=options, steps=150, out=out)
for one in (run, zeros):
    print(f"{one.path.name}: {one.accuracy:.1%} right after {one.result['steps']} steps")

# %% [markdown]
# ## Who takes what
#
# `measure` returns a finding per figure, which says what it shows and draws it. First the share
# of each role's tokens that choose each value. Evenly used, four values count as e^H = 4.

# %%
subject = run.subject
uses, *pasts, swaps = value_usage.measure(subject)
print(uses.says)
uses.figure()

# %% [markdown]
# If the role tells little, what does? Perhaps the token: the mixer's input in layer 0 is the
# embedding and nothing else. Each token's favourite value is taken as a guess of its choice; the
# placebo does the same after shuffling the choices over all tokens.

# %%
names = [f"blocks.{layer}.mixer.hook_value_indices" for layer in range(2)]
with torch.no_grad():
    _, cache = subject.model.run_with_cache(subject.batch.inputs, names)
tokens = subject.batch.inputs.flatten()


def favourite(chosen):
    """Return the share of positions that choose what their token chooses most often."""
    counts = torch.zeros(task.vocab_size, 4)
    counts.index_put_((tokens, chosen), torch.ones(len(tokens)), accumulate=True)
    return (counts.max(1).values.sum() / counts.sum()).item()


torch.manual_seed(0)
by_token = []
for name in names:
    chosen = cache[name].flatten()
    shuffled = chosen[torch.randperm(len(chosen))]
    by_token.append((favourite(chosen), favourite(shuffled)))
for layer, (share, placebo) in enumerate(by_token):
    print(f"layer {layer}: {share:.1%} take their token's favourite, shuffled {placebo:.1%}")

# %% [markdown]
# ## Since when
#
# The run folder keeps the weights of some thirty steps, so the choices can be followed from the
# start: normal keys first.

# %%
print(pasts[1].says)
pasts[1].figure()

# %% [markdown]
# Now zero keys. Of tied scores the lower index wins, so every token takes value 0, until the first
# step moves the keys apart.

# %%
_, *zero_pasts, _ = value_usage.measure(zeros.subject)
print(zero_pasts[1].says)
zero_pasts[1].figure()

# %% [markdown]
# ## Does it matter which?
#
# A value is forced on all tokens, or on those of one role, at the weight of the value it replaces.
# The numbers are points of accuracy, lost where they are negative; a star marks a loss that chance
# does not explain. Dealing the tokens' own choices out at random, the first line of each layer in
# the table, keeps how often each value is used, and takes away who uses it.

# %%
print(swaps.says)
print(swaps.reading)
for row in swaps.numbers().rows:
    print(*row, sep=" · ")
swaps.figure()

# %% [markdown]
# The same by hand, without the care for weights: `ablate` gives each row the choices of another row
# at the same positions, in one layer.

# %%
before = scored(subject.model, subject.batch).accuracy
resampled = []
for name in names:
    with ablate(subject.model, name, "resample"):
        resampled.append(scored(subject.model, subject.batch).accuracy)
    print(f"{name}: {before:.1%} → {resampled[-1]:.1%}")

# %% [markdown]
# ## All of it at a glance

# %%
for layer in uses.layers:
    share, placebo = by_token[layer.layer]
    print(
        f"layer {layer.layer}: uses {layer.used} of {len(layer.shares)} values, "
        f"e^H {layer.effective:.2f}; I(value; role) {layer.role.information:.3f} of "
        f"{layer.role.bound:.3f} nats; the token's favourite {share:.1%}, shuffled {placebo:.1%}; "
        f"another row's choices {before:.1%} → {resampled[layer.layer]:.1%}"
    )
for layer in (0, 1):
    worst = {
        name: min(
            swap.change.value for swap in swaps.swaps if swap.layer == layer and swap.role == role
        )
        for role, name in enumerate(swaps.role_names)
    }
    costs = ", ".join(f"{name} {change:+.1%}" for name, change in worst.items())
    print(f"layer {layer}, accuracy with the worst value forced, by role: {costs}")
for past in zero_pasts:
    print(
        f"zero keys, layer {past.layer}: values used {past.used[0]} at step {past.steps[0]}, "
        f"{past.used[1]} at step {past.steps[1]}, {past.used[-1]} at step {past.steps[-1]}"
    )

# %% [markdown]
# ## Answer
#
# All four, in both layers, and hardly by role: of the 1.3 nats that a role could tell it tells a
# hundredth in layer 0 and a twenty-fifth in layer 1. The token decides, wholly in layer 0,
# which sees nothing else, and for about nine in ten in layer 1. The choice matters only at the
# tokens that recall reads: another value costs most answers at the keys in layer 0 and at the
# values in layer 1, and next to none elsewhere. From zero keys every token takes value 0 until
# the first step of a softmax ends the tie; as printed nothing ever ends it, for no gradient
# reaches the keys. One tiny run, one seed.
