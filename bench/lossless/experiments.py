"""The three experiments: from a loaded model to a result for JSON."""

from __future__ import annotations

import multiprocessing
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.config import instantiate
from bench.config.schema import RunConfig, SamplingConfig
from bench.errors import UserError
from bench.lossless import continuations, greedy, wrong_rules
from bench.lossless.sampling import LIMIT, Arrangement, first_tokens, root_distributions
from bench.lossless.settings import LosslessConfig
from bench.lossless.statistics import Comparison, compare
from bench.measure import agreement
from bench.models import artifacts, loading
from bench.models.source import Loaded
from bench.tasks import prompts
from bench.utils.machine import usable_cores
from bench.utils.memory import keep_freed_memory
from bench.utils.progress import Progress
from methods.decoder import Decoder, Guarantee
from methods.engine.sampling import Sampling
from methods.speculative import verification
from methods.speculative.loop import SpeculativeDecoder

BASELINE = {"name": "autoregressive", "_target_": "methods.autoregressive.Autoregressive"}
PROMPTS = (
    "Please tell a tale about a cyberpunk knight named PPIO who keeps a charming llama as his pet.",
    "Name the three largest moons of Jupiter and say one thing about each.",
    "Write a short poem about the sea at night.",
    "Explain to a child why the leaves of many trees turn red in autumn.",
)
"""The first is from the article whose question the experiments answer."""
MORE_PROMPTS = (
    "List five things to pack for a week in the mountains.",
    "Write a Python function that returns the second largest number of a list.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "What is the difference between weather and climate?",
)
SENTENCES = (
    "A man in a green coat walks his dog along the river.",
    "Two children are playing with a red ball in front of a house.",
    "A woman is selling fruit at a market.",
    "Several people stand on a bridge and look at the water.",
)
"""Instead of ``PROMPTS`` for encoder-decoder models, which translate and follow no instructions."""
MORE_SENTENCES = (
    "A girl rides a bicycle down the street.",
    "The band plays on a small stage.",
    "Three workers in yellow helmets repair the roof.",
    "An old man is reading a newspaper on a bench.",
)
_A_CHANCE = 1e-9  # a lower probability may be rounding
_TOP = 12  # tokens per prompt whose three bars are recorded


def require_exact(decoder: Decoder, name: str) -> None:
    if decoder.guarantee is not Guarantee.EXACT:
        raise UserError(
            f"method must be EXACT, got '{name}', which is {decoder.guarantee.value}. Choose an exact method or rule; "
            "python -m bench measures the quality of others."
        )


# ------------------------------------------------------------------------------------------------------------- greedy


def greedy_identity(cfg: RunConfig, config: LosslessConfig, loaded: Loaded) -> dict[str, Any]:
    """Target alone against method at temperature 0, over eight prompts."""
    baseline, method = (_decoder(cfg, group, 0.0, loaded) for group in (BASELINE, cfg.method))
    gap = agreement.near_tie_gap(loaded.lm.dtype, cfg.measure.near_tie_gap)
    rows = []
    texts = (*SENTENCES, *MORE_SENTENCES) if loaded.kind == "seq2seq" else (*PROMPTS, *MORE_PROMPTS)
    with Progress("greedy", len(texts)) as progress:
        for text in texts:
            ids = _encode(loaded, text, cfg.max_new_tokens)
            found = greedy.compare_prompt(baseline, method, loaded.lm, text, ids, cfg.max_new_tokens, gap)
            rows.append(asdict(found))
            progress.advance()
    tokens = sum(row["tokens"] for row in rows)
    return {
        "near_tie_gap": gap,
        "prompts": rows,
        "tokens": tokens,
        "identical": sum(row["identical"] for row in rows),
        "violations": sum(row["violation"] for row in rows),
        "passed": not any(row["violation"] for row in rows),
    }


# ----------------------------------------------------------------------------------------------------------- sampling


