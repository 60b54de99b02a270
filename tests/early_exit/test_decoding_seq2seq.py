"""Early exit of decoders with an encoder: against transformers' own layers with states frozen from each exit on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.early_exit.calm import Calm
from methods.early_exit.exits import Lens
from methods.early_exit.free import Free
from methods.early_exit.hash_ee import HashEE
from methods.early_exit.loop import EarlyExitDecoder, ExitDecision, ExitPoint, Policy
from methods.early_exit.static_depth import StaticDepth
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from tests.engine.test_seq2seq_lm import FORM, KERNELS, VARIANTS, begun, ids, tiny

GREEDY, LAYERS = Sampling(), 4
CPU = torch.Generator


def deep(variant: str, dtype: torch.dtype = torch.float64) -> Any:
    return tiny(variant, dtype, **{"num_decoder_layers" if "t5" in variant else "decoder_layers": LAYERS})


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Seq2SeqLM]:
    model = deep(request.param)
    return model, Seq2SeqLM.from_hf(model, keep_hf=True)


def by_kernels(variant: str) -> Seq2SeqLM:
    """In 32 bit, by the C++ kernels where there is a compiler."""
    family, options = KERNELS[variant]
    found = Seq2SeqLM.from_hf(tiny(family, **{**options, "decoder_layers": LAYERS}), linear=FORM)
    assert isinstance(found, Seq2SeqLM)
    return found


@pytest.fixture(scope="module", params=["marian", "t5_gated", "pegasus_kernels"])
def target(request: pytest.FixtureRequest) -> Seq2SeqLM:
    if request.param in KERNELS:
        return by_kernels(request.param)
    found = Seq2SeqLM.from_hf(deep(request.param), keep_hf=True)
    assert isinstance(found, Seq2SeqLM)
    return found


class Scripted(Policy):
    """A policy that sends row b's token at each place to ``depths[b][place]``."""

    guarantee, nbytes, deepest = Guarantee.RELAXED, 0, LAYERS

    def __init__(self, depths: list[list[int]]) -> None:
        self.depths, self.place = depths, -1

    def reset(self, limit: int) -> None:
        self.place = -1

    def stops(self, roots: object) -> list[int]:
        self.place += 1
        return sorted({row[self.place] for row in self.depths})

    def decide(self, point: ExitPoint) -> ExitDecision:
        return ExitDecision([row[self.place] == point.depth for row in self.depths])


