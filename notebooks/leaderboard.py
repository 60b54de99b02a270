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
# # Which method is fastest, where, and for which prompts?
#
# A **table** holds runs that share model, data set, machine, number type, sampling, batch size and limit; nothing is ranked
# across tables. Within a table ranks count within one guarantee: EXACT methods generate the target's own text, RELAXED ones
# may change it, INDEPENDENT_MODEL ones are other models. INVALID runs are listed and never ranked. Runs marked "(yours)" are
# from `results/`, all others are the project's records in `results/reference/`.
#
# ```
# python -m bench sweep=all_methods           # every method on MT-bench
# python -m bench sweep=translation           # every method of the translation track, at six batch sizes
# python -m bench report                      # the same as a page to sort and filter
# ```

# %%
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown, display

from bench.report import leaderboard, notebook, plots

notebook.theme()
MOST = 6  # tables that have figures; the others are in RESULTS.md and in the report
FEWEST = 3  # runs of a figure, and conversations of a cell

GROUPS = leaderboard.groups(notebook.records())
PICTURED = sorted((group for group in GROUPS if len(group.valid) >= FEWEST), key=lambda group: -len(group.valid))[:MOST]
runs = sum(len(group.rows) for group in GROUPS)
ranked = sum(len(group.valid) for group in GROUPS)
display(Markdown(f"{runs} finished runs in {len(GROUPS)} tables, {ranked} of them ranked."))
if not GROUPS:
    print("No finished run yet. Make some: python -m bench sweep=all_methods")


def draw(figure_of, group: leaderboard.ComparisonGroup, width: float, **options) -> None:
    """One table as one figure; its height grows with the number of runs."""
    figure, ax = plt.subplots(figsize=(width, 0.27 * len(group.valid) + 1.7), layout="constrained")
    if figure_of is not plots.heat_map:
        plots.legend(figure, group.valid)
    ax.set_title(plots.title(group.heading, group.rows, 80))
    figure_of(ax, group, **options)
    plt.show()


# %% [markdown]
# ## 1. How sure is the ranking?
#
# Speed-up with its 95 % interval over prompts. Where two intervals overlap widely, the order of the two runs is not certain;
# `python -m bench compare A B` tests the pair prompt by prompt, which is much more sensitive.

# %%
for group in PICTURED:
    draw(plots.intervals, group, 9)
if not PICTURED:
    print(f"No table has {FEWEST} ranked runs yet: python -m bench sweep=all_methods")

# %% [markdown]
# ## 2. By conversation
#
# The mark is the median conversation, the box contains the middle half of them and the line nine tenths. The share on the
# right became slower than with plain decoding.

# %%
for group in PICTURED:
    draw(plots.conversations, group, 9)

# %% [markdown]
# ## 3. By category of prompts
#
# Drafts are found in some kinds of text and not in others. Only categories with at least three conversations are shown; a cell
# is their mean, so small differences between cells mean nothing.

# %%
for group in PICTURED:
    if leaderboard.categories(group, least=FEWEST).shape[1] > 1:
        draw(plots.heat_map, group, 9, least=FEWEST)

# %% [markdown]
# ## 4. The fastest of each family
#
# By table, family and guarantee. Speed-ups of different tables do not compare, because their baselines differ.

# %%
if GROUPS:
    display(leaderboard.winners(GROUPS).style.hide())

# %% [markdown]
# ## 5. Your runs
#
# The tables with runs of yours; `RESULTS.md` has all tables of the reference records. **predicted**: the speed-up computed from
# the run's acceptance and the measured cost of a pass. **agreement**: the share of tokens that the target itself would have
# generated.

# %%
OWN = [group for group in GROUPS if any(row.record.source == "own" for row in group.rows)]
for group in OWN:
    table = leaderboard.ranking(group)
    table["method"] = list(map(plots.label, group.rows))
    display(Markdown(f"**{group.heading}**"), table.drop(columns="run").style.hide())
if not OWN:
    print("No run of yours yet: python -m bench method=eagle dataset=mtbench")

# %% [markdown]
# ## 6. Limits
#
# * The baseline is plain decoding in this suite. The peers, other implementations with their own loops, are in the same tables
#   and show how fast that baseline is.
# * What pays on two CPU cores and what pays on a GPU differ; `python -m bench cost what-if` predicts a recorded run on another
#   cost curve.
# * Decoding is greedy unless a table says otherwise. At a higher temperature fewer drafts are accepted.
