"""River: copies of 4 bits behind the exits, which share the cache of the model."""

from __future__ import annotations

import copy

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.early_exit.river import River
from methods.engine import cpu_kernels, linear
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from tests.engine.test_causal_lm import tiny
from tests.helpers.rounded_targets import BY, rounded_target

GREEDY = Sampling()
kernels = pytest.mark.skipif(cpu_kernels.library() is None, reason="the kernels cannot be compiled here")


@pytest.fixture(scope="module", params=BY)
def target(request: pytest.FixtureRequest) -> CausalLM:
    return rounded_target(request.param, layers=6)


@kernels
@pytest.mark.parametrize("head", [None, "int8"])
def test_a_rounded_view_has_full_layers_below_and_shares_cache_and_norms(target: CausalLM, head: str | None) -> None:
    view, tokens = target.rounded(2, head), torch.tensor([[5, 9, 11]])  # type: ignore[arg-type]
    ours, theirs = target.new_cache(1, 8), target.new_cache(1, 8)
    full, light = target.begin(tokens, None, ours), view.begin(tokens, None, theirs)
    target.run(full, range(2))
    view.run(light, range(2))
    assert torch.equal(full.hidden, light.hidden) and torch.equal(ours.store[:2], theirs.store[:2])
    target.run(full, range(2, 6))
    view.run(light, range(2, 6))
    apart = (full.hidden - light.hidden).norm() / full.hidden.norm()
    assert 1e-4 < apart < 0.5, "rounded, and still the same layers"
    assert torch.equal(view.norm(full.hidden), target.norm(full.hidden))
    read = view.head(full.hidden), target.head(full.hidden)
    assert torch.equal(*read) == (head is None)
    assert view.int4_bytes > 0 and not target.int4_bytes and target.weights == "full"
    filled, written = view.new_cache(1, 8), view.new_cache(1, 8)
    view.fill(view.begin(tokens, None, filled), [4])  # of the copy, not of a projection that the model has kept
    view.run(view.begin(tokens, None, written), [4])
    torch.testing.assert_close(filled.store, written.store, rtol=0.1, atol=0.1)


