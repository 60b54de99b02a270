"""Numbers in the sentences of README.md and docs/ are those of committed records and cards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import readme

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
Source = Callable[[], float]


@cache
def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def summary(digest: str) -> dict[str, Any]:
    (folder,) = REFERENCE.glob(f"*-{digest}")
    return read(folder / "summary.json")


def of(digest: str, *keys: str, share: bool = False, missing: bool = False) -> Source:
    """A number of a summary; in percent, and as what is left, if asked."""

    def value() -> float:
        found: Any = summary(digest)
        for key in keys:
            found = found[key]
        return (100.0 if share else 1.0) * (1.0 - found if missing else found)

    return value


def speed(digest: str) -> Source:
    return of(digest, "speedup", "headline", "value")


def ratio(above: str, below: str) -> Source:
    """Of two speed-ups over the same baseline."""
    return lambda: speed(above)() / speed(below)()


def card(name: str, *keys: str, share: bool = True) -> Source:
    def value() -> float:
        found: Any = read(ROOT / "data" / "checkpoints" / name / "card.json")["facts"]
        for key in keys:
            found = found[int(key) if isinstance(found, list) else key]
        return (100.0 if share else 1.0) * float(found)

    return value


def lost(digest: str) -> Source:
    """BLEU below that of the baseline of the same run."""
    return lambda: of(digest, "baseline", "quality", "bleu")() - of(digest, "quality", "bleu")()


def lost_in_one_pass(choose: Callable[[list[float]], float]) -> Source:
    """Of the BLEU that students faster than their baseline lost, the least or the most, at one sentence at once."""

    def value() -> float:
        digests = [folder.name[-12:] for name in STUDENTS for folder in REFERENCE.glob(f"{name}-multi30k-*")]
        return choose([lost(each)() for each in digests if summary(each)["batch_size"] == 1 and speed(each)() > 1])

    return value


def published(value: float) -> Source:
    """A figure of a paper."""
    return lambda: value


def passes(digest: str, nodes: int, context: int) -> Source:
    """Cost of a pass over so many nodes, in passes over one."""

    def value() -> float:
        (folder,) = REFERENCE.glob(f"*-{digest}")
        curve = read(folder / "manifest.json")["cost_curve"]
        row = curve["seconds"][curve["contexts"].index(context)]
        return float(row[curve["nodes"].index(nodes)] / row[0])

    return value


def passes_watched(digest: str, nodes: int) -> Source:
    """Cost of a pass over so many nodes, in passes over one, on average over a run."""

    def value() -> float:
        (folder,) = REFERENCE.glob(f"*-{digest}")
        seconds = read(folder / "manifest.json")["cost_watch"]["seconds"]
        return float(seconds[str(nodes)] / seconds["1"])

    return value


def rounds(digest: str, arm: str, part: str) -> Source:
    """Milliseconds of a round by a device's own clock."""
    return lambda: 1e3 * of(digest, "device_time", arm, part)()


def costs(digest: str, nodes: int) -> Source:
    """Milliseconds of a round over so many nodes of one row at the shortest context, in a record of costs."""

    def value() -> float:
        (folder,) = (REFERENCE / "costs").glob(f"*-{digest}")
        curve = read(folder / "summary.json")["curves"][0]
        return 1e3 * float(curve["seconds"][0][curve["nodes"].index(nodes)])

    return value


def sizes(sweep: str) -> list[Source]:
    """The batch sizes of a named sweep."""
    params = yaml.safe_load((ROOT / "conf" / "sweep" / f"{sweep}.yaml").read_text())["hydra"]["sweeper"]["params"]
    return [lambda size=size: float(size) for size in params["batch_size"].split(",")]


