"""Wrong words, files, models and places: one message, exit 2, nothing measured, no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hostile.commands import Ended, Shell
from tests.hostile.inputs import CHECKPOINTS, MARKER, MODELS, PROMPTS

REFUSED, FAILED, DONE = frozenset({2}), frozenset({1, 2}), frozenset({0, 3})
QUICK = [
    "hardware=cpu_fp32", "hardware.threads=1", "measure.warmup=1", "measure.cost_curve=false",
    "measure.bootstrap_samples=100", "max_new_tokens=8", "paths.results=out",
]  # fmt: skip
RANDOM = ["model=random", "dataset=demo", "dataset.limit=2", "method=prompt_lookup", *QUICK]


def check(ended: Ended, codes: frozenset[int]) -> None:
    assert ended.code in codes and not ended.traceback, ended.said[-3000:]
    if ended.code == 2:
        assert ended.said.strip() and not ended.measured, ended.said[-3000:]


def flat(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(*entry, id=name[:60]) for name, entry in table.items()]


# ---------------------------------------------------------------------------------------------------------- words

ALONE = r"""
=5 method=null model=null method= method=nope method=[eagle] method={a:1} method=1 method=eagle,medusa a.b.c=1
method.gamma method.=3 .=3 ..= [ { method.gamma=[1,2 ' " method.nope=1
seed=-1 seed=1.5 seed=x seed=null seed=true seed=${nope} seed=${seed} seed=\u202e1
batch_size=0 batch_size=-4 batch_size=2.5 batch_size=null batch_size=inf batch_size=nan
max_new_tokens=0 max_new_tokens=-1 max_new_tokens=1e3 max_context=1 max_context=-1 max_context=text
sampling.temperature=-1 sampling.temperature=nan sampling.temperature=inf sampling.temperature=1e-30 sampling.top_p=0
sampling.top_p=2 sampling.top_k=-1 sampling.temperature=text sampling=none
measure.repeats=0 measure.repeats=-1 measure.warmup=-1 measure.bootstrap_samples=-1 measure=none measure.refill=maybe
measure.near_tie_gap=-1 measure.near_tie_gap=nan
dataset.limit=0 dataset.limit=-1 dataset.limit=x dataset=nope dataset.path=1 dataset.scorer=nope
hardware.threads=0 hardware.threads=-1 hardware.threads=100000 hardware.dtype=int3 hardware=nope hardware.device=tpu
tracker=nope paths.results= paths=nope model=nope model.weights=int1
model.name= model.layers=0 model.layers=-2 model.hidden_size=0 model.heads=0 model.vocab_size=1 model.heads=7
model.hidden_size=text model.like=nope
method.max_ngram=0 method.max_ngram=-1 method.gamma=0 method.gamma=-5
hydra.searchpath=[nowhere] ${oc.env:HOME}=1 +new=1 ++method=3 --nope -x nope repot
method._target_=os.system method._target_=builtins.eval model._target_=subprocess.Popen méthode=eagle
"""

WORDS: dict[str, list[Any]] = {
    **{word: [[word], REFUSED] for word in ALONE.split()},
    "a huge seed": [[f"seed={10**30}"], REFUSED],
    "a huge seed of the model": [[f"model.seed={10**23}"], REFUSED],
    "a word of 100,000 letters": [["x" * 100_000], REFUSED],
    "a value of 100,000 letters": [[f"model.name={'x' * 100_000}"], REFUSED],
    "a long name": [["model=hf", f"model.name={'a' * 5000}"], REFUSED],
    "a long path": [["dataset=jsonl", f"dataset.path={'a/' * 3000}x"], REFUSED],
    "a zero byte": [["seed=\u0000"], REFUSED],
    "sampled at an endless temperature": [["sampling=sample", "sampling.temperature=inf"], REFUSED],
    "sampled at next to no temperature": [["sampling=sample", "sampling.temperature=1e-30"], REFUSED],
    "a setting taken away": [["~seed"], DONE],
    "one key twice": [["seed=1", "seed=2"], DONE | REFUSED],
    "values without a sweep": [["seed=1,2"], REFUSED],
    "a sweep of nothing": [["-m", "method=glob(zzz*)"], REFUSED],
    "a sweep with a wrong last value": [["-m", "seed=1,2,x"], REFUSED],
    "a sweep of unknown methods": [["-m", "method=prompt_lookup,nope"], REFUSED],
    "a sweep without a name": [["sweep=nope"], REFUSED],
    "no such cluster": [["-m", "seed=1,2", "cluster=nope"], REFUSED],
    "resume in an unknown way": [["-m", "seed=1,2", "resume=maybe"], REFUSED],
    "arms of nothing": [["arms=[]"], REFUSED],
    "arms unknown": [["arms=[prompt_lookup,nope]"], REFUSED],
    "a huge draft": [["method.gamma=100000"], REFUSED],
}


@pytest.mark.parametrize(("words", "codes"), flat(WORDS))
def test_words(words: list[str], codes: frozenset[int], shell: Shell) -> None:
    check(shell.run([*RANDOM, *words]), codes)


# -------------------------------------------------------------------------------------------------------- prompts

READABLE = {
    "good.jsonl", "two_keys.jsonl", "crlf.jsonl", "bom.jsonl", "controls.jsonl", "markup.jsonl", "unicode.jsonl",
    "cut.jsonl", "category_int.jsonl", "big_int.jsonl",
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str, shell: Shell) -> None:
    words = [*RANDOM, "dataset=jsonl", f"dataset.path=in/{name}", "dataset.limit=null"]
    codes = REFUSED | DONE if name in READABLE - {"good.jsonl"} else DONE if name == "good.jsonl" else REFUSED
    ended = shell.run(words)
    check(ended, codes)
    assert "\x1b[31m" not in ended.said


@pytest.mark.parametrize(
    "name", ["nowhere.jsonl", "folder.jsonl", "pipe.jsonl", "dangling", "loop", "a_file/x.jsonl", "../in"]
)
def test_prompt_files_that_are_none(name: str, shell: Shell) -> None:
    check(shell.run([*RANDOM, "dataset=jsonl", f"dataset.path=in/{name}", "dataset.limit=null"]), REFUSED)


@pytest.mark.parametrize("name", ["reference_int.jsonl", "reference_nan.jsonl", "reference_object.jsonl"])
@pytest.mark.parametrize("scorer", ["nq", "rouge", "gsm8k"])
def test_references(name: str, scorer: str, shell: Shell) -> None:
    words = [*RANDOM, "dataset=jsonl", f"dataset.path=in/{name}", f"dataset.scorer={scorer}", "dataset.limit=null"]
    check(shell.run(words), REFUSED)


# --------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", MODELS)
def test_model_folders(name: str, shell: Shell) -> None:
    words = [*RANDOM, "model=hf", f"model.name={shell.folder.resolve()}/in/models/{name}"]
    codes = REFUSED | DONE if name in ("template_unknown", "tokenizer_gone") else REFUSED
    check(shell.run(words), codes)
    assert not (shell.folder / MARKER).exists()


@pytest.mark.parametrize("name", ["nowhere", "a_file", "dangling", "loop", "models", "checkpoints/empty"])
def test_models_that_are_none(name: str, shell: Shell) -> None:
    check(shell.run([*RANDOM, "model=hf", f"model.name={shell.folder.resolve()}/in/{name}"]), REFUSED)


@pytest.mark.parametrize("method", ["eagle", "medusa", "hydra_heads", "dflash", "calm"])
@pytest.mark.parametrize("name", [*(f"checkpoints/{name}" for name in CHECKPOINTS), "a_file", "nowhere", "/etc/passwd"])
def test_checkpoints(method: str, name: str, shell: Shell) -> None:
    place = name if name.startswith("/") else f"in/{name}"
    words = [*RANDOM, f"method={method}", f"method.checkpoint={place}"]
    check(shell.run(words), REFUSED)
    assert not (shell.folder / MARKER).exists()


# --------------------------------------------------------------------------------------------------------- places

PLACES = ["in/a_file", "in/a_file/x", "in/dangling", "in/loop", "/proc/nope", "/etc/passwd", "/dev/null/x", "x" * 300]
ENVIRONMENTS = {
    "home that is a file": {"DECODEBENCH_HOME": "/etc/passwd"},
    "home that is nowhere": {"DECODEBENCH_HOME": "/proc/nope"},
}


@pytest.mark.parametrize("place", PLACES)
def test_results(place: str, shell: Shell) -> None:
    check(shell.run([*RANDOM, f"paths.results={place}"]), REFUSED)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments(name: str, shell: Shell) -> None:
    words = [word for word in RANDOM if not word.startswith("paths.results")]
    check(shell.run(words, ENVIRONMENTS[name]), REFUSED)


@pytest.mark.parametrize("command", ["collect", "report", "frontier"])
@pytest.mark.parametrize("place", PLACES)
def test_results_that_are_read(command: str, place: str, shell: Shell) -> None:
    check(shell.run([command, f"paths.results={place}"]), REFUSED)


@pytest.mark.parametrize(
    ("command", "ending"), [("collect", "csv"), ("collect", "parquet"), ("report", "html"), ("frontier", "md")]
)
@pytest.mark.parametrize("place", ["in/folder", "in/a_file/x", "/proc/x", "/dev/null/x", "in/loop/x"])
def test_outputs(command: str, ending: str, place: str, shell: Shell) -> None:
    (shell.folder / "empty").mkdir()
    check(shell.run([command, "paths.results=empty", f"out={place}.{ending}"]), REFUSED)


def test_a_report_makes_its_folder(shell: Shell) -> None:
    (shell.folder / "empty").mkdir()
    check(shell.run(["report", "paths.results=empty", "out=new/deep/page.html"]), frozenset({0}))
    assert (shell.folder / "new/deep/page.html").is_file()


@pytest.mark.parametrize("command", ["validate", "pack", "condense", "compare", "track"])
@pytest.mark.parametrize("place", ["nowhere", "in/a_file", "in/dangling", "in/models", "x" * 300])
def test_commands_over_records(command: str, place: str, shell: Shell) -> None:
    words = [command, place, *([place] if command == "compare" else [])]
    check(shell.run(words), REFUSED | frozenset({0}) if place == "in/models" else REFUSED)


# ------------------------------------------------------------------------------------------------------- training

TRAININGS: dict[str, list[Any]] = {
    "no method": [[], REFUSED],
    "unknown": [["method=nope"], REFUSED],
    "nothing to train": [["method=suffix"], REFUSED],
    "out is a file": [["method=medusa", "out=in/a_file"], REFUSED],
    "out below a file": [["method=medusa", "out=/etc/passwd/x"], REFUSED],
    "half a character": [["method=medusa", "corpus=in/surrogate.jsonl"], REFUSED],
    "no answers": [["method=medusa", "corpus=in/good.jsonl", "train.recipe.steps=2"], REFUSED | frozenset({0})],
    "no such corpus": [["method=medusa", "corpus=nope"], REFUSED],
    "a folder": [["method=medusa", "corpus=in/folder.jsonl"], REFUSED],
    "no dialogue": [["method=medusa", "corpus=in/empty.jsonl"], REFUSED],
    "limit": [["method=medusa", "corpus_limit=0"], REFUSED],
    "seed": [["method=medusa", f"seed={10**30}"], REFUSED],
    "setting": [["method=medusa", "train.nope=1"], REFUSED],
    "steps": [["method=medusa", "train.recipe.steps=-1"], REFUSED],
}


@pytest.mark.parametrize(("words", "codes"), flat(TRAININGS))
def test_trainings(words: list[str], codes: frozenset[int], shell: Shell) -> None:
    own = [] if any(word.startswith("out=") for word in words) else ["out=made"]
    check(shell.run(["train", "model=random", "hardware=cpu_fp32", *words, *own]), codes)


def test_one_dialogue(shell: Shell) -> None:
    Path(shell.folder / "one.jsonl").write_text('{"prompt": "a b c", "answer": "d e f"}\n')
    words = ["train", "method=medusa", "model=random", "hardware=cpu_fp32", "corpus=one.jsonl", "out=made"]
    check(shell.run([*words, "train.recipe.steps=2"]), REFUSED | DONE)
