"""Does another engine write what the target writes? A certificate for an OpenAI-compatible server.

The suite's own engine loads the target. The server writes texts at temperature 0, which the target reads again, and
draws tokens at a temperature, which are compared with the target's distribution.

- Greedy: every token must be the target's argmax or a near-tie of it. ``regret`` is the log-probability that the
  tokens lose against the target's argmax, each given the server's own text before it.
- Sampling: chi-square over the tokens, or over what their texts distinguish if the server returns only text; Bonferroni
  over all tests.
- Later tokens, which a speculative server draws by its verification rule: each is turned into its place in the target's
  distribution after the text before it, drawn within the step of the token (the randomised probability integral
  transform; Rosenblatt 1952, Annals of Mathematical Statistics 23(3)). The places are uniform if all tokens are right.
- top_p and top_k: no token may be from outside the set. Tokens at its edge, where rounding decides, do not count.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.config import compose, options
from bench.config.schema import RunConfig
from bench.config.typecheck import did_you_mean
from bench.errors import INVALID, OK, UserError
from bench.lossless import greedy, report
from bench.lossless.experiments import MORE_PROMPTS, PROMPTS
from bench.lossless.served import KEY, Completion, Prompt, Server
from bench.lossless.settings import ServedConfig
from bench.lossless.statistics import compare
from bench.measure import agreement
from bench.models.source import Loaded
from bench.report import tables
from bench.tasks import prompts
from bench.utils import redact
from bench.utils.progress import Progress
from methods.autoregressive import Autoregressive
from methods.engine.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPERIMENT = "served"
_NO_EFFECT = {
    "dataset": "the prompts are fixed. Leave it out.",
    "method": "the server decodes. Leave it out.",
    "sampling": "set temperature, top_p and top_k by these names.",
}
_EDGE = 0.02  # most of the nucleus' mass that rounding may move, in 16 bit
_UNSURE = 4.6  # tokens expected outside a set, below which a server that ignores it stays undetected in 1 of 100 cases
_LATER = 8  # tokens of a drawn text
_BINS = 20  # of the places of later tokens
_HOTTEST = 5.0  # bounds of the temperature that is fitted
_COLDEST = 0.05

Array = npt.NDArray[np.float64]


def run(words: Sequence[str]) -> int:
    """Ask the server, compare, record, print; returns the exit code.

    Raises:
        UserError: no server, no such model, a wrong value, or a server that reads other tokens.
        RunFailed: the server failed on the way.
    """
    from bench.config import instantiate
    from bench.measure import preconditions
    from bench.models import loading
    from bench.utils import machine

    config, cfg = split(words)
    server = Server(config.url, config.timeout_s, os.environ.get(KEY))
    listed = server.models()
    name = _served_name(config, server, listed)
    instantiate.check(cfg)
    preconditions.require(preconditions.check(cfg))
    machine.set_threads(cfg.hardware.threads)
    loaded = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths)
    if loaded.kind != "causal" or loaded.denoises:
        raise UserError(f"model must write from left to right, got {loaded.name}. Name a decoder-only model.")
    begin = datetime.now(timezone.utc)
    texts = [_prompt(loaded, text, cfg.max_new_tokens) for text in (*PROMPTS, *MORE_PROMPTS)[: config.prompts]]
    server.connect(name, texts[0], list(listed))
    result = examine(server, loaded, texts, config, cfg, listed.get(name, ""))
    seconds = (datetime.now(timezone.utc) - begin).total_seconds()
    folder = Path(cfg.paths.results) / "lossless" / report.folder_name(EXPERIMENT, cfg, config, loaded)
    report.write(folder, EXPERIMENT, cfg, config, loaded, result, begin, seconds)
    print(render(result, f"{loaded.name}   served as {name} at {server.shown}", report.shown(folder)))
    return OK if result["passed"] else INVALID


def split(words: Sequence[str]) -> tuple[ServedConfig, RunConfig]:
    """The settings of the certificate, and the configuration of the target.

    Raises:
        UserError: an unknown or useless setting, or a wrong value.
    """
    config, others = options.parse(ServedConfig, words)
    known = {*compose.groups(), *(field.name for field in fields(RunConfig))}
    for word in others:
        key = word.lstrip("+~").partition("=")[0]
        group = key.split(".")[0]
        if group in _NO_EFFECT:
            raise UserError(f"{word} has no effect with url: {_NO_EFFECT[group]}")
        if group == "experiment":
            raise UserError(f"{word} has no effect with url: a server is tested in all ways. Leave one of them out.")
        if group not in known and did_you_mean(key, options.keys(ServedConfig)):
            options.refuse([word], "lossless", options.keys(ServedConfig))
    return config, compose.compose(["method=autoregressive", *others])


def _served_name(config: ServedConfig, server: Server, listed: dict[str, str]) -> str:
    if config.served_model:
        return config.served_model
    if len(listed) == 1:
        return next(iter(listed))
    has = f"lists {', '.join(listed)}" if listed else "lists no model"
    raise UserError(f"served_model is needed: the server at {server.shown} {has}. Set served_model=NAME.")


def _prompt(loaded: Loaded, text: str, limit: int) -> Prompt:
    """A prompt, and its text with the chat template if a server that encodes the text reads the same ids."""
    ids = prompts.encode(loaded.tokenizer, [{"role": "user", "content": text}])
    prompts.fits(f"'{text}'", len(ids), limit, loaded.lm.max_positions)
    shown = str(loaded.tokenizer.decode(ids))
    begin = str(loaded.tokenizer.bos_token or "")
    candidates = [shown, shown.removeprefix(begin)]  # an encoder that adds the first token would add a second one
    same = [each for each in candidates if list(loaded.tokenizer(each)["input_ids"]) == ids]
    return Prompt(text, same[0] if same else None, ids)


def examine(
    server: Server, loaded: Loaded, texts: Sequence[Prompt], config: ServedConfig, cfg: RunConfig, owner: str = ""
) -> dict[str, Any]:
    """All tests of a connected server; the result for JSON."""
    counted = server.read_prompt(texts[0])
    reader = Reader(loaded)
    gap = agreement.near_tie_gap(loaded.lm.dtype, cfg.measure.near_tie_gap)
    rows = []
    with Progress("greedy", len(texts)) as progress:
        for prompt in texts:
            rows.append(greedy_row(server, loaded, reader, prompt, cfg.max_new_tokens, gap))
            progress.advance()
    cells = first_tokens(server, loaded, reader, texts[: len(PROMPTS)], config, gap)
    bound = config.level / max(1, len(cells))
    for cell in cells:
        cell["passed"] = cell["p_value"] > bound
    deviates = any(row["violation"] or row["cut"] for row in rows)
    return {
        "server": {
            "model": redact.text(server.model),
            "owner": owner,
            "endpoint": server.route[0],
            "prompts_as": server.route[1],
            "prompt_tokens_checked": counted,
            "tokens_by": sorted({row["tokens_by"] for row in [*rows, *cells]}),
            "refused": list(server.refused),
        },
        "near_tie_gap": gap,
        "bound": bound,
        "prompts": rows,
        "cells": cells,
        "verdicts": {
            "greedy": not deviates,
            **{test: verdict(test, cells, bound, config) for test in dict.fromkeys(cell["test"] for cell in cells)},
        },
        "passed": not deviates and all(cell["passed"] for cell in cells),
    }


# ------------------------------------------------------------------------------------------------- reading the answers


class Reader:
    """Token ids of what the server returns.

    Args:
        loaded: the target, whose vocabulary the server shares.

    Attributes:
        ends: ids that end a text.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
        self.ends = loaded.lm.eos_ids

    def ids(self, found: Completion) -> tuple[list[int] | None, str]:
        """Ids up to the first end-of-sequence token, and where they are from; None if only its text tells them."""
        ids, how = found.ids, "token ids"
        if ids is None and found.pieces is not None:
            known = [self._by_piece.get(piece, -1) for piece in found.pieces]
            ids, how = (known, "tokens as text") if min(known, default=-1) >= 0 else (None, how)
        if ids is None:
            return None, "text"
        end = next((place + 1 for place, token in enumerate(ids) if token in self.ends), None)
        return ids[:end], how

    def ids_of_text(self, text: str, own: list[int]) -> list[int]:
        """Ids of a text: the target's own as far as their text is the same, the rest encoded again."""
        body = own[:-1] if own and own[-1] in self.ends else own
        for count in range(len(body), -1, -1):
            begin = self._text(body[:count])
            if text.startswith(begin) and (count == len(body) or "\ufffd" not in begin[-1:]):
                break
        rest = text[len(begin) :]
        return body[:count] + (list(self._tokenizer(rest, add_special_tokens=False)["input_ids"]) if rest else [])

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    @cached_property
    def _by_piece(self) -> dict[str, int]:
        """Id of each token whose text no other token has."""
        found: dict[str, int] = {}
        for token, text in enumerate(self._texts(skip_special=False)):
            found[text] = -1 if text in found else token
        return found

    def _texts(self, *, skip_special: bool) -> list[str]:
        each = [[token] for token in range(len(self._tokenizer))]
        return self._tokenizer.batch_decode(each, skip_special_tokens=skip_special)

    @cached_property
    def classes(self) -> dict[str, list[int]]:
        """Tokens by text, for a server that returns only text."""
        found: dict[str, list[int]] = {}
        for token, text in enumerate(self._texts(skip_special=True)):
            found.setdefault(text, []).append(token)
        return found


