"""The four experiments: from a loaded model to a result for JSON."""

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
from bench.lossless import continuations, greedy, rounds, wrong_rules
from bench.lossless.sampling import LIMIT, Arrangement, first_tokens, root_distributions
from bench.lossless.settings import OWN, LosslessConfig
from bench.lossless.statistics import Comparison, compare, deviation_shown
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
"""The first follows one of the article whose question the experiments answer, with two words changed."""
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
OPENINGS = ("Once", "The old man", "In the morning", "She said")
"""Raw text of a few tokens, in place of ``PROMPTS`` where prompts are read anew for every draw."""
_MOST_KEPT = 8  # tokens after a prefix whose continuations can still all be computed
_EXACT_RULES = ("chain", "block", "tree_with_replacement", "tree_without_replacement", "deterministic_tree")
_A_CHANCE = 1e-9  # a lower probability may be rounding
_TOP = 12  # tokens per prompt whose three bars are recorded
_MEANS = (
    "standard_deviation",
    "expected_deviation",
    "standard_deviation_shown",
    "expected_deviation_shown",
    "total_variation",
    "expected_total_variation",
    "kept",
)  # of a rule's cells


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
    return _judged(rows, config.level)


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
    return {
        "prompt": cell.prompt,
        "temperature": cell.temperature,
        "rule": cell.arrangement.name,
        "exact": cell.arrangement.exact,
        "overlap": float(np.minimum(cell.target, cell.draft).sum()),
        **asdict(found),
        "cpu_s": round(seconds, 1),
        **_shown(cell, counts),
    }


def _shown(cell: Cell, counts: torch.Tensor) -> dict[str, Any]:
    """The bars of the picture, and the deviation over their tokens alone."""
    top: list[dict[str, Any]] = [
        {
            "id": token,
            "text": text,
            "target": float(cell.target[token]),
            "draft": float(cell.draft[token]),
            "empirical": float(counts[token]) / cell.draws,
        }
        for token, text in cell.texts.items()
    ]
    found, expected = deviation_shown([t["target"] for t in top], [t["empirical"] for t in top], cell.draws)
    return {"standard_deviation_shown": found, "expected_deviation_shown": expected, "top": top}


