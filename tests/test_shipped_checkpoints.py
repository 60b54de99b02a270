"""The parts that come with the project are whole, say how they were made, and draft for the model they belong to."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config import compose, identity, instantiate
from bench.config.schema import PathsConfig, SamplingConfig
from bench.contract import checks
from bench.models import artifacts, loading
from bench.utils.files import digest
from methods.autoregressive import Autoregressive
from methods.base_models.translation import MOST_MEMORY
from methods.decoder import Guarantee, generate
from methods.engine.sampling import Sampling

FOLDER = Path(__file__).parents[1] / "data" / "checkpoints"
PARTS = sorted(card.parent for card in FOLDER.glob(f"*/{artifacts.CARD}"))
MOST_BYTES = 17_000_000
EXITS = ("calm", "static_depth", "free", "hash_ee")
STUDENTS = ("nat", "glat", "depa", "cmlm", "ctc", "flowseq")
SENTENCE = "A man is sleeping on a bench."


def ids(folder: Path) -> str:
    return folder.name


def learnt_references(folder: Path) -> bool:
    """Whether it is a translation model that learnt references; against a teacher's texts BLEU is another figure."""
    train = (artifacts.read_card(folder) or {})["definition"]["train"]
    return "teacher" in folder.name.split("-")[0] and train.get("data", "raw") == "raw"


def test_every_folder_holds_a_finished_part() -> None:
    assert PARTS and {folder.name for folder in FOLDER.iterdir() if folder.is_dir()} == {p.name for p in PARTS}


@pytest.mark.parametrize("folder", PARTS, ids=ids)
def test_a_part_is_what_its_card_says(folder: Path) -> None:
    card = artifacts.read_card(folder) or {}
    files = artifacts.files(folder)
    assert card["sha256"] == digest(files)
    assert card["bytes"] == {name: path.stat().st_size for name, path in files.items()}
    assert sum(card["bytes"].values()) < MOST_BYTES
    method, model = card["definition"]["method"], card["model"]["name"]
    assert folder.name == f"{method}-{model}" and f"method={method}" in card["command"]
    checked = card["acceptance_check"]
    assert len(checked["prompts"]) == 5 and checked["dtype"] == "float32", "python -m bench train check FOLDER"
    assert card["git"]["dirty"] is False and card["seconds"] > 0 and card["corpus"]["dialogues"] > 0


@pytest.mark.parametrize("folder", PARTS, ids=ids)
def test_a_part_is_remade_by_its_command_and_the_configuration_of_today(folder: Path) -> None:
    card = artifacts.read_card(folder) or {}
    words = [word for word in shlex.split(card["command"]) if word.startswith(("model=", "train."))]
    _, train = compose.compose_training(words, card["definition"]["method"])
    today = {"_target_": train["_target_"], **instantiate.arguments(train, compose.TRAIN)}
    again = card["definition"] | {"train": today}
    assert identity.definition_sha256(again) == identity.definition_sha256(card["definition"]), "made of other settings"


