"""Whole models that are trained to be left early: the losses, the character model, the teacher."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from bench.config.schema import PathsConfig
from bench.contract import checks
from bench.errors import UserError
from bench.models import loading
from bench.tasks import corpus
from bench.train import command
from methods.autoregressive import Autoregressive
from methods.base_models import bpe, characters, translation
from methods.base_models.characters import CharacterModel, overlap
from methods.base_models.translation import ExitTeacherTraining
from methods.early_exit.calm import Calm
from methods.early_exit.hash_ee import HashEE
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.training import trainer
from methods.training.exit_quality import quality
from methods.training.layer_losses import (
    CalmLoss,
    FreeLoss,
    LayerSkipLoss,
    collected,
    drop_rates,
    dropped,
    frozen_from,
    make_loss,
)
from methods.training.trainer import TrainingConfig
from methods.training.translation import batches
from tests.base_models.test_translation import BRIEF, PAIRS, SMALL, context
from tests.helpers.interruptions import interrupted_at

GREEDY = Sampling()


def layers(count: int = 6, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 3, generator=generator).requires_grad_() for _ in range(count)]


# ------------------------------------------------------------------------------------------------------------- losses


def test_calm_weighs_layers_by_their_depth() -> None:
    states = layers(3)
    loss, parts = CalmLoss()(states, lambda state: state.square().mean())
    each = [float(state.detach().square().mean()) for state in states]
    assert float(loss.detach()) == pytest.approx((1 * each[0] + 2 * each[1] + 3 * each[2]) / 6)
    assert [float(part) for part in parts.values()] == pytest.approx(each)


def test_free_trains_two_exits_and_draws_shallow_layers_towards_deep_ones() -> None:
    states = layers(6)
    loss, parts = FreeLoss(2, 0.5, "uniform")(states, lambda state: state.square().mean())
    with torch.no_grad():
        two = (2 * states[1].square().mean() + 6 * states[5].square().mean()) / 8
        pairs = [(states[0], states[2]), (states[1], states[5])]
        distance = sum((low - high).square().mean() / high.square().mean() for low, high in pairs) / 2
    torch.testing.assert_close(loss.detach(), two + 0.5 * distance)
    loss.backward()
    assert states[2].grad is None and states[4].grad is None, "who teaches learns nothing"
    assert states[0].grad is not None and set(parts) == {"loss_shallow", "loss_deep", "distillation"}


def test_dynamic_pairs_go_down_and_none_is_used_twice() -> None:
    """Teachers of 8 layers and k = 4 are layers 2, 4, 6, 8; from the last down, each the nearest one below."""
    states = [torch.full((2, 2), value) for value in (5.0, 3.0, 0.9, 9.0, 0.0, 3.1, 0.0, 1.0)]
    # layer 8 (1.0) takes 3 (0.9); 6 (3.1) takes 2 (3.0); 4 (9.0) takes 1 (5.0), the only one left; 2 goes without
    wanted = ((0.1 / 1.0) ** 2 + (0.1 / 3.1) ** 2 + (4.0 / 9.0) ** 2) / 3
    uniform = ((2.0 / 3.0) ** 2 + (6.0 / 9.0) ** 2 + (2.2 / 3.1) ** 2 + (8.0 / 1.0) ** 2) / 4
    assert float(FreeLoss(4).distance(states)) == pytest.approx(wanted, rel=1e-4)
    assert float(FreeLoss(4, pairing="uniform").distance(states)) == pytest.approx(uniform, rel=1e-4)


def test_the_scale_of_all_states_does_not_matter_to_their_distance() -> None:
    states = layers(6)
    larger = [17 * state for state in states]
    torch.testing.assert_close(FreeLoss(2).distance(larger), FreeLoss(2).distance(states))


def test_a_loss_that_cannot_be_is_refused() -> None:
    assert make_loss("free", 8) == FreeLoss(2) and isinstance(make_loss("calm", 8), CalmLoss)
    for shallow in (8, 0):
        with pytest.raises(ValueError, match=f"shallow must be from 1 to 7 for 8 layers, got {shallow}"):
            make_loss("free", 8, shallow)
    with pytest.raises(ValueError, match="distillation must be at least 0, got -1"):
        make_loss("free", 8, distillation=-1.0)


def test_weights_of_layerskip_grow_with_the_depth_and_exits_take_turns() -> None:
    """L = 6, s = 0.5: e(l) = 0, 0.5, 1.5, 3, 5 before the last layer, which has 5 + 0.5 (0 + 1 + 2 + 3 + 4) = 10."""
    loss = LayerSkipLoss(6, 0.5, interval=2)
    assert loss.weights(0, 0.0) == pytest.approx({3: 1.5 / 16.5, 5: 5 / 16.5, 6: 10 / 16.5})
    assert loss.weights(1, 0.0) == pytest.approx({2: 0.5 / 13.5, 4: 3 / 13.5, 6: 10 / 13.5})
    assert loss.weights(7, 0.9) == loss.weights(1, 0.0), "the share of the training does not matter"
    assert LayerSkipLoss(6, 0.0).weights(3, 0.5) == {6: 1.0} and LayerSkipLoss(1).weights(0, 0.0) == {1: 1.0}


def test_the_gradual_curriculum_goes_from_the_last_exit_to_the_first() -> None:
    """One exit more after each twelfth of the training of six layers, so that all learn after half of it."""
    loss = LayerSkipLoss(6, 0.5, "gradual")
    assert loss.weights(0, 0.0) == {6: 1.0}
    assert loss.weights(5, 1.01 / 12) == pytest.approx({5: 5 / 15, 6: 10 / 15})
    assert set(loss.weights(6, 2.01 / 12)) == {4, 5, 6}
    assert set(loss.weights(9, 0.5)) == set(loss.weights(9, 1.0)) == {2, 3, 4, 5, 6}, "the first has no weight"
    with pytest.raises(ValueError, match="scale must be from 0 to 1, got 1.5"):
        LayerSkipLoss(6, 1.5)
    with pytest.raises(ValueError, match="interval must be at least 1, got 0"):
        LayerSkipLoss(6, interval=0)


def test_the_rate_of_dropped_layers_grows_exponentially() -> None:
    assert drop_rates(5, 0.2) == pytest.approx([0.2 * (2 ** (layer / 4) - 1) for layer in range(5)])
    assert drop_rates(5, 0.2)[0] == 0 and drop_rates(5, 0.2)[4] == pytest.approx(0.2) and drop_rates(1, 0.2) == [0]


def test_a_dropped_layer_does_not_run() -> None:
    model: Any = checks.tiny_target(layers=3).hf
    ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
    runs: list[int] = []
    handles = [layer.mlp.register_forward_hook(lambda m, g, o: runs.append(len(o))) for layer in model.model.layers]
    with torch.no_grad(), dropped(model.model.layers, [0.0, 1.0, 0.0]), collected(model.model.layers) as states:
        model(ids)
    assert runs == [2, 2] and states[1].equal(states[0]) and not states[2].equal(states[1])
    with torch.no_grad(), collected(model.model.layers) as whole:
        model(ids)
    assert runs == [2] * 5 and not whole[1].equal(whole[0]), "after the block every layer runs"
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_each_row_leaves_out_its_own_layers(attention: str) -> None:
    """A row of a batch has the states of the same row alone, without the layers that were drawn for it."""
    model: Any = checks.tiny_target(layers=4).hf
    model.set_attn_implementation(attention)  # eager: layers are given a mask
    ids = torch.tensor([[4, 5, 6], [7, 8, 9], [10, 11, 12]])
    torch.manual_seed(3)
    draws = torch.stack([torch.rand(3) for _ in range(4)])
    torch.manual_seed(3)
    with torch.no_grad(), dropped(model.model.layers, [0.5] * 4), collected(model.model.layers) as states:
        model(ids)
    assert 0 < int((draws < 0.5).sum()) < 12
    for row in range(3):
        alone = [1.0 if draw < 0.5 else 0.0 for draw in draws[:, row].tolist()]
        with torch.no_grad(), dropped(model.model.layers, alone), collected(model.model.layers) as wanted:
            model(ids[row : row + 1])
        torch.testing.assert_close(states[3][row], wanted[3][0])


def test_states_are_collected_raw_and_hooks_are_taken_away() -> None:
    model: Any = checks.tiny_target(layers=3).hf
    ids = torch.tensor([[4, 5, 6]])
    with torch.no_grad(), collected(model.model.layers) as states:
        wanted = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3
    torch.testing.assert_close(states[:2], list(wanted[1:3]))
    torch.testing.assert_close(model.model.norm(states[2]), wanted[3])
    model(ids)
    assert len(states) == 3
    with (
        torch.no_grad(),
        frozen_from(model.model.layers, torch.tensor([[1, 3, 2]])),
        collected(model.model.layers) as kept,
    ):
        model(ids)
    assert kept[0][0, 0].equal(kept[2][0, 0]) and kept[1][0, 2].equal(kept[2][0, 2])
    assert not kept[0][0, 2].equal(kept[1][0, 2]) and not kept[1][0, 1].equal(kept[2][0, 1])


# ---------------------------------------------------------------------------------------------------- character model


TEXT = [("", f"{who} {does} the {what}.") for who in ("A dog", "The man", "She") for does in ("sees", "likes", "has")
        for what in ("ball", "tree", "red house", "old book")] * 12  # fmt: skip
TINY: dict[str, Any] = {"layers": 4, "width": 32, "heads": 2, "positions": 24}
SHORT = TrainingConfig(steps=150, batch_size=16, learning_rate=1e-2, evaluations=2, precision="float32")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """A tiny model of each kind, which differ in their loss alone, and its facts."""
    found = {}
    for exits in ("calm", "last", "hash"):
        folder = tmp_path_factory.mktemp(exits)
        maker = CharacterModel(exits, **TINY, mixed=0.0, recipe=SHORT)  # type: ignore[arg-type]
        found[exits] = (folder, maker.fit(context(folder, pairs=TEXT)))
    return found


def load(folder: Path) -> CausalLM:
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).requires_grad_(False)
    return CausalLM.from_hf(network, keep_hf=True)


def test_the_loss_makes_the_exits(made: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    calm, last = (made[exits][1] for exits in ("calm", "last"))
    assert calm["exits"]["1"]["agreement"] > last["exits"]["1"]["agreement"] + 0.1
    assert calm["exits"]["2"]["coverage_at_98"] > last["exits"]["2"]["coverage_at_98"]
    assert calm["curve"][-1]["loss_4"] < 0.7 * calm["curve"][0]["loss_1"]
    cheapest, dearest = calm["left_by_confidence"][-1], calm["left_by_confidence"][0]
    assert cheapest["layers"] < dearest["layers"] <= 4 and cheapest["loss"] >= dearest["loss"]


def test_facts_of_the_exits_are_those_of_transformers(made: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    """Agreement by layer over the held-out windows, from transformers' own hidden states."""
    folder, facts = made["calm"]
    lm = load(folder)
    model: Any = lm.hf
    text = "\n".join(answer for _, answer in TEXT).encode()
    from transformers import AutoTokenizer

    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text.decode())["input_ids"])
    assert len(ids) == len(text) == facts["bytes"]
    held_out = ids[len(ids) - len(ids) // 10 :]
    starts = torch.linspace(0, len(held_out) - 25, 64).long()
    windows = torch.stack([held_out[start : start + 24] for start in starts.tolist()])
    with torch.no_grad(), collected(model.model.layers) as states:
        final = model(windows).logits.argmax(-1)
    agreement = float((model.lm_head(model.model.norm(states[0])).argmax(-1) == final).double().mean())
    assert facts["exits"]["1"]["agreement"] == pytest.approx(agreement, abs=2e-3)  # there in 32 bit


def test_a_model_of_bytes_is_left_early_and_never_at_threshold_one(
    made: dict[str, tuple[Path, dict[str, Any]]],
) -> None:
    lm = load(made["calm"][0])
    prompts = [torch.tensor(list(range(60, 60 + n))) for n in (5, 9)]
    whole = Calm(lm, GREEDY, 1.0, exits=[1, 2, 3], head="lens")
    assert checks.outputs(whole, prompts, 10) == checks.outputs(Autoregressive(lm, GREEDY), prompts, 10)
    checks.check_batch(lambda m, s: Calm(m, s, 0.3, exits=[1, 2, 3], head="lens"), lm, limit=9)


def test_prompts_beside_the_model_are_held_out_and_fit(made: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    folder, facts = made["calm"]
    text = "\n".join(answer for _, answer in TEXT)
    held_out = text[facts["bytes"] - facts["held_out_bytes"] :]
    dialogues = corpus.read(str(folder / "prompts.jsonl")).dialogues
    assert len(dialogues) > 50
    for dialogue in dialogues:
        assert len(dialogue.said[0]) == TINY["positions"] // 2 >= len(dialogue.answer)
        assert dialogue.said[0] in held_out and dialogue.answer in held_out
    assert characters.prompts_of("é" * 100 + "plain text", 5)[0]["turns"] == ["plain"]


def test_hashed_training_and_decoding_compute_the_same(made: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    """The states of training, by hooks on transformers, and those of decoding, by our loop."""
    folder, facts = made["hash"]
    lm, model = load(folder), load(folder).hf
    decoder = HashEE(lm, GREEDY, "hash", "lens", checkpoint=str(folder))
    assert decoder.checksum == facts["table_sha256"] and len(set(decoder.table.depths.tolist())) > 2
    prompt = torch.tensor([ord(c) - 33 for c in "TheSman"])
    text = checks.outputs(decoder, [prompt], 12)[0]
    read = torch.cat([prompt, torch.tensor(text[:-1])])[None]
    assert model is not None
    with torch.no_grad(), frozen_from(model.model.layers, torch.from_numpy(decoder.table.depths).long()[read]):
        logits = model(read).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == text
    assert facts["curve"][-1]["loss"] < facts["curve"][0]["loss"]


@pytest.mark.parametrize("table", ["clustered", "learnt"])
def test_tables_of_another_model_are_trained_with(
    table: Any, made: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    """The table is made with a model of bytes, whose exits say for a learnt one how soon a byte settles."""
    lm = load(made["calm"][0])
    few = TrainingConfig(steps=2, batch_size=4, learning_rate=1e-2, evaluations=1, precision="float32")
    maker = CharacterModel("hash", **TINY, table=table, recipe=few)
    assert maker.needs_model and maker.model_name("text") == f"text_characters_hash_{table}"
    facts = maker.fit(context(tmp_path, pairs=TEXT, model=lm))
    assert facts["table"]["kind"] == table
    HashEE(load(tmp_path), GREEDY, head="lens", checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match="one token per byte, .* got .* with 61"):
        maker.fit(context(tmp_path, pairs=TEXT, model=checks.tiny_target()))
    with pytest.raises(ValueError, match=r"table must be frequency with exits=calm, .* Set train.exits=hash\."):
        CharacterModel("calm", **TINY, table=table)


def test_an_interrupted_character_model_ends_like_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = CharacterModel(**TINY, recipe=replace(SHORT, steps=12))
    maker.fit(context(tmp_path / "whole", pairs=TEXT))
    seen = interrupted_at(5, monkeypatch)
    shop = context(tmp_path / "broken", pairs=TEXT)
    with pytest.raises(KeyboardInterrupt):
        maker.fit(shop)
    maker.fit(shop)
    assert seen == [*range(5), *range(4, 12)] and not (tmp_path / "broken" / trainer.STATE).exists()
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]


def test_some_texts_leave_at_drawn_depths_while_a_character_model_learns(tmp_path: Path) -> None:
    maker = CharacterModel(**TINY, mixed=0.25, recipe=replace(SHORT, batch_size=8))
    torch.manual_seed(0)
    network, ids = maker.network(256).eval(), torch.randint(0, 256, (200,))
    texts = maker.windows(ids, range(8))
    depths, layers = maker.random_depths(texts), TINY["layers"]
    assert depths is not None and depths.shape == (8, TINY["positions"])
    assert set(depths[:2].unique().tolist()) == set(range(1, layers + 1)) and (depths[2:] == layers).all()
    whole, parts = maker.loss(network, texts, None)
    torch.testing.assert_close(maker.loss(network, texts, torch.full_like(depths, layers))[0], whole)
    least = maker.loss(network, texts, torch.ones_like(depths))[1]
    assert all(torch.equal(loss, parts["loss_1"]) for loss in least.values()) and len(least) == layers
    assert CharacterModel("free", **TINY).random_depths(texts) is None


def test_overlap_is_rouge_l() -> None:
    assert overlap([1, 2, 3, 4], [1, 3, 4, 9]) == pytest.approx(0.75)
    assert overlap([1, 2], [1, 2]) == 1.0 and overlap([1], [2]) == 0.0 and overlap([], [1]) == 0.0
    assert overlap([1, 1, 2, 1], [1, 2, 1, 1, 5, 5]) == pytest.approx(2 * 3 / 10)


def test_character_models_refuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="width must be a multiple of 8, twice the heads, got 30"):
        CharacterModel(width=30, heads=4)
    with pytest.raises(ValueError, match=r"mixed must be from 0 to 1, got 1\.5"):
        CharacterModel(mixed=1.5)
    with pytest.raises(ValueError, match="shallow must be from 1 to 7 for 8 layers, got 8"):
        CharacterModel("free", shallow=8)
    with pytest.raises(ValueError, match=r"The corpus must have at least 250 bytes, got 4"):
        CharacterModel(**TINY).fit(context(tmp_path, pairs=[("", "text")]))


def test_any_text_file_is_a_corpus_and_the_model_loads_by_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.txt"
    file.write_text("\n\n".join(text for _, text in TEXT[:100]) + "\n", encoding="utf-8")
    texts = corpus.read(str(file))
    assert len(texts.dialogues) == 100 and texts.dialogues[0].said == ("",) and texts.names == ("own.txt",)
    words = [f"corpus={file}", f"paths.cache={tmp_path}", "train.layers=2", "train.width=16", "train.heads=2"]
    words += ["train.positions=16", "train.recipe.steps=3", "train.recipe.evaluations=1", "hardware.device=cpu"]
    assert command.main(["method=character_model", *words]) == 0
    printed = capsys.readouterr().out
    assert "coverage at 98 %" in printed and "model.name=" in printed
    folder = tmp_path / "trained" / "character_model-own_characters"
    card = json.loads((folder / "card.json").read_text())
    assert set(card["facts"]["exits"]) == {"1"} and "summary" not in card["facts"]
    loaded = loading.load(
        {"name": str(folder)}, {"device": "cpu", "dtype": "float32"}, PathsConfig(cache=str(tmp_path))
    )
    assert loaded.lm.n_layers == 2 and loaded.tokenizer.decode(loaded.tokenizer("é!")["input_ids"]) == "é!"


def test_plain_text_cannot_be_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.txt"
    file.write_text("some text\n")
    words = [f"corpus={file}", "model=random", f"paths.cache={tmp_path}", "hardware.device=cpu"]
    assert command.main(["method=calm", *words]) == 2
    assert "has plain text" in capsys.readouterr().err
    with pytest.raises(UserError, match="or of text"):
        corpus.read("nothing_there")


# ------------------------------------------------------------------------------------------------------------ teacher


@pytest.mark.parametrize("exits", ["calm", "free"])
def test_the_teachers_loss_is_that_of_every_layer_of_transformers(exits: Any, tmp_path: Path) -> None:
    recipe = replace(BRIEF, dropout=0.0)
    maker = ExitTeacherTraining(**SMALL | {"layers": (1, 3)}, exits=exits, recipe=recipe)
    tokenizer = bpe.learn([text for pair in PAIRS for text in pair], 300, 40)
    pairs = maker._encode(tokenizer, PAIRS)
    torch.manual_seed(0)
    network = maker.network(len(tokenizer))
    rows = batches(pairs, recipe.tokens)[0]
    found, seen = maker.loss(network.train(), pairs)(rows, 0)
    network.eval()
    behind: list[list[torch.Tensor]] = [[], [], []]
    wanted = []
    norm = network.model.decoder.layer_norm
    norm.register_forward_pre_hook(lambda _, given: behind[2].append(given[0][0]))  # transformers' own last is normed
    for place in rows:
        source, target = (torch.tensor([side]) for side in pairs[place])
        hidden = network(input_ids=source, labels=target, output_hidden_states=True).decoder_hidden_states
        for states, state in zip(behind[:2], hidden[1:3], strict=True):
            states.append(state[0])
        wanted.append(target[0])
    read = [F.layer_norm(torch.cat(states), norm.normalized_shape, norm.weight, norm.bias) for states in behind]
    losses = [F.cross_entropy(network.lm_head(rows), torch.cat(wanted), label_smoothing=0.1) for rows in read]
    if exits == "calm":
        total = sum((i + 1) * loss for i, loss in enumerate(losses)) / 6
    else:
        low, high = torch.cat(behind[0]), torch.cat(behind[2])
        total = (losses[0] + 3 * losses[2]) / 4 + 0.5 * F.mse_loss(low, high) / high.square().mean()
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-4)
    assert seen["tokens"] == sum(map(len, wanted))


def test_an_exit_native_teacher_is_left_early(tmp_path: Path) -> None:
    recipe = replace(BRIEF, steps=120, evaluations=2)
    maker = ExitTeacherTraining(**SMALL | {"layers": (1, 3)}, exits="calm", recipe=recipe)
    assert maker.model_name("multi30k") == "multi30k_1_3_calm"
    facts = maker.fit(context(tmp_path))
    assert set(facts["exits"]) == {"1", "2"} and facts["exits"]["2"]["agreement"] > 0.8
    network: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).requires_grad_(False)
    lm = Seq2SeqLM.from_hf(network, keep_hf=True)
    checks.check_batch(lambda m, s: Calm(m, s, 0.5, exits=[1, 2], head="lens"), lm, limit=12)
    with pytest.raises(UserError, match=r"method=exit_teacher .*train\.layers=\[1,3\]' train\.exits=calm"):
        loading.load(
            {"name": "multi30k_1_3_calm", "_target_": "bench.models.trained.TrainedModel", "method": "exit_teacher"},
            {"device": "cpu", "dtype": "float32"},
            PathsConfig(cache=str(tmp_path)),
        )


