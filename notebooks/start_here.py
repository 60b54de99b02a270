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
# # DecodeBench in four figures
#
# Each method generates text for the same prompts as plain autoregressive decoding, in the same run, and its **speed-up** is
# the baseline's time divided by its own. The figures show the records of the project in `results/reference/` and, where you
# have measured something, your own runs in `results/`, marked "(yours)"; no model is loaded.

# %%
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display

from bench.report import leaderboard, notebook, plots, series

notebook.theme()
RECORDS = [record for record in notebook.records() if record.finished and record.summary]
GROUPS = leaderboard.groups(RECORDS)
facts = [(record.source, record.summary["dataset"], record.summary["model"]) for record in RECORDS]
runs = pd.DataFrame(facts, columns=["records", "data set", "model"]).value_counts(sort=False).rename("runs")
display(runs.reset_index().replace({"own": "yours"}).style.hide())
if not GROUPS:
    print("No finished run yet. Make some: python -m bench sweep=all_methods")


def chosen(dataset: str, fewest: int) -> list[leaderboard.ComparisonGroup]:
    """The table of a data set with the most methods, and each other table with a run of yours and enough methods."""
    tables = [leaderboard.fastest(group) for group in GROUPS if group.first["dataset"] == dataset and group.first["batch_size"] == 1]
    tables = sorted((table for table in tables if len(table.rows) >= fewest), key=lambda table: -len(table.rows))
    return tables[:1] + [table for table in tables[1:] if any(row.record.source == "own" for row in table.rows)]


TABLES = chosen("mtbench", 2) + chosen("spec_bench", 2)


def panels(tables: list[leaderboard.ComparisonGroup], draw, height: float) -> None:
    """Two tables beside each other."""
    for pair in (tables[i : i + 2] for i in range(0, len(tables), 2)):
        figure, axes = plt.subplots(1, len(pair), figsize=(6.5 * len(pair), height), squeeze=False, layout="constrained")
        plots.legend(figure, [row for table in pair for row in table.rows])
        for ax, table in zip(axes.flat, pair, strict=True):
            ax.set_title(plots.title(table.heading, table.rows, 66))
            draw(ax, table)
        plt.show()


# %% [markdown]
# ## 1. How much faster?
#
# A method right of the dashed line generates its text faster than plain decoding, and the bar is the 95 % interval over the
# prompts. Only some methods are clearly faster on this machine, and where two intervals overlap widely the order of the two
# is not certain.

# %%
panels(TABLES, plots.intervals, 5)
if not TABLES:
    print("No table has two ranked methods: python -m bench sweep=all_methods")

# %% [markdown]
# ## 2. Why are more tokens per step not more speed?
#
# A step that verifies M tokens costs more than a step for one token, so the same tokens per step give less speed: each grey
# line is the speed-up if drafts were free and every step verified M tokens. Drafting takes time as well, and the dash of a
# method is the speed-up predicted from its acceptance, the measured cost of a pass and its drafting time.

# %%
DRAFTING = [
    leaderboard.ComparisonGroup(table.heading, [row for row in table.rows if plots.drafts(row) or row.family == leaderboard.BASELINE])
    for table in TABLES
    if sum(map(plots.drafts, table.rows)) > 1
]
panels(DRAFTING, plots.steps_and_speed, 4.8)
if not DRAFTING:
    print("No table has two methods that draft: python -m bench sweep=all_methods")

# %% [markdown]
# ## 3. What does speed cost in quality?
#
# A model that generates all tokens at once is the fastest and loses quality, while verified drafts and early exit keep the
# quality and gain little; a plain model with a shallow decoder (6_1) competes with both. The grey line joins the runs that no
# other run beats in speed and quality, and thin lines join the settings of one method.

# %%
TRANSLATION = [
    plot
    for plot in leaderboard.quality_speed_plots(GROUPS, "bleu", "multi30k")
    if plot.points[0].row.summary["batch_size"] == 1 and sum(point.row.rank is not None for point in plot.points) > 1
]
for plot in TRANSLATION:
    rows = [point.row for point in plot.points if point.row.rank is not None]
    figure, ax = plt.subplots(figsize=(11, 6), layout="constrained")
    plots.legend(figure, rows)
    ax.set_title(plots.title(plot.heading, rows, 120))
    plots.pareto(ax, plot)
    plt.show()
if not TRANSLATION:
    print("No two translation runs are recorded: python -m bench sweep=translation")

# %% [markdown]
# ## 4. What is left in a batch?
#
# Drafting uses arithmetic that is idle while the machine waits for its memory, and more rows in a batch leave less of it
# idle, so the speed-up of speculative methods falls with the batch size. Models that generate all tokens in one pass do less
# work for each sentence and keep their advantage.

# %%
SERIES = [(heading, lines) for heading, lines in series.of(GROUPS) if len({rows[0].method for rows in lines.values()}) > 1]
for heading, lines in SERIES:
    rows = [row for line in lines.values() for row in line]
    figure, ax = plt.subplots(figsize=(10, 5.5), layout="constrained")
    plots.legend(figure, rows)
    ax.set(title=plots.title(heading, rows, 110), ylabel="speed-up at this batch size")
    plots.over_batches(ax, lines, lambda row: row.speed)
    ax.axhline(1, color="0.4", linewidth=1, linestyle="--", zorder=0)
    plt.show()
if not SERIES:
    print("No two methods have been recorded at two batch sizes: python -m bench sweep=batch")

# %% [markdown]
# More: `leaderboard.ipynb` has all tables, `batch.ipynb` throughput, latency and memory over the batch size,
# `early_exit.ipynb` and `non_autoregressive.ipynb` one family each, and `losslessness.ipynb` the proof that verified drafts
# do not change the distribution.
