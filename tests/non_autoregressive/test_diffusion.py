"""Diffusion models: the engine against transformers, the decoder against a naive loop, published checkpoints' names."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bench.config import compose, instantiate
from bench.config.schema import PathsConfig
from bench.contract.checks import prompts
from bench.errors import UserError
from bench.models import loading, source
from bench.models.masked_diffusion import LAYOUTS
from bench.models.random_weights import byte_tokenizer
from methods.decoder import Guarantee, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.masked_lm import Denoising, MaskedLM
from methods.engine.sampling import Sampling
from methods.non_autoregressive.diffusion import Diffusion, confidences

VOCAB, MASK = 41, 40
ONE = {"threshold": None, "cache": "none"}
MODELS = {
    "both_ways": Denoising(MASK),
    "shifted": Denoising(MASK, shifted=True),
    "blocks": Denoising(MASK, block_size=4, block_causal=True),
    "blocks_of_text": Denoising(MASK, block_size=4, block_causal=True, blocks_from="text"),
    "blocks_shifted": Denoising(MASK, shifted=True, block_size=3, block_causal=True, blocks_from="text"),
}
every_model = pytest.mark.parametrize("denoising", MODELS.values(), ids=MODELS.keys())


def make(denoising: Denoising, seed: int = 0, kind: Any = LlamaForCausalLM, **config: Any) -> MaskedLM:
    """A random model in 64 bit with a sharp distribution, its original kept."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    made = kind.config_class(
        vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=256, **shape, **(ids | config)
    )
    denoising.put(made)
    model = kind(made).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double) * 0.35)
    return MaskedLM.from_hf(model, keep_hf=True)


def reference_logits(lm: MaskedLM, ids: list[int], origin: int) -> Tensor:
    """[T, V]: what stands at each position, by transformers' forward over the whole text under an explicit mask."""
    own, count = lm.denoising, len(ids)
    allowed = torch.ones(count, count, dtype=torch.bool)
    if own.block_causal:
        block = [(place - origin) // own.block_size for place in range(count)]
        allowed = torch.tensor([[there <= here for there in block] for here in block])
    mask = torch.zeros(1, 1, count, count, dtype=torch.double).masked_fill_(~allowed, -torch.inf)
    with torch.no_grad():
        logits = lm.hf(torch.tensor([ids]), attention_mask=mask).logits[0]
    if own.shifted:
        logits = torch.cat([logits[:1], logits[:-1]])
    logits[:, own.mask_id] = -torch.inf
    return logits


def reference(lm: MaskedLM, prompt: Tensor, limit: int, size: int, keep: Any) -> tuple[list[int], int]:
    """The loop without cache, batch or canvas: one row, the whole text in every pass. Returns the answer and passes.

    ``keep`` turns the sorted (confidence, place) of the masks in the block into how many of them stay.
    """
    own, ids = lm.denoising, prompt.tolist()
    origin = len(ids) - len(ids) % size if own.block_causal and own.blocks_from == "text" else len(ids)
    total, passes = len(ids) + limit, 0
    if own.block_causal:
        total = origin + -(-(total - origin) // size) * size
    canvas = ids + [MASK] * (total - len(ids))
    for begin in range(origin, total, size):
        block = range(max(begin, len(ids)), min(begin + size, total))
        while any(canvas[place] == MASK for place in block):
            passes += 1
            probs = reference_logits(lm, canvas, origin).softmax(-1)
            open_places = [place for place in block if canvas[place] == MASK]
            ranked = sorted((-float(probs[p].max()), p) for p in open_places)
            for _, place in ranked[: keep([-sure for sure, _ in ranked])]:
                canvas[place] = int(probs[place].argmax())
    return canvas[len(ids) :], passes


def run(lm: MaskedLM, batch: list[Tensor], limit: int, sampling: Sampling | None = None, **options: Any) -> list[Step]:
    decoder = Diffusion(lm, sampling or Sampling(), **options)
    return list(decoder.decode(batch, limit, torch.Generator().manual_seed(0)))


def texts(steps: list[Step]) -> list[list[int]]:
    return [[token for step in steps for token in step.tokens[row]] for row in range(len(steps[0].tokens))]


def passes(steps: list[Step]) -> int:
    return sum(step.target_passes for step in steps)


# ------------------------------------------------------------------------------------------------ against a naive loop


@every_model
def test_one_token_per_pass_is_the_naive_loop(denoising: Denoising) -> None:
    lm, limit = make(denoising), 10
    sizes = [denoising.block_size] if denoising.block_size else [3, 4, 10]
    for size, prompt in itertools.product(sizes, prompts(MASK, (1, 6, 8))):
        steps = run(lm, [prompt], limit, block_size=size, **ONE)
        answer, count = reference(lm, prompt, limit, size, lambda sure: 1)
        assert texts(steps)[0] == answer and passes(steps) == count == len(answer) >= limit
        assert MASK not in answer


@every_model
@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.9])
def test_threshold_is_the_naive_loop(denoising: Denoising, threshold: float) -> None:
    lm, limit, size = make(denoising, seed=2), 11, denoising.block_size or 5
    for prompt in prompts(MASK, (2, 7)):
        steps = run(lm, [prompt], limit, block_size=size, threshold=threshold, cache="none")
        wanted = reference(lm, prompt, limit, size, lambda sure: max(1, sum(s > threshold for s in sure)))
        assert (texts(steps)[0], passes(steps)) == wanted


