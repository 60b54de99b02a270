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
# # What is a method worth at larger batches?
#
# Verifying many tokens in one pass is nearly free as long as the machine waits for its memory. More rows fill the same pass
# with tokens of other texts, so the speed-up of drafting falls with the batch size. How fast it falls depends on the machine.
#
# Rows of a batch run in lockstep: a row that has ended waits for the longest one. With `measure.refill=true` a waiting prompt
# takes its place at once. The two are measured separately.
#
# ```
# python -m bench sweep=batch                # every method at 1, 2, 4, 8 and 16 rows
# python -m bench sweep=batch_refilled       # methods whose rows can be refilled, at 2 to 32 rows
# ```

# %%
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown, display

from bench.report import leaderboard, notebook, plots, series, terminal

notebook.theme()
SIZES = (1, 2, 4, 8, 16, 32)  # of the sweep

GROUPS = leaderboard.groups(notebook.records())
COVERAGE = series.coverage(GROUPS, SIZES)
SERIES = [  # a figure of one method alone shows no difference between methods
    (heading, lines)
    for heading, lines in series.of(GROUPS)
    if len({rows[0].method for rows in lines.values()}) > 1
]


def draw(of, before, ylabel: str) -> None:
    """A quantity over the batch size, a figure for each series."""
    for heading, lines in SERIES:
        rows = [row for line in lines.values() for row in line]
        figure, ax = plt.subplots(figsize=(10, 5.2), layout="constrained")
        plots.legend(figure, rows)
        ax.set(title=plots.title(heading, rows, 110), ylabel=ylabel)
        plots.over_batches(ax, lines, of, before)
        plt.show()


# %% [markdown]
# ## 1. Tokens per second
#
# All rows of a batch together; dotted lines are the baselines of the same runs. A line above its dotted line is a speed-up.
# The speed-ups themselves are in `start_here.ipynb`.

# %%
draw(lambda row: row.summary["tokens_per_s"], lambda row: row.summary["baseline_tokens_per_s"], "tokens per second, all rows")
if not SERIES:
    print("No two methods have been recorded at two batch sizes: python -m bench sweep=batch")

# %% [markdown]
# ## 2. Latency
#
# Mean seconds from the prompt to the last token. Throughput matters to the operator of a server, latency to its users.

# %%
draw(
    lambda row: row.summary["latency_s"]["mean"],
    lambda row: row.summary["baseline"]["latency_s"]["mean"],
    "seconds from prompt to last token, mean",
)

# %% [markdown]
# ## 3. Memory
#
# Peak memory beyond the interpreter and its libraries. Weights are read once for all rows; the cache grows with the rows, as
# do the masks and logits of a method.

# %%
draw(
    lambda row: (row.summary["peak_memory_bytes"] or float("nan")) / 2**20,
    lambda row: (row.summary["baseline"]["peak_memory_bytes"] or float("nan")) / 2**20,
    "MiB at the peak",
)

# %% [markdown]
# ## 4. What is recorded
#
# Speed-up over the baseline of the same run at the same batch size; **-** is not recorded. Neither that nor **INVALID** is in
# any figure, and methods recorded at one batch size only are not either. The number of prompts may differ between batch
# sizes, so a line is no paired comparison, but each of its points is.


# %%
def missing(cells: pd.DataFrame) -> str:
    """The batch sizes without a record, and how many of the others have only some of the methods."""
    count = {name.removeprefix("B = "): int((cells[name] != "-").sum()) for name in cells}
    none = [size for size, known in count.items() if not known]
    some = [f"{size} ({known} of {len(cells)} methods)" for size, known in count.items() if 0 < known < len(cells)]
    parts = [f"No record at B = {', '.join(none)}."] if none else []
    return " ".join([*parts, *([f"Incomplete: B = {', '.join(some)}."] if some else [])]) or "Complete."


for heading, cells in COVERAGE:
    display(Markdown(f"**{heading}.** {missing(cells)}"))
    display(cells.style)
if not COVERAGE:
    print("No finished run yet. Make some: python -m bench sweep=batch")

# %% [markdown]
# ## 5. Refilled rows
#
# Tokens per second of the same method at the same batch size, in lockstep and refilled, each with its own baseline. The
# difference is what lockstep loses by rows that wait.


# %%
def rates(refilled: bool) -> pd.DataFrame:
    """Of valid runs, by what they share apart from lockstep."""
    rows = [
        {
            "table": f"{row.summary['dataset']}, {terminal.place(row.summary)}",
            "B": row.summary["batch_size"],
            "method": plots.label(row),
            "tokens/s": row.summary["tokens_per_s"],
            "baseline": row.summary["baseline_tokens_per_s"],
            "speed-up": row.speed,
        }
        for group in GROUPS
        for row in group.valid
        if bool(row.summary.get("refill")) is refilled
    ]
    return pd.DataFrame(rows, columns=["table", "B", "method", "tokens/s", "baseline", "speed-up"])


REFILLED = rates(refilled=True)
if len(REFILLED):
    both = rates(refilled=False).merge(REFILLED, on=["table", "B", "method"], suffixes=(" in lockstep", " refilled"))
    display(both.style.hide().format(precision=2))
    print(f"{len(REFILLED)} refilled runs, {len(both)} with a twin in lockstep.")
else:
    print("No refilled run is recorded yet: python -m bench sweep=batch_refilled")

# %% [markdown]
# ## 6. Limits
#
# * Other batch sizes can be predicted: `python -m bench cost what-if results/reference/RUN curve=results/reference/costs/ID
#   batch=1,4,16` regroups the recorded rounds of a run at B = 1 and prices them on a measured cost curve.
# * A batch is as slow as its slowest row. All rows of a round verify as many tokens as the widest draft among them.
# * Lockstep batches hold consecutive prompts of the data set, not prompts sorted by length.
