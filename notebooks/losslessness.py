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
# # Does speculative sampling cost accuracy?
#
# A small, cheap model (the **draft**) guesses the next tokens, and the large model (the **target**) checks them all in one pass.
# With the right acceptance rule the guesses leave no trace: the text is distributed *exactly* as if the target had generated it
# alone. This notebook gives the proof in words, formulas and pictures, then the measurement, then the same measurement on
# rules that are wrong on purpose, as a control that the experiment can detect an error.
#
# Everything measured is read from the records in `results/reference/lossless/` and from yours in `results/lossless/`; no model
# is loaded. To repeat it with another method or model:
#
# ```
# python -m bench lossless experiment=sampling method=speculative_sampling
# ```

# %%
import json
import warnings
from textwrap import shorten

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import yaml
from IPython.display import Markdown, display

from bench.config import compose, instantiate
from bench.lossless.statistics import deviation_shown
from bench.report import leaderboard, notebook
from bench.report.style import COLOURS

warnings.filterwarnings("ignore", message="IProgress not found")  # some methods load a progress bar that is not used here
notebook.theme()
plt.rcParams["hatch.linewidth"] = 0.6
TARGET, DRAFT, RESIDUAL, REJECTED, EMPIRICAL = (sns.color_palette("colorblind")[i] for i in (0, 1, 2, 3, 4))


def read_records(experiment: str) -> list[dict]:
    """All finished records of one experiment, the most draws first, then the newest."""
    own, reference = notebook.folders()
    known = {path.parent: path for folder in (own, reference or own) for path in folder.glob(f"lossless/{experiment}-*/result.json")}
    found = []
    for folder, path in sorted(known.items()):
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        yours = reference is None or reference not in folder.parents
        found.append({"name": folder.name, "yours": yours, "manifest": manifest, **json.loads(path.read_text(encoding="utf-8"))})
    return sorted(found, key=lambda r: (r["manifest"]["lab"]["draws"], r["manifest"]["started_at"]), reverse=True)


# %%
SAMPLING, ROUNDS, JOINT, GREEDY = (read_records(experiment) for experiment in ("sampling", "rounds", "joint", "greedy"))
# Records without draws of a draft distribution (a deterministic draft, or none) have no q to show.
WITH_DRAFT = [r for r in SAMPLING if any(cell["rule"] == "chain" for cell in r["cells"])]
JOINT.sort(key=lambda r: not r["cells"][0].get("exact", True))  # a wrong rule is not the one to draw
if not WITH_DRAFT:
    raise SystemExit(
        "No sampling record with a draft distribution was found. Make one: "
        "python -m bench lossless experiment=sampling method=speculative_sampling"
    )
RECORD = WITH_DRAFT[0]
CELLS = pd.DataFrame(RECORD["cells"])
CELLS[["standard_deviation_shown", "expected_deviation_shown"]] = [
    deviation_shown([token["target"] for token in cell["top"]], [token["empirical"] for token in cell["top"]], cell["draws"])
    for cell in RECORD["cells"]
]
LAB = RECORD["manifest"]["lab"]
pd.DataFrame(
    [
        {
            "record": r["name"] + (" (yours)" if r["yours"] else ""),
            "method": r["manifest"]["config"]["method"]["name"],
            "model": r["manifest"]["model"]["name"],
            "type": r["manifest"]["dtype"],
            "draws per cell": f"{r['manifest']['lab']['draws']:,}",
            "as promised": "yes" if r["passed"] else "no",
            "shown below": "yes" if r is RECORD or r in ROUNDS[:1] + JOINT[:1] + GREEDY else "",
        }
        for r in SAMPLING + ROUNDS + JOINT + GREEDY
    ]
).style.hide()

