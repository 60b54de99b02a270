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
# # Does generating all words at once pay?
#
# A **non-autoregressive** model generates every word of a translation in the same pass. It is another model with another text,
# so it has to be judged by quality *and* speed, next to translation models that are fast in other ways. Critics (Kasai et al.
# 2021, Helcl et al. 2022) list what is easily left out: a slow baseline, a batch of one, a raw autoregressive model next to a
# distilled student, the teacher that rescores. Here each of these is a column. Runs marked "(yours)" are from `results/`, all
# others are the project's records in `results/reference/`.
#
# ```
# python -m bench train method=teacher corpus=multi30k                             # the teacher, multi30k_4_4
# python -m bench train method=teacher corpus=multi30k 'train.layers=[6,1]' train.data=distilled train.recipe.dropout=0.1 model=multi30k_4_4
# python -m bench train method=glat model=multi30k_4_4                             # likewise nat, cmlm, ctc, depa, flowseq
# python -m bench -m method=nat,glat,cmlm,ctc,depa,flowseq model=multi30k_4_4 dataset=multi30k batch_size=1,8,32,128
# python -m bench -m method=autoregressive model=multi30k_4_4,multi30k_6_1_distilled dataset=multi30k batch_size=1,8,32,128
# ```

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from bench.report import leaderboard, notebook, plots

notebook.theme()
FAMILY, DATA = "non-autoregressive", "multi30k"

GROUPS = [group for group in leaderboard.groups(notebook.records()) if str(group.first.get("dataset")).startswith(DATA)]
ROWS = [row for group in GROUPS for row in group.rows]
PARALLEL = [row for row in ROWS if row.family == FAMILY]
display(Markdown(f"{len(PARALLEL)} finished runs of non-autoregressive methods on Multi30k, {len(ROWS) - len(PARALLEL)} of others."))
if not PARALLEL:
    print("Nothing is recorded yet, so nothing is said about quality or speed of our own. What needs no record is shown.")

# %% [markdown]
# ## 1. What the papers found
#
# One group trained them all, so these numbers compare: WMT14 English to German, BLEU, after learning from the references
# (**raw**) and from a teacher's translations (**distilled**), and the speed-up at batch 1 over their own autoregressive model
# (Huang et al. 2022, arXiv 2205.07459, table 1).

# %%
PUBLISHED = pd.DataFrame(
    [
        ("Transformer", "as many as tokens", 28.07, 28.54, 1.0),
        ("CMLM", "10", 24.61, 27.03, 2.2),
        ("vanilla NAT", "1", 11.79, 19.99, 15.3),
        ("CTC", "1", 18.42, 25.52, 14.6),
        ("GLAT", "1", 19.42, 25.21, 15.3),
        ("CTC and GLAT", "1", 25.02, 26.39, 14.6),
        ("DA-Transformer", "1", 26.08, 27.31, 14.0),
    ],
    columns=["method", "passes", "BLEU raw", "BLEU distilled", "speed-up"],
)
display(PUBLISHED.style.hide().format(precision=2))
figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
for place, row in PUBLISHED.iterrows():
    ax.plot([row["BLEU raw"], row["BLEU distilled"]], [place, place], color="0.7", zorder=0)
ax.plot(PUBLISHED["BLEU raw"], PUBLISHED.index, "o", markerfacecolor="white", label="raw")
ax.plot(PUBLISHED["BLEU distilled"], PUBLISHED.index, "o", label="distilled")
ax.set_yticks(PUBLISHED.index, PUBLISHED["method"])
ax.invert_yaxis()
ax.set(xlabel="BLEU", title="Published results on WMT14 English to German (Huang et al. 2022)")
figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# *Figure 1. Distillation is worth more to a one-pass model than most ideas about its decoder. So comparing a distilled student
# with a raw baseline says little, and every run here states its training data.*
#
# ## 2. The arithmetic: passes are not layers
#
# At batch 1 the time of a sentence is determined by sequential layers: those of the encoder, and those of the decoder times its
# passes. A decoder of one layer needs few of them, too (**deep-shallow**, 6-1: six encoder layers, one decoder layer), and
# generates word by word. "One pass" may hide a flow of 25 layers, or a teacher that reads all candidates.

