"""Hydra++: the layer before the heads against transformers' own, in files of the authors and in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from bench.contract import checks
from methods.decoder import Prompts
from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.heads.hydra import HydraDrafter, HydraHeads
from methods.speculative.heads.hydra_prefix import PrefixModule, prefix_shapes
from methods.speculative.heads.hydra_training import HydraLearner, HydraTraining
from methods.speculative.hybrid import Hybrid
from methods.training.answers import AnswerRecipe
from methods.training.interface import Example, TrainingContext
from methods.training.trainer import TrainingConfig
from tests.helpers.tiny_head_trees import counting_target
from tests.helpers.tiny_heads import batch_of, learn_by_heart

V, D = 61, 32
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
CONFIG = {"hydra_num_heads": 3, "hydra_num_layers": 1, "hydra_head_arch": "prefix-mlp", "grounded_heads": True}


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target(V)


def layer_of_transformers(target: CausalLM) -> LlamaModel:
    """As the authors make it: the target's configuration with one layer."""
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1, "model_type": "llama"})
    torch.manual_seed(0)
    model = LlamaModel(config).to(target.dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model


def heads_of_authors(target: CausalLM, prefix: LlamaModel) -> dict[str, Tensor]:
    """All that ``hydra_head.state_dict()`` holds, the embeddings too."""
    rng = torch.Generator().manual_seed(1)
    tensors = {f"prefix_embeding_layer.{name}": tensor for name, tensor in prefix.state_dict().items()}
    tensors["input_embed_fn.weight"] = target.embed(torch.arange(V))
    for head in range(3):
        for part in ("linear", "res_connection"):
            tensors[f"hydra_mlp.{head}.1.{part}.weight"] = 0.2 * torch.randn(D, (head + 2) * D, generator=rng).double()
            tensors[f"hydra_mlp.{head}.1.{part}.bias"] = torch.randn(D, generator=rng).double()
        tensors[f"hydra_lm_head.{head}.1.weight"] = torch.randn(V, D, generator=rng).double()
        tensors[f"hydra_lm_head.{head}.1.bias"] = torch.randn(V, generator=rng).double()
    return tensors


def write(folder: Path, tensors: dict[str, Tensor]) -> str:
    torch.save(tensors, folder / "hydra_lm_head.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def drafted_by_hand(tensors: dict[str, Tensor], target: CausalLM, state: Tensor, root: int) -> list[int]:
    tokens: dict[tuple[int, ...], int] = {}
    for path in map(tuple, TREE):
        way = torch.tensor([root] + [tokens[path[:length]] for length in range(1, len(path))])
        x, name = torch.cat([state, target.embed(way).flatten()]), f"hydra_mlp.{len(path) - 1}.1"
        update = F.silu(tensors[f"{name}.linear.weight"] @ x + tensors[f"{name}.linear.bias"])
        z = tensors[f"{name}.res_connection.weight"] @ x + tensors[f"{name}.res_connection.bias"] + update
        output = f"hydra_lm_head.{len(path) - 1}.1"
        logits = tensors[f"{output}.weight"] @ z + tensors[f"{output}.bias"]
        tokens[path] = int(logits.argsort(descending=True)[path[-1]])
    return [tokens[path] for path in map(tuple, TREE)]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[list[int]], list[list[int]]]]:
    """The committed texts of every proposal, and what was drafted."""
    seen, propose = [], HydraDrafter.propose

    def watched(self: HydraDrafter, context: Any) -> Any:
        draft = propose(self, context)
        seen.append(([list(row) for row in context.tokens], draft.tokens.tolist()))
        return draft

    monkeypatch.setattr(HydraDrafter, "propose", watched)
    return seen


@pytest.mark.parametrize("lookup", [False, True], ids=["alone", "every other round a lookup's"])
def test_files_of_the_authors_draft_as_their_layer_says(
    target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookup: bool
) -> None:
    """Every round of ragged rows; with a lookup the layer sits rounds out and reads them later."""
    prefix = layer_of_transformers(target)
    tensors, seen = heads_of_authors(target, prefix), watch(monkeypatch)
    checkpoint = write(tmp_path, tensors)
    options: dict[str, Any] = {"checkpoint": checkpoint}
    decoder: Any = HydraHeads(target, Sampling(), tree=TREE, **options)
    if lookup:
        monkeypatch.setattr("methods.speculative.heads.medusa.TREES", {"mc_sim_7b_63": tuple(map(tuple, TREE))})
        decoder = Hybrid(target, Sampling(), network="hydra_heads", min_match=1, **options)
    batch: Prompts | list[Tensor] = checks.prompts(V, (6, 1, 11))
    texts = checks.outputs(decoder, list(batch), 25)
    assert texts == [checks.greedy_reference(target, prompt, 25) for prompt in batch]
    compared = 0
    for committed, drafted in seen:
        states = batch_of(target, committed, [1] * len(committed)).hidden.to(target.dtype)
        for row, text in enumerate(committed):
            if len(text) >= min(map(len, batch)) + 25:
                continue  # it may be at its limit, and what is drafted for it is lost
            with torch.no_grad():
                state = prefix(inputs_embeds=states[row : row + 1, : len(text) - 1].double()).last_hidden_state[0, -1]
            assert drafted[row] == drafted_by_hand(tensors, target, state, text[-1])
            compared += 1
    assert compared > (5 if lookup else 30)
    if not lookup:
        matrices = [shape for shape in prefix_shapes(target).values() if len(shape) == 2]
        assert decoder.memory()["prefix_layer"] == 8 * sum(rows * columns for rows, columns in matrices)


