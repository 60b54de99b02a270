"""The checks. ``make(target, sampling)`` builds the decoder under test.

The target is a tiny random model in 64 bit, so that equal tokens can be required without tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from methods.decoder import Decoder, Guarantee, PrefixCaching, Step, generate
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling

Make = Callable[[CausalLM, Sampling], Decoder]


def tiny_target(
    vocab_size: int = 61, layers: int = 4, seed: int = 0, keep_hf: bool = True, positions: int = 512
) -> CausalLM:
    """A random Llama with a sharp, context-dependent distribution; 64 bit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double) * 0.35)
    return CausalLM.from_hf(model, keep_hf=keep_hf)


def prompts(vocab_size: int, lengths: Sequence[int], seed: int = 1) -> list[Tensor]:
    """Random prompts whose second half repeats the first, so that lookups find something."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        half = torch.randint(0, vocab_size, (length // 2 + 1,), generator=generator)
        made.append(torch.cat([half, half])[:length])
    return made


def outputs(
    decoder: Decoder, batch: list[Tensor], limit: int, seed: int = 0, eos_ids: Sequence[int] = ()
) -> list[list[int]]:
    """Ids of each row, cut behind the first of ``eos_ids`` and at the limit."""
    return generate(decoder, batch, limit, eos_ids, torch.Generator().manual_seed(seed))


def greedy_reference(target: CausalLM, prompt: Tensor, limit: int) -> list[int]:
    """Greedy decoding without cache, engine or loop, with the original model."""
    return list(_greedy(target, tuple(prompt.tolist()), limit))


@lru_cache(maxsize=64)
def _greedy(target: CausalLM, prompt: tuple[int, ...], limit: int) -> tuple[int, ...]:
    assert target.hf is not None
    ids = list(prompt)
    for _ in range(limit):
        with torch.no_grad():
            ids.append(int(target.hf(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def check_greedy_identity(
    make: Make, target: CausalLM, lengths: Sequence[int] = (1, 2, 9, 17), limit: int = 13
) -> None:
    """EXACT decoders generate the target's greedy text for any prompt length and limit."""
    decoder = make(target, Sampling())
    for prompt, most in itertools.product(prompts(target.vocab_size, lengths), (1, limit)):
        found, wanted = outputs(decoder, [prompt], most)[0], greedy_reference(target, prompt, most)
        assert found == wanted, f"prompt of {len(prompt)} tokens, limit {most}: {found} is not the target's {wanted}"


def check_no_leak(make: Make, target: CausalLM, limit: int = 12) -> None:
    """A prompt gives the same text on a used and on a new decoder, greedy and sampling."""
    first, second = prompts(target.vocab_size, (11, 7))
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        used = make(target, sampling)
        outputs(used, [first], limit)
        assert outputs(used, [second], limit) == outputs(make(target, sampling), [second], limit), "state leaks"