def test_schedule_keeps_so_many_per_pass() -> None:
    lm, (prompt,) = make(MODELS["both_ways"]), prompts(MASK, (6,))
    steps = run(lm, [prompt], 10, block_size=5, threshold=None, tokens_per_step=2, cache="none")
    assert texts(steps)[0] == reference(lm, prompt, 10, 5, lambda sure: 2)[0]
    assert [step.target_passes for step in steps] == [3, 3]


def test_threshold_of_one_is_one_token_per_pass_even_of_certain_tokens() -> None:
    lm, batch = make(MODELS["both_ways"]), prompts(MASK, (5,))
    with torch.no_grad():
        lm.hf.lm_head.weight.mul_(1e4)  # probabilities of exactly 1
    lm = MaskedLM.from_hf(lm.hf, keep_hf=True)
    canvas = batch[0].tolist() + [MASK] * 8
    assert (reference_logits(lm, canvas, 5).softmax(-1).amax(-1)[5:] == 1).any()
    one = run(lm, batch, 8, **ONE)
    certain = run(lm, batch, 8, threshold=1.0, cache="none")
    assert texts(certain) == texts(one) and passes(certain) == passes(one) == 8


def test_block_as_long_as_the_answer_is_no_block() -> None:
    lm, batch = make(MODELS["both_ways"]), prompts(MASK, (5, 9))
    whole = run(lm, batch, 8, **ONE)
    assert texts(run(lm, batch, 8, block_size=8, **ONE)) == texts(whole) and len(whole) == 1
    assert texts(run(lm, batch, 8, block_size=3, **ONE)) != texts(whole)


# ------------------------------------------------------------------------------------------------------ rows and caches


@every_model
def test_row_of_a_ragged_batch_is_what_it_is_alone(denoising: Denoising) -> None:
    lm, batch = make(denoising, seed=1), prompts(MASK, (5, 1, 12, 8))
    for cache in ("none", "exact") if denoising.block_causal else ("none", "prefix", "dual"):
        options = {"threshold": 0.2, "cache": cache, "block_size": denoising.block_size or 4}
        together = texts(run(lm, batch, 10, **options))
        for row, prompt in enumerate(batch):
            assert together[row] == texts(run(lm, [prompt], 10, **options))[0]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("blocks")])
@pytest.mark.parametrize("options", [{"threshold": None}, {"threshold": 0.2}], ids=str)
def test_cache_of_finished_blocks_is_exact(name: str, options: dict[str, Any]) -> None:
    lm, batch = make(MODELS[name], seed=3), prompts(MASK, (1, 4, 6, 11))
    plain, kept = run(lm, batch, 13, cache="none", **options), run(lm, batch, 13, cache="exact", **options)
    assert texts(kept) == texts(plain) and passes(kept) == passes(plain)
    assert max(step.nodes for step in kept[1:]) <= 2 * lm.denoising.block_size + 1 < plain[-1].nodes


