"""Hidden states of the target over its own answers: computed once, read by every head that is trained on them.

The target's forward pass costs many times as much as a draft head, so training reads its states from memory-mapped
files: one for the states after the final norm, one for each tapped layer. States that are too large for the disk are
computed for every batch (``LiveFeatures``).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.training.answers import AnswerRecipe, Answers, locked, own_answers
from methods.training.interface import Example, TrainingContext

FeatureForm = Literal["cached", "live"]
_HELD_OUT = 20  # one dialogue in so many is held out
_PASS_TOKENS = 4096  # of one forward pass of the target
_STORED = {torch.bfloat16: np.uint16, torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class Batch:
    """Some dialogues and the target's states over them, padded at the end.

    Attributes:
        tokens: [B, T] ids, 0 where there are none.
        hidden: [B, T, D] states after the final norm; ``hidden[:, t]`` predicts ``tokens[:, t + 1]``.
        hidden_layers: states after single layers, 0-based.
        prompts: tokens of the prompt in each row.
        lengths: tokens of prompt and answer in each row.
    """

    tokens: Int[Tensor, "B T"]
    hidden: Float[Tensor, "B T D"]
    hidden_layers: dict[int, Float[Tensor, "B T D"]]
    prompts: list[int]
    lengths: list[int]

    @property
    def present(self) -> Bool[Tensor, "B T"]:
        """Where there is a token."""
        return self._place < self._column(self.lengths)

    @property
    def answered(self) -> Bool[Tensor, "B T"]:
        """Where there is a token of the answer."""
        return self.present & (self._place >= self._column(self.prompts))

    def shifted(self, n: int) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """The token ``n`` places after each place, and where that is a token of the answer."""
        labels, valid = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens, dtype=torch.bool)
        if n < self.tokens.shape[1]:
            labels[:, : labels.shape[1] - n] = self.tokens[:, n:]
            valid[:, : valid.shape[1] - n] = self.answered[:, n:]
        return labels, valid

    @property
    def _place(self) -> Int[Tensor, "T"]:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def _column(self, numbers: list[int]) -> Int[Tensor, "B 1"]:
        return torch.tensor(numbers, device=self.tokens.device)[:, None]


class Features:
    """Dialogues with the target's states.

    Attributes:
        answers: the dialogues.
        train, held_out: their numbers. A dialogue is held out by its prompt, whatever others there are, so that no
            network is judged by what it has learnt from fewer of them.

    Raises:
        ValueError: fewer than two dialogues.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        count = len(answers.rows)
        if count < 2:
            raise ValueError(f"A corpus must have at least 2 dialogues, got {count}. Choose another one (corpus=...).")
        drawn = [row for row, each in enumerate(answers.rows) if _drawn(each)][: count - 1]
        self.held_out: Sequence[int] = drawn or [count - 1]
        self.train: Sequence[int] = sorted({*range(count)} - {*self.held_out})

    def batch(self, rows: Sequence[int], dtype: torch.dtype = torch.float32) -> Batch:
        """Some dialogues, on the target's device."""
        raise NotImplementedError

    def answer_tokens(self, rows: Sequence[int]) -> Int[Tensor, "T"]:
        """The ids of some answers, concatenated."""
        return torch.tensor([token for row in rows for token in self.answers.rows[row].answer], dtype=torch.long)

    def vocabulary(self, most: int, target: CausalLM) -> DraftVocabulary:
        """The most frequent tokens of the target's answers to learn from, on its device."""
        tokens = self.answer_tokens(self.train)
        return DraftVocabulary.frequent(tokens, most, target.vocab_size, target.eos_ids).to(target.device)

    def coverage(self, vocabulary: DraftVocabulary) -> float:
        """Share of the tokens of held-out answers that are in the vocabulary."""
        tokens = self.answer_tokens(self.held_out).to(vocabulary.ids.device)
        return round(float((vocabulary.of(tokens) >= 0).float().mean()), 4)

    def texts(self, rows: Sequence[int], device: torch.device) -> tuple[Int[Tensor, "B T"], list[int], list[int]]:
        """Of some dialogues: ids, padded with 0 at the end; tokens of the prompts; tokens in all."""
        examples = [self.answers.rows[row] for row in rows]
        prompts = [len(example.prompt) for example in examples]
        lengths = [len(example.prompt) + len(example.answer) for example in examples]
        tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for place, example in enumerate(examples):
            tokens[place, : lengths[place]] = torch.tensor(example.prompt + example.answer)
        return tokens.to(device), prompts, lengths