def first_token_sampling(cfg: RunConfig, config: LosslessConfig, loaded: Loaded) -> dict[str, Any]:
    """The first token by every rule that fits the method's drafts, and by the known-wrong rules."""
    cells = list(_cells(cfg, config, loaded))
    with Progress("sampling", len(cells)) as progress:
        rows = _in_parallel(cells, progress)
    bound = config.level / max(1, sum(row["exact"] for row in rows))
    for row in rows:
        row["passed"] = row["p_value"] > bound
    table = _by_rule(rows)
    return {"bound": bound, "cells": rows, "rules": table, "passed": all(r["as_it_should"] for r in table)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt at one temperature under one rule."""

    prompt: str
    temperature: float
    target: np.ndarray
    draft: np.ndarray
    given: np.ndarray | None
    arrangement: Arrangement
    draws: int
    seed: int
    texts: dict[int, str]


def _cells(cfg: RunConfig, config: LosslessConfig, loaded: Loaded) -> Iterator[Cell]:
    for temperature in config.temperatures:
        decoder = _decoder(cfg, cfg.method, temperature, loaded)
        if not isinstance(decoder, SpeculativeDecoder):
            raise UserError(
                f"experiment=sampling needs a method with a drafter, got '{cfg.method['name']}'. Use experiment=joint, "
                "which draws through the whole decoder."
            )
        sampling = Sampling(temperature, cfg.sampling.top_k, cfg.sampling.top_p)
        for number, text in enumerate(_prompts(loaded)):
            ids = _encode(loaded, text, LIMIT)
            target, draft, given = root_distributions(decoder, ids, sampling, cfg.seed)
            known = target if draft is None else draft
            if draft is not None:
                _check_children(config, int((draft > _A_CHANCE).sum()))
            for arrangement in arrangements(draft is not None, len(given) if given is not None else 0, config):
                if not arrangement.exact and temperature < max(config.temperatures):
                    continue
                seed = _seed(cfg.seed, temperature, number, arrangement.name)
                yield Cell(
                    text,
                    temperature,
                    target.cpu().numpy(),
                    known.cpu().numpy(),
                    None if given is None else given.cpu().numpy(),
                    arrangement,
                    config.draws,
                    seed,
                    _top_texts(loaded, target, known),
                )


def _seed(*parts: object) -> int:
    """A seed for each cell; with a shared one, chain and block would judge the same drafts."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def _check_children(config: LosslessConfig, likely: int) -> None:
    if config.children > likely:
        raise UserError(
            f"children must be at most {likely}, the tokens to which the draft gives a probability, got "
            f"{config.children}. Set children={likely} or less."
        )


def arrangements(drawn: bool, tokens: int, config: LosslessConfig) -> list[Arrangement]:
    """The rules that fit: all if the drafter has a distribution, else the deterministic one."""
    k = config.children
    if not drawn:
        if tokens:
            return [Arrangement("deterministic draft", "given", verification.DeterministicTree(), tokens)]
        return [Arrangement("no draft", "chain", verification.ChainRejection())]
    exact = [
        Arrangement("chain", "chain", verification.ChainRejection()),
        Arrangement("block", "chain", verification.BlockRejection()),
        Arrangement("tree, with replacement", "with_replacement", verification.TreeWithReplacement(), k),
        Arrangement("tree, without replacement", "without_replacement", verification.TreeWithoutReplacement(), k),
        Arrangement("tree, deterministic", "top", verification.DeterministicTree(), k),
    ]
    unmasked = wrong_rules.UnmaskedWithoutReplacement()
    wrong = [
        Arrangement("independent draw per path", "top", wrong_rules.IndependentPaths(), k),
        Arrangement("argmax draft judged with softmax q", "top_as_drawn", verification.ChainRejection()),
        Arrangement("top-k children judged as drawn", "top_as_drawn", verification.TreeWithReplacement(), k),
        Arrangement("without replacement, unmasked q", "without_replacement", unmasked, k),
        Arrangement("rejection without the residual", "chain", wrong_rules.UncorrectedRejection()),
    ]
    return exact + [replace(rule, exact=False) for rule in wrong] * config.controls


def _in_parallel(cells: Sequence[Cell], progress: Progress) -> list[dict[str, Any]]:
    """One cell per core, with one thread each."""
    workers = min(usable_cores(), len(cells))
    if workers <= 1 or sum(cell.draws for cell in cells) < 200_000:
        return [_counted(run_cell(cell), progress) for cell in cells]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        return [_counted(row, progress) for row in pool.map(run_cell, cells)]


def _counted(row: dict[str, Any], progress: Progress) -> dict[str, Any]:
    progress.advance()
    return row


def _one_thread() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()


def run_cell(cell: Cell) -> dict[str, Any]:
    """All draws of one cell, compared with the target."""
    target, draft = torch.from_numpy(cell.target), torch.from_numpy(cell.draft)
    given = None if cell.given is None else torch.from_numpy(cell.given)
    rng = torch.Generator().manual_seed(cell.seed)
    begin = time.process_time()
    counts = first_tokens(target, draft, cell.arrangement, cell.draws, rng, given)
    seconds = time.process_time() - begin
    found: Comparison = compare(counts.double().numpy(), cell.target.astype(np.float64))
    overlap = float(np.minimum(cell.target, cell.draft).sum())
    top = [
        {
            "id": token,
            "text": text,
            "target": float(cell.target[token]),
            "draft": float(cell.draft[token]),
            "empirical": float(counts[token]) / cell.draws,
        }
        for token, text in cell.texts.items()
    ]
    return {
        "prompt": cell.prompt,
        "temperature": cell.temperature,
        "rule": cell.arrangement.name,
        "exact": cell.arrangement.exact,
        "overlap": overlap,
        **asdict(found),
        "cpu_s": round(seconds, 1),
        "top": top,
    }


def _by_rule(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per rule: mean standard deviation and that of exact sampling, smallest p-value, number of failed cells."""
    table = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        mine = [row for row in rows if row["rule"] == rule]
        failed = sum(not row["passed"] for row in mine)
        exact = mine[0]["exact"]
        table.append(
            {
                "rule": rule,
                "exact": exact,
                "cells": len(mine),
                "failed": failed,
                "standard_deviation": float(np.mean([row["standard_deviation"] for row in mine])),
                "expected_deviation": float(np.mean([row["expected_deviation"] for row in mine])),
                "total_variation": float(np.mean([row["total_variation"] for row in mine])),
                "smallest_p": min(row["p_value"] for row in mine),
                "as_it_should": failed == 0 if exact else failed > 0,
            }
        )
    return table


# -------------------------------------------------------------------------------------------------------------- joint


def joint_sampling(cfg: RunConfig, config: LosslessConfig, loaded: Loaded) -> dict[str, Any]:
    """Whole short continuations by the full decoder, against the target's exact joint distribution."""
    rows = []
    texts = _prompts(loaded)
    n_tests = len(config.temperatures) * len(texts)
    with Progress("joint", config.draws * n_tests) as progress:
        for temperature in config.temperatures:
            decoder = _decoder(cfg, cfg.method, temperature, loaded)
            sampling = Sampling(temperature, cfg.sampling.top_k, cfg.sampling.top_p)
            for text in texts:
                rows.append(_joint_row(cfg, config, loaded, decoder, sampling, text, progress.advance))
    bound = config.level / n_tests
    for row in rows:
        row["passed"] = row["p_value"] > bound
    return {"bound": bound, "cells": rows, "passed": all(row["passed"] for row in rows)}


def _joint_row(
    cfg: RunConfig,
    config: LosslessConfig,
    loaded: Loaded,
    decoder: Decoder,
    sampling: Sampling,
    text: str,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    ids, lm = _encode(loaded, text, config.horizon), loaded.lm
    exact = continuations.likely_continuations(lm, ids, sampling, config.horizon, config.floor)
    counts = continuations.drawn_continuations(
        decoder, ids, config.horizon, config.draws, cfg.seed, cfg.batch_size, lm.device, progress
    )
    found = compare(*continuations.as_arrays(exact, counts))
    best = sorted(exact, key=lambda sequence: -exact[sequence])[:_TOP]
    top = [{"text": _text(loaded, s), "target": exact[s], "empirical": counts.get(s, 0) / config.draws} for s in best]
    return {
        "prompt": text,
        "temperature": sampling.temperature,
        "continuations": len(exact),
        "mass": sum(exact.values()),
        **asdict(found),
        "top": top,
    }


# ------------------------------------------------------------------------------------------------------- small pieces


def _decoder(cfg: RunConfig, group: dict[str, Any], temperature: float, loaded: Loaded) -> Decoder:
    sampling = SamplingConfig(temperature, cfg.sampling.top_k, cfg.sampling.top_p)
    part = artifacts.find(group, loaded.name, loaded.revision, cfg.paths)
    load_model = loading.draft_loader(cfg, loaded.tokenizer)
    decoder = instantiate.build_decoder(group, loaded.lm, sampling, load_model, part.folder if part else None)
    require_exact(decoder, group["name"])
    return decoder


def _prompts(loaded: Loaded) -> tuple[str, ...]:
    return SENTENCES if loaded.kind == "seq2seq" else PROMPTS


def _encode(loaded: Loaded, text: str, limit: int) -> list[int]:
    """Ids of a prompt; UserError if it leaves no room for ``limit`` more."""
    ids = prompts.encode(loaded.tokenizer, [{"role": "user", "content": text}])
    prompts.fits(f"'{text}'", len(ids), limit, loaded.lm.max_positions, apart=loaded.kind == "seq2seq")
    return ids


def _top_texts(loaded: Loaded, target: torch.Tensor, draft: torch.Tensor) -> dict[int, str]:
    """The tokens whose bars are drawn: the most likely ones of the target, then of the draft."""
    half = min(_TOP // 2 + 2, len(target))
    tokens = dict.fromkeys([*target.topk(half).indices.tolist(), *draft.topk(half).indices.tolist()])
    return {token: _text(loaded, [token]) for token in list(tokens)[:_TOP]}


def _text(loaded: Loaded, ids: Sequence[int]) -> str:
    return str(loaded.tokenizer.decode(list(ids)))