def stale_reference(lm: MaskedLM, prompt: Tensor, limit: int, size: int, cache: str) -> list[int]:
    """Fast-dLLM's caches by another way: keys and values of every layer are as the pass over everything made them."""
    ids = prompt.tolist() + [MASK] * limit
    for begin in range(len(prompt), len(ids), size):
        block, fresh, kept = range(begin, min(begin + size, len(ids))), True, {}
        while any(ids[place] == MASK for place in block):
            stop = len(ids) if cache == "prefix" else block[-1] + 1
            first = 0 if fresh else begin - lm.denoising.shifted
            logits = layers_by_hand(lm, ids, (0, len(ids)) if fresh else (first, stop), kept)
            logits[:, MASK] = -torch.inf
            probs = logits.softmax(-1)
            _, place = max((float(probs[p - first - lm.denoising.shifted].max()), -p) for p in block if ids[p] == MASK)
            ids[-place] = int(probs[-place - first - lm.denoising.shifted].argmax())
            fresh = False
    return ids[len(prompt) :]


def layers_by_hand(lm: MaskedLM, ids: list[int], window: tuple[int, int], kept: dict[int, Any]) -> Tensor:
    """Logits of a window by transformers' own layers; keys and values of places outside are those in ``kept``."""
    base, (start, stop) = lm.hf.model, window
    with torch.no_grad():
        hidden = base.embed_tokens(torch.tensor([ids[start:stop]]))
        cos, sin = base.rotary_emb(hidden, torch.arange(start, stop)[None])
        for number, layer in enumerate(base.layers):
            own, rows = layer.self_attn, layer.input_layernorm(hidden)
            query, key, value = (
                p(rows)[0].unflatten(-1, (-1, own.head_dim)) for p in (own.q_proj, own.k_proj, own.v_proj)
            )
            query, key = (rotate(x, cos[0], sin[0]) for x in (query, key))
            keys, values = kept.setdefault(number, (torch.zeros(len(ids), *key.shape[1:]).double(),) * 2)
            keys, values = keys.clone(), values.clone()
            keys[start:stop], values[start:stop] = key, value
            kept[number] = keys, values
            wide_keys, wide_values = (x.repeat_interleave(own.num_key_value_groups, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query, wide_keys) * own.head_dim**-0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_values)
            hidden = hidden + own.o_proj(mixed.flatten(1))[None]
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return lm.hf.lm_head(base.norm(hidden))[0]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


