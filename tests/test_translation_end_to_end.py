"""The encoder-decoder track from the command line: every method on it, its laboratory, its sweep, and bad input."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bench import cli, errors
from bench.config.schema import PathsConfig
from bench.errors import UserError
from bench.lossless import command as lossless
from bench.lossless.sampling import root_distributions
from bench.measure import run
from bench.models import artifacts, loading
from bench.records import run_folder
from bench.report import compare, terminal
from bench.sweep import plan as sweep
from bench.train import command
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.speculative_sampling import SpeculativeSampling
from tests.bench.tasks.test_seq2seq_tasks import write
from tests.engine.test_seq2seq_lm import EOS, START, begun, full, ids, tiny
from tests.helpers.tiny_translation import MACHINE, make_model, write_data

DRAFTED = ("method=speculative_sampling", "method.draft_model=multi30k_6_1")
FP32 = {"device": "cpu", "dtype": "float32", "threads": 1, "linear": "plain"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder, the teacher and a deep-shallow draft of its vocabulary, as their commands leave them."""
    root = tmp_path_factory.mktemp("track")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODEBENCH_DATA", str(write_data(root / "data")))
        patch.setattr(artifacts, "project_data", lambda: root / "none")
        for layers in ((4, 4), (6, 1)):
            make_model(layers, root / "cache", "train.recipe.dropout=0.0", steps=25)
        yield root


@pytest.fixture
def common(world: Path, tmp_path: Path) -> list[str]:
    return [*MACHINE, f"paths.cache={world / 'cache'}", f"paths.results={tmp_path / 'results'}"]


def track(*words: str) -> list[str]:
    return ["model=multi30k_4_4", "dataset=multi30k", "dataset.limit=4", "max_new_tokens=16", "measure=quick", *words]


@pytest.fixture
def bench(common: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def called(*words: str, main: Any = cli.main) -> tuple[int, str, str]:
        code = main([*words, *common])
        said = capsys.readouterr()
        return code, said.out, said.err

    return called


def only(results: Path) -> Path:
    (folder,) = [path.parent for path in results.glob(f"*/{run_folder.MANIFEST}")]
    return folder


# ------------------------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        (["method=speculative_sampling", "method.draft_model=multi30k_6_1"], 1),
        (["method=lookahead"], 4),
        (["method=suffix"], 4),
    ],
)
def test_exact_methods_write_the_teachers_text(words: list[str], batch: int, bench: Any, tmp_path: Path) -> None:
    """Those that ``test_seq2seq_tasks.py`` does not run; VALID or not depends on this machine's load."""
    code, out, _ = bench(*track(*words, f"batch_size={batch}"))
    assert code in (errors.OK, errors.INVALID)
    summary = json.loads((only(tmp_path / "results") / run_folder.SUMMARY).read_text())
    assert (summary["guarantee"], summary["agreement"]["exact"]) == ("EXACT", 1.0)
    assert summary["agreement"]["identical_to_baseline"] == 1.0
    assert summary["quality"] == summary["baseline"]["quality"]
    assert "tok:13a" in summary["quality_notes"]["bleu"] and "case:mixed" in summary["quality_notes"]["bleu"]


def test_a_diffusion_model_is_trained_found_and_measured(bench: Any, world: Path, tmp_path: Path) -> None:
    """By its name and by its folder; without the method that fills in masks it is refused."""
    recipe = {"steps": 2, "tokens": 600, "warmup": 1, "evaluations": 1, "average": 1}
    shape = {"layers": 1, "width": 32, "inner": 16, "heads": 2, "block": 4, "vocabulary": 300, "positions": 96}
    words = [f"train.{key}={value}" for key, value in shape.items()]
    words += [f"train.recipe.{key}={value}" for key, value in recipe.items()]
    code, _, said = bench("method=masked_diffusion", "model=multi30k_4_4", *words, main=_train)
    assert code == 0, said
    name = "multi30k_masked_diffusion_distilled"
    folder = world / "cache" / "trained" / f"masked_diffusion-{name}"
    for model in ([f"model={name}"], ["model=hf", f"model.name={folder}"]):
        code, out, said = bench(*track("method=diffusion", *model)[1:])
        assert code in (errors.OK, errors.INVALID), said
        assert "BLEU" in out
        code, _, said = bench(*track("method=prompt_lookup", *model)[1:])
        assert code == 2 and "needs a model that writes from left to right" in said
    assert len([*(tmp_path / "results").glob(f"*/{run_folder.MANIFEST}")]) == 2