# %% [markdown]
# ## 1. The proof
#
# Let $p$ be the target's distribution of the next token after the text so far, and $q$ the draft's, both *after*
# temperature, top-k and top-p. The rule (Leviathan et al. 2023, [arXiv 2211.17192](https://arxiv.org/abs/2211.17192);
# Chen et al. 2023, [arXiv 2302.01318](https://arxiv.org/abs/2302.01318)):
#
# 1. The draft draws a token $x \sim q$.
# 2. The target keeps it with probability $\min\left(1, \frac{p(x)}{q(x)}\right)$.
# 3. If it is rejected, the token is drawn from the **residual** $r(x) = \frac{\max(p(x) - q(x),\, 0)}{Z}$ instead,
#    where $Z$ is the number that makes it sum to one.
#
# **What comes out by acceptance.** Token $x$ is drawn and kept with probability
# $q(x) \min\left(1, \frac{p(x)}{q(x)}\right) = \min(p(x), q(x))$. This is the overlap of the two distributions; its
# whole mass, the acceptance rate, is $\alpha = \sum_x \min(p(x), q(x))$.
#
# **How often the draft is rejected.** In all other cases: with probability $1 - \alpha$. That is the mass by which $q$
# exceeds $p$, $\sum_x \max(q(x) - p(x), 0)$.
#
# **Why the residual fits into the gap.** For every token $\max(p - q, 0) = p - \min(p, q)$. Sum over all tokens:
#
# $$Z = \sum_x \max(p(x) - q(x), 0) = \sum_x p(x) - \sum_x \min(p(x), q(x)) = 1 - \alpha .$$
#
# The mass that is missing under $p$ is as large as the probability of getting there. So a rejection, which happens with
# probability $1 - \alpha$, hands out the normalised residual $\frac{\max(p - q, 0)}{1 - \alpha}$, and the two factors
# cancel.
#
# **Together**, the generated token is $x$ with probability
#
# $$\underbrace{\min(p(x), q(x))}_{\text{accepted}} + \underbrace{(1 - \alpha) \cdot
# \frac{\max(p(x) - q(x), 0)}{1 - \alpha}}_{\text{rejected, then drawn from the residual}} = p(x) .$$
#
# Nothing was assumed about $q$. A bad draft costs speed (a small $\alpha$), never accuracy. For a chain of drafted
# tokens the argument is applied at one position after the other: each token is drawn from $p$ given the tokens kept
# before it, so their joint distribution is the product that the target alone would give. With several guesses for one
# position (a tree) it is applied again to what is left of $p$ after each rejection.
#
# ### The proof as a picture
#
# First with two continuous densities, because curves show the products best. Then with five tokens, then with a real prompt.

# %%
def bell(x: np.ndarray, centre: float, width: float) -> np.ndarray:
    return np.exp(-0.5 * ((x - centre) / width) ** 2) / (width * np.sqrt(2 * np.pi))


def draw_densities() -> None:
    x = np.linspace(-4, 4.6, 1200)
    p = 0.6 * bell(x, -1.1, 0.7) + 0.4 * bell(x, 1.8, 0.6)
    q = bell(x, 0.3, 1.15)
    both, residual = np.minimum(p, q), np.maximum(p - q, 0)
    alpha = np.trapezoid(both, x)
    figure, panels = plt.subplots(2, 2, figsize=(13, 8), sharex=True, layout="constrained")
    (two, accepted), (rejected, total) = panels
    two.plot(x, p, color=TARGET, linewidth=2)
    two.plot(x, q, color=DRAFT, linewidth=2)
    two.fill_between(x, both, color="0.8")
    two.text(-1.9, 0.3, "target p", color=TARGET, ha="right")
    two.text(0.4, 0.355, "draft q", color=DRAFT, ha="center")
    two.text(-0.95, 0.05, f"overlap\nα = {alpha:.2f}", ha="center")
    two.set(title="Two distributions", ylabel="density", ylim=(0, 0.4))
    accepted.plot(x, q, color=DRAFT, linewidth=1.5)
    accepted.plot(x, np.minimum(1, p / q), color="0.35", linestyle="--", linewidth=1.5)
    accepted.plot(x, both, color="black", linewidth=2.5)
    accepted.fill_between(x, both, color="0.8")
    accepted.text(0.4, 0.37, "draft q", color=DRAFT, ha="center")
    accepted.text(0.4, 1.04, "min(1, p / q): probability of being kept", color="0.35", ha="center")
    accepted.text(1.95, 0.14, "product:\nmin(p, q)", color="black")
    accepted.set(title="Accepted: q times min(1, p / q)", ylabel="density, probability", ylim=(0, 1.15))
    rejected.plot(x, residual / (1 - alpha), color=RESIDUAL, linestyle="--", linewidth=1.5)
    rejected.plot(x, residual, color=RESIDUAL, linewidth=2.5)
    rejected.fill_between(x, residual, color=RESIDUAL, alpha=0.7)
    rejected.axhline(1 - alpha, color=REJECTED, linewidth=1.5, linestyle=":")
    rejected.text(4.5, 1 - alpha + 0.012, f"probability of a rejection: 1 − α = {1 - alpha:.2f}", color=REJECTED, ha="right")
    rejected.text(-1.0, 0.52, "residual, normalised: area 1", color=RESIDUAL)
    rejected.text(0.42, 0.1, "product:\nmax(p − q, 0)", color=RESIDUAL, ha="center")
    rejected.set(title="Rejected: 1 − α times the normalised residual", xlabel="x", ylabel="density, probability", ylim=(0, 0.6))
    total.stackplot(x, both, residual, colors=["0.8", RESIDUAL], alpha=0.7)
    total.plot(x, p, color=TARGET, linewidth=2)
    total.text(-1.9, 0.3, "sum: target p", color=TARGET, ha="right")
    total.text(-0.95, 0.05, "accepted", ha="center")
    total.text(2.55, 0.2, "drawn from\nthe residual", color=RESIDUAL)
    total.set(title="Both together", xlabel="x", ylabel="density", ylim=(0, 0.4))
    figure.suptitle("Acceptance gives the overlap, rejection gives the rest: what comes out is p", fontsize=12)
    plt.show()
    assert np.isclose(np.trapezoid(residual, x), 1 - alpha, atol=1e-3)


