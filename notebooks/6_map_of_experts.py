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
# # A map of experts
#
# CDMoE keeps many experts of a single neuron each, and every token retrieves a few by product keys:
# which experts does a trained model choose, and which does it need?

# %%
import polars as pl
import torch

import lab
from analysis.experts import key_map, knockout, load, roles, training
from analysis.interventions import knock_out_experts, transplant_experts
from analysis.scoring import scored
from tasks import TASKS

tables = pl.Config(
    float_precision=3, tbl_hide_column_data_types=True, tbl_hide_dataframe_shape=True
)

# %% [markdown]
# ## Two runs
#
# Two blocks of attention and CDMoE on small hard MQAR. A layer has 64 = 8 × 8 experts; two
# retrieval heads choose four each. The MLP that all tokens share is narrow here (`d_ff` 16), so
# that something is left for the experts to do. The second run starts from zero keys, as printed,
# and is trained a little, to see how it begins.

# %%
task = TASKS["mqar"](seq_len=32, n_pairs=8, vocab_size=64)
options = {"E.n_experts": 64, "E.n_retrieval_heads": 2, "E.k": 4, "E.d_ff": 16}
out = "runs/notebooks/experts"
run = lab.train(task, stack="AE*2", d_model=32, options=options, steps=800, out=out)
options, out = {**options, "E.key_init": "zeros"}, "runs/notebooks/experts-zeros"
zeros = lab.train(task, stack="AE*2", d_model=32, options=options, steps=100, out=out)
for one in (run, zeros):
    print(f"{one.path.name}: {one.accuracy:.1%} right after {one.result['steps']} steps")

# %% [markdown]
# ## What a token chooses
#
# The indices pass a hook point, `[b t h k]`. Expert e stands in row e // 8, column e % 8: the best
# rows and the best columns of a query make its candidates.

# %%
subject = run.subject
model, batch = subject.model, subject.batch
names = [f"blocks.{layer}.mlp.hook_expert_indices" for layer in range(2)]
with torch.no_grad():
    _, cache = model.run_with_cache(batch.inputs, names)
for position in range(4):
    role = task.role_names[batch.roles[0, position]]
    found = [(e // 8, e % 8) for e in cache[names[0]][0, position].flatten().tolist()]
    print(f"token {batch.inputs[0, position].item():2} ({role}): {found}")

# %% [markdown]
# ## How evenly
#
# Load by rank, beside what uniform random choice would do on as many tokens.

# %%
loads, comparison = load.measure(subject)
print(loads.says)
loads.figure()

# %% [markdown]
# And a few shares of every layer, each beside that of random choice.

# %%
print(comparison.says)
comparison.figure()

# %% [markdown]
# ## The map
#
# The grid of product keys with the load of each expert, between the loads of row and column keys.
# Were the two halves chosen independently, the map would be the product of its margins.

# %%
*maps, together = key_map.measure(subject)
print(maps[0].says)
maps[0].figure()

# %%
print(maps[1].says)
maps[1].figure()

# %% [markdown]
# Which experts does one token choose together? Mean PMI over all pairs, beside that of choices that
# are shuffled among token ids; `together.numbers()` has it before training, too.

# %%
print(together.says)

# %% [markdown]
# ## Whom they serve
#
# Roles of the tokens that choose an expert. One that served every role alike would look like the
# bar at the top.

# %%
(preferences,) = roles.measure(subject)
print(preferences.says)
preferences.figure()

# %% [markdown]
# ## Since when
#
# From step 0 on, by the weights that the run folder keeps: from normal keys, and from zero keys,
# where all scores tie and every token takes the same experts.

# %%
(course,) = training.measure(subject)
print(course.says)
course.figure()

# %%
(zero_course,) = training.measure(zeros.subject)
print(zero_course.says)
zero_course.figure()

# %% [markdown]
# ## Which are needed
#
# To be chosen is not to be needed. The analysis deletes the most loaded experts one at a time,
# beside twins that are chosen about as often, and then all of them.

# %%
first, second, by_role, held = knockout.measure(subject)
print(first.says)
first.figure()

# %%
print(second.says)
second.figure()

# %% [markdown]
# And at whose tokens? Experts are deleted where tokens of one role use them, and kept elsewhere.

# %%
print(by_role.says)
by_role.figure()

# %% [markdown]
# Does any one expert hold an answer, as it would on a task of memorised facts?

# %%
print(held.says)
held.figure()

# %% [markdown]
# By hand: `knock_out_experts` silences experts for the length of a `with` block. Here the eight
# that are chosen most, eight others as a placebo, and all. `transplant_experts` puts the experts of
# the untrained model in place of all: chosen as before, but they never learned.


# %%
def accuracy():
    """Return the share of right answers, with the interventions in place."""
    return scored(model, batch).accuracy


whole, untrained, knocked = accuracy(), run.run.load_model(0), []
for layer in range(2):
    ranked = cache[names[layer]].flatten().bincount(minlength=64).argsort(descending=True)
    row = {"layer": layer, "all in place": whole}
    silenced = {"8 most chosen": ranked[:8], "8 in the middle": ranked[28:36], "all 64": ranked}
    for kind, chosen in silenced.items():
        with knock_out_experts(model, layer, chosen):
            row[f"without {kind}"] = accuracy()
    with transplant_experts(untrained, model, layer, range(64)):
        row["all 64 untrained"] = accuracy()
    knocked.append(row)
pl.DataFrame(knocked)

# %% [markdown]
# ## All of it at a glance

# %%
for used, tried, row in zip(loads.layers, (first, second), knocked, strict=True):
    print(
        f"layer {used.layer}: {used.choices.used:.0%} of {used.n_experts} experts chosen, as "
        f"evenly as {used.choices.effective:.0f} equal ones (random {used.uniform.effective:.0f}); "
        f"without all of them the loss changes by {tried.everything.loss:+.3f} nats, the accuracy "
        f"from {whole:.1%} to {row['without all 64']:.1%}, without the 8 most chosen to "
        f"{row['without 8 most chosen']:.1%}, without 8 in the middle to "
        f"{row['without 8 in the middle']:.1%}"
    )
print(by_role.says)
for i, layer in enumerate(zero_course.layers):
    effective = zero_course.effective[i]
    print(
        f"zero keys, layer {layer}: {effective[0]:.1f} effective experts at step 0, "
        f"{effective[1]:.1f} at step {zero_course.steps[1]}, "
        f"{effective[-1]:.1f} at step {zero_course.steps[-1]}"
    )

# %% [markdown]
# ## Answer
#
# Nearly all are chosen, but not evenly: 64 experts count as some 52 equal ones in layer 0 and
# some 30 in layer 1, and row and column keys are not chosen independently. Few are needed.
# Without all of layer 0's experts five answers in a hundred are lost, mostly through what they
# add at the queries, and no single one by more than .04 nats; without all of layer 1's nothing
# changes. A map of load is no map of need. From zero keys every token takes the same four
# experts, and the first step already spreads them over about twenty. One tiny run whose shared
# MLP was kept narrow: with a wider `E.d_ff` try what is left for the experts.
