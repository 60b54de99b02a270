"""FlowSeq: a latent sequence decides between translations, and a flow gives its density (Ma et al. 2019, EMNLP, arXiv
1909.02480).

log p(y | x) >= E_q[log p(y | z, x)] - E_q[log q(z | y, x) - log p(z | x)] + log p(T | x), with a vector of z for every
position of the target. The decoder reads z and writes all tokens in one pass; the prior p(z | x) is a multi-scale flow
whose couplings are decoder layers over the source (flow.py). Lengths are multiples of 2^(levels - 1): targets are
padded with ends, which are learnt, and a text stops at its first end.

Training has two phases (sec. 3.5 and the released code): auto-encoding without noise or prior; then the prior's norms
are initialised by the data and the whole bound is maximised, the weight of the KL term rising from 0 to 1.

``decoding``: ``argmax`` inverts the flow at noise 0; ``npd`` takes the likeliest lengths and ``samples`` noises for
each, the first of them 0, and the teacher chooses; ``iwd`` chooses by the importance-weighted estimate

    log p(y | x) = log mean_k p(y | z_k, x) p(z_k | x) / q(z_k | y, x) + log p(T | x),  divided by T.

"One pass" hides work: the couplings run one after the other, each as deep as a decoder layer, once for argmax and npd
and twice for iwd. ``stats`` and ``layers`` count them.

Published: distilled, argmax, WMT14 en-de 23.72 and de-en 28.39 (large), listed at 1.1 times the speed of a beam.

Differences: norms count real positions only; inverses are computed when needed; encoder and decoder start as the
teacher's; losses are means per token; the length is predicted from the mean of the encoder's states; couplings end in
plain linear maps; Adam without amsgrad. Latents and couplings may be narrower than the model. The flow computes in 32
bit.

    python -m bench train method=flowseq model=multi30k_4_4
    python -m bench method=flowseq model=multi30k_4_4 dataset=multi30k method.decoding=npd
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.decoder import Step
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import training_command
from methods.engine.sampling import Sampling
from methods.non_autoregressive.flowseq.flow import initialising
from methods.non_autoregressive.flowseq.networks import LatentReader, Posterior, Prior, log_normal_of
from methods.non_autoregressive.length_predictor import LengthHead
from methods.non_autoregressive.loop import NonAutoregressive
from methods.non_autoregressive.network import Memory, Network, present_up_to
from methods.non_autoregressive.student import Batch, Candidates, Objective, Student, mean_over
from methods.training.interface import require

Decoding = Literal["argmax", "npd", "iwd"]


class FlowSeqStudent(Student):
    """Encoder and decoder of the teacher's shape, with posterior, prior and reader of a latent sequence.

    Args:
        latent: channels of z; None: as wide as the model.
        width: of the networks in the couplings; None: as wide as the model.
        inner: of their feed-forward layers; None: twice their width.
        steps: of each level of the prior.
        posterior_layers: of the posterior.
        word_dropout: share of the target's tokens that the posterior does not see.
        autoencoding: share of the training that is its first phase.
        annealing: share of the training over which the weight of the KL term rises.
        length_weight: of the length's loss, where the tokens' is 1.
    """

    method: ClassVar[str] = "flowseq"

    def __init__(
        self,
        network: Network,
        latent: int | None = None,
        width: int | None = None,
        inner: int | None = None,
        steps: Sequence[int] = (2, 1),
        posterior_layers: int = 3,
        word_dropout: float = 0.2,
        autoencoding: float = 0.25,
        annealing: float = 0.25,
        length_weight: float = 0.1,
    ) -> None:
        shape, dropout = network.shape, network.dropout.p
        latent, width = latent or shape.width, width or shape.width
        _check(shape.heads, latent, width, steps, word_dropout, autoencoding, annealing)
        super().__init__(
            network,
            {shape.end},
            latent=latent,
            width=width,
            inner=inner,
            steps=list(steps),
            posterior_layers=posterior_layers,
            word_dropout=word_dropout,
            autoencoding=autoencoding,
            annealing=annealing,
            length_weight=length_weight,
        )
        self.latent, self.word_dropout, self.length_weight = latent, word_dropout, length_weight
        self.autoencoding, self.annealing = autoencoding, annealing
        self.posterior: Posterior | None = Posterior(shape, latent, posterior_layers, dropout)
        self.prior = Prior(shape, latent, width, inner or 2 * width, list(steps), dropout)
        if shape.positions % self.prior.unit:
            raise ValueError(
                f"The {shape.positions} positions of the model must be a multiple of {self.prior.unit}, as lengths are "
                f"with {len(steps)} levels, got steps={list(steps)}. Set fewer levels in train.steps."
            )
        self.reader = LatentReader(shape, latent)
        self.lengths = LengthHead(shape.width, shape.positions)

    def to(self, *args: Any, **kwargs: Any) -> FlowSeqStudent:
        """As of any module, but the prior stays in 32 bit, which its inversion needs."""
        exact = {name: value.clone() for name, value in self.prior.state_dict().items()}
        super().to(*args, **kwargs)
        if self.prior.source.weight.dtype.itemsize < torch.float32.itemsize:
            self.prior.float().load_state_dict(exact)
        return self

    # -- the model ----------------------------------------------------------------------------------------------------

    def infer(self, tokens: Int[Tensor, "B T"], present: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the posterior; in training some tokens are hidden."""
        inputs = self.network.dropout(self.network.embed(tokens))
        if self.training and self.word_dropout:
            seen = torch.rand(tokens.shape, device=tokens.device) >= self.word_dropout
            inputs = inputs * seen[:, :, None]
        assert self.posterior is not None, "FlowSeq refuses to decode with it otherwise"
        moments: tuple[Tensor, Tensor] = self.posterior(inputs, self._positions(tokens.shape[1]), memory, present)
        return moments

    def decode(self, z: Float[Tensor, "B T Z"], present: Tensor, memory: Memory) -> Float[Tensor, "B T D"]:
        """States after the decoder."""
        return self.network.decode(self.reader(z, self._positions(z.shape[1]), present), present, memory)

    def _positions(self, count: int) -> Float[Tensor, "T D"]:
        table: Any = self.network.positions
        positions: Tensor = table[:count]
        return positions

    # -- training -----------------------------------------------------------------------------------------------------

    def objective(self, batch: Batch, progress: float, smoothing: float) -> Objective:
        """See ``Student``: of the phase at ``progress``."""
        whole = filled_up(batch, self.prior.unit, self.network.shape.end)
        memory, present = self.read(whole), whole.present
        mean, log_variance = self.infer(whole.targets, present, memory)
        bound = progress >= self.autoencoding
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if bound else mean
        states = self.decode(z, present, memory)
        loss, right = self.token_loss(states[present], whole.targets[present], smoothing)
        length_loss, length_right = self.lengths.loss(memory, whole.lengths)
        losses = {"tokens": loss, "length": self.length_weight * length_loss}
        numbers: dict[str, Any] = {"tokens_loss": loss.detach(), "right": right, "length_loss": length_loss.detach()}
        if bound:
            weight = min(1.0, (progress - self.autoencoding) / self.annealing) if self.annealing else 1.0
            divergence = self.divergence(z, mean, log_variance, whole, memory)
            losses["kl"] = weight * divergence
            numbers |= {"kl": divergence.detach(), "kl_weight": weight}
        return losses, numbers | {"length_right": length_right}

    def divergence(
        self, z: Float[Tensor, "B T Z"], mean: Tensor, log_variance: Tensor, batch: Batch, memory: Memory
    ) -> Float[Tensor, ""]:
        """log q - log p of one sample, per token. The first time, the prior's norms are set."""
        if not self._norms_are_set():
            with torch.no_grad(), initialising(self.prior):
                self.prior.log_prob(z, memory, batch.present)
        posterior = log_normal_of(z, mean, log_variance, batch.present)
        return (posterior - self.prior.log_prob(z, memory, batch.present)).sum() / batch.lengths.sum()

    def _norms_are_set(self) -> bool:
        if not getattr(self, "_set", False):
            norm: Any = self.prior.flow.body.maps[0]
            self._set = bool(norm.log_scale.any())
        return self._set

    def do_without(self, stored: Collection[str]) -> None:
        """See ``Student``: drops the posterior, which only ``iwd`` needs."""
        if not any(name.startswith("posterior.") for name in stored):
            self.posterior = None

    # -- writing ------------------------------------------------------------------------------------------------------

    def require_lengths(self, count: int) -> None:
        """Refuse to try more lengths than every source has.

        Raises:
            ValueError: more.
        """
        possible = self.lengths.reach // self.prior.unit
        if count > possible:
            raise ValueError(
                f"lengths must be at most {possible}, which are always possible, got {count}. Set a smaller "
                "method.lengths."
            )

    def best_lengths(self, memory: Memory, count: int) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]]:
        """The likeliest lengths among multiples of the unit, and their log-probabilities among these.

        Raises:
            ValueError: see ``require_lengths``.
        """
        unit, head = self.prior.unit, self.lengths
        offsets = torch.arange(-head.reach, head.reach + 1, device=memory.lengths.device)
        lengths = memory.content[:, None] + offsets
        usable = (lengths % unit == 0) & (lengths > 0) & (lengths <= head.positions)
        self.require_lengths(count)
        logits = head(memory).float().masked_fill(~usable, -torch.inf)
        best = logits.log_softmax(-1).topk(count, -1)
        return lengths.gather(1, best.indices), best.values

    def importance(
        self, tokens: Int[Tensor, "R T"], present: Tensor, memory: Memory, samples: int, rng: Generator
    ) -> Float[Tensor, "R"]:
        """Estimate of log p(tokens | source, length) from ``samples`` of the posterior, in one pass."""
        mean, log_variance = self.infer(tokens, present, memory)
        many, tokens, present = memory.repeat(samples), *(t.repeat_interleave(samples, 0) for t in (tokens, present))
        mean, log_variance = (t.repeat_interleave(samples, 0) for t in (mean, log_variance))
        noise = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=rng)
        z = mean + noise * (0.5 * log_variance).exp()
        logits = self.logits(self.decode(z, present, many)).float()
        said = logits.log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0].masked_fill(~present, 0.0).sum(1)
        ratio = self.prior.log_prob(z, many, present) - log_normal_of(z, mean, log_variance, present)
        return (said + ratio).view(-1, samples).logsumexp(1) - math.log(samples)


