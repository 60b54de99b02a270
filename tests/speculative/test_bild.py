"""Big Little Decoder against its algorithm written out: two original models, one row, no cache, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.config import compose, instantiate
from bench.config.schema import SamplingConfig
from bench.contract import checks
from bench.errors import UserError
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.bild import Bild
from tests.engine.test_seq2seq_lm import VOCAB, begun, full, tiny

GREEDY = Sampling()
LOGITS = Callable[[Tensor, Sequence[int]], Tensor]  # of a model: prompt and what was written -> logits of what follows


def of_causal(lm: CausalLM) -> LOGITS:
    assert lm.hf is not None
    with torch.no_grad():
        return lambda prompt, written: lm.hf(torch.tensor([[*prompt.tolist(), *written]])).logits[0, -1].detach()  # type: ignore[misc]


def of_seq2seq(lm: CausalLM) -> LOGITS:
    return lambda prompt, written: full(lm.hf, prompt, begun(lm, *written))[-1]


def causal_pair() -> tuple[CausalLM, CausalLM, LOGITS, LOGITS]:
    big, little = checks.tiny_target(VOCAB), checks.tiny_target(VOCAB, layers=2, seed=5)
    return big, little, of_causal(big), of_causal(little)


def seq2seq_pair() -> tuple[CausalLM, CausalLM, LOGITS, LOGITS]:
    """The little one is the big one with noise, so that the two agree now and then."""
    models = [tiny("marian", tie_word_embeddings=False) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for parameter in models[1].parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    big, little = (Seq2SeqLM.from_hf(model, keep_hf=True) for model in models)
    return big, little, of_seq2seq(big), of_seq2seq(little)


@pytest.fixture(scope="module", params=[causal_pair, seq2seq_pair], ids=["causal", "seq2seq"])
def pair(request: pytest.FixtureRequest) -> tuple[CausalLM, CausalLM, LOGITS, LOGITS]:
    found: tuple[CausalLM, CausalLM, LOGITS, LOGITS] = request.param()
    return found


def written_out(
    big: LOGITS, little: LOGITS, prompt: Tensor, limit: int, fallback: float, rollback: float, most: int
) -> tuple[list[int], int, int]:
    """The text, tokens that were pending, and those of them that stayed."""
    text = [int(big(prompt, []).argmax())]
    pending_count = kept = 0
    while len(text) < limit:
        pending: list[int] = []
        while len(pending) < most:
            probs = little(prompt, text + pending).softmax(-1)
            if probs.max() < fallback:
                break
            pending.append(int(probs.argmax()))
        pending_count += len(pending)
        good = 0
        while good < len(pending) and -big(prompt, text + pending[:good]).log_softmax(-1)[pending[good]] <= rollback:
            good += 1
        kept += good
        text += pending[:good]
        text.append(int(big(prompt, text).argmax()))
    return text, pending_count, kept


THRESHOLDS = [(0.15, 3.0, 4), (0.1, 6.0, 10), (0.3, 2.0, 1), (0.0, 4.0, 3)]  # fallback, rollback, most


@pytest.mark.parametrize(("fallback", "rollback", "most"), THRESHOLDS)
def test_the_text_is_that_of_the_algorithm(
    pair: tuple[CausalLM, CausalLM, LOGITS, LOGITS], fallback: float, rollback: float, most: int
) -> None:
    """Rows of a ragged batch, each of which hands over by itself."""
    big, little, of_big, of_little = pair
    prompts = checks.prompts(VOCAB, (9, 1, 5))
    decoder = Bild(big, GREEDY, little, fallback, rollback, most)
    steps = list(decoder.decode(prompts, 11, torch.Generator()))
    for row, prompt in enumerate(prompts):
        text, pending, kept = written_out(of_big, of_little, prompt, 11, fallback, rollback, most)
        assert sum((step.tokens[row] for step in steps), []) == text
        assert sum(step.drafted[row] for step in steps) == pending
        assert sum(step.accepted[row] for step in steps) == kept
    assert decoder.guarantee is Guarantee.RELAXED


def test_the_thresholds_are_somewhere_between(pair: tuple[CausalLM, CausalLM, LOGITS, LOGITS]) -> None:
    """No trivial cases: tokens stay and are cut, rows hand over early, and the text is no model's own."""
    big, _, of_big, of_little = pair
    (prompt,) = checks.prompts(VOCAB, (9,))
    wanted = checks.outputs(Autoregressive(big, GREEDY), [prompt], 13)[0]
    found = [written_out(of_big, of_little, prompt, 13, *thresholds) for thresholds in THRESHOLDS]
    assert any(0 < kept < pending for _, pending, kept in found)
    assert any(text[:13] != wanted for text, _, _ in found)
    rounds = [len(text) - kept - 1 for text, _, kept in found]
    assert any(
        pending < count * most for (_, pending, _), count, (_, _, most) in zip(found, rounds, THRESHOLDS, strict=True)
    )