def test_the_table_of_a_translation(bench: Any, tmp_path: Path) -> None:
    _, out, _ = bench(*track("method=autoregressive", "batch_size=4"))
    summary = json.loads((only(tmp_path / "results") / run_folder.SUMMARY).read_text())
    assert {"bleu", "chrf", "length_ratio", "repetition"} == set(summary["quality"])
    samples = [
        s for s in run_folder.read_samples(only(tmp_path / "results")) if s.phase == "measure" and s.arm == "method"
    ]
    seconds = samples[0].batch_ns / 1e9  # four rows of one batch
    assert len(samples) == 4 and summary["prompts_per_s"] == pytest.approx(4 / seconds)
    assert summary["ms_per_prompt"] == pytest.approx(1000 * seconds / 4)
    assert re.search(rf"sacreBLEU +{re.escape(summary['quality_notes']['bleu'])}", out)
    assert "sentences/s" in out and "ms per sentence" in out
    change = summary["quality_change"]["bleu"]
    assert (change["value"], change["low"], change["n"]) == (0.0, None, 4) and "change" not in out
    board = terminal.leaderboard([summary])
    assert "BLEU" in board.splitlines()[2] and "sentences/s" in board.splitlines()[2]


def test_the_change_of_bleu_has_an_interval(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run against its baseline, and between two runs."""
    monkeypatch.setenv("DECODEBENCH_DATA", str(write_data(tmp_path / "data")))
    for language in ("en", "de"):
        file = tmp_path / "data" / "multi30k" / f"test_2016_flickr.{language}"
        file.write_text(file.read_text() * 4)
    more = ("dataset.limit=24", "batch_size=24", "max_new_tokens=6")
    for method in ("autoregressive", "prompt_lookup"):
        _, out, _ = bench(*track(f"method={method}", *more))
        assert re.search(r"bleu \d+\.\d\d \(was \d+\.\d\d, change \+0\.00, 95 % \+0\.00 to \+0\.00\)", out)
    a, b = (str(path.parent) for path in (tmp_path / "results").glob(f"*/{run_folder.MANIFEST}"))
    assert cli.main(["compare", a, b]) == 0
    said = "bleu of B against A: +0.00, 95 % +0.00 to +0.00 (paired bootstrap, 24 segments)"
    assert said in capsys.readouterr().out
    monkeypatch.setattr(compare, "quality_change", Mock(side_effect=UserError("There is no such file.")))
    assert cli.main(["compare", a, b]) == 0
    assert "BLEU is compared without an interval: There is no such file." in capsys.readouterr().out


def test_a_datastore_of_pairs_drafts_and_is_made_by_the_command(bench: Any, common: list[str], tmp_path: Path) -> None:
    data = Path(os.environ["DECODEBENCH_DATA"])  # what the method learns from otherwise: requests to a chat model
    write(data, "dolly/dolly_3k.json", json.dumps([{"instruction": "Say a.", "input": "", "output": "a"}]))
    write(data, "gsm8k/train.jsonl", {"question": "1 + 1?", "answer": "It is 2\n#### 2"})
    write(data, "wikitext2/valid.txt", "A line of text.\n")
    code, _, err = bench("method=rest", "model=multi30k_4_4", main=_train)
    assert code == errors.BAD_INPUT and "needs a corpus that it can read, got the default" in err
    assert "corpus=multi30k" in err
    assert bench("method=rest", "model=multi30k_4_4", "corpus=multi30k", main=_train)[0] == 0
    code, _, _ = bench(*track("method=rest"))
    summary = json.loads((only(tmp_path / "results") / run_folder.SUMMARY).read_text())
    assert (
        code in (errors.OK, errors.INVALID) and summary["agreement"]["exact"] == 1.0 and summary["tokens_per_step"] > 1
    )


def _train(words: list[str]) -> int:
    return command.main([word for word in words if not word.startswith("paths.results")])


def test_blocks_of_a_fine_tuned_model_are_held_to_both_models(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"steps": 6, "tokens": 600, "learning_rate": 0.05, "warmup": 1, "evaluations": 1, "precision": "float32"}
    words = [f"train.recipe.{key}={value}" for key, value in recipe.items()]
    code, out, err = bench("method=blockwise_translation", "model=multi30k_4_4", "train.k=3", *words, main=_train)
    assert code == 0, err
    assert "method=blockwise_translation" in out
    code, out, err = bench(*track("method=blockwise_translation", "method.k=3", "batch_size=2"))
    assert code in (errors.OK, errors.INVALID), err
    summary = json.loads((only(tmp_path / "results") / run_folder.SUMMARY).read_text())
    assert summary["guarantee"] == "RELAXED" and summary["agreement"]["exact"] < 1.0
    assert summary["agreement"]["verifier"]["exact"] == 1.0 and "100.0 % identical to its own model" in out
    assert summary["quality"] != summary["baseline"]["quality"]

    monkeypatch.setattr(run.agreement, "check_own", lambda *a, **k: {"exact": 0.5, "violation": 0.5, "n_violations": 8})
    code, out, _ = bench(*track("method=blockwise_translation", "method.k=3", "dataset.limit=3"))
    assert code == errors.INVALID and "8 (50.00%) tokens of the method are not those of its own model" in " ".join(
        out.split()
    )


# ---------------------------------------------------------------------------------------------------------- laboratory


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=greedy", "method=token_recycling", "max_new_tokens=8"],
        ["experiment=sampling", *DRAFTED, "draws=6000", "temperatures=[0.7]"],
        ["experiment=joint", *DRAFTED, "draws=100", "batch_size=50", "temperatures=[1.0]"],
    ],
)
def test_the_laboratory_runs_on_translators(words: list[str], bench: Any) -> None:
    code, out, err = bench(*words, "model=multi30k_4_4", "horizon=2", main=lossless.main)
    assert code == 0, out + err
    assert "RESULT: as promised" in out and ("A man in a green coat" in out or "caught" in out)


def test_a_round_of_the_laboratory_is_one_of_the_decoders() -> None:
    """p and q are those of transformers behind the source and the first token of the translation."""
    model, small = tiny("marian"), tiny("marian", decoder_layers=1)
    target, draft = (Seq2SeqLM.from_hf(each, keep_hf=True) for each in (model, small))
    (source,) = ids(7)
    first = int(full(model, source, begun(target))[-1].argmax())
    sampling = Sampling(0.8)
    decoder = SpeculativeSampling(target, sampling, draft_model=draft)
    p, q, tokens = root_distributions(decoder, source.tolist(), sampling, 0)
    text = begun(target, first)
    torch.testing.assert_close(p, sampling.probs(full(model, source, text)[-1]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(q, sampling.probs(full(small, source, text)[-1]), rtol=1e-4, atol=1e-6)
    assert tokens is not None and len(tokens) == 1
    assert root_distributions(PromptLookup(target, sampling), source.tolist(), sampling, 0)[1] is None


# --------------------------------------------------------------------------------------------------------------- sweep


def test_the_sweep_of_the_track_is_planned_and_says_what_is_missing(common: list[str]) -> None:
    options, words = sweep.read_words(["sweep=translation", *common])
    plan = sweep.make(words, options)
    assert {job.cfg.batch_size for job in plan.jobs} == {1, 4, 8, 16, 32, 128}
    reasons = {(job.cfg.method["name"], job.cfg.model["name"]): job.reason for job in plan.jobs}
    assert "multi30k_12_1' is not made yet" in reasons["hf_beam", "multi30k_12_1"]
    assert "python -m bench train method=specdec" in reasons["specdec", "multi30k_4_4"]
    ready = {pair for pair, reason in reasons.items() if not reason}
    for method in ("autoregressive", "hf_beam", "prompt_lookup", "suffix", "token_recycling", "lookahead"):
        assert {(method, "multi30k_4_4"), (method, "multi30k_6_1")} <= ready
    assert plan.text(every=True).startswith("Plan: 342 jobs: ")
    words = ["method=speculative_sampling,bild", "method.draft_model=multi30k_6_1", "dataset=multi30k"]
    plan = sweep.make([*words, "model=multi30k_4_4,multi30k_6_1", *common], options)
    reasons = {(job.cfg.method["name"], job.cfg.model["name"]): job.reason for job in plan.jobs}
    assert reasons["speculative_sampling", "multi30k_4_4"] == reasons["bild", "multi30k_4_4"] == ""
    assert "must differ from the target" in reasons["speculative_sampling", "multi30k_6_1"]


# ----------------------------------------------------------------------------------------------------------- bad input


def lines(folder: Path, *turns: str) -> Path:
    rows = [{"question_id": n, "category": "own", "turns": [turn]} for n, turn in enumerate(turns, start=1)]
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["model=multi30k_4_4", "dataset=multi30k_de_en"],
            "dataset=multi30k_de_en goes from de to en, and multi30k_4_4 was trained to go from en to de",
        ),
        (
            ["model=multi30k_4_4", "dataset=multi30k", "dataset.source=de", "dataset.target=en"],
            "goes from de to en, and multi30k_4_4 was trained to go from en to de",
        ),
        (["model=multi30k_4_4", "dataset=jsonl", "dataset.path=EMPTY"], "line 2"),
        (["model=multi30k_4_4", "dataset=jsonl", "dataset.path=LONG"], "tokens; the encoder of this model has a"),
        (
            ["model=multi30k_4_4", "dataset=multi30k", "method=speculative_sampling"] + ["method.draft_model=FOREIGN"],
            "read different tokens: id ",
        ),
        (
            ["model=multi30k_4_4", "dataset=multi30k", "method=speculative_sampling"]
            + ["method.draft_model=multi30k_12_1"],
            "'multi30k_12_1' is not made yet",
        ),
    ],
)
def test_bad_input_gets_one_message(words: list[str], said: str, bench: Any, foreign: Path, tmp_path: Path) -> None:
    places = {
        "EMPTY": lambda: lines(tmp_path, "A dog.", "  "),
        "LONG": lambda: lines(tmp_path, "A dog sees a tree. " * 40),
        "FOREIGN": lambda: foreign,
    }
    for name, place in places.items():
        words = [word.replace(name, str(place())) if name in word else word for word in words]
    code, _, err = bench("max_new_tokens=8", *words)
    assert code == errors.BAD_INPUT
    last = err.strip().splitlines()[-1]
    assert said in last and "Traceback" not in err and last.endswith(".")


@pytest.mark.parametrize("method", ["teacher", "rest"])
def test_a_corpus_of_the_other_direction_is_refused(method: str, bench: Any) -> None:
    distilled = ["train.data=distilled"] if method == "teacher" else []
    code, _, err = bench(f"method={method}", "model=multi30k_4_4", "corpus=multi30k_de_en", *distilled, main=_train)
    assert code == errors.BAD_INPUT and "corpus=multi30k_de_en goes from de to en" in err


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Marian whose tokens are bytes, and whose tokenizer says what it translates."""
    from bench.models.random_weights import byte_tokenizer

    folder = tmp_path_factory.mktemp("foreign") / "model"
    tiny("marian", torch.float32, vocab_size=260, eos_token_id=EOS, decoder_start_token_id=START).save_pretrained(
        folder
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("pair", "known"), [(("de", "en"), ("de", "en")), (("eng", "deu"), None), ((None, "en"), None)]
)
def test_what_a_marian_tokenizer_says_of_its_languages(pair: Any, known: Any, foreign: Path) -> None:
    from bench.models.hub import HubModel

    tokenizer = type("Tokenizer", (), dict(zip(("source_lang", "target_lang"), pair, strict=True)))()
    assert HubModel(str(foreign)).languages(tokenizer) == known


def test_the_card_tells_the_languages_of_a_model_of_ours(world: Path) -> None:
    folder = world / "cache" / "trained" / "teacher-multi30k_4_4"
    loaded = loading.load({"name": str(folder)}, FP32, PathsConfig(cache=str(world / "cache")))
    assert loaded.languages == ("en", "de")
