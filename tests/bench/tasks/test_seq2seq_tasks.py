"""The data of the encoder-decoder track: pairs, articles, their scores, and a run from configuration to verdict."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config import compose as preflight
from bench.config import instantiate
from bench.config.schema import PathsConfig
from bench.errors import UserError
from bench.measure import run
from bench.models import loading
from bench.models.random_weights import byte_tokenizer
from bench.records import run_folder
from bench.scoring import SegmentScorer
from bench.tasks import CnnDailyMailArticles, HubPairs, Multi30k, XSumArticles, prompts, sources
from bench.tasks.seq2seq import first_words, read_multi30k
from bench.tasks.sources import KNOWN, DataSet, Hub, Sources
from methods.engine.seq2seq_lm import Seq2SeqLM

FP32 = {"device": "cpu", "dtype": "float32", "threads": 1, "linear": "plain"}


def write(root: Path, file: str, *rows: Any) -> Path:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def own(tmp_path: Path) -> Sources:
    """A data folder with a few rows of our own in the public form."""
    write(tmp_path, "multi30k/test_2016_flickr.en", "A dog.", "", "Two  men.")
    write(tmp_path, "multi30k/test_2016_flickr.de", "Ein Hund.", "", "Zwei Männer.")
    write(tmp_path, "wmt--wmt16/ro-en/test.jsonl", {"translation": {"ro": "Un câine.", "en": "A dog."}})
    write(tmp_path, "me--flat/default/dev.jsonl", {"fr": "Un chien.", "en": "A dog."}, {"fr": " ", "en": "Nothing."})
    write(tmp_path, "cnn_dailymail/test.jsonl", {"id": "a1", "article": "One two\n three four.", "highlights": "One."})
    return Sources(tmp_path, tmp_path / "cache")


# ----------------------------------------------------------------------------------------------------------- data


def test_multi30k_is_the_public_one(data_root: Path, tmp_path: Path) -> None:
    task = Multi30k()
    found = task.load(Sources(data_root, tmp_path))
    assert len(found) == 1000 and task.revision["warnings"] == []
    assert found[0].turns == ("A man in an orange hat starring at something.",)
    assert found[0].reference == ("Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",)
    assert [file["sha256"] for file in task.revision["files"]] == [
        KNOWN["multi30k_test_en"].sha256,
        KNOWN["multi30k_test_de"].sha256,
    ]
    assert len(Multi30k(split="val").load(Sources(data_root, tmp_path))) == 1014
    assert len(read_multi30k(Sources(data_root, tmp_path), "train", "en", "de")[0]) == 29_000


def test_pairs_keep_their_line_and_blank_ones_are_left_out(own: Sources) -> None:
    english = Multi30k(source="de", target="en", prefix="to English: ").load(own)
    assert [(e.id, e.turns[0], e.reference[0]) for e in english if e.reference] == [
        ("multi30k-test-0", "to English: Ein Hund.", "A dog."),
        ("multi30k-test-2", "to English: Zwei Männer.", "Two  men."),
    ]


def test_halves_that_do_not_fit_are_refused(own: Sources, tmp_path: Path) -> None:
    write(tmp_path, "multi30k/test_2016_flickr.de", "Ein Hund.")
    with pytest.raises(UserError, match=r"en has 3 lines and .*de 1; line by line"):
        Multi30k().load(own)


def test_pairs_of_the_hub_by_id(own: Sources) -> None:
    nested = HubPairs("en", "ro", repo="wmt/wmt16", config="ro-en").load(own)
    assert (nested[0].turns, nested[0].reference) == (("A dog.",), ("Un câine.",))
    flat = HubPairs("fr", "en", repo="me/flat", split="dev").load(own)
    assert [(e.turns, e.reference) for e in flat] == [(("Un chien.",), ("A dog.",))]


def test_a_language_the_rows_do_not_have_is_named(own: Sources) -> None:
    with pytest.raises(UserError, match=r"wmt/wmt16 ro-en test has no language 'de'; its rows have ro, en"):
        HubPairs("en", "de", repo="wmt/wmt16", config="ro-en").load(own)
    with pytest.raises(UserError, match="must differ, got 'en' for both"):
        Multi30k(source="en", target="en")


def test_a_set_that_is_nowhere_says_where_it_was_looked_for(own: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(known: DataSet) -> Any:
        raise sources.Unavailable("no network")

    monkeypatch.setattr(sources, "_from_hub", down)
    with pytest.raises(UserError, match=r"no a--b/default/test.jsonl .*a/b test: no network.*With a network try again"):
        HubPairs("en", "de", repo="a/b").load(own)


def test_plain_files_come_from_a_column_of_the_hub_or_packed_from_the_web(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"en": "A dog.", "de": "Ein Hund."}, {"en": "", "de": ""}]
    monkeypatch.setattr(sources, "_hub_rows", lambda hub: (rows, "c0ffee"))
    known = DataSet("a/b.de", hub=Hub("a/b", "test", column="de"))
    table = Sources(cache=tmp_path).read("ab", known)
    assert table.rows == [{"text": "Ein Hund."}, {"text": ""}]
    assert (tmp_path / "datasets/a/b.de").read_text() == "Ein Hund.\n\n"
    page = tmp_path / "page.gz"
    page.write_bytes(gzip.compress("Zwei Männer.\n".encode()))
    web = Sources(cache=tmp_path / "other").read("ab", DataSet("a/b.de", web=page.as_uri()))
    assert web.rows == [{"text": "Zwei Männer."}]


def test_articles_are_cut_to_their_first_words(own: Sources, data_root: Path, tmp_path: Path) -> None:
    (whole,), (cut,) = CnnDailyMailArticles().load(own), CnnDailyMailArticles("summarize: ", 3).load(own)
    assert whole.turns == ("One two\n three four.",)
    assert cut.turns == ("summarize: One two\n three",) and cut.reference == ("One.",)
    assert first_words(" a  b", 1) == " a" and first_words("a b", 5) == "a b"
    found = XSumArticles(max_words=50).load(Sources(data_root, tmp_path))
    assert len(found) == 999 and max(len(e.turns[0].split()) for e in found) == 50
    with pytest.raises(UserError, match="max_words must be at least 1, or null for all, got 0"):
        XSumArticles(max_words=0)


# --------------------------------------------------------------------------------------------------------- scores


def test_signs_of_damage() -> None:
    """By hand: tokenised for BLEU a full stop is a word."""
    scorer = SegmentScorer("de")
    found = scorer.score("Ein Hund läuft über Gras.", "Ein Ein Hund läuft .")
    assert found["length_ratio"] == pytest.approx(100 * 5 / 6)
    assert found["repetition"] == pytest.approx(100 * 1 / 5)
    corpus = scorer.aggregate([("Ein Hund.", "Ein Hund Hund."), ("Zwei Männer stehen.", "")])
    assert corpus["length_ratio"] == pytest.approx(100 * 4 / 7)
    assert corpus["repetition"] == pytest.approx(100 * 1 / 4)
    assert scorer.score("Ein Hund.", "")["repetition"] == 0.0
    assert set(scorer.aggregate([]).values()) == {None}


def test_bleu_is_cased_detokenised_and_signed() -> None:
    scorer = SegmentScorer("de")
    pairs = [("Ein Hund läuft über das Gras.", "Ein Hund läuft über das Gras."), ("Zwei Männer.", "Zwei Frauen.")]
    import sacrebleu

    wanted = sacrebleu.corpus_bleu([hyp for _, hyp in pairs], [[ref for ref, _ in pairs]])
    assert scorer.aggregate(pairs)["bleu"] == pytest.approx(wanted.score)
    lower = [(ref, hyp.lower()) for ref, hyp in pairs]
    assert (scorer.aggregate(lower)["bleu"] or 0) < wanted.score
    assert "case:mixed" in scorer.notes()["bleu"] and "tok:13a" in scorer.notes()["bleu"]
    assert "tok:zh" in SegmentScorer("zh").notes()["bleu"]
    assert set(scorer.notes()) == set(scorer.metrics)


def test_a_reference_gets_full_marks(data_root: Path, tmp_path: Path) -> None:
    task = Multi30k(limit=20)
    examples = task.load(Sources(data_root, tmp_path))
    found = task.aggregate([(e, 0, e.reference[0]) for e in examples if e.reference])
    assert (found["bleu"], found["chrf"], found["length_ratio"]) == pytest.approx((100, 100, 100))


# ---------------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module", params=["marian", "t5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder-decoder with a byte tokenizer, as a user would have it on disk."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    from tests.engine.test_seq2seq_lm import VARIANTS

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    family, shape = VARIANTS[request.param]
    special = {"pad_token_id": 258, "eos_token_id": 257, "decoder_start_token_id": 258, "bos_token_id": 256}
    bound = {"max_position_embeddings": 160} if family == "marian" else {"n_positions": 80}
    config = AutoConfig.for_model(family, vocab_size=260, **{**shape, **special, **bound})
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "positions" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    where = tmp_path_factory.mktemp(family) / "model"
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


def test_a_folder_loads_as_what_it_is(folder: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    loaded = loading.load({"name": str(folder)}, FP32, PathsConfig(), keep_hf=True)
    assert isinstance(loaded.lm, Seq2SeqLM) and loaded.lm.max_positions == 160
    assert loaded.lm.eos_ids == (257,) and loaded.lm.start == (258,)
    original = AutoModelForSeq2SeqLM.from_pretrained(folder)
    source = prompts.encode(loaded.tokenizer, [{"role": "user", "content": "A dog."}])
    with torch.no_grad():
        wanted = original(torch.tensor([source]), decoder_input_ids=torch.tensor([[258, 70, 71]])).logits[0]
    found = loaded.lm.score(torch.tensor([*source, 70, 71]), start=len(source) - 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def compose(folder: Path, results: Path, *words: str) -> Any:
    machine = ["hardware=cpu_fp32", "hardware.threads=1"]
    common = ["model=hf", f"model.name={folder}", *machine, "max_new_tokens=8", "measure=quick"]
    return preflight.compose([*common, f"paths.results={results}", *words])


@pytest.mark.parametrize(
    ("method", "exact"),
    [
        ("prompt_lookup", True),
        ("token_recycling", True),
        ("speculative_sampling method.skip_attention=[1] method.skip_mlp=[1]", True),
        ("hf_beam method.num_beams=3", False),
    ],
)
def test_a_run_from_configuration_to_verdict(
    folder: Path, method: str, exact: bool, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODEBENCH_DATA", str(data_root))
    name, *options = f"method={method}".split()
    cfg = compose(folder, tmp_path, name, *options, "dataset=multi30k", "dataset.limit=4", "batch_size=2")
    outcome = run.run(cfg)
    samples = [s for s in run_folder.read_samples(outcome.path) if s.phase == "measure"]
    assert len(samples) == 8
    assert set(outcome.summary["quality"]) == {"bleu", "chrf", "length_ratio", "repetition"}
    if exact:
        assert outcome.summary["agreement"]["n_violations"] == 0
        by_arm = {arm: [s.output_ids for s in samples if s.arm == arm] for arm in ("method", "baseline")}
        assert sorted(by_arm["method"]) == sorted(by_arm["baseline"])


def test_a_source_that_is_too_long_is_refused_before_anything_is_measured(
    folder: Path, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODEBENCH_DATA", str(data_root))
    with pytest.raises(UserError, match=r"Prompt .*/1 has \d+ tokens; the encoder .* context of 160.*max_words"):
        run.run(compose(folder, tmp_path, "method=prompt_lookup", "dataset=xsum_articles", "dataset.limit=1"))


def test_pairs_are_built_from_the_command_line() -> None:
    cfg = preflight.compose(["dataset=hub_pairs", "dataset.repo=a/b", "dataset.source=en", "dataset.target=de"])
    task = instantiate.build_task(cfg.dataset, cfg.paths)
    assert isinstance(task, HubPairs) and (task.kind, str(task.hub)) == ("seq2seq", "a/b test")


def test_source_and_answer_each_have_the_whole_context(folder: Path, tmp_path: Path) -> None:
    lines = write(tmp_path, "own.jsonl", {"question_id": 1, "category": "own", "turns": ["x" * 155]})
    cfg = compose(folder, tmp_path, "method=prompt_lookup", "dataset=jsonl", f"dataset.path={lines}")
    assert run.prepare(replace(cfg, max_new_tokens=160)).shared.settings.apart
    with pytest.raises(
        UserError, match="max_new_tokens must be at most 160, the context of.*got 161.*Set max_new_tokens=160"
    ):
        run.prepare(replace(cfg, max_new_tokens=161))


@pytest.mark.parametrize(
    ("dataset", "model", "said"),
    [
        ("demo", "hf", "dataset=demo needs a causal model, and .*model is an encoder-decoder"),
        ("multi30k", "random", "dataset=multi30k needs an encoder-decoder.*and random is a causal model"),
    ],
)
def test_a_data_set_for_the_other_kind_of_model_is_refused(
    dataset: str, model: str, said: str, folder: Path, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODEBENCH_DATA", str(data_root))
    words = ["model=random"] if model == "random" else ["model=hf", f"model.name={folder}"]
    cfg = preflight.compose(["method=prompt_lookup", *words, f"dataset={dataset}", "hardware=cpu_fp32"])
    with pytest.raises(UserError, match=said):
        run.prepare(replace(cfg, paths=PathsConfig(str(tmp_path), cfg.paths.data, str(tmp_path))))