@kernels
@pytest.mark.parametrize("output", ["full", "int8"])
def test_every_token_behind_the_prompt_takes_full_layers_and_then_copies(
    target: CausalLM, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow twin: the rounded view as a model of its own, over a cache that the whole model filled."""
    decoder = River(target, GREEDY, 0.0, [2], output)  # type: ignore[arg-type]
    prompt = checks.prompts(target.vocab_size, (7,))[0]
    view, cache = target.rounded(2, None if output == "full" else "int8"), target.new_cache(1, 24)
    text = [int(target.prefill([prompt], cache).logits.argmax())]
    while len(text) < 12:
        text.append(int(view.forward(torch.tensor([[text[-1]]]), None, cache).logits.argmax()))
        cache.advance([1])
    assert checks.outputs(decoder, [prompt], 12)[0] == text
    facts = decoder.stats()
    assert facts["exits"] == {"2": 11} and facts["layers_per_step"] == 2.0 and not decoder.counters.fills
    assert facts["confidence_share"] == 0.0 and facts["looks_per_step"] == 0.0, "nothing is asked"
    per_layer = decoder.light.int4_bytes / 4
    whole = target.pass_bytes(1) - target.skip(range(6), range(6)).pass_bytes(1)
    spent = 2 + 4 * per_layer / (whole / 6) + (decoder.light if output == "int8" else target).output_bytes / (whole / 6)
    assert facts["layer_equivalents_per_step"] == pytest.approx(spent)
    assert decoder.memory() == {
        "copies": decoder.light.int4_bytes + (decoder.light.output_bytes if output == "int8" else 0)
    }


@kernels
@pytest.mark.parametrize("output", ["full", "int8"])
def test_rows_that_exit_at_different_layers_write_what_they_write_alone(target: CausalLM, output: str) -> None:
    def make(lm: CausalLM, sampling: Sampling) -> River:
        return River(lm, sampling, 0.8, [2, 3, 4, 5], output)  # type: ignore[arg-type]

    checks.check_batch(make, target, limit=24)
    checks.check_no_leak(make, target)
    checks.check_counters(make, target)
    decoder = make(target, GREEDY)
    checks.outputs(decoder, checks.prompts(target.vocab_size, (5, 1, 14, 8)), 24)
    assert len(decoder.counters.exits) > 2, "all rows left at one layer, so nothing was tested"


@kernels
def test_a_token_leaves_after_a_layer_that_hardly_turns_its_state(target: CausalLM) -> None:
    prompt, threshold = checks.prompts(target.vocab_size, (6,))[0], 0.8
    cache = target.new_cache(1, 16)
    root = target.prefill([prompt], cache).logits.argmax(-1)[0]
    state = target.begin(root[None], None, cache)
    seen = [state.hidden, *target.run(state, range(6), range(6)).values()]
    found = [float(torch.cosine_similarity(a, b, dim=-1)) for a, b in zip(seen, seen[1:], strict=False)]
    wanted = next((depth for depth in (2, 3, 4, 5) if found[depth - 1] > threshold), 6)
    decoder = River(target, GREEDY, threshold, [2, 3, 4, 5])
    checks.outputs(decoder, [prompt], 2)
    assert dict(decoder.counters.exits) == {wanted: 1}


@kernels
def test_what_was_drafted_leaves_nothing_in_the_cache(target: CausalLM) -> None:
    """Keys of copies are overwritten by those of the model in the pass that judges."""
    made = []
    view, new_cache = target.skip(), target.new_cache
    view.new_cache = lambda *shape: made.append(new_cache(*shape)) or made[-1]  # type: ignore[method-assign]
    decoder = River(target, GREEDY, 0.0, [2], accept="verify")
    decoder.target = view
    prompt = checks.prompts(target.vocab_size, (7,))[0]
    text = checks.outputs(decoder, [prompt], 12)[0]
    length = made[0].lengths[0]
    twin = target.new_cache(1, 32)
    target.prefill([torch.cat([prompt, torch.tensor(text)])[:length]], twin)
    torch.testing.assert_close(made[0].store[:, :, :length], twin.store[:, :, :length], rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.parametrize("exits", [[1], [2], [2, 4]])
def test_drafts_that_are_judged_leave_the_models_own_text(target: CausalLM, exits: list[int]) -> None:
    prompts = checks.prompts(target.vocab_size, (9, 3, 14))
    wanted = checks.outputs(Autoregressive(target, GREEDY), prompts, 20)
    decoder = River(target, GREEDY, 0.0, exits, accept="verify", max_pending=5)
    assert checks.outputs(decoder, prompts, 20) == wanted
    assert [checks.outputs(decoder, [prompt], 20)[0] for prompt in prompts] == wanted
    assert decoder.stats()["exits"].get(str(exits[0])), "no draft was kept"


@kernels
def test_one_is_the_full_model_and_between_a_layer_must_be_compared(target: CausalLM) -> None:
    assert River(target, GREEDY, 1.0, [1]).guarantee is Guarantee.EXACT
    assert River(target, GREEDY, 0.0, [1]).guarantee is Guarantee.RELAXED
    assert River(target, GREEDY, 0.0, [1], accept="verify").guarantee is Guarantee.EXACT
    with pytest.raises(ValueError, match="must begin at 2"):
        River(target, GREEDY, 0.5, [1])
    with pytest.raises(ValueError, match="ascending numbers of layers"):
        River(target, GREEDY, 0.0, [6])


@kernels
def test_river_is_refused_where_layers_cannot_be_rounded(target: CausalLM) -> None:
    with pytest.raises(ValueError, match="Layers rounded to 4 bits need bfloat16 or float32"):
        River(checks.tiny_target(), GREEDY)
    rounded = CausalLM.from_hf(copy.deepcopy(target.hf) if target.hf else _fresh(), weights="int4")
    with pytest.raises(ValueError, match="weights=int4"):
        River(rounded, GREEDY)
    with pytest.raises(ValueError, match="without experts"):
        River(CausalLM.from_hf(tiny("mixtral")), GREEDY)


def _fresh() -> torch.nn.Module:
    return copy.deepcopy(checks.tiny_target().hf).float()  # type: ignore[union-attr]


def test_river_is_refused_without_a_compiler(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "blocks_usable", lambda *where: False)
    with pytest.raises(ValueError, match="a C\\+\\+ compiler"):
        River(target, GREEDY)