def by_rule(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per rule: means over its cells, the smallest p-value, and the number of failed cells."""
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
                **{key: float(np.mean([row[key] for row in mine])) for key in _MEANS if key in mine[0]},
                "smallest_p": min(row["p_value"] for row in mine),
                **({"smallest_first_p": min(r["first_p_value"] for r in mine)} if "first_p_value" in mine[0] else {}),
                "as_it_should": failed == 0 if exact else failed > 0,
            }
        )
    return table


def _judged(rows: list[dict[str, Any]], level: float) -> dict[str, Any]:
    """The result of an experiment: a cell passes above the level shared by all cells of exact rules (Bonferroni)."""
    bound = level / max(1, sum(row["exact"] for row in rows))
    for row in rows:
        row["passed"] = row["p_value"] > bound
    table = by_rule(rows)
    return {"bound": bound, "cells": rows, "rules": table, "passed": all(row["as_it_should"] for row in table)}


# ------------------------------------------------------------------------------------------------------------- rounds


def round_sampling(cfg: RunConfig, config: LosslessConfig, loaded: Loaded) -> dict[str, Any]:
    """The first tokens of rounds over drafts of several levels, by every rule for drawn drafts and by wrong ones."""
    _check_rounds(cfg, config, loaded)
    rows = []
    fitting = [*arrangements(True, 0, config), *deep_controls(config)]
    cells = [(t, text) for t in config.temperatures for text in _prompts(loaded)[: config.prompts]]
    hot = max(config.temperatures)
    used = {t: [each for each in fitting if each.exact or t == hot] for t in config.temperatures}
    with Progress("rounds", sum(len(used[temperature]) for temperature, _ in cells)) as progress:
        for number, (temperature, text) in enumerate(cells):
            tables = _tables(cfg, config, loaded, temperature, text)
            for arrangement in used[temperature]:
                seed = _seed(cfg.seed, temperature, number, arrangement.name)
                found = round_cell(tables, arrangement, config.draws, seed)
                for token in found["top"]:
                    token["text"] = _text(loaded, token.pop("ids"))
                rows.append({"prompt": text, "temperature": temperature, **found})
                progress.advance()
    return _judged(rows, config.level)


def _check_rounds(cfg: RunConfig, config: LosslessConfig, loaded: Loaded) -> None:
    if loaded.kind == "seq2seq":
        raise UserError(
            f"experiment=rounds needs a decoder-only model, got '{cfg.model['name']}', an encoder-decoder. Use "
            "experiment=sampling or experiment=joint."
        )
    if not config.children <= cfg.sampling.top_k <= _MOST_KEPT:
        raise UserError(
            f"sampling.top_k must be between {config.children} (children) and {_MOST_KEPT} for experiment=rounds, "
            f"which computes every continuation, got {cfg.sampling.top_k}. Set sampling.top_k=4."
        )


def _tables(cfg: RunConfig, config: LosslessConfig, loaded: Loaded, temperature: float, text: str) -> rounds.Tables:
    decoder = _decoder(cfg, cfg.method, temperature, loaded)
    ids = _encode(loaded, text, LIMIT + config.levels)
    sampling = Sampling(temperature, cfg.sampling.top_k, cfg.sampling.top_p)

    def distributions(prefix: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found = None
        if isinstance(decoder, SpeculativeDecoder):
            target, found, _ = root_distributions(decoder, ids + prefix, sampling, cfg.seed)
        if found is None:
            raise UserError(
                f"experiment=rounds needs a method that draws its drafts, got '{cfg.method['name']}'. Use "
                "method=speculative_sampling, method=eagle method.tree=static method.draw=true, or experiment=joint."
            )
        return target, found

    return rounds.tables_of(distributions, config.levels)


def deep_controls(config: LosslessConfig) -> list[Arrangement]:
    """Wrong rules whose first token is right."""
    if not config.controls or config.levels == 1:
        return []
    return [
        Arrangement("block, residual of the chain", "chain", wrong_rules.BlockWithChainResidual(), exact=False),
        Arrangement(
            "tree, judged behind the root only",
            "without_replacement",
            wrong_rules.JudgedBehindRoot(),
            config.children,
            exact=False,
        ),
    ]


def round_cell(tables: rounds.Tables, arrangement: Arrangement, draws: int, seed: int) -> dict[str, Any]:
    """Rounds of one rule behind one prompt, compared with the joint distribution."""
    counted, kept = rounds.rounds(tables, arrangement, draws, torch.Generator().manual_seed(seed))
    counts, exact = counted.double().numpy(), tables.joint().numpy()
    first = compare(counts.reshape(tables.width, -1).sum(1), exact.reshape(tables.width, -1).sum(1))
    ids = list(tables.continuations())
    best = np.argsort(-exact, kind="stable")[:_TOP].tolist()
    return {
        "rule": arrangement.name,
        "exact": arrangement.exact,
        "continuations": int((exact > 0).sum()),
        "kept": kept,
        **asdict(compare(counts, exact)),
        "first_p_value": first.p_value,
        "top": [{"ids": ids[i], "target": float(exact[i]), "empirical": float(counts[i]) / draws} for i in best],
    }


# -------------------------------------------------------------------------------------------------------------- joint


def joint_sampling(cfg: RunConfig, config: LosslessConfig, loaded: Loaded) -> dict[str, Any]:
    """Whole short continuations by the full decoder, against the target's exact joint distribution."""
    rows = []
    texts = _joint_prompts(config, loaded)
    with Progress("joint", config.draws * len(config.temperatures) * len(texts)) as progress:
        for temperature in config.temperatures:
            decoder, exact = _ruled(_decoder(cfg, cfg.method, temperature, loaded), config.rule, cfg.method["name"])
            sampling = Sampling(temperature, cfg.sampling.top_k, cfg.sampling.top_p)
            for text, ids in texts.items():
                row = _joint_row(cfg, config, loaded, decoder, sampling, ids, progress.advance)
                rows.append({"prompt": text, "rule": config.rule, "exact": exact, **row})
    return _judged(rows, config.level)


def _joint_prompts(config: LosslessConfig, loaded: Loaded) -> dict[str, list[int]]:
    if not config.openings:
        return {text: _encode(loaded, text, config.horizon) for text in _prompts(loaded)[: config.prompts]}
    if loaded.kind == "seq2seq":
        raise UserError("openings=true needs a decoder-only model, got an encoder-decoder. Leave it out.")
    return {text: list(loaded.tokenizer.encode(text)) for text in OPENINGS[: config.prompts]}


def _ruled(decoder: Decoder, name: str, method: str) -> tuple[Decoder, bool]:
    """The decoder with the named rule, and whether that rule is exact."""
    if name == OWN:
        return decoder, True
    wrong = {key: rule for key, (rule, _) in (wrong_rules.CONTROLS | wrong_rules.DEEP_CONTROLS).items()}
    exact = {key: verification.RULES[key] for key in _EXACT_RULES}
    if name not in exact | wrong:
        raise UserError(f"rule must be one of {', '.join((OWN, *exact, *wrong))}, got '{name}'. Set rule=NAME.")
    if not isinstance(decoder, SpeculativeDecoder):
        raise UserError(f"rule={name} needs a method with a drafter, got '{method}'. Leave rule out.")
    rule = (exact | wrong)[name]()
    return SpeculativeDecoder(decoder.target, decoder.sampling, decoder.drafter, rule), name in exact


def _joint_row(
    cfg: RunConfig,
    config: LosslessConfig,
    loaded: Loaded,
    decoder: Decoder,
    sampling: Sampling,
    ids: list[int],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    lm = loaded.lm
    exact = continuations.likely_continuations(lm, ids, sampling, config.horizon, config.floor)
    counts = continuations.drawn_continuations(
        decoder, ids, config.horizon, config.draws, cfg.seed, cfg.batch_size, lm.device, progress
    )
    found = compare(*continuations.as_arrays(exact, counts))
    best = sorted(exact, key=lambda sequence: -exact[sequence])[:_TOP]
    top = [{"text": _text(loaded, s), "target": exact[s], "empirical": counts.get(s, 0) / config.draws} for s in best]
    return {
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