draw_densities()

# %% [markdown]
# *Figure 1. Two made-up densities. Top right: the draft's density times the probability of being kept is the overlap of
# both. Bottom left: the probability of a rejection times the normalised residual is exactly what is missing. The article
# that asked the question of this notebook writes p for the draft and q for the target; here it is the other way round,
# as in the papers.*
#
# The same over five tokens, $p$ in blue and $q$ in orange.


# %%
def label(text: str) -> str:
    """A token as an axis label: white space made visible, everything unprintable escaped."""
    shown = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥").replace("$", r"\$")
    return "".join(c if c.isascii() or c in "␣↵⇥" else ascii(c)[1:-1] for c in shown) or "(empty)"


def draw_proof(tokens: list[str], p: np.ndarray, q: np.ndarray, title: str) -> None:
    """Three panels: the two distributions, what happens to the draft's mass, and what the target's is made of."""
    both, missing, surplus = np.minimum(p, q), np.maximum(p - q, 0), np.maximum(q - p, 0)
    places, half = np.arange(len(tokens)), 0.4
    figure, (ax, kept, made) = plt.subplots(1, 3, figsize=(14, 4.4), sharey=True, layout="constrained")
    ax.bar(places - half / 2, p, half, color=TARGET, label="target p")
    ax.bar(places + half / 2, q, half, color=DRAFT, hatch="//", edgecolor="white", label="draft q")
    ax.set(title="The two distributions", ylabel="probability")
    kept.bar(places, both, 2 * half, color="0.6", label=f"accepted: min(p, q), mass {both.sum():.3f}")
    kept.bar(
        places, surplus, 2 * half, both, color=REJECTED, hatch="xx", edgecolor="white",
        label=f"rejected: q − min(p, q), mass {surplus.sum():.3f}",
    )
    kept.set(title="The draft's mass, accepted or rejected (bars end at q)")
    made.bar(places, both, 2 * half, color="0.6", label=f"accepted: min(p, q), mass {both.sum():.3f}")
    made.bar(
        places, missing, 2 * half, both, color=RESIDUAL, hatch="..", edgecolor="white",
        label=f"residual: max(p − q, 0), mass {missing.sum():.3f}",
    )
    made.plot(places, p, "_", color=TARGET, markersize=30, markeredgewidth=3, label="target p")
    made.set(title="The generated text (bars end at p)")
    rotation = 0 if len(tokens) < 7 else 60
    for axes in (ax, kept, made):
        axes.set_xticks(places, [label(token) for token in tokens], rotation=rotation)
        axes.set_xlabel("next token")
        axes.grid(axis="x", visible=False)
    named = {text: handle for axes in (ax, kept, made) for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title, fontsize=12)
    plt.show()
    assert np.isclose(missing.sum(), surplus.sum()) and np.allclose(both + missing, p)


TOY_P, TOY_Q = np.array([0.45, 0.25, 0.15, 0.10, 0.05]), np.array([0.20, 0.40, 0.10, 0.10, 0.20])
draw_proof(["llama", "knight", "rain", "neon", "."], TOY_P, TOY_Q, "A made-up pair: the rejected mass equals the residual")

