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
from textwrap import shorten

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import Markdown, display

from bench.report import notebook

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
SAMPLING, JOINT, GREEDY = (read_records(experiment) for experiment in ("sampling", "joint", "greedy"))
# Records without draws of a draft distribution (a deterministic draft, or none) have no q to show.
WITH_DRAFT = [r for r in SAMPLING if any(cell["rule"] == "chain" for cell in r["cells"])]
if not WITH_DRAFT:
    raise SystemExit(
        "No sampling record with a draft distribution was found. Make one: "
        "python -m bench lossless experiment=sampling method=speculative_sampling"
    )
RECORD = WITH_DRAFT[0]
CELLS = pd.DataFrame(RECORD["cells"])
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
            "shown below": "yes" if r is RECORD or r in JOINT[:1] + GREEDY else "",
        }
        for r in SAMPLING + JOINT + GREEDY
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
# Five tokens, $p$ in blue and $q$ in orange.


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
# *Figure 1. Left: target and draft over five tokens. Middle: each draft bar is split into the part that is accepted
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
        f"*Figure 2. The first token after a real prompt, at temperature {shown['temperature']:g}. Draft and target overlap "
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
# ## 2. The measurement: three bars per token
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
# *Figure 3. One panel per prompt. Blue: the target's probability; orange, hatched: the draft's; the third, dotted bar:
# how often speculative sampling generated the token. The third bar is as high as the first throughout, also where the draft
# is far off.*
#
# ### Three numbers for "as high as"
#
# With $\hat p$ the frequencies of $n$ draws over a vocabulary of $V$ tokens:
#
# * **Standard deviation** $\sqrt{\frac1V \sum_x (\hat p(x) - p(x))^2}$. It is never 0. Drawing from $p$ itself gives
#   $\sqrt{\sum_x p(x)(1 - p(x)) / (nV)}$ on average (root mean square). The number means nothing without that second
#   one: it shrinks with the sample and with the vocabulary. Numbers from other vocabularies and samples do
#   not compare; compare the columns below with each other only.
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
# *Figure 4. One mark per prompt and temperature. Left, on a logarithmic axis: the standard deviation divided by what
# exact sampling gives; the dashed line is 1. It scatters, for a few likely tokens decide it. Right: the p-value as powers
# of ten; to the right of the dashed line a cell fails. Circles are exact rules, crosses wrong ones. The deviation alone
# would let the subtlest wrong rule through, while chi-square, which weighs each token by its own noise, need not.*
#
# ## 4. Whole continuations through the full decoder
#
# The experiment above tests the rule at one position. The decoder around it can still go wrong: a cache that keeps a
# rejected token, a draft that sees another text than the target. So whole short continuations are drawn by the complete
# decoder, and compared with the product of the target's own conditional probabilities. Continuations that are too
# unlikely to be told apart are one outcome, "other".

# %%
if JOINT:
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
    display(Markdown(f"*Figure 5. The {count} likeliest continuations of all prompts, decoded by {method}: probability against frequency, both logarithmic. About one mark in twenty may leave the grey band by chance.*"))
else:
    print("No joint record here. Make one: python -m bench lossless experiment=joint method=speculative_sampling draws=1000 batch_size=64")

# %% [markdown]
# ## 5. What this does not prove
#
# * **A finite sample has finite sight.** A bias well below the total variation that exact sampling shows by itself
#   (the column "expected TV") passes. The proof closes this gap for the rule; for the code only more draws narrow it.
# * **It is about the target as computed here.** The $p$ that is compared with is the one from the same engine in the same
#   number type. That the engine computes the model correctly is tested elsewhere, against the original implementation.
#   In 16 bit a pass over several tokens rounds differently from a pass over one; the draws follow the rounded $p$.
# * **A few prompts, the first tokens.** An error that needs a long text, a full cache or an end of sequence to appear
#   is not looked for here.
# * **The target's own quality is left as it is.** Lossless means no worse than the target, with all its mistakes.
# * **Relaxed rules are outside.** Typical acceptance and its like give up exactness for speed, and have to be judged by
#   the quality of what they write.
# * **Nothing is said about speed.** A lossless method can be slower than no method at all.
