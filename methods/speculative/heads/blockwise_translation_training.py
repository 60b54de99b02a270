"""Training for method=blockwise_translation: heads behind the decoder of a translation model, which learns with them.

Stern et al. 2018 (arXiv 1811.03115, sec. 6 and 7.1) compare a frozen model with a fine-tuned one, on references and on
distilled data; with both, blocks of k = 4 grow from 1.73 to 3.27 tokens. ``trunk=finetuned``: the mean of the losses of
all k heads is minimised, the model's own (head 1) among them, and the part carries the changed weights.
``trunk=frozen``: heads 2 to k alone learn. Either way the texts are the model's own translations of the sources.

Differences: the new heads learn alone at first (``heads_first``), since what they know at the beginning would pull the
model away from its translations (Medusa-2 does so too: Cai et al. 2024, arXiv 2401.10774, sec. 2.2); one teacher writes
those texts and is fine-tuned, where the paper's teacher has another seed; greedy (``beams=1``) unless told otherwise;
each batch teaches every head (``heads_per_step=all``).

Command: ``python -m bench.train method=blockwise_translation model=multi30k_4_4``
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.engine import seq2seq_layers
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.generation import answer
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.heads.blockwise import BlockwiseDrafter, save_trunk
from methods.speculative.heads.blockwise_training import BlockwiseLearner, HeadsPerStep
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import default_rule
from methods.training.distillation import translations
from methods.training.features import Batch
from methods.training.interface import Foundry
from methods.training.losses import cross_entropy
from methods.training.trainer import attention_over_short_rows, autocast, discard
from methods.training.translation import NONE, BleuJudge, Pair, PairCourse, Recipe, padded, split

Trunk = Literal["frozen", "finetuned"]


class TranslationLearner(BlockwiseLearner):
    """The heads over a model of transformers, through which their gradient may go.

    Args:
        target: the model as it was.
        trunk: the one that learns, or does not; of the target's weights, in 32 bit.
        vocabulary, k, hidden, per_step: see ``BlockwiseLearner``.
        smoothing: of the labels of the model's own head.
    """

    def __init__(
        self,
        target: Seq2SeqLM,
        trunk: Any,
        vocabulary: DraftVocabulary,
        k: int,
        hidden: int,
        per_step: HeadsPerStep,
        smoothing: float,
    ) -> None:
        super().__init__(target, vocabulary, k, hidden, per_step)
        self.trunk, self.smoothing = trunk, smoothing
        self.start, self._scale = list(target.start), seq2seq_layers.output_scale(trunk.config)

    @property
    def tuned(self) -> bool:
        """Whether the model learns too, at this time."""
        return bool(self.trunk.get_output_embeddings().weight.requires_grad)

    def loss_of(self, pairs: Sequence[Pair], device: torch.device) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Mean of the heads' cross-entropies, the model's own among them where it learns."""
        batch = self.read(pairs, device)
        draws_own = self.per_step == "one" and self.tuned and int(torch.randint(self.shape.k, ())) == 0
        if draws_own:
            return self._own_loss(batch), {}
        loss, seen = super().loss(batch)
        if not self.tuned or self.per_step == "one":
            return loss, seen
        own = self._own_loss(batch)
        return (own + self.n_heads * loss) / self.shape.k, {"loss_1": own.detach(), **seen}

    def read(self, pairs: Sequence[Pair], device: torch.device) -> Batch:
        """The decoder's tokens and its states over them; its start tokens are the prompt."""
        sources = padded([source for source, _ in pairs], device)
        texts = [[*self.start, *text] for _, text in pairs]
        tokens = padded(texts, device, filler=0)
        with torch.set_grad_enabled(self.tuned and torch.is_grad_enabled()):
            read = (sources != NONE).long()
            memory = self.trunk.get_encoder()(input_ids=sources.clamp(min=0), attention_mask=read).last_hidden_state
            states = self.trunk.get_decoder()(
                input_ids=tokens, encoder_hidden_states=memory, encoder_attention_mask=read, use_cache=False
            ).last_hidden_state
        hidden = states if self._scale == 1.0 else states * self._scale
        return Batch(tokens, hidden, {}, [len(self.start)] * len(texts), [len(text) for text in texts])

    def logits(self, rows: Float[Tensor, "R D"]) -> Float[Tensor, "R v"]:
        """See ``BlockwiseLearner``; by the output matrix as it is now."""
        return self._output(rows, self.vocabulary.ids)

    def _own_loss(self, batch: Batch) -> Tensor:
        tokens, written = batch.shifted(1)
        logits = self._output(batch.hidden[written])
        return cross_entropy(logits, tokens[written], self.smoothing)

    def _output(self, rows: Float[Tensor, "R D"], ids: Int[Tensor, "v"] | None = None) -> Float[Tensor, "R v"]:
        weight, bias = self.trunk.get_output_embeddings().weight, getattr(self.trunk, "final_logits_bias", None)
        bias = None if bias is None else bias[0]
        if ids is None:
            return F.linear(rows, weight, bias)
        return F.linear(rows, weight[ids], None if bias is None else bias[ids])