@pytest.mark.parametrize("name", ["both_ways", "shifted"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_approximate_caches_keep_what_the_opening_pass_wrote(name: str, cache: str) -> None:
    lm, batch = make(MODELS[name], seed=4), prompts(MASK, (3, 7))
    steps = run(lm, batch, 9, threshold=None, block_size=4, cache=cache)
    for row, prompt in enumerate(batch):
        assert texts(steps)[row] == stale_reference(lm, prompt, 9, 4, cache)
    assert texts(steps) != texts(run(lm, batch, 9, block_size=4, **ONE)), "the caches change nothing: bad example"


def test_work_is_counted_as_it_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, batch, seen = make(MODELS["both_ways"]), prompts(MASK, (3, 7)), []
    original = MaskedLM.run
    monkeypatch.setattr(
        MaskedLM, "run", lambda s, state, layers: seen.append(state.hidden.shape) or original(s, state, layers)
    )
    decoder = Diffusion(lm, Sampling(), threshold=0.1, block_size=4, cache="dual")
    steps = list(decoder.decode(batch, 8, torch.Generator()))
    facts = decoder.stats()
    assert passes(steps) == facts["passes"] == len(seen) and len(steps) == 2
    assert facts["positions_scored"] == sum(batch * nodes for batch, nodes, _ in seen)
    assert facts["full_passes"] == sum(nodes == 7 + 8 for _, nodes, _ in seen) == 2
    assert facts["masks_filled"] == 16 and "one token per pass" in facts["baseline"]
    assert steps[0].nodes == -(-sum(n for _, n, _ in seen[: steps[0].target_passes]) // steps[0].target_passes)


# ------------------------------------------------------------------------------------------------------------- options


def test_confidences_by_hand() -> None:
    logits = torch.tensor([[[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]]]).log()
    tokens, rng = torch.tensor([[1, 0]]), torch.Generator()
    assert confidences("probability", logits, tokens, rng).tolist()[0] == pytest.approx([0.3, 0.9])
    assert confidences("margin", logits, tokens, rng).tolist()[0] == pytest.approx([0.2, 0.8])
    assert confidences("entropy", logits, tokens, rng).tolist()[0] == pytest.approx([-1.0297, -0.3251], abs=1e-4)
    drawn = confidences("random", logits, tokens, rng.manual_seed(1))
    assert ((drawn >= 0) & (drawn < 1)).all() and drawn.unique().numel() == 2


def test_end_of_text_is_written_last() -> None:
    lm, batch = make(MODELS["both_ways"]), prompts(MASK, (5,))
    common = max(range(VOCAB), key=texts(run(lm, batch, 12, **ONE))[0].count)
    lm.eos_ids = (common,)
    first = _order_of(lm, batch, common, late_eos=False)
    late = _order_of(lm, batch, common, late_eos=True)
    assert first != sorted(first) and late == sorted(late) and late.count(True) > 0


def _order_of(lm: MaskedLM, batch: list[Tensor], end: int, late_eos: bool) -> list[bool]:
    """Whether the token written in each pass was the end, where others were on offer."""
    written: list[bool] = []
    decoder = Diffusion(lm, Sampling(), late_eos=late_eos, **ONE)
    original = decoder._kept

    def watch(logits: Tensor, tokens: Tensor, masked: Tensor, rng: Any) -> Tensor:
        kept = original(logits, tokens, masked, rng)
        if (tokens[masked] != end).any():
            written.append(int(tokens[kept]) == end)
        return kept

    decoder._kept = watch  # type: ignore[method-assign]
    list(decoder.decode(batch, 12, torch.Generator()))
    return [*written, True] if late_eos else written


def test_sampling_draws_from_the_processed_distribution() -> None:
    lm, (prompt,) = make(MODELS["both_ways"]), prompts(MASK, (4,))
    sampling = Sampling(0.8, top_p=0.9)
    wanted = sampling.probs(reference_logits(lm, [*prompt.tolist(), MASK], 4)[-1])
    drawn = torch.tensor(texts(run(lm, [prompt] * 4000, 1, sampling))).flatten()
    share = torch.bincount(drawn, minlength=VOCAB) / 4000
    assert (share[wanted == 0] == 0).all()
    assert (share - wanted).abs().max() < 5 * (0.25 / 4000) ** 0.5


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("both_ways", {"tokens_per_step": 0}, "tokens_per_step=0"),
        ("both_ways", {"threshold": 1.5}, "threshold must be between 0 and 1 .*got 1.5"),
        ("both_ways", {"confidence": "random"}, "confidence=random"),
        ("both_ways", {"cache": "exact"}, "looks both ways"),
        ("blocks", {"cache": "dual"}, "ends with the block"),
        ("blocks", {"block_size": 8}, "block_size must be 4 .*got 8"),
    ],
)
def test_refusals(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Diffusion(make(MODELS[name]), Sampling(), **options)


def test_model_that_writes_from_left_to_right_is_refused() -> None:
    from bench.contract.checks import tiny_target

    with pytest.raises(ValueError, match="writes from left to right"):
        Diffusion(tiny_target(), Sampling())
    assert Diffusion(make(MODELS["blocks"]), Sampling()).guarantee is Guarantee.RELAXED


# ------------------------------------------------------------------------------------------------------ a trained one


COPIED = 6


def copies(rows: int) -> Tensor:
    """Prompts and answers that repeat them: given the prompt, tokens of the answer do not depend on each other."""
    return torch.randint(0, 30, (rows, COPIED)).repeat(1, 2)


@pytest.fixture(scope="module")
def copier() -> MaskedLM:
    """Learns in a second of one core to write its prompt once more."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=4, max_position_embeddings=64, **shape)
    Denoising(MASK).put(config)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    both_ways = torch.zeros(1, 1, 2 * COPIED, 2 * COPIED)
    for _ in range(120):
        ids = copies(64)
        masked = (torch.rand(64, 2 * COPIED) < torch.rand(64, 1)) & (torch.arange(2 * COPIED) >= COPIED)
        logits = model(torch.where(masked, MASK, ids), attention_mask=both_ways).logits
        loss = torch.nn.functional.cross_entropy(logits[masked], ids[masked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return MaskedLM.from_hf(model.requires_grad_(False))


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_trained_model_loses_nothing_by_parallel_decoding(copier: MaskedLM, cache: str) -> None:
    ids = copies(100)
    batch, wanted = list(ids[:, :COPIED]), ids[:, COPIED:].tolist()
    for threshold, most in ((None, COPIED), (0.9, 2)):
        steps = run(copier, batch, COPIED, cache=cache, block_size=COPIED, threshold=threshold)
        right = sum(found == want for found, want in zip(texts(steps), wanted, strict=True))
        assert right >= 99 and passes(steps) <= most
    assert passes(run(copier, batch, COPIED, cache=cache, threshold=None)) == COPIED


# --------------------------------------------------------------------------------------------------------- checkpoints

FP32 = {"device": "cpu", "dtype": "float32", "threads": 1, "linear": "plain"}
LLADA = {
    "activation_type": "silu",
    "alibi": False,
    "architectures": ["LLaDAModelLM"],
    "attention_layer_norm": False,
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
    "block_type": "llama",
    "d_model": 32,
    "embedding_size": 272,
    "eos_token_id": 257,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "mask_token_id": 270,
    "max_sequence_length": 64,
    "mlp_hidden_size": 48,
    "mlp_ratio": 4,
    "model_type": "llada",
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "pad_token_id": 257,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 270,
    "weight_tying": False,
}
LLADA_KEYS = {
    "model.embed_tokens.weight": "model.transformer.wte.weight",
    "model.norm.weight": "model.transformer.ln_f.weight",
    "lm_head.weight": "model.transformer.ff_out.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def llada_name(ours: str) -> str:
    """``model.layers.0.mlp.up_proj.weight`` as LLaDA's repository calls it."""
    if ours in LLADA_KEYS:
        return LLADA_KEYS[ours]
    number, _, rest = ours.removeprefix("model.layers.").partition(".")
    return f"model.transformer.blocks.{number}.{LLADA_KEYS[rest.removesuffix('.weight')]}.weight"


def write(folder: Path, model: Any, config: dict[str, Any], rename: Any = lambda name: name) -> Path:
    """A checkpoint as the repository of a diffusion model has it."""
    torch.manual_seed(1)
    for parameter in model.parameters():  # norms too: a swapped one must be seen
        torch.nn.init.normal_(parameter, std=0.3)
    folder.mkdir()
    save_file(
        {rename(name): value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def llada(tmp_path: Path) -> tuple[Path, Any]:
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    model = LlamaForCausalLM(config).eval()
    return write(tmp_path / "llada", model, LLADA, llada_name), model


def load(folder: Path, tmp_path: Path, **group: Any) -> source.Loaded:
    source = {"name": str(folder), "_target_": "bench.models.masked_diffusion.MaskedModel", **group}
    return loading.load(source, FP32, PathsConfig(cache=str(tmp_path / "cache")), keep_hf=True)


def check_logits(lm: Any, model: Any) -> None:
    """The engine over the loaded weights says what the original says."""
    ids = torch.randint(0, 256, (1, 9))
    cache = lm.new_cache(1, 9)
    shifted = int(lm.denoising.shifted)
    found = lm.denoise(ids, cache, [9], [0], torch.arange(shifted, 9)[None])[0]
    with torch.no_grad():
        wanted = model(ids, attention_mask=torch.zeros(1, 1, 9, 9)).logits[0, : 9 - shifted]
    wanted[:, lm.denoising.mask_id] = -torch.inf
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_llada_checkpoint_by_its_own_names(llada: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = llada
    names = set(load_file(folder / "model.safetensors"))
    assert {"model.transformer.blocks.1.ff_out.weight", "model.transformer.ff_out.weight"} < names
    loaded = load(folder, tmp_path, block_size=4, eos_ids=[257, 259])
    assert loaded.denoises and loaded.kind == "causal"
    assert loaded.lm.denoising == Denoising(270, block_size=4) and loaded.lm.eos_ids == (257, 259)
    assert loaded.lm.max_positions == 64
    check_logits(loaded.lm, model)


@pytest.mark.parametrize("change", [{"block_type": "sequential"}, {"include_qkv_bias": True}, {"alibi": True}], ids=str)
def test_other_networks_under_the_name_are_refused(
    llada: tuple[Path, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    (llada[0] / "config.json").write_text(json.dumps(LLADA | change))
    with pytest.raises(UserError, match=next(iter(change))):
        load(llada[0], tmp_path)


def test_missing_weight_is_refused(llada: tuple[Path, Any], tmp_path: Path) -> None:
    weights = load_file(llada[0] / "model.safetensors")
    del weights["model.transformer.blocks.1.up_proj.weight"]
    save_file(weights, llada[0] / "model.safetensors")
    with pytest.raises(UserError, match="lacks 1 weights"):
        load(llada[0], tmp_path)


def test_dream_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = {
        **shape,
        "architectures": ["DreamModel"],
        "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
        "eos_token_id": 257,
        "mask_token_id": 269,
        "max_position_embeddings": 128,
        "model_type": "Dream",
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 272,
    }
    own = Qwen2Config(
        vocab_size=272,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        **shape,
    )
    model = Qwen2ForCausalLM(own).eval()
    folder = write(tmp_path / "dream", model, theirs)
    ours = replace(LAYOUTS["Dream"], tokenizer="PreTrainedTokenizerFast")  # the fixture's is no BPE of Qwen2
    monkeypatch.setitem(LAYOUTS, "Dream", ours)
    loaded = load(folder, tmp_path)
    assert loaded.lm.denoising == Denoising(269, shifted=True)
    check_logits(loaded.lm, model)


def test_unknown_kind_and_missing_mask_are_refused(llada: tuple[Path, Any], tmp_path: Path) -> None:
    (llada[0] / "config.json").write_text(json.dumps(LLADA | {"model_type": "other"}))
    with pytest.raises(UserError, match="'other'"):
        load(llada[0], tmp_path)
    (llada[0] / "config.json").write_text(json.dumps(LLADA | {"mask_token_id": None}))
    with pytest.raises(UserError, match=r"model\.mask_token_id"):
        load(llada[0], tmp_path)


# ------------------------------------------------------------------------------------------------------------ the bench


WORDS = ("Hello", "Write", "Go")


def test_run_from_configuration_to_verdict(llada: tuple[Path, Any], tmp_path: Path) -> None:
    from bench.measure.run import run as run_bench
    from bench.records import run_folder

    words = [
        "method=diffusion",
        "model=llada_8b",
        f"model.name={llada[0]}",
        "model.eos_ids=[271]",
        "model.block_size=4",
        "measure=quick",
        "measure.cost_curve=true",
        "dataset.limit=2",
        "hardware=cpu_fp32",
        "hardware.threads=1",
        "max_new_tokens=8",
        "method.threshold=0.01",
        f"paths.results={tmp_path / 'results'}",
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question_id": place, "category": "chat", "turns": [word]}) + "\n"
            for place, word in enumerate(WORDS)
        )
    )
    outcome = run_bench(compose.compose([*words, "dataset=jsonl", f"dataset.path={path}"]))
    summary, manifest = outcome.summary, run_folder.read_manifest(outcome.path)
    assert manifest is not None
    assert summary["agreement"]["exact"] is None and "diffusion" in summary["agreement"]["reason"]
    assert summary["baseline"]["tokens_per_step"] == 1.0 < summary["tokens_per_step"]
    assert "one token per pass" in manifest["method_facts"]["baseline"]
    assert "cost_curve" not in manifest


def test_diffusion_models_and_their_decoder_go_together_only() -> None:
    from bench.measure.preconditions import check

    (found,) = check(compose.compose(["method=prompt_lookup", "model=llada_8b"]))
    assert "needs a model that writes from left to right, got model=" in found
    assert "needs a masked diffusion model" in " ".join(check(compose.compose(["method=diffusion"])))
    assert check(compose.compose(["method=diffusion", "model=llada_8b"])) == []
    assert instantiate.locate("bench.models.masked_diffusion.MaskedModel") is not None
    assert not source.Loaded(CausalLM.__new__(CausalLM), byte_tokenizer(), "m", None, None).denoises
