"""Translation models of our own: vocabulary, training, averaging, interruption, distillation, and loading by name."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PegasusForConditionalGeneration

from bench.config import compose
from bench.config.schema import PathsConfig
from bench.contract import checks
from bench.errors import UserError
from bench.models import artifacts, loading
from bench.tasks import corpus, prompts
from bench.tasks.sources import Sources
from bench.train import command as train
from methods.autoregressive import Autoregressive
from methods.base_models import bpe
from methods.base_models.hash_teacher import HashTeacherTraining
from methods.base_models.masked_diffusion import MaskedDiffusionTraining
from methods.base_models.self_diffusion import SelfDiffusionTeacherTraining
from methods.base_models.translation import ExitTeacherTraining, Judge, TeacherTraining, memory_of
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.external.transformers_beam import HFBeam
from methods.training import distillation, trainer
from methods.training.distillation import translations
from methods.training.interface import TrainingContext
from methods.training.translation import TranslationConfig, batches
from tests.helpers.interruptions import interrupted_at

WORDS = {
    "a": "ein",
    "dog": "Hund",
    "man": "Mann",
    "child": "Junge",
    "sees": "sieht",
    "likes": "mag",
    "red": "roten",
    "small": "kleinen",
    "ball": "Ball",
    "tree": "Baum",
}


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """A grammar of one sentence: who, what, and one or two adjectives of which."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        said = ["a", rng.choice(["dog", "man", "child"]), rng.choice(["sees", "likes"]), "a"]
        said += rng.sample(["red", "small"], rng.choice([0, 1, 2])) + [rng.choice(["ball", "tree", "dog"])]
        rows.append((" ".join(said).capitalize() + ".", " ".join(WORDS[word] for word in said).capitalize() + "."))
    return rows


PAIRS = sentences(200)
MAKERS: dict[str, Any] = {
    "teacher": TeacherTraining,
    "exit_teacher": ExitTeacherTraining,
    "self_diffusion_teacher": SelfDiffusionTeacherTraining,
    "hash_teacher": HashTeacherTraining,
    "masked_diffusion": MaskedDiffusionTraining,
}
SMALL: dict[str, Any] = {"layers": (1, 1), "width": 32, "inner": 64, "heads": 2, "vocabulary": 300, "positions": 40}
BRIEF = TranslationConfig(
    steps=160, tokens=600, learning_rate=1e-2, warmup=20, dropout=0.1, evaluations=4, average=2, precision="float32"
)


def context(folder: Path, points: list[Any] | None = None, **more: Any) -> TrainingContext:
    folder.mkdir(parents=True, exist_ok=True)
    log = [].append if points is None else points.append
    return TrainingContext(output=folder, shared_cache=folder / "common", log=log, **{"pairs": PAIRS} | more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Any]]:
    """A model that went through a whole training, its facts and its curves."""
    folder, points = tmp_path_factory.mktemp("made"), []
    return folder, TeacherTraining(**SMALL, recipe=BRIEF).fit(context(folder, points)), points


# ---------------------------------------------------------------------------------------------------------- vocabulary


def test_every_text_comes_back_as_it_was() -> None:
    tokenizer = bpe.learn([text for pair in PAIRS for text in pair], 400, 40)
    for text in ("Ein Hund.", "Zwei  Männer, – 3½ €!", "日本語 🙂", "a ", "x"):
        found = tokenizer(text)["input_ids"]
        assert found[-1] == tokenizer.eos_token_id == 1 and found.count(1) == 1
        assert tokenizer.decode(found, skip_special_tokens=True) == text
    assert tokenizer("Hund")["input_ids"] == tokenizer("Hund")["input_ids"] and len(tokenizer) <= 400
    assert len(tokenizer("A dog sees a red ball.")["input_ids"]) < 10


def test_a_vocabulary_is_a_function_of_its_texts() -> None:
    texts = [text for pair in PAIRS for text in pair]
    first, second = (bpe.learn(texts, 350, 40).get_vocab() for _ in range(2))
    assert first == second
    with pytest.raises(ValueError, match="vocabulary must be at least 259, all bytes and special tokens, got 258"):
        bpe.learn(texts, 258, 40)


