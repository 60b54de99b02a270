"""A target on two devices, here two processes of a CPU: its text and logits are those of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config import compose
from bench.config.schema import PathsConfig
from bench.errors import UserError
from bench.measure import preconditions
from bench.measure.run import Given, run
from bench.models import loading, parallel
from bench.models.random_weights import RandomModel
from bench.models.source import Loaded
from bench.records.run_folder import read_manifest, validate
from methods.autoregressive import Autoregressive
from methods.decoder import generate
from methods.engine import tensor_parallel
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.tensor_parallel import DrivingLM
from methods.speculative.eagle.decoder import Eagle
from methods.speculative.oracle import Oracle
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.speculative_sampling import SpeculativeSampling
from methods.speculative.token_recycling import TokenRecycling
from tests.helpers.tiny_eagle import part_of

FP32 = {"device": "cpu", "dtype": "float32", "threads": 1, "linear": "plain"}
MODEL: dict[str, Any] = {"name": "random", "hidden_size": 64, "heads": 4, "kv_heads": 2, "layers": 3}
PROMPTS = [torch.arange(4, 4 + length) % 50 for length in (9, 5, 14)]
DECODERS = {
    "autoregressive": Autoregressive,
    "prompt_lookup": PromptLookup,
    "token_recycling": lambda target, sampling: TokenRecycling(target, sampling, tree="small"),
    "oracle": lambda target, sampling: Oracle(target, sampling, (0.8, 0.6), nodes=6),
    "skipped layers": lambda target, sampling: SpeculativeSampling(target, sampling, skip_attention=[1], skip_mlp=[2]),
    "network of a published size": lambda target, sampling: Oracle(target, sampling, (0.8, 0.6), network="eagle"),
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    """The model on two devices."""
    yield loading.load({**MODEL, "parallel": 2}, FP32, PathsConfig())
    parallel.stop()


@pytest.fixture(scope="module")
def pair(loaded: Loaded) -> tuple[DrivingLM, CausalLM]:
    """The model on two devices and on one."""
    assert isinstance(loaded.lm, DrivingLM)
    return loaded.lm, loading.load(MODEL, FP32, PathsConfig()).lm


def test_each_device_has_half_of_the_layers(pair: tuple[DrivingLM, CausalLM]) -> None:
    spread, whole = pair
    everywhere = whole.embedding_bytes + whole._head.nbytes
    assert spread.weight_bytes - everywhere == (whole.weight_bytes - everywhere) / 2
    assert spread.token_bytes == whole.token_bytes / 2 and spread.config.num_attention_heads == 4


def test_logits_of_prompts_chains_and_trees_are_those_of_one_device(pair: tuple[DrivingLM, CausalLM]) -> None:
    tokens = torch.tensor([[5, 7, 9, 11], [3, 2, 1, 8], [4, 4, 6, 2]])
    parents = torch.tensor([[-1, -1, 0], [-1, 0, 1], [-1, 0, 0]])
    found = []
    for lm in pair:
        cache = lm.new_cache(3, 40)
        outputs = [lm.prefill(PROMPTS, cache, hidden_layers=[1])]
        outputs += [lm.forward(tokens, form, cache, hidden_layers=[0]) for form in (None, parents)]
        scores = lm.score(PROMPTS[2], start=3)
        found.append([scores, *(out.logits for out in outputs), outputs[0].hidden_layers[1]])
    for spread, whole in zip(*found, strict=True):
        assert spread.shape == whole.shape and (spread - whole).abs().max() < 1e-4 * whole.abs().max()


@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS.keys())
def test_texts_are_those_of_one_device(pair: tuple[DrivingLM, CausalLM], make: Any) -> None:
    """Trees are packed, and rows whose text has ended leave the caches of both devices."""
    wanted = generate(Autoregressive(pair[1], Sampling()), PROMPTS, 24)
    ends = {wanted[0][3]}
    ended = [row[: next((i + 1 for i, token in enumerate(row) if token in ends), None)] for row in wanted]
    assert len(ended[0]) < 24
    decoder = make(pair[0], Sampling())
    assert generate(decoder, PROMPTS, 24) == wanted
    assert generate(decoder, PROMPTS, 24, ends) == ended


def test_a_trained_network_drafts_on_the_first_device(pair: tuple[DrivingLM, CausalLM], tmp_path: Path) -> None:
    """It was made for the whole target, and reads states of its layers; its trees are packed on both devices."""
    spread, whole = pair
    part_of(whole, 3, (), None).save(tmp_path)
    decoder = Eagle(spread, Sampling(), version=3, depth=3, top_k=3, nodes=8, checkpoint=tmp_path)
    assert generate(decoder, PROMPTS, 24) == generate(Autoregressive(whole, Sampling()), PROMPTS, 24)


def test_rows_take_new_prompts(pair: tuple[DrivingLM, CausalLM]) -> None:
    texts = []
    for lm in pair:
        steps = PromptLookup(lm, Sampling()).decode_refilled(PROMPTS[:2], 6, torch.Generator(), 14)
        first = next(steps)
        second = steps.send({0: PROMPTS[2]})
        texts.append([first.tokens, second.tokens, next(steps).tokens])
    assert texts[0] == texts[1]


def test_a_cache_that_is_gone_is_gone_on_all_devices(pair: tuple[DrivingLM, CausalLM]) -> None:
    lm = pair[0]
    cache = lm.new_cache(1, 8)
    before = len(lm._course.dropped)
    del cache
    assert len(lm._course.dropped) == before + 1
    kept = lm.new_cache(1, 8)
    assert lm._course.dropped == [] and kept.capacity == 8


def test_methods_that_change_states_between_layers_are_refused(pair: tuple[DrivingLM, CausalLM]) -> None:
    lm = pair[0]
    with torch.inference_mode():
        state = lm.begin(PROMPTS[0][None], None, lm.new_cache(1, 16))
        lm.run(state, [0])
        state.hidden = state.hidden + 1
        with pytest.raises(ValueError, match="a method that changes no state between the layers"):
            lm.run(state, [1])
        with pytest.raises(ValueError, match="Early exit needs a target on one device"):
            lm.fill(state, [1])


def test_a_run_on_two_devices(loaded: Loaded, tmp_path: Path) -> None:
    """From its configuration to its record."""
    words = ["method=prompt_lookup", "model=random", "model.parallel=2", "dataset=demo", "dataset.limit=2"]
    more = [
        "hardware=cpu_fp32",
        "hardware.threads=1",
        "max_new_tokens=8",
        "measure.warmup=1",
        "measure.bootstrap_samples=100",
    ]
    cfg = compose.compose([*words, *more])
    cfg = replace(cfg, paths=PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache")))
    outcome = run(cfg, given=Given(loaded))
    assert validate(outcome.path) == []
    assert (read_manifest(outcome.path) or {})["model"]["parallel"] == 2
    assert outcome.summary["model"] == "random, on 2 devices"
    assert outcome.summary["agreement"]["identical_to_baseline"] == 1.0


def test_large_random_models_are_drawn_in_parts(pair: tuple[DrivingLM, CausalLM]) -> None:
    whole, part = (RandomModel(like="smollm2", layers=1, vocab_size=300) for _ in range(2))
    part.cut = lambda module: tensor_parallel.cut(module, pair[0].devices.mesh)
    ours, all_of_it = (source.read(torch.float32, Path()).model.model for source in (part, whole))
    assert torch.equal(ours.embed_tokens.weight, all_of_it.embed_tokens.weight)
    own, other = ours.layers[0], all_of_it.layers[0]
    for name, dim in (("self_attn.q_proj", 0), ("mlp.up_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        kept = own.get_submodule(name).weight
        assert type(kept) is torch.nn.Parameter
        assert torch.equal(kept, other.get_submodule(name).weight.chunk(2, dim)[0])


def model(**changes: Any) -> Any:
    return (
        RandomModel(**{**{k: v for k, v in MODEL.items() if k != "name"}, **changes}).read(torch.float32, Path()).model
    )


def test_what_devices_cannot_share_is_refused_by_name() -> None:
    tensor_parallel.require_divisible(model(), 2)
    for devices, changes, found in (
        (4, {}, r"must divide the heads and widths of the model, got kv_heads=2\."),
        (2, {"heads": 3, "kv_heads": 3, "hidden_size": 96}, r"got heads=3, kv_heads=3\."),
    ):
        with pytest.raises(ValueError, match=found):
            tensor_parallel.require_divisible(model(**changes), devices)
    mixture = RandomModel(like="mixtral_8x7b", layers=1)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        large = AutoModelForCausalLM.from_config(mixture.shape.transformers_config())
    with pytest.raises(ValueError, match="without a mixture of experts"):
        tensor_parallel.require_divisible(large, 2)


def test_settings_that_do_not_go_together_are_refused() -> None:
    for more in ({"weights": "int4"}, {"parallel": 0}, {"parallel": "two"}):
        with pytest.raises(UserError, match=r"model\.parallel"):
            loading.load({**MODEL, "parallel": 2, **more}, FP32, PathsConfig())
    cfg = compose.compose(["method=calm", "model=random", "model.parallel=2", "dataset=demo", "method.head=lens"])
    assert any("needs a target on one device, got model.parallel=2" in reason for reason in preconditions.check(cfg))
    assert json.dumps(compose.compose(["model.parallel=2"]).model["parallel"]) == "2"
