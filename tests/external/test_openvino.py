"""OpenVINO GenAI behind the interface: texts of the weights in the file, rounds of its lookup, what is refused."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from gguf import GGUFReader, dequantize

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.external import gguf_file
from methods.external.openvino import OpenVINO
from tests.external.test_gguf_file import halves_apart, random_model

MISSING = OpenVINO.missing_library()
installed = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
BATCH = checks.prompts(96, (1, 5, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def of_16_bit(name):
    """A model in 32 bit whose numbers 16-bit floats hold."""
    return CausalLM.from_hf(random_model(name, torch.float16).float())


def texts(decoder, limit=20, batch=BATCH, **options):
    return [checks.outputs(decoder, [prompt], limit, **options)[0] for prompt in batch]


@installed
@pytest.mark.parametrize("name", ["llama", "llama_untied", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("draft", ["none", "prompt_lookup"])
def test_texts_are_the_targets(name, draft, folder):
    target = of_16_bit(name)
    rival = OpenVINO(target, Sampling(), draft=draft, kv="f32", storage=folder)
    assert texts(rival) == texts(Autoregressive(target, Sampling()))
    assert rival.guarantee is Guarantee.RELAXED


@installed
@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_quantised_texts_are_those_of_the_rounded_weights(weights, folder, tmp_path):
    """The engine decodes with the numbers that the file holds, read by the format's own library."""
    model = random_model("llama", torch.float16).float()
    file = gguf_file.write(CausalLM.from_hf(model, keep_hf=True), tmp_path, weights, "f16")
    found = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in GGUFReader(file).tensors}
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    rounded = random_model("llama", torch.float16).float()
    with torch.no_grad():
        for path, module in rounded.named_modules():
            if (own := names.get(path.rpartition(".")[2])) is not None:
                rows = found[f"blk.{path.split('.')[2]}.{own}.weight"].numpy()
                heads = {"attn_q": 4, "attn_k": 2}.get(own)
                module.weight.copy_(torch.from_numpy(rows if heads is None else halves_apart(rows, heads)))
    rival = OpenVINO(
        CausalLM.from_hf(model), Sampling(), weights=weights, kv="f32", quantise_inputs=False, storage=folder
    )
    assert texts(rival, 12) == texts(Autoregressive(CausalLM.from_hf(rounded), Sampling()), 12)


@installed
def test_rounds_of_the_prompt_lookup(folder):
    rival = OpenVINO(of_16_bit("qwen3"), Sampling(), draft="prompt_lookup", kv="f32", storage=folder)
    steps = list(rival.decode([torch.tensor([7, 8, 9] * 6)], 40, torch.Generator()))
    times = [step.at_ns for step in steps]
    assert times == sorted(times) and sum(len(step.tokens[0]) for step in steps) >= 40
    assert max(step.accepted[0] for step in steps) <= 5
    assert all(step.drafted == step.accepted == [len(step.tokens[0]) - 1] for step in steps)


@installed
def test_it_stops_after_an_end_of_sequence_token_and_no_state_leaks(folder):
    target = of_16_bit("llama")
    whole = texts(Autoregressive(target, Sampling()), 20, BATCH[1:2])[0]
    target.eos_ids = (whole[4],)
    rival = OpenVINO(target, Sampling(), kv="f32", storage=folder)
    steps = list(rival.decode([BATCH[1]], 20, torch.Generator()))
    assert [token for step in steps for token in step.tokens[0]] == whole[: whole.index(whole[4]) + 1]
    wanted = texts(Autoregressive(target, Sampling()), 20, eos_ids=target.eos_ids)
    assert [texts(rival, 20, eos_ids=target.eos_ids) for _ in range(2)] == [wanted, wanted]
    with pytest.raises(ValueError, match="batch_size=1"):
        list(rival.decode(BATCH, 3, torch.Generator()))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("llama", {"gamma": 0}, "method.gamma must be at least 1, got 0"),
        ("llama", {"sampling": Sampling(0.7)}, "sampling=greedy"),
        ("llama3", {}, "no factors of frequencies"),
        ("llama_biased", {}, "no biases of a Llama"),
    ],
)
def test_what_is_refused(name, options, said):
    with pytest.raises(ValueError, match=said):
        OpenVINO(CausalLM.from_hf(random_model(name)), **{"sampling": Sampling(), **options})


def test_where_it_is_not_installed_one_message_says_how(monkeypatch):
    def not_there(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_there)
    with pytest.raises(ValueError, match=r"openvino-genai, which is optional.*pip install 'decodebench\[rivals\]'"):
        OpenVINO(CausalLM.from_hf(random_model("llama")), Sampling())
