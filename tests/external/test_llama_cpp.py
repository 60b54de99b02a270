"""llama.cpp behind the interface: the target's own texts in 32 bit, its drafts counted, what is refused."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch

from bench.config import compose
from bench.contract import checks
from bench.measure import preconditions
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.external.llama_cpp import LlamaCpp
from tests.engine.test_seq2seq_lm import tiny
from tests.external.test_gguf_file import MODELS, random_model

MISSING = LlamaCpp.missing_library()
installed = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@installed
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_the_targets(name, folder):
    target = CausalLM.from_hf(random_model(name))
    batch = checks.prompts(target.vocab_size, (1, 5, 40, 90))
    ours = [checks.outputs(Autoregressive(target, Sampling()), [prompt], 24)[0] for prompt in batch]
    rival = LlamaCpp(target, Sampling(), kv="f32", storage=folder)
    assert rival.guarantee is Guarantee.EXACT
    assert [checks.outputs(rival, [prompt], 24)[0] for prompt in batch] == ours


@installed
@pytest.mark.parametrize("draft", ["none", "prompt_lookup"])
def test_the_contract_of_decoders(draft, target, folder):
    def make(target, sampling):
        return LlamaCpp(target, sampling, draft=draft, kv="f32", storage=folder)

    checks.check_greedy_identity(make, target)
    checks.check_guarantee(make(target, Sampling()))
    checks.check_counters(make, target, batch=False)
    first, second = checks.prompts(target.vocab_size, (11, 7))
    used = make(target, Sampling())
    checks.outputs(used, [first], 12)
    assert checks.outputs(used, [second], 12) == checks.outputs(make(target, Sampling()), [second], 12)
    if draft == "none":
        checks.check_batch(make, target)
    else:
        with pytest.raises(ValueError, match="batch_size must be 1 for llama_cpp with drafts, got "):
            checks.check_batch(make, target)


@installed
def test_rows_of_a_batch_leave_it_and_the_others_do_not_change(target, folder):
    batch = checks.prompts(target.vocab_size, (600, 3, 40))  # more tokens than the library reads at once
    rival = LlamaCpp(target, Sampling(), kv="f32", storage=folder)
    alone = [checks.outputs(rival, [prompt], 12)[0] for prompt in batch]
    rounds, texts, computed = rival.decode(batch, 12, torch.Generator()), [[], [], []], []
    step = next(rounds)
    while step is not None:
        computed.append(step.rows)
        for text, new in zip(texts, step.tokens, strict=True):
            text += new
        try:
            step = rounds.send({1: None} if len(computed) == 4 else {})
        except StopIteration:
            step = None
    assert computed == [3] * 4 + [2] * 8
    assert texts == [alone[0], alone[1][:4], alone[2]]


def test_a_batch_with_drafts_is_refused_before_anything_is_loaded(tmp_path):
    words = ["method=llama_cpp", "dataset=demo", "batch_size=4", f"paths.results={tmp_path}"]
    asked = "batch_size must be at most 1 for method=llama_cpp, got 4. That is due to its other settings."
    assert asked in preconditions.check(compose.compose([*words, "method.draft=prompt_lookup"]))
    assert asked not in preconditions.check(compose.compose(words))


@installed
def test_texts_in_bfloat16_are_likely_to_the_target(folder):
    """Of two roundings of one model: no token is further from the likeliest than near-ties are."""
    target = CausalLM.from_hf(random_model("llama", torch.bfloat16))
    rival = LlamaCpp(target, Sampling(), storage=folder)
    assert rival.guarantee is Guarantee.EXACT
    for prompt in checks.prompts(target.vocab_size, (3, 20)):
        text = checks.outputs(rival, [prompt], 20)[0]
        logits = target.score(torch.tensor([*prompt.tolist(), *text[:-1]]), start=len(prompt) - 1).float()
        gaps = logits.amax(dim=1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert gaps.max() < 0.5 and (gaps == 0).float().mean() > 0.8


@installed
@pytest.mark.parametrize("weights", ["q8_0", "q4_1", "q4_0"])
def test_quantised_weights_promise_less(weights, folder):
    target = CausalLM.from_hf(random_model("llama", torch.bfloat16))
    rival = LlamaCpp(target, Sampling(), weights=weights, storage=folder)
    full = LlamaCpp(target, Sampling(), storage=folder)
    assert rival.guarantee is Guarantee.RELAXED
    assert rival.memory()["weights"] < full.memory()["weights"]
    assert len(checks.outputs(rival, checks.prompts(96, (9,)), 12)[0]) == 12


@installed
def test_keys_of_16_bit_are_no_promise_in_32_bit(folder):
    assert LlamaCpp(CausalLM.from_hf(random_model("llama")), Sampling(), storage=folder).guarantee is Guarantee.RELAXED


@installed
def test_prompt_lookup_drafts_and_keeps_the_text(target, folder):
    rival = LlamaCpp(target, Sampling(), draft="prompt_lookup", gamma=4, kv="f32", storage=folder)
    checks.check_greedy_identity(lambda t, s: rival, target, lengths=(2, 17))
    prompt = torch.tensor([7, 8, 9] * 5)
    steps = list(rival.decode([prompt], 40, torch.Generator()))
    assert steps[0].drafted == [0] and max(step.drafted[0] for step in steps) == 4
    assert any(step.accepted[0] for step in steps) and any(step.accepted[0] < step.drafted[0] for step in steps)
    assert all(step.draft_passes == 0 and (step.draft_ns is not None) == (step.drafted[0] > 0) for step in steps)


@installed
def test_a_draft_model_that_is_the_target_is_always_right(target, folder):
    rival = LlamaCpp(target, Sampling(), draft_model=target, gamma=3, kv="f32", storage=folder)
    steps = list(rival.decode([checks.prompts(target.vocab_size, (9,))[0]], 17, torch.Generator()))
    assert [len(step.tokens[0]) for step in steps] == [1, 4, 4, 4, 4]
    assert {step.draft_passes for step in steps[1:]} == {3}


@installed
def test_another_draft_model_keeps_the_text(target, folder):
    """One that knows more ids than the target drafts those that both know."""
    draft = checks.tiny_target(target.vocab_size + 30, layers=2, seed=5)
    checks.check_greedy_identity(
        lambda t, s: LlamaCpp(t, s, draft_model=draft, gamma=5, kv="f32", storage=folder), target, lengths=(1, 9)
    )


@installed
@pytest.mark.parametrize("drafter", ["prompt_lookup", "model"])
def test_drafts_go_on_beyond_a_batch_of_the_library(drafter, folder):
    """It reads 512 tokens at once; the scores of a longer text need room for all of it."""
    target = checks.tiny_target(positions=700)
    more = {"draft": "prompt_lookup"} if drafter == "prompt_lookup" else {"draft_model": target, "gamma": 3}
    rival = LlamaCpp(target, Sampling(), kv="f32", storage=folder, **more)
    prompt = torch.tensor([7, 8, 9, 11] * 130)
    assert checks.outputs(rival, [prompt], 24) == checks.outputs(Autoregressive(target, Sampling()), [prompt], 24)


@installed
def test_a_text_beyond_the_context_makes_a_larger_one(target, folder):
    rival = LlamaCpp(target, Sampling(), kv="f32", context=32, storage=folder)
    prompt = checks.prompts(target.vocab_size, (100,))
    assert rival.stats()["contexts_made"] == 1
    assert checks.outputs(rival, prompt, 20) == checks.outputs(Autoregressive(target, Sampling()), prompt, 20)
    assert rival.stats()["contexts_made"] == 2 and rival.stats()["context"] == 256


@installed
def test_the_file_lies_in_the_cache_or_goes_with_the_decoder(target, tmp_path):
    LlamaCpp(target, Sampling(), storage=tmp_path)
    assert len(list((tmp_path / "models" / "gguf").iterdir())) == 1
    alone = LlamaCpp(target, Sampling())
    file = alone._file
    assert file.is_file() and tmp_path not in file.parents
    del alone
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gamma": 0}, "method.gamma must be at least 1, got 0"),
        ({"context": 0}, "method.context must be at least 1, got 0"),
        ({"sampling": Sampling(0.7)}, "sampling=greedy"),
        ({"draft": "prompt_lookup", "draft_model": True}, "takes one drafter"),
    ],
)
def test_settings_that_are_refused(options, said, target):
    if "draft_model" in options:
        options = options | {"draft_model": target}
    with pytest.raises(ValueError, match=said):
        LlamaCpp(target, **{"sampling": Sampling(), **options})


def test_an_encoder_decoder_is_refused():
    from methods.engine.seq2seq_lm import Seq2SeqLM

    with pytest.raises(ValueError, match="needs a causal model"):
        LlamaCpp(Seq2SeqLM.from_hf(tiny("marian")), Sampling())


def test_where_it_is_not_installed_one_message_says_how(target, tmp_path: Path, monkeypatch):
    def not_there(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_there)
    with pytest.raises(ValueError, match=r"llama-cpp-python, which is optional.*pip install 'decodebench\[rivals\]'"):
        LlamaCpp(target, Sampling())
    cfg = compose.compose(["method=llama_cpp", "dataset=demo", f"paths.results={tmp_path}"])
    (reason,) = preconditions.check(cfg)
    assert reason == (
        "method=llama_cpp cannot run here. The package llama-cpp-python, which is optional, must be installed. "
        "Install it: pip install 'decodebench[rivals]'"
    )
