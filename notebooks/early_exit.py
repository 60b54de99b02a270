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
# # Does early exit pay?
#
# An easy token does not need all layers. **Early exit** measures after some layers how confident the model is and generates the
# token there. Unlike speculation it may change the text: each confidence threshold trades quality for time, so a single
# speed-up says little. This notebook shows the whole trade-off, what it competes with, and what can be guaranteed. Runs marked
# "(yours)" are from `results/`, all others are the project's records in `results/reference/`.
#
# ```
# python -m bench train method=calm                        # exits for method=calm; likewise for free, static_depth
# python -m bench sweep=frontier                           # two methods at ten thresholds
# python -m bench sweep=frontier_static                    # the competitor: the first layers alone
# python -m bench sweep=frontier_exact                     # and methods that change nothing
# python -m bench method=calm method.calibration.tolerance=0.05      # a guarantee
# ```

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from bench.report import frontier, notebook, plots
from bench.report.style import style_of
from methods.early_exit.risk_control import calibrate, fewest_prompts, naive_threshold, p_values, prompts_needed, redraw

notebook.theme()
METHODS = ("calm", "free", "static_depth", "hash_ee")

RECORDS = notebook.records()
BY_NAME = {(record.source, record.path.name): record for record in RECORDS}
FRONTIERS = [found for found in frontier.frontiers(RECORDS) if any(p.method in METHODS for p in found.points)]
EXITING = [r for r in RECORDS if r.finished and r.summary and r.summary.get("method") in METHODS]
display(Markdown(f"{len(EXITING)} finished runs of early exit in {len(FRONTIERS)} tables."))
if not EXITING:
    print("None yet: python -m bench sweep=frontier (see above). What needs no record is shown all the same.")


def name_of(point: frontier.Point) -> str:
    """Method and setting, and whether the run is yours."""
    yours = " (yours)" if point.source == "own" else ""
    return plots.short_name(point.method, point.setting) + yours


def by_setting(point: frontier.Point) -> list[float]:
    """The numbers of its settings in order."""
    values = [word.partition("=")[2] for word in point.setting.split()]
    return [float(value) for value in values if value.replace(".", "", 1).isdigit()]


def legend_below(figure: plt.Figure, ax: plt.Axes, ncols: int, title: str | None = None) -> None:
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=ncols, frameon=False, title=title)


# %% [markdown]
# ## 1. The arithmetic: layers are not everything
#
# Let a model have $L$ layers, and let the output matrix cost as much as $H$ of them; in a small model with a large vocabulary
# $H$ is large (SmolLM2-135M: $L = 30$, $H = 8$). A confidence computed from the distribution over the vocabulary reads this
# matrix once more **at each exit**. Costs are counted in **layer-equivalents**. Without exits a token costs $L + H$. With one
# exit after $k$ layers that takes a share $e$ of the tokens, it costs
#
# $$k + H + (1 - e)(L - k + H) \qquad\text{or, after a screen,}\qquad k + \rho H + (1 - e)(L - k) + H$$
#
# A screen (`method.vocabulary`) reads a share $\rho$ of the output matrix first, the rows of the most frequent tokens, and the
# whole matrix only where those are confident. So an exit pays if $e > H / (L - k + H)$, with a screen if
# $e > \rho H / (L - k)$; with fewer exits decoding becomes slower, however correct they are.

# %%
L, H = 30.0, 8.0
rate = np.linspace(0, 1, 101)
figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for k in (8, 15, 20, 24):
    axes[0].plot(rate, (L + H) / (k + H + (1 - rate) * (L - k + H)), label=f"exit after layer {k}")
    axes[1].plot(rate, (L + H) / (k + 1 + (1 - rate) * (L - k) + H), label=f"exit after layer {k}")
for ax, title in zip(axes, ("The exit reads the whole output matrix", "A screen as expensive as one layer comes first"), strict=True):
    ax.axhline(1, color="0.3", linewidth=1, linestyle="--")
    ax.set(title=title, xlabel="share of tokens that exit")
axes[0].set_ylabel("times as fast, by layer-equivalents")
legend_below(figure, axes[0], 4)
plt.show()

# %% [markdown]
# *Figure 1. The upper limit for one exit of a model with 30 layers and an output matrix of 8, by the formula. Below the dashed
# line the exit costs more than it saves.*
#
# ## 2. The trade-off
#
# Each point is a run; higher is better, further right is faster. A point that loses quality **counts** only if its interval is
# above that of the fastest method that loses nothing, and above every static depth with the same quality: otherwise the same
# result is possible without any decision.