def filled_up(batch: Batch, unit: int, end: int) -> Batch:
    """Targets padded with ends to the next multiple of ``unit``."""
    lengths = -(-batch.lengths // unit) * unit
    width = -(-batch.targets.shape[1] // unit) * unit
    targets = F.pad(batch.targets, (0, width - batch.targets.shape[1]), value=end)
    targets = targets.masked_fill(~present_up_to(batch.lengths, width), end)
    return replace(batch, targets=targets, lengths=lengths)


@dataclass(frozen=True, slots=True)
class FlowPass:
    """Latents from noise, one pass of the decoder over each, and the scores of ``importance``.

    Attributes:
        lengths: that are tried.
        samples: latents for each of them; the noise of the first is 0.
        temperature: of the others' noise.
        importance: samples of the posterior for a candidate's score; 0: the score is the mean log-probability of its
            tokens.
    """

    lengths: int = 1
    samples: int = 1
    temperature: float = 0.5
    importance: int = 0

    def __call__(self, student: FlowSeqStudent, memory: Memory, rng: Generator) -> Candidates:
        lengths, log_probs = (t.repeat_interleave(self.samples, 1) for t in student.best_lengths(memory, self.lengths))
        count, flat, width = lengths.shape[1], lengths.flatten(), int(lengths.max())
        many, present = memory.repeat(count), present_up_to(flat, width)
        z = student.prior.latents(self.noise(student, lengths.shape, width, rng), many, present)
        weighed = self.importance > 0 and count > 1
        tokens, said = student.choose(student.decode(z, present, many), scored=count > 1 and not weighed)
        end = student.network.shape.end
        texts, short = up_to_end(tokens, flat, end)
        if weighed:
            found = student.importance(texts, present, many, self.importance, rng)
            scores = (found.view(lengths.shape) + log_probs) / lengths
        else:
            scores = mean_over(said, flat).view(lengths.shape)
        positions = count * width * (self.importance if weighed else 1)
        return Candidates(texts.view(*lengths.shape, width), short.view(lengths.shape), scores, 1 + weighed, positions)

    def noise(self, student: FlowSeqStudent, shape: Sequence[int], width: int, rng: Generator) -> Tensor:
        """[B * K, T, Z]; zero for the first sample of each length."""
        device = student.prior.source.weight.device
        drawn = torch.zeros(shape[0], self.lengths, self.samples, width, student.latent, device=device)
        if self.samples > 1:
            others = (*drawn.shape[:2], self.samples - 1, *drawn.shape[3:])
            drawn[:, :, 1:] = self.temperature * torch.randn(others, device=device, generator=rng)
        return drawn.flatten(0, 2)


def up_to_end(
    tokens: Int[Tensor, "R T"], lengths: Int[Tensor, "R"], end: int
) -> tuple[Int[Tensor, "R T"], Int[Tensor, "R"]]:
    """Rows with ends only from their first one on, and how many tokens precede it."""
    ended = (tokens == end) | ~present_up_to(lengths, tokens.shape[1])
    over = ended.cumsum(1) > 0
    return tokens.masked_fill(over, end), (~over).sum(1)


class FlowSeq(NonAutoregressive):
    """One pass through flow and decoder, over one latent sequence or several.

    Args:
        decoding: see above.
        lengths: with ``npd`` and ``iwd``, lengths that are tried.
        samples: with these, latent sequences for each length.
        temperature: of their noise.
        importance: with ``iwd``, samples of the posterior for each score.

    Raises:
        ValueError: a number below 1, too many lengths, or see ``NonAutoregressive``.
    """

    paper = "Ma et al. 2019, arXiv 1909.02480"
    kind = FlowSeqStudent

    student: FlowSeqStudent

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        decoding: Decoding = "argmax",
        lengths: int = 3,
        samples: int = 1,
        temperature: float = 0.5,
        importance: int = 4,
        collapse: bool = False,
        checkpoint: str | Path | None = None,
    ) -> None:
        require("at least 1", "method", lengths=lengths, samples=samples, importance=importance)
        writer = FlowPass() if decoding == "argmax" else FlowPass(lengths, samples, temperature)
        if decoding == "iwd":
            writer = replace(writer, importance=importance)
        rescored = decoding == "npd" and lengths * samples > 1
        super().__init__(target, sampling, writer, rescored, collapse, checkpoint)
        if writer.importance and self.student.posterior is None:
            raise ValueError(
                "method.decoding=iwd needs FlowSeq's posterior, and this checkpoint is stored without it. Train one "
                f"that has it: {training_command('flowseq')}, then name its folder: method.checkpoint=FOLDER. Or set "
                "method.decoding=npd."
            )
        self.student.require_lengths(writer.lengths)

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``NonAutoregressive``; a pass runs the flow's layers too."""
        for step in super().decode(prompts, limit, rng):
            yield replace(step, layers=[self._layers / self.target.n_layers] * len(prompts))

    def stats(self) -> dict[str, Any]:
        """See ``NonAutoregressive``; layers of the flow count as the decoder's."""
        posterior = self.student.options["posterior_layers"]
        layers = {"flow_layers": self.student.prior.layers, "posterior_layers": posterior}
        return super().stats() | layers | self.counters.stats(self._layers, self.target.n_layers)

    @property
    def _layers(self) -> int:
        """Layers of a pass from noise to tokens, or of one that rescores, posterior included, whichever is more."""
        own = len(self.student.network.decoder) + self.student.prior.layers
        writer: Any = self.writer
        return own + (self.student.options["posterior_layers"] if writer.importance else 0)


def _check(
    heads: int,
    latent: int,
    width: int,
    steps: Sequence[int],
    word_dropout: float,
    autoencoding: float,
    annealing: float,
) -> None:
    shares = (word_dropout, autoencoding, annealing)
    if not steps or min(steps) < 0 or not all(0 <= share < 1 for share in shares) or autoencoding + annealing > 1:
        raise ValueError(
            "steps must have at least one level and no negative number, word_dropout, autoencoding and annealing must "
            f"be from 0 to below 1, the last two together at most 1, got steps={list(steps)}, "
            f"word_dropout={word_dropout}, autoencoding={autoencoding} and annealing={annealing}. Correct them in "
            "train."
        )
    if latent < 2 or latent % 2 or width % (2 * heads):
        raise ValueError(
            f"latent must be even, and width a multiple of {2 * heads} (twice the model's heads), got latent={latent} "
            f"and width={width}. Correct train.latent and train.width."
        )
