"""Blockwise parallel decoding: k heads guess the next k tokens at once, the target keeps the prefix it agrees with.

Stern et al. 2018, arXiv 1811.03115. Head 1 is the target itself. Heads 2 to k are one feed-forward layer on the
target's last hidden state: a common hidden layer, one update of the state per head with a residual connection, and the
target's own output matrix (sec. 6). The pass that verifies block n yields the state from which block n + 1 is proposed
(sec. 4). Heads 2 to k must be trained; the target stays as it is or, for translation, is fine-tuned with them:

    python -m bench train method=blockwise model=smollm2
    python -m bench train method=blockwise model=multi30k_4_4 corpus=multi30k
    python -m bench train method=blockwise_translation model=multi30k_4_4

Published, WMT14 en-de with a Transformer base, frozen weights and k = 2, 4, 6, 8, 10: blocks of 1.51, 1.73, 1.76, 1.76
and 1.74 tokens; fine-tuned, blocks of 1.88 to 4.95 tokens and up to 3.3 times the speed (k = 8), for 1.2 BLEU.

A fine-tuned model (a checkpoint with a ``trunk``) writes its own text, not the original's: the guarantee is RELAXED,
and agreement is reported against both.

Differences: decoder-only targets too; only encoder-decoders are fine-tuned. Heads propose from a reduced vocabulary. At
a temperature the exact criterion is the exact rule for drafts that were not drawn; the relaxed criteria stay greedy. A
block of k tokens is a draft of k - 1, since its first token is the target's own.

Command: ``python -m bench method=blockwise dataset=mtbench``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from methods.decoder import Guarantee
from methods.drafting import AcceptanceRule, Context, Draft, StatelessDrafter
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import (
    load_model,
    part_folder,
    read_part,
    require_shapes,
    require_target,
    sizes_of,
    target_sizes,
    training_command,
    write_part,
)
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.guesses import Guesses, HeadGuesses
from methods.engine.linear import KernelLinear
from methods.engine.sampling import Sampling, argmax
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.heads.base import HeadsDecoder
from methods.speculative.verification import Distance, MinimumBlock, RelaxedRule, TopK, default_rule

_KEYS = ("first.weight", "first.bias", "second.weight", "second.bias", "vocabulary")

Criterion = Literal["exact", "top_k", "distance"]
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the heads, and of the target they were trained for.

    Attributes:
        k: tokens of a block; one of them is the target's own.
        hidden: units of the layer that the heads share.
        hidden_size, layers, vocab_size: of the target.
    """

    k: int
    hidden: int
    hidden_size: int
    layers: int
    vocab_size: int

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Shape:
        """As ``config.json`` has it."""
        return cls(**{key: int(value) for key, value in found.items()})


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads 2 to k: the n = k - 1 that are trained.

    Attributes:
        shape: their sizes.
        first: weight and bias of the shared layer.
        second: weight and bias of the layer that updates the state, n D outputs: head by head.
        vocabulary: what they propose from.
    """

    shape: Shape
    first: tuple[Float[Tensor, "H D"], Float[Tensor, "H"]]
    second: tuple[Float[Tensor, "nD H"], Float[Tensor, "nD"]]
    vocabulary: DraftVocabulary

    def save(self, folder: Path) -> None:
        """Write both files; the weights in 16 bit."""
        tensors = dict(zip(_KEYS, (*self.first, *self.second, self.vocabulary.ids.to(torch.int32)), strict=True))
        write_part(folder, tensors, asdict(self.shape))

    @classmethod
    def load(cls, folder: Path, target: CausalLM) -> Heads:
        """Read them, onto the target's device and in its type.

        Raises:
            ValueError: files are missing or damaged, or belong to another target.
        """
        shape, tensors = read_part(
            folder, "blockwise", lambda found: Shape(**{key: int(n) for key, n in found.items()})
        )
        require_target(folder, "blockwise", sizes_of(shape), target)
        require_shapes(folder, tensors, _tensor_shapes(shape, tensors))
        first, first_bias, second, second_bias = (tensors[key].to(target.device, target.dtype) for key in _KEYS[:4])
        vocabulary = DraftVocabulary(tensors["vocabulary"].long().to(target.device), target.vocab_size)
        return cls(shape, (first, first_bias), (second, second_bias), vocabulary)


def states(rows: Float[Tensor, "R D"], first: Product, second: Product) -> Float[Tensor, "R n D"]:
    """The states that heads 2 to k multiply with the output matrix (sec. 6 of the paper).

    Args:
        rows: the target's last hidden states, after its final norm.
        first, second: the two layers; in training modules, in decoding packed products.
    """
    updates = second(torch.relu(first(rows)))
    return rows[:, None] + updates.view(len(rows), -1, rows.shape[1])


class BlockwiseDrafter(StatelessDrafter):
    """Drafts a chain of ``nodes`` tokens, all from the state after the last kept one."""

    def __init__(self, target: CausalLM, heads: Heads, nodes: int) -> None:
        self.nodes, self._vocabulary = nodes, heads.vocabulary
        used = nodes * target.hidden_size
        self._first = target.draft_linear([heads.first[0]], [heads.first[1]])
        self._second = target.draft_linear([heads.second[0][:used].contiguous()], [heads.second[1][:used]])
        weight, bias = target.output_rows(heads.vocabulary.ids)
        self._output = target.draft_linear([weight], [bias])
        self.nbytes = {
            "heads": self._first.nbytes + self._second.nbytes,
            "draft_output_matrix": self._output.nbytes,
        }
        self._in_rounds = self._guesses()

    def _guesses(self) -> Guesses | None:
        """How a CPU's kernels draft in rounds; None: they have not all of the products."""
        first, second, output = self._first, self._second, self._output
        if not (
            isinstance(first, KernelLinear) and isinstance(second, KernelLinear) and isinstance(output, KernelLinear)
        ):
            return None
        heads = HeadGuesses(first, second, output, self._vocabulary.ids.contiguous(), self.nodes)
        return Guesses(self.nodes, heads=heads)

    def rounds_guesses(self) -> Guesses | None:
        """See ``RoundsDrafter``."""
        return self._in_rounds

    def propose(self, context: Context) -> Draft:
        rows = context.last_hidden
        proposed = states(rows, self._first, self._second)
        best = argmax(self._output(proposed.flatten(0, 1))).view(len(rows), self.nodes)
        return Draft.chain(self._vocabulary.tokens(best), passes=1)