N = r"(\d+(?:\.\d+)?)"
GPU, LARGE = "b53a609d68d0", "b290f89f2d58"
STAGED, CASCADE = "475a681159de", "c9fa17722343"
CALM, SUFFIX, HYBRID, HEADS = "95a3ae5fde7b", "8b03d670ef4a", "64a127b7b167", "e288ce44dd0b"
MASKS, HASHED = "90986e793f34", "799463a6779e"  # a model that drafts by masks, one that exits by a table
TABLES = {
    "learnt": "71cc08c3b42e",
    "random": "0be2002a2c5b",
    "clusters": "f4449330eefe",
    "frequency": "964c3e22ee6f",
    "mutual information": "41e1f6590809",
    r"three layers for every token \(`static_depth`\)": "ae03baeb25d4",
}
SEED_2, DIFFUSION, SPECEE = "9a3599e957ce", "3a833f5c3800", "7f9ecba0dcb0"
SEEDS = ("05b7bc0c01ce", "2565f1447609", "57ccfb0cfa00", "438f72bf8df5", "e946f977298e", SEED_2)
CONTROLS = "e16dc2a6aab0", "bd67fb01859d", "db6f91ee691d", "c8823af67deb", "48678438b977"
IN_BATCHES = {  # with 1, 8, 32 and 128 sentences at once
    "glat": ("bd67fb01859d", "4ce5dfc64a05", "cc986f3816ff", "c1319a179285"),
    "nat": ("c8823af67deb", "f3abc02326cd", "751f7c76d3aa", "12550c94ff0f"),
    "ctc": ("c306bcebfb8f", "8c50bf44db4c", "36008949f5bf", "47d3e14a40b6"),
    "6-1": ("c334789786a2", "a3abea99c11c", "6a23073076b5", "2b55ddb359a4"),
    "12-1": ("a600ee027762", "a1dec7773b90", "85f238141b85", "41fa8d7e95cb"),
    "teacher": ("c2aac2a180c1", "d4ec31adf197", "599da959f105", "6125da1512eb"),
}
BLOCKS = "bbd98dbef176", "08f1a076a44e", "51ec9d6a88b2"  # of 2, 4 and 10 tokens, from one model
DRAWN = (  # drafts judged as a block, and token by token
    "a686890c58ab", "cf3a5cf96bc5", "75a4137c1819", "e320b768c6a3",
    "34ee3fcc4e7c", "bfb5a4cd330c", "b4c72fca9c9b", "1405e45b4108",
)  # fmt: skip
STUDENTS = ("cmlm", "glat", "depa", "nat")
TEACHER = "teacher-multi30k_4_4"
LENSES = "calm-multi30k_4_4_distilled_calm"
CLAIMS: list[tuple[str, str, list[Source]]] = [
    (
        "README.md",
        rf"writes {N} times as fast as llama\.cpp's own plain decoding, and {N} times as fast",
        [ratio(CASCADE, "f4f26a5d292e"), ratio(CASCADE, "e5861c172d47")],
    ),
    ("README.md", rf"`method\.depth=6 method\.top_k=8 method\.nodes=60`: {N}x on an H200", [speed("8207a3502287")]),
    (
        "docs/gpu.md",
        rf"writes {N} tokens a second, {N} times as many .* A round takes {N} ms, .* the products {N} ms",
        [
            of(GPU, "baseline_tokens_per_s"),
            lambda: 1.0 / speed("14ecf7b26897")(),
            rounds(GPU, "baseline", "round_s"),
            rounds("04e4d14751ba", "baseline", "round_s"),
        ],
    ),
    ("docs/gpu.md", rf"A pass over 64 nodes takes {N} times as long", [passes(GPU, 64, 44)]),
    (
        "docs/gpu.md",
        rf"keeps {N} tokens a step instead of {N}\.",
        [of("8207a3502287", "tokens_per_step"), of("554cb066a6b6", "tokens_per_step")],
    ),
    (
        "docs/gpu.md",
        rf"EAGLE's network take {N} ms, heads of Hydra {N}, of Medusa {N}, a lookup on the host {N}\.",
        [
            rounds(run, "method", "draft_s")
            for run in ("554cb066a6b6", "5130d5c80a5d", "8dcbd84dbafb", "df8f4d020434")
        ],
    ),
    (
        "docs/gpu.md",
        rf"EAGLE's rounds are exposed for {N} ms\. .*: {N} ms on average over rounds, and {N} in those of `hybrid`",
        [rounds(run, "method", "host_s") for run in ("554cb066a6b6", "df8f4d020434", "afa36f7769aa")],
    ),
    (
        "docs/gpu.md",
        rf"`hydra_heads` was exposed for {N} ms a round",
        [rounds("cfa1d1152b19", "method", "host_s")],
    ),
    (
        "docs/gpu.md",
        rf"takes {N} ms a round, .* a round takes {N}, {N}, {N} and {N} times as long: there",
        [
            costs(LARGE, 1),
            *(lambda nodes=nodes: costs(LARGE, nodes)() / costs(LARGE, 1)() for nodes in (8, 16, 32, 64)),
        ],
    ),
    (
        "docs/cost.md",
        rf"after 693 tokens, a pass over 4, 8 and 16 tokens costs {N}, {N} and {N} times as much",
        [passes(SUFFIX, nodes, 693) for nodes in (4, 8, 16)],
    ),
    (
        "docs/translation.md",
        rf"A pass over 4, 8 and 16 tokens takes {N}, {N} and {N} times as long",
        [passes(HEADS, nodes, 6) for nodes in (4, 8, 16)],
    ),
    ("docs/translation.md", rf"with batch sizes {N}, {N}, {N}, {N}, {N} and {N}\.", sizes("translation")),
    (
        "docs/early_exit.md",
        rf"it runs {N} % of its decoder layers and is {N} times as fast",
        [of(CALM, "layers_per_token", share=True), speed(CALM)],
    ),
    (
        "docs/early_exit.md",
        rf"chooses 0\.75, which saves {N} % of the layers",
        [of("5ed61e6c0850", "layers_per_token", share=True, missing=True)],
    ),
    (
        "docs/early_exit.md",
        rf"lets {N}, {N} and {N} % of the tokens leave after layers 1, 2 and 3 where 98 of 100 are right; "
        rf"the softmax {N}, {N} and {N} %",
        [card(LENSES, kind, layer, "coverage_at_98") for kind in ("classifier", "lens") for layer in "123"],
    ),
    (
        "docs/early_exit.md",
        rf"are {N} times as fast for half a BLEU point, and two layers {N} times as fast",
        [speed("ae03baeb25d4"), speed("8160a74c974b")],
    ),
    (
        "docs/early_exit.md",
        rf"catch up later \| {N} % \| {N} \| {N} \|",
        [
            of("ad847d8562c7", "layers_per_token", share=True),
            speed("ad847d8562c7"),
            of("ad847d8562c7", "ranking", "text_loss", missing=True),
        ],
    ),
    (
        "docs/early_exit.md",
        rf"`accept=verify` \(EXACT\) \| \| {N} \| {N} \|",
        [speed("89b37b1b9185"), of("89b37b1b9185", "ranking", "text_loss", missing=True)],
    ),
    (
        "docs/early_exit.md",
        rf"copied states \| {N} % \| \| {N} \|",
        [
            of("920a117fd9ac", "layers_per_token", share=True),
            of("920a117fd9ac", "ranking", "text_loss", missing=True),
        ],
    ),
    (
        "docs/early_exit.md",
        rf"0\.7 is {N} times as fast without it and {N} times with it, .*? Three layers for every token are {N} times",
        [speed("830e6fb31f3d"), speed("f70fd960a36d"), speed("f0f5915fb30b")],
    ),
    *(
        (
            "docs/early_exit.md",
            rf"\| {table} \| {N} % \| {N} \| {N} \|",
            [of(run, "layers_per_token", share=True), speed(run), of(run, "quality", "bleu")],
        )
        for table, run in TABLES.items()
    ),
    (
        "docs/early_exit.md",
        rf"are {N} times as fast with six of the eight layers and {N} times with four",
        [speed("c73cc71e53f2"), speed("c5841ed12e33")],
    ),
    (
        "docs/training.md",
        rf"correct in {N} % of cases on held-out requests",
        [card("eagle-smollm2", "acceptance", "0")],
    ),
    (
        "docs/training.md",
        rf"A chain of five would give {N} tokens per step",
        [card("eagle-smollm2", "tokens_per_step_of_a_chain", share=False)],
    ),
    ("docs/training.md", rf"it runs at {N} times the baseline's speed", [speed("166f55133370")]),
    (
        "docs/training.md",
        rf"and 75 \| 0\.713 to {N} \| 3\.05 to {N} \|",
        [
            card("eagle-smollm2", "acceptance", "0", share=False),
            card("eagle-smollm2", "tokens_per_step_of_a_chain", share=False),
        ],
    ),
    (
        "docs/training.md",
        rf"that people wrote: {N} tokens per step on {N} prompts of Spec-Bench",
        [of("9e22182bd2c2", "tokens_per_step"), of("9e22182bd2c2", "n_prompts")],
    ),
    (
        "docs/rivals.md",
        rf"with {N} rows `suffix` writes {N} tokens per step of a row",
        [of("9ce33201b385", "batch_size"), of("9ce33201b385", "tokens_per_step")],
    ),
    ("docs/translation.md", rf"`blockwise_translation` writes {N} tokens per step", [of(HEADS, "tokens_per_step")]),
    (
        "docs/translation.md",
        rf"A sentence takes the teacher {N} milliseconds, .* of {N} each",
        [of("c2aac2a180c1", "ms_per_prompt"), lambda: 1e3 * of("c2aac2a180c1", "tpot_s", "mean")()],
    ),
    (
        "docs/translation.md",
        rf"at the same {N} BLEU\. With 2, 4 and 10 it writes {N}, {N} and {N} tokens per step "
        rf"and is {N}, {N} and {N} times",
        [
            of(BLOCKS[0], "quality", "bleu"),
            *(of(run, "tokens_per_step") for run in BLOCKS),
            *(speed(run) for run in BLOCKS),
        ],
    ),
    (
        "docs/translation.md",
        rf"it writes {N} tokens per step with ten predictions and loses {N} BLEU",
        [published(4.95), published(0.4)],
    ),
    (
        "docs/translation.md",
        rf"makes `multi30k_12_1_distilled`, .*: {N} BLEU on test2016, "
        rf"where 6-1 layers have {N} and the teacher has {N}",
        [of(IN_BATCHES[one][0], "quality", "bleu") for one in ("12-1", "6-1", "teacher")],
    ),
    (
        "docs/translation.md",
        rf"`glat` is {N}, {N}, {N} and {N} times as fast as the teacher and `nat` {N}, {N}, {N} and {N} times\. "
        rf"`ctc`, .*, is {N}, {N}, {N} and {N} times as fast",
        [speed(run) for one in ("glat", "nat", "ctc") for run in IN_BATCHES[one]],
    ),
    (
        "docs/translation.md",
        rf"6-1 layers translate {N}, {N}, {N} and {N} sentences a second at these batch sizes, "
        rf"12-1 layers {N}, {N}, {N} and {N}, the teacher {N}, {N}, {N} and {N}, all",
        [of(run, "prompts_per_s") for one in ("6-1", "12-1", "teacher") for run in IN_BATCHES[one]],
    ),
    (
        "docs/translation.md",
        rf"the model has {N} BLEU on test2016, half a point above the teacher, and writes {N} tokens per step\. "
        rf"It is {N} times as fast as its own plain decoding",
        [of(MASKS, "quality", "bleu"), of(MASKS, "tokens_per_step"), speed(MASKS)],
    ),
    (
        "docs/translation.md",
        rf"an hour of one core, it has {N} BLEU on test2016, .*, and is {N} times as fast as that \(float32\)\. "
        rf".* {N} ms, where the teacher decodes plainly in {N} and has {N} BLEU\.",
        [
            *(of(DIFFUSION, "quality", "bleu"), speed(DIFFUSION), of(DIFFUSION, "ms_per_prompt")),
            *(of(SEED_2, "baseline", "ms_per_prompt"), of(SEED_2, "baseline", "quality", "bleu")),
        ],
    ),
    (
        "docs/early_exit.md",
        rf"`specee` runs {N} % of the layers and asks {N} output matrices a token, but is {N} times as fast .*? "
        rf"{N} to the .*? takes {N} % of the time",
        [
            of(SPECEE, "layers_per_token", share=True),
            of(SPECEE, "method_facts", "heads_per_token"),
            speed(SPECEE),
            of(SPECEE, "ranking", "text_loss", missing=True),
            of(SPECEE, "method_facts", "confidence_share", share=True),
        ],
    ),
    (
        "docs/early_exit.md",
        rf"runs {N} % of its layers at no loss to its whole self, .* take it to {N} times the speed",
        [of(HASHED, "layers_per_token", share=True), speed(HASHED)],
    ),
    (
        "docs/translation.md",
        rf"without glancing: {N} BLEU where that has {N}\. .* as it is \({N} and {N} BLEU\)\. "
        rf".* instead of `glat` has {N} BLEU",
        [of(run, "quality", "bleu") for run in CONTROLS],
    ),
    (
        "docs/translation.md",
        rf"the teacher's translations: {N} and {N} BLEU \(float32\), where `nat` and `ctc` have {N} and {N}\.",
        [of(run, "quality", "bleu") for run in ("98b58e40864e", "1a548acc1acf", "c8823af67deb", "c306bcebfb8f")],
    ),
    (
        "docs/translation.md",
        rf"the spread: `nat` has {N} and {N} BLEU, `glat` {N} and {N}, `ctc` {N} and {N} \(float32\)",
        [of(run, "quality", "bleu") for run in SEEDS],
    ),
    (
        "docs/chat.md",
        rf"`hybrid` writes {N} tokens per step at temperature 0, {N} at 0\.7 and {N} at 1\.",
        [of(run, "tokens_per_step") for run in ("469578fac658", "196892c08302", "aa7326dce728")],
    ),
    (
        "docs/chat.md",
        rf"`staged` keeps {N}, {N} and {N} .*, {N}x at 1 where `hybrid` has {N}x, and `cascade` {N}x \(all",
        [
            *(of(run, "tokens_per_step") for run in ("31574cb0d1f0", "834c243b949a", "d15d27b652c7")),
            *map(speed, ("d15d27b652c7", "a60dd3537c47", "2b2c2673a1f4")),
        ],
    ),
    (
        "docs/chat.md",
        rf"In bfloat16 `cascade` has {N}x \[{N}, {N}\] there with {N} tokens per step: .*, a pass over 16 tokens "
        rf"takes {N} times as long as a plain one \(float32: {N}\)",
        [
            speed("79ed7468db5d"),
            *(of("79ed7468db5d", "speedup", "headline", end) for end in ("low", "high")),
            of("79ed7468db5d", "tokens_per_step"),
            *(passes_watched(run, 16) for run in ("79ed7468db5d", "404714bddfe1")),
        ],
    ),
    (
        "docs/chat.md",
        rf"`cascade` has {N}x \[{N}, {N}\] and identical texts, {N}x on novel text: {N}x on translations, "
        rf"{N}x on mathematics, {N}x on MT-bench's questions and {N}x on trivia, but {N}x on summaries and "
        rf"{N}x on questions about articles, whose prompts take most of the time\. "
        rf"Decoding alone is {N} times as fast\.",
        [
            speed("af430bb7c5de"),
            *(of("af430bb7c5de", "speedup", "headline", end) for end in ("low", "high")),
            of("af430bb7c5de", "speedup", "novel", "value"),
            *(
                of("af430bb7c5de", "speedup", "by_category", kind, "value")
                for kind in ("translation", "math_reasoning", "mt_bench", "qa", "summarization", "rag")
            ),
            of("af430bb7c5de", "speedup", "decode"),
        ],
    ),
    (
        "docs/chat.md",
        rf"the block writes {N} tokens per step instead of {N} at 0\.7, and {N} instead of {N} at 1\. "
        rf"With a drawn chain of `eagle` it is {N} instead of {N} and {N} instead of {N}:",
        [of(run, "tokens_per_step") for run in DRAWN],
    ),
    (
        "docs/chat.md",
        rf"{N} s of {N} with 8,064 tokens",
        [
            of("bddc087db992", "ttft_s", "mean"),
            lambda: of("bddc087db992", "ms_per_prompt")() / 1000,
        ],
    ),
    (
        "docs/chat.md",
        rf"decode {N} \(`suffix`\) and {N} times as fast",
        [of(run, "speedup", "decode") for run in ("56b0fe386b4c", "3dfee09c10b0")],
    ),
    ("docs/chat.md", rf"`suffix` decodes {N} times as fast as plain decoding does with one", [speed("e985f8142aef")]),
    ("docs/chat.md", rf"{N} % of the answers to GSM8K", [of("81995d5465e4", "quality", "exact_match_flexible")]),
    ("docs/translation.md", rf"lose {N} to {N} BLEU", [lost_in_one_pass(min), lost_in_one_pass(max)]),
    ("docs/translation.md", rf"width 128: {N} BLEU with a beam of 5", [published(41.02)]),
    (
        "docs/translation.md",
        rf"On validation it has {N} BLEU, {N} with five beams \(cased, detokenised\), and {N} on pairs",
        [
            card(TEACHER, name, share=False)
            for name in ("validation_bleu_greedy", "validation_bleu_beam5", "train_bleu_greedy")
        ],
    ),
]  # fmt: skip
FIGURE = re.compile(r"\b\d+\.\d+(?:x\b| times\b| BLEU\b| tokens (?:per|a) step\b)")


