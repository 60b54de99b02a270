# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which decoding method is fastest, where, and at what price?
#
# Everything here is read from the records in `results/`; no model is loaded. A **table** holds runs that share model, data,
# machine, number type, sampling, batch size and limit, and nothing is ranked across tables. Within a table ranks count
# **within one guarantee**: EXACT methods write the target's own text (or draw from its distribution), RELAXED ones may
# change it, INDEPENDENT_MODEL ones are models of their own. INVALID runs are listed and never ranked.
#
# ```
# python -m bench sweep=all_methods           # every method on MT-bench
# python -m bench sweep=translation           # every method of the translation track, at four batch sizes
# python -m bench report                      # the same as a page to sort and filter
# ```

# %%
import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython.display import Markdown, display


def checkout() -> Path:
    """The root of the checkout."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").is_file()), here)


sys.path.insert(0, str(checkout()))

from bench.report import collect, leaderboard, plots  # noqa: E402

sns.set_theme(style="whitegrid", palette="colorblind", context="notebook")
plt.rcParams.update({"figure.dpi": 64, "axes.titlesize": 10, "axes.labelsize": 10})
RESULTS = Path(os.environ.get("DECODEBENCH_RESULTS") or checkout() / "results")
MOST = 6  # tables that have pictures; the others are in RESULTS.md and in the report

RECORDS = collect.read(RESULTS)
GROUPS = leaderboard.groups(RECORDS)
PICTURED = sorted((group for group in GROUPS if len(group.valid) > 1), key=lambda group: -len(group.valid))[:MOST]
runs = sum(len(group.rows) for group in GROUPS)
ranked = sum(len(group.valid) for group in GROUPS)
display(Markdown(f"{runs} finished runs in {len(GROUPS)} tables, {ranked} of them ranked."))
if not GROUPS:
    print("No finished run yet. Make some: python -m bench sweep=all_methods")


def show(frame: pd.DataFrame) -> None:
    display(frame.style.hide())


# %% [markdown]
# ## 1. The fastest of each family
#
# By table, family and guarantee. Speed-ups of different rows of different tables do not compare: their baselines differ.

# %%
if GROUPS:
    show(leaderboard.winners(GROUPS))

# %% [markdown]
# ## 2. All runs
#
# **speed-up**: the baseline's time over the method's, over the same prompts, interleaved in the same run, with a 95 % interval
# over prompts. **predicted**: what the run's own acceptance should bring at the measured cost of passes. **agreement**: share
# of tokens that the target itself would have written.

# %%
for group in GROUPS:
    display(Markdown(f"**{group.heading}**"))
    show(leaderboard.ranking(group).drop(columns="run"))

# %% [markdown]
# ## 3. How sure is the ranking?
#
# Where two intervals overlap widely, the two runs are not told apart; `python -m bench compare A B` tests the pair prompt by
# prompt, which sees much finer.

# %%
for group in PICTURED:
    figure, ax = plt.subplots(figsize=(9, 0.34 * len(group.valid) + 1.2), layout="constrained")
    plots.intervals(ax, group)
    plt.show()
if not PICTURED:
    print("No table has two ranked runs yet: python -m bench sweep=all_methods")

# %% [markdown]
# *Figure 1. Dot and interval on a logarithmic axis, left of the dashed line is slower than plain decoding. Full marks are
# EXACT, hollow ones are not. A method has the same colour and mark in all figures.*
#
# ## 4. By category of prompts
#
# A mean hides that drafts are found in some texts and not in others.

# %%
for group in PICTURED:
    values = leaderboard.categories(group)
    if values.shape[1] > 1:
        figure, ax = plt.subplots(figsize=(1.5 + 1.05 * values.shape[1], 0.34 * len(values) + 1.6), layout="constrained")
        plots.heat_map(ax, group)
        plt.show()
        display(leaderboard.categories(group, shown=True))

# %% [markdown]
# *Figure 2. Speed-up by category. Below each: its 95 % interval and the number of conversations n. One conversation has no
# interval, and few have a wide one.*
#
# ## 5. By conversation

# %%
for group in PICTURED:
    figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    plots.ecdf(ax, group)
    plt.show()

# %% [markdown]
# *Figure 3. Share of conversations (vertical) with at most the speed-up on the horizontal axis, the ten fastest runs of a
# table. Where a line meets the dashed one, that share of conversations became slower.*
#
# ## 6. Tokens per step are not speed
#
# A step that verifies $M$ tokens costs more than one over a single token, and drafting costs too. The grey lines are decoding
# with free drafts: tokens per step times the measured cost of a pass over one token, over that of a pass over $M$ (the
# number at its right end). The dash of a run is what its own acceptance, its passes and its drafting time predict, prefill
# included; the way from the dash to the mark is the method's own overhead.

# %%
for group in PICTURED:
    figure, ax = plt.subplots(figsize=(9.5, 4.2), layout="constrained")
    plots.steps_and_speed(ax, group)
    plt.show()

# %% [markdown]
# *Figure 4. Tokens per step against speed-up. On a machine where a pass over many tokens costs as much as over one, all grey
# lines would fall together.*
#
# ## 7. Quality against speed: translation
#
# On Multi30k three families can be put side by side: methods that draft for the translation model, that leave it early, and
# models that write all words at once. Models of different quality have no baseline in common, so the horizontal axis is
# **absolute**: sentences per second. Between the runs the machine drifts, so a run stands at its speed-up times the rate of its
# model's baseline, the median over all runs; grey crosses are these baselines.

# %%
PLOTS = leaderboard.quality_speed_plots(GROUPS, "bleu", "multi30k")
for plot in PLOTS:
    figure, ax = plt.subplots(figsize=(9.5, 4.6), layout="constrained")
    plots.pareto(ax, plot)
    plt.show()
families = {point.row.family for plot in PLOTS for point in plot.points if point.row.rank is not None}
for missing in [name for name in ("speculative", "early exit", "non-autoregressive") if name not in families]:
    print(f"No valid run of the family '{missing}' is recorded on Multi30k, so nothing is said about it.")
if not PLOTS:
    print("Make them: python -m bench.train method=teacher corpus=multi30k, then python -m bench sweep=translation")

# %% [markdown]
# *Figure 5. BLEU against sentences per second, a figure for each machine, type and batch size. The line joins the runs that no
# other valid run is both faster and better than.*
#
# ## 8. Batches
#
# Verification is nearly free as long as the machine waits for memory. With more rows it is not, and drafts cost what they cost.

# %%
SERIES = leaderboard.batch_series(GROUPS)
for heading, lines in SERIES:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    plots.batch_curves(axes, heading, lines)
    plt.show()
if not SERIES:
    print("No method has been recorded at two batch sizes: python -m bench sweep=batch")

# %% [markdown]
# *Figure 6. Speed-up (left) and throughput of all rows together (right) against the batch size; dotted are the baselines of
# the same runs. The number of prompts may differ between batch sizes, so the curves are no paired comparison.*
#
# ## 9. What to keep in mind
#
# * **The baseline is plain decoding in this suite**, not another library's. Peers stand in the same tables, with their own
#   loops, so that one can see what that denominator is worth.
# * **One machine, one model.** What pays on two CPU cores and what pays on a GPU differ; `python -m bench.cost what-if`
#   predicts a recorded run on another cost curve.
# * **Greedy unless a table says otherwise.** At a temperature fewer drafts are accepted.
