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
# Verifying many tokens in one pass is nearly free as long as the machine waits for its memory. More rows fill the
# same pass with other texts' tokens, so the speed-up of drafting falls with the batch size, and at some size it is a
# loss. How fast it falls depends on the machine; here it is read from the records in `results/`, and no model is
# loaded.
#
# Rows go in lockstep: one that has ended waits for the longest of its batch, and what it would have cost is in
# nobody's tokens. With `measure.refill=true` a prompt that waits takes its place at once. Both are measured, apart.
#
# ```
# python -m bench sweep=batch                # every method at 1, 2, 4, 8, 16 and 32 rows
# python -m bench sweep=batch_refilled       # those whose rows can be refilled, at 2 to 32 rows
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

from bench.report import collect, leaderboard, plots, terminal  # noqa: E402

sns.set_theme(style="whitegrid", palette="colorblind", context="notebook")
plt.rcParams.update({"figure.dpi": 64, "axes.titlesize": 10, "axes.labelsize": 10})
RESULTS = Path(os.environ.get("DECODEBENCH_RESULTS") or checkout() / "results")
SIZES = (1, 2, 4, 8, 16, 32)  # of the sweep

GROUPS = leaderboard.groups(collect.read(RESULTS))
SERIES = leaderboard.batch_series(GROUPS)
COVERAGE = leaderboard.batch_coverage(GROUPS, SIZES)

# %% [markdown]
# ## 1. What is recorded, and what is not
#
# Speed-up over the baseline of the same run at the same batch size. **-** is not recorded, **INVALID** was recorded
# and is not to be believed; neither is in any figure.


# %%
def missing(cells: pd.DataFrame) -> str:
    """The batch sizes at which nothing is recorded, and how many of the others have only some of the methods."""
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
# ## 2. Speed-up and throughput

# %%
for heading, lines in SERIES:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    plots.batch_curves(axes, heading, lines)
    plt.show()
if not SERIES:
    print("No method has been recorded at two batch sizes: python -m bench sweep=batch")

# %% [markdown]
# *Figure 1. Speed-up (left, above the dashed line is faster than plain decoding) and tokens per second of all rows
# together (right); dotted are the baselines of the same runs. Only methods recorded at two batch sizes or more are
# drawn. Full marks are EXACT, hollow ones are not. The number of prompts may differ between batch sizes, so a curve
# is no paired comparison; each of its points is.*
#
# ## 3. Latency
#
# Throughput is what a server sells, latency what its users feel. In lockstep a prompt's time ends with its own last
# token.

# %%
for heading, lines in SERIES:
    figure, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
    plots.over_batches(
        ax,
        lines,
        lambda row: row.summary["latency_s"]["mean"],
        lambda row: row.summary["baseline"]["latency_s"]["mean"],
    )
    ax.set(ylabel="seconds from prompt to last token, mean", title=heading, ylim=(0, None))
    ax.legend(fontsize=8)
    plt.show()

# %% [markdown]
# *Figure 2. Mean seconds per prompt; dotted are the baselines of the same runs.*
#
# ## 4. Memory
#
# Weights are read once for all rows; the cache grows with them, and so do a method's masks and logits.

# %%
for heading, lines in SERIES:
    figure, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
    plots.over_batches(
        ax,
        lines,
        lambda row: (row.summary["peak_memory_bytes"] or float("nan")) / 2**20,
        lambda row: (row.summary["baseline"]["peak_memory_bytes"] or float("nan")) / 2**20,
    )
    ax.set(ylabel="MiB at the peak", title=heading, ylim=(0, None))
    ax.legend(fontsize=8)
    plt.show()

# %% [markdown]
# *Figure 3. Peak memory beyond the interpreter and its libraries.*
#
# ## 5. Rows that are refilled
#
# Tokens per second of the same method at the same batch size, in lockstep and refilled, each with its own baseline.
# The difference is what lockstep loses by rows that wait.


# %%
def rates(refilled: bool) -> pd.DataFrame:
    """Of valid runs, by what they share but for lockstep."""
    rows = [
        {
            "table": f"{row.summary['dataset']}, {terminal.place(row.summary)}",
            "B": row.summary["batch_size"],
            "method": row.label,
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
# ## 6. What to keep in mind
#
# * **Other batch sizes can be predicted**: `python -m bench.cost what-if results/RUN curve=results/costs/ID
#   batch=1,4,16` regroups the recorded rounds of a run at B = 1 and prices them on a measured cost curve.
# * **A batch is as slow as its slowest row.** All rows of a round take as many verified tokens as the widest draft
#   among them; methods that draft little when they have nothing to say gain less from that in company.
# * **Prompts differ in length.** Lockstep batches hold consecutive prompts of the data set, not prompts sorted by
#   length.