def features(
    context: TrainingContext, hidden_layers: Sequence[int], recipe: AnswerRecipe, form: FeatureForm = "cached"
) -> Features:
    """The target's own answers and its states over them; what is in the shared cache is read.

    Args:
        context: of the training.
        hidden_layers: layers whose states are wanted beside those after the final norm.
        recipe: of the answers.
        form: ``cached`` files, or ``live``, computed for each batch.

    Raises:
        ValueError: no usable prompt, a layer beyond the model, or a disk too small for the files.
    """
    target = context.target
    if outside := [tap for tap in hidden_layers if not 0 <= tap < target.n_layers]:
        raise ValueError(
            f"Taps of {target.name} must be layers 0 to {target.n_layers - 1}, got {outside}. Set train.taps."
        )
    answers = own_answers(context, recipe)
    if form == "live":
        return LiveFeatures(target, answers, hidden_layers)
    return CachedFeatures.make(context, answers, hidden_layers)


class LiveFeatures(Features):
    """States computed for every batch."""

    def __init__(self, target: CausalLM, answers: Answers, hidden_layers: Sequence[int]) -> None:
        super().__init__(answers)
        self.target, self.hidden_layers = target, tuple(hidden_layers)

    def batch(self, rows: Sequence[int], dtype: torch.dtype = torch.float32) -> Batch:
        """See ``Features.batch``."""
        tokens, prompts, lengths = self.texts(rows, self.target.device)
        texts = [row[:n] for row, n in zip(tokens, lengths, strict=True)]
        hidden, hidden_layers = states(self.target, texts, self.hidden_layers, prompts)
        kept = {tap: state.to(dtype, copy=True) for tap, state in hidden_layers.items()}
        return Batch(tokens, hidden.to(dtype, copy=True), kept, prompts, lengths)


class CachedFeatures(Features):
    """States read from memory-mapped files."""

    def __init__(self, target: CausalLM, answers: Answers, files: dict[int | None, Path]) -> None:
        super().__init__(answers)
        self.device, self._dtype, self._width = target.device, target.dtype, target.hidden_size
        self._starts = _starts(answers.rows)
        self._files = {tap: np.memmap(path, _STORED[target.dtype], "r") for tap, path in files.items()}

    @classmethod
    def make(cls, context: TrainingContext, answers: Answers, hidden_layers: Sequence[int]) -> CachedFeatures:
        """Compute the missing files in one pass over the answers."""
        files: dict[int | None, Path] = {None: answers.folder / "hidden.bin"}
        files |= {tap: answers.folder / f"layer_{tap}.bin" for tap in hidden_layers}
        with locked(answers.folder):
            missing = {tap: path for tap, path in files.items() if not _complete(path, answers)}
            if missing:
                _require_space(context.target, answers, missing)
                _compute(context, answers, missing)
        return cls(context.target, answers, files)

    def batch(self, rows: Sequence[int], dtype: torch.dtype = torch.float32) -> Batch:
        """See ``Features.batch``."""
        tokens, prompts, lengths = self.texts(rows, self.device)
        read = {tap: self._read(tap, rows, lengths, dtype) for tap in self._files}
        hidden = read.pop(None)
        return Batch(tokens, hidden, {tap: state for tap, state in read.items() if tap is not None}, prompts, lengths)

    def _read(
        self, tap: int | None, rows: Sequence[int], lengths: list[int], dtype: torch.dtype
    ) -> Float[Tensor, "B T D"]:
        found = torch.zeros(len(rows), max(lengths), self._width, dtype=self._dtype)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            start = self._starts[row] * self._width
            raw = np.array(self._files[tap][start : start + length * self._width])
            found[place, :length] = _as_tensor(raw, self._dtype).view(length, self._width)
        return found.to(self.device, dtype)


@torch.inference_mode()
def states(
    target: CausalLM, texts: Sequence[Int[Tensor, "_"]], hidden_layers: Sequence[int], prompts: Sequence[int] = ()
) -> tuple[Float[Tensor, "B T D"], dict[int, Float[Tensor, "B T D"]]]:
    """The target's states over whole texts: after the final norm, and after ``hidden_layers``; rows padded at the end.

    Args:
        prompts: tokens of the prompt in each text, for an encoder-decoder: its decoder has no states over the source,
            so they are 0 there, and that of the start token is at the source's last token.
    """
    if isinstance(target, Seq2SeqLM):
        return _states_of_decoder(target, texts, hidden_layers, prompts)
    cache = target.new_cache(len(texts), max(len(text) for text in texts))
    output = target.prefill(texts, cache, hidden_layers=tuple({*hidden_layers, target.n_layers - 1}))
    return output.hidden, {tap: output.hidden_layers[tap] for tap in hidden_layers}


