"""The same decoders on a GPU: equal to the CPU reference in 64 bit, finite in 16 bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.config.schema import PathsConfig
from bench.contract import checks
from bench.models import loading, parallel
from methods.autoregressive import Autoregressive
from methods.decoder import PrefixCaching
from methods.early_exit.calm import Calm
from methods.early_exit.free import Free
from methods.early_exit.hash_ee import HashEE
from methods.early_exit.hash_tables import HashTable
from methods.early_exit.loop import ExitDecoder
from methods.early_exit.static_depth import StaticDepth
from methods.engine.causal_lm import CausalLM
from methods.engine.cpu_kernels import BLOCK
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.gpu_linear import Float8Linear, Int4Linear
from methods.engine.sampling import Sampling
from methods.speculative.heads.blockwise import Blockwise
from methods.speculative.lookahead import Lookahead
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.self_speculative.decoder import SelfSpeculative
from methods.speculative.speculative_sampling import SpeculativeSampling
from methods.speculative.suffix_decoding import SuffixDecoding
from methods.speculative.token_recycling import TokenRecycling
from tests.helpers.tiny_block_drafter import DSPARK, block_drafter
from tests.helpers.tiny_eagle import eagle
from tests.helpers.tiny_head_trees import hydra, medusa
from tests.helpers.tiny_heads import blockwise_heads
from tests.helpers.tiny_p_eagle import p_eagle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


def blockwise(target, sampling):
    with tempfile.TemporaryDirectory() as folder:
        blockwise_heads(target, []).save(Path(folder))
        return Blockwise(target, sampling, checkpoint=Path(folder))


def hash_ee(target, sampling, depths=(4,)):
    with tempfile.TemporaryDirectory() as folder:
        HashTable(np.resize(depths, target.vocab_size), target.n_layers).save(Path(folder))
        return HashEE(target, sampling, "hash", head="lens", checkpoint=Path(folder))


RELAXED = {
    "calm": lambda target, sampling: Calm(target, sampling, 0.05, exits=[1, 2, 3], head="lens"),
    "calm_saturation": lambda target, sampling: Calm(target, sampling, 0.75, "saturation", [1, 2, 3], "lens"),
    "static_depth": lambda target, sampling: StaticDepth(target, sampling, 2, "lens"),
    "free": lambda target, sampling: Free(target, sampling, 2, 0.1, head="lens"),
    "free_rollback": lambda target, sampling: Free(target, sampling, 2, 0.1, "rollback", head="lens", distance=1.0),
    "hash_ee": lambda target, sampling: hash_ee(target, sampling, (1, 2, 4)),
}
DECODERS = {
    "calm_full": lambda target, sampling: Calm(target, sampling, 1.0, exits=[1, 3], head="lens"),
    "free_verify": lambda target, sampling: Free(target, sampling, 2, 0.1, "verify", head="lens"),
    "hash_ee_full": hash_ee,
    "eagle": lambda target, sampling: eagle(target, sampling, 3, depth=3, top_k=3, nodes=8),
    "eagle_1": lambda target, sampling: eagle(target, sampling, 1, tree="static", draw=True),
    "eagle_chain": lambda target, sampling: eagle(target, sampling, 3, tree="chain"),
    "p_eagle": lambda target, sampling: p_eagle(target, sampling, draw=True),
    "dflash_tree": lambda target, sampling: block_drafter(target, sampling, tree="dynamic"),
    "dspark": lambda target, sampling: block_drafter(target, sampling, sizes=DSPARK, draw=True),
    "blockwise": blockwise,
    "medusa": lambda target, sampling: medusa(target, sampling, nodes=12),
    "hydra_heads": lambda target, sampling: hydra(target, sampling, nodes=12),
    "autoregressive": Autoregressive,
    "prompt_lookup": PromptLookup,
    "layer_skip": lambda target, sampling: SpeculativeSampling(target, sampling, skip_attention=[1], skip_mlp=[2]),
    "lookahead": lambda target, sampling: Lookahead(target, sampling, window=3, ngram=3, guesses=3),
    "token_recycling": lambda target, sampling: TokenRecycling(target, sampling, tree="small"),
    "suffix": SuffixDecoding,
    "self_speculative": lambda target, sampling: SelfSpeculative(target, sampling, skip_attention=[1], skip_mlp=[2]),
    "layer_exit": lambda target, sampling: SelfSpeculative(target, sampling, layer_exit=2),
}


def decode(decoder, batch, limit):
    rows = [[] for _ in batch]
    for step in decoder.decode(batch, limit, torch.Generator(device="cuda").manual_seed(0)):
        for row, new in zip(rows, step.tokens, strict=True):
            row.extend(new)
        assert step.draft_ns is None or step.draft_ns >= 0
    return [row[:limit] for row in rows]


@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS.keys())
def test_greedy_text_is_that_of_the_cpu(make):
    reference = checks.tiny_target()
    batch = checks.prompts(reference.vocab_size, (5, 1, 14, 8))
    wanted = [checks.greedy_reference(reference, prompt, 11) for prompt in batch]
    target = CausalLM.from_hf(checks.tiny_target().hf.cuda())
    assert decode(make(target, Sampling()), batch, 11) == wanted


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS.keys())
def test_text_by_graphs_is_that_of_the_cpu(make, kernels):
    reference = checks.tiny_target()
    batch = checks.prompts(reference.vocab_size, (5, 1, 14, 8))
    wanted = [checks.greedy_reference(reference, prompt, 40) for prompt in batch]
    dtype = torch.float64 if kernels == "torch" else torch.float32  # Triton's have no 64 bit
    target = CausalLM.from_hf(checks.tiny_target().hf.to("cuda", dtype))
    if kernels == "triton":
        target.use_triton()
    target = GraphedLM.of(target)
    for _ in range(2):  # captured, then replayed over the same cache
        decoder = make(target, Sampling())
        assert decode(decoder, batch, 40) == wanted
    in_portions = isinstance(decoder, ExitDecoder)
    assert (target.graphs.captured == 0) == in_portions, "layers up to an exit run kernel by kernel"


@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS.keys())
def test_a_kept_text_outlives_the_graphs_of_others(make):
    target = GraphedLM.of(CausalLM.from_hf(checks.tiny_target().hf.cuda()))
    if not isinstance(make(target, Sampling()), PrefixCaching):
        pytest.skip("it reads every prompt whole")
    other, text = Autoregressive(target, Sampling()), torch.tensor([8, 1] * 20, device="cuda")
    kept = checks.check_prefix_cache(make, target, limit=24, between=lambda: decode(other, [text], 30))
    assert kept[0] >= 9 and kept[4] == 0


@pytest.mark.parametrize("make", RELAXED.values(), ids=RELAXED.keys())
def test_relaxed_text_is_that_of_the_cpu(make):
    reference = checks.tiny_target()
    batch = checks.prompts(reference.vocab_size, (5, 1, 14, 8))
    wanted = checks.outputs(make(reference, Sampling()), batch, 11)
    target = CausalLM.from_hf(checks.tiny_target().hf.cuda())
    assert decode(make(target, Sampling()), batch, 11) == wanted


@pytest.mark.parametrize("make", (DECODERS | RELAXED).values(), ids=(DECODERS | RELAXED).keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_run_and_sample(make, dtype):
    target = CausalLM.from_hf(checks.tiny_target().hf.to("cuda", dtype))
    batch = checks.prompts(target.vocab_size, (9, 4))
    for sampling in (Sampling(), Sampling(0.8, top_p=0.9)):
        assert [len(row) for row in decode(make(target, sampling), batch, 20)] == [20, 20]


def steps_of(twin):
    """From each weight to the next number of its grid."""
    if isinstance(twin, Int4Linear):
        return twin._blocks.scale.float().repeat_interleave(BLOCK, 1)
    exponent = twin.weight.float().frexp().exponent  # of e4m3: three bits after the first one
    return twin._scale * 2.0 ** (exponent.clamp(min=-5) - 4)


@pytest.mark.parametrize("kind", [Int4Linear, Float8Linear])
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_products_of_fewer_bits_are_those_of_their_twin(kind, rows):
    needed = (9, 0) if kind is Float8Linear else (8, 0)
    if torch.cuda.get_device_capability() < needed:
        pytest.skip("this GPU has no such kernel")
    torch.manual_seed(0)
    weight, x = torch.randn(256, 512).to(torch.bfloat16) / 8, torch.randn(rows, 512).to(torch.bfloat16)
    twin, found = kind(weight), kind(weight.cuda())
    wanted = twin(x).float()
    assert (found(x.cuda()).cpu().float() - wanted).norm() < 0.02 * wanted.norm()
    away = (found.dense.cpu().float() - twin.dense.float()).abs() / steps_of(twin)
    assert away.max() < 1.5 and (away > 0.25).float().mean() < 0.005, "only halves may be rounded the other way"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_target_on_two_gpus_writes_the_text_of_one():
    hardware = {"device": "cuda", "dtype": "float32", "graphs": "off"}
    model = {"name": "random", "hidden_size": 64, "heads": 4, "kv_heads": 2, "layers": 3}
    batch = [prompt.cuda() for prompt in checks.prompts(61, (5, 9))]
    try:
        spread = loading.load({**model, "parallel": 2}, hardware, PathsConfig()).lm
        whole = loading.load(model, hardware, PathsConfig()).lm
        wanted = decode(Autoregressive(whole, Sampling()), batch, 20)
        assert decode(PromptLookup(spread, Sampling()), batch, 20) == wanted
    finally:
        parallel.stop()


@pytest.fixture
def refuse_waits() -> Iterator[Callable[[], None]]:
    """Lets operations fail that make the host wait, other than for events, from a call on to the end of the test."""
    try:
        yield partial(torch.cuda.set_sync_debug_mode, "error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["autoregressive", "prompt_lookup", "suffix", "medusa", "hydra_heads", "eagle"])
def test_a_recorded_round_waits_for_its_read_alone(name, refuse_waits):
    """The read waits for an event, as do the stopwatches."""
    target = GraphedLM.of(CausalLM.from_hf(checks.tiny_target().hf.cuda()))
    decoder, batch = DECODERS[name](target, Sampling()), checks.prompts(target.vocab_size, (9,))
    for _ in range(3):
        decode(decoder, batch, 40)
    steps = decoder.decode(batch, 40, torch.Generator(device="cuda").manual_seed(0))
    next(steps), next(steps)
    refuse_waits()
    assert sum(1 for _ in steps) > 5
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device="cuda").item()