def prose(page: Path) -> str:
    """The text of a page without generated blocks, in one line."""
    return re.sub(r"\s+", " ", readme.BLOCK.sub("", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("page", "pattern", "sources"), CLAIMS, ids=[f"{page}: {text[:60]}" for page, text, _ in CLAIMS]
)
def test_a_number_is_that_of_a_record(page: str, pattern: str, sources: list[Source]) -> None:
    found = re.findall(pattern, prose(ROOT / page))
    assert len(found) == 1, "the sentence has changed: change its pattern too"
    written = [found[0]] if isinstance(found[0], str) else list(found[0])
    assert len(written) == len(sources)
    for text, source in zip(written, sources, strict=True):
        decimals = len(text.partition(".")[2])
        assert abs(source() - float(text)) <= 0.5 * 10**-decimals + 1e-9, (text, source())


@pytest.mark.parametrize("page", readme.pages(ROOT), ids=lambda page: page.name)
def test_every_figure_is_a_claim(page: Path) -> None:
    text, name = prose(page), page.relative_to(ROOT).as_posix()
    known = [match.span() for of_page, pattern, _ in CLAIMS if of_page == name for match in re.finditer(pattern, text)]
    for found in FIGURE.finditer(text):
        assert any(start <= found.start() < end for start, end in known), f"no record for {found[0]} in {name}"
