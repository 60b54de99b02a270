"""The encoder-decoder engine equals transformers, and every decoder runs on it as on a causal model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from bench.contract import checks
from bench.lossless.continuations import likely_continuations
from methods.autoregressive import Autoregressive
from methods.drafting import ABSENT, Context
from methods.engine.cpu_kernels import usable
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.kv_cache import Cache
from methods.engine.linear import LinearForm
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_layers import PROVEN, AbsolutePositions, UnsupportedModel
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.heads.blockwise import Blockwise
from methods.speculative.heads.blockwise_training import BlockwiseLearner
from methods.speculative.lookahead import Lookahead
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.self_speculative.decoder import SelfSpeculative
from methods.speculative.speculative_sampling import SpeculativeSampling
from methods.speculative.suffix_decoding import SuffixDecoding
from methods.speculative.token_recycling import TokenRecycling
from methods.training.answers import answer
from methods.training.features import Batch, states
from tests.helpers.rounds import check_rounds
from tests.helpers.tiny_heads import learn_by_heart

VOCAB, START, EOS = 67, 0, 2
PLACE = (torch.device("cpu"), torch.float32, 96)
FORM: LinearForm = "panels" if usable(*PLACE) else "auto"
BART = {
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "max_position_embeddings": 96,
    "scale_embedding": True,
}
T5 = {
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 80,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 6,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
VARIANTS = {
    "marian": ("marian", {**BART, "activation_function": "swish"}),
    "bart": ("bart", {**BART, "scale_embedding": False}),
    "bart_forced": ("bart", {**BART, "forced_bos_token_id": 7}),
    "mbart": ("mbart", BART),
    "pegasus": ("pegasus", BART),
    "t5": ("t5", T5),
    "t5_gated": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", {**T5, "feed_forward_proj": "gated-gelu"}),
}
WHOLE = {
    "d_model": 96,
    "encoder_attention_heads": 6,
    "dtype": torch.float32,
}  # heads of 16 numbers, as the C++ kernels need them
KERNELS = {
    **{f"{variant}_kernels": (variant, WHOLE) for variant in ("marian", "bart", "bart_forced", "mbart")},
    "pegasus_kernels": ("pegasus", {**WHOLE, "activation_function": "relu"}),
}


def tiny(variant: str, dtype: torch.dtype = torch.float64, **options):
    """A random model with every weight, biases, norms and positions included, away from its initial value."""
    family, shape = VARIANTS[variant]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS, "decoder_start_token_id": START}
    config = AutoConfig.for_model(family, **{"vocab_size": VOCAB, **shape, **special, **options})
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        norm = parameter.dim() == 1 and "bias" not in name
        torch.nn.init.normal_(parameter.data, mean=1.0 if norm else 0.0, std=0.2)
    if (bias := getattr(model, "final_logits_bias", None)) is not None:
        torch.nn.init.normal_(bias)
    return model


def full(model, source, target):
    """Logits of the original model behind every token of ``target``, start token included; no cache, no padding."""
    with torch.no_grad():
        return model(input_ids=source[None], decoder_input_ids=target[None], use_cache=False).logits[0]


def begun(lm, *tokens):
    return torch.tensor([*lm.start, *tokens])


def ids(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


def close(ours, theirs):
    """T5's and transformers' norms take their statistics in 32 bit even where the weights have 64."""
    bound = 1e-4 if ours.dtype == torch.float64 else 1e-3
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@pytest.fixture(scope="module", params=[*VARIANTS, *KERNELS])
def pair(request):
    """A model, and the engine's: in 64 bit by torch's operators, in 32 bit by the C++ kernels."""
    variant, options = KERNELS.get(request.param, (request.param, {}))
    model = tiny(variant, **options)
    return model, Seq2SeqLM.from_hf(model, keep_hf=True, linear=FORM if options else "auto")


def test_the_kernels_run_the_decoders_they_have_all_parts_of():
    found = [Seq2SeqLM.from_hf(tiny(variant, **options), linear=FORM).fused for variant, options in KERNELS.values()]
    assert set(found) == {usable(*PLACE)}
    assert not Seq2SeqLM.from_hf(tiny("t5", torch.float32, d_kv=16)).fused, "they lack its bias on scores"
    assert not Seq2SeqLM.from_hf(tiny("pegasus", torch.float32)).fused, "heads of 8 numbers"
    assert not Seq2SeqLM.from_hf(tiny("pegasus", **WHOLE, activation_function="gelu_new")).fused


@pytest.mark.skipif(not usable(*PLACE), reason="no C++ compiler")
@pytest.mark.parametrize("variant", KERNELS)
def test_rows_of_the_kernels_have_the_same_bits_alone_and_together(variant):
    """Whatever else is in a pass, and however it is cut."""
    family, options = KERNELS[variant]
    lm = Seq2SeqLM.from_hf(tiny(family, **options), linear="panels")
    sources, rows = ids(7, 4), torch.stack(ids(5, 5, seed=3))
    assert lm.batch_invariant
    together = lm.new_cache(2, 24)
    lm.prefill(sources, together)
    logits = lm.forward(rows, None, together).logits
    for row in range(2):
        alone = lm.new_cache(1, 24)
        lm.prefill([sources[row]], alone)
        for place in range(5):
            found = lm.forward(rows[row : row + 1, place : place + 1], None, alone).logits
            assert torch.equal(found[0, 0], logits[row, place])
            alone.advance([1])


@pytest.mark.skipif(not usable(*PLACE), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", KERNELS)
def test_rounds_in_one_call_are_passes_one_by_one(variant, dtype):
    """Three rows with different sources and places, of which the second stands still."""
    family, options = KERNELS[variant]
    lm = Seq2SeqLM.from_hf(tiny(family, **options | {"dtype": dtype}), linear="panels")
    assert lm.runs_rounds
    cache = lm.new_cache(3, 40)
    lm.prefill(ids(7, 4, 9), cache)
    lm.forward(torch.stack(ids(3, 3, 3, seed=4)), None, cache)
    cache.advance([3, 1, 2])
    assert EOS in lm.eos_ids
    check_rounds(lm, cache)


@pytest.mark.skipif(not usable(*PLACE), reason="no C++ compiler")
def test_rounds_in_one_call_end_with_the_first_text():
    lm = Seq2SeqLM.from_hf(tiny("marian", **WHOLE), linear="panels")
    cache = lm.new_cache(2, 60)
    lm.prefill(ids(7, 4), cache)
    whole = lm.rounds([5, 9], cache, 40, [True, True], ()).tokens
    assert len(whole) == 40
    for row in range(2):
        first = min(count for count, chosen in enumerate(whole) if whole[7][row] in chosen)
        assert lm.rounds([5, 9], cache, 40, [True, True], {whole[7][row]}).tokens == whole[: first + 1]
    alone = [chosen[0] for chosen in whole]
    first = alone.index(whole[7][0])
    found = lm.rounds([5, 9], cache, 40, [True, False], {whole[7][0]}).tokens
    assert [chosen[0] for chosen in found] == alone[: first + 1], "the other one stands still"


@pytest.mark.parametrize("start", [0, 5, 8, 12])
def test_places_of_a_chain_are_those_one_by_one(start):
    """Also those after the last vector."""
    generator = torch.Generator().manual_seed(0)
    table, hidden = (torch.randn(*shape, generator=generator) for shape in ((10, 6), (2, 3, 6)))
    place = AbsolutePositions(table, torch.nn.LayerNorm(6))
    assert torch.equal(place.chain(hidden, start), place(hidden, torch.arange(start, start + 3)[None]))


def test_every_proven_family_is_tested():
    assert {family for family, _ in VARIANTS.values()} == set(PROVEN)


# ------------------------------------------------------------------------------------------- equal to transformers


def test_ragged_sources_then_chains_over_several_steps(pair):
    model, lm = pair
    sources, cache = ids(9, 1, 5), lm.new_cache(3, 40)
    first = lm.prefill(sources, cache)
    assert cache.lengths == [9, 1, 5]
    texts = [begun(lm) for _ in sources]
    for row, source in enumerate(sources):
        close(first.logits[row, 0], full(model, source, texts[row])[-1])
    for step, counts in enumerate([(3, 3, 3), (1, 3, 2), (4, 1, 2)]):  # rows part after the first step
        tokens = torch.stack(ids(4, 4, 4, seed=step))
        logits = lm.forward(tokens, None, cache).logits
        for row, source in enumerate(sources):
            close(logits[row], full(model, source, torch.cat([texts[row], tokens[row]]))[-4:])
            texts[row] = torch.cat([texts[row], tokens[row, : counts[row]]])
        cache.advance(counts)


def test_sources_of_one_length_take_the_path_without_masks(pair):
    model, lm = pair
    sources, cache = ids(6, 6), lm.new_cache(2, 16)
    lm.prefill(sources, cache)
    assert cache.mask is None and cache.uniform
    tokens = torch.stack(ids(1, 1, seed=3))
    logits = lm.forward(tokens, None, cache).logits
    for row, source in enumerate(sources):
        close(logits[row, 0], full(model, source, begun(lm, int(tokens[row, 0])))[-1])


def test_trees_and_the_packed_path_behind_them(pair):
    model, lm = pair
    sources, cache = ids(4, 8), lm.new_cache(2, 40)
    lm.prefill(sources, cache)
    head = torch.stack(ids(2, 2, seed=4))
    lm.forward(head, None, cache)
    cache.advance([2, 1])
    texts = [torch.cat([begun(lm), head[0]]), torch.cat([begun(lm), head[1, :1]])]
    parents = torch.tensor([[-1, -1, 0, 1, 3], [-1, 0, -1, 2, 3]])
    tokens = torch.stack(ids(6, 6, seed=5))
    logits = lm.forward(tokens, parents, cache, levels=3).logits
    for row, node in ((r, n) for r in range(2) for n in range(6)):
        path = [node]
        while path[0]:
            path.insert(0, int(parents[row, path[0] - 1]) + 1)
        close(logits[row, node], full(model, sources[row], torch.cat([texts[row], tokens[row, path]]))[-1])
    cache.pack(torch.tensor([[1, 3, 4], [2, 3, ABSENT]]))
    cache.advance([4, 3])
    texts = [torch.cat([texts[0], tokens[0, [0, 2, 4, 5]]]), torch.cat([texts[1], tokens[1, [0, 3, 4]]])]
    root = torch.stack(ids(1, 1, seed=6))
    logits = lm.forward(root, None, cache).logits
    for row in range(2):
        close(logits[row, 0], full(model, sources[row], torch.cat([texts[row], root[row]]))[-1])


def test_far_positions(pair):
    """Beyond T5's last bucket, and at the end of a position table."""
    model, lm = pair
    (source,), (target,) = ids(90), ids(90 - len(lm.start), seed=2)
    close(lm.score(torch.cat([source, target]), start=89), full(model, source, begun(lm, *target))[len(lm.start) - 1 :])