def test_the_layer_in_training_is_transformers(target: CausalLM) -> None:
    module, theirs = PrefixModule(target, 1.0).double(), layer_of_transformers(target)
    states = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if name != "embed_tokens.weight":
                module._weight(name.removeprefix("layers.0.").removesuffix(".weight")).copy_(tensor)
        wanted = theirs(inputs_embeds=states).last_hidden_state
        assert torch.allclose(module(states), wanted, atol=1e-5), "its norms are in 32 bit"
    assert {name: tuple(tensor.shape) for name, tensor in module.trained().items()} == prefix_shapes(target)


def test_it_begins_as_the_target_s_state_at_an_even_length(target: CausalLM) -> None:
    states = torch.randn(1, 5, D) * 3.0
    found = PrefixModule(target, 3.0)(states).detach()
    assert torch.allclose(found, 3.0 * states / states.pow(2).mean(-1, keepdim=True).sqrt(), atol=1e-4)


def test_a_training_with_the_layer_learns_what_one_state_does_not_say(tmp_path: Path) -> None:
    """Texts in which the token four places back decides: heads alone cannot know it."""
    counter = counting_target()
    rng = torch.Generator().manual_seed(0)
    texts = []
    for _ in range(24):
        text = torch.randint(0, 29, (4,), generator=rng).tolist()
        while len(text) < 20:
            text.append((text[-4] + 1) % 29)
        texts.append(text)
    batch = batch_of(counter, texts, [4] * len(texts))
    losses = {}
    for prefix in (None, 1.0):
        torch.manual_seed(0)
        learner = HydraLearner(counter, DraftVocabulary.all(29), 2, 1, "hard", prefix=prefix)
        losses[prefix] = learn_by_heart(learner, batch, steps=150, rate=3e-3)
    assert losses[1.0][-1] < 0.5 * losses[1.0][0] and losses[1.0][-1] < 0.7 * losses[None][-1]


def test_training_saves_what_decodes(tmp_path: Path) -> None:
    counter, points = counting_target(), []
    examples = [Example([(7 * n) % 29, (5 * n + 3) % 29], []) for n in range(60)]
    recipe = TrainingConfig(steps=60, batch_size=8, learning_rate=2e-2, precision="float32", evaluations=2)
    answers = AnswerRecipe(tokens=600, limit=12, longest_prompt=9, batch=20)
    trainable = HydraTraining(heads=3, vocabulary=29, answers=answers, recipe=recipe, prefix=True)
    folder = tmp_path / "part"
    folder.mkdir()
    facts = trainable.fit(
        TrainingContext(
            output=folder, seed=3, log=points.append, shared_cache=tmp_path / "common", model=counter, examples=examples
        )
    )
    found = [point["loss"] for point in points if "loss" in point]
    assert found[-1] < 0.9 * found[0] and sum(facts["acceptance"]) > 2.9
    decoder = HydraHeads(counter, Sampling(), checkpoint=folder, costs=[[1, 1.0], [64, 1.01]])
    assert "prefix_layer" in decoder.memory()
    texts = checks.outputs(decoder, [torch.tensor([4]), torch.tensor([3, 9, 13])], 21)
    assert texts == [[(5 + n) % 29 for n in range(21)], [(14 + n) % 29 for n in range(21)]]
    steps = list(decoder.decode([torch.tensor([4])], 21, torch.Generator()))
    assert sum(map(len, (step.tokens[0] for step in steps[:7]))) >= 21, "about four a pass"


def test_a_row_takes_no_new_prompt(target: CausalLM, tmp_path: Path) -> None:
    decoder = HydraHeads(
        target, Sampling(), checkpoint=write(tmp_path, heads_of_authors(target, layer_of_transformers(target)))
    )
    with pytest.raises(ValueError, match="measure.refill must be false with Hydra\\+\\+ heads.*, got true. Set"):
        decoder.drafter.reset_rows({0: [1, 2]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix_embeding_layer.norm.weight": None}, "missing: prefix_embeding_layer.norm.weight"),
        ({"prefix_embeding_layer.layers.0.mlp.up_proj.weight": torch.zeros(4, 4)}, r"has the shape \(4, 4\)"),
        ({"prefix_embeding_layer.layers.1.mlp.up_proj.weight": torch.zeros(4, 4)}, "not known: prefix_embeding_layer"),
    ],
)
def test_incomplete_files_are_refused(
    change: dict[str, Tensor | None], message: str, target: CausalLM, tmp_path: Path
) -> None:
    tensors = heads_of_authors(target, layer_of_transformers(target)) | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        HydraHeads(target, Sampling(), checkpoint=write(tmp_path, kept))