# %%
LENGTHS = np.arange(1, 41)
WAITS = {
    "4-4, word by word": 4 + 4 * LENGTHS,
    "6-1, word by word": 6 + LENGTHS,
    "one pass": 4 + 4 + 0 * LENGTHS,
    "one pass, rescored by the teacher": 4 + 4 + 8 + 0 * LENGTHS,
    "CMLM, 4 passes": 4 + 4 * np.minimum(4, LENGTHS),
    "CMLM, 10 passes": 4 + 4 * np.minimum(10, LENGTHS),
    "FlowSeq, 25 couplings": 4 + 4 + 25 + 0 * LENGTHS,
}
figure, ax = plt.subplots(figsize=(8.5, 4), layout="constrained")
for number, (name, layers) in enumerate(WAITS.items()):
    ax.plot(LENGTHS, layers, linestyle="--" if number < 2 else "-", label=name)
plots.plain_log_axis(ax.yaxis, 5, 200)
ax.set(xlabel="tokens of the translation", ylabel="sequential layers", title="By the formula; no measurement")
ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
plt.show()

# %% [markdown]
# *Figure 2. Sequential layers per sentence; embedding and output matrix are not counted. Dashed: autoregressive.*
#
# With more rows the machine is busy anyway, and the amount of work counts, which a pass over all positions does not reduce. Let
# a layer over $n$ positions take $\max(1, n / r)$: below $r$ positions at once a machine waits for memory. Sources and
# translations have 15 tokens.

# %%
TOKENS, SIZES = 15, 2.0 ** np.arange(11)


def seconds(encoder: int, decoder: int, passes: int, places: int, rows: np.ndarray, r: int) -> np.ndarray:
    """Of a batch: layers of the encoder over the source, and passes of the decoder over so many positions of each row."""
    return encoder * np.maximum(1, rows * TOKENS / r) + decoder * passes * np.maximum(1, rows * places / r)


KINDS = {
    "6-1, word by word": (6, 1, TOKENS, 1),
    "one pass": (4, 4, 1, TOKENS),
    "CMLM, 4 passes": (4, 4, 4, TOKENS),
    "CMLM, 10 passes": (4, 4, 10, TOKENS),
}
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True, layout="constrained")
for ax, r in zip(axes, (16, 512), strict=True):
    for name, kind in KINDS.items():
        faster = seconds(4, 4, TOKENS, 1, SIZES, r) / seconds(*kind, SIZES, r)
        ax.plot(SIZES, faster, linestyle="--" if "word by word" in name else "-", marker="o", markersize=4, label=name)
    ax.axhline(1, color="0.35", linewidth=1, linestyle=":")
    ax.set_xscale("log", base=2)
    ax.set_xticks(SIZES[::2], [f"{size:g}" for size in SIZES[::2]])
    plots.plain_log_axis(ax.yaxis, 0.1, 10)
    ax.set(title=f"busy from r = {r} positions on", xlabel="batch size")
axes[0].set_ylabel("times as fast as 4-4, word by word")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
plt.show()

# %% [markdown]
# *Figure 3. By this arithmetic alone. A small r is a CPU, a large one a GPU. Passes that were free at batch 1 are paid in full
# where the machine is busy; deep-shallow does less work and stays ahead of 4-4 at every size.*
#
# ## 3. Quality against speed in batches
#
# Batch 1 is in `start_here.ipynb`. Models of different quality have no common baseline, so the horizontal axis is absolute:
# sentences per second. The machine drifts between runs, so the rate of a run is its speed-up times the median rate of its
# model's baseline.

# %%
PLOTS = [
    plot
    for plot in leaderboard.quality_speed_plots(GROUPS, "bleu", DATA)
    if plot.points[0].row.summary["batch_size"] in (32, 128) and any(point.row.family == FAMILY for point in plot.points)
]
for plot in PLOTS:
    rows = [point.row for point in plot.points if point.row.rank is not None]
    figure, ax = plt.subplots(figsize=(11, 5.5), layout="constrained")
    plots.legend(figure, rows)
    ax.set_title(plots.title(plot.heading, rows, 120))
    plots.pareto(ax, plot)
    plt.show()
    if not any("6_1" in str(row.summary["model"]) for row in rows):
        print("No record of a deep-shallow model here, which is the competitor; see the commands above.")
