"""A student of this family: a network, and the three things in which methods differ.

Decoder input   a module of decoder_inputs.py: (memory, lengths, width) -> [B, T, D], in ``Student.inputs``. Objective
``Student.objective``: a batch and the progress of the training -> a loss, and numbers to log. Decode loop     a
``Writer``: (student, memory, rng) -> candidates, K for every source, with the student's own scores.

A student is saved as its parameters, without an embedding that it shares with the teacher, and a JSON object with its
constructor's ``options``. A method's file has a student, a decoder, a training, and a writer if none of these fits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from methods.engine.causal_lm import CausalLM, padded_rows
from methods.engine.checkpoint_files import (
    part_folder,
    read_part,
    require_shapes,
    require_target,
    target_sizes,
    write_part,
)
from methods.engine.sampling import argmax, log_probs_of
from methods.non_autoregressive.length_predictor import LengthHead
from methods.non_autoregressive.network import Memory, Network, Shape, present_up_to
from methods.training.losses import cross_entropy
from methods.training.trainer import Loss


@dataclass(frozen=True, slots=True)
class Batch:
    """Training pairs, without ends on the target's side.

    Attributes:
        sources: [B, S] ids, padded at the end.
        source_lengths: [B] their ends included.
        targets: [B, T] ids, padded at the end.
        lengths: [B] of the targets.
        notes: [B, S] of each source token, from ``annotate`` of the training; None: none.
    """

    sources: Int[Tensor, "B S"]
    source_lengths: Int[Tensor, "B"]
    targets: Int[Tensor, "B T"]
    lengths: Int[Tensor, "B"]
    notes: Int[Tensor, "B S"] | None = None

    @property
    def present(self) -> Bool[Tensor, "B T"]:
        return present_up_to(self.lengths, self.targets.shape[1])


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a decode loop proposes for each source.

    Attributes:
        tokens: [B, K, T] ids, undefined after a candidate's length.
        lengths: [B, K].
        scores: [B, K] mean log-probability of a candidate's tokens by the student; zeros where K = 1 needs none.
        passes: of the student's decoder.
        positions: per row, candidates times positions of a pass.
    """

    tokens: Int[Tensor, "B K T"]
    lengths: Int[Tensor, "B K"]
    scores: Float[Tensor, "B K"]
    passes: int
    positions: int


@runtime_checkable
class Writer(Protocol):
    """A decode loop."""

    def __call__(self, student: Any, memory: Memory, rng: Generator) -> Candidates: ...


Objective = Loss