class BlockwiseTranslationTraining:
    """Trains heads 2 to k, and the model with them.

    Args:
        trunk: ``finetuned``, or ``frozen``: the model stays as it is.
        k: tokens of a block, the model's own included.
        hidden: units of the layer that the heads share; None: the model's hidden size for each of them.
        heads_per_step: teach all heads with each batch, or one drawn at random, as the paper does.
        trunk_share: of the learning rate, for the model; its heads are new, it is not.
        heads_first: share of the steps in which the heads learn over the model as it was.
        vocabulary: most tokens that heads 2 to k choose among.
        beams: of the translations to learn from; 1 is greedy.
        validation: corpus of pairs to judge by; None: the corpus' own (``NAME_val``), else every thirtieth pair.
        recipe: of the training; None: the defaults. Nothing is averaged.

    Raises:
        ValueError: a number out of range.
    """

    prepares: ClassVar[str] = "heads that propose the next tokens of a translation, and the model fine-tuned with them"
    takes: ClassVar[str] = "twenty minutes on one CPU core for multi30k_4_4"
    corpus: ClassVar[str] = "multi30k"

    def __init__(
        self,
        trunk: Trunk = "finetuned",
        k: int = 4,
        hidden: int | None = None,
        heads_per_step: HeadsPerStep = "all",
        trunk_share: float = 0.3,
        heads_first: float = 0.3,
        vocabulary: int = 8192,
        beams: int = 1,
        validation: str | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        if k < 2 or min(vocabulary, beams, hidden or 1) < 1:
            raise ValueError(
                f"k={k}, hidden={hidden}, vocabulary={vocabulary}, beams={beams} came; k >= 2, and hidden (or null), "
                "vocabulary and beams of at least 1 are allowed. k=1 is the model alone: method=autoregressive."
            )
        if not 0 < trunk_share <= 1:
            raise ValueError(f"trunk_share={trunk_share} came; above 0 and up to 1 is allowed. Set train.trunk_share.")
        if not 0 <= heads_first < 1:
            raise ValueError(f"heads_first={heads_first} came; from 0 to below 1 is allowed. Set train.heads_first.")
        self.trunk, self.k, self.hidden, self.heads_per_step = trunk, k, hidden, heads_per_step
        self.trunk_share, self.heads_first = trunk_share, heads_first
        self.vocabulary, self.beams, self.validation, self.recipe = vocabulary, beams, validation, recipe or Recipe()

    def fit(self, foundry: Foundry) -> dict[str, Any]:
        """See ``methods.training.interface.PairLearner``."""
        target, tokenizer = _teacher(foundry)
        train, validation = split(foundry)
        pairs = self._distilled(foundry, target, tokenizer([source for source, _ in train])["input_ids"])
        learner = self._learner(target, pairs, foundry)
        course = _Course(learner, pairs, Judge(tokenizer, validation), self, foundry)
        before = course.judge.bleu_of(target)
        course.run()
        learner.heads().save(foundry.folder)
        if self.trunk == "finetuned":
            save_trunk(learner.trunk, foundry.folder)
        discard(foundry.folder)
        course.discard_checkpoints()
        return course.facts() | {
            "trunk": self.trunk,
            "pairs_left_out": len(train) - len(pairs),
            "validation_bleu_of_the_original": round(before, 2),
            "draft_vocabulary": len(learner.vocabulary),
        }

    def _distilled(self, foundry: Foundry, target: Seq2SeqLM, sources: Sequence[list[int]]) -> list[Pair]:
        """Sources with the model's own translations; what is too long, or was not ended, is left out."""
        read = [source for source in sources if len(source) <= target.max_positions]
        written = translations(target, read, self.beams, foundry.common, foundry.progress)
        end = target.eos_ids[:1]
        pairs = [(source, [*text, *end]) for source, text in zip(read, written, strict=True) if text]
        pairs = [pair for pair in pairs if len(target.start) + len(pair[1]) <= target.max_positions]
        if not pairs:
            raise ValueError(
                f"{target.name} ended none of {len(sources)} translations, so there is nothing to learn from. Name a "
                "model that was trained to translate this corpus."
            )
        return pairs

    def _learner(self, target: Seq2SeqLM, pairs: Sequence[Pair], foundry: Foundry) -> TranslationLearner:
        texts = torch.tensor([token for _, text in pairs for token in text])
        vocabulary = DraftVocabulary.frequent(texts, self.vocabulary, target.vocab_size, target.eos_ids)
        torch.manual_seed(foundry.seed)
        trunk = _copy(target.hf, self.recipe.dropout).requires_grad_(self.trunk == "finetuned")
        hidden = self.hidden or (self.k - 1) * target.hidden_size
        shared = (vocabulary.to(foundry.device), self.k, hidden, self.heads_per_step)
        return TranslationLearner(target, trunk.to(foundry.device), *shared, self.recipe.label_smoothing)


def _teacher(foundry: Foundry) -> tuple[Seq2SeqLM, Any]:
    assert foundry.teacher is not None, "a part is made for a model"
    target, tokenizer = foundry.teacher
    if not isinstance(target, Seq2SeqLM):
        raise ValueError(
            f"{target.name} is a causal model; method=blockwise_translation is for encoder-decoders that translate. "
            "Use method=blockwise, or another model (model=multi30k_4_4, or model=hf model.name=HUB_ID_OR_FOLDER)."
        )
    return target, tokenizer


def _copy(network: Any, dropout: float) -> Any:
    """The same weights in 32 bit, to be trained with this much dropout."""
    config = copy.deepcopy(network.config)
    config.dropout = config.dropout_rate = dropout  # as BART and its kin, and as T5 name it
    made = type(network)(config).float()
    made.load_state_dict(network.state_dict())
    made.generation_config = copy.deepcopy(network.generation_config)
    return made


@dataclass(frozen=True)
class Judged:
    """Greedy decoding of the validation sources: BLEU, and tokens per pass of the model behind the first one."""

    bleu: float
    tokens_per_step: float


class Judge(BleuJudge):
    """See ``BleuJudge``, for blocks."""

    def judge(self, learner: TranslationLearner) -> Judged:
        """By the loop that decodes in measurements."""
        learner.eval()
        lm = Seq2SeqLM.from_hf(learner.trunk, linear="plain", keep_hf=True)
        assert isinstance(lm, Seq2SeqLM)
        decoder = SpeculativeDecoder(
            lm,
            Sampling(),
            BlockwiseDrafter(lm, learner.heads(), learner.n_heads),
            default_rule(Sampling(), "chain", drawn=False),
        )
        count = [0, 0]  # tokens and passes

        def write(sources: list[Int[Tensor, "_"]], limit: int) -> list[list[int]]:
            return _in_blocks(decoder, sources, limit, lm.eos_ids, count)

        bleu = self.score(self.write_all(write, lm.max_positions, lm.device))
        return Judged(bleu, count[0] / max(1, count[1]))

    def bleu_of(self, target: Seq2SeqLM) -> float:
        """Of plain greedy translations."""

        def write(sources: list[Int[Tensor, "_"]], limit: int) -> list[list[int]]:
            return answer(target, sources, limit, Sampling(), Generator(target.device))

        return self.score(self.write_all(write, target.max_positions, target.device))


def _in_blocks(
    decoder: SpeculativeDecoder, sources: list[Int[Tensor, "_"]], limit: int, ends: Sequence[int], count: list[int]
) -> list[list[int]]:
    """Each text up to its end or the limit; tokens and passes behind the first one are added to ``count``."""
    texts: list[list[int]] = [[] for _ in sources]
    unfinished = set(range(len(sources)))
    for number, step in enumerate(decoder.decode(sources, limit, Generator(decoder.target.device))):
        for row in sorted(unfinished):
            new = step.tokens[row][: limit - len(texts[row])]
            new = new[: next((place + 1 for place, token in enumerate(new) if token in ends), len(new))]
            texts[row] += new
            if number:
                count[0], count[1] = count[0] + len(new), count[1] + 1
            if new[-1] in ends or len(texts[row]) == limit:
                unfinished.remove(row)
        if not unfinished:
            break
    return texts


class _Course(PairCourse):
    """The training of heads, and of the model with them."""

    network: TranslationLearner

    def __init__(
        self,
        learner: TranslationLearner,
        pairs: Sequence[Pair],
        judge: Judge,
        training: BlockwiseTranslationTraining,
        foundry: Foundry,
    ) -> None:
        self.judge = judge
        self._trunk_from = round(training.heads_first * training.recipe.steps) if learner.tuned else None
        shares = {"trunk.": training.trunk_share}
        super().__init__(learner, pairs, lambda: judge.judge(learner).bleu, training.recipe, foundry, shares=shares)

    def loss(self) -> tuple[Tensor, Mapping[str, Tensor | float | int]]:
        """Over a batch of pairs."""
        self.network.trunk.requires_grad_(self._trunk_from is not None and self.step >= self._trunk_from)
        self.network.train(self.network.tuned)
        with autocast(self.recipe.precision, self.device), attention_over_short_rows(self.device):
            return self.network.loss_of([self.pairs[place] for place in self.rows()], self.device)

    def evaluate(self) -> None:
        """What is decoded now; the last weights are the part, so none are kept on the way."""
        found = self.judge.judge(self.network)
        point = {"bleu": round(found.bleu, 3), "tokens_per_step": round(found.tokens_per_step, 4)}
        self.curve.append({"step": self.step, **point})
        self.place.log({"step": self.step, **{f"validation/{name}": value for name, value in point.items()}})

    def facts(self) -> dict[str, Any]:
        """For the card."""
        last = self.curve[-1] if self.curve else {}
        return super().facts() | {"validation_bleu": last.get("bleu"), "tokens_per_step": last.get("tokens_per_step")}
