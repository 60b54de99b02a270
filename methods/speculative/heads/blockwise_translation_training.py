"""Training for method=blockwise_translation: heads on a translation model's decoder, which is fine-tuned with them.

Stern et al. 2018 (arXiv 1811.03115, sec. 6 and 7.1) compare a frozen model with a fine-tuned one, on references and on
distilled data; with both, blocks of k = 4 grow from 1.73 to 3.27 tokens. ``trunk=finetuned`` minimises the loss of the
model's own head and, by ``heads_weight``, those of heads 2 to k, and saves the changed weights. ``trunk=frozen`` trains
heads 2 to k alone. The texts are the model's own translations of the sources.

Differences: the new heads are trained alone at first (``heads_first``), since untrained ones would pull the model away
from its translations (as in Medusa-2: Cai et al. 2024, arXiv 2401.10774, sec. 2.2); the teacher itself is fine-tuned,
where the paper's teacher has another seed; the model's own loss has a weight of its own, where the paper takes the mean
of all, and the model's learning rate rises slowly; translations are greedy by default (``beams=1``); each batch trains
every head (``heads_per_step=all``).

Command: ``python -m bench train method=blockwise_translation model=multi30k_4_4``
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine import seq2seq_layers
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.generation import translate
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.heads.blockwise import BlockwiseDrafter, save_trunk
from methods.speculative.heads.blockwise_training import BlockwiseLearner, HeadsPerStep
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import default_rule
from methods.training.distillation import distilled_pairs
from methods.training.features import Batch
from methods.training.interface import Trainable, TrainingContext, require
from methods.training.losses import cross_entropy
from methods.training.trainer import Loss, attention_over_short_rows, discard
from methods.training.translation import NONE, BleuJudge, Pair, TranslationConfig, padded, split, train_on_pairs

Trunk = Literal["frozen", "finetuned"]
_LOSS = 0.5  # BLEU


class TranslationLearner(BlockwiseLearner):
    """The heads over a model of transformers, which may be trained with them.

    Args:
        target: the original model.
        trunk: its copy in 32 bit.
        vocabulary, k, hidden, per_step: see ``BlockwiseLearner``.
        smoothing: of the labels of the model's own head.
        heads_weight: of the mean loss of heads 2 to k, where that of the model's own is 1.
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
        heads_weight: float,
    ) -> None:
        super().__init__(target, vocabulary, k, hidden, per_step)
        self.trunk, self.smoothing, self.heads_weight = trunk, smoothing, heads_weight
        self.start, self._scale = list(target.start), seq2seq_layers.output_scale(trunk.config)

    @property
    def tuned(self) -> bool:
        """Whether the model is trained too at the moment."""
        return bool(self.trunk.get_output_embeddings().weight.requires_grad)

    def loss_of(self, pairs: Sequence[Pair], device: torch.device) -> Loss:
        """Cross-entropy of heads 2 to k, and of the model's own if it is trained; with one head per step, of that."""
        batch = self.read(pairs, device)
        draws_own = self.per_step == "one" and self.tuned and int(torch.randint(self.shape.k, ())) == 0
        if draws_own:
            return self._own_loss(batch), {}
        loss, seen = super().loss(batch)
        if not self.tuned or self.per_step == "one":
            return loss, seen
        own = self._own_loss(batch)
        return {"own": own, "heads": self.heads_weight * loss}, {"loss_1": own.detach(), **seen}

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

    def logits(self, states: Float[Tensor, "R D"]) -> Float[Tensor, "R v"]:
        """See ``Learner``; by the current output matrix."""
        return self._output(states, self.vocabulary.ids)

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