class Student(nn.Module):
    """A network that learns to write whole translations.

    Args:
        network: of the teacher's shape.
        kept: ids of ``Shape.suppressed`` that it may choose all the same.
        options: of the constructor, as plain JSON values, stored in the checkpoint.

    Attributes:
        method: its name in configurations and checkpoints.
        barred: [n] ids that it may not choose.
    """

    method: ClassVar[str]
    barred: Tensor

    def __init__(self, network: Network, kept: Collection[int] = (), **options: Any) -> None:
        super().__init__()
        self.network, self.options = network, options
        barred = torch.tensor([token for token in network.shape.suppressed if token not in kept], dtype=torch.long)
        self.register_buffer("barred", barred, persistent=False)

    @classmethod
    def network_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of ``Network`` that follow from the student's options."""
        return {}

    def read(self, batch: Batch) -> Memory:
        """Encode the sources of a batch."""
        return self.network.encode(batch.sources, batch.source_lengths)

    def objective(self, batch: Batch, progress: float, smoothing: float) -> Objective:
        """The loss of a batch, or its parts by name.

        Args:
            progress: share of the steps that are done, from 0 to 1.
            smoothing: probability that is spread over all tokens.
        """
        raise NotImplementedError

    def logits(self, states: Float[Tensor, "*b D"]) -> Float[Tensor, "*b V"]:
        """Of every token; in memory that nothing else refers to."""
        return self.network.logits(states)

    def choose(
        self, states: Float[Tensor, "*b D"], scored: bool = True
    ) -> tuple[Int[Tensor, "*b"], Float[Tensor, "*b"]]:
        """The likeliest token that may be written at each position, and its log-probability; zero if not ``scored``."""
        logits = self.logits(states).index_fill_(-1, self.barred, -torch.inf)
        tokens = argmax(logits)
        if not scored:
            return tokens, torch.zeros_like(tokens, dtype=logits.dtype)
        return tokens, log_probs_of(logits, tokens[..., None])[..., 0].to(logits.dtype)

    def choose_at(
        self, present: Bool[Tensor, "B T"] | None, states: Float[Tensor, "B T D"], scored: bool = True
    ) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T"]]:
        """``choose`` at some places, zero elsewhere; None: at all."""
        if present is None:
            return self.choose(states, scored)
        tokens, log_probs = torch.zeros_like(present, dtype=torch.long), states.new_zeros(present.shape)
        tokens[present], log_probs[present] = self.choose(states[present], scored)
        return tokens, log_probs

    def token_loss(
        self, states: Float[Tensor, "N D"], wanted: Int[Tensor, "N"], smoothing: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Smoothed cross-entropy per token, and the share of the tokens that are right."""
        logits = self.logits(states)
        return cross_entropy(logits, wanted, smoothing), (argmax(logits.detach()) == wanted).float().mean()

    def do_without(self, stored: Collection[str]) -> None:
        """Drop networks that only some ways to decode need, if none of their tensors is among the stored ones."""

    def settle(self, target: CausalLM) -> None:
        """End the training: see ``Network.settle``."""
        self.network.settle(target)

    def own_bytes(self) -> int:
        """Of its parameters, as they were before ``settle``."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_dict().values())


class LengthStudent(Student):
    """A student that chooses a length first, and then reads an input of that length.

    Args:
        inputs: the decoder's input.
        length_weight: of the length's loss, where the tokens' is 1. It does not reach the encoder (``LengthHead``).
    """

    def __init__(self, network: Network, inputs: nn.Module, length_weight: float = 0.1, **options: Any) -> None:
        super().__init__(network, length_weight=length_weight, **options)
        self.inputs, self.length_weight = inputs, length_weight
        self.lengths = LengthHead(network.shape.width, network.shape.positions)

    def objective(self, batch: Batch, progress: float, smoothing: float) -> Objective:
        """Of all tokens at once, from the input alone: vanilla NAT."""
        memory = self.read(batch)
        inputs = self.inputs(memory, batch.lengths, batch.targets.shape[1])
        return self.supervise(memory, inputs, batch, batch.present, smoothing)

    def supervise(
        self,
        memory: Memory,
        inputs: Float[Tensor, "B T D"],
        batch: Batch,
        judged: Bool[Tensor, "B T"],
        smoothing: float,
        causal: bool = False,
    ) -> Objective:
        """Loss of the tokens at the judged positions, and of the length; ``causal``: see ``Network.decode``."""
        states = self.network.decode(inputs, batch.present, memory, causal)
        loss, right = self.token_loss(states[judged], batch.targets[judged], smoothing)
        length_loss, length_right = self.lengths.loss(memory, batch.lengths)
        numbers = {"tokens_loss": loss.detach(), "right": right, "length_loss": length_loss.detach()}
        losses = {"tokens": loss, "length": self.length_weight * length_loss}
        return losses, numbers | {"length_right": length_right}


@dataclass(frozen=True, slots=True)
class OnePass:
    """The likeliest lengths, and one pass over an input of each: the likeliest token everywhere.

    Attributes:
        length_beam: lengths that are tried.
    """

    length_beam: int = 1

    def __call__(self, student: LengthStudent, memory: Memory, rng: Generator) -> Candidates:
        lengths = student.lengths.best(memory, self.length_beam)
        flat, width = lengths.flatten(), int(lengths.max())
        many = memory.repeat(self.length_beam)
        return fill(student, many, student.inputs(many, flat, width), lengths)


def fill(student: Student, memory: Memory, inputs: Float[Tensor, "R T D"], lengths: Int[Tensor, "B K"]) -> Candidates:
    """One pass over every candidate's input.

    Args:
        memory: of B * K rows, as ``inputs``.
    """
    count, width = lengths.shape[1], inputs.shape[1]
    present = None if lengths.numel() == 1 else present_up_to(lengths.flatten(), width)
    tokens, log_probs = student.choose_at(present, student.network.decode(inputs, present, memory), scored=count > 1)
    scores = mean_over(log_probs, lengths.flatten())
    return Candidates(tokens.view(*lengths.shape, width), lengths, scores.view(lengths.shape), 1, count * width)


def mean_over(values: Float[Tensor, "R T"], lengths: Int[Tensor, "R"]) -> Float[Tensor, "R"]:
    """Mean of each row up to its length; 0 for an empty row."""
    present = present_up_to(lengths, values.shape[1])
    return values.masked_fill(~present, 0.0).sum(1) / lengths.clamp(min=1)


def lowest(values: Float[Tensor, "B T"], count: Int[Tensor, "B"]) -> Bool[Tensor, "B T"]:
    """The places of the ``count`` smallest values of each row."""
    return values.argsort(dim=1, stable=True).argsort(1) < count[:, None]


# ------------------------------------------------------------------------------------------------------------ the part

S = TypeVar("S", bound=Student)


def save_student(student: Student, folder: Path, target: CausalLM, facts: Mapping[str, Any]) -> None:
    """Write a student in 16 bit.

    Args:
        target: its teacher.
        facts: about its training, plain JSON values, which decoding reports.
    """
    config = {"own_embedding": student.network.own, "options": student.options, "facts": dict(facts)}
    write_part(folder, student.state_dict(), config | target_sizes(target), torch.float16)


def load_student(kind: type[S], target: CausalLM, checkpoint: str | Path | None) -> tuple[S, dict[str, Any]]:
    """A student ready to decode, on the target's device and in its type; and the facts it was saved with.

    Raises:
        MissingPart: there is none for this target.
        ValueError: it cannot be read, or belongs to another target.
    """
    method, shape = kind.method, Shape.of(target)
    folder = part_folder(method, "trained network", checkpoint)

    def parse(config: dict[str, Any]) -> tuple[S, dict[str, int], dict[str, Any]]:
        options = dict(config["options"])
        network = Network(shape, None, bool(config["own_embedding"]), **kind.network_options(options))
        return kind(network, **options), {key: config[key] for key in target_sizes(target)}, dict(config["facts"])

    (student, sizes, facts), tensors = read_part(folder, method, parse)
    require_target(folder, method, sizes, target)
    student.do_without(tensors)
    require_shapes(folder, tensors, {key: tuple(tensor.shape) for key, tensor in student.state_dict().items()})
    student.load_state_dict(tensors)
    student.to(target.device, target.dtype).eval().requires_grad_(False)
    return student, facts


def pad_sources(
    sources: Sequence[Int[Tensor, "_"]], longest: int, device: torch.device
) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B"], bool]:
    """Rows of one width, their lengths, and whether no padding was needed.

    Raises:
        ValueError: an empty source, or one that is too long.
    """
    lengths = [len(source) for source in sources]
    if min(lengths) < 1 or max(lengths) > longest:
        raise ValueError(
            f"Sources must have 1 to {longest:,} tokens, got {min(lengths):,} to {max(lengths):,}. Drop empty ones, "
            "and shorten the others."
        )
    return padded_rows(sources, device), torch.tensor(lengths, device=device), min(lengths) == max(lengths)