if not PLOTS:
    print("Nothing recorded in batches: python -m bench sweep=translation")

# %% [markdown]
# *Figure 4. BLEU against sentences per second; crosses are the greedy baselines. The grey line joins the runs that no valid run
# beats in speed and quality, thin lines join the settings of one method. A method has to be compared with the deep-shallow
# models (6_1), and not with its teacher alone. Speed-ups over all batch sizes are in `batch.ipynb` and `start_here.ipynb`.*
#
# ## 4. What a number hides
#
# **change**: of BLEU against the teacher's own greedy text in the same run, by a paired bootstrap over sentences. **learnt
# from**: references or a teacher's translations (beams). **layers / token**: passes of the decoder times its layers, rescoring
# included, and in brackets those of the teacher. **rescoring**: the teacher's seconds per sentence, which are part of the time.
# **held**: memory of the student and of what it needs of the teacher, with rescoring the whole teacher. **length** and
# **repeated**: words relative to the reference, and words equal to the previous one. The smallest batch size.


# %%
def mebibytes(sizes: dict) -> str:
    known = [size for size in sizes.values() if size is not None]
    return f"{sum(known) / 2**20:.0f} MiB" if known else "-"


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def span(change: dict | None) -> str:
    return "-" if not change or change["low"] is None else f"{change['low']:+.1f} to {change['high']:+.1f}"


def honest(row: leaderboard.Row) -> dict[str, str]:
    """What a run records apart from its speed."""
    summary = row.summary
    facts, quality, before = summary.get("method_facts") or {}, summary.get("quality") or {}, summary["baseline"].get("quality") or {}
    layers, teacher = facts.get("decoder_layer_passes_per_token"), facts.get("decoder_layer_passes_per_token_of_the_teacher")
    beams = facts.get("teacher_beams")
    return {
        "batch": str(summary["batch_size"]),
        "method": plots.label(row),
        "model": str(summary["model"]),
        "learnt from": f"{facts.get('data', '-')}{f' ({beams})' if beams else ''}",
        "BLEU (its teacher's)": f"{shown(quality.get('bleu'), '.1f')} ({shown(before.get('bleu'), '.1f')})",
        "change, 95 %": span((summary.get("quality_change") or {}).get("bleu")),
        "collapsed": {True: "yes", False: "no"}.get(facts.get("repeats_collapsed"), "-"),
        "length": shown(quality.get("length_ratio"), ".1f") + " %",
        "repeated": shown(quality.get("repetition"), ".2f") + " %",
        "layers / token": f"{shown(layers, '.2f')} ({shown(teacher, 'd')})",
        "rescoring": shown(facts.get("rescoring_seconds_per_sentence"), ".4f"),
        "held": mebibytes(summary.get("own_bytes") or {}),
        "speed-up": shown(row.speed, ".2f"),
        "sentences/s": shown(summary.get("prompts_per_s"), ".1f"),
        "valid": "yes" if row.valid else "no",
    }


if PARALLEL:
    smallest = min(row.summary["batch_size"] for row in PARALLEL)
    alone = [row for row in PARALLEL if row.summary["batch_size"] == smallest]
    rows = sorted(alone, key=lambda row: -(row.speed or 0.0))
    display(pd.DataFrame([honest(row) for row in rows]).style.hide())
else:
    print("No run yet: see the commands above.")

# %% [markdown]
# ## 5. The same student as a drafter
#
# A student whose text is not good enough may still draft: with `method=specdec_nat` the teacher verifies its words, and the text
# is exactly the teacher's own. The difference in speed is the price of that.

# %%
DRAFTING = [row for row in ROWS if row.method == "specdec_nat" and row.valid]
if DRAFTING:
    cells = [{"batch": e.summary["batch_size"], "run": plots.label(e), "tokens per step": e.summary["tokens_per_step"], "speed-up": e.speed} for e in DRAFTING]
    display(pd.DataFrame(cells).style.hide().format(precision=2, na_rep="-"))
else:
    print("No run yet: python -m bench method=specdec_nat method.drafter=glat model=multi30k_4_4 dataset=multi30k")