@dataclass
class BlockwiseTranslationTraining(Trainable):
    """Trains heads 2 to k, and the model with them.

    Args:
        trunk: ``finetuned`` or ``frozen``, the model.
        k: tokens of a block, the model's own included.
        hidden: units of the layer that the heads share; None: the model's hidden size for each of them.
        heads_per_step: see ``BlockwiseLearner``.
        trunk_share: learning rate of the model as a share of that of its new heads.
        heads_first: share of the steps in which the heads are trained over the original model.
        trunk_warmup: share of the steps, after those, in which the model's learning rate rises.
        heads_weight: see ``TranslationLearner``.
        vocabulary: most tokens that heads 2 to k choose among.
        beams: of the translations to learn from; 1 is greedy.
        validation: corpus of pairs for validation; None: that of the corpus (``NAME_val``), else every thirtieth pair.
        recipe: of the training. Averaged are the checkpoints that write most tokens per step, of those after the model
            was released whose BLEU is at most ``_LOSS`` below the original's, else those of the best BLEU.

    Raises:
        ValueError: a number out of range.
    """

    learns_from = "pairs"
    description = "heads that propose the next tokens of a translation, and the model fine-tuned with them"
    duration = "twenty minutes on one CPU core for multi30k_4_4"
    corpus = "multi30k"

    trunk: Trunk = "finetuned"
    k: int = 4
    hidden: int | None = None
    heads_per_step: HeadsPerStep = "all"
    trunk_share: float = 0.3
    heads_first: float = 0.3
    trunk_warmup: float = 0.1
    heads_weight: float = 0.5
    vocabulary: int = 8192
    beams: int = 1
    validation: str | None = None
    recipe: TranslationConfig = field(default_factory=TranslationConfig)

    def __post_init__(self) -> None:
        require("at least 2", k=self.k)
        require("at least 1", hidden=self.hidden, vocabulary=self.vocabulary, beams=self.beams)
        require("above 0 and at most 1", trunk_share=self.trunk_share)
        require("from 0 to below 1", heads_first=self.heads_first, trunk_warmup=self.trunk_warmup)
        require("above 0", heads_weight=self.heads_weight)

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        target, tokenizer, recipe = context.target, context.tokenizer, self.recipe
        if not isinstance(target, Seq2SeqLM):
            raise ValueError(
                f"method=blockwise_translation needs an encoder-decoder, got {target.name}, a causal model. Use "
                "method=blockwise, or another model (model=multi30k_4_4, or model=hf model.name=HUB_ID_OR_FOLDER)."
            )
        train, validation = split(context)
        pairs = self._pairs(context, target, tokenizer([source for source, _ in train])["input_ids"])
        learner, judge = self._learner(target, pairs, context), Judge(tokenizer, validation)
        before = judge.bleu_of(target)
        heads_alone = round(self.heads_first * recipe.steps) if learner.tuned else recipe.steps

        def loss(rows: list[int], step: int) -> Loss:
            learner.trunk.requires_grad_(step >= heads_alone)
            learner.train(learner.tuned)
            with attention_over_short_rows(context.device):
                return learner.loss_of([pairs[row] for row in rows], context.device)

        def evaluate() -> dict[str, float]:
            return judge.judge(learner)

        def share(step: int) -> float:
            """Of the learning rate, for the model: a sudden start throws it off its translations."""
            risen = (step - heads_alone + 1) / max(1, self.trunk_warmup * recipe.steps)
            return self.trunk_share * min(1.0, max(0.0, risen))

        def rank(point: Mapping[str, Any]) -> tuple[bool, bool, float]:
            kept = point["bleu"] >= before - _LOSS
            return point["step"] > heads_alone, kept, point["tokens_per_step" if kept else "bleu"]

        facts = train_on_pairs(learner, pairs, recipe, context, loss, evaluate, {"trunk.": share}, rank)
        learner.eval()
        last = evaluate()
        learner.heads().save(context.output)
        if self.trunk == "finetuned":
            save_trunk(learner.trunk, context.output)
        discard(context.output)
        return facts | {
            "validation_bleu": last["bleu"],
            "tokens_per_step": last["tokens_per_step"],
            "trunk": self.trunk,
            "pairs_left_out": len(train) - len(pairs),
            "validation_bleu_of_the_original": round(before, 2),
            "draft_vocabulary": len(learner.vocabulary),
        }

    def _pairs(self, context: TrainingContext, target: Seq2SeqLM, sources: Sequence[list[int]]) -> list[Pair]:
        """Sources with the model's own translations; those that are too long are left out."""
        read = [source for source in sources if len(source) <= target.max_positions]
        return distilled_pairs(context, read, self.beams, longest=target.max_positions - len(target.start))

    def _learner(self, target: Seq2SeqLM, pairs: Sequence[Pair], context: TrainingContext) -> TranslationLearner:
        texts = torch.tensor([token for _, text in pairs for token in text])
        vocabulary = DraftVocabulary.frequent(texts, self.vocabulary, target.vocab_size, target.eos_ids)
        torch.manual_seed(context.seed)
        trunk = _copy(target.hf, self.recipe.dropout).requires_grad_(self.trunk == "finetuned")
        hidden = self.hidden or (self.k - 1) * target.hidden_size
        shared = (vocabulary.to(context.device), self.k, hidden, self.heads_per_step)
        smoothing, weight = self.recipe.label_smoothing, self.heads_weight
        return TranslationLearner(target, trunk.to(context.device), *shared, smoothing, weight)


def _copy(network: Any, dropout: float) -> Any:
    """The same weights in 32 bit, to be trained with this much dropout."""
    config = copy.deepcopy(network.config)
    config.dropout = config.dropout_rate = dropout  # as BART and its kin, and as T5 name it
    made = type(network)(config).float()
    made.load_state_dict(network.state_dict())
    made.generation_config = copy.deepcopy(network.generation_config)
    return made


class Judge(BleuJudge):
    """See ``BleuJudge``, for blocks."""

    def judge(self, learner: TranslationLearner) -> dict[str, float]:
        """Greedy decoding by the loop of measurements: BLEU, and tokens per pass of the model after the first one."""
        lm = Seq2SeqLM.from_hf(learner.trunk, linear="plain", keep_hf=True)
        assert isinstance(lm, Seq2SeqLM)
        rule = default_rule(Sampling(), "chain", drawn=False)
        drafter = BlockwiseDrafter(lm, learner.heads(), learner.n_heads)
        return self.of_decoder(SpeculativeDecoder(lm, Sampling(), drafter, rule), lm)

    def bleu_of(self, target: Seq2SeqLM) -> float:
        """Of plain greedy translations."""
        return self.score(partial(translate, target), target.max_positions, target.device)
