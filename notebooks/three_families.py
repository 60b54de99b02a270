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
# # Three families on one ground
#
# Translation is where all ways of decoding faster meet: **speculative** methods draft tokens and let the model verify them,
# **early exit** leaves the model early, and **non-autoregressive** students write all words at once. Beside them are the plain
# baselines that each has to beat: greedy search and beam search of the teacher, and **deep-shallow** models with one layer in
# the decoder. Everything here is measured on the 1,000 sentences of Multi30k test2016, English to German; quality is sacreBLEU
# on cased, detokenised text. Runs marked "(yours)" are from `results/`, all others are the project's records.
#
# ```
# python -m bench sweep=translation_table,translation_exits                 # both at batch 1, 8, 32 and 128
# python -m bench -m model=multi30k_6_1_distilled,multi30k_12_1_distilled dataset=multi30k method=autoregressive batch_size=1,8,32,128 max_new_tokens=80
# ```

# %%
import re

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown, display

from bench.report import leaderboard, notebook, plots
from bench.report.style import style_of

notebook.theme()
DATA, SIZES, TEACHER = "multi30k", (1, 8, 32, 128), "multi30k_4_4"
LOSS = 1.0  # BLEU that a method may lose against its own baseline to count as keeping the quality

GROUPS = [group for group in leaderboard.groups(notebook.records()) if str(group.first.get("dataset")).startswith(DATA)]
PLOTS = {size: [] for size in SIZES}
for plot in leaderboard.quality_speed_plots(GROUPS, "bleu", DATA):
    size = plot.points[0].row.summary["batch_size"]
    if size in PLOTS:
        PLOTS[size].append(plot)
WIDEST = {size: max(found, key=lambda plot: len(plot.points)) for size, found in PLOTS.items() if found}
POINTS = {size: plot.points for size, plot in WIDEST.items()}


def family(row: leaderboard.Row) -> str:
    """Of a run; that of a baseline by what it is."""
    if row.family == leaderboard.PEER or row.method in ("beam_search", "hf_beam"):
        return "beam search" if "beam" in row.method else "other engines"
    if row.family != leaderboard.BASELINE:
        return row.family
    return "deep-shallow" if str(row.summary["model"]).split("_")[2:3] == ["1"] else "greedy"


def name(row: leaderboard.Row) -> str:
    """Method, settings and, where it is not the teacher's, the model."""
    model = str(row.summary["model"]).removeprefix("multi30k_")
    return f"{plots.label(row)}{'' if model == '4_4' else f' ({model})'}"


COUNTS = pd.DataFrame(
    {size: pd.Series([family(p.row) for p in points]).value_counts() for size, points in POINTS.items()}
)
if POINTS:
    display(COUNTS.reindex(columns=list(POINTS)).fillna(0).astype(int).rename_axis(columns="runs at batch size").style)
else:
    print("No translation run is recorded: python -m bench sweep=translation")

# %% [markdown]
# ## 1. Quality against speed
#
# One panel per batch size. The horizontal axis is absolute, sentences per second, since the models differ. The machine drifts
# between runs, so the rate of a run is its speed-up times the median rate of its model's baseline.

# %%
KINDS = {
    "greedy": ("0.15", "X"),
    "beam search": ("0.55", "X"),
    "deep-shallow": ("0.15", "D"),
    "speculative": (style_of("specdec", "speculative").colour, "o"),
    "early exit": (style_of("calm", "early exit").colour, "s"),
    "non-autoregressive": (style_of("nat", "non-autoregressive").colour, "^"),
}


def baselines(points: list) -> list[tuple[str, str, float, float]]:
    """Greedy search of every model, which is measured with each of its methods: family, name, rate, BLEU."""
    found = {}
    for point in points:
        if point.before:
            found[str(point.row.summary["model"])] = point.before
    return [
        ("deep-shallow" if re.search(r"_\d+_1(_|$)", model) else "greedy", model.removeprefix("multi30k_"), *before)
        for model, before in found.items()
    ]


def spots(size: int) -> list[tuple[str, str, float, float]]:
    """Family, name, sentences per second and BLEU of everything at a batch size; a baseline once."""
    points = POINTS[size]
    others = [p for p in points if family(p.row) in KINDS and family(p.row) not in ("greedy", "deep-shallow")]
    return baselines(points) + [(family(p.row), name(p.row), p.rate, p.quality) for p in others]


def front(found: list[tuple[str, str, float, float]]) -> list[tuple[str, str, float, float]]:
    """Those that nothing beats in both, from slow to fast."""
    kept = [one for one in found if not any(o[2] >= one[2] and o[3] >= one[3] and o[2:] != one[2:] for o in found)]
    return sorted(kept, key=lambda one: one[2])


if POINTS:
    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7.2), sharey=True, layout="constrained")
    for ax, size in zip(axes.flat, SIZES, strict=True):
        ax.set_title(f"batch size {size}")
        if size not in POINTS:
            continue
        found = spots(size)
        for kind, (colour, mark) in KINDS.items():
            own = [(rate, bleu) for group, _, rate, bleu in found if group == kind]
            ax.plot(
                *zip(*own, strict=True) if own else ([], []), mark, color=colour, markersize=7, alpha=0.85, label=kind
            )
        best = front(found)
        ax.plot([one[2] for one in best], [one[3] for one in best], color="0.7", linewidth=1, zorder=0)
        plots.plain_log_axis(ax.xaxis, min(one[2] for one in found) / 1.2, max(one[2] for one in found) * 1.35)
        plots.name_dots(ax, [(one[2], one[3], one[1]) for one in best])
    for ax in axes[1]:
        ax.set_xlabel("sentences per second")
    for ax in axes[:, 0]:
        ax.set_ylabel("BLEU")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    plt.show()