def test_an_exit_native_teacher_begins_with_the_weights_of_a_model(tmp_path: Path) -> None:
    options: dict[str, Any] = SMALL | {"layers": (1, 3)}
    recipe = replace(BRIEF, steps=1, evaluations=1, average=1, learning_rate=1e-9)
    translation.TeacherTraining(**options, recipe=recipe).fit(context(tmp_path / "model"))
    network: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model, tokenizer = Seq2SeqLM.from_hf(network, keep_hf=True), AutoTokenizer.from_pretrained(tmp_path / "model")
    given: dict[str, Any] = {"model": model, "tokenizer": tokenizer}
    before = {name: value.clone() for name, value in network.state_dict().items()}

    maker = ExitTeacherTraining(**options, begin="model", recipe=recipe)
    assert maker.needs_model and maker.model_name("multi30k") == "multi30k_1_3_calm"
    maker.fit(context(tmp_path / "made", seed=1, **given))
    made: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    for name, value in made.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-3, atol=1e-5)

    other = ExitTeacherTraining(**options | {"layers": (1, 2)}, begin="model", recipe=recipe)
    with pytest.raises(ValueError, match=r"must have the shapes of the new model, got others.*train\.begin=random"):
        other.fit(context(tmp_path / "other", **given))


def test_the_confidence_of_all_or_nothing_is_judged() -> None:
    assert quality(torch.tensor([True, True]), torch.tensor([1.0, 1.0]))["calibration_error"] == 0.0