# ------------------------------------------------------------------------------------------------------------ training


def test_batches_hold_every_pair_once_within_their_size() -> None:
    pairs = [([1] * (1 + n % 7), [1] * (1 + n % 5)) for n in range(50)] + [([1] * 40, [1])]
    found = batches(pairs, 20)
    assert sorted(place for batch in found for place in batch) == list(range(51))
    for batch in found:
        width = max(max(len(side) for side in pairs[place]) for place in batch)
        assert width * len(batch) <= 20 or len(batch) == 1


def test_a_model_learns_to_translate(made: tuple[Path, dict[str, Any], list[Any]]) -> None:
    folder, facts, points = made
    curve = facts["curve"]
    assert [point["step"] for point in curve] == [40, 80, 120, 160] and curve[0]["bleu"] < 50
    assert facts["validation_bleu_greedy"] > 80 and facts["validation_bleu_beam5"] > 80
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses[-1] < losses[0] / 2
    assert (facts["pairs"], facts["pairs_left_out"], facts["steps"]) == (194, 0, 160)
    assert facts["train_bleu_greedy"] > 80 and facts["memorised"] is False  # one grammar on both sides
    assert min(facts["train_equal_reference"], facts["validation_equal_reference"]) > 50
    assert not (folder / trainer.SNAPSHOTS).exists() and not (folder / trainer.STATE).exists()


def test_a_model_that_repeats_its_training_pairs_is_said_to_memorise(
    made: tuple[Path, dict[str, Any], list[Any]],
) -> None:
    """Pairs of the grammar it knows are the learnt ones; those with references of other words were never seen."""
    folder, _, _ = made
    model = PegasusForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = Judge(tokenizer, PAIRS[:20])
    other = Judge(tokenizer, [(source, "Ganz andere Worte stehen hier.") for source, _ in PAIRS[:20]])
    facts = memory_of(model, known, other)
    assert facts["memorised"] is True and facts["validation_equal_reference"] == 0
    assert memory_of(model, other, known)["memorised"] is False
    equal = [text.strip() == reference for text, (_, reference) in zip(known.texts(model, 1), PAIRS[:20], strict=True)]
    assert facts["train_equal_reference"] == round(100 * sum(equal) / 20, 2)


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    """Smoothed over all tokens, per token of the target, whatever the padding."""
    recipe = replace(BRIEF, dropout=0.0)
    maker = TeacherTraining(**SMALL, recipe=recipe)
    tokenizer = bpe.learn([text for pair in PAIRS for text in pair], 300, 40)
    pairs = maker._encode(tokenizer, PAIRS)
    torch.manual_seed(0)
    network = maker.network(len(tokenizer))
    rows = batches(pairs, recipe.tokens)[0]
    found, seen = maker.loss(network.train(), pairs)(rows, 0)
    total, count = torch.zeros(()), 0
    network.eval()
    for place in rows:
        source, target = (torch.tensor([side]) for side in pairs[place])
        logits = network(input_ids=source, labels=target).logits[0]  # it shifts the labels itself
        total += torch.nn.functional.cross_entropy(logits, target[0], label_smoothing=0.1, reduction="sum")
        count += len(target[0])
    torch.testing.assert_close(found, total / count, rtol=1e-4, atol=1e-4)
    assert seen["tokens"] == count


def test_the_model_is_the_mean_of_its_best_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([5.0, 9.0, 1.0, 9.0, 0.0, 0.0])
    monkeypatch.setattr(Judge, "bleu", lambda self, network, beams=1: next(scores))
    kept: dict[int, Any] = {}
    evaluate = trainer.Trainer._evaluate

    def noted(self: Any, function: Any) -> None:
        evaluate(self, function)
        kept[self.step] = {name: p.detach().clone() for name, p in self.learnt.items()}

    monkeypatch.setattr(trainer.Trainer, "_evaluate", noted)
    recipe = replace(BRIEF, steps=8, evaluations=4)
    facts = TeacherTraining(**SMALL, recipe=recipe).fit(context(tmp_path))
    assert facts["averaged_steps"] == [4, 8]
    saved = weights(tmp_path)
    name = "model.encoder.layers.0.fc1.weight"
    assert saved[name].dtype == torch.float16
    assert saved[name].equal(((kept[4][name] + kept[8][name]) / 2).half())


