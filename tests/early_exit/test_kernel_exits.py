"""Exits that the CPU kernels judge within a pass, against the same exits judged by torch; and rows that wait."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee, Step, generate
from methods.early_exit.calm import Calm
from methods.early_exit.confidence import Classifier, Softmax
from methods.early_exit.exits import Exits, Lens, Reader
from methods.early_exit.free import Free
from methods.early_exit.free_threshold import BetaMixture
from methods.early_exit.hash_ee import HashEE, HashPolicy
from methods.early_exit.hash_tables import HashTable
from methods.early_exit.loop import EarlyExitDecoder, ExitDecoder
from methods.early_exit.regrouping import PATIENCE, Waiting
from methods.early_exit.static_depth import StaticDepth
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.fused_layers import ExitRule, FusedLayers
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from tests.engine import test_seq2seq_lm
from tests.engine.test_causal_lm import tiny

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="no C++ compiler")

GREEDY, LIMIT = Sampling(), 14


@pytest.fixture(scope="module", params=["llama", "pegasus"])
def target(request: pytest.FixtureRequest) -> CausalLM:
    """A model whose layers change the state so little that exits agree now and then; one reads an encoder's source."""
    if request.param == "llama":
        lm = CausalLM.from_hf(tiny("llama", head_dim=16, num_hidden_layers=6).float(), linear="panels", keep_hf=True)
    else:
        family, options = test_seq2seq_lm.KERNELS["pegasus_kernels"]
        whole = test_seq2seq_lm.tiny(family, **{**options, "scale_embedding": False}, decoder_layers=6)
        for weight in whole.get_decoder().layer_norm.parameters():
            weight.data *= 0.3
        lm = Seq2SeqLM.from_hf(whole, linear="panels", keep_hf=True)
    assert lm.exits_fused
    return lm


@pytest.fixture(scope="module")
def by_torch(target: CausalLM) -> CausalLM:
    """The same model, whose exits are judged by torch's operators."""
    view = object.__new__(type("ByTorch", (type(target),), {"exits_fused": False, "ends_fused": False}))
    view.__dict__.update(target.__dict__)
    return view


def test_decoders_without_a_last_norm_are_judged_by_torch() -> None:
    family, options = test_seq2seq_lm.KERNELS["marian_kernels"]
    lm = Seq2SeqLM.from_hf(test_seq2seq_lm.tiny(family, **options), linear="panels")
    assert lm.fused and not lm.exits_fused


@pytest.fixture(scope="module")
def prompts(target: CausalLM) -> list[torch.Tensor]:
    return checks.prompts(target.vocab_size, (3, 9, 5, 12, 1, 7))


@pytest.fixture(scope="module")
def trained(target: CausalLM) -> Exits:
    generator, width = torch.Generator().manual_seed(3), target.hidden_size
    maps = {
        depth: (torch.eye(width) + 0.1 * torch.randn(width, width, generator=generator), torch.zeros(width))
        for depth in (2, 4)
    }
    classifier = torch.randn(width, generator=generator), torch.tensor(0.1)
    return Exits((2, 4), maps, classifier)


def calm(**settings: Any) -> Callable[[CausalLM], EarlyExitDecoder]:
    given: dict[str, Any] = {"threshold": 0.02, "exits": [1, 2, 4], "head": "lens", "vocabulary": None} | settings
    return lambda lm: Calm(lm, GREEDY, **given)


def free(**settings: Any) -> Callable[[CausalLM], Any]:
    given: dict[str, Any] = {"depth": 3, "threshold": 0.02, "head": "lens", "vocabulary": None} | settings
    return lambda lm: Free(lm, GREEDY, **given)


def classified(lm: CausalLM) -> EarlyExitDecoder:
    decoder = Calm(lm, GREEDY, 0.5, exits=[1, 2, 4], head="lens", vocabulary=None)
    decoder._confidence = Classifier(
        torch.randn(lm.hidden_size, generator=torch.Generator().manual_seed(1)), torch.zeros(())
    )
    decoder.set_threshold(0.5)
    return decoder