# %%
def draw_frontier(found: frontier.Frontier) -> None:
    """Quality against speed-up with intervals; lines join the points of one method in the order of their settings."""
    usable = [p for p in found.points if p.valid and p.speed is not None and p.quality is not None]
    points = sorted((p for p in usable if p.method in METHODS), key=by_setting)
    if len({p.method for p in points}) < 2:
        return
    figure, ax = plt.subplots(figsize=(9, 4.6), layout="constrained")
    for method in METHODS:
        same, look = [p for p in points if p.method == method], style_of(method)
        fill = [look.colour if p.exact else "white" for p in same]
        lossy = [p for p in same if not p.exact]
        ax.plot([p.speed for p in lossy], [p.quality for p in lossy], look.line, color=look.colour, linewidth=1)
        for p, face in zip(same, fill, strict=True):
            ends = [p.speed if end is None else end for end in (p.low, p.high)]
            ax.plot(ends, [p.quality] * 2, color=look.colour, linewidth=1, alpha=0.5)
            ax.plot(p.speed, p.quality, look.mark, color=look.colour, markerfacecolor=face, markersize=7)
    names = [(p.speed, p.quality, name_of(p)) for p in points]
    ax.axvline(1, color="0.45", linewidth=1, linestyle="--")
    if exact := [p for p in usable if p.exact and p.method not in METHODS]:
        best = max(exact, key=lambda p: p.speed)
        colour = style_of(best.method).colour
        ax.axvline(best.speed, color=colour, linewidth=1)
        ax.plot(best.speed, best.full, style_of(best.method).mark, color=colour, markersize=7)
        names.append((best.speed, best.full, f"{name_of(best)}, EXACT"))
    ax.margins(0.08)
    ax.set(title=f"{found.heading}", xlabel="speed-up, 95 % interval", ylabel=found.points[0].metric)
    plots.name_dots(ax, names)
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
# *Figure 2. The dashed line is plain decoding, the coloured line the fastest method that changes nothing, at the quality of
# the full model. Hollow marks may change the text.*
#
# ## 3. Where the time goes
#
# Where tokens exit, what a token costs in layer-equivalents (layers, output matrices, maps of exits, keys and values of skipped
# layers), and the share of the time spent on confidence. **Predicted** is the full model's cost divided by that, **measured**
# the speed-up of decoding. Below 1, early exit does more work than the full model. Layer-equivalents count weights, so the
# measured value can be higher: a small layer has more overhead per weight than an output matrix.


# %%
def draw_exits(found: frontier.Frontier) -> None:
    """Share of tokens by layers run, a bar for each run that has several exits; darker is deeper."""
    known = [(p, (BY_NAME[p.source, p.run_id].summary.get("method_facts") or {}).get("exits") or {}) for p in found.points]
    rows = sorted(((p, exits) for p, exits in known if len(exits) > 1), key=lambda row: (row[0].method, by_setting(row[0])))
    if len(rows) < 2:
        return
    depths = sorted({int(depth) for _, exits in rows for depth in exits})
    shades = dict(zip(depths, plt.get_cmap("YlGnBu")(np.linspace(0.15, 1, len(depths))), strict=True))
    figure, ax = plt.subplots(figsize=(9, 0.3 * len(rows) + 2), layout="constrained")
    for place, (_, exits) in enumerate(rows):
        shares = np.array([exits.get(str(depth), 0) for depth in depths]) / sum(exits.values())
        lefts = np.cumsum(shares) - shares
        for depth, share, left in zip(depths, shares, lefts, strict=True):
            label = str(depth) if place == 0 else None
            ax.barh(place, share, left=left, color=shades[depth], height=0.75, label=label)
    ax.set_yticks(range(len(rows)), [name_of(p) for p, _ in rows])
    ax.invert_yaxis()
    ax.grid(visible=False)
    ax.set(xlim=(0, 1), xlabel="share of tokens", title=found.heading)
    legend_below(figure, ax, 8, "layers run")
    plt.show()