def _states_of_decoder(
    target: Seq2SeqLM, texts: Sequence[Int[Tensor, "_"]], hidden_layers: Sequence[int], prompts: Sequence[int]
) -> tuple[Float[Tensor, "B T D"], dict[int, Float[Tensor, "B T D"]]]:
    sources = [text[:prompt] for text, prompt in zip(texts, prompts, strict=True)]
    answers = [text[prompt:] for text, prompt in zip(texts, prompts, strict=True)]
    cache = target.new_cache(len(texts), max(prompts) + max(len(answer) for answer in answers))
    start = target.prefill(sources, cache, hidden_layers=hidden_layers)
    output = target.forward(pad_sequence(answers, batch_first=True), None, cache, hidden_layers=hidden_layers)
    lengths = [len(text) for text in texts]

    def place(first: Float[Tensor, "B n D"], others: Float[Tensor, "B A D"]) -> Float[Tensor, "B T D"]:
        written = torch.cat([first[:, -1:], others], dim=1)
        whole = written.new_zeros(len(texts), max(lengths), target.hidden_size)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            whole[row, prompt - 1 : length] = written[row, : length - prompt + 1]
        return whole

    return place(start.hidden, output.hidden), {
        tap: place(start.hidden_layers[tap], output.hidden_layers[tap]) for tap in hidden_layers
    }


def _compute(context: TrainingContext, answers: Answers, files: dict[int | None, Path]) -> None:
    """Write some files in one pass, which starts over if interrupted: it takes a fraction of the answers' time."""
    target, starts = context.target, _starts(answers.rows)
    hidden_layers = [tap for tap in files if tap is not None]
    total = starts[-1] * target.hidden_size
    drafts = {tap: path.with_suffix(".tmp") for tap, path in files.items()}
    stores = {tap: np.memmap(draft, _STORED[target.dtype], "w+", shape=(total,)) for tap, draft in drafts.items()}
    done = 0
    for rows in _portions(answers.rows):
        texts = [answers.rows[row].prompt + answers.rows[row].answer for row in rows]
        prompts = [len(answers.rows[row].prompt) for row in rows]
        hidden, seen = states(
            target, [torch.tensor(text, device=target.device) for text in texts], hidden_layers, prompts
        )
        for tap, store in stores.items():
            state = (hidden if tap is None else seen[tap]).cpu()
            for place, row in enumerate(rows):
                first, last = starts[row] * target.hidden_size, starts[row + 1] * target.hidden_size
                store[first:last] = _as_array(state[place, : len(texts[place])])
        done += sum(len(text) for text in texts)
        context.report_progress("features (tokens)", done, starts[-1])
    for tap, path in files.items():
        stores[tap].flush()
        drafts[tap].replace(path)
        path.with_suffix(".json").write_text(json.dumps({"answers": answers.sha256}) + "\n", encoding="utf-8")


def _drawn(row: Example) -> bool:
    """Whether a dialogue is held out."""
    return int(hashlib.sha256(json.dumps(row.prompt).encode()).hexdigest(), 16) % _HELD_OUT == 0


def _portions(rows: Sequence[Example]) -> list[list[int]]:
    """Numbers of dialogues of similar length, for one pass each."""
    length = [len(row.prompt) + len(row.answer) for row in rows]
    portions: list[list[int]] = []
    for row in sorted(range(len(rows)), key=length.__getitem__):
        if not portions or (len(portions[-1]) + 1) * length[row] > _PASS_TOKENS:
            portions.append([])
        portions[-1].append(row)
    return portions


def _starts(rows: Sequence[Example]) -> list[int]:
    """Where each dialogue begins in the files, and where the last one ends."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.prompt) + len(row.answer))
    return starts


def _complete(path: Path, answers: Answers) -> bool:
    header = path.with_suffix(".json")
    try:
        found = json.loads(header.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return path.exists() and found == {"answers": answers.sha256}


def _require_space(target: CausalLM, answers: Answers, files: dict[int | None, Path]) -> None:
    per_file = _starts(answers.rows)[-1] * target.hidden_size * target.dtype.itemsize
    needed, free = len(files) * per_file, shutil.disk_usage(answers.folder).free
    if needed > 0.95 * free:
        raise ValueError(
            f"The target's states over its answers need {needed / 1e9:.1f} GB, got {free / 1e9:.1f} GB of free disk. "
            "Free some, set train.answers.tokens lower, or train.features=live, which computes them for each batch."
        )


def _as_array(state: Tensor) -> np.ndarray:
    flat = state.reshape(-1)
    return (flat.view(torch.int16) if state.dtype == torch.bfloat16 else flat).numpy().view(_STORED[state.dtype])


def _as_tensor(raw: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(raw.view(np.int16)).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(raw)