# --------------------------------------------------------------------------------------------------------------- greedy


def greedy_row(
    server: Server, loaded: Loaded, reader: Reader, prompt: Prompt, limit: int, gap: float
) -> dict[str, Any]:
    """One text of the server at temperature 0 under the target."""
    own = greedy.decode(Autoregressive(loaded.lm, Sampling()), prompt.ids, limit, loaded.lm)
    found = server.complete(prompt, Sampling(), limit)[0]
    ids, how = reader.ids(found)
    if ids is None:
        ids = reader.ids_of_text(found.text, own)
    cut = not found.ended and how != "text" and len(ids) < limit and ids[-1:] != own[-1:]
    if found.ended and len(ids) < limit and not (ids and ids[-1] in loaded.lm.eos_ids):
        ids = [*ids, *_end(loaded, prompt.ids, ids)]
    check = agreement.check(loaded.lm, prompt.ids, ids, gap) if ids else agreement.Check([], gap, 0.0)
    length = min(len(own), len(ids))
    first = next((i for i in range(length) if own[i] != ids[i]), length if len(own) != len(ids) else None)
    return {
        "prompt": prompt.message,
        "tokens_by": how,
        "tokens": len(ids),
        "identical": first is None,
        "first_divergence": first,
        "exact": check.exact,
        "near_tie": check.near_ties,
        "violation": check.violations,
        "regret": sum(check.gaps),
        "max_gap": check.max_gap,
        "cut": cut or not ids,
    }


