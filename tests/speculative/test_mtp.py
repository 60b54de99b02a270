"""Multi-token prediction: modules in published files, their drafts against transformers' layers without any cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.contract import checks
from methods.drafting import Draft
from methods.engine import causal_layers
from methods.engine.causal_layers import UnsupportedModel
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.mtp import MtpDrafter, MultiTokenPrediction
from methods.speculative.published.mtp import PROVEN
from tests.engine.test_causal_lm import tiny
from tests.helpers.tiny_head_trees import counting_target
from tests.helpers.tiny_mtp import mtp, published, ship

LIMIT = 16


def shipped(family: str, folder: Path, **options: Any) -> tuple[Any, CausalLM, dict[str, Tensor]]:
    """A model that ships a module, as transformers and as the engine load it, and the module's tensors."""
    random = tiny(family, **options)
    random.save_pretrained(folder)
    module = published(CausalLM.from_hf(random, keep_hf=True))
    main = load_file(folder / "model.safetensors")
    number = random.config.num_hidden_layers
    save_file(main, folder / "model-00001-of-00002.safetensors")
    extra = {f"model.layers.{number}.{name}": tensor.contiguous() for name, tensor in module.items()}
    save_file(extra, folder / "model-00002-of-00002.safetensors")
    places = dict.fromkeys(main, "model-00001-of-00002.safetensors") | dict.fromkeys(
        extra, "model-00002-of-00002.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "model.safetensors").unlink()
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lm = CausalLM.from_hf(hf, keep_hf=True)
    lm.eos_ids = ()
    return hf, lm, module


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of single experts in the tensors of transformers, whose first rows are the gate's."""
    experts = [name for name in tensors if name.startswith("mlp.experts.")]
    kept = {name: tensor for name, tensor in tensors.items() if name not in experts}
    if not experts:
        return kept
    pairs, downs = [], []
    for expert in range(len(experts) // 3):
        gate, up, down = (tensors[f"mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        pairs.append(torch.cat([gate, up]))
        downs.append(down)
    return kept | {"mlp.experts.gate_up_proj": torch.stack(pairs), "mlp.experts.down_proj": torch.stack(downs)}


def drafted_by_hand(hf: Any, module: dict[str, Tensor], text: list[int], gamma: int) -> list[int]:
    """All pairs of the text anew for each token: norms, mixture, one layer of transformers, the shared head."""
    config = hf.config

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], module[f"{name}.weight"], config.rms_norm_eps)

    layer = type(hf.model.layers[-1])(config, config.num_hidden_layers - 1).eval()
    names = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
    inner = {name: tensor for name, tensor in module.items() if not name.startswith(names)}
    layer.load_state_dict(together(inner))
    states = hf.model(torch.tensor([text[:-1]])).last_hidden_state
    tokens, drafted = list(text[1:]), []
    for _ in range(gamma):
        embedded = hf.model.embed_tokens(torch.tensor([tokens]))
        pairs = torch.cat([norm(embedded, "enorm"), norm(states, "hnorm")], -1) @ module["eh_proj.weight"].T
        places = torch.arange(len(tokens))[None]
        seen = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        out = layer(
            pairs,
            attention_mask=seen,
            position_ids=places,
            position_embeddings=hf.model.rotary_emb(pairs, places),
        )
        out = out[0] if isinstance(out, tuple) else out
        last = norm(out[:, -1:], "shared_head.norm")
        drafted.append(int(hf.lm_head(last)[0, 0].argmax()))
        states, tokens = torch.cat([states, last], 1), [*tokens, drafted[-1]]
    return drafted


@pytest.mark.parametrize("family", PROVEN)
@pytest.mark.parametrize("gamma", [1, 3])
@torch.no_grad()
def test_drafts_are_those_of_the_formulas_and_texts_the_targets(
    family: str, gamma: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round of ragged rows of which some end early."""
    hf, lm, module = shipped(family, tmp_path)
    seen: list[tuple[list[list[int]], list[list[int]]]] = []
    propose = MtpDrafter.propose

    def watched(self: MtpDrafter, context: Any) -> Any:
        draft = propose(self, context)
        seen.append(([list(row) for row in context.tokens], draft.tokens.tolist()))
        return draft

    monkeypatch.setattr(MtpDrafter, "propose", watched)
    prompts = checks.prompts(lm.vocab_size, (6, 1, 11))
    texts = checks.outputs(MultiTokenPrediction(lm, Sampling(), gamma=gamma), prompts, LIMIT)
    assert texts == [checks.greedy_reference(lm, prompt, LIMIT) for prompt in prompts]
    compared = 0
    for committed, drafted in seen[:: 1 if gamma == 3 else 2]:
        for row, text in enumerate(committed):
            if len(committed) == len(prompts) and len(text) >= len(prompts[row]) + LIMIT:
                continue  # it waits at its limit, and what is drafted for it is lost
            assert drafted[row] == drafted_by_hand(hf, module, text, gamma)
            compared += 1
    assert compared > 15


def counting(folder: Path) -> CausalLM:
    """A target that counts, with a module that does: its layer adds nothing, so the token's embedding is its state."""
    target = counting_target()
    module = published(target)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        module[f"{name}.weight"].zero_()
    width = target.hidden_size
    module["eh_proj.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], 1).double()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        module[f"{name}.weight"] = torch.ones(width).double()
    return ship(target, folder, module)


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_module_that_is_right_has_everything_accepted(gamma: int, tmp_path: Path) -> None:
    decoder = MultiTokenPrediction(counting(tmp_path), Sampling(), gamma=gamma)
    steps = list(decoder.decode([torch.tensor([4]), torch.tensor([3, 9, 13])], 21, torch.Generator()))
    assert all(step.accepted == step.drafted and step.draft_passes == gamma for step in steps[1:-1])
    assert decoder.memory()["mtp_module"] and decoder.acceptance_warning([[1.0]] * 3) is None
    assert "drafts implausibly badly" in (decoder.acceptance_warning([[0.05]] * 3) or "")


def test_an_unsure_module_stops(tmp_path: Path) -> None:
    decoder = mtp(checks.tiny_target(), Sampling(), gamma=6, confidence=0.99)
    steps = list(decoder.decode(checks.prompts(decoder.target.vocab_size, (5,)), 9, torch.Generator()))
    assert all(step.draft_passes == 1 for step in steps[1:-1])


def test_rounds_without_a_draft_are_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sat out changes no later draft; more passes than are kept are read at once."""
    monkeypatch.setattr("methods.speculative.mtp.MOST_UNREAD", 2)
    target = checks.tiny_target()
    prompts = checks.prompts(target.vocab_size, (5, 9))
    drafts: dict[bool, list[Any]] = {}
    propose = MtpDrafter.propose
    for sits_out in (False, True):
        found = drafts.setdefault(sits_out, [])

        def watched(self: MtpDrafter, context: Any, found: list[Any] = found, sits: bool = sits_out) -> Any:
            lengths = [len(row) for row in context.tokens]
            if sits and lengths[0] % 6:
                self.skip(context)
                return Draft.chains([[] for _ in lengths], context.root.device)
            draft = propose(self, context)
            found.append((lengths, draft.tokens.tolist()))
            return draft

        monkeypatch.setattr(MtpDrafter, "propose", watched)
        checks.outputs(mtp(target, Sampling(), gamma=2), prompts, 30)
    plain = {tuple(lengths): tokens for lengths, tokens in drafts[False]}
    assert len(drafts[True]) > 3 and any(tuple(lengths) in plain for lengths, _ in drafts[True])
    assert all(plain.get(tuple(lengths), tokens) == tokens for lengths, tokens in drafts[True])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eh_proj.weight": None}, "must ship a module for multi-token prediction .*, got .* without one"),
        ({"hnorm.weight": None}, "missing: hnorm.weight"),
        ({"self_attn.q_proj.weight": None}, "missing: self_attn.q_proj.weight"),
        ({"eh_proj.weight": torch.zeros(32, 32)}, r"eh_proj.weight has the shape \(32, 32\), \(32, 64\) is needed"),
        ({"odd.weight": torch.zeros(2)}, "not known: odd.weight"),
        ({"embed_tokens.weight": torch.randn(61, 32)}, "embedding is that of another model"),
        ({"shared_head.head.weight": torch.randn(61, 32)}, "its output matrix is its own"),
    ],
)
def test_other_forms_are_refused(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    target = checks.tiny_target(61)
    tensors = published(target) | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        MultiTokenPrediction(ship(target, tmp_path, kept), Sampling())


def test_several_modules_are_refused(tmp_path: Path) -> None:
    target = checks.tiny_target(61)
    ship(target, tmp_path, published(target))
    tensors = load_file(tmp_path / "model.safetensors")
    more = {name.replace(".4.", ".5.", 1): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors | more, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="several modules"):
        MultiTokenPrediction(target, Sampling())


@pytest.mark.parametrize("shape", [None, (3, 48)], ids=["missing", "of another shape"])
def test_incomplete_experts_are_named(shape: tuple[int, int] | None, tmp_path: Path) -> None:
    target = CausalLM.from_hf(tiny("qwen3_moe"), keep_hf=True)
    tensors = published(target)
    del tensors["mlp.experts.3.up_proj.weight"]
    if shape is not None:
        tensors["mlp.experts.3.up_proj.weight"] = torch.zeros(shape)
    with pytest.raises(ValueError, match="missing: mlp.experts.gate_up_proj"):
        MultiTokenPrediction(ship(target, tmp_path, tensors), Sampling())


def test_families_that_are_not_proven_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of a family that is proven .*glm4_moe.*, got 'qwen2'"):
        MultiTokenPrediction(CausalLM.from_hf(tiny("qwen2"), keep_hf=True), Sampling())


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_models_whose_layers_the_engine_has_not_are_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"must be one whose forward pass is proven .*got '{family}'"):
        causal_layers.check(AutoConfig.for_model(family))


@pytest.mark.parametrize("options", [{"gamma": 0}, {"confidence": 1.0}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mtp needs gamma >= 1 and 0 <= confidence < 1, got "):
        mtp(checks.tiny_target(), Sampling(), **options)