@contextmanager
def frozen(model: Any, depths: list[int]) -> Iterator[None]:
    """transformers' decoder in which the state of the token at each place stays as it is from its depth on."""
    stack = model.get_decoder()
    wanted = torch.tensor(depths)[None, :, None]

    def hook(index: int) -> Callable[..., Any]:
        def freeze(layer: Any, args: Any, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            kept = torch.where(wanted > index, states, args[0])
            return (kept, *output[1:]) if isinstance(output, tuple) else kept

        return freeze

    layers = stack.block if hasattr(stack, "block") else stack.layers
    handles = [layer.register_forward_hook(hook(index)) for index, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def frozen_logits(model: Any, source: torch.Tensor, text: torch.Tensor, depths: list[int]) -> torch.Tensor:
    with torch.no_grad(), frozen(model, depths):
        return model(input_ids=source[None], decoder_input_ids=text[None], use_cache=False).logits[0]


DEPTHS = [[1, 4, 2, 1, 3, 4], [3, 1, 1, 4, 2, 2], [4, 4, 1, 2, 1, 3]]


def test_texts_are_those_of_transformers_with_frozen_states(pair: tuple[Any, Seq2SeqLM]) -> None:
    """Ragged sources, rows that leave at different layers: every token is the twin's, at every exit."""
    model, lm = pair
    sources = ids(7, 2, 5)
    texts = checks.outputs(EarlyExitDecoder(lm, GREEDY, Scripted(DEPTHS), Lens(lm)), sources, 7)
    for row, text in enumerate(texts):
        depths = [LAYERS] * len(lm.start) + DEPTHS[row]
        logits = frozen_logits(model, sources[row], begun(lm, *text[:-1]), depths)[len(lm.start) - 1 :]
        for place, token in enumerate(text):
            others = logits[place].clone()
            others[list(lm.suppressed)] = -torch.inf
            assert int(others.argmax()) == token, f"row {row}, place {place}"


def test_filled_keys_and_values_are_those_each_layer_writes(pair: tuple[Any, Seq2SeqLM]) -> None:
    _, lm = pair
    for lengths in ((6, 2), (4, 4)):
        written, filled = lm.new_cache(2, 20), lm.new_cache(2, 20)
        for cache in (written, filled):
            lm.prefill(ids(*lengths), cache)
            lm.forward(torch.stack(ids(2, 2, seed=4)), None, cache)
            cache.advance([2, 1])  # rows part
        tokens = torch.stack(ids(1, 1, seed=5))
        for layer in range(LAYERS):
            lm.run(lm.begin(tokens, None, written), [layer])  # every layer sees the same state: the embeddings
        lm.fill(lm.begin(tokens, None, filled), range(LAYERS))
        torch.testing.assert_close(filled.store, written.store, rtol=1e-5, atol=1e-5)


MAKERS: dict[str, Callable[..., Any]] = {
    "calm": lambda lm, s: Calm(lm, s, 0.05, exits=[1, 2, 3], head="lens"),
    "saturation": lambda lm, s: Calm(lm, s, 0.1, "saturation", [1, 2, 3], "lens"),
    "static": lambda lm, s: StaticDepth(lm, s, depth=2, head="lens"),
    "free": lambda lm, s: Free(lm, s, depth=2, threshold=0.1, head="lens"),
    "rollback": lambda lm, s: Free(lm, s, 2, 0.1, "rollback", distance=1.0, head="lens"),
    "verify": lambda lm, s: Free(lm, s, 2, 0.1, "verify", head="lens"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_rows_write_what_they_write_alone(target: Seq2SeqLM, make: Callable[..., Any]) -> None:
    checks.check_batch(make, target, limit=20)
    checks.check_no_leak(make, target)
    checks.check_counters(make, target)


@pytest.mark.parametrize(("variant", "threshold"), [("marian", 0.2), ("t5", 0.001)])
def test_rows_write_what_they_write_alone_in_32_bit(variant: str, threshold: float) -> None:
    lm = Seq2SeqLM.from_hf(deep(variant, torch.float32))
    decoder = Calm(lm, GREEDY, threshold, exits=[1, 2, 3], head="lens")
    checks.check_batch(lambda *_: decoder, lm, limit=20)
    assert len(decoder.counters.exits) > 1, "all rows left at one layer, so nothing was tested"


NEVER: dict[str, Callable[..., Any]] = {
    "calm": lambda lm: Calm(lm, GREEDY, 1.0, exits=[1, 2], head="lens", decay="paper"),
    "static": lambda lm: StaticDepth(lm, GREEDY, depth=LAYERS),
    "free": lambda lm: Free(lm, GREEDY, 2, 1.0, head="lens"),
    "verify": lambda lm: Free(lm, GREEDY, 1, 0.05, "verify", head="lens"),
}


@pytest.mark.parametrize("make", NEVER.values(), ids=NEVER.keys())
def test_who_never_leaves_or_verifies_writes_the_targets_text(target: Seq2SeqLM, make: Callable[..., Any]) -> None:
    sources, decoder = ids(7, 1, 5), make(target)
    assert decoder.guarantee is Guarantee.EXACT
    assert checks.outputs(decoder, sources, 15) == checks.outputs(Autoregressive(target, GREEDY), sources, 15)


@pytest.mark.parametrize("name", ["calm", "saturation", "static"])
def test_claimed_layers_and_heads_are_those_that_ran(
    target: Seq2SeqLM, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Self-attention, cross-attention and feed-forward of a skipped layer do not run; its keys are written."""
    if target.fused:
        pytest.skip("the kernels' sub-layers cannot be counted from outside")
    seen: dict[str, list[int]] = {"attend": [], "look": [], "project": [], "head": []}
    for kind, place in (("attend", 2), ("look", 1), ("project", 1), ("head", None)):
        method = f"_{kind}" if kind != "head" else kind
        original = getattr(Seq2SeqLM, method)

        def counted(lm: Seq2SeqLM, *args: Any, kind: str = kind, place: Any = place, original: Any = original) -> Any:
            seen[kind].append(0 if place is None else args[place - 1])
            return original(lm, *args)

        monkeypatch.setattr(Seq2SeqLM, method, counted)
    decoder, saved = MAKERS[name](target, GREEDY), 0
    for number, step in enumerate(decoder.decode(ids(5), 20, CPU())):
        ran = len(seen["attend"])
        assert [share * LAYERS for share in step.layers] == [ran] and seen["look"] == seen["attend"]
        if number:
            assert sorted(seen["attend"] + seen["project"]) == list(range(decoder.policy.deepest))
            saved += LAYERS - ran
        for kind in seen:
            seen[kind].clear()
    assert saved > 0
    facts = decoder.stats()
    assert facts["layers_per_step"] < LAYERS and facts["layer_equivalents_of_the_model"] > LAYERS


def test_a_prompt_that_an_encoder_reads_is_not_hashed(target: Seq2SeqLM) -> None:
    with pytest.raises(ValueError, match="method.prompt must be full .*encoder reads the prompt, got hash"):
        HashEE(target, GREEDY, prompt="hash")