def _end(loaded: Loaded, prompt: list[int], ids: list[int]) -> list[int]:
    """The end-of-sequence token that the target finds likeliest here, since servers do not return theirs."""
    if not loaded.lm.eos_ids:
        return []
    logits = _logits(loaded, [*prompt, *ids])
    return [max(loaded.lm.eos_ids, key=lambda token: float(logits[token]))]


@torch.inference_mode()
def _logits(loaded: Loaded, ids: list[int]) -> Tensor:
    """The target's logits after the last id."""
    return loaded.lm.score(torch.tensor(ids, device=loaded.lm.device), start=len(ids) - 1)[0]


# ------------------------------------------------------------------------------------------------------------- sampling


@dataclass(frozen=True, slots=True)
class Truncation:
    """The tokens that a sampling keeps.

    Attributes:
        probs: of all tokens, processed.
        kept: what the sampling keeps.
        edge: tokens beyond it that rounding may put into it.
    """

    probs: Tensor
    kept: Tensor
    edge: Tensor

    @staticmethod
    def of(logits: Tensor, sampling: Sampling, gap: float) -> Truncation:
        """Args:
        logits: of the target, [V].
        sampling: temperature, top_k and top_p.
        gap: the near-tie gap, in log-probability.
        """
        probs = sampling.probs(logits)
        kept = probs > 0
        plain = replace(sampling, top_k=0, top_p=1.0).probs(logits)
        near = plain >= plain[kept].min() * float(np.exp(-gap)) if sampling.top_k else kept
        if sampling.top_p < 1:
            wider = replace(sampling, top_p=min(1.0, sampling.top_p + min(_EDGE, gap)))
            near = near | (wider.probs(logits) > 0)
        return Truncation(probs, kept, near & ~kept)