# %% [markdown]
# *Figure 1. Everything that was recorded at a batch size, on the machine with most runs. The grey line joins what nothing beats
# in speed and quality. Teacher and students are small and learnt from 29,000 pairs (see `docs/translation.md`).*
#
# ## 2. Where each advantage ends
#
# The best of each family that keeps the quality, by batch size: at most one BLEU below its own baseline, which is measured in
# the same run. A larger batch keeps the machine busy without any of these methods, so less is left to gain.


# %%
def keeps(point: leaderboard.QualitySpeedPoint) -> bool:
    """Whether its text is about as good as that of its baseline."""
    return point.before is not None and point.quality >= point.before[1] - LOSS


def factor(point: leaderboard.QualitySpeedPoint) -> float:
    """Times the sentences per second of greedy search with the teacher, at the same batch size."""
    size = point.row.summary["batch_size"]
    teachers = [p.before[0] for p in POINTS[size] if p.before and p.row.summary["model"] == TEACHER]
    return point.rate / teachers[0]


def best_of(kind: str, kept: bool) -> dict[int, leaderboard.QualitySpeedPoint]:
    """The fastest of a family at every batch size."""
    found = {}
    for size, points in POINTS.items():
        own = [p for p in points if family(p.row) == kind and p.before and (keeps(p) or not kept)]
        if own:
            found[size] = max(own, key=factor)
    return found


if POINTS:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.7), sharey=True, layout="constrained")
    for ax, kept in zip(axes, (True, False), strict=True):
        for kind, (colour, mark) in KINDS.items():
            line = best_of(kind, kept)
            ax.plot(list(line), [factor(p) for p in line.values()], color=colour, marker=mark, label=kind)
        ax.axhline(1, color="0.35", linewidth=1, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set_xticks(SIZES, [str(size) for size in SIZES])
        ax.set(xlabel="batch size", title=f"within {LOSS:g} BLEU of its baseline" if kept else "whatever its quality")
    plots.plain_log_axis(axes[0].yaxis, 0.15, 6)
    axes[0].set_ylabel("times greedy search with the teacher")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    plt.show()

# %% [markdown]
# *Figure 2. The fastest run of each family; the method may change from size to size (the table names it). Dotted: greedy search
# with the 4-4 teacher at the same size, whose batches drop rows that have ended.*

# %%
CELLS = [
    {
        "family": kind,
        "batch": size,
        "fastest within 1 BLEU": name(p.row),
        "BLEU (baseline)": f"{p.quality:.1f} ({p.before[1]:.1f})",
        "times the teacher": f"{factor(p):.2f}",
        "sentences/s": f"{p.rate:.0f}",
    }
    for kind in KINDS
    for size, p in best_of(kind, True).items()
]
if CELLS:
    display(pd.DataFrame(CELLS).style.hide())
else:
    print("Nothing to compare yet.")

# %% [markdown]
# ## 3. Layers per token
#
# What a method saves is sequential work: decoder layers that run one after another for each token of the translation. Early exit
# runs fewer layers per token, speculation runs all of them once for several tokens, a student writes a whole sentence in one
# pass. Drafters and output matrices are not counted, which is why equal counts are not equally fast.


# %%
def layers_per_token(row: leaderboard.Row) -> float | None:
    """Layers of the decoder that ran per token, one after another."""
    shape = re.search(r"_(\d+)_(\d+)", str(row.summary["model"]))
    own = (row.summary.get("method_facts") or {}).get("decoder_layer_passes_per_token")
    if own is not None or shape is None:
        return own
    share, steps = row.summary.get("layers_per_token"), row.summary.get("tokens_per_step")
    return None if share is None or not steps else int(shape[2]) * share / (1 if family(row) == "early exit" else steps)


if 1 in POINTS:
    figure, ax = plt.subplots(figsize=(8, 4.1), layout="constrained")
    drawn = []
    for kind in ("deep-shallow", "speculative", "early exit", "non-autoregressive"):
        (colour, mark), own = KINDS[kind], [p for p in POINTS[1] if family(p.row) == kind and layers_per_token(p.row)]
        at = [(layers_per_token(p.row), factor(p)) for p in own]
        ax.plot(*zip(*at, strict=True) if at else ([], []), mark, color=colour, markersize=7, alpha=0.85, label=kind)
        drawn += [(*place, name(p.row)) for place, p in zip(at, own, strict=True)]
    plots.plain_log_axis(ax.xaxis, min(d[0] for d in drawn) / 1.3, max(d[0] for d in drawn) * 1.3)
    plots.plain_log_axis(ax.yaxis, min(d[1] for d in drawn) / 1.3, max(d[1] for d in drawn) * 1.3)
    plots.name_dots(ax, drawn)
    ax.set(xlabel="decoder layers per token", ylabel="times greedy search with the teacher", title="batch size 1")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    plt.show()
else:
    print("No run at batch size 1: python -m bench sweep=translation batch_size=1")

# %% [markdown]
# *Figure 3. Decoder layers that run one after another per token, and speed, at batch 1. The encoder, which every sentence needs,
# and the passes of a drafter come on top: that is what keeps the points below a straight line.*