def check_batch(make: Make, target: CausalLM, limit: int = 11) -> None:
    """Each row of a ragged batch equals the text of its prompt alone; also where others end and leave the batch.

    Of its four rows two end with their first token, and later one or both of the others.
    """
    decoder = make(target, Sampling())
    batch = prompts(target.vocab_size, (5, 1, 14, 8))
    alone = [outputs(decoder, [prompt], limit)[0] for prompt in batch]
    for eos_ids in ((), (alone[0][0], alone[2][0], alone[1][limit // 2])):
        together = outputs(decoder, batch, limit, eos_ids=eos_ids)
        for row, text in enumerate(alone):
            wanted = text[: next((place for place, token in enumerate(text, 1) if token in eos_ids), limit)]
            assert together[row] == wanted, f"row {row} of the batch: {together[row]}, alone: {wanted}"


def check_prefix_cache(
    make: Make, target: CausalLM, limit: int = 12, between: Callable[[], object] = lambda: None
) -> list[int]:
    """Prompts that begin like the text before them have the same rounds, whether that text is kept or not.

    Args:
        between: called before each prompt, as other decoders use the target, too.

    Returns:
        How much of each prompt was not read again: of one that leaves the text in the middle of its answer (at token
        15), the same again (of 18), one that continues the text (of 30 or more), one that leaves it in its prompt (at
        token 4), and one that has nothing in common with it.
    """
    first, other = (prompt.tolist() for prompt in prompts(target.vocab_size, (9, 14)))
    found: list[list[tuple[list[int], ...]]] = []
    for keeps in (False, True):
        decoder, text, kept = make(target, Sampling()), list[int](), list[int]()
        assert isinstance(decoder, PrefixCaching), "it keeps no text"
        decoder.keeps_prefix = keeps
        found.append([])
        for begin, end in ((0, first), (15, other[:3]), (15, other[:3]), (99, other[:5]), (4, other), (0, other)):
            between()
            prompt = text[:begin] + end
            rows, rng = [torch.tensor(prompt, device=target.device)], torch.Generator(target.device).manual_seed(0)
            steps = list(decoder.decode(rows, limit, rng))
            found[-1] += [(*step.tokens, step.drafted, step.accepted) for step in steps]
            text = prompt + [token for step in steps for token in step.tokens[0]]
            kept.append(steps[0].kept)
            assert kept[-1] < len(prompt) and not any(step.kept for step in steps[1:]), "of the prompt, but for its end"
        assert keeps or not any(kept), "nothing is kept unless it is asked for"
    assert found[0] == found[1], "a kept text changes what follows it"
    return kept[1:]


def check_counters(make: Make, target: CausalLM, limit: int = 10, batch: bool = True) -> None:
    """Counters are consistent: every row ends at its limit, drafts add up."""
    rows = prompts(target.vocab_size, (6, 3) if batch else (6,))
    done = [0] * len(rows)
    steps: list[Step] = list(make(target, Sampling()).decode(rows, limit, torch.Generator().manual_seed(0)))
    for number, step in enumerate(steps):
        for row, new in enumerate(step.tokens):
            assert not (done[row] >= limit and new), "tokens after the limit of a row"
            done[row] += len(new)
            assert 0 <= step.accepted[row] <= step.depth[row] <= step.drafted[row], f"step {number}: {step}"
            assert step.drafted[row] < step.nodes or not step.drafted[row], f"step {number} drafted more than it scored"
            if new:
                assert len(new) == step.accepted[row] + 1, (
                    f"step {number}: {len(new)} tokens, {step.accepted[row]} accepted"
                )
    assert all(count >= limit for count in done), f"rows ended at {done} tokens, limit {limit}"


def check_sampling(
    make: Make,
    target: CausalLM,
    sampling: Sampling,
    *,
    horizon: int = 3,
    rows: int = 4096,
    seed: int = 0,
    level: float = 1e-4,
) -> None:
    """The joint distribution of the first ``horizon`` tokens is the target's: chi-square at ``level``.

    A decoder that fails once is judged again, over four times the draws of another seed: an exact one fails with
    probability ``level`` ** 2 over seeds, and with a fixed seed the result is always the same.
    """
    prompt = prompts(target.vocab_size, (6,))[0]
    exact = joint_distribution(target, prompt, sampling, horizon)
    for draws, seeded in ((rows, seed), (4 * rows, seed + 1)):
        found = outputs(make(target, sampling), [prompt] * draws, horizon, seeded)
        p_value = _p_value(exact, torch.tensor(found))
        if p_value > level:
            return
    raise AssertionError(f"joint distribution differs from the target's: p = {p_value:.2e} over {draws} draws")


def _p_value(exact: Tensor, found: Tensor) -> float:
    """Of a chi-square test of drawn sequences, ``(draws, horizon)``, against their law, ``(V,) * horizon``."""
    from scipy.stats import chisquare

    counts = torch.zeros(exact.shape, dtype=torch.double)
    counts.index_put_(tuple(found.T), torch.ones(len(found), dtype=torch.double), accumulate=True)
    assert counts[exact == 0].sum() == 0, "a sequence was drawn that the target never draws"
    expected, seen = pooled(exact.flatten() * len(found), counts.flatten())
    return float(chisquare(seen, expected).pvalue)


def pooled(expected: Tensor, seen: Tensor, least: float = 5.0) -> tuple[list[float], list[float]]:
    """Cells with fewer than ``least`` expected counts, which a chi-square test cannot use, joined into one."""
    big = expected >= least
    rest_expected, rest_seen = float(expected[~big].sum()), float(seen[~big].sum())
    cells, counts = expected[big].tolist(), seen[big].tolist()
    if rest_expected >= least or not cells:
        return [*cells, rest_expected], [*counts, rest_seen]
    cells[-1] += rest_expected
    counts[-1] += rest_seen
    return cells, counts


def joint_distribution(target: CausalLM, prompt: Tensor, sampling: Sampling, horizon: int) -> Tensor:
    """P(x_1 .. x_h | prompt) for all V^h continuations, from the original model; [V] * h."""
    assert target.hf is not None
    vocab = target.vocab_size
    joint = torch.ones((), dtype=torch.double)
    for length in range(horizon):
        tails = torch.tensor(list(itertools.product(range(vocab), repeat=length)), dtype=torch.long).view(
            vocab**length, length
        )
        ids = torch.cat([prompt.expand(len(tails), -1), tails], dim=1)
        with torch.no_grad():
            probs = sampling.probs(target.hf(ids).logits[:, -1])
        joint = joint.unsqueeze(-1) * probs.view(*[vocab] * length, vocab)
    assert math.isclose(float(joint.sum()), 1.0, rel_tol=1e-9)
    return joint


def check_guarantee(decoder: Decoder) -> None:
    assert isinstance(decoder.guarantee, Guarantee), f"guarantee must be a Guarantee, not {decoder.guarantee!r}"
