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
# # Does leaving the model early pay?
#
# A token that is easy need not go through all layers. **Early exit** asks behind some layers whether the model is sure
# already, and writes the token from there. Unlike speculation it may change the text: each threshold of confidence is a
# trade of quality for time. So a single speed-up says nothing. This notebook shows the whole trade, what it has to beat,
# and what can be promised of it.
#
# Everything is read from the records in `results/`; no model is loaded. To make them:
#
# ```
# python -m bench.train method=calm                        # exits for method=calm, and likewise for free, static_depth
# python -m bench sweep=frontier                           # two methods at ten thresholds
# python -m bench sweep=frontier_static                    # what they have to beat: the first layers alone
# python -m bench sweep=frontier_exact                     # and the methods that change nothing
# python -m bench method=calm method.calibration.tolerance=0.05      # a promise
# ```

# %%
import json
import os
import sys
from pathlib import Path

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

from bench.report import collect, frontier  # noqa: E402
from methods.early_exit.risk_control import calibrate, fewest_prompts, naive_threshold, p_values, prompts_needed, redraw

sns.set_theme(style="whitegrid", palette="colorblind", context="notebook")
plt.rcParams.update({"figure.dpi": 64, "axes.titlesize": 12, "axes.labelsize": 11})
COLOURS = dict(zip(("calm", "free", "static_depth", "hash_ee"), sns.color_palette("colorblind"), strict=False))
MARKS = {"calm": "o", "free": "s", "static_depth": "^", "hash_ee": "D"}
RESULTS = Path(os.environ.get("DECODEBENCH_RESULTS") or checkout() / "results")
METHODS = tuple(COLOURS)

RECORDS = collect.read(RESULTS)
FRONTIERS = [found for found in frontier.frontiers(RECORDS) if any(p.method in METHODS for p in found.points)]
EXITING = [r for r in RECORDS if r.summary and r.summary.get("method") in METHODS]
display(Markdown(f"{len(EXITING)} finished runs of early exit in {len(FRONTIERS)} tables."))
if not EXITING:
    print("None yet: python -m bench sweep=frontier (see above). What needs no record is shown all the same.")

# %% [markdown]
# ## 1. The arithmetic: layers are not all
#
# Let a model have $L$ layers, and let the output matrix cost as much as $H$ of them: it is read for every token, and on a
# small model with a large vocabulary $H$ is no small number (SmolLM2-135M: $L = 30$, $H = 8$). A confidence that is taken
# from the distribution over the vocabulary reads it once more **at each exit that is asked**. So costs are counted in
# **layer-equivalents**. Without exits a token costs $L + H$. With one exit behind $k$ layers that takes a share $e$ of the
# tokens, it costs
#
# $$k + H + (1 - e)(L - k + H) \qquad\text{or, behind a screen,}\qquad k + \rho H + (1 - e)(L - k) + H$$
#
# A screen (`method.vocabulary`) asks a share $\rho$ of the output matrix first, that of the most frequent tokens, and all of
# it only where those are sure; then the token is written from what was computed anyway. So an exit pays if
# $e > H / (L - k + H)$, with a screen already if $e > \rho H / (L - k)$; below that share of exits it makes decoding slower,
# however right it is.

# %%
L, H = 30.0, 8.0
rate = np.linspace(0, 1, 101)
figure, axes = plt.subplots(1, 2, figsize=(13, 4.2), sharey=True, layout="constrained")
for k in (8, 15, 20, 24):
    axes[0].plot(rate, (L + H) / (k + H + (1 - rate) * (L - k + H)), label=f"exit behind layer {k}")
    axes[1].plot(rate, (L + H) / (k + 1 + (1 - rate) * (L - k) + H), label=f"exit behind layer {k}")
for ax, title in zip(axes, ("The exit reads the whole output matrix", "A screen that costs a layer goes before"), strict=True):
    ax.axhline(1, color="0.3", linewidth=1, linestyle="--")
    ax.set(title=title, xlabel="share of tokens that leave")
axes[0].set_ylabel("times as fast, by layer-equivalents")
axes[0].legend()
plt.show()