class Blockwise(HeadsDecoder):
    """Blockwise parallel decoding.

    Args:
        target: model that verifies, and the first head.
        k: tokens of a block; None: as many as there are heads. Fewer use the first heads only.
        criterion: which proposals stay: ``exact``, those the target itself would write; ``top_k``, those among its
            ``top`` most likely ones (sec. 5.1); ``distance``, ids at most ``epsilon`` from its own, for ids on a scale
            (sec. 5.2). The latter two change the text.
        top: see ``top_k``.
        epsilon: see ``distance``.
        minimum_block: tokens of a block that stay whatever the criterion says, the first one included (sec. 5.3); 1
            forces none. More change the text.
        checkpoint: folder of trained heads; None: those prepared for this model. No published ones exist.

    Raises:
        ValueError: no heads, heads of another target, or an option out of range.
    """

    continuous_batching = True
    paper = "Stern et al. 2018, arXiv 1811.03115"

    prepared_as: ClassVar[str] = "blockwise"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        k: int | None = None,
        criterion: Criterion = "exact",
        top: int = 2,
        epsilon: int = 2,
        minimum_block: int = 1,
        checkpoint: str | Path | None = None,
    ) -> None:
        folder = part_folder(self.prepared_as, "heads", checkpoint)
        heads = Heads.load(folder, target)
        k = _block(k, heads.shape.k, minimum_block)
        rule = _rule(sampling, criterion, top, epsilon, minimum_block)
        own = load_trunk(folder, target)
        trunk = target if own is None else own[0]
        self._trunk_bytes = None if own is None else own[1]
        require_target(folder, self.prepared_as, target_sizes(target), trunk)
        super().__init__(trunk, sampling, BlockwiseDrafter(trunk, heads, k - 1), rule)
        self._reference: CausalLM | None = None
        if trunk is not target:  # its text is not the target's
            self._reference = trunk if self.guarantee is Guarantee.EXACT else None
            self.guarantee = Guarantee.RELAXED

    def reference_model(self) -> CausalLM | None:
        """The fine-tuned model, where the checkpoint has one and the criterion keeps its text."""
        return self._reference

    def memory(self) -> dict[str, int | None]:
        """See ``HeadsDecoder``; and the weights of a fine-tuned model, where the checkpoint has one."""
        return super().memory() | ({} if self._trunk_bytes is None else {"trunk": self._trunk_bytes})


