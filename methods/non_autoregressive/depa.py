"""DePA: a decoder that has learnt dependencies, and an input of target words (Zhan et al. 2023, IWSLT, arXiv
2203.16266). Both apply to any one-pass method; here to vanilla NAT and GLAT (``base``).

Forward-backward pre-training has three phases: the decoder learns to write from left to right, from right to left, and
all at once. The first is the teacher's training, whose weights every student starts with. The second (``backward``, a
share of the training) reverses the target, then shifts it:

    reads   </s> y_T ... y_2          with a causal mask
    writes  y_T  ... y_2 y_1          so that y_t is predicted from y_t+1 ... y_T and the source

The third is the base's training. The loss of the length is in every phase.

Attentive transformation (``transform``): the copied source embedding u_t is replaced by a mixture of target words, v_t
= softmax((W u_t + b) E^T) E, where E are the embeddings, without a gradient, of the tokens on the target side of the
training pairs. It costs about one more softmax over the vocabulary.

Published: WMT14 en-de 27.51 and de-en 31.96 on a CTC base, 14.7 times the speed. The backward phase of the released
code leaks the answers, as it flips decoder input and target alike; without that leak the gain may be smaller than
reported.

Differences: the copy is that of ``glat``; W and b start as a dictionary from aligned words (``learn_words``) instead of
at random; positions are added once; one optimiser run and one schedule over both phases.

    python -m bench train method=depa model=multi30k_4_4
    python -m bench train method=depa model=multi30k_4_4 train.base=nat out=FOLDER
    python -m bench method=depa model=multi30k_4_4 dataset=multi30k
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from methods.engine.causal_lm import CausalLM
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.decoder_inputs import Copy
from methods.non_autoregressive.glat import Glat, GlatStudent
from methods.non_autoregressive.network import Memory, Network
from methods.non_autoregressive.student import Batch, Objective, OnePass, Student
from methods.non_autoregressive.training import Progress, StudentTraining
from methods.non_autoregressive.word_alignment import NULL, align
from methods.training.translation import Pair

Base = Literal["nat", "glat"]
_LINKS, _RATE = 1024, 3e-3  # of the fit of a dictionary: links of a step, and the learning rate


class AttentiveTransformation(nn.Module):
    """Copies of the source, each turned into a mixture of target words; a module like those of ``decoder_inputs.py``.

    Args:
        copy: gives the copies.
        network: whose embedding is used.
        count: of the target words.

    Attributes:
        ids: [n] these words, set by the training and stored in the checkpoint.
    """

    ids: Tensor

    def __init__(self, copy: nn.Module, network: Network, count: int) -> None:
        super().__init__()
        self.copy, self._network = copy, [network]  # in a list: it is no part of this
        self.query = nn.Linear(network.shape.width, network.shape.width)
        self.register_buffer("ids", torch.zeros(count, dtype=torch.int32))
        self._rows: Tensor | None = None

    def forward(self, memory: Memory, lengths: Int[Tensor, "B"], width: int) -> Float[Tensor, "B T D"]:
        rows = self.words() if self._rows is None else self._rows
        shares = (self.query(self.copy(memory, lengths, width)) @ rows.T).softmax(-1)
        return shares.to(rows.dtype) @ rows * self._network[0].shape.scale

    def words(self) -> Float[Tensor, "n D"]:
        """Embeddings of the target words, without the embedding's factor and without a gradient."""
        network = self._network[0]
        return network.embed(self.ids).detach() / network.shape.scale

    def learn_words(self, links: Sequence[tuple[int, int]], progress: Progress, steps: int = 300) -> None:
        """Fit W and b to a dictionary: -log of the share that a source word, alone, gives its target word.

        Training cannot start from the identity: the score of a word with itself is so much larger than all others that
        the softmax has no gradient.

        Args:
            links: source and target ids, as often as they occur; the target ids are among ``ids``.
            steps: of Adam, 1,024 links each.
        """
        network, device = self._network[0], self.ids.device
        sources, wanted = torch.tensor(links, device=device).T.contiguous()
        asked, rows = network.embed(sources).detach(), self.words()
        place = torch.searchsorted(self.ids.long(), wanted)
        nn.init.zeros_(self.query.weight)
        nn.init.zeros_(self.query.bias)
        optimizer = torch.optim.Adam(self.query.parameters(), lr=_RATE)
        rng = Generator().manual_seed(0)
        for step in range(steps):
            progress("dictionary (steps)", step, steps)
            some = torch.randint(len(links), (_LINKS,), generator=rng).to(device)
            loss = F.cross_entropy(self.query(asked[some]) @ rows.T, place[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        progress("dictionary (steps)", steps, steps)

    def settle(self) -> None:
        """End the training: the words are looked up once."""
        self._rows = self.words()


class DepaStudent(GlatStudent):
    """A student of ``glat`` that learns backwards first, and reads target words.

    Args:
        copy, ratio, length_weight: see ``GlatStudent``; ``ratio=(0, 0)`` is vanilla NAT.
        backward: share of the training that is the backward phase.
        words: number of target words that the transformation mixes; None: copies are read as they are.
    """

    method: ClassVar[str] = "depa"

    def __init__(
        self,
        network: Network,
        copy: Copy = "soft",
        ratio: Sequence[float] = (0.5, 0.3),
        backward: float = 0.13,
        words: int | None = None,
        length_weight: float = 0.1,
    ) -> None:
        if not 0 <= backward < 1:
            raise ValueError(f"backward must be from 0 to below 1, got {backward}. Set train.backward.")
        super().__init__(network, copy, ratio, False, length_weight)
        del self.options["positional"]
        self.options |= {"backward": backward, "words": words}
        self.backward = backward
        if words is not None:
            self.inputs = AttentiveTransformation(self.inputs, network, words)

    @classmethod
    def network_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def objective(self, batch: Batch, progress: float, smoothing: float) -> Objective:
        """See ``Student``: of the phase at ``progress``."""
        if progress < self.backward:
            return self.from_the_end(batch, smoothing)
        return super().objective(batch, (progress - self.backward) / (1 - self.backward), smoothing)

    def from_the_end(self, batch: Batch, smoothing: float) -> Objective:
        """Loss of every token, from those after it."""
        mirrored = replace(batch, targets=backwards(batch.targets, batch.lengths))
        end = torch.full_like(batch.targets[:, :1], self.network.shape.end)
        inputs = self.network.embed(torch.cat([end, mirrored.targets[:, :-1]], 1))
        return self.supervise(self.read(batch), inputs, mirrored, batch.present, smoothing, causal=True)

    def settle(self, target: CausalLM) -> None:
        super().settle(target)
        if isinstance(self.inputs, AttentiveTransformation):
            self.inputs.settle()

    def own_bytes(self) -> int:
        """See ``Student``; with the table of target words."""
        table = (self.options["words"] or 0) * self.network.shape.width
        return super().own_bytes() + table * self.network.positions.element_size()


def backwards(tokens: Int[Tensor, "B T"], lengths: Int[Tensor, "B"]) -> Int[Tensor, "B T"]:
    """Reverse each row up to its length; the rest does not change."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    mirrored = lengths[:, None] - 1 - place
    return tokens.gather(1, torch.where(mirrored >= 0, mirrored, place))


class Depa(Glat):
    """One pass, over the likeliest length or several; arguments as of ``Glat``."""

    paper = "Zhan et al. 2023, arXiv 2203.16266"
    kind = DepaStudent


@dataclass(kw_only=True)
class DepaTraining(StudentTraining):
    """Trains a student of ``depa``; other arguments: see ``GlatStudent`` and ``StudentTraining``.

    Args:
        base: of the last phase: vanilla NAT (which has no ratio), or GLAT.
        backward: see ``DepaStudent``.
        transform: read target words instead of copies.
    """

    kind = DepaStudent
    writers = {"one_pass": OnePass(), "length_beam_5": OnePass(5)}

    base: Base = "glat"
    backward: float = 0.13
    transform: bool = True
    copy: Copy = "soft"
    ratio: Sequence[float] = (0.5, 0.3)
    length_weight: float = 0.1

    def options(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """See ``StudentTraining``."""
        words = {"words": len(_target_ids(pairs))} if self.transform else {}
        own = {"copy": self.copy, "backward": self.backward, "length_weight": self.length_weight}
        return own | {"ratio": list(self.ratio) if self.base == "glat" else [0.0, 0.0]} | words

    def student(self, target: Seq2SeqLM, pairs: Sequence[Pair], progress: Progress) -> Student:
        """See ``StudentTraining``; the transformation learns a dictionary of the pairs."""
        made = super().student(target, pairs, progress)
        if not self.transform:
            return made
        assert isinstance(made.inputs, AttentiveTransformation)
        made.inputs.ids.copy_(torch.tensor(_target_ids(pairs)))
        content = [(source[:-1] or source, text) for source, text in pairs]
        links = [
            (source[place], token)
            for (source, text), places in zip(content, align(content, progress=progress), strict=True)
            for token, place in zip(text, places, strict=True)
            if place != NULL
        ]
        if links:
            made.inputs.learn_words(links, progress)
        return made

    def origin(self, student: Student) -> dict[str, Any]:
        """See ``StudentTraining``."""
        words = {"target_words": student.options["words"]} if self.transform else {}
        return super().origin(student) | {"base": self.base, "backward": self.backward, **words}


def _target_ids(pairs: Sequence[Pair]) -> list[int]:
    return sorted({token for _, text in pairs for token in text})
