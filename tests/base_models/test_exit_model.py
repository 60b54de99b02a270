"""Causal models that are trained on to be left early, as a difference of their weights."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench.config import compose
from bench.config.schema import PathsConfig
from bench.contract import checks
from bench.errors import UserError
from bench.measure import acceptance_check
from bench.models import adapted, artifacts, loading
from bench.models.adapted import AdaptedModel
from bench.models.embedded import EmbeddedModel
from bench.train import command, publish
from methods.autoregressive import Autoregressive
from methods.base_models.exit_model import ExitModelConfig, ExitModelTraining, Texts, judged
from methods.early_exit.calm import Calm
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import load_tensors
from methods.engine.low_rank import NAMES, LowRank
from methods.engine.sampling import Sampling
from methods.speculative.self_speculative.decoder import SelfSpeculative
from methods.training import trainer
from methods.training.answers import AnswerRecipe, Answers, own_answers
from methods.training.features import Features
from methods.training.interface import Example
from methods.training.layer_losses import collected
from tests.base_models.test_translation import context
from tests.helpers.interruptions import interrupted_at

GREEDY = Sampling()
ANSWERS = AnswerRecipe(tokens=800, limit=16)
SHORT = ExitModelConfig(steps=40, tokens=300, learning_rate=1e-2, evaluations=2, precision="float32")
HARDWARE = {"device": "cpu", "dtype": "float32", "threads": 1}


def examples(count: int = 60) -> list[Example]:
    lengths = [5 + number % 7 for number in range(count)]
    return [Example(prompt.tolist(), []) for prompt in checks.prompts(61, lengths)]


@pytest.fixture(scope="module")
def table() -> CausalLM:
    """A model that learnt one successor for each token at its end, and another one after two layers."""
    network: Any = checks.tiny_target().hf
    network.float().apply(lambda m: m.reset_parameters() if isinstance(m, torch.nn.Linear | torch.nn.Embedding) else m)
    torch.manual_seed(0)
    late, early = torch.randperm(61), torch.randperm(61)
    optimizer = torch.optim.AdamW(network.parameters(), 5e-3)
    for _ in range(80):
        ids = torch.randint(61, (32, 8))
        with collected(network.model.layers) as states:
            last = network(ids).logits.flatten(0, 1)
        exit = network.lm_head(network.model.norm(states[1])).flatten(0, 1)
        (F.cross_entropy(last, late[ids].flatten()) + F.cross_entropy(exit, early[ids].flatten())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return CausalLM.from_hf(network.requires_grad_(False), keep_hf=True)


@pytest.fixture(scope="module")
def made(table: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("made")
    making = ExitModelTraining(rank=8, dropout=0.1, scale=1.0, interval=2, answers=ANSWERS, recipe=SHORT)
    return folder, making.fit(context(folder, model=table, examples=examples()))


@pytest.fixture
def dialogues(tmp_path: Path) -> Features:
    rows = [Example([4, 5, 6], [7, 8, 9, 10]), Example([11, 12], [13, 14, 15]), Example([16], [17, 18])]
    return Features(Answers(tuple(rows), tmp_path, "x"))


# --------------------------------------------------------------------------------------------------------------- loss


def drawn(network: Any, rank: int = 3) -> LowRank:
    """A difference that changes the network."""
    torch.manual_seed(5)
    found = LowRank.begin(network, rank)
    with torch.no_grad():
        for up in found.up:
            up.normal_(std=0.05)
    return found


@pytest.mark.parametrize("distillation", [0.0, 0.3])
def test_the_loss_is_the_weighted_mean_over_the_exits_of_a_step(distillation: float, dialogues: Features) -> None:
    """In step 1 of interval 2 exits 2 and 4 learn, and layer 4 of 4 is the last one: e(1) = 0.5, e(3) = 3 + 1.5."""
    target = checks.tiny_target()
    network: Any = copy.deepcopy(target.hf).requires_grad_(False)
    difference = drawn(network)
    making = ExitModelTraining(rank=3, dropout=0.0, scale=0.5, interval=2, distillation=distillation)
    found, seen = making.loss(target, network, difference)((Texts.of(dialogues, [0, 1], target.device), 1), 0)

    whole: Any = copy.deepcopy(target.hf)
    with torch.no_grad():
        for name, down, up in zip(difference.maps, difference.down, difference.up, strict=True):
            whole.model.layers.get_submodule(name).weight += up.T @ down
        losses: dict[int, list[torch.Tensor]] = {2: [], 4: []}
        for row in dialogues.answers.rows[:2]:
            states = whole(torch.tensor([row.prompt + row.answer]), output_hidden_states=True).hidden_states
            last = whole.lm_head(states[4]).log_softmax(-1)[0, len(row.prompt) - 1 : -1]
            early = whole.lm_head(whole.model.norm(states[2])).log_softmax(-1)[0, len(row.prompt) - 1 : -1]
            right = F.one_hot(torch.tensor(row.answer), 61).double()
            losses[4].append(-(right * last).sum(-1))
            losses[2].append(-(((1 - distillation) * right + distillation * last.exp()) * early).sum(-1))
        each = {depth: torch.cat(parts).mean() for depth, parts in losses.items()}
    torch.testing.assert_close(found.detach(), (0.5 * each[2] + 4.5 * each[4]) / 5)
    assert float(seen["loss_whole"]) == pytest.approx(float(each[4])) and seen["tokens"] == 7
    found.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in difference.parameters())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_layers_are_dropped_while_it_learns_and_never_when_it_is_judged(dialogues: Features) -> None:
    target = checks.tiny_target()
    network: Any = copy.deepcopy(target.hf)
    runs: list[int] = []
    for layer in network.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, output: runs.append(len(output)))
    making = ExitModelTraining(rank=3, dropout=0.9)
    loss = making.loss(target, network, LowRank.begin(network, 3))
    torch.manual_seed(0)
    for step in range(4):
        loss((Texts.of(dialogues, [0, 1], target.device), step), 0)
    assert sum(runs) < 4 * 4 * 2
    runs.clear()
    judged(target, network, dialogues, 100)
    assert runs == [len(dialogues.held_out)] * 4


# ----------------------------------------------------------------------------------------------------------- training


def test_exits_learn_to_agree_with_the_last_layer(made: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = made
    before, after = facts["before"], facts["after"]
    for depth in ("2", "3"):
        assert after["exits"][depth]["agreement"] > before["exits"][depth]["agreement"] + 0.1
    assert before["keeps"] == 1.0 and 0.5 < after["keeps"] <= 1.0, "the answers are its own greedy ones"
    assert set(before["exits"]) == {"1", "2", "3"} and before["places"] == after["places"]
    assert 0.5 * 40 * 300 < facts["tokens_read"] <= 40 * 300
    assert facts["curve"][-1]["loss_2"] < facts["curve"][0]["loss_2"] and facts["parameters"] == 4 * 8 * 512
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == sorted(NAMES)
    assert facts["difference_bytes"] == (folder / NAMES[0]).stat().st_size < 4 * 8 * 512 + 20_000


def test_facts_are_those_of_transformers(table: CausalLM, made: tuple[Path, dict[str, Any]]) -> None:
    """Loss and agreement of the network with B A added, over the held-out answers."""
    folder, facts = made
    network: Any = copy.deepcopy(table.hf)
    LowRank.load(folder, network).add_to(network)
    found = Features(own_answers(context(folder, model=table, examples=examples()), ANSWERS))
    losses, agrees = [], []
    with torch.no_grad():
        for row in (found.answers.rows[place] for place in found.held_out):
            ids = torch.tensor([row.prompt + row.answer])
            states = network(ids, output_hidden_states=True).hidden_states
            last, early = network.lm_head(states[4]), network.lm_head(network.model.norm(states[3]))
            places = slice(len(row.prompt) - 1, -1)
            losses.append(F.cross_entropy(last[0, places], torch.tensor(row.answer), reduction="none"))
            agrees.append(last[0, places].argmax(-1) == early[0, places].argmax(-1))
    assert facts["after"]["loss"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-4)
    assert facts["after"]["exits"]["3"]["agreement"] == pytest.approx(
        float(torch.cat(agrees).double().mean()), abs=1e-4
    )


def test_an_interrupted_training_ends_like_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = ExitModelTraining(rank=2, dropout=0.5, answers=ANSWERS, recipe=replace(SHORT, steps=8))
    whole, broken = (
        context(tmp_path / name, model=checks.tiny_target(), examples=examples()) for name in ("whole", "broken")
    )
    making.fit(whole)
    interrupted_at(5, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        making.fit(broken)
    making.fit(broken)
    ours, theirs = (load_tensors(shop.output / NAMES[0]) for shop in (whole, broken))
    assert len(ours) == 2 * 4 * 7 and all(tensor.equal(theirs[key]) for key, tensor in ours.items())
    assert not (broken.output / trainer.STATE).exists()


# --------------------------------------------------------------------------------------------------------- difference


def test_a_loaded_difference_has_the_logits_of_the_trained_network(tmp_path: Path) -> None:
    """Of the difference as it is stored; 8 bits move the logits of the trained one by little."""
    base: Any = checks.tiny_target().hf
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    trained = drawn(base)
    trained.save(tmp_path, base)
    stored = LowRank.load(tmp_path, base)
    with torch.no_grad():
        frozen = base(ids).logits
        with trained.beside(base):
            first = base(ids).logits
        with stored.beside(base):
            wanted = base(ids).logits
        assert base(ids).logits.equal(frozen), "the network is as before"
        stored.add_to(base)
        found = base(ids).logits
    torch.testing.assert_close(found, wanted)
    assert float((found - first).norm()) < 0.05 * float((first - frozen).norm())


def test_some_matrices_alone_can_be_trained() -> None:
    network: Any = checks.tiny_target(layers=2).hf
    found = LowRank.begin(network, 2, ["q_proj", "down_proj"])
    names = [f"{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")]
    assert list(found.maps) == names and [tuple(down.shape) for down in found.down] == [(2, 32), (2, 64)] * 2
    for wrong in (["qproj"], []):
        with pytest.raises(ValueError, match=r"matrices must be some of q_proj, k_proj, .*, got \["):
            LowRank.begin(network, 2, wrong)
    for rank in (0, 17):
        with pytest.raises(ValueError, match=f"rank must be from 1 to 16, .*, got {rank}. Set train.rank."):
            LowRank.begin(network, rank)


def test_a_difference_of_other_sizes_is_refused(tmp_path: Path) -> None:
    network: Any = checks.tiny_target(layers=2).hf
    LowRank.begin(network, 2).save(tmp_path, network)
    with pytest.raises(ValueError, match=r"must be of a model with .*'layers': 2.*, got one with .*'layers': 3"):
        LowRank.load(tmp_path, checks.tiny_target(layers=3).hf)
    config = json.loads((tmp_path / NAMES[1]).read_text())
    (tmp_path / NAMES[1]).write_text(json.dumps(config | {"rank": 3}))
    with pytest.raises(
        ValueError, match=r"must be those that are announced beside them, .*down \(3, 32\).*got .*\(2, 32\)"
    ):
        LowRank.load(tmp_path, network)
    (tmp_path / NAMES[0]).unlink()
    with pytest.raises(ValueError, match="must hold difference.json and difference.safetensors"):
        LowRank.load(tmp_path, network)


def test_numbers_out_of_range_are_refused() -> None:
    for wrong, message in (
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must be from 0 to below 1, got 1.0"),
        ({"scale": -0.1}, "scale must be from 0 to 1, got -0.1"),
        ({"distillation": 2.0}, "distillation must be from 0 to 1, got 2.0"),
        ({"interval": 0}, "interval must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ExitModelTraining(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        ExitModelConfig(tokens=0)


# ------------------------------------------------------------------------------------------------- train, load, decode


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Folder of a difference that the command made, its cache, and the command."""
    cache = tmp_path_factory.mktemp("cache")
    file = cache / "own.jsonl"
    rows = [{"prompt": f"Say {number}.", "answer": "It is."} for number in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["method=exit_model", "model=random", f"corpus={file}", "hardware=cpu_fp32", "hardware.threads=1"]
    words += ["train.recipe.steps=3", "train.recipe.tokens=300", "train.recipe.evaluations=1", f"paths.cache={cache}"]
    words += ["train.answers.limit=16", "train.answers.tokens=60"]
    assert command.main(words) == 0
    return cache / "trained" / "exit_model-random", cache, words


def group(folder: Path | None, base: str | dict[str, Any] = "random") -> dict[str, Any]:
    target = "bench.models.adapted.AdaptedModel"
    return {"name": "random_layerskip", "_target_": target, "base": base, "folder": folder and str(folder)}


def test_the_command_makes_a_model_that_exits_and_drafts_for_itself(trained: tuple[Path, Path, list[str]]) -> None:
    folder, cache, _ = trained
    card = artifacts.read_card(folder) or {}
    assert card["model"] == {"name": "random", "revision": "seed 0", "sha256": None}
    assert card["bytes"][NAMES[0]] == card["facts"]["difference_bytes"] and card["facts"]["steps"] == 3
    loaded = loading.load(group(None), HARDWARE, PathsConfig(cache=str(cache)))
    base = loading.load({"name": "random"}, HARDWARE, PathsConfig(cache=str(cache)))
    prompts = [torch.tensor(list(range(60, 60 + n))) for n in (5, 9)]
    assert loaded.revision != base.revision and loaded.kind == "causal"
    assert not loaded.lm.score(prompts[0]).equal(base.lm.score(prompts[0]))
    text = checks.outputs(Autoregressive(loaded.lm, GREEDY), prompts, 12)
    for decoder in (
        Calm(loaded.lm, GREEDY, 0.05, exits=[1, 2, 3], head="lens", accept="verify"),
        SelfSpeculative(loaded.lm, GREEDY, layer_exit=2),
    ):
        assert checks.outputs(decoder, prompts, 12) == text


def test_its_card_is_checked_like_others(
    trained: tuple[Path, Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cache, words = trained
    entry = (artifacts.read_card(folder) or {})[acceptance_check.ENTRY]
    assert len(entry["texts"]) == 5 and entry["similarity"] == 1.0
    assert publish.main([str(folder)]) == 0
    assert "likeness 1.00 to the target's texts" in capsys.readouterr().out
    other = {"name": str(folder), "_target_": adapted.__name__ + ".AdaptedModel", "base": "random"}
    assert acceptance_check.model_of(folder, artifacts.read_card(folder) or {}) == other | {"folder": str(folder)}
    assert command.main(words) == 0
    assert "is already there" in capsys.readouterr().out
    assert command.main([*words, "publish=int8"]) == 2
    assert "stores its weights in 8 bits by itself. Leave out publish=." in capsys.readouterr().err


def test_another_base_or_no_folder_is_refused(trained: tuple[Path, Path, list[str]], tmp_path: Path) -> None:
    folder, cache, _ = trained
    paths = PathsConfig(cache=str(cache))
    with pytest.raises(
        UserError, match=r"added to model random, revision seed 0, got random, revision seed 1\. Choose"
    ):
        loading.load(group(folder, {"name": "random", "seed": 1}), HARDWARE, paths)
    with pytest.raises(UserError, match=r"must be of a model with .*'layers': 4.*got one with .*'layers': 2"):
        loading.load(group(folder, {"name": "random", "layers": 2}), HARDWARE, paths)
    missing = "is not made yet: .* must hold the difference that python -m bench train method=exit_model model=random"
    with pytest.raises(UserError, match=missing):
        loading.load(group(tmp_path), HARDWARE, paths)
    with pytest.raises(UserError, match=missing):
        loading.load(group(None), HARDWARE, PathsConfig(cache=str(tmp_path)))


def test_a_translation_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["method=exit_model", "model=multi30k_4_4", "corpus=shakespeare", f"paths.cache={tmp_path}"]
    assert command.main([*words, "hardware=cpu_fp32"]) == 2
    message = "method=exit_model trains a decoder-only model that writes from left to right, got multi30k_4_4. Set"
    assert message in capsys.readouterr().err


def test_the_model_group_of_the_project_is_of_smollm2() -> None:
    model = compose.compose(["model=smollm2_layerskip"]).model
    assert {key: model[key] for key in ("name", "base", "folder")} == {
        "name": "smollm2_layerskip", "base": "smollm2", "folder": None,
    }  # fmt: skip
    assert ExitModelTraining().model_name("smollm2") == model["name"]
    assert isinstance(AdaptedModel("x", "smollm2").source, EmbeddedModel)
