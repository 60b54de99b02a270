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
# # Does writing all words at once pay?
#
# A **non-autoregressive** model writes every word of a translation in the same pass. It is another model, with another text,
# so it has to be judged by quality *and* speed, beside translation models that are fast in other ways. Critics (Kasai et al.
# 2021, Helcl et al. 2022) found what is easily left out: a slow baseline, a batch of one, a raw autoregressive model beside a
# distilled student, the teacher that rescores. Here each of these is a column.
#
# Everything is read from the records in `results/`; no model is loaded. To make them:
#
# ```
# python -m bench.train method=teacher corpus=multi30k                             # the teacher, multi30k_4_4
# python -m bench.train method=teacher corpus=multi30k 'train.layers=[6,1]' train.data=distilled model=multi30k_4_4
# python -m bench.train method=glat model=multi30k_4_4                             # likewise nat, cmlm, ctc, depa, flowseq
# python -m bench -m method=nat,glat,cmlm,ctc,depa,flowseq model=multi30k_4_4 dataset=multi30k batch_size=1,8,32,128
# python -m bench -m method=autoregressive model=multi30k_4_4,multi30k_6_1_distilled dataset=multi30k batch_size=1,8,32,128
# ```

# %%
import os
import sys
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
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
plt.rcParams.update({"figure.dpi": 64, "axes.titlesize": 11, "axes.labelsize": 10})
RESULTS = Path(os.environ.get("DECODEBENCH_RESULTS") or checkout() / "results")
FAMILY, DATA = "non-autoregressive", "multi30k"

GROUPS = [group for group in leaderboard.groups(collect.read(RESULTS)) if str(group.first.get("dataset")).startswith(DATA)]
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
figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
for place, row in PUBLISHED.iterrows():
    ax.plot([row["BLEU raw"], row["BLEU distilled"]], [place, place], color="0.7", zorder=0)
ax.plot(PUBLISHED["BLEU raw"], PUBLISHED.index, "o", markerfacecolor="white", label="raw")
ax.plot(PUBLISHED["BLEU distilled"], PUBLISHED.index, "o", label="distilled")
ax.set_yticks(PUBLISHED.index, PUBLISHED["method"])
ax.invert_yaxis()
ax.set(xlabel="BLEU, WMT14 en-de")
ax.legend()
plt.show()

# %% [markdown]
# *Figure 1. Distillation is worth more to a one-pass model than most ideas about its decoder. So a distilled student beside a
# raw baseline says little, and every run here says what it learnt from.*
#
# ## 2. The arithmetic: passes are not layers
#
# What a sentence waits for at batch 1 is layers, one after the other: those of the encoder, and those of the decoder times its
# passes. A decoder of one layer needs few of them, too (**deep-shallow**, 6-1: six layers of encoder, one of decoder), and
# writes word by word. "One pass" may hide a flow of 25 layers, or a teacher that reads all candidates.

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
ax.set(xlabel="tokens of the translation", ylabel="layers, one after the other", yscale="log")
ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
plt.show()

# %% [markdown]
# *Figure 2. Sequential layers per sentence; embedding and output matrix are not counted. Dashed: autoregressive.*
#
# With more rows the machine is busy anyway, and what counts is work, of which a pass over all places saves none. Let a layer
# over $n$ places take $\max(1, n / r)$: below $r$ places at once a machine waits for memory. Sources and translations have 15
# tokens.

# %%
TOKENS, SIZES = 15, 2.0 ** np.arange(11)


def seconds(encoder: int, decoder: int, passes: int, places: int, rows: np.ndarray, r: int) -> np.ndarray:
    """Of a batch: layers of the encoder over the source, and passes of the decoder over so many places of each row."""
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
    ax.set_yscale("log", base=2)
    ax.set(title=f"busy from r = {r} places on", xlabel="batch size")
axes[0].set_ylabel("times as fast as 4-4, word by word")
axes[1].legend(fontsize=8)
plt.show()

# %% [markdown]
# *Figure 3. By this arithmetic alone. A small r is a CPU, a large one a GPU. Passes that were free at batch 1 are paid in full
# where the machine is busy; deep-shallow does less work and stays ahead of 4-4 at every size.*
#
# ## 3. Quality against speed, at batch 1 and at batch 32