@pytest.mark.parametrize("folder", PARTS, ids=ids)
def test_no_part_names_a_path_of_the_machine_it_was_made_on(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl"):
            assert not re.search(r'"/\w+/', path.read_text()), path.name


@pytest.fixture(scope="module")
def loaded(smollm2_dir: Path, cache_root: Path) -> Any:
    hardware = {"device": "cpu", "dtype": "float32", "threads": 1}
    return loading.load({"name": "smollm2"}, hardware, PathsConfig(cache=str(cache_root)))


def decoder_of(folder: Path, loaded: Any, cache_root: Path, *words: str) -> Any:
    name = f"method={folder.name.removesuffix('-smollm2')}"
    method = dict(compose.compose([name, "dataset=demo", *words]).method)
    part = artifacts.find(method, "smollm2", loaded.revision, PathsConfig(cache=str(cache_root)))
    assert part is not None and part.origin == "shipped" and part.warning is None
    return instantiate.build_decoder(method, loaded.lm, SamplingConfig(), checkpoint=part.folder)


def prompt_of(loaded: Any) -> torch.Tensor:
    message = {"role": "user", "content": "Write two sentences about the sea."}
    read = loaded.tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return torch.as_tensor(read["input_ids"][0])


@pytest.fixture(scope="module")
def own_text(loaded: Any) -> list[list[int]]:
    """The target's own continuation."""
    return generate(Autoregressive(loaded.lm, Sampling()), [prompt_of(loaded)], 32)


@pytest.mark.parametrize(
    "folder", [p for p in PARTS if p.name.endswith("-smollm2") and not p.name.startswith(EXITS)], ids=ids
)
def test_a_part_drafts_and_the_text_stays_the_targets(
    folder: Path, loaded: Any, own_text: list[list[int]], cache_root: Path
) -> None:
    decoder, accepted = decoder_of(folder, loaded, cache_root), []
    assert decoder.guarantee is Guarantee.EXACT
    text = generate(decoder, [prompt_of(loaded)], 32, watch=lambda step, _: accepted.append(step.accepted[0]))
    assert text == own_text and sum(accepted) > 0


@pytest.mark.parametrize("folder", [p for p in PARTS if p.name in {f"{kind}-smollm2" for kind in EXITS}], ids=ids)
def test_tokens_leave_by_the_exits(folder: Path, loaded: Any, cache_root: Path) -> None:
    words = ["method.threshold=0.3"] if folder.name.startswith("free") else []  # its exit is early, and seldom sure
    decoder, prompt = decoder_of(folder, loaded, cache_root, *words), prompt_of(loaded)
    assert decoder.guarantee is Guarantee.RELAXED
    decode = decoder.decode([prompt], 24, torch.Generator())
    layers = [step.layers[0] for step, _ in zip(decode, range(24), strict=False)]
    assert min(layers) < 1 and max(layers) <= 1


def translator(name: str, cache_root: Path) -> Any:
    model = compose.compose([f"model={name}", "dataset=multi30k"]).model
    return loading.load(model, {"device": "cpu", "dtype": "float32", "threads": 1}, PathsConfig(cache=str(cache_root)))


def written_by(decoder: Any, loaded: Any) -> str:
    source = torch.tensor(loaded.tokenizer(SENTENCE)["input_ids"])
    (written,) = checks.outputs(decoder, [source], 16)
    return str(loaded.tokenizer.decode(written, skip_special_tokens=True))


@pytest.mark.parametrize("folder", [p for p in PARTS if learnt_references(p)], ids=ids)
def test_a_teacher_has_not_memorised_its_training_pairs(folder: Path) -> None:
    """Its students would learn the references again."""
    facts = (artifacts.read_card(folder) or {})["facts"]
    assert facts["train_bleu_greedy"] <= facts["validation_bleu_greedy"] + MOST_MEMORY
    assert facts["memorised"] is False


@pytest.mark.parametrize("folder", [p for p in PARTS if p.name.startswith("teacher-")], ids=ids)
def test_a_model_translates(folder: Path, cache_root: Path) -> None:
    loaded = translator(folder.name.removeprefix("teacher-"), cache_root)
    text = written_by(Autoregressive(loaded.lm, Sampling()), loaded)
    assert "Mann" in text and "schläft" in text and "Bank" in text


@pytest.mark.parametrize("folder", [p for p in PARTS if p.name.split("-")[0] in STUDENTS], ids=ids)
def test_a_student_translates(folder: Path, cache_root: Path) -> None:
    name, model = folder.name.split("-")
    loaded = translator(model, cache_root)
    method = dict(compose.compose([f"method={name}", f"model={model}", "dataset=multi30k"]).method)
    part = artifacts.find(method, model, loaded.revision, PathsConfig(cache=str(cache_root)))
    assert part is not None and part.origin == "shipped" and part.warning is None
    text = written_by(instantiate.build_decoder(method, loaded.lm, SamplingConfig(), checkpoint=part.folder), loaded)
    assert "Mann" in text and "Bank" in text