COSTS = [
    {
        "run": r.path.name.rsplit("-", 1)[0] + (" (yours)" if r.source == "own" else ""),
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
    for found in FRONTIERS:
        draw_exits(found)
else:
    print("No record with an exit histogram yet: python -m bench sweep=frontier")

# %% [markdown]
# *Figure 3. Share of tokens that exit after so many layers, for runs with several exits.*
#
# ## 4. What can be guaranteed
#
# A threshold chosen because it looked good on some prompts looks worse on others. **Learn-then-Test** (Angelopoulos et al. 2021,
# as CALM uses it) takes the statement "the expected loss exceeds the tolerance" of each threshold as a hypothesis and tests
# these from the safest threshold downwards until one is not rejected. Then, with probability at least one minus the error rate
# over the draw of the calibration prompts, the expected loss at the chosen threshold is at most the tolerance. This holds for
# new prompts of the same source, decoded with the same settings, and for no others.
#
# The number of prompts that this takes depends on how much their losses vary:

# %%
tolerances = (0.05, 0.1, 0.2)
widest = {t: (t / 2 * (1 - t / 2)) ** 0.5 for t in tolerances}  # losses of 0 and 1 alone
plan = pd.DataFrame(
    {
        "tolerance": tolerances,
        "no prompt loses anything": [fewest_prompts(t) for t in tolerances],
        "half the tolerance is lost, little variation": [prompts_needed(t / 2, t, deviation=t) for t in tolerances],
        "half the tolerance is lost, much variation": [prompts_needed(t / 2, t, deviation=min(2 * t, widest[t])) for t in tolerances],
    }
)
display(plan.style.hide().format({"tolerance": "{:g}"}))
figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
for name in plan.columns[1:]:
    ax.plot(plan["tolerance"], plan[name], marker="o", label=name)
needed = plan[plan.columns[1:]].to_numpy()
plots.plain_log_axis(ax.yaxis, needed.min() / 1.5, needed.max() * 1.5)
ax.set_xscale("log")
ax.set_xticks(tolerances, [f"{tolerance:g}" for tolerance in tolerances])
ax.set_xticks([], minor=True)
ax.set(xlabel="tolerance", ylabel="calibration prompts", title="At error rate 0.05, betting p-values, nine times in ten")
legend_below(figure, ax, 1)
plt.show()

# %% [markdown]
# *Figure 4. Prompts needed to certify a threshold. With fewer than the lowest line nothing can be certified, and the command
# refuses.*


# %%
def calibrations() -> list[tuple[str, dict]]:
    """Recorded calibrations, the one with the most thresholds first."""
    files = [record.path / "calibration.json" for record in RECORDS]
    found = [(file.parent.name, json.loads(file.read_text(encoding="utf-8"))) for file in files if file.is_file()]
    return sorted(found, key=lambda each: -len(each[1]["thresholds"]))


def simulated() -> dict:
    """Losses like those of exits: most texts are unchanged down to a threshold of their own and lose something below it."""
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

figure, (risk, chance) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
risk.plot(THRESHOLDS, LOSSES.mean(axis=0), marker="o", label="mean loss")
risk.axhline(TOLERANCE, color="0.3", linestyle="--", linewidth=1, label="tolerance")
risk.set(title=f"Mean loss: {NAME}"[:70], xlabel="threshold", ylabel="loss")
order = np.random.default_rng(TABLE["seed"]).permutation(len(LOSSES))
for kind in ("hoeffding", "hoeffding_bentkus", "betting"):
    chance.plot(THRESHOLDS, np.clip(p_values(LOSSES[order], TOLERANCE, kind), 1e-6, 1), marker="o", label=kind)
chance.axhline(ERROR, color="0.3", linestyle="--", linewidth=1, label="error rate")
chance.set(yscale="log", title="p-values of “the expected loss exceeds the tolerance”", xlabel="threshold", ylabel="p")
chance.set_yticks([1e-6, 1e-4, 1e-2, 1], ["at most 0.000001", "0.0001", "0.01", "1"])
for ax in (risk, chance):
    ax.invert_xaxis()
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, frameon=False)
plt.show()

# %% [markdown]
# *Figure 5. Left: the loss on the calibration prompts, from the safest threshold on the left to the boldest. Right: the
# p-values. A threshold is certified as long as its p-value and those of all safer ones are below the dashed line.*
#
# ### A test of the guarantee
#
# Let these prompts be the whole population, draw a thousand calibration sets from it, choose a threshold with each, and look up
# its true loss.

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
figure, axes = plt.subplots(len(drawn), 1, figsize=(8, 5), sharex=True, layout="constrained")
edges = np.linspace(0, max(2 * TOLERANCE, max(world[t] for r in drawn.values() for t in r.thresholds)) * 1.05, 40)
for ax, (name, r) in zip(axes, drawn.items(), strict=True):
    ax.hist([world[t] for t in r.thresholds], edges, color="0.6")
    ax.axvline(TOLERANCE, color="0.1", linestyle="--", linewidth=1)
    ax.set(title=name, ylabel="calibrations")
axes[-1].set_xlabel(f"true loss of the chosen threshold; {DRAWS} calibrations with {SIZE} prompts each")
figure.suptitle(f"{NAME}"[:90], fontsize=10)
plt.show()

# %% [markdown]
# *Figure 6. Everything to the right of the dashed line, the tolerance, breaks the guarantee. The naive choice has no bound on
# how often that happens; the test has one, at the price of a safer threshold.*
#
# ## 5. Limits
#
# * **Early exit works on models that were trained for it.** In a frozen model the output matrix cannot read earlier layers;
#   trained maps between them recover a part.
# * **The baseline must be the original model.** Training a model to exit can cost it quality at its last layer, and then "no
#   loss against itself" hides a loss. `python -m bench frontier original=MODEL` compares with the original weights.
# * **Batches wait for their deepest row.** At batch size 1 a token that exits saves its layers; in a batch the other rows
#   still need them.
# * **A certificate holds for one source of prompts.** Its corpus is in the record; other prompts may lose more.
