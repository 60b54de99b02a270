"""Every decoder of the suite keeps the contract; a new method is one more row of ``DECODERS``."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee, PrefixCaching
from methods.early_exit.calm import Calm
from methods.early_exit.free import Free
from methods.early_exit.hash_ee import HashEE
from methods.early_exit.hash_tables import HashTable
from methods.early_exit.river import River
from methods.early_exit.static_depth import StaticDepth
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.external.flashspec import FlashSpec
from methods.external.transformers_generate import HFAssisted, HFCompiled, HFGenerate, HFPromptLookup
from methods.rows import ComputedRows
from methods.speculative.cascade import Cascade
from methods.speculative.heads.blockwise import Blockwise
from methods.speculative.hybrid import Hybrid
from methods.speculative.lookahead import Lookahead
from methods.speculative.ngram import Ngram
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.rest import Rest
from methods.speculative.rest_datastore import Datastore
from methods.speculative.self_diffusion import SelfDiffusion
from methods.speculative.self_speculative.decoder import SelfSpeculative
from methods.speculative.speculative_sampling import SpeculativeSampling
from methods.speculative.staged import Staged
from methods.speculative.suffix_decoding import SuffixDecoding
from methods.speculative.token_recycling import TokenRecycling
from methods.speculative.verification import ChainRejection
from tests.helpers.tiny_block_drafter import DSPARK, block_drafter
from tests.helpers.tiny_block_drafter import hybrid as block_hybrid
from tests.helpers.tiny_eagle import eagle, hybrid
from tests.helpers.tiny_head_trees import hydra, medusa
from tests.helpers.tiny_heads import blockwise_heads
from tests.helpers.tiny_mtp import mtp
from tests.helpers.tiny_p_eagle import hybrid as parallel_hybrid
from tests.helpers.tiny_p_eagle import p_eagle
from tests.helpers.tiny_self_diffusion import with_masks
from tests.helpers.tiny_vocabularies import pair


@dataclass(frozen=True)
class Row:
    """A decoder under test.

    Attributes:
        batch: takes more than one row.
        samples: its sampling is checked here.
        leaves: rows whose texts have ended leave its batch.
    """

    make: checks.Make
    batch: bool = True
    samples: bool = True
    leaves: bool = True


def hybrid_model(target, sampling, **options):
    return Hybrid(target, sampling, draft_model=checks.tiny_target(target.vocab_size, layers=2, seed=5), **options)


def other_model(target, sampling, **options):
    draft = checks.tiny_target(target.vocab_size, layers=2, seed=5)
    return SpeculativeSampling(target, sampling, draft_model=draft, **options)


@cache
def texts_of(target):
    """What the target writes by itself and, of the same prompts, what it writes when it is sampled."""
    batch = checks.prompts(target.vocab_size, (1, 2, 9, 17) * 5)
    texts = [checks.outputs(Autoregressive(target, s), batch, 13) for s in (Sampling(), Sampling(1.0), Sampling(1.0))]
    return [prompt.tolist() + row for rows in texts for prompt, row in zip(batch, rows, strict=True)]


def rest(target, sampling, **options):
    with tempfile.TemporaryDirectory() as folder:
        Datastore.build(texts_of(target), target.vocab_size).save(Path(folder))
        return Rest(target, sampling, checkpoint=Path(folder), **options)


@cache
def foreign_of(target):
    return pair(target)


def foreign(target, sampling, way, **options):
    return SpeculativeSampling(target, sampling, draft_model=foreign_of(target), vocabulary=way, **options)


@cache
def heads_of(target, vocabulary=None):
    return blockwise_heads(target, texts_of(target), vocabulary=vocabulary)


def blockwise(target, sampling, vocabulary=None, **options):
    with tempfile.TemporaryDirectory() as folder:
        heads_of(target, vocabulary).save(Path(folder))
        return Blockwise(target, sampling, checkpoint=Path(folder), **options)


def hash_ee(target, sampling, depths, *args, **options):
    table = np.resize(depths, target.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        HashTable(table, target.n_layers).save(Path(folder))
        return HashEE(target, sampling, *args, checkpoint=Path(folder), **options)


@cache
def in_32_bit(target):
    """The same weights in the type that the kernels for 4-bit copies need."""
    return CausalLM.from_hf(copy.deepcopy(target.hf).float())


def river(target, sampling, *args, **options):
    return River(in_32_bit(target), sampling, *args, **options)


def staged(target, sampling, **options):
    return Staged(in_32_bit(target), sampling, **options)


def cascade(target, sampling, **options):
    with tempfile.TemporaryDirectory() as folder:
        Datastore.build(texts_of(target), target.vocab_size).save(Path(folder))
        return Cascade(in_32_bit(target), sampling, checkpoint=Path(folder), **options)


def ngram(target, sampling, **options):
    with tempfile.TemporaryDirectory() as folder:
        Datastore.build(texts_of(target), target.vocab_size).save(Path(folder))
        return Ngram(target, sampling, checkpoint=Path(folder), **options)


PRICED = [[0, 0.05], [1, 1.0], [2, 1.05], [4, 1.2], [8, 1.9], [64, 20.0]]  # few nodes pay, and not always

COPIES = {  # need the kernels, and copies 32 bit; the target's text and distribution are those of 64 bit nevertheless
    "river_full": Row(lambda t, s: river(t, s, 1.0, [2])),
    "river_verify": Row(lambda t, s: river(t, s, 0.0, [1], accept="verify", max_pending=4)),
    "river_verify_similar": Row(lambda t, s: river(t, s, 0.6, [2, 3], "full", accept="verify")),
    "river_verify_drawn": Row(lambda t, s: river(t, s, 0.0, [2], accept="verify", rule=ChainRejection())),
    "staged": Row(lambda t, s: staged(t, s, gamma=6)),
    "staged_copy": Row(lambda t, s: staged(t, s, gamma=3, lookup=False, block=True)),
    "staged_costs": Row(lambda t, s: staged(t, s, gamma=5, alone=2, costs=PRICED)),
    "ngram": Row(lambda t, s: ngram(t, s, nodes=8)),
    "ngram_costs": Row(lambda t, s: ngram(t, s, nodes=12, costs=PRICED)),
    "staged_block": Row(lambda t, s: staged(t, s, gamma=5, block=True)),
    "cascade": Row(lambda t, s: cascade(t, s, gamma=6, guesses=4)),
    "cascade_costs": Row(lambda t, s: cascade(t, s, gamma=8, alone=2, costs=PRICED)),
}

DECODERS = {
    "autoregressive": Row(Autoregressive),
    "prompt_lookup": Row(PromptLookup),
    "prompt_lookup_first": Row(lambda t, s: PromptLookup(t, s, gamma=3, max_ngram=2, pick="first")),
    "prompt_lookup_prompt": Row(lambda t, s: PromptLookup(t, s, gamma=1, scope="prompt")),
    "layer_skip": Row(lambda t, s: SpeculativeSampling(t, s, gamma=3, skip_attention=[1], skip_mlp=[2])),
    "self_speculative": Row(lambda t, s: SelfSpeculative(t, s, gamma=3, skip_attention=[1, 2], skip_mlp=[2])),
    "self_speculative_first": Row(lambda t, s: SelfSpeculative(t, s, 2, 0.0, skip_attention=[0], skip_mlp=[3])),
    "self_speculative_one": Row(lambda t, s: SelfSpeculative(t, s, gamma=1, layer_exit=3)),
    "self_speculative_exit": Row(lambda t, s: SelfSpeculative(t, s, gamma=4, confidence=0.0, layer_exit=2)),
    "self_speculative_adaptive": Row(lambda t, s: SelfSpeculative(t, s, 6, 0.4, acceptance=0.5, layer_exit=3)),
    "draft_model": Row(lambda t, s: other_model(t, s, gamma=4)),
    "draft_model_confident": Row(lambda t, s: other_model(t, s, gamma=5, confidence=0.6)),
    "draft_model_block": Row(lambda t, s: other_model(t, s, gamma=3, block=True)),
    "draft_model_one": Row(lambda t, s: other_model(t, s, gamma=1)),
    "tli": Row(lambda t, s: foreign(t, s, "tli", gamma=3)),
    "tli_block": Row(lambda t, s: foreign(t, s, "tli", gamma=3, block=True)),
    "tli_confident": Row(lambda t, s: foreign(t, s, "tli", gamma=5, confidence=0.6)),
    "slem": Row(lambda t, s: foreign(t, s, "slem", gamma=5)),
    "slem_one": Row(lambda t, s: foreign(t, s, "slem", gamma=1)),
    "lookahead": Row(lambda t, s: Lookahead(t, s, window=4, ngram=4, guesses=3)),
    "lookahead_prompt": Row(
        lambda t, s: Lookahead(t, s, window=3, ngram=3, guesses=5, pool_from_prompt=True), samples=False
    ),
    "lookahead_one": Row(lambda t, s: Lookahead(t, s, window=1, ngram=3, guesses=1)),
    "token_recycling": Row(lambda t, s: TokenRecycling(t, s, tree="small")),
    "token_recycling_paper": Row(TokenRecycling, samples=False),
    "token_recycling_chain": Row(lambda t, s: TokenRecycling(t, s, tree=[[1], [1]])),
    "suffix": Row(SuffixDecoding),
    "suffix_long": Row(lambda t, s: SuffixDecoding(t, s, gamma=6, factor=8.0, min_prob=0.0), samples=False),
    "suffix_one": Row(lambda t, s: SuffixDecoding(t, s, gamma=1, min_match=2)),
    "suffix_all": Row(lambda t, s: SuffixDecoding(t, s, factor=2.0, matches="all")),
    "rest": Row(lambda t, s: rest(t, s, nodes=8, occurrences=64)),
    "rest_defaults": Row(rest, samples=False),
    "rest_wide": Row(
        lambda t, s: rest(t, s, nodes=12, max_ngram=2, min_ngram=1, continuation=3, occurrences=5), samples=False
    ),
    "rest_cut": Row(lambda t, s: rest(t, s, nodes=8, occurrences=64, cut=True)),
    "rest_one": Row(lambda t, s: rest(t, s, nodes=1, max_ngram=3, min_ngram=3, continuation=1)),
    "blockwise": Row(blockwise),
    "blockwise_two": Row(lambda t, s: blockwise(t, s, k=2)),
    "blockwise_reduced": Row(lambda t, s: blockwise(t, s, vocabulary=t.vocab_size // 2)),
    "medusa": Row(lambda t, s: medusa(t, s, texts_of(t))),
    "medusa_wide": Row(lambda t, s: medusa(t, s, texts_of(t), nodes=20), samples=False),
    "medusa_chain": Row(lambda t, s: medusa(t, s, texts_of(t), tree=[[0], [0, 0]])),
    "medusa_published_tree": Row(lambda t, s: medusa(t, s, tree="mc_sim_7b_63"), samples=False),
    "hydra_heads": Row(lambda t, s: hydra(t, s, texts_of(t))),
    "hydra_heads_wide": Row(lambda t, s: hydra(t, s, texts_of(t), nodes=20), samples=False),
    "hydra_heads_chain": Row(lambda t, s: hydra(t, s, texts_of(t), tree=[[0], [0, 0]])),
    "hydra_heads_prefix": Row(lambda t, s: hydra(t, s, texts_of(t), prefix=1.0)),
    "hydra_heads_prefix_costs": Row(lambda t, s: hydra(t, s, texts_of(t), prefix=1.0, costs=PRICED)),
    "hydra_heads_published_tree": Row(lambda t, s: hydra(t, s, tree="mc_sim_7b_63"), samples=False),
    "eagle": Row(lambda t, s: eagle(t, s, 3, texts_of(t), depth=3, top_k=3, nodes=8)),
    "eagle_chain": Row(lambda t, s: eagle(t, s, 3, texts_of(t), 6, tree="chain", gamma=3)),
    "eagle_chain_drawn": Row(lambda t, s: eagle(t, s, 1, texts_of(t), tree="chain", gamma=2, draw=True)),
    "eagle_chain_block": Row(lambda t, s: eagle(t, s, 1, texts_of(t), tree="chain", gamma=3, draw=True, block=True)),
    "eagle_1": Row(lambda t, s: eagle(t, s, 1, texts_of(t), tree="static", shape="paper")),
    "eagle_1_drawn": Row(lambda t, s: eagle(t, s, 1, texts_of(t), 6, shape=[[3], [2, 1]], draw=True)),
    "eagle_2": Row(lambda t, s: eagle(t, s, 2, texts_of(t), 6, depth=4, top_k=2, nodes=4)),
    "eagle_random": Row(lambda t, s: eagle(t, s, 3, depth=2, top_k=4, nodes=7)),
    "eagle_one": Row(lambda t, s: eagle(t, s, 3, depth=1, top_k=1, nodes=1)),
    "dflash": Row(lambda t, s: block_drafter(t, s, texts_of(t), sizes={"block": 5})),
    "dflash_drawn": Row(lambda t, s: block_drafter(t, s, texts_of(t), 6, draw=True)),
    "dflash_block": Row(lambda t, s: block_drafter(t, s, texts_of(t), draw=True, block=True)),
    "dflash_tree": Row(lambda t, s: block_drafter(t, s, texts_of(t), 6, tree="dynamic", top_k=4, nodes=9)),
    "dflash_one": Row(lambda t, s: block_drafter(t, s, sizes={"block": 2}, gamma=1)),
    "dspark": Row(lambda t, s: block_drafter(t, s, texts_of(t), sizes=DSPARK)),
    "dspark_drawn": Row(lambda t, s: block_drafter(t, s, texts_of(t), 6, DSPARK, draw=True)),
    "dspark_short": Row(lambda t, s: block_drafter(t, s, texts_of(t), sizes=DSPARK, draw=True, confidence=0.3)),
    "dspark_block": Row(
        lambda t, s: block_drafter(t, s, texts_of(t), 6, DSPARK, draw=True, block=True, confidence=0.2)
    ),
    "dspark_tree": Row(lambda t, s: block_drafter(t, s, texts_of(t), sizes=DSPARK, tree="dynamic", gamma=3, nodes=7)),
    "p_eagle": Row(lambda t, s: p_eagle(t, s, texts_of(t))),
    "p_eagle_drawn": Row(lambda t, s: p_eagle(t, s, texts_of(t), 6, draw=True)),
    "p_eagle_block": Row(lambda t, s: p_eagle(t, s, texts_of(t), gamma=3, draw=True, block=True)),
    "p_eagle_tree": Row(lambda t, s: p_eagle(t, s, texts_of(t), 6, tree="dynamic", gamma=3, top_k=4, nodes=9)),
    "p_eagle_one": Row(lambda t, s: p_eagle(t, s, gamma=1)),
    "p_eagle_costs": Row(lambda t, s: p_eagle(t, s, texts_of(t), costs=PRICED)),
    "hybrid_p_eagle": Row(lambda t, s: parallel_hybrid(t, s, texts_of(t), min_match=1, gamma=4)),
    "mtp": Row(lambda t, s: mtp(t, s, gamma=3)),
    "mtp_one": Row(mtp),
    "mtp_confident": Row(lambda t, s: mtp(t, s, gamma=4, confidence=0.3)),
    "mtp_block": Row(lambda t, s: mtp(t, s, gamma=3, block=True)),
    "self_diffusion": Row(lambda t, s: SelfDiffusion(with_masks(t), s)),
    "self_diffusion_one": Row(lambda t, s: SelfDiffusion(with_masks(t), s, block=1)),
    "hybrid": Row(lambda t, s: hybrid(t, s, texts_of(t), min_match=1, depth=3, top_k=3, nodes=8)),
    "hybrid_expected": Row(lambda t, s: hybrid(t, s, texts_of(t), policy="expected", min_match=1)),
    "hybrid_union": Row(lambda t, s: hybrid(t, s, texts_of(t), policy="union", min_match=1, budget=9)),
    "dspark_costs": Row(lambda t, s: block_drafter(t, s, texts_of(t), sizes=DSPARK, costs=PRICED)),
    "dspark_drawn_costs": Row(
        lambda t, s: block_drafter(t, s, texts_of(t), 6, DSPARK, draw=True, confidence=0.2, costs=PRICED)
    ),
    "hybrid_dspark": Row(lambda t, s: block_hybrid(t, s, texts_of(t), policy="union", min_match=1, gamma=4)),
    "hybrid_draft_model": Row(lambda t, s: hybrid_model(t, s, min_match=1, nodes=3)),
    "hybrid_draft_model_union": Row(lambda t, s: hybrid_model(t, s, policy="union", min_match=1, nodes=2, gamma=4)),
    "hybrid_draft_model_costs": Row(lambda t, s: hybrid_model(t, s, min_match=2, nodes=4, costs=PRICED)),
    "hybrid_random": Row(lambda t, s: hybrid(t, s, (), policy="union", lookup="prompt_lookup", gamma=4)),
    "prompt_lookup_costs": Row(lambda t, s: PromptLookup(t, s, costs=PRICED)),
    "rest_costs": Row(lambda t, s: rest(t, s, nodes=8, occurrences=64, costs=PRICED)),
    "suffix_costs": Row(lambda t, s: SuffixDecoding(t, s, costs=PRICED)),
    "lookahead_costs": Row(lambda t, s: Lookahead(t, s, window=2, ngram=3, guesses=3, costs=PRICED)),
    "token_recycling_costs": Row(lambda t, s: TokenRecycling(t, s, costs=PRICED)),
    "medusa_costs": Row(lambda t, s: medusa(t, s, texts_of(t), costs=PRICED)),
    "hydra_heads_costs": Row(lambda t, s: hydra(t, s, texts_of(t), costs=PRICED)),
    "eagle_costs": Row(lambda t, s: eagle(t, s, 3, texts_of(t), depth=3, top_k=3, nodes=8, costs=PRICED)),
    "eagle_chain_costs": Row(lambda t, s: eagle(t, s, 3, texts_of(t), 6, tree="chain", gamma=3, costs=PRICED)),
    "eagle_drawn_costs": Row(lambda t, s: eagle(t, s, 1, texts_of(t), 6, shape=[[3], [2, 1]], draw=True, costs=PRICED)),
    "eagle_block_costs": Row(
        lambda t, s: eagle(t, s, 1, texts_of(t), tree="chain", gamma=3, draw=True, block=True, costs=PRICED)
    ),
    "hybrid_costs": Row(lambda t, s: hybrid(t, s, texts_of(t), policy="union", min_match=1, costs=PRICED)),
    "calm_full": Row(lambda t, s: Calm(t, s, 1.0, exits=[1, 3], head="lens", decay="paper")),
    "static_depth_full": Row(lambda t, s: StaticDepth(t, s, depth=t.n_layers)),
    "free_full": Row(lambda t, s: Free(t, s, 2, 1.0, head="lens")),
    "free_verify": Row(lambda t, s: Free(t, s, 2, 0.1, "verify", head="lens")),
    "free_verify_all": Row(lambda t, s: Free(t, s, 1, 0.0, "verify", head="lens", max_pending=3)),
    "free_verify_drawn": Row(lambda t, s: Free(t, s, 3, 0.1, "verify", head="lens", rule=ChainRejection())),
    "free_verify_reduced": Row(
        lambda t, s: Free(t, s, 3, 0.2, "verify", head="lens", rule=ChainRejection(), vocabulary=t.vocab_size // 2)
    ),
    "hash_ee_full": Row(lambda t, s: hash_ee(t, s, [t.n_layers], "hash")),
    "calm_verify": Row(lambda t, s: Calm(t, s, 0.2, exits=[1, 3], head="lens", decay="paper", accept="verify")),
    "calm_verify_drawn": Row(
        lambda t, s: Calm(t, s, 0.1, exits=[2, 3], head="lens", accept="verify", rule=ChainRejection())
    ),
    "static_depth_verify": Row(lambda t, s: StaticDepth(t, s, 3, "lens", accept="verify", max_pending=3)),
    "static_depth_verify_drawn": Row(
        lambda t, s: StaticDepth(t, s, 3, "lens", accept="verify", rule=ChainRejection(), max_pending=1)
    ),
    "hash_ee_verify": Row(lambda t, s: hash_ee(t, s, [2, 3, 4], head="lens", accept="verify")),
    **(COPIES if cpu_kernels.library() is not None else {}),
    "hf_generate": Row(HFGenerate, samples=False, leaves=False),
    "hf_compiled": Row(
        lambda target, sampling: HFCompiled(target, sampling, cache_length=64, backend="eager"),
        samples=False,
        leaves=False,
    ),
    "hf_prompt_lookup": Row(HFPromptLookup, batch=False, samples=False),
    **({"flashspec": Row(FlashSpec, batch=False, samples=False)} if find_spec("flashspec") else {}),
    "hf_assisted": Row(lambda t, s: HFAssisted(t, s, gamma=4, skip_layers=[2]), batch=False, samples=False),
}
DRAWS = 2048  # against a temperature of 1.15 instead of 1.0 (total variation 0.09) the power of the test is 0.996
SAMPLINGS = [Sampling(1.0), Sampling(0.7, top_k=5, top_p=0.8)]  # order and kinds of filters: test_sampling.py

every_decoder = pytest.mark.parametrize("row", DECODERS.values(), ids=DECODERS.keys())


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


@pytest.fixture(scope="module")
def small_vocab():
    return checks.tiny_target(vocab_size=8, seed=3)


@every_decoder
def test_greedy_text_is_the_targets(row, target):
    checks.check_greedy_identity(row.make, target)


@every_decoder
def test_no_state_leaks(row, target):
    checks.check_no_leak(row.make, target)


@every_decoder
def test_batch_rows_equal_single_rows(row, target, monkeypatch):
    if not row.batch:
        with pytest.raises(ValueError, match="batch_size=1"):
            checks.check_batch(row.make, target)
        return
    left = []
    leave = ComputedRows.leave
    monkeypatch.setattr(ComputedRows, "leave", lambda rows, lm: left.append(leave(rows, lm)) or left[-1])
    checks.check_batch(row.make, target)
    if row.leaves:
        assert 2 in [len(stay) for stay in left if stay], "of four rows two leave before the first draft"


@every_decoder
def test_a_kept_text_changes_nothing(row, target, request):
    decoder = row.make(target, Sampling())
    if not isinstance(decoder, PrefixCaching):
        assert decoder.family == "external" or isinstance(decoder, Free), "of those with a loop of ours FREE cannot"
        return
    kept = checks.check_prefix_cache(row.make, target)
    print(request.node.callspec.id, kept)


@every_decoder
def test_counters_add_up(row, target):
    checks.check_guarantee(row.make(target, Sampling()))
    checks.check_counters(row.make, target, batch=row.batch)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    "row", [r for r in DECODERS.values() if r.samples], ids=[k for k, r in DECODERS.items() if r.samples]
)
def test_sampling_keeps_the_joint_distribution(row, sampling, small_vocab):
    assert row.make(small_vocab, sampling).guarantee is Guarantee.EXACT
    checks.check_sampling(row.make, small_vocab, sampling, rows=DRAWS)


def test_the_sampling_check_can_fail(small_vocab):
    """Decoding at another temperature must be noticed at this sample size."""
    with pytest.raises(AssertionError, match="joint distribution differs"):
        checks.check_sampling(lambda t, s: Autoregressive(t, Sampling(1.15)), small_vocab, Sampling(1.0), rows=DRAWS)


def test_the_greedy_check_can_fail(target):
    with pytest.raises(AssertionError, match="is not the target's"):
        checks.check_greedy_identity(lambda t, s: Autoregressive(t, Sampling(1.0)), target)


def test_sampled_peers_repeat_with_their_seed(target):
    decoder, prompt = HFGenerate(target, Sampling(1.0)), checks.prompts(target.vocab_size, (6,))
    assert checks.outputs(decoder, prompt, 9, seed=4) == checks.outputs(decoder, prompt, 9, seed=4)
    assert checks.outputs(decoder, prompt, 9, seed=4) != checks.outputs(decoder, prompt, 9, seed=5)


def test_target_as_its_own_draft_is_always_accepted(target):
    for sampling in (Sampling(), Sampling(1.0)):
        decoder = SpeculativeSampling(target, sampling, gamma=4, draft_model=target)
        for step in decoder.decode(checks.prompts(target.vocab_size, (9, 4)), 16, torch.Generator().manual_seed(0)):
            assert step.accepted == step.drafted


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "needs a drafter, got none"),
        ({"gamma": 0, "skip_mlp": [1]}, "gamma >= 1"),
        ({"confidence": 1.0, "skip_mlp": [1]}, "confidence < 1"),
        ({"skip_mlp": [9]}, "0 to 3"),
    ],
)
def test_speculative_sampling_refuses(options, message, target):
    with pytest.raises(ValueError, match=message):
        SpeculativeSampling(target, Sampling(), **options)


def test_vocabularies_must_agree(target):
    draft = checks.tiny_target(vocab_size=target.vocab_size + 5000, layers=1)
    with pytest.raises(ValueError, match="share one vocabulary"):
        SpeculativeSampling(target, Sampling(), draft_model=draft)


def test_padded_vocabularies_are_the_same(target):
    for size in (target.vocab_size - 6, target.vocab_size + 6):
        draft = checks.tiny_target(vocab_size=size, layers=1)
        checks.check_greedy_identity(
            lambda t, s, d=draft: SpeculativeSampling(t, s, draft_model=d), target, lengths=(5,)
        )


@pytest.mark.parametrize("options", [{"gamma": 0}, {"min_ngram": 0}, {"max_ngram": 1, "min_ngram": 2}])
def test_prompt_lookup_refuses(options, target):
    with pytest.raises(ValueError):
        PromptLookup(target, Sampling(), **options)