# %% [markdown]
# *Figure 1. The most that one exit of a model with 30 layers and an output matrix of 8 can bring, by the formula. Below the
# dashed line it costs more than it saves.*
#
# ## 2. The trade
#
# Each point is a run. Points further up kept more, points further right were faster. A point that loses something **counts**
# only if its interval lies above that of the fastest method that loses nothing, and above every static depth that keeps
# as much: else there is a way to the same that needs no decision at all.


# %%
def draw_frontier(found: frontier.Frontier) -> None:
    """Quality against speed-up, with intervals; lines join the points of one method in the order of their speed."""
    figure, ax = plt.subplots(figsize=(9, 5), layout="constrained")
    usable = [p for p in found.points if p.valid and p.speed is not None and p.quality is not None]
    exact = [p for p in usable if p.exact and p.method not in METHODS]
    if exact:
        best = max(exact, key=lambda p: p.speed)
        ax.axvline(best.speed, color="0.3", linestyle="--", linewidth=1, label=f"fastest EXACT: {best.method}")
    for method in METHODS:
        points = sorted((p for p in usable if p.method == method), key=lambda p: p.speed)
        if not points:
            continue
        x, y = np.array([p.speed for p in points]), np.array([p.quality for p in points])
        known = [(p.speed if p.low is None else p.low, p.speed if p.high is None else p.high) for p in points]
        error = np.abs(np.array(known).T - x)
        ax.errorbar(x, y, xerr=error, color=COLOURS[method], marker=MARKS[method], linewidth=1, capsize=2, label=method)
        for p in points:
            ax.annotate(p.setting.replace("threshold=", ""), (p.speed, p.quality), fontsize=8, xytext=(4, 4), textcoords="offset points")
    ax.set(title=found.heading, xlabel="speed-up, 95 % interval", ylabel=found.points[0].metric)
    ax.legend()
    plt.show()


for found in FRONTIERS:
    table = pd.DataFrame(frontier.cells(found), columns=list(frontier.HEADER))
    display(Markdown(f"**{found.heading}**, quality: {found.points[0].metric}"), table.style.hide())
    draw_frontier(found)
    kept = [p for i, p in enumerate(found.points) if p.method in METHODS and found.counts(i) == "yes"]
    rest = sum(p.method in METHODS and p.valid and not p.exact for p in found.points)
    display(Markdown(f"{len(kept)} of {rest} valid points of early exit count."))
if not FRONTIERS:
    print("No run yet. Make them: python -m bench sweep=frontier, sweep=frontier_static and sweep=frontier_exact")
for method in METHODS:
    if EXITING and not any(r.summary["method"] == method for r in EXITING):
        print(f"Nothing recorded for {method}: python -m bench method={method}")

# %% [markdown]
# ## 3. Where the time goes
#
# Where tokens left, what a token cost in layer-equivalents (layers, output matrices, maps of exits, keys and values of skipped
# layers), and which share of the time went into confidence. **Predicted** is the full model's cost over that, **measured** the
# speed-up of decoding. Where less than 1 is predicted, early exit did more work than the full model. Layer-equivalents count
# weights; a small layer is slowed by more than its weights, an output matrix is not, so the measured one may lie above.