class BlockwiseTranslation(Blockwise):
    """Blockwise parallel decoding as in the paper, with heads and model fine-tuned for translation."""

    guarantee = Guarantee.RELAXED
    model_kind = "seq2seq"

    prepared_as = "blockwise_translation"


def _rule(sampling: Sampling, criterion: Criterion, top: int, epsilon: int, minimum_block: int) -> AcceptanceRule:
    """The rule of a criterion. The paper's blocks count their first token, always the target's own; drafts do not."""
    if criterion == "exact" and minimum_block == 1:
        return default_rule(sampling, "chain", drawn=False)
    relaxed: RelaxedRule = {"exact": TopK(1), "top_k": TopK(top), "distance": Distance(epsilon)}[criterion]
    return relaxed if minimum_block == 1 else MinimumBlock(minimum_block - 1, relaxed)


def _block(k: int | None, trained: int, minimum_block: int) -> int:
    wanted = trained if k is None else k
    if not 2 <= wanted <= trained:
        raise ValueError(
            f"k must be 2 to {trained} with {trained - 1} heads, got {wanted}. Set method.k to one of these, or train "
            "more heads (train.k=K). k=1 is method=autoregressive."
        )
    if not 1 <= minimum_block <= wanted:
        raise ValueError(
            f"minimum_block must be 1 to {wanted}, the tokens of a block, got {minimum_block}. minimum_block=1 forces "
            "nothing."
        )
    return wanted


def _tensor_shapes(shape: Shape, tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    outputs = (shape.k - 1) * shape.hidden_size
    return {
        "first.weight": (shape.hidden, shape.hidden_size),
        "first.bias": (shape.hidden,),
        "second.weight": (outputs, shape.hidden),
        "second.bias": (outputs,),
        "vocabulary": (tensors["vocabulary"].numel() if "vocabulary" in tensors else 0,),
    }


_TRUNK = "trunk"


def save_trunk(network: Any, folder: Path) -> None:
    """Write an encoder-decoder of transformers besides the heads, in 16 bit."""
    network.half().save_pretrained(folder / _TRUNK)


def load_trunk(folder: Path, target: CausalLM) -> tuple[CausalLM, int] | None:
    """Read it onto the target's device and in its type, with its bytes; None where the checkpoint has no such model.

    Raises:
        ValueError: files are missing or damaged.
    """
    place = folder / _TRUNK
    if not place.is_dir():
        return None
    try:
        network: Any = load_model(AutoModelForSeq2SeqLM, place, dtype=target.dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{place} cannot be read as a fine-tuned model ({error}). Name another folder, or train one: "
            f"{training_command('blockwise_translation')}."
        ) from error
    size = sum(weight.numel() * weight.element_size() for weight in network.parameters())
    return Seq2SeqLM.from_hf(network.requires_grad_(False).to(target.device)), size