@pytest.mark.parametrize(("patience", "steps"), [(0, 12), (1, 6), (2, 8), (5, 12)])
def test_a_training_ends_when_no_evaluation_is_better(
    patience: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations at every second step; the best one is the second, and an equal one is no better."""
    scores = iter([5.0, 9.0, 9.0, 8.0, 7.0, 9.0])
    monkeypatch.setattr(Judge, "bleu", lambda self, network, beams=1: next(scores, 0.0))
    recipe = replace(BRIEF, steps=12, evaluations=6, patience=patience)
    facts = TeacherTraining(**SMALL, recipe=recipe).fit(context(tmp_path))
    assert facts["steps"] == steps and len(facts["curve"]) == steps // 2


def test_an_interrupted_training_ends_like_an_uninterrupted_one(
    made: tuple[Path, dict[str, Any], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, seen = TeacherTraining(**SMALL, recipe=BRIEF), interrupted_at(24, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        maker.fit(context(tmp_path))
    facts = maker.fit(context(tmp_path))
    assert seen == [*range(24), *range(23, 160)]
    assert facts["curve"] == made[1]["curve"]
    theirs = weights(made[0])
    assert all(weight.equal(theirs[name]) for name, weight in weights(tmp_path).items())


def test_a_checkpoint_of_other_pairs_is_refused(tmp_path: Path) -> None:
    maker = TeacherTraining(**SMALL, recipe=replace(BRIEF, steps=2, evaluations=1))
    maker.fit(context(tmp_path / "one"))
    state = {"data": "other", "step": 1}
    (tmp_path / "two").mkdir()
    torch.save(state, tmp_path / "two" / trainer.STATE)
    with pytest.raises(ValueError, match="an unfinished training on other data"):
        maker.fit(context(tmp_path / "two"))


def test_too_long_pairs_are_left_out_and_too_few_refused(tmp_path: Path) -> None:
    recipe = replace(BRIEF, steps=1, evaluations=1)
    long = [*PAIRS[:40], ("word " * 60, "Wort")]
    facts = TeacherTraining(**SMALL, recipe=recipe).fit(context(tmp_path / "a", pairs=long, validation=PAIRS[:3]))
    assert (facts["pairs"], facts["pairs_left_out"]) == (40, 1)
    with pytest.raises(ValueError, match="must have at least 30 pairs, got 20"):
        TeacherTraining(**SMALL, recipe=recipe).fit(context(tmp_path / "b", pairs=PAIRS[:20]))
    with pytest.raises(
        ValueError, match="At least one pair of the corpus must have at most 2 tokens on both sides, got none"
    ):
        TeacherTraining(**SMALL | {"positions": 2}, recipe=recipe).fit(context(tmp_path / "c"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": (4,)}, r"layers must be two numbers of at least 1, got \[4\]"),
        ({"width": 30, "heads": 4}, "width must be a multiple of 8, twice the heads, got 30"),
        ({"beams": 0}, "beams must be at least 1, got 0"),
    ],
)
def test_impossible_shapes_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TeacherTraining(**SMALL | wrong)


def test_the_rate_rises_and_falls_along_straight_lines() -> None:
    recipe = TranslationConfig(steps=500, warmup=100)
    assert recipe.rate(0) == 0.01 and recipe.rate(99) == 1.0 and recipe.rate(300) == pytest.approx(0.5)
    assert recipe.rate(499) == pytest.approx(1 / 400)
    with pytest.raises(ValueError, match="dropout must be from 0 to below 1, got 1.0"):
        TranslationConfig(dropout=1.0)


# -------------------------------------------------------------------------------------------------------- distillation


@pytest.fixture(scope="module")
def target(made: tuple[Path, dict[str, Any], list[Any]]) -> Seq2SeqLM:
    from transformers import AutoModelForSeq2SeqLM

    network: Any = AutoModelForSeq2SeqLM.from_pretrained(made[0], dtype=torch.float32).requires_grad_(False)
    found = Seq2SeqLM.from_hf(network, keep_hf=True)
    assert isinstance(found, Seq2SeqLM)
    return found


@pytest.fixture(scope="module")
def sources(made: tuple[Path, dict[str, Any], list[Any]]) -> list[list[int]]:
    """Of different lengths; one of them is nothing that was learnt."""
    from transformers import AutoTokenizer

    found: list[list[int]] = AutoTokenizer.from_pretrained(made[0])([*(s for s, _ in PAIRS[:5]), "zzz"])["input_ids"]
    assert len({len(source) for source in found}) > 2
    return found


def teacher(target: Seq2SeqLM, folder: Path) -> TrainingContext:
    return TrainingContext(output=folder, shared_cache=folder, model=target)


@pytest.mark.parametrize("beams", [1, 5])
def test_translations_are_the_teachers_own(
    target: Seq2SeqLM, sources: list[list[int]], beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "GROUP", 4)
    found = translations(teacher(target, tmp_path), sources, beams)
    decoder = Autoregressive(target, Sampling()) if beams == 1 else HFBeam(target, Sampling(), num_beams=beams)
    (end,), ended = target.eos_ids, 0
    for source, text in zip(sources, found, strict=True):
        (wanted,) = checks.outputs(decoder, [torch.tensor(source)], 40)  # the longest target there may be
        assert text == (wanted[: wanted.index(end)] if end in wanted else [])
        ended += bool(text)
    assert ended >= 5


def test_translations_are_written_once_and_go_on(
    target: Seq2SeqLM, sources: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "GROUP", 2)
    whole = translations(teacher(target, tmp_path), sources, 1)
    (file,) = tmp_path.glob("translations-beam1-*.jsonl")
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    written: list[int] = []
    write = distillation._write
    monkeypatch.setattr(distillation, "_write", lambda t, s, b: (written.append(len(s)), write(t, s, b))[1])
    assert translations(teacher(target, tmp_path), sources, 1) == whole and written == []
    file.write_bytes(lines[0] + lines[1][:3])
    assert translations(teacher(target, tmp_path), sources, 1) == whole and written == [2, 2]
    assert file.read_bytes() == content
    translations(teacher(target, tmp_path), sources[:4], 1)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="beams must be at least 1, got 0"):
        translations(teacher(target, tmp_path), sources, 0)


# ------------------------------------------------------------------------------------------------ from the command line


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a training that takes seconds; parts of this machine are out of reach."""
    monkeypatch.setattr(artifacts, "project_data", lambda: tmp_path / "data")
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": source, "answer": target}) + "\n" for source, target in PAIRS))
    shape = [f"train.{key}={list(value) if isinstance(value, tuple) else value}" for key, value in SMALL.items()]
    recipe = {"steps": 40, "tokens": 600, "learning_rate": 0.01, "warmup": 15, "evaluations": 2, "average": 1}
    rest = [f"train.recipe.{key}={value}" for key, value in recipe.items()]
    machine = ["hardware=cpu_fp32", "hardware.threads=1", f"paths.cache={tmp_path / 'cache'}"]
    return ["method=teacher", f"corpus={file}", *shape, *rest, *machine]


def test_a_model_is_made_loaded_by_name_and_distilled(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(words) == 0
    folder = tmp_path / "cache" / "trained" / "teacher-own_1_1"
    card = artifacts.read_card(folder) or {}
    assert card["model"]["name"] == "own_1_1" and card["definition"]["teacher"] is None
    assert card["corpus"]["dialogues"] == 200 and card["facts"]["validation_bleu_greedy"] > 0
    assert set(card["bytes"]) >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    said = capsys.readouterr().out
    assert f"model=hf model.name={folder}" in said
    assert train.main(words) == 0 and "is already there" in capsys.readouterr().out

    group = {"name": "own_1_1", "_target_": "bench.models.trained.TrainedModel"}
    fp32 = {"device": "cpu", "dtype": "float32", "threads": 1, "linear": "plain"}
    loaded = loading.load(group, fp32, PathsConfig(cache=str(tmp_path / "cache")))
    assert loaded.kind == "seq2seq" and loaded.sha256 == card["sha256"] and loaded.revision == card["sha256"][:12]
    source = prompts.encode(loaded.tokenizer, [{"role": "user", "content": PAIRS[0][0]}])
    (written,) = checks.outputs(Autoregressive(loaded.lm, Sampling()), [torch.tensor(source)], 30)
    text = loaded.tokenizer.decode(written[: written.index(loaded.lm.eos_ids[0])], skip_special_tokens=True)
    assert text[0].isupper() and text.endswith(".")
    assert loaded.lm.suppressed == (0, 2)  # padding and mask are never written

    distilled = [*words, "train.data=distilled", "train.beams=1", "model=hf", f"model.name={folder}"]
    assert train.main(distilled) == 0, capsys.readouterr().err
    student = artifacts.read_card(tmp_path / "cache" / "trained" / "teacher-own_1_1_distilled") or {}
    assert student["definition"]["teacher"]["name"] == str(folder) or student["definition"]["teacher"]["revision"]
    assert student["facts"]["pairs_sha256"] != card["facts"]["pairs_sha256"]
    assert student["facts"]["train_bleu_greedy"] < 100, "of its training pairs' references, not of what it learnt"
    assert len(list((tmp_path / "cache" / "common").glob("*/translations-beam1-*.jsonl"))) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["train.data=distilled"], "got none. Name one: model=multi30k_4_4"),
        (["model=random"], "trains a model from scratch, got model=."),
        (
            ["train.data=distilled", "model=random"],
            "The teacher must be an encoder-decoder that translates, got random",
        ),
        (["train.layers=[0,1]"], "layers must be two numbers of at least 1"),
    ],
)
def test_commands_that_make_no_model_are_refused(
    more: list[str], said: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*words, *more]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_made_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "project_data", lambda: tmp_path)
    said = r"is not made yet.*python -m bench train method=(\w*teacher|masked_diffusion)"
    for choice in [name for name in compose.groups()["model"] if name.startswith("multi30k_")]:
        group = compose.compose([f"model={choice}", "dataset=multi30k"]).model
        with pytest.raises(UserError, match=said) as raised:
            loading.load(group, {"device": "cpu", "dtype": "float32"}, PathsConfig(cache=str(tmp_path)))
        command = str(raised.value).split("python -m bench train ")[1].split(" makes it")[0]
        _, given = train.split([word.strip("'") for word in command.split()])
        cfg, settings = compose.compose_training(given, group.get("method", "teacher"))
        exits = {"exits": settings["exits"]} if "exits" in settings else {}
        kind = MAKERS[group.get("method", "teacher")]
        maker = kind(layers=settings["layers"], data=settings["data"], **exits)
        assert maker.model_name("multi30k") == group["name"] == choice


# -------------------------------------------------------------------------------------------------------------- corpora


def test_pairs_are_a_corpus(data_root: Path, tmp_path: Path) -> None:
    own = Sources(data_root, tmp_path)
    texts = corpus.read("multi30k", sources=own)
    assert len(texts.dialogues) == 29_000 and len(texts.revisions) == 2
    assert corpus.validation_of("multi30k") == "multi30k_val" and corpus.validation_of("dolly") is None
    pairs = corpus.pairs(corpus.read("multi30k_val", sources=own))
    assert len(pairs) == 1014 and pairs[0][0].startswith("A group of men")
    turned = corpus.pairs(corpus.read("multi30k_de_en_val", sources=own))
    assert turned[0] == pairs[0][::-1]


def test_conversations_are_no_pairs(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"turns": ["a", "b"], "reference": ["c", "d"]}) + "\n")
    with pytest.raises(UserError, match="conversations of several turns"):
        corpus.pairs(corpus.read(str(file)))