def test_score_is_teacher_forcing(pair):
    model, lm = pair
    (source,), (target,) = ids(7), ids(5, seed=2)
    found = lm.score(torch.cat([source, target]), start=6)
    assert found.shape == (6, VOCAB)
    close(found, full(model, source, begun(lm, *target))[len(lm.start) - 1 :])


def test_taps_and_hidden_states_are_those_of_transformers(pair):
    model, lm = pair
    sources, cache = ids(5, 5), lm.new_cache(2, 16)
    before = lm.prefill(sources, cache, hidden_layers=(0,))
    tokens = torch.stack(ids(3, 3, seed=2))
    output = lm.forward(tokens, None, cache, hidden_layers=(0, 1))
    with torch.no_grad():
        target = torch.stack([begun(lm, *row) for row in tokens.tolist()])
        states = model(torch.stack(sources), decoder_input_ids=target, output_hidden_states=True).decoder_hidden_states
    close(output.hidden_layers[0], states[1][:, -3:])
    close(before.hidden_layers[0], states[1][:, : len(lm.start)])
    assert before.hidden.shape[1] == len(lm.start)
    close(lm.head(output.hidden), output.logits)
    close(lm.head(lm.norm(output.hidden_layers[1])), output.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_worse_than_that_of_transformers(pair, dtype):
    """Both are compared with the same rounded weights in 64 bit; packed weights, originals released."""
    variant = next(name for name, (family, _) in VARIANTS.items() if family == pair[0].config.model_type)
    options = {key: getattr(pair[0].config, key) for key in ("d_model", "activation_function") if pair[1].fused}
    model, exact = tiny(variant, dtype, **options), tiny(variant, **options)
    exact.load_state_dict(model.state_dict())
    (source,), (target,) = ids(30), ids(40, seed=2)
    text = begun(exact_lm := Seq2SeqLM.from_hf(exact, keep_hf=True), *target)
    wanted = full(exact, source, text)[len(exact_lm.start) - 1 :]
    theirs = full(model, source, text)[len(exact_lm.start) - 1 :]
    lm = Seq2SeqLM.from_hf(model)
    assert lm.hf is None and sum(p.numel() for p in model.parameters()) == 0 and lm.weight_bytes > 0
    ours = lm.score(torch.cat([source, target]), start=29)
    assert ours.dtype == dtype
    assert (ours - wanted).square().mean().sqrt() < 1.5 * (theirs - wanted).square().mean().sqrt()


# ------------------------------------------------------------------------------------------------------ the cache


def test_a_cache_counts_source_and_target_and_can_go_back(pair):
    _, lm = pair
    sources, cache = ids(3, 6), lm.new_cache(2, 24)
    lm.prefill(sources, cache)
    tokens = torch.stack(ids(4, 4, seed=2))
    wanted = lm.forward(tokens, None, cache).logits
    cache.advance([4, 4])
    cache.truncate([3 + 1, 6 + 2])
    assert cache.lengths == [4, 8] and cache.written == [len(lm.start) + 1, len(lm.start) + 2]
    again = lm.forward(torch.stack([tokens[0, 1:3], tokens[1, 2:4]]), None, cache).logits
    close(again, torch.stack([wanted[0, 1:3], wanted[1, 2:4]]))


def test_rows_can_be_dropped(pair):
    _, lm = pair
    sources, cache = ids(3, 6, 4), lm.new_cache(3, 24)
    lm.prefill(sources, cache)
    tokens = torch.stack(ids(2, 2, 2, seed=2))
    wanted = lm.forward(tokens, None, cache).logits
    cache.select([2, 0])
    assert cache.lengths == [4, 3]
    close(lm.forward(tokens[[2, 0]], None, cache).logits, wanted[[2, 0]])


def test_a_cache_is_forgotten_whole(pair):
    _, lm = pair
    cache = lm.new_cache(2, 24)
    lm.prefill(ids(8, 2), cache)
    second = ids(3, 5, seed=8)
    found = lm.prefill(second, cache).logits
    close(found, lm.prefill(second, lm.new_cache(2, 24)).logits)
    assert cache.lengths == [3, 5]


def test_a_round_can_be_timed_without_a_source(pair):
    """``bench.measure.verify_cost`` times passes at a context without any prompt."""
    from bench.measure import verify_cost

    _, lm = pair
    curve = verify_cost.measure(lm, batch=3, nodes=(1, 4), contexts=(5, 30), repeats=1)
    assert all(seconds > 0 for row in curve.table for seconds in row)


def test_views_skip_sublayers(pair):
    model, lm = pair
    view = lm.skip(attention=[1], mlp=[0])
    assert isinstance(view, Seq2SeqLM)
    assert view.weight_bytes < lm.weight_bytes and lm.skipped_mlp == frozenset()
    cache = view.new_cache(2, 16)
    assert isinstance(cache, Cache) and list(cache.place) == [0]
    found = view.prefill(ids(5, 3), cache).logits
    assert found.isfinite().all() and not torch.allclose(found, lm.prefill(ids(5, 3), lm.new_cache(2, 16)).logits)


def test_the_engine_draws_what_generation_allows():
    model = tiny("marian")
    model.generation_config.bad_words_ids = [[0], [5]]
    lm = Seq2SeqLM.from_hf(model, keep_hf=True)
    assert lm.suppressed == (0, 5)
    logits = lm.prefill(ids(4), lm.new_cache(1, 8)).logits[0, 0]
    assert logits[[0, 5]].tolist() == [-torch.inf] * 2
    kept = [i for i in range(VOCAB) if i not in (0, 5)]
    close(logits[kept], full(model, ids(4)[0], begun(lm))[-1][kept])


# -------------------------------------------------------------------------------------------------------- refusals


def test_unproven_models_are_refused_by_name():
    config = AutoConfig.for_model("blenderbot-small", vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1)
    config.update({"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8})
    with pytest.raises(UnsupportedModel, match="proven equal .*marian.*got 'blenderbot-small'"):
        Seq2SeqLM.from_hf(AutoModelForSeq2SeqLM.from_config(config))


@pytest.mark.parametrize(
    ("variant", "options", "said"),
    [
        ("marian", {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCAB}, "one vocabulary"),
        ("bart", {"decoder_start_token_id": None}, "must have decoder_start_token_id.* got none"),
    ],
)
def test_options_without_a_proof_are_refused(variant, options, said):
    with pytest.raises(UnsupportedModel, match=said):
        Seq2SeqLM.from_hf(tiny(variant, **options))


def test_forbidden_words_of_several_tokens_are_refused():
    model = tiny("marian")
    model.generation_config.bad_words_ids = [[3, 4]]
    with pytest.raises(UnsupportedModel, match="words of several tokens"):
        Seq2SeqLM.from_hf(model)


def test_t5_is_refused_in_float16():
    with pytest.raises(UnsupportedModel, match="bfloat16"):
        Seq2SeqLM.from_hf(tiny("t5", torch.float16))


@pytest.mark.parametrize(
    ("length", "said"), [(0, "at least one token, got an empty one"), (97, "at most 96 tokens .*got 97")]
)
def test_sources_that_cannot_be_read_are_refused(length, said):
    lm = Seq2SeqLM.from_hf(tiny("marian"))
    with pytest.raises(ValueError, match=said):
        lm.prefill([torch.zeros(length, dtype=torch.long)], lm.new_cache(1, 120))


# -------------------------------------------------------------------------------------------------------- decoders


def greedy_reference(model, lm, source, limit):
    """Greedy decoding without cache, engine or loop: the original model over the whole target, token by token."""
    written = []
    for _ in range(limit):
        written.append(int(full(model, source, begun(lm, *written))[-1].argmax()))
    return written


def other(target, sampling, **options):
    """A smaller encoder-decoder with another seed of weights drafts: rarely right, so every length is accepted."""
    return SpeculativeSampling(target, sampling, draft_model=Seq2SeqLM.from_hf(tiny(**DRAFT)), **options)


DRAFT = {"variant": "marian", "decoder_layers": 1}
DECODERS = {
    "autoregressive": Autoregressive,
    "prompt_lookup": lambda t, s: PromptLookup(t, s, gamma=4),
    "suffix": SuffixDecoding,
    "lookahead": lambda t, s: Lookahead(t, s, window=4, ngram=4, guesses=3),
    "token_recycling": lambda t, s: TokenRecycling(t, s, tree="small"),
    "skipping_view": lambda t, s: SpeculativeSampling(t, s, gamma=3, skip_mlp=[1]),
    "draft_model": lambda t, s: other(t, s, gamma=3),
    "self_speculative": lambda t, s: SelfSpeculative(t, s, gamma=3, skip_attention=[1], skip_mlp=[1]),
}
every_decoder = pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS.keys())


@every_decoder
def test_greedy_text_is_the_targets(pair, make):
    model, lm = pair
    decoder = make(lm, Sampling())
    for source in checks.prompts(VOCAB, (1, 9)):
        for limit in (1, 12):
            (found,) = checks.outputs(decoder, [source], limit)
            assert found == greedy_reference(model, lm, source, limit)


@every_decoder
def test_rows_counters_and_state(pair, make):
    _, lm = pair
    checks.check_batch(make, lm)
    checks.check_counters(make, lm)
    checks.check_no_leak(make, lm)


def test_the_target_as_its_own_draft_is_always_accepted(pair):
    _, lm = pair
    for sampling in (Sampling(), Sampling(1.0)):
        decoder = SpeculativeSampling(lm, sampling, gamma=4, draft_model=lm)
        for step in decoder.decode(checks.prompts(VOCAB, (9, 4)), 16, torch.Generator().manual_seed(0)):
            assert step.accepted == step.drafted


def test_lookup_copies_from_the_source():
    """The words of a source that follow on what was just written are what is drafted."""
    lm = Seq2SeqLM.from_hf(tiny("marian"), keep_hf=True)
    source = torch.tensor([39, 40, 41, 42, 5, 6, 7])
    drafter = PromptLookup(lm, Sampling(), gamma=3).drafter
    drafter.reset([source.tolist()], 8)
    text = [*source.tolist(), 39]
    assert drafter.propose(context_of(lm, text)).tokens.tolist() == [[40, 41, 42]]


def context_of(lm, text):
    output = lm.prefill([torch.tensor(text[:-1])], lm.new_cache(1, len(text) + 8))
    return Context([text], torch.tensor(text[-1:]), output, None, Sampling(), torch.Generator())


def test_answers_for_distillation_are_the_greedy_ones(pair):
    """``methods.training.answers`` drops finished rows from the cache on its way."""
    model, lm = pair
    sources = ids(9, 1, 5, 7)
    found = answer(lm, sources, 12, Sampling(), torch.Generator())
    for source, written in zip(sources, found, strict=True):
        wanted = greedy_reference(model, lm, source, 12)
        assert written == (wanted[: wanted.index(EOS) + 1] if EOS in wanted else wanted)


class AsText:
    """The original model over source and target in one row, as ``bench.contract.checks`` enumerates them."""

    def __init__(self, model, lm, length):
        self.model, self.start, self.length = model, torch.tensor(lm.start), length

    def __call__(self, ids):
        target = torch.cat([self.start.expand(len(ids), -1), ids[:, self.length :]], dim=1)
        return self.model(input_ids=ids[:, : self.length], decoder_input_ids=target, use_cache=False)


SAMPLERS = {
    "autoregressive": Autoregressive,
    "prompt_lookup": lambda t, s: PromptLookup(t, s, gamma=3),
    "token_recycling": lambda t, s: TokenRecycling(t, s, tree="small"),
    "skipping_view": lambda t, s: SpeculativeSampling(t, s, gamma=2, skip_mlp=[1]),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS.keys())
@pytest.mark.parametrize("variant", ["marian", "t5"])
def test_sampling_keeps_the_joint_distribution(variant, make):
    model = tiny(variant, vocab_size=8)
    lm = Seq2SeqLM.from_hf(model, keep_hf=True)
    lm.hf = AsText(model, lm, 6)
    checks.check_sampling(make, lm, Sampling(0.8))


def test_the_enumerated_joint_distribution_is_that_of_source_and_target():
    """What the losslessness laboratory holds samples against."""
    model = tiny("marian", vocab_size=8)
    lm = Seq2SeqLM.from_hf(model, keep_hf=True)
    (source,) = (row % 8 for row in ids(5))
    found = likely_continuations(lm, source.tolist(), Sampling(1.0), horizon=3, floor=1e-9)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)
    for written in list(found)[::37]:
        logprobs = full(model, source, begun(lm, *written)).log_softmax(-1)[len(lm.start) - 1 : -1]
        wanted = logprobs.gather(1, torch.tensor(written)[:, None]).sum().exp()
        assert found[written] == pytest.approx(float(wanted), rel=1e-3)


# ------------------------------------------------------------------------------------------------- heads on a decoder


def test_states_over_answers_stand_where_the_answer_is_predicted(pair):
    model, lm = pair
    sources, answers = ids(5, 2), ids(3, 6, seed=2)
    texts = [torch.cat(parts) for parts in zip(sources, answers, strict=True)]
    hidden, hidden_layers = states(lm, texts, (0,), [5, 2])
    assert hidden.shape == (2, 8, lm.hidden_size)
    for row, (source, written) in enumerate(zip(sources, answers, strict=True)):
        prompt, end = len(source), len(texts[row])
        with torch.no_grad():
            seen = model(source[None], decoder_input_ids=begun(lm, *written)[None], output_hidden_states=True)
        close(hidden_layers[0][row, prompt - 1 : end], seen.decoder_hidden_states[1][0, -len(written) - 1 :])
        close(lm.head(hidden[row, prompt - 1 : end]), seen.logits[0, -len(written) - 1 :])
        assert not hidden[row, : prompt - 1].any() and not hidden[row, end:].any()


def test_heads_learn_from_states_of_a_decoder_and_draft_for_it(tmp_path):
    lm = Seq2SeqLM.from_hf(tiny("marian", torch.float32), keep_hf=True)
    sources = checks.prompts(VOCAB, (9, 4))
    answers = [row[:12] for row in checks.outputs(Autoregressive(lm, Sampling()), sources, 12)]
    texts = [torch.cat([source, torch.tensor(written)]) for source, written in zip(sources, answers, strict=True)]
    hidden, _ = states(lm, texts, (), [9, 4])
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    batch = Batch(tokens, hidden.clone(), {}, [9, 4], [len(text) for text in texts])
    torch.manual_seed(0)
    learner = BlockwiseLearner(lm, DraftVocabulary.all(VOCAB), 3, 64, "all")
    learn_by_heart(learner, batch, steps=150)
    learner.heads().save(tmp_path)
    decoder = Blockwise(lm, Sampling(), checkpoint=tmp_path)
    assert checks.outputs(decoder, sources, 12) == answers
    steps = list(decoder.decode(sources, 12, torch.Generator()))
    assert sum(sum(step.accepted) for step in steps) > 12