# %%
COSTS = [
    {
        "run": r.path.name.rsplit("-", 1)[0],
        "setting": next((p.setting for f in FRONTIERS for p in f.points if p.run_id == r.path.name), ""),
        "layers / token": facts.get("layers_per_token"),
        "output matrices / token": facts.get("heads_per_token"),
        "layer-equivalents / token": facts.get("layer_equivalents_per_token"),
        "time on confidence": facts.get("confidence_share"),
        "predicted": predicted,
        "measured": (measured := (r.summary.get("speedup") or {}).get("decode") or np.nan),
        "measured / predicted": measured / predicted,
    }
    for r in EXITING
    if (facts := r.summary.get("method_facts") or {}).get("layer_equivalents_of_the_model")
    and (predicted := facts["layer_equivalents_of_the_model"] / (facts.get("layer_equivalents_per_token") or np.nan))
]
if COSTS:
    display(pd.DataFrame(COSTS).style.hide().format(precision=3, na_rep="-"))
    histograms = [(r, r.summary["method_facts"]["exits"]) for r in EXITING if (r.summary.get("method_facts") or {}).get("exits")]
    figure, axes = plt.subplots(-(-len(histograms) // 3), 3, figsize=(14, 2.6 * -(-len(histograms) // 3)), squeeze=False, layout="constrained")
    for ax, (r, exits) in zip(axes.flat, histograms, strict=False):
        total = sum(exits.values())
        ax.bar([int(depth) for depth in exits], [count / total for count in exits.values()], color=COLOURS[r.summary["method"]])
        setting = next((p.setting for f in FRONTIERS for p in f.points if p.run_id == r.path.name), "")
        ax.set(title=f"{r.summary['method']} {setting}"[:44], xlabel="layers run", ylabel="share of tokens", ylim=(0, 1))
    for ax in list(axes.flat)[len(histograms) :]:
        ax.set_visible(False)
    plt.show()
else:
    print("No record with an exit histogram yet: python -m bench sweep=frontier")

# %% [markdown]
# ## 4. What can be promised
#
# A threshold that looked good on some prompts owes part of its looks to those prompts. **Learn-then-Test** (Angelopoulos et
# al. 2021, as CALM uses it) takes each threshold's statement "the expected loss exceeds the tolerance" as a hypothesis and
# tests them from the safest threshold down, until one is not rejected. Then, with probability at least one minus the error
# rate over the draw of the calibration prompts, the expected loss at the chosen threshold is at most the tolerance. It
# holds for new prompts of the same source, decoded with the same settings, and for no others.
#
# How many prompts that takes depends on how much their losses spread:

# %%
tolerances = (0.05, 0.1, 0.2)
widest = {t: (t / 2 * (1 - t / 2)) ** 0.5 for t in tolerances}  # losses of 0 and 1 alone
plan = pd.DataFrame(
    {
        "tolerance": tolerances,
        "none of them loses anything": [fewest_prompts(t) for t in tolerances],
        "half the tolerance is lost, spread little": [prompts_needed(t / 2, t, deviation=t) for t in tolerances],
        "half the tolerance is lost, spread much": [prompts_needed(t / 2, t, deviation=min(2 * t, widest[t])) for t in tolerances],
    }
)
display(plan.style.hide().format({"tolerance": "{:g}"}))
figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
for name in plan.columns[1:]:
    ax.plot(plan["tolerance"], plan[name], marker="o", label=name)
ax.set(xscale="log", yscale="log", xlabel="tolerance", ylabel="calibration prompts", title="At error rate 0.05, betting p-values, nine times in ten")
ax.legend()
plt.show()

# %% [markdown]
# *Figure. Prompts needed to certify a threshold. With fewer than the lowest line nothing can be certified, and the command
# refuses.*


# %%
def calibrations() -> list[tuple[str, dict]]:
    """Recorded calibrations, the one with the most thresholds first."""
    found = [(file.parent.name, json.loads(file.read_text(encoding="utf-8"))) for file in sorted(RESULTS.glob("*/calibration.json"))]
    return sorted(found, key=lambda each: -len(each[1]["thresholds"]))


def simulated() -> dict:
    """Losses as exits have them: most texts are unchanged down to a threshold of their own, and then lose something."""
    rng = np.random.default_rng(11)
    thresholds = [round(0.95 - 0.05 * step, 2) for step in range(19)]
    own = 1 - rng.beta(3, 1.2, (500, 1))
    lost = np.clip(rng.beta(2, 5, (500, 1)) + rng.normal(0, 0.1, (500, 19)), 0, 1)
    losses = np.where(np.array(thresholds) < own, lost, 0.0)
    return {"thresholds": thresholds, "losses": losses.T.tolist(), "tolerance": 0.05, "error_rate": 0.05, "seed": 0}


RECORDED = calibrations()
if RECORDED:
    rows = [{"run": name, **{key: c[key] for key in ("threshold", "certified", "tolerance", "error_rate", "prompts", "explanation")}} for name, c in RECORDED]
    display(pd.DataFrame(rows).style.hide())
else:
    print("No calibrated run yet: python -m bench method=calm method.calibration.tolerance=0.05 method.calibration.whole_grid=true")
NAME, TABLE = RECORDED[0] if RECORDED else ("simulated losses, no record", simulated())
LOSSES, THRESHOLDS = np.array(TABLE["losses"]).T, TABLE["thresholds"]
TOLERANCE, ERROR = TABLE["tolerance"], TABLE["error_rate"] or 0.05

figure, (risk, chance) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
risk.plot(THRESHOLDS, LOSSES.mean(axis=0), marker="o")
risk.axhline(TOLERANCE, color="0.3", linestyle="--", linewidth=1, label="tolerance")
risk.set(title=f"Mean loss: {NAME}"[:70], xlabel="threshold", ylabel="loss")
order = np.random.default_rng(TABLE["seed"]).permutation(len(LOSSES))
for kind in ("hoeffding", "hoeffding_bentkus", "betting"):
    chance.plot(THRESHOLDS, np.clip(p_values(LOSSES[order], TOLERANCE, kind), 1e-6, 1), marker="o", label=kind)
chance.axhline(ERROR, color="0.3", linestyle="--", linewidth=1, label="error rate")
chance.set(yscale="log", title="p-values of “the expected loss exceeds the tolerance”", xlabel="threshold", ylabel="p")
for ax in (risk, chance):
    ax.invert_xaxis()
    ax.legend()
plt.show()

# %% [markdown]
# *Figure. Left: what texts lose on the calibration prompts, from the safest threshold on the left to the boldest. Right: the
# p-values. A threshold is certified as long as its p-value and those of all safer ones lie below the dashed line.*
#
# ### The promise, put to the test
#
# Take these prompts for the whole world, draw calibration sets from them a thousand times, choose a threshold by each, and
# look up what it really loses.

# %%
DRAWS, SIZE = 1000, max(fewest_prompts(TOLERANCE, ERROR), min(len(LOSSES), 120))
WAYS = {
    "naive: the lowest threshold that looks good": lambda x: naive_threshold(x, THRESHOLDS, TOLERANCE),
    "Learn-then-Test, betting": lambda x: calibrate(x, THRESHOLDS, tolerance=TOLERANCE, error_rate=ERROR).threshold,
    "Learn-then-Test, Hoeffding-Bentkus": lambda x: calibrate(
        x, THRESHOLDS, tolerance=TOLERANCE, error_rate=ERROR, p_value="hoeffding_bentkus"
    ).threshold if fewest_prompts(TOLERANCE, ERROR, "hoeffding_bentkus") <= SIZE else 1.0,
}
drawn = {name: redraw(LOSSES, THRESHOLDS, way, tolerance=TOLERANCE, prompts=SIZE, draws=DRAWS) for name, way in WAYS.items()}
broken = pd.DataFrame(
    {"chosen by": name, "tolerance broken": f"{r.broken} of {r.draws}", "promised": "at most " + f"{ERROR:.0%}" if "naive" not in name else "nothing",
     "mean threshold": f"{np.mean(r.thresholds):.2f}"}
    for name, r in drawn.items()
)
display(broken.style.hide())
world = dict(zip(THRESHOLDS, LOSSES.mean(axis=0), strict=True)) | {1.0: 0.0}
figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
edges = np.linspace(0, max(2 * TOLERANCE, max(world[t] for r in drawn.values() for t in r.thresholds)) * 1.05, 40)
for name, r in drawn.items():
    ax.hist([world[t] for t in r.thresholds], edges, alpha=0.55, label=name)
ax.axvline(TOLERANCE, color="0.3", linestyle="--", linewidth=1, label="tolerance")
ax.set(title=f"{DRAWS} calibrations with {SIZE} prompts each: {NAME}"[:90], xlabel="what the chosen threshold really loses", ylabel="calibrations")
ax.legend()
plt.show()

# %% [markdown]
# *Figure. Everything to the right of the dashed line is a broken promise. Choosing what looked good breaks it often; the
# test does so at most as often as it says, at the price of a safer threshold.*
#
# ## 5. What to keep in mind
#
# * **Early exit works on models that were trained for it.** On a frozen model the earlier layers do not speak the language of
#   the output matrix, and maps that translate them recover a part.
# * **The baseline must be the original model.** Training a model to exit can cost it quality at its last layer; then
#   "no loss against itself" hides a loss. `python -m bench frontier original=MODEL` compares with the original weights.
# * **Batches wait for their deepest row.** At batch size 1 a token that leaves saves its layers; in a batch the others
#   still need them.
# * **A certificate is of one source of prompts.** Its corpus stands in the record; other prompts may lose more.