# %%
def draw_plot(plot: leaderboard.QualitySpeedPlot) -> None:
    """The runs, and as a star the greedy baseline of each model, the median over the runs it was measured in."""
    figure, ax = plt.subplots(figsize=(9.5, 4.4), layout="constrained")
    plots.pareto(ax, plot)
    for model in sorted({str(point.row.summary["model"]) for point in plot.points}):
        before = [t.before for t in plot.points if t.row.summary["model"] == model and t.before]
        if before:
            rate, quality = (median(values) for values in zip(*before, strict=True))
            ax.plot(rate, quality, "*", color="0.2", markersize=13)
            ax.annotate(f"{model}, greedy", (rate, quality), fontsize=8, xytext=(6, -11), textcoords="offset points")
    plt.show()


PLOTS = {size: [] for size in (1, 32)}
for plot in leaderboard.quality_speed_plots(GROUPS, "bleu", DATA):
    size = plot.points[0].row.summary["batch_size"]
    if size in PLOTS and any(point.row.family == FAMILY for point in plot.points):
        PLOTS[size].append(plot)
for size, found in PLOTS.items():
    display(Markdown(f"**Batch {size}**"))
    for plot in found:
        draw_plot(plot)
        models = {str(point.row.summary["model"]) for point in plot.points}
        if not any("_6_1" in model or "_12_1" in model for model in models):
            print("No deep-shallow model is recorded beside them, so this picture flatters: see the commands above.")
    if not found:
        print(f"No run of a non-autoregressive method at batch {size} yet: see the commands above.")

# %% [markdown]
# *Figure 4. BLEU against sentences per second. Stars are greedy decoding of each model, with a cache, in the same runs; a
# method has to be compared with the deep-shallow star, not with that of its teacher alone. The line joins the runs that no
# valid run is both faster and better than.*
#
# ## 4. Where the advantage ends

# %%
CURVES = [
    (heading, {label: runs for label, runs in lines.items() if runs[0].family in (FAMILY, leaderboard.BASELINE)})
    for heading, lines in leaderboard.batch_series(GROUPS)
]
CURVES = [(heading, lines) for heading, lines in CURVES if any(runs[0].family == FAMILY for runs in lines.values())]
for heading, lines in CURVES:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    plots.batch_curves(axes, heading, lines)
    plt.show()
if not CURVES:
    print("No non-autoregressive method has been recorded at two batch sizes yet: see the commands above.")

# %% [markdown]
# *Figure 5. Speed-up over greedy decoding of the teacher, and throughput, against the batch size.*
#
# ## 5. What a number hides
#
# **change**: of BLEU against the teacher's own greedy text in the same run, by a paired bootstrap over sentences. **learnt
# from**: references or a teacher's translations (beams). **layers / token**: passes of the decoder times its layers,
# rescoring included, and in brackets those of the teacher. **rescoring**: the teacher's seconds per sentence, which are in the
# time, and **held**: memory of the student with what it needs of the teacher, which rescoring makes the whole of it.
# **length** and **repeated**: words over those of the reference, and words equal to the one before.


# %%
def mebibytes(sizes: dict) -> str:
    known = [size for size in sizes.values() if size is not None]
    return f"{sum(known) / 2**20:.0f} MiB" if known else "-"


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def span(change: dict | None) -> str:
    return "-" if not change or change["low"] is None else f"{change['low']:+.1f} to {change['high']:+.1f}"


def honest(row: leaderboard.Row) -> dict[str, str]:
    """What a run says of itself beside its speed."""
    summary = row.summary
    facts, quality, before = summary.get("method_facts") or {}, summary.get("quality") or {}, summary["baseline"].get("quality") or {}
    layers, teacher = facts.get("decoder_layer_passes_per_token"), facts.get("decoder_layer_passes_per_token_of_the_teacher")
    beams = facts.get("teacher_beams")
    return {
        "batch": str(summary["batch_size"]),
        "method": row.label,
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
    rows = sorted(PARALLEL, key=lambda row: (row.summary["batch_size"], -(row.speed or 0.0)))
    display(pd.DataFrame([honest(row) for row in rows]).style.hide())
else:
    print("No run yet: see the commands above.")

# %% [markdown]
# ## 6. The same student as a drafter
#
# A student whose text is not good enough may still draft: with `method=specdec_nat` the teacher verifies its words, and the
# text is the teacher's own, to the letter. What is left of the speed is the price of that promise.

# %%
DRAFTING = [row for row in ROWS if row.method == "specdec_nat" and row.valid]
if DRAFTING:
    cells = [{"batch": e.summary["batch_size"], "run": e.label, "tokens per step": e.summary["tokens_per_step"], "speed-up": e.speed} for e in DRAFTING]
    display(pd.DataFrame(cells).style.hide().format(precision=2, na_rep="-"))
else:
    print("No run yet: python -m bench method=specdec_nat method.drafter=glat model=multi30k_4_4 dataset=multi30k")