def hashed(lm: CausalLM) -> EarlyExitDecoder:
    table = HashTable(np.resize([2, 6, 3, 5, 2, 4], lm.vocab_size), 6)
    return EarlyExitDecoder(lm, GREEDY, HashPolicy(table), Lens(lm))


MAKERS: dict[str, Callable[[CausalLM], Any]] = {
    "softmax": calm(),
    "softmax with a screen": calm(vocabulary=20),
    "falling": calm(decay="paper", threshold=0.0),
    "straight": calm(decay="linear", tau=1.0, threshold=0.0),
    "saturation": calm(confidence="saturation", threshold=0.6),
    "classifier": classified,
    "whole": calm(threshold=1.0),
    "table": hashed,
    "static": lambda lm: StaticDepth(lm, GREEDY, 3, head="lens"),
    "static, verified": lambda lm: StaticDepth(lm, GREEDY, 3, head="lens", accept="verify"),
    "free": free(),
    "free with a screen": free(vocabulary=20),
    "free, one waits": free(max_pending=1, threshold=0.01),
    "free, verified": free(accept="verify"),
    "free, rolled back": free(accept="rollback", distance=3.0),
    "free, learning": free(adaptive=BetaMixture(0.3, fewest=2)),
}


def worked(decoder: Any) -> dict[str, Any]:
    """Its counters, without empty exits; of the share of the time that decisions took, that there is one if any did."""
    found = decoder.stats()
    share = found.pop("confidence_share")
    assert 0 < share < 1 if found["looks_per_step"] else share == 0
    return found | {"exits": {depth: count for depth, count in found["exits"].items() if count}}


@pytest.mark.parametrize("name", MAKERS)
def test_kernels_judge_as_torch_does(
    name: str, target: CausalLM, by_torch: CausalLM, prompts: list[torch.Tensor]
) -> None:
    """Same texts, in a batch and alone; alone also the same exits and the same work."""
    ours, theirs = MAKERS[name](target), MAKERS[name](by_torch)
    alone = [generate(ours, [prompt], LIMIT)[0] for prompt in prompts]
    assert alone == [generate(theirs, [prompt], LIMIT)[0] for prompt in prompts]
    assert worked(ours) == worked(theirs)
    assert len(worked(ours)["exits"]) > 1 or name in ("whole", "static", "static, verified"), "nothing was decided"
    together = generate(ours, prompts, LIMIT)
    assert together == generate(theirs, prompts, LIMIT)
    assert together == alone or name == "free, learning"  # which learns when the first row of a batch is not sure


def test_maps_are_multiplied_within_the_pass(
    target: CausalLM, by_torch: CausalLM, trained: Exits, prompts: list[torch.Tensor], tmp_path: Path
) -> None:
    trained.save(tmp_path, target)
    texts, found = {}, {}
    for name, lm in (("kernels", target), ("torch", by_torch)):
        for confidence, threshold in (("softmax", 0.02), ("classifier", 0.5)):
            made = Calm(lm, GREEDY, threshold, confidence, vocabulary=None, checkpoint=tmp_path)  # type: ignore[arg-type]
            texts[name, confidence] = [generate(made, [prompt], LIMIT) for prompt in prompts]
            found[name, confidence] = worked(made)
    for confidence in ("softmax", "classifier"):
        assert texts["kernels", confidence] == texts["torch", confidence]
        assert found["kernels", confidence] == found["torch", confidence]
        assert found["kernels", confidence]["maps_per_step"] > 0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("head", ["lens", "trained"])
