"""Preparing a part: what there is, from which dialogues, interrupted and finished attempts, and who finds the part."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch
import yaml

from bench import cli
from bench.config import compose, instantiate
from bench.config.identity import run_id
from bench.config.schema import PathsConfig, RunConfig, TrainConfig, conf_dir
from bench.errors import UserError
from bench.measure import manifest, preconditions
from bench.measure import run as program
from bench.models import artifacts
from bench.models.random_weights import byte_tokenizer
from bench.records.tracking import Tracker
from bench.tasks import corpus, prompts, sources
from bench.tasks.corpus import Corpus, Dialogue
from bench.tasks.exercises import Gsm8k
from bench.tasks.sources import DataSet, Revision, Sources, sha256
from bench.train import command as train
from bench.train import job
from bench.utils import files
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.prompt_lookup import PromptLookup
from methods.training.interface import Example, Trainable, TrainingContext
from tests.helpers.offline_runs import read_back, without_account

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests.bench.train.test_train"


class Counter(Trainable):
    """Counts the tokens of all answers, a block of dialogues at a time, and goes on behind the last whole block."""

    description: ClassVar[str] = "the number of tokens"
    duration: ClassVar[str] = "no time"
    breaks: ClassVar[dict[int, BaseException]] = {}  # by block
    walked: ClassVar[list[int]] = []

    def __init__(self, blocks: int = 3, scale: float = 1.0) -> None:
        if blocks < 1:
            raise ValueError(f"blocks={blocks} came; at least 1 is needed. Set train.blocks=N.")
        self.blocks, self.scale = blocks, scale

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        state = context.output / "state.json"
        counts: list[int] = json.loads(state.read_text()) if state.is_file() else []
        for block in range(len(counts), self.blocks):
            if error := Counter.breaks.pop(block, None):
                raise error
            Counter.walked.append(block)
            counts.append(sum(len(example.answer) for example in context.examples[block :: self.blocks]))
            state.write_text(json.dumps(counts))
            context.report_progress("blocks", block + 1, self.blocks)
            context.log({"step": block, "tokens": sum(counts)})
        (context.output / "count.json").write_text(json.dumps(sum(counts) * self.scale))
        state.unlink()
        return {"tokens": torch.tensor(sum(counts)), "vocabulary": context.target.vocab_size, "seed": context.seed}


class Counted(PromptLookup):
    """A decoder that cannot do without its part."""

    trainable = True

    def __init__(self, target: CausalLM, sampling: Sampling, checkpoint: Path | None = None) -> None:
        super().__init__(target, sampling)
        if checkpoint is None:
            raise ValueError("counter has nothing prepared. python -m bench train method=counter prepares it.")
        self.checkpoint = checkpoint


class Idle:
    """Prepares nothing."""


@pytest.fixture(autouse=True)
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our own configs, and beside them a method with its preparation; nothing of this machine's parts or data."""
    conf = tmp_path / "conf"
    for source in conf_dir().rglob("*.yaml"):
        target = conf / source.relative_to(conf_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent.name != "train" and target.name != "local.yaml":
            target.symlink_to(source)
    (conf / "train").mkdir(exist_ok=True)
    (conf / "train" / "counter.yaml").write_text(f"name: counter\n_target_: {HERE}.Counter\nblocks: 3\nscale: 1.0\n")
    (conf / "method" / "counter.yaml").write_text(f"name: counter\n_target_: {HERE}.Counted\ncheckpoint: null\n")
    monkeypatch.setattr(compose, "conf_dir", lambda: conf)
    monkeypatch.setattr(
        instantiate, "_registered", lambda: {f"{HERE}.{kind}" for kind in ("Counter", "Counted", "Idle")}
    )
    monkeypatch.setattr(artifacts, "project_data", lambda: tmp_path / "data")
    monkeypatch.setattr(Counter, "breaks", {})
    monkeypatch.setattr(Counter, "walked", [])
    monkeypatch.delenv("DECODEBENCH_DATA", raising=False)
    return conf


ROWS = [{"prompt": f"Say {number}.", "answer": f"It is {number}, {number} and {number}."} for number in range(12)]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command line of a preparation that takes no time."""
    file = write_rows(tmp_path / "own.jsonl", ROWS)
    small = ["model=random", "model.layers=1", "hardware=cpu_fp32", "hardware.threads=1"]
    return ["method=counter", f"corpus={file}", *small, f"paths.cache={tmp_path / 'cache'}"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "trained" / "counter-random"


def card(folder: Path) -> dict[str, Any]:
    found = artifacts.read_card(folder)
    assert found is not None
    return found


# --------------------------------------------------------------------------------------------------- command line


def test_help_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "poison").mkdir()
    for name in ("torch", "transformers", "datasets"):
        (tmp_path / "poison" / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "poison")}
    for word, code in (("--help", 0), ("method=prompt_lookup", 2), ("corpsu=dolly", 2)):
        begin = time.perf_counter()
        command = [sys.executable, "-m", "bench.train", word]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == code and "was imported" not in done.stderr, done.stderr
        assert word != "--help" or time.perf_counter() - begin < 1.5


@pytest.mark.parametrize("words", [[], ["list"]], ids=["nothing", "list"])
def test_the_listing_says_what_is_prepared_and_how_long_it_takes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(words) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  counter  the number of tokens", "           takes no time"]
    assert train.main(["--help"]) == 0
    assert "Methods:\ncounter" in capsys.readouterr().out


def test_the_group_is_listed_and_shown_but_no_part_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "train"]) == 0
    assert capsys.readouterr().out.split()[0] == "counter"
    assert cli.main(["show", "train/counter"]) == 0
    assert "Counts the tokens" in capsys.readouterr().out
    assert "train" not in compose.groups()
    assert cli.main(["train=counter"]) == 2
    assert "Unknown setting 'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["method=prompt_lookup"], "Method 'prompt_lookup' needs no training. Methods that do: counter."),
        (["method=conter"], "Unknown method 'conter'. Did you mean 'counter'?"),
        (["method="], "train needs method=NAME, one of: counter."),
        (["corpsu=dolly"], "Unknown setting 'corpsu'. Did you mean 'corpus'?"),
        (["corpus=doly"], "Unknown corpus 'doly'. Did you mean 'dolly'? Known: dolly, dolly_15k, gsm8k, multi30k, "),
        (["corpus=dolly,,gsm8k"], "corpus must be different names with commas between them"),
        (["corpus_limit=0"], "corpus_limit must be at least 1, got 0"),
        (["corpus_limit=many"], "corpus_limit must be a whole number or null, got 'many' (text)"),
        (["corpus_limit=[1"], "corpus_limit cannot be read, got '[1'."),
        (["force=perhaps"], "force must be true or false, got 'perhaps' (text)"),
        (["train.block=4"], "Unknown setting 'train.block'. Did you mean 'train.blocks'? (python -m bench show train/"),
        (["train.scale=2", "train.block=4"], "Unknown setting 'train.block'."),
        (["train.blocks=x"], "train.blocks must be a whole number, got 'x' (text). Set train.blocks=VALUE."),
        (["train.blocks=0"], "blocks=0 came; at least 1 is needed. Set train.blocks=N."),
        (["train.scale=1", "model=smolm2"], "Unknown model 'smolm2'. Did you mean 'smollm2'?"),
        (["train.scale=1", "hardware.devcie=cpu"], "Unknown setting 'hardware.devcie'. Did you mean"),
        (["seed=x"], "seed must be a whole number, got 'x' (text)"),
        (["dataset=mtbench"], "'dataset' has no effect on a training."),
        (["method.gamma=3"], "'method.gamma' has no effect on a training. Settings of the training are"),
        (["--force"], "Unknown option '--force'. A setting is written key=value"),
        (["what"], "Cannot read 'what'. A setting is written key=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_exit_2(
    more: list[str], message: str, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*words, *more]) == 2
    out, err = capsys.readouterr()
    assert message in err and "Traceback" not in err and len(err.splitlines()) == 1
    assert out == "" and not folder.exists()


def test_a_class_that_is_no_preparation_is_refused(
    configs: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (configs / "train" / "counter.yaml").write_text(f"name: counter\n_target_: {HERE}.Idle\n")
    assert train.main(words) == 2
    assert "must be a subclass of methods.training.interface.Trainable, got" in capsys.readouterr().err


OURS = sorted(file.stem for file in (conf_dir() / "train").glob("*.yaml"))


@pytest.mark.parametrize("name", OURS)
def test_our_own_preparations_fit_their_classes_and_methods(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    _, group = compose.compose_training([], name)
    assert group["name"] == name
    trainable = instantiate.build_trainable(group)
    assert trainable.description and trainable.duration
    assert set(group) - {"name", "_target_"} == set(signature(type(trainable)).parameters), "arguments left out"
    if trainable.makes != "checkpoint":  # no method uses it
        return
    decoder = instantiate.locate(compose.compose([f"method={name}"]).method["_target_"])
    assert "checkpoint" in signature(decoder).parameters, "the method does not take what is trained"


def test_a_corpus_may_be_limited_by_itself(tmp_path: Path) -> None:
    big, small = tmp_path / "big.jsonl", tmp_path / "small.jsonl"
    for file, count in ((big, 50), (small, 4)):
        rows = [json.dumps({"prompt": f"{file.stem} {n}", "answer": str(n)}) for n in range(count)]
        file.write_text("\n".join(rows))
    drawn = corpus.read(f"{big}:9,{small}", seed=1)
    names = [dialogue.said[0].split()[0] for dialogue in drawn.dialogues]
    assert names == ["big"] * 9 + ["small"] * 4 and drawn.names == ("big.jsonl", "small.jsonl")
    assert set(corpus.read(f"{big}:9", seed=1).dialogues) < set(corpus.read(f"{big}:20", seed=1).dialogues)
    assert corpus.read(f"{big}:9", seed=2).sha256 != corpus.read(f"{big}:9", seed=1).sha256
    assert len(corpus.read(f"{big}:99").dialogues) == 50
    with pytest.raises(UserError, match="each alone or as NAME:COUNT with a count of at least 1"):
        corpus.read(f"{big}:0")
    with pytest.raises(UserError, match="Unknown corpus"):
        corpus.read(f"{big}:many")


# ------------------------------------------------------------------------------------------- made, cut, made again


def test_a_part_is_made_and_its_card_says_how(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*words, "seed=3", "train.scale=2", "corpus_limit=9"]) == 0
    out, err = capsys.readouterr()
    assert str(folder) in out and "python -m bench method=counter model=random model.layers=1 paths.cache=" in out
    assert "checkpoint" not in out and "counter for random: the number of tokens; no time" in err

    noted = card(folder)
    texts = corpus.read(str(tmp_path / "own.jsonl"), 9, seed=3)
    tokens = sum(len(dialogue.answer) + 1 for dialogue in texts.dialogues)  # bytes, and the end of the text
    assert noted["facts"] == {"tokens": tokens, "vocabulary": 260, "seed": 3}
    assert json.loads((folder / "count.json").read_text()) == tokens * 2
    assert noted["definition"]["train"] == {"_target_": f"{HERE}.Counter", "blocks": 3, "scale": 2.0}
    assert noted["corpus"]["names"] == ["own.jsonl"] and noted["corpus"]["dialogues"] == 9
    assert noted["corpus"]["sha256"] == texts.sha256 == noted["definition"]["corpus"]
    assert noted["model"] == {"name": "random", "revision": "seed 0", "sha256": None}
    assert noted["command"].startswith("python -m bench train method=counter corpus=")
    assert noted["command"].endswith("seed=3 train.scale=2 corpus_limit=9")
    assert noted["seed"] == 3 and noted["seconds"] >= 0 and noted["bytes"] == {"count.json": len(f"{tokens * 2.0}")}
    assert noted["versions"]["torch"] == torch.__version__ and noted["dtype"] == "float32" and "sha" in noted["git"]
    assert str(tmp_path) not in (folder / "card.json").read_text()
    assert sorted(file.name for file in folder.iterdir()) == ["card.json", "count.json", "curves.jsonl"]


def test_points_of_curves_are_written_and_followed(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    class Recorder(Tracker):
        def start(self, run_id: str, group: str, config: Any, tags: Any, job: str) -> None:
            told.append((run_id.rsplit("-", 1)[0], group, config["seed"], list(tags), job))

        def log_point(self, point: Any) -> None:
            told.append(dict(point))

        def finish(self, status: str) -> None:
            told.append(status)

    monkeypatch.setattr(instantiate, "build_tracker", lambda group: Recorder())
    Counter.breaks[1] = RuntimeError("broken")
    assert train.main(words) == 1
    assert train.main(words) == 0
    points = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points] == [0, 1, 2]
    begun = ("counter-random", "random-own.jsonl", 0, ["counter", "random"], "train")
    assert told == [begun, points[0], "failed", begun, *points, "finished"], "the second run has the points of both"


def test_a_resumed_training_logs_no_step_twice(tmp_path: Path) -> None:
    class Recorder(Tracker):
        def __init__(self) -> None:
            self.points: list[Any] = []

        def log_point(self, point: Any) -> None:
            self.points.append(point)

    file, first, second = tmp_path / "curves.jsonl", Recorder(), Recorder()
    before = [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0}, {"step": 20, "bleu": 9.0}]
    log = job.CurveLog(file, first)
    for point in before:
        log(point)
    with file.open("a") as stream:
        stream.write('{"step": 30, "lo')  # killed while it wrote
    log = job.CurveLog(file, second)
    for point in [*before[1:], {"step": 30, "loss": 1.0}, {"note": 1}, {"note": 1}]:
        log(point)
    everything = [*before, {"step": 30, "loss": 1.0}, {"note": 1}, {"note": 1}]
    assert first.points == before and second.points == everything
    assert [json.loads(line) for line in file.read_text().splitlines()] == everything


def test_weights_and_biases_gets_the_curves(
    words: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    without_account(monkeypatch, tmp_path)
    assert train.main([*words, "tracker=wandb", f"paths.results={tmp_path}"]) == 0
    points = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    found = read_back(tmp_path)
    assert [record["item"]["tokens"] for record in found["history"]] == [point["tokens"] for point in points]
    assert [record["item"]["_step"] for record in found["history"]] == [point["step"] for point in points]
    (run,) = found["run"]
    assert run["config"]["update"]["method"] == "counter" and run["job_type"] == "train"
    assert str(tmp_path) not in json.dumps(found)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "Interrupted. Finished work is kept; run the same command to resume."),
        (MemoryError(), 1, "Out of memory. Finished work is kept; run the same command to resume."),
        (
            OSError(28, "No space left", "/f/x"),
            1,
            "The disk is full: /f/x. Finished work is kept; run the same",
        ),
        (ValueError("No answer. One is needed. Add it."), 2, "No answer. One is needed. Add it."),
        (TypeError("odd"), 1, "The run failed: TypeError: odd"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_interrupted_preparation_goes_on_with_the_same_command(
    error: BaseException,
    code: int,
    message: str,
    words: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Counter.breaks[2] = error
    assert train.main(words) == code
    err = capsys.readouterr().err
    assert message in err and ("Traceback" in err) == isinstance(error, TypeError)
    assert artifacts.read_card(folder) is None and (folder / "state.json").is_file() and Counter.walked == [0, 1]
    assert train.main(words) == 0
    assert Counter.walked == [0, 1, 2] and "resuming after" in capsys.readouterr().err
    assert card(folder)["facts"]["tokens"] > 0 and not (folder / "training.json").exists()


def test_seconds_of_all_attempts_are_counted(words: list[str], folder: Path) -> None:
    Counter.breaks[2] = KeyboardInterrupt()
    train.main(words)
    plan = json.loads((folder / "training.json").read_text())
    (folder / "training.json").write_text(json.dumps(plan | {"seconds": 100.0}))
    train.main(words)
    assert card(folder)["seconds"] >= 100


def test_a_finished_part_is_not_made_again_unless_forced(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(words) == 0
    before = card(folder)
    assert train.main([*words, "train.scale=1"]) == 0, "1 and 1.0 are one value"
    assert f"{folder} is already there. Set force=true to train again." in capsys.readouterr().out
    assert Counter.walked == [0, 1, 2] and card(folder) == before
    (folder / "left over").write_text("x")
    assert train.main([*words, "force=true"]) == 0
    assert Counter.walked == [0, 1, 2] * 2 and not (folder / "left over").exists()
    assert card(folder)["sha256"] == before["sha256"]


def test_a_forced_preparation_that_was_cut_goes_on(words: list[str]) -> None:
    train.main(words)
    Counter.walked.clear()
    Counter.breaks[1] = KeyboardInterrupt()
    assert train.main([*words, "force=true"]) == 130
    assert train.main([*words, "force=true"]) == 0
    assert Counter.walked == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "what"),
    [("seed=1", "seed"), ("train.blocks=2", "train"), ("model.seed=1", "model"), ("corpus_limit=5", "corpus")],
)
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_what_was_made_otherwise_is_replaced_only_by_force(
    change: str, what: str, finished: bool, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not finished:
        Counter.breaks[1] = KeyboardInterrupt()
    train.main(words)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert train.main([*words, change]) == 2
    assert f"has a result of other settings ({what})" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert train.main([*words, change, "force=true"]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["card.json", "count.json", "curves.jsonl"]
    capsys.readouterr()
    assert train.main([*words, change]) == 0
    assert "is already there" in capsys.readouterr().out


def test_an_attempt_that_has_saved_nothing_is_no_obstacle(words: list[str], folder: Path) -> None:
    Counter.breaks[1] = KeyboardInterrupt()
    train.main(words)
    for file in folder.iterdir():
        if file.name not in (job.PLAN, job.LOG):
            file.unlink()
    assert (folder / job.PLAN).exists()
    assert train.main([*words, "seed=1"]) == 0
    assert (folder / "card.json").exists()


def test_another_folder_is_filled_only_if_it_is_empty(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "elsewhere"
    assert train.main([*words, f"out={out}"]) == 0
    assert f"method.checkpoint={out}" in capsys.readouterr().out and not folder.exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    for more in ([], ["force=true"]):
        assert train.main([*words, f"out={mine}", *more]) == 2
        assert "must be empty or of a training, got other files" in capsys.readouterr().err
    assert [file.name for file in mine.iterdir()] == ["thesis.tex"]


def test_one_folder_has_one_writer(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir(parents=True)
    with files.locked(folder / artifacts.LOCK):
        assert train.main(words) == 2
    assert "is in use by another process" in capsys.readouterr().err
    assert train.main(words) == 0


def test_a_stage_is_a_line_every_30_s(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    real = job.Progress
    monkeypatch.setattr(job, "Progress", lambda label, total, done: real(label, total, done, clock=lambda: now))
    stages = job.StageProgress()
    for second in range(0, 101, 10):
        now = float(second)
        stages("reading", second, 100)
    for second in range(100, 141, 10):
        now = float(second)
        stages("sorting", second - 100, 40)
    stages.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "reading: 30/100", "reading: 60/100", "reading: 90/100", "sorting: 30/40"
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------- corpora


def said(texts: corpus.Texts) -> list[str]:
    return [dialogue.said[-1] for dialogue in texts.dialogues]


def test_both_formats_are_read_and_each_answer_is_an_example(tmp_path: Path) -> None:
    line = {"question_id": 1, "category": "chat", "turns": ["Who?", "And who else?"], "reference": ["I.", "You. "]}
    file = write_rows(tmp_path / "own.jsonl", [line, {"prompt": "What?", "answer": "That."}])
    texts = corpus.read(str(file))
    assert texts.dialogues == (
        Dialogue(("Who?",), "I."),
        Dialogue(("Who?", "I.", "And who else?"), "You."),
        Dialogue(("What?",), "That."),
    )
    roles = [message["role"] for message in texts.dialogues[1].messages]
    assert roles == ["user", "assistant", "user"]


def test_a_gzipped_file_is_known_by_its_content(tmp_path: Path) -> None:
    plain = write_rows(tmp_path / "own.jsonl", ROWS)
    for name in ("own.jsonl.gz", "own.data"):
        (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
        texts = corpus.read(str(tmp_path / name))
        assert texts.sha256 == corpus.read(str(plain)).sha256
        assert texts.revisions == (Revision(name, sha256(plain.read_bytes()), "local"),)


def test_the_hash_is_that_of_the_dialogues(tmp_path: Path) -> None:
    first, second = write_rows(tmp_path / "a", ROWS[:6]), write_rows(tmp_path / "b", ROWS[6:])
    both = corpus.read(f"{first},{second}")
    assert both.sha256 == corpus.read(str(write_rows(tmp_path / "c", ROWS))).sha256, "names do not matter"
    assert both.names == ("a", "b") and len(both.revisions) == 2
    changed = [*ROWS[:-1], ROWS[-1] | {"answer": "No."}]
    others = [corpus.read(str(write_rows(tmp_path / "d", rows))).sha256 for rows in (changed, ROWS[::-1], ROWS[1:])]
    assert len({both.sha256, *others}) == 4


def test_a_limit_draws_by_the_seed_and_grows(tmp_path: Path) -> None:
    file = str(write_rows(tmp_path / "own.jsonl", [{"prompt": f"Say {i}.", "answer": "x"} for i in range(200)]))
    every = said(corpus.read(file))
    few, more = (said(corpus.read(file, limit, seed=1)) for limit in (20, 60))
    assert len(few) == 20 and set(few) < set(more) < set(every)
    assert few == sorted(few, key=every.index), "the order stays"
    assert few != every[:20] and few != said(corpus.read(file, 20, seed=2))
    assert said(corpus.read(file, 200)) == said(corpus.read(file, 999)) == every


class Counting:
    """A tokenizer that counts what it is asked for."""

    def __init__(self) -> None:
        self._real, self.calls = byte_tokenizer(), 0
        self.chat_template = self._real.chat_template
        self.apply_chat_template = self._real.apply_chat_template

    def __call__(self, text: str, **more: Any) -> Any:
        self.calls += 1
        return self._real(text, **more)


def test_examples_are_what_the_target_reads_and_are_made_once(tmp_path: Path) -> None:
    texts = corpus.read(str(write_rows(tmp_path / "own.jsonl", ROWS)))
    tokenizer = Counting()
    read = Corpus(texts, tokenizer, end=257, context=2048)
    assert len(read) == 12 and tokenizer.calls == 0
    assert read[3].prompt == prompts.encode(tokenizer, texts.dialogues[3].messages)
    asked, answered = byte_tokenizer().decode(read[3].prompt), byte_tokenizer().decode(read[3].answer[:-1])
    assert asked.endswith("user: Say 3.\nassistant: ") and answered == "It is 3, 3 and 3." and read[3].answer[-1] == 257
    assert [*read] == [*read] == read[:] and read[-1] == read[11] and read[2:4] == [read[2], read[3]]
    assert tokenizer.calls == 12 and read.sha256 == texts.sha256
    with pytest.raises(IndexError):
        read[12]


def test_a_dialogue_is_cut_to_the_context(tmp_path: Path) -> None:
    texts = corpus.read(str(write_rows(tmp_path / "own.jsonl", ROWS[:1])))
    (whole,) = Corpus(texts, byte_tokenizer(), 257, 2048)
    (shorter,) = Corpus(texts, byte_tokenizer(), 257, len(whole.prompt) + 5)
    assert shorter == Example(whole.prompt, whole.answer[:5])
    (shortest,) = Corpus(texts, byte_tokenizer(), 257, 8)
    assert shortest == Example(whole.prompt[-7:], whole.answer[:1])


def test_public_train_splits_hold_no_test_row(data_root: Path, tmp_path: Path) -> None:
    found = Sources(data_root, tmp_path)
    texts = corpus.read("dolly,gsm8k", sources=found)
    assert len(texts.dialogues) == 2996 + 7473 and texts.names == ("dolly", "gsm8k")
    assert [revision.file for revision in texts.revisions] == ["dolly/dolly_3k.json", "gsm8k/train.jsonl"]
    assert not any(revision.warning for revision in texts.revisions)
    assert not any("<<" in dialogue.answer for dialogue in texts.dialogues[2996:])
    assert not {example.turns[0] for example in Gsm8k().load(found)} & set(said(texts))


def test_the_whole_of_dolly_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"instruction": "Sum up.", "context": "A text.", "response": "Text.", "category": "x"},
        {"instruction": "Why?", "context": "", "response": "So.", "category": "x"},
        {"instruction": "Nothing", "context": "", "response": "", "category": "x"},
    ]
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()

    def fetch(known: DataSet) -> tuple[bytes, Revision]:
        return raw, Revision(known.file, sha256(raw), "hub", f"{known.hub} at abc")

    monkeypatch.setattr(sources, "_from_hub", fetch)
    texts = corpus.read("dolly_15k", sources=Sources(None, tmp_path))
    assert texts.dialogues == (Dialogue(("Sum up.\n\nA text.",), "Text."), Dialogue(("Why?",), "So."))
    assert texts.revisions[0].source == "databricks/databricks-dolly-15k train at abc"


@pytest.mark.parametrize("raw", [b'{"a": 1}', b"[1]", b"[", b"\xff"])
def test_a_list_that_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(UserError, match=r"dolly_3k\.json is no"):
        sources.parse_rows(raw, "dolly/dolly_3k.json")


# --------------------------------------------------------------------------------------------- who finds the part


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    file = write_rows(tmp_path / "asked.jsonl", [{"question_id": 1, "category": "x", "turns": ["Say 1 1 1."]}])
    words = ["method=counter", "model=random", "model.layers=1", "hardware=cpu_fp32", "hardware.threads=1"]
    composed = compose.compose([*words, "dataset=jsonl", f"dataset.path={file}", "max_new_tokens=8"])
    return replace(composed, paths=PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache")))


def test_heads_of_a_speculator_are_those_found_for_the_model_unless_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    cache = f"paths.cache={tmp_path}"
    cfg, group = compose.compose_training(["model=random", cache], "specee")
    assert group["heads"] is None and job._with_heads(group, cfg)["heads"] is None, "no heads exist for it"
    smollm2, _ = compose.compose_training(["model=smollm2", cache], "specee")
    assert job._with_heads(group, smollm2)["heads"] == str(ROOT / "data" / "checkpoints" / "medusa-smollm2")
    own = tmp_path / "trained" / "eagle-random"
    own.mkdir(parents=True)
    files.write_json(own / artifacts.CARD, {"method": "eagle"})
    assert job._with_heads({**group, "speculator": "eagle"}, cfg)["heads"] == str(own)
    assert job._with_heads({**group, "heads": "others"}, cfg)["heads"] == "others"
    _, plain = compose.compose_training([], "calm")
    assert "heads" not in job._with_heads(plain, cfg)


def test_the_heads_that_were_found_are_part_of_the_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    given: list[Any] = []

    def refused(*arguments: Any) -> NoReturn:
        given.extend(arguments)
        raise InterruptedError

    monkeypatch.setattr(job, "_read", lambda *_: None)
    monkeypatch.setattr(job, "TrainingJob", refused)
    with pytest.raises(InterruptedError):
        job.prepare(TrainConfig(method="specee"), ["model=smollm2", f"paths.cache={tmp_path}"], [])
    trainable, _, _, group, *_ = given
    assert trainable.heads == group["heads"] == str(ROOT / "data" / "checkpoints" / "medusa-smollm2")


def identity(cfg: RunConfig) -> str:
    return run_id(cfg, manifest.resolved(program.prepare(cfg)))


@pytest.fixture
def make(words: list[str]) -> Callable[..., None]:
    """Prepare, with more words on the command line."""

    def prepare(*more: str) -> None:
        assert train.main([*words, *more]) == 0

    return prepare


def test_a_decoder_gets_the_part_of_its_model(
    cfg: RunConfig, make: Callable[..., None], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="method=counter has no checkpoint for model=random. Make one: python -m bench"):
        program.prepare(cfg)
    make()
    parts = program.prepare(cfg)
    assert parts.method.checkpoint == folder
    noted = manifest.manifest(cfg, parts)["part"]
    assert noted["origin"] == "trained" and noted["sha256"] == card(folder)["sha256"] and noted["card"] == card(folder)
    assert manifest.resolved(parts)["part"] == noted["sha256"] and noted["warning"] is None
    assert str(tmp_path) not in json.dumps(noted)


def test_a_shipped_part_comes_first(cfg: RunConfig, make: Callable[..., None], folder: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "data" / "checkpoints" / "counter-random"
    make(f"out={shipped}", "train.scale=2")
    assert program.prepare(cfg).method.checkpoint == shipped
    make()
    parts = program.prepare(cfg)
    assert parts.method.checkpoint == shipped and manifest.manifest(cfg, parts)["part"]["origin"] == "shipped"
    (shipped / "card.json").unlink()
    assert program.prepare(cfg).method.checkpoint == folder, "without a card it is not finished"


def test_who_trains_beside_a_shipped_part_is_told_how_to_use_it(
    make: Callable[..., None], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(f"out={tmp_path / 'data' / 'checkpoints' / 'counter-random'}")
    assert "method.checkpoint" not in capsys.readouterr().out, "it lies where it is found"
    make("train.scale=3")
    assert f"method.checkpoint={folder}" in capsys.readouterr().out


def test_the_users_own_comes_before_all(cfg: RunConfig, make: Callable[..., None], tmp_path: Path) -> None:
    make()
    own = tmp_path / "own"
    make(f"out={own}", "train.scale=2")
    chosen = replace(cfg, method=cfg.method | {"checkpoint": str(own)})
    parts = program.prepare(chosen)
    assert parts.prepared is not None and parts.prepared.origin == "checkpoint" and parts.prepared.folder == own
    assert parts.prepared.sha256 == card(own)["sha256"]
    file = own / "count.json"
    assert artifacts.Prepared(file, "checkpoint").sha256 == parts.prepared.sha256, "a file alone will do"


def test_a_manifest_has_the_card_without_the_curve(tmp_path: Path) -> None:
    learnt = {"facts": {"steps": 2, "curve": [{"step": 1}]}, "seed": 0}
    part = artifacts.Prepared(tmp_path, "shipped", learnt)
    assert part.facts()["card"] == {"facts": {"steps": 2}, "seed": 0} and "curve" in learnt["facts"]
    assert artifacts.Prepared(tmp_path, "shipped", {"seed": 0}).facts()["card"] == {"seed": 0}
    assert artifacts.Prepared(tmp_path, "checkpoint").facts()["card"] is None


def test_another_part_is_another_run(cfg: RunConfig, make: Callable[..., None], folder: Path) -> None:
    make()
    first = identity(cfg)
    make("force=true")
    assert identity(cfg) == first, "the same files: when they were made does not matter"
    make("train.scale=2", "force=true")
    assert identity(cfg) != first


def test_a_run_without_a_part_is_what_it_always_was(cfg: RunConfig, make: Callable[..., None]) -> None:
    plain = replace(cfg, method=compose.compose(["method=prompt_lookup"]).method)
    before = identity(plain)
    make()
    parts = program.prepare(plain)
    assert identity(plain) == before and parts.prepared is None
    found = {name for name, value in manifest.resolved(parts).items() if value is not None}
    assert found - {"cores"} == {"model_revision", "data_revision", "device", "threads", "dtype"}
    assert "part" not in manifest.manifest(plain, parts)


def test_a_part_of_other_weights_is_used_with_a_warning(
    cfg: RunConfig, make: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    make()
    parts = program.prepare(replace(cfg, model=cfg.model | {"seed": 5}))
    warning = "counter-random was trained for revision seed 0 of the model, and this is seed 5"
    assert warning in capsys.readouterr().err
    assert manifest.manifest(cfg, parts)["part"]["warning"] == warning


def test_a_part_cannot_be_set(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["method=counter", "+method.part=/tmp"]) == 2
    assert "Unknown setting 'method.part'" in capsys.readouterr().err
    file = configs / "method" / "counter.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"part": "/tmp"}))
    assert cli.main(["method=counter"]) == 2
    assert "Unknown setting 'method.part'" in capsys.readouterr().err


def test_the_laboratory_uses_the_part_and_notes_it(cfg: RunConfig, make: Callable[..., None], folder: Path) -> None:
    from bench.lossless import experiments, report
    from bench.lossless.settings import LosslessConfig
    from bench.models import loading

    make()
    loaded = loading.load(cfg.model, {"device": "cpu", "dtype": "float32"}, cfg.paths)
    decoder = experiments._decoder(cfg, cfg.method, 0.0, loaded)
    assert decoder.checkpoint == folder
    first = report.folder_name("greedy", cfg, LosslessConfig(), loaded)
    make("train.scale=2", "force=true")
    assert report.folder_name("greedy", cfg, LosslessConfig(), loaded) != first


def test_a_missing_part_names_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "project_data", lambda: tmp_path)
    for model in ("small", "other"):
        (tmp_path / "checkpoints" / f"rest-{model}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"rest-{model}" / "card.json").write_text("{}")
    (tmp_path / "checkpoints" / "rest-unfinished").mkdir()
    cfg = compose.compose(["method=rest", "model=random", "dataset=demo", f"paths.cache={tmp_path}"])
    (problem,) = preconditions.check(cfg)
    assert "train method=rest model=random" in problem and problem.endswith("for model=other, model=small.")


@pytest.mark.parametrize("log", ["training_log", "making"])
def test_the_training_log_is_not_part_of_the_checkpoint(log: str, tmp_path: Path) -> None:
    (tmp_path / log).mkdir()
    (tmp_path / "part.json").write_text("{}")
    before = files.digest(artifacts.files(tmp_path))
    (tmp_path / log / "trials.jsonl").write_text("1\n")
    assert files.digest(artifacts.files(tmp_path)) == before
    (tmp_path / f"{log}.bin").write_text("1")
    assert files.digest(artifacts.files(tmp_path)) != before


def test_an_unfinished_training_of_an_earlier_version_is_resumed(words: list[str], folder: Path) -> None:
    Counter.breaks[2] = KeyboardInterrupt()
    train.main(words)
    (folder / "training.json").rename(folder / "making.json")
    (folder / "making").mkdir()
    (folder / "making" / "trials.jsonl").write_text("1\n")
    assert train.main(words) == 0 and Counter.walked == [0, 1, 2]
    assert (folder / "training_log" / "trials.jsonl").read_text() == "1\n" and not (folder / "making").exists()