# %% [markdown]
# *Figure 2. Left: target and draft over five tokens. Middle: each draft bar is split into the part that is accepted
# (grey) and the part that is rejected (hatched, 0.3 in all). Right: the same grey part with the residual on top
# (dotted, again 0.3 in all) reaches exactly up to the target's marks.*
#
# The same on a real prompt. The record holds the tokens that the target or the draft finds most likely; all other tokens
# of the vocabulary are one bar on the right, computed so that the masses of the whole vocabulary add up.


# %%
def whole_picture(cell: dict) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Top tokens, then two bars for the rest: where p is larger and where q is, so that min(p, q) stays exact."""
    top = cell["top"]
    p, q = (np.array([token[side] for token in top]) for side in ("target", "draft"))
    rest_p, rest_q, rest_both = 1 - p.sum(), 1 - q.sum(), cell["overlap"] - np.minimum(p, q).sum()
    return (
        [token["text"] for token in top] + ["(rest:p>q)", "(rest:q>p)"],
        np.append(p, [rest_p - rest_both / 2, rest_both / 2]),
        np.append(q, [rest_both / 2, rest_q - rest_both / 2]),
    )


chain = CELLS[CELLS["rule"] == "chain"]
shown = chain.iloc[chain["temperature"].sub(1.0).abs().argmin()]
draw_proof(*whole_picture(shown), f"{RECORD['manifest']['model']['name']}, T = {shown['temperature']:g}: “{shown['prompt']}”")

# %%
display(
    Markdown(
        f"*Figure 3. The first token after a real prompt, at temperature {shown['temperature']:g}. Draft and target overlap "
        f"by {shown['overlap']:.3f}, which is the probability that the first drafted token is kept; the remaining "
        f"{1 - shown['overlap']:.3f} is rejected, and the residual gives back the same mass where the draft was too low. "
        "The two bars on the right stand for all other tokens: half of what they overlap is put into each, with the "
        "surplus of p in the first and the surplus of q in the second.*"
    )
)

# %% [markdown]
# ### Greedy decoding is a special case
#
# At temperature 0 all of $p$ sits on the target's first choice, and all of $q$ on the draft's. Either they are the same
# token: then $\min(1, p/q) = 1$ and it is always kept. Or they are not: then $p(x) = 0$, it is always rejected, and the
# residual is the target's first choice. So the text is the greedy text, token for token, with no chance involved.
#
# One caveat is numerical. A pass over several tokens sums in another order than a pass over one, and in 16 bit two
# candidates may be closer than this rounding. A *near-tie* is such a token; anything outside that gap would be an error.

# %%
if GREEDY:
    table = pd.DataFrame(
        [
            {
                "method": r["manifest"]["config"]["method"]["name"],
                "model": r["manifest"]["model"]["name"],
                "type": r["manifest"]["dtype"],
                "tokens compared": r["tokens"],
                "identical texts": f"{r['identical']} of {len(r['prompts'])}",
                "near-ties": sum(row["near_tie"] for row in r["prompts"]),
                "violations": r["violations"],
            }
            for r in GREEDY
        ]
    )
    display(table.style.hide())
else:
    print("No greedy record here. Make one: python -m bench lossless experiment=greedy method=speculative_sampling")

# %% [markdown]
# ## 2. The measurement of the first token: three bars per token
#
# For each prompt $p$ and $q$ were computed once by the models. Then the first token was drawn again and again through
# the verification code that decoding itself runs, and counted. If the proof holds for the *code*, the counts are draws
# from $p$: the third bar ends where the first one does, wherever the second one is.


# %%
def draw_bars(cells: pd.DataFrame, title: str) -> None:
    """Target softmax, draft softmax and empirical frequency of the top tokens, one panel per prompt."""
    prompts = len(cells)
    figure, panels = plt.subplots((prompts + 1) // 2, 2, figsize=(13, 3.6 * ((prompts + 1) // 2)), layout="constrained")
    for axes, (_, cell) in zip(panels.flat, cells.iterrows(), strict=False):
        top = pd.DataFrame(cell["top"])
        places = np.arange(len(top))
        axes.bar(places - 0.27, top["target"], 0.27, color=TARGET, label="target softmax p")
        axes.bar(places, top["draft"], 0.27, color=DRAFT, hatch="//", edgecolor="white", label="draft softmax q")
        axes.bar(places + 0.27, top["empirical"], 0.27, color=EMPIRICAL, hatch="..", edgecolor="white", label="drawn")
        axes.set_xticks(places, [label(text) for text in top["text"]], rotation=60)
        axes.set(xlabel="first token", ylabel="probability / frequency", title=shorten(cell["prompt"], 70, placeholder=" …"))
        axes.grid(axis="x", visible=False)
    for axes in list(panels.flat)[prompts:]:
        axes.set_visible(False)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=12)
    plt.show()


temperature = shown["temperature"]
draw_bars(
    chain[chain["temperature"] == temperature],
    f"Chain rule, {LAB['draws']:,} draws per prompt, T = {temperature:g}: the drawn bars follow the target, not the draft",
)

# %% [markdown]
# *Figure 4. One panel per prompt. Blue: the target's probability; orange, hatched: the draft's; the third, dotted bar:
# how often speculative sampling generated the token. The third bar is as high as the first throughout, also where the draft
# is far off.*
#
# ### Three numbers for "as high as"
#
# With $\hat p$ the frequencies of $n$ draws over a vocabulary of $V$ tokens:
#
# * **Standard deviation** $\sqrt{\frac1V \sum_x (\hat p(x) - p(x))^2}$. It is never 0. Drawing from $p$ itself gives
#   $\sqrt{\sum_x p(x)(1 - p(x)) / (nV)}$ on average (root mean square), at most $1/\sqrt{nV}$. The number means nothing
#   without that second one: it shrinks with the sample and with the number of tokens it is taken over. So it is given
#   twice, over the whole vocabulary and over the tokens of the bar charts alone. The article reports 9.694e-5 for a
#   million draws from a vocabulary of 128,256 tokens. Over that whole vocabulary an exact sampler cannot exceed
#   $1/\sqrt{10^6 \cdot 128{,}256} = 2.8 \cdot 10^{-6}$ on average, so the article's number must be taken over the few
#   tokens that its charts show; it is then of the size of the second pair of columns.
# * **Total variation** $\frac12 \sum_x |\hat p(x) - p(x)|$: the largest error in the probability of any set of tokens.
# * **Chi-square**: the one that decides. Its p-value is the chance that exact sampling strays at least so far. Tokens
#   with fewer than 5 expected draws are joined into one.

# %%
columns = {
    "rule": "rule",
    "temperature": "T",
    "prompt": "prompt",
    "overlap": "overlap of p and q",
    "standard_deviation": "standard deviation",
    "expected_deviation": "expected of exact sampling",
    "standard_deviation_shown": "of tokens shown",
    "expected_deviation_shown": "expected of shown",
    "total_variation": "total variation",
    "expected_total_variation": "expected TV",
    "p_value": "chi-square p",
}
exact = CELLS[CELLS["exact"]][list(columns)].rename(columns=columns)
exact["prompt"] = exact["prompt"].str.slice(0, 32) + "…"
formats = {
    "T": "{:g}",
    "overlap of p and q": "{:.3f}",
    "standard deviation": "{:.3e}",
    "expected of exact sampling": "{:.3e}",
    "of tokens shown": "{:.2e}",
    "expected of shown": "{:.2e}",
    "total variation": "{:.5f}",
    "expected TV": "{:.5f}",
    "chi-square p": "{:.3g}",
}
exact.style.hide().format(formats)

# %% [markdown]
# ## 3. Would we have noticed? Rules that are wrong
#
# An experiment that cannot fail shows nothing. These rules look like the exact ones and occur in published code:
#
# * **independent draw per path**: every branch of a tree is compared with a draw of its own, the first match is kept.
#   With several chances a likely token is kept too often.
# * **argmax draft judged with softmax q**: the draft proposes its most likely token, but is judged as if it had drawn it.
# * **top-k children judged as drawn**: the same for the branches of a tree.
# * **without replacement, unmasked q**: siblings are all different, but each is judged by a $q$ that still contains
#   those before it. The bias is far too small to be seen by eye.
# * **rejection without the residual**: accepts correctly, but draws from $p$ after a rejection. The accepted mass is
#   then counted twice: $\min(p, q) + (1 - \alpha)\, p \neq p$.
#
# A cell (one rule, prompt and temperature) fails when its p-value is below the level that keeps the chance of any false
# alarm over *all* exact cells together at the stated level (Bonferroni). An exact rule must fail nowhere; a wrong one has
# to be caught somewhere.


# %%
def verdict(row: pd.Series) -> str:
    if row["exact"]:
        return "exact: passes" if row["as_it_should"] else "exact: FAILS"
    return "wrong: caught" if row["as_it_should"] else "wrong: MISSED"


rules = pd.DataFrame(RECORD["rules"])
rules["ratio"] = rules["standard_deviation"] / rules["expected_deviation"]
rules["verdict"] = rules.apply(verdict, axis=1)
rules["failed cells"] = rules["failed"].astype(str) + " of " + rules["cells"].astype(str)
names = {"standard_deviation": "standard deviation", "expected_deviation": "expected", "smallest_p": "smallest p"}
table = rules.rename(columns=names)[
    ["rule", "standard deviation", "expected", "ratio", "smallest p", "failed cells", "verdict"]
]
display(
    table.style.hide().format(
        {"standard deviation": "{:.3e}", "expected": "{:.3e}", "ratio": "{:.2f}", "smallest p": "{:.2e}"}
    )
)
print(f"A cell fails when p <= {RECORD['bound']:.2e}; {LAB['draws']:,} draws per cell.")

# %%
SMALLEST = 1e-300  # what lies below cannot be told from 0 in a double
cells = CELLS.assign(
    ratio=CELLS["standard_deviation"] / CELLS["expected_deviation"],
    surprise=-np.log10(CELLS["p_value"].clip(lower=SMALLEST)),
    kind=np.where(CELLS["exact"], "exact rule", "wrong rule"),
)
order = list(rules["rule"])
look = {"hue": "kind", "style": "kind", "hue_order": ["exact rule", "wrong rule"], "style_order": ["exact rule", "wrong rule"]}
shift = {rule: i for i, rule in enumerate(order)}
cells["place"] = cells["rule"].map(shift) + (cells.groupby("rule").cumcount() / cells.groupby("rule")["rule"].transform("size") - 0.44) * 0.6
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 0.5 * len(order) + 2.2), sharey=True, layout="constrained")
for axes, column in ((left, "ratio"), (right, "surprise")):
    sns.scatterplot(cells, x=column, y="place", ax=axes, s=60, palette=[TARGET, REJECTED], markers=["o", "X"], **look)
    axes.set_yticks(range(len(order)), order)
    axes.legend().remove()
figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
left.axvline(1.0, color="0.3", linestyle="--", linewidth=1)
left.set(xscale="log", xlabel="standard deviation / what exact sampling gives", ylabel="rule", title="Deviation")
right.axvline(-np.log10(RECORD["bound"]), color="0.3", linestyle="--", linewidth=1)
right.set(xscale="symlog", xlim=(-0.05, 500), xlabel="−log10 of the chi-square p-value (300: not distinguishable from 0)")
right.set(title="Evidence against the rule")
right.set_xticks([0, 1, 3, 10, 30, 100, 300], ["0", "1", "3", "10", "30", "100", "300"])
left.invert_yaxis()
figure.suptitle("Exact rules stay at the dashed lines, wrong ones do not", fontsize=12)
plt.show()

# %% [markdown]
# *Figure 5. One mark per prompt and temperature. Left, on a logarithmic axis: the standard deviation divided by what
# exact sampling gives; the dashed line is 1. It scatters, for a few likely tokens decide it. Right: the p-value as powers
# of ten; to the right of the dashed line a cell fails. Circles are exact rules, crosses wrong ones. The deviation alone
# would let the subtlest wrong rule through, while chi-square, which weighs each token by its own noise, need not.*
#
# ## 4. Drafts of two levels: the first three tokens of a round
#
# At one position block verification *is* the chain rule, and a tree is a set of siblings. What they add shows only from
# the second token on. So $p$ and $q$ are computed after every prefix of two tokens that a draft or the target can
# produce, where both keep a few most likely tokens (top-k). Then rounds over drafts of two levels are drawn and judged by
# the same rules, completed by the target to three tokens, and compared with the exact joint distribution
# $p(x_1)\, p(x_2 \mid x_1)\, p(x_3 \mid x_1 x_2)$. Two more rules are wrong here on purpose. Their first token is right, so
# no test of the first token can reject them:
#
# * **block, residual of the chain**: keeps what block verification keeps, and then draws from $\max(p - q, 0)$ instead of
#   $\max(w\,p - q, 0)$, where $w$ is the weight of the kept prefix.
# * **tree, judged behind the root only**: reads the target's distribution after the root for every level of the tree.

# %%
if ROUNDS:
    deep = pd.DataFrame(ROUNDS[0]["rules"])
    deep["verdict"] = deep.apply(verdict, axis=1)
    deep["failed cells"] = deep["failed"].astype(str) + " of " + deep["cells"].astype(str)
    named = {
        "rule": "rule", "kept": "drafted tokens kept", "total_variation": "total variation",
        "expected_total_variation": "expected TV", "smallest_first_p": "first token alone: smallest p",
        "smallest_p": "three tokens: smallest p", "failed cells": "failed cells", "verdict": "verdict",
    }
    small = "{:.2e}"
    shapes = {"drafted tokens kept": "{:.3f}", "total variation": "{:.5f}", "expected TV": "{:.5f}"}
    shapes |= {"first token alone: smallest p": small, "three tokens: smallest p": small}
    display(deep[list(named)].rename(columns=named).style.hide().format(shapes))
    lab, model = ROUNDS[0]["manifest"]["lab"], ROUNDS[0]["manifest"]["model"]["name"]
    print(f"{model}, drafts of {lab['levels']} levels, {lab['draws']:,} rounds per cell; a cell fails when p <= {ROUNDS[0]['bound']:.2e}.")
else:
    print("No record of rounds here. Make one: python -m bench lossless experiment=rounds method=speculative_sampling sampling.top_k=4 draws=200000")

# %% [markdown]
# ## 5. Whole continuations through the full decoder
#
# The experiments above test the rules on drafts made for them. The decoder around a rule can still go wrong: a cache
# that keeps a rejected token, a tree mask that hides the path, a draft that sees another text than the target. So the
# first tokens of a text are drawn by the complete decoder, and compared with the product of the target's own conditional
# probabilities. Continuations that are too unlikely to be told apart are one outcome, "other".

# %%
if JOINT:
    every = [
        {
            "method": r["manifest"]["config"]["method"]["name"],
            "rule": r["cells"][0].get("rule", "own"),
            "model": r["manifest"]["model"]["name"],
            "tokens": r["manifest"]["lab"]["horizon"],
            "draws each": f"{r['manifest']['lab']['draws']:,}",
            "tests": len(r["cells"]),
            "smallest p": f"{min(cell['p_value'] for cell in r['cells']):.3g}",
            "as promised": "yes" if r["passed"] else "no",
        }
        for r in JOINT
    ]
    display(pd.DataFrame(every).style.hide())
    joint = pd.DataFrame(JOINT[0]["cells"])
    view = joint.assign(prompt=joint["prompt"].str.slice(0, 40) + "…")[
        ["temperature", "prompt", "continuations", "mass", "total_variation", "expected_total_variation", "p_value"]
    ]
    view.columns = ["T", "prompt", "told apart", "their mass", "total variation", "expected TV", "chi-square p"]
    display(view.style.hide().format({c: formats.get(c, "{:.3f}") for c in view.columns if c not in ("prompt", "told apart")}))
    points = pd.DataFrame([token for cell in JOINT[0]["cells"] for token in cell["top"]])
    draws = JOINT[0]["manifest"]["lab"]["draws"]
    line = np.geomspace(points["target"].min() / 1.5, points["target"].max() * 1.5, 200)
    spread = 2 * np.sqrt(line * (1 - line).clip(min=0) / draws)
    figure, axes = plt.subplots(figsize=(7, 6), layout="constrained")
    axes.fill_between(line, np.maximum(line - spread, line / 1e3), line + spread, color="0.85", label="two standard errors of exact sampling")
    axes.plot(line, line, color="0.3", linestyle="--", linewidth=1, label="equal")
    axes.scatter(points["target"], points["empirical"].clip(lower=0.5 / draws), s=24, color=EMPIRICAL, label="one continuation")
    axes.set(xscale="log", yscale="log", xlabel="probability under the target", ylabel="frequency from the full decoder")
    model, horizon = JOINT[0]["manifest"]["model"]["name"], JOINT[0]["manifest"]["lab"]["horizon"]
    axes.set_title(f"{model}: continuations of {horizon} tokens, {draws:,} draws per prompt and temperature")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    plt.show()
    method, count = JOINT[0]["manifest"]["config"]["method"]["name"], len(points)
    display(Markdown(f"*Figure 6. The {count} likeliest continuations of all prompts, decoded by {method}: probability against frequency, both logarithmic. About one mark in twenty may leave the grey band by chance.*"))
else:
    print("No joint record here. Make one: python -m bench lossless experiment=joint method=speculative_sampling draws=1000 batch_size=64")

# %% [markdown]
# ## 6. Where losslessness ends: families and what they promise
#
# Surveys of faster generation order methods by what they change. This is what is implemented here, read from the
# configuration of every method: its family, and what its default settings promise. EXACT methods write the target's
# own text or distribution, RELAXED ones may leave it by a declared tolerance, INDEPENDENT_MODEL ones are models of their
# own. Whether what is left of the quality is enough has to be measured for the last two; for EXACT ones it follows.

# %%
def catalogue() -> pd.DataFrame:
    """Name, family and guarantee of every method of the configuration."""
    rows = []
    for name in compose.every_group()["method"]:
        settings = yaml.safe_load(compose.config_file("method", name).read_text(encoding="utf-8"))
        decoder = instantiate.method_class(settings)
        family = leaderboard.family({"method": settings})
        rows.append({"name": name, "family": family, "guarantee": decoder.guarantee.value})
    return pd.DataFrame(rows)


def draw_taxonomy(methods: pd.DataFrame) -> None:
    columns = [each for each in leaderboard.GUARANTEES if each in set(methods["guarantee"])]
    families = [each for each in COLOURS if each in set(methods["family"])]
    cells = {(f, g): list(part["name"]) for (f, g), part in methods.groupby(["family", "guarantee"])}
    heights = [max(-(-len(cells.get((family, g), [])) // 2) for g in columns) + 0.9 for family in families]
    figure, axes = plt.subplots(figsize=(13, 0.3 * sum(heights) + 1), layout="constrained")
    top = 0.0
    for family, height in zip(families, heights, strict=True):
        axes.text(-0.03, top + height / 2, family, ha="right", va="center", color=COLOURS[family], fontsize=12, weight="bold")
        for place, guarantee in enumerate(columns):
            names = cells.get((family, guarantee), [])
            box = plt.Rectangle((place + 0.01, top + 0.08), 0.98, height - 0.16, color=COLOURS[family] if names else "0.9", alpha=0.16)
            axes.add_patch(box)
            for number, name in enumerate(names):
                x, y = place + 0.05 + 0.5 * (number % 2), top + 0.7 + number // 2
                axes.text(x, y, name, va="center", fontsize=10, color="0.15")
        top += height
    for place, guarantee in enumerate(columns):
        axes.text(place + 0.5, -0.35, f"{guarantee} ({sum(methods['guarantee'] == guarantee)})", ha="center", fontsize=12, weight="bold")
    axes.set(xlim=(-0.36, len(columns)), ylim=(top, -0.8))
    axes.axis("off")
    figure.suptitle(f"The {len(methods)} methods by what they change (rows) and what they promise (columns)", fontsize=12)
    plt.show()


draw_taxonomy(catalogue())

# %% [markdown]
# *Figure 7. Every method of the configuration with its default settings; some have a setting that moves them to another
# column (`method.acceptance=typical` makes `medusa` RELAXED, a threshold of 1 makes `calm` EXACT). "peer" are
# implementations of others behind the same interface.*

# %% [markdown]
# ## 7. What this does not prove
#
# * **A finite sample has finite sight.** A bias well below the total variation that exact sampling shows by itself
#   (the column "expected TV") passes. The proof closes this gap for the rule; for the code only more draws narrow it.
# * **It is about the target as computed here.** The $p$ that is compared with is the one from the same engine in the same
#   number type. That the engine computes the model correctly is tested elsewhere, against the original implementation.
#   In 16 bit a pass over several tokens rounds differently from a pass over one; the draws follow the rounded $p$.
# * **A few prompts, the first three tokens at most.** An error that needs a long text, a full cache or an end of sequence to appear
#   is not looked for here.
# * **The target's own quality is left as it is.** Lossless means no worse than the target, with all its mistakes.
# * **Relaxed rules are outside.** Typical acceptance and its like give up exactness for speed, and have to be judged by
#   the quality of what they write.
# * **Nothing is said about speed.** A lossless method can be slower than no method at all.