def test_a_fixed_depth_ends_with_its_tokens_in_the_call_of_its_layers(
    head: Any,
    rows: int,
    target: CausalLM,
    trained: Exits,
    prompts: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slow twin runs layers, norm, map and output matrix one by one. What is read later is what it wrote."""
    trained.save(tmp_path, target)
    decoder = StaticDepth(target, GREEDY, 2, head=head, checkpoint=tmp_path)
    wanted = [by_parts(target, decoder.reader, prompt, 2) for prompt in prompts[:rows]]
    calls: list[str] = []
    for kind, name in ((FusedLayers, "run"), (CausalLM, "head"), (type(target), "norm")):
        original = getattr(kind, name)

        def counted(*given: Any, name: str = name, original: Any = original, **named: Any) -> Any:
            calls.append(name)
            return original(*given, **named)

        monkeypatch.setattr(kind, name, counted)
    target.prefill(prompts[:rows], target.new_cache(rows, 40))
    reading, steps = calls.copy(), 1 if target.runs_rounds else LIMIT - 1
    calls.clear()
    monkeypatch.setattr(target, "eos_ids", ())
    assert generate(decoder, prompts[:rows], LIMIT) == wanted
    assert calls == [*reading, *["run"] * steps]
    drawn = StaticDepth(target, Sampling(temperature=1e-3), 2, head=head, checkpoint=tmp_path)
    assert generate(drawn, prompts[:rows], LIMIT) == wanted and worked(drawn) == worked(decoder)


def by_parts(target: CausalLM, reader: Reader, prompt: torch.Tensor, depth: int) -> list[int]:
    cache = target.new_cache(1, len(prompt) + LIMIT)
    text = target.prefill([prompt], cache).logits[0].argmax(-1).tolist()
    while len(text) < LIMIT:
        state = target.begin(torch.tensor([text[-1:]]), None, cache)
        target.run(state, range(depth))
        text += target.head(reader.read(depth, state.hidden))[0].argmax(-1).tolist()
        cache.advance([1])
    return text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "pegasus"])
@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "softmax with a screen", "falling", "saturation", "classifier", "table"),
        *("static", "free", "free with a screen", "free, one waits"),
    ],
)
def test_several_steps_with_exits_are_one_call(
    name: str, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, layers and work are those of steps one by one, in a batch too, whose rows end at different lengths."""
    lm = of_family(family, dtype)
    assert lm.runs_rounds
    sources = test_seq2seq_lm.ids(7, 4, 9)
    decoder = MAKERS[name](lm)
    texts = generate(decoder, sources, LIMIT)
    first = {token: min(text.index(token) for text in texts if token in text) for text in texts for token in text}
    last = max(first, key=lambda token: first[token])
    assert first[last] > 0, "ends no text at once"
    monkeypatch.setattr(lm, "eos_ids", (last,))
    decoder = MAKERS[name](lm)
    one_by_one = object.__new__(type("OneByOne", (type(lm),), {"runs_rounds": False}))
    one_by_one.__dict__.update(lm.__dict__)
    slow = MAKERS[name](one_by_one)
    calls: list[int] = []
    run = FusedLayers.run_rounds

    def counted(layers: FusedLayers, roots: Any, *given: Any) -> Any:
        ran = run(layers, roots, *given)
        calls.append(len(ran.tokens))
        return ran

    monkeypatch.setattr(FusedLayers, "run_rounds", counted)
    for rows in (1, 3):
        steps, wanted = (taken(made, sources[:rows]) for made in (decoder, slow))
        # Rows whose text has ended leave where no state waits, in a call of several steps after it.
        late = {"rows": 0} if "free" in name and rows > 1 else {}
        assert steps == wanted and worked(decoder) | late == worked(slow) | late
    assert max(calls) > 2 and (len(decoder.counters.exits) > 1 or name in ("saturation", "static"))


def of_family(family: str, dtype: torch.dtype) -> CausalLM:
    """A model of 6 layers, as ``target``."""
    if family == "llama":
        return CausalLM.from_hf(
            tiny("llama", head_dim=16, num_hidden_layers=6).to(dtype), linear="panels", keep_hf=True
        )
    kind, options = test_seq2seq_lm.KERNELS["pegasus_kernels"]
    given = options | {"dtype": torch.bfloat16, "scale_embedding": False}
    whole = test_seq2seq_lm.tiny(kind, **given, decoder_layers=6)
    for weight in whole.get_decoder().layer_norm.parameters():
        weight.data *= 0.3
    return Seq2SeqLM.from_hf(whole.to(dtype), linear="panels", keep_hf=True)


def taken(decoder: ExitDecoder, sources: list[torch.Tensor]) -> list[tuple[list[list[int]], list[float]]]:
    """Tokens of all steps, and the layers of rows that got some."""
    found: list[tuple[list[list[int]], list[float]]] = []

    def keep(step: Step, _rows: Collection[int]) -> None:
        pairs = zip(step.tokens, step.layers, strict=True)
        found.append((step.tokens, [share for tokens, share in pairs if tokens]))

    generate(decoder, sources, LIMIT, decoder.target.eos_ids, watch=keep)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", test_seq2seq_lm.KERNELS)
def test_a_fixed_depth_of_an_encoder_decoder_writes_what_its_parts_write(variant: str, dtype: torch.dtype) -> None:
    """With and without a norm after the layers; texts that end by a token, and others."""
    family, options = test_seq2seq_lm.KERNELS[variant]
    model = test_seq2seq_lm.tiny(family, **options | {"dtype": dtype, "decoder_layers": 3})
    lm = Seq2SeqLM.from_hf(model, linear="panels")
    sources, decoder = test_seq2seq_lm.ids(7, 4, 9), StaticDepth(lm, GREEDY, 2, head="lens")
    wanted = [by_parts(lm, decoder.reader, source, 2) for source in sources]
    assert generate(decoder, sources, LIMIT) == wanted
    last = max(wanted[0], key=wanted[0].index)  # the token that comes last for the first time
    lm.eos_ids = (last,)
    cut = [text[: 1 + text.index(last)] if last in text else text for text in wanted]
    assert [generate(decoder, [source], LIMIT, lm.eos_ids)[0] for source in sources] == cut
    assert generate(decoder, sources, LIMIT, lm.eos_ids) == cut


def test_a_row_is_computed_only_as_deep_as_it_goes(target: CausalLM) -> None:
    """Where a row left, its state is that after its own layers, and layers above have its keys and values."""
    cache = target.new_cache(3, 8)
    state = target.begin(torch.tensor([[5], [6], [7]]), None, cache)
    found = target.run_to_exits(state, 6, ExitRule((2, 4, 6), "table", depths=[2, 6, 4]), [True, True, True])
    assert found.depths == [2, 6, 4]
    for row, (token, depth) in enumerate(zip((5, 6, 7), (2, 6, 4), strict=True)):
        own = target.new_cache(1, 8)
        walked = target.begin(torch.tensor([[token]]), None, own)
        target.run(walked, range(depth))
        assert torch.equal(found.hidden[row], walked.hidden[0])
        target.fill(walked, range(depth, 6))
        assert torch.equal(cache.store[:, row, :1], own.store[:, 0, :1])


def test_a_pass_may_stop_between_layers_and_go_on(target: CausalLM) -> None:
    rule = ExitRule((3, 6), "table", depths=[6, 6])
    whole, parts = target.new_cache(2, 8), target.new_cache(2, 8)
    tokens = torch.tensor([[5], [9]])
    wanted = target.run_to_exits(target.begin(tokens, None, whole), 6, rule, [True, True])
    state = target.begin(tokens, None, parts)
    first = target.run_to_exits(state, 6, rule, [True, True], 0, 3)
    assert first.depths == [0, 0]
    state.hidden = first.hidden
    one = target.run_to_exits(state, 6, rule, [False, True], 3)
    assert one.depths == [0, 6] and torch.equal(one.hidden[1], wanted.hidden[1])
    other = target.run_to_exits(state, 6, rule, [True, False], 3)
    assert torch.equal(other.hidden[0], wanted.hidden[0])
    assert torch.equal(parts.store[:, :, :1], whole.store[:, :, :1])


def test_confidence_is_the_gap_of_the_softmax(target: CausalLM) -> None:
    cache = target.new_cache(4, 8)
    state = target.begin(torch.tensor([[5], [6], [7], [8]]), None, cache)
    rule = ExitRule((2,), "softmax", thresholds=[-1.0] * 4, propagates=False)
    found = target.run_to_exits(state, 2, rule, [True] * 4)
    ready = target.norm(found.hidden[:, 0])
    wanted = Softmax(target)(found.hidden[:, 0], ready)
    assert wanted.confidence is not None and wanted.logits is not None
    np.testing.assert_allclose(found.confidence, wanted.confidence.tolist(), atol=1e-6)
    torch.testing.assert_close(found.logits, wanted.logits.float(), rtol=1e-5, atol=1e-5)


def test_widths_that_are_no_multiple_of_a_register_run_in_the_kernels() -> None:
    """A feed-forward layer of 44 numbers has a tail of 12."""
    model = tiny("llama", head_dim=16, intermediate_size=44).float()
    fused, plain = (CausalLM.from_hf(model, linear=form, keep_hf=True) for form in ("panels", "plain"))
    assert fused.fused and not plain.fused
    tokens = torch.tensor([[3, 8, 2, 9]])
    outputs = [lm.forward(tokens, None, lm.new_cache(1, 8)).logits for lm in (fused, plain)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------- regrouping


@pytest.mark.parametrize("least", [1, 3, 6])
@pytest.mark.parametrize("name", ["softmax", "falling", "classifier", "hash"])
def test_rows_that_wait_write_what_they_write_alone(
    name: str, least: int, target: CausalLM, prompts: list[torch.Tensor], tmp_path: Path
) -> None:
    if name == "hash":
        table = torch.randint(1, 7, (target.vocab_size,), generator=torch.Generator().manual_seed(2)).numpy()
        HashTable(table, 6).save(tmp_path)
        made: EarlyExitDecoder = HashEE(target, GREEDY, head="lens", regroup=least, checkpoint=tmp_path)
    elif name == "classifier":
        made = classified(target)
        made._regroup = least
    else:
        settings: dict[str, Any] = {"decay": "paper", "threshold": 0.0} if name == "falling" else {}
        made = calm(regroup=least, **settings)(target)
    alone = [generate(made, [prompt], LIMIT)[0] for prompt in prompts]
    exits, looks = made.stats()["exits"], made.counters.looks
    made.restart(made.policy)
    steps: list[list[int]] = []
    assert generate(made, prompts, LIMIT, watch=lambda step, _: steps.append([len(t) for t in step.tokens])) == alone
    assert made.stats()["exits"] == exits and (name == "hash" or 0 < made.counters.looks < looks)
    worked(made)
    assert any(0 < sum(step) < len(prompts) for step in steps), "no row waited"
    checks.check_batch(lambda lm, sampling: made, target, limit=LIMIT)


def test_the_deepest_group_that_is_large_enough_goes_on(target: CausalLM) -> None:
    waiting = Waiting(target, 5, least=2)
    every = [True] * 5
    assert waiting.chosen(every) == [0, 1, 2, 3, 4]
    waiting.go([0, 1, 2, 3, 4], [2, 4, 2, 0, 0])
    assert waiting.chosen(every) == [0, 2], "two wait at depth 2, one at depth 4"
    waiting.go([0, 2], [0, 4])
    assert waiting.chosen(every) == [1, 2]
    assert waiting.chosen([True, True, False, True, True]) == [0, 3, 4], "one waits, and is not enough"
    for _ in range(PATIENCE):
        waiting.go([0, 3, 4], [0, 0, 0])
    assert waiting.chosen([True, True, False, True, True]) == [1], "it has waited long enough"


def test_regrouping_refuses_what_it_cannot_do(target: CausalLM, by_torch: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"regroup must be at least 1 or null, got 0\. Set method.regroup=8\."):
        calm(regroup=0)(target)
    with pytest.raises(ValueError, match="regroup needs exits that the CPU kernels judge"):
        calm(regroup=2)(by_torch)
    with pytest.raises(ValueError, match="regroup must be null with confidence=saturation"):
        calm(regroup=2, confidence="saturation")(target)


def test_the_whole_model_stays_exact(target: CausalLM, prompts: list[torch.Tensor]) -> None:
    made = calm(threshold=1.0)(target)
    assert made.guarantee is Guarantee.EXACT
    assert generate(made, prompts, LIMIT) == generate(Autoregressive(target, GREEDY), prompts, LIMIT)