def test_the_contract(pair: tuple[CausalLM, CausalLM, LOGITS, LOGITS]) -> None:
    big, little, *_ = pair
    make = lambda target, sampling: Bild(target, GREEDY, little, 0.2, 6.0)  # noqa: E731
    checks.check_batch(make, big)
    checks.check_counters(make, big)
    checks.check_no_leak(make, big)


def test_never_sure_is_the_big_model_alone_and_always_sure_of_itself_too(
    pair: tuple[CausalLM, CausalLM, LOGITS, LOGITS],
) -> None:
    big, little, of_big, _ = pair
    (prompt,) = checks.prompts(VOCAB, (7,))
    wanted: list[int] = []
    for _ in range(12):
        wanted.append(int(of_big(prompt, wanted).argmax()))
    steps = list(Bild(big, GREEDY, little, fallback=1.0).decode([prompt], 12, torch.Generator()))
    assert sum((step.tokens[0] for step in steps), []) == wanted and all(step.nodes == 1 for step in steps)
    steps = list(Bild(big, GREEDY, big, fallback=0.0, rollback=99.0, most=4).decode([prompt], 12, torch.Generator()))
    assert sum((step.tokens[0] for step in steps), [])[:12] == wanted
    assert all(step.accepted == step.drafted == [4] for step in steps[1:])
    strict = Bild(big, GREEDY, little, fallback=0.0, rollback=0.0)
    assert checks.outputs(strict, [prompt], 12)[0] == wanted


def test_the_little_model_stops_at_the_end_of_a_text(pair: tuple[CausalLM, CausalLM, LOGITS, LOGITS]) -> None:
    big, *_ = pair
    prompts = checks.prompts(VOCAB, (7, 4))
    plain = list(Bild(big, GREEDY, big, 0.0, 99.0, most=5).decode(prompts, 6, torch.Generator()))[1]
    ending = object.__new__(type(big))
    ending.__dict__.update(big.__dict__)
    ending.eos_ids = (plain.tokens[0][2],)
    cut = plain.tokens[0].index(plain.tokens[0][2]) + 1
    step = list(Bild(big, GREEDY, ending, 0.0, 99.0, most=5).decode(prompts, 6, torch.Generator()))[1]
    assert step.tokens[0] == plain.tokens[0][: cut + 1] and step.drafted[0] == cut < 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_model": None}, "needs a little model .*got none.*method.draft_model="),
        ({"fallback": 1.5}, "0 <= fallback <= 1"),
        ({"rollback": -1.0}, "rollback >= 0"),
        ({"most": 0}, "most >= 1"),
        ({"sampling": Sampling(1.0)}, "bild must be greedy, got temperature=1.0"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    big, little, *_ = causal_pair()
    with pytest.raises(ValueError, match=said):
        Bild(**{"target": big, "sampling": GREEDY, "draft_model": little} | options)


def test_vocabularies_must_agree() -> None:
    big = checks.tiny_target()
    with pytest.raises(ValueError, match="share one vocabulary"):
        Bild(big, GREEDY, checks.tiny_target(big.vocab_size + 5000, layers=1))


def test_the_configuration_names_the_little_model_and_asks_for_its_tokens() -> None:
    """The run's loader (``bench.models.loading.load_draft``) refuses a model that reads other tokens."""
    group = compose.compose(["method=bild", "method.draft_model=org/small"]).method

    def load(name: Any) -> Any:
        raise UserError(f"Draft model '{name}' and target 'x' read different tokens")

    with pytest.raises(UserError, match="'org/small' and target 'x' read different tokens"):
        instantiate.build_decoder(group, checks.tiny_target(), SamplingConfig(), load)
    decoder = instantiate.build_decoder(
        group, checks.tiny_target(), SamplingConfig(), lambda name: checks.tiny_target()
    )
    assert isinstance(decoder, Bild) and decoder.guarantee is Guarantee.RELAXED