def first_tokens(
    server: Server,
    loaded: Loaded,
    reader: Reader,
    texts: Sequence[Prompt],
    config: ServedConfig,
    gap: float,
) -> list[dict[str, Any]]:
    """A cell for each test and prompt; top_k only if the server takes it, later tokens only if it returns ids."""
    tests = {"temperature": Sampling(config.temperature), "top_p": Sampling(config.temperature, top_p=config.top_p)}
    if server.takes("top_k"):
        tests["top_k"] = Sampling(config.temperature, top_k=config.top_k)
    cells = []
    with Progress("drawn tokens", (len(tests) + 1) * len(texts) * config.n) as progress:
        for test, sampling in tests.items():
            for prompt in texts:
                drawn = server.complete(prompt, sampling, 1, config.n)
                logits = _logits(loaded, prompt.ids)
                cells.append({"test": test, "prompt": prompt.message, **cell(drawn, logits, sampling, reader, gap)})
                progress.advance(config.n)
        for prompt in texts:
            drawn = server.complete(prompt, Sampling(config.temperature), _LATER, max(1, config.n // _LATER))
            if found := later_cell(drawn, loaded, prompt, Sampling(config.temperature), reader):
                cells.append({"test": "later", "prompt": prompt.message, **found})
            progress.advance(config.n)
    return cells


def later_cell(
    drawn: Sequence[Completion], loaded: Loaded, prompt: Prompt, sampling: Sampling, reader: Reader
) -> dict[str, Any] | None:
    """Places of the tokens after the first in the target's distributions, against uniform ones.

    Returns:
        The figures of ``statistics.Comparison`` over the bins; None if the server returns no ids, or no such token.
    """
    luck = np.random.default_rng(0)
    places, how = [], ""
    for found in drawn:
        ids, how = reader.ids(found)
        if ids is None:
            return None
        if len(ids) > 1:
            places.append(_places(loaded, prompt.ids, ids, sampling, luck))
    if not places:
        return None
    every = np.concatenate(places)
    bins = int(np.clip(len(every) // 10, 1, _BINS))
    counts = np.bincount((every * bins).astype(int).clip(max=bins - 1), minlength=bins).astype(float)
    return {"tokens_by": how, **asdict(compare(counts, np.full(bins, 1 / bins))), "outside": 0}


@torch.inference_mode()
def _places(
    loaded: Loaded, prompt: list[int], ids: list[int], sampling: Sampling, luck: np.random.Generator
) -> npt.NDArray:
    """Place of each token but the first: the mass of likelier tokens, and a random part of its own."""
    read = torch.tensor([*prompt, *ids[:-1]], device=loaded.lm.device)
    probs = sampling.probs(loaded.lm.score(read, start=len(prompt))).double()
    own = probs.gather(1, torch.tensor(ids[1:], device=probs.device)[:, None])
    likelier = (probs * (probs > own)).sum(1).cpu().numpy()
    # tokens that are exactly as likely form one step
    step = (probs * (probs == own)).sum(1).cpu().numpy()
    return likelier + luck.random(len(step)) * step


def cell(drawn: Sequence[Completion], logits: Tensor, sampling: Sampling, reader: Reader, gap: float) -> dict[str, Any]:
    """First tokens of the server against the target's distribution.

    Returns:
        The figures of ``statistics.Comparison``; ``tokens_by``; ``outcomes``: different ones; ``outside``, ``edge``:
        draws outside the kept tokens and at their edge; ``if_ignored``: draws that a sampler without truncation puts
        outside; ``p_untruncated``: its p-value; ``fitted_temperature``: the most likely temperature of the draws.
    """
    labels, counts, how = _outcomes(drawn, reader, len(logits))

    def pooled(values: Tensor) -> Array:
        return np.bincount(labels, weights=values.double().cpu().numpy(), minlength=len(counts)).astype(float)

    found = Truncation.of(logits, sampling, gap)
    plain = pooled(replace(sampling, top_k=0, top_p=1.0).probs(logits))
    probs = pooled(found.probs)
    edge = (pooled(found.edge) > 0) & (probs == 0)
    kept = np.where(edge, 0.0, counts)
    comparison: dict[str, Any] = asdict(compare(kept, probs)) if kept.sum() else {"draws": 0, "p_value": 0.0}
    if np.isinf(comparison.get("chi_square", 0.0)):
        comparison["chi_square"] = None
    return {
        "tokens_by": how,
        **comparison,
        "outcomes": int((counts > 0).sum()),
        "outside": int(kept[probs == 0].sum()),
        "edge": int(counts[edge].sum()),
        "if_ignored": float(counts.sum() * plain[(probs == 0) & ~edge].sum()),
        "p_untruncated": compare(counts, plain).p_value,
        "likeliest": float(plain.max()),
        "fitted_temperature": fitted_temperature(logits, labels, counts),
    }


def _outcomes(drawn: Sequence[Completion], reader: Reader, vocabulary: int) -> tuple[npt.NDArray, Array, str]:
    """Outcome of each token of the vocabulary, draws of each outcome, and what tells them apart.

    An outcome is a token, or a text that some tokens share; the last one is for what no token writes.
    """
    read = [reader.ids(found) for found in drawn]
    if all(ids is not None for ids, _ in read):
        labels = np.arange(vocabulary)
        # a server may leave out the end-of-sequence token, which is then an empty list
        ends = [token for token in reader.ends if token < vocabulary]
        end = ends[0] if ends else vocabulary
        labels[ends] = end
        tokens = [ids[0] if ids else end for ids, _ in read]
        seen = [int(labels[token]) if token < vocabulary else vocabulary for token in tokens]
        return labels, np.bincount(seen, minlength=vocabulary + 1).astype(float), read[0][1]
    numbers = {text: number for number, text in enumerate(reader.classes)}
    labels = np.full(vocabulary, numbers.setdefault("", len(numbers)))
    for text, tokens in reader.classes.items():
        labels[[token for token in tokens if token < vocabulary]] = numbers[text]
    seen = [numbers.get(found.text, len(numbers)) for found in drawn]
    return labels, np.bincount(seen, minlength=len(numbers) + 1).astype(float), "text"


def fitted_temperature(logits: Tensor, labels: npt.NDArray, counts: Array) -> float | None:
    """The temperature at which the draws are most likely; None for fewer than two different tokens."""
    from scipy.optimize import minimize_scalar

    seen = np.flatnonzero(counts)
    scores = logits.double().cpu().numpy()
    if len(seen) < 2:
        return None

    def loss(log_temperature: float) -> float:
        scaled = scores / np.exp(log_temperature)
        weights = np.exp(scaled - scaled.max())
        probs = np.bincount(labels, weights=weights / weights.sum(), minlength=len(counts))
        return float(-(counts[seen] * np.log(np.maximum(probs[seen], 1e-300))).sum())

    found = minimize_scalar(loss, bounds=(np.log(_COLDEST), np.log(_HOTTEST)), method="bounded")
    return float(np.exp(found.x))


def verdict(test: str, cells: Sequence[dict[str, Any]], bound: float, config: ServedConfig) -> dict[str, Any]:
    """State of a test over its prompts, and why.

    ``state`` is consistent or not for first and later tokens; for top_p and top_k it is held, ignored, violated, or
    unsure if too few draws would show a server that ignores the setting; not consistent if all draws are inside the set
    and do not follow its distribution.
    """
    mine = [each for each in cells if each["test"] == test]
    draws, outside = (sum(each[name] for each in mine) for name in ("draws", "outside"))
    smallest, passed = min(each["p_value"] for each in mine), all(each["p_value"] > bound for each in mine)
    facts = {"draws": draws, "outside": outside, "smallest_p": smallest, "tests": len(mine)}
    if test in ("temperature", "later"):
        why = "" if passed or test == "later" else _why(mine)
        return {"state": "consistent" if passed else "not consistent", **facts, "why": why}
    expected = sum(each["if_ignored"] for each in mine)
    facts["if_ignored"] = expected
    if passed:
        return {"state": "held" if expected >= _UNSURE else "unsure", **facts}
    if not outside:
        return {"state": "not consistent", **facts}
    ignored = outside and all(each["p_untruncated"] > bound for each in mine)
    return {"state": "ignored" if ignored else "violated", **facts}


def _why(cells: Sequence[dict[str, Any]]) -> str:
    """What the draws look like instead."""
    if all(each["outcomes"] == 1 for each in cells) and min(each["likeliest"] for each in cells) < 0.9:
        return "all draws of a prompt are one token: it decodes greedily"
    fits = [each["fitted_temperature"] for each in cells if each["fitted_temperature"] is not None]
    return f"the draws fit a temperature of {np.median(fits):.2f}" if fits else ""


# --------------------------------------------------------------------------------------------------------------- report

_TEXTS = {
    "tokens": "{tokens}",
    "same": "{same}",
    "near-ties": "{near_tie}",
    "violations": "{violation}",
    "regret": "{regret:.4f}",
    "first differs": "{first}",
    "prompt": "{prompt:.40}",
}
_DRAWS = {
    "test": "{test}",
    "draws": "{draws}",
    "TV": "{total_variation:.3f}",
    "expected": "{expected_total_variation:.3f}",
    "p": "{p_value:.2g}",
    "outside": "{outside}",
    "prompt": "{prompt:.40}",
}
_STATES = {
    "held": "held: {outside} of {draws:,} draws outside, {if_ignored:.0f} if it were ignored",
    "ignored": "IGNORED: {outside} of {draws:,} draws outside, as without it",
    "violated": "VIOLATED: {outside} of {draws:,} draws outside, smallest p {smallest_p:.2g}",
    "not consistent": "not consistent: none of {draws:,} draws outside, smallest p {smallest_p:.2g}",
    "unsure": "unsure: {outside} of {draws:,} draws outside, but only {if_ignored:.1f} if it were ignored; raise n",
}


def render(result: dict[str, Any], head: str, path: str) -> str:
    """The result as text: how the server was asked, tables, and a line for each verdict."""
    server, rows = result["server"], result["prompts"]
    texts = [
        row
        | {"same": "yes" if row["identical"] else "no"}
        | {"first": "-" if row["first_divergence"] is None else row["first_divergence"]}
        for row in rows
    ]
    draws = [{"total_variation": 1.0, "expected_total_variation": 0.0} | each for each in result["cells"]]
    lines = [f"prompts sent as {server['prompts_as']} to /{server['endpoint']}", _read(server)]
    if server["refused"]:
        lines.append(f"fields it refuses: {', '.join(server['refused'])}")
    parts = [head, "\n".join(lines), _table(_TEXTS, texts), _table(_DRAWS, draws), _verdicts(result)]
    passed = "as the target" if result["passed"] else "NOT as the target"
    return "\n\n".join([*parts, f"RESULT: {passed}     {path}/"])


def _read(server: dict[str, Any]) -> str:
    by = " and ".join(server["tokens_by"])
    again = "; where a text differs, its rest is encoded again, so its regret is approximate" * ("text" in by)
    if server["prompt_tokens_checked"]:
        return f"tokens compared by {by}{again}; the server read as many prompt tokens as the target"
    return f"tokens compared by {by}{again}; the server does not report how many prompt tokens it read"


def _verdicts(result: dict[str, Any]) -> str:
    rows, found = result["prompts"], result["verdicts"]
    tokens, regret = (sum(row[name] for row in rows) for name in ("tokens", "regret"))
    off, near, cut, same = (sum(row[name] for row in rows) for name in ("violation", "near_tie", "cut", "identical"))
    state = "as the target" if found["greedy"] else "deviates"
    lines = [
        f"greedy: {state}: {same} of {len(rows)} texts identical; of {tokens:,} tokens {near} near-ties (within "
        f"{result['near_tie_gap']:g}) and {off} violations; regret {regret:.4f}, {100 * regret / max(1, tokens):.4f} "
        f"per 100 tokens, largest {max((row['max_gap'] for row in rows), default=0.0):.4f}"
    ]
    if cut:
        lines.append(f"greedy: {cut} of {len(rows)} texts end before the limit without an end")
    plain = found["temperature"]
    lines.append(
        f"sampling: {plain['state']}: smallest p {plain['smallest_p']:.2g} of {plain['tests']} prompts, a test fails "
        f"at {result['bound']:.1e}" + (f"; {plain['why']}" if plain["why"] else "")
    )
    if "later" in found:
        later = found["later"]
        lines.append(
            f"later tokens: {later['state']}: smallest p {later['smallest_p']:.2g} of {later['tests']} prompts, "
            f"{later['draws']:,} tokens"
        )
    else:
        lines.append("later tokens: not tested: the server returns no token ids")
    for test in ("top_p", "top_k"):
        state = _STATES[found[test]["state"]].format(**found[test]) if test in found else "not tested: refused"
        lines.append(f"{test}: {state}")
    return "\n".join(lines)


def _table(columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> str:
    cells = [[form.format(**row) for form in columns.values()] for row in rows]
    numbers = [place for place, name in enumerate(columns) if name not in ("test", "prompt")]
    return "\n".join(f"  {line}" for line in tables.aligned(list(columns), cells, numbers).splitlines())
