"""Block drafters (DFlash, DSpark) for small targets: random layers, with an output matrix that knows texts or none."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.dflash.checkpoint import Part, Spec
from methods.speculative.dflash.decoder import DFlash, DSpark
from methods.speculative.dflash.network import Network, Reader
from methods.speculative.hybrid import Hybrid
from methods.training.features import states

Texts = tuple[tuple[int, ...], ...]
DSPARK: dict[str, Any] = {"markov_rank": 6, "confidence": True, "sample_from_anchor": True}


def spec_of(target: CausalLM, **sizes: Any) -> Spec:
    """Two layers, blocks of four."""
    given: dict[str, Any] = {
        "draft_layers": 2,
        "intermediate_size": 40,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "rms_eps": 1e-6,
    }
    given |= {"taps": (0, target.n_layers - 2), "block": 4} | sizes
    return Spec(hidden_size=target.hidden_size, layers=target.n_layers, vocab_size=target.vocab_size, **given)


def random_part(spec: Spec, vocabulary: DraftVocabulary, optional: Sequence[str] = (), seed: int = 0) -> Part:
    """Weights at random, so large that every part of the network matters; ``optional``: endings of further tensors."""
    generator, drafts = torch.Generator().manual_seed(seed), len(vocabulary)
    further = {name: shape for name, shape in spec.optional(drafts).items() if name.endswith(tuple(optional))}
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
        for name, shape in (spec.shapes(drafts) | (further if optional else {})).items()
    }
    return Part(spec, tensors, vocabulary)


@cache
def part_of(target: CausalLM, texts: Texts, vocabulary: int | None, sizes: tuple[tuple[str, Any], ...]) -> Part:
    """Random layers; with texts, an output matrix by which a block is the continuation of its anchor in them."""
    size = target.vocab_size
    tokens = torch.tensor([token for text in texts for token in text])
    chosen = DraftVocabulary.frequent(tokens, vocabulary, size) if vocabulary else DraftVocabulary.all(size)
    part = random_part(spec_of(target, **dict(sizes)), chosen)
    if not texts:
        return part
    network = Network(target, part)
    pairs = [pair for _, alike in groupby(sorted(texts, key=len), len) for pair in _pairs(target, network, [*alike])]
    hidden, labels = torch.stack([h for h, _ in pairs]).double(), torch.tensor([token for _, token in pairs])
    wanted = torch.nn.functional.one_hot(chosen.of(labels).clamp(min=0), len(chosen)).double()
    wanted *= (chosen.of(labels) >= 0)[:, None]
    gram = hidden.T @ hidden + 0.1 * torch.eye(hidden.shape[1], dtype=torch.double)
    output = 8.0 * torch.linalg.solve(gram, hidden.T @ wanted).T
    return replace(part, tensors={**part.tensors, "lm_head.weight": output.float()})


def _pairs(target: CausalLM, network: Network, texts: Sequence[Sequence[int]]) -> list[tuple[Tensor, int]]:
    """What the output matrix reads at each place of each block of texts of one length, and the token of that place."""
    rows, taps = torch.tensor(texts, device=target.device), network.spec.taps
    _, seen = states(target, [*rows], taps)
    reader, found = Reader(network, len(rows), rows.shape[1] + network.spec.block + 1), []
    for anchor in range(1, rows.shape[1] - 1):
        reader.read([seen[tap][:, anchor - 1 : anchor] for tap in taps], [1] * len(rows))
        for text, hidden in zip(texts, reader.block(rows[:, anchor]), strict=True):
            found += list(zip(hidden.unbind(), text[anchor + 1 :], strict=False))
    return found


def block_drafter(
    target: CausalLM,
    sampling: Sampling,
    texts: Sequence[Sequence[int]] = (),
    vocabulary: int | None = None,
    sizes: dict[str, Any] | None = None,
    method: type[DFlash] | None = None,
    **options: Any,
) -> DFlash:
    """The method with such a network: DSpark if it has heads, else DFlash."""
    part = part_of(target, tuple(map(tuple, texts)), vocabulary, tuple(sorted((sizes or {}).items())))
    chosen = method or (DSpark if part.spec.kind == "dspark" else DFlash)
    with tempfile.TemporaryDirectory() as folder:
        part.save(Path(folder))
        return chosen(target, sampling, checkpoint=Path(folder), **options)


def hybrid(target: CausalLM, sampling: Sampling, texts: Sequence[Sequence[int]] = (), **options: Any) -> Hybrid:
    """A lookup beside such a network with heads."""
    part = part_of(target, tuple(map(tuple, texts)), None, tuple(sorted(DSPARK.items())))
    with tempfile.TemporaryDirectory() as folder:
        part.save(Path(folder))
        return Hybrid(target, sampling, network="dspark", checkpoint=Path(folder), **options)
