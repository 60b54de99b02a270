"""The interface of every generation method; the runner uses nothing else.

Shapes, everywhere in this package: B rows, T prompt length, N draft nodes, M = N + 1 scored nodes (node 0 is the row's
last committed token, whose keys and values are not in the cache yet), V vocabulary, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float, Int
from torch import Generator, Tensor

if TYPE_CHECKING:
    from methods.engine.causal_lm import CausalLM

Family = Literal["speculative", "early_exit", "non_autoregressive", "baseline", "external", "other"]
ModelKind = Literal["any", "causal", "seq2seq", "masked"]
Needs = Literal[
    "nothing", "training", "a draft model", "a datastore", "a module in the model", "a model trained for it"
]


class Guarantee(str, Enum):
    """What a method promises about its output; every run measures whether it holds."""

    EXACT = "EXACT"  # greedy: the target's own tokens; sampling: the target's own distribution
    RELAXED = "RELAXED"  # the target's output up to a declared tolerance
    INDEPENDENT_MODEL = "INDEPENDENT_MODEL"  # another model's output; only its quality can be judged


@dataclass(frozen=True, slots=True)
class Step:
    """What one round committed. All reported numbers derive from these counters.

    Lists have an entry for every prompt of the batch; that of a row which has left it (``RowChanges``) is empty or 0.

    The first step of a decode is the prefill, which commits the first token(s), in our loop exactly one. With
    continuous batching (``Refillable``) every step that reads new prompts for some rows while the others wait is a
    prefill too.

    Attributes:
        tokens: per row, the ids committed in this round, in order; empty for a row that is at its limit or waits.
        drafted: per row, draft nodes that were judged.
        accepted: per row, draft tokens that were kept, without the bonus token.
        layers: per row, layers run per committed token over layers of the target; 1.0 unless layers were skipped.
        depth: per row, nodes on the longest drafted path; equal to ``drafted`` for a chain.
        nodes: M of the target pass, padding and auxiliary nodes included.
        target_passes: forward passes of the target in this round.
        draft_passes: forward passes of the drafter in this round.
        draft_ns: wall time spent proposing, or None where it was not measured.
        pass_ns: time of the target's passes and of the rule that judges them, on a GPU by events, elsewhere by the
            clock; None where it was not measured.
        at_ns: ``time.perf_counter_ns()`` at which the tokens became available, set only where one call makes several
            steps; otherwise the runner reads the clock.
        admitted: rows whose next prompt was read in this step, which did nothing else; empty in any other step.
        rows: rows computed in the pass of the target, those included that have finished and not left yet; None where
            the method does not say.
        kept: in a prefill, tokens of the prompt that were not read again (``PrefixCaching``).
    """

    tokens: list[list[int]]
    drafted: list[int]
    accepted: list[int]
    layers: list[float]
    depth: list[int]
    nodes: int = 1
    target_passes: int = 1
    draft_passes: int = 0
    draft_ns: int | None = None
    pass_ns: int | None = None
    at_ns: int | None = None
    admitted: frozenset[int] = frozenset()
    rows: int | None = None
    kept: int = 0

    @classmethod
    def undrafted(cls, tokens: list[list[int]], layers: float = 1.0, **counters: Any) -> Step:
        """A step that judged no draft; every row ran the same share of the layers."""
        none = [0] * len(tokens)
        return cls(tokens, drafted=none, accepted=none, layers=[layers] * len(tokens), depth=none, **counters)


Prompts = Mapping[int, Tensor]  # ids by row
RowChanges = Mapping[int, Tensor | None]  # by row, the prompt that begins before the next step; None: its text ended
Rounds = abc.Generator[Step, RowChanges | None, None]


class Decoder(ABC):
    """A generation method bound to a target model.

    Class attributes say what a method needs, so that a run can be refused before a model is loaded. Constructors take
    the target model and ``sampling`` first.

    Attributes:
        guarantee: what the method promises; on the class with default settings, on an object with its own.
        family: kind of method.
        max_batch: most rows; None: any number, or ``most_rows`` says it.
        needs_gpu: runs on CUDA only.
        needs_hf: decodes with the Hugging Face model, which then stays loaded.
        continuous_batching: rows can be given new prompts (``Refillable``).
        model_kind: models it decodes; "any" is causal or seq2seq, "masked" is a masked diffusion model.
        greedy_only: refuses a temperature under all settings.
        supports_top_k: can sample with top-k.
        one_pass: writes a text in a number of passes that does not grow with its length.
        speed_only: its speed does not depend on the values of the weights, as it drafts and skips nothing, or has a
            set acceptance.
        trainable: uses a checkpoint that ``bench.train`` makes; the constructor then has an argument ``checkpoint``.
        checkpoint_of: the setting that names the method whose checkpoint is used.
        instead_of_checkpoint: settings that replace a checkpoint.
        min_warmup: warm-up prompts that ``acceptance_warning`` needs.
        checked_with: settings for the check of a checkpoint, where the default ones would hardly use it.
        parallel: decodes a target that is spread over several devices (``model.parallel``): it runs whole passes only.
        paper: "Authors year, arXiv number"; several separated by semicolons.
        needs: what the first run requires, for generated tables.
        libraries: optional distributions that it decodes with, and the extra of this project that installs each. Their
            versions are recorded.
    """

    guarantee: Guarantee
    family: ClassVar[Family] = "other"
    max_batch: ClassVar[int | None] = None
    needs_gpu: ClassVar[bool] = False
    needs_hf: ClassVar[bool] = False
    continuous_batching: ClassVar[bool] = False
    model_kind: ClassVar[ModelKind] = "any"
    greedy_only: ClassVar[bool] = False
    supports_top_k: ClassVar[bool] = True
    one_pass: ClassVar[bool] = False
    speed_only: ClassVar[bool] = False
    trainable: ClassVar[bool] = False
    checkpoint_of: ClassVar[str] = "name"
    instead_of_checkpoint: ClassVar[tuple[str, ...]] = ()
    min_warmup: ClassVar[int] = 0
    checked_with: ClassVar[Mapping[str, Any]] = {}
    parallel: ClassVar[bool] = False
    paper: ClassVar[str] = ""
    needs: ClassVar[Needs] = "nothing"
    libraries: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def decode(self, prompts: list[Int[Tensor, "T"]], limit: int, rng: Generator) -> Iterator[Step]:
        """Decode ``prompts`` in lockstep, one row each, and yield one ``Step`` per round.

        The generator does not end before every row has committed ``limit`` tokens; the runner stops it earlier when all
        rows have produced an end-of-sequence token. A row at its limit commits nothing more. Its last step may exceed
        the limit; the runner trims it.

        If the result is a generator, the runner sends it the rows whose texts have ended, ``{row: None}``, in place of
        ``next``. Nothing more is wanted of them, so a decoder can drop them from its batch and compute only the others,
        whose texts must not depend on it; of what is sampled, the distribution. One that ignores what is sent computes
        all rows to the end.

        Args:
            prompts: token ids, one 1-D integer tensor of length >= 1 per row, ragged.
            limit: most tokens wanted per row; the method sizes its buffers by it.
            rng: the only source of randomness, on the target's device.
        """

    @classmethod
    def needs_checkpoint(cls, settings: Mapping[str, Any]) -> bool:
        """Whether a ``method`` group that names no checkpoint requires one."""
        return cls.trainable and all(settings.get(key) is None for key in ("checkpoint", *cls.instead_of_checkpoint))

    @classmethod
    def most_rows(cls, settings: Mapping[str, Any]) -> int | None:
        """Most rows of a ``method`` group; None: any number."""
        return cls.max_batch

    @classmethod
    def needs_draft_model(cls, settings: Mapping[str, Any]) -> bool:
        """Whether a ``method`` group that names no draft model requires one."""
        return cls.needs == "a draft model" and settings.get("draft_model") is None

    @classmethod
    def replays_passes(cls, settings: Mapping[str, Any]) -> bool:
        """Whether its passes of a decoder-only target can be replayed as CUDA graphs, as the baseline's are.

        One that runs layers in portions cannot; its run is measured without graphs, in both arms.
        """
        return True

    @classmethod
    def missing_library(cls) -> str | None:
        """Which of ``libraries`` is not installed, and how to install it; None: none is missing."""
        for name, extra in cls.libraries.items():
            try:
                metadata.version(name)
            except metadata.PackageNotFoundError:
                return (
                    f"The package {name}, which is optional, must be installed. Install it: "
                    f"pip install 'decodebench[{extra}]'"
                )
        return None

    def memory(self) -> dict[str, int | None]:
        """Bytes that the method holds besides the target, by name; read after the measurement."""
        return {}

    @property
    def draft_weights(self) -> str | None:
        """What the weights of a trained network that drafts are rounded to; None: they are not, or there is none."""
        return None

    @property
    def most_nodes(self) -> int:
        """Nodes per row of its widest pass of the target after the prompts are read."""
        return 1

    @property
    def states_read(self) -> int:
        """States per token of the prompts that it is given: the last ones, and those of the layers it names."""
        return 0

    def planned_caches(self, rows: int, longest: int, limit: int) -> dict[str, int]:
        """Bytes of the caches of a decode, from sizes alone: ``cache`` of the target, ``draft_cache`` of a drafter.

        Args:
            rows: of the batch.
            longest: tokens of the longest prompt.
            limit: see ``decode``.

        Returns:
            Nothing where they are not known; the baseline's are counted in any case.
        """
        return {}

    def stats(self) -> dict[str, Any]:
        """Plain JSON values about the work so far that no step contains."""
        return {}

    def acceptance_warning(self, rates: Sequence[Sequence[float]]) -> str | None:
        """A warning if acceptance is implausible for this checkpoint.

        Args:
            rates: per prompt of the warm-up, how often each position of its drafts was accepted.
        """
        return None

    def reference_model(self) -> CausalLM | None:
        """The model whose greedy text this decoder writes exactly, if that is not the target."""
        return None


def generate(
    decoder: Decoder,
    prompts: Sequence[Int[Tensor, "_"]],
    limit: int,
    eos_ids: Collection[int] = (),
    rng: Generator | None = None,
    watch: Callable[[Step, Collection[int]], None] = lambda step, rows: None,
) -> list[list[int]]:
    """Run a decoder to the end of every text.

    Args:
        decoder, prompts, limit: see ``Decoder.decode``.
        eos_ids: a text ends with the first of these.
        rng: None: seeded with 0.
        watch: called after every step with the rows whose texts had not ended before it.

    Returns:
        Per prompt, the ids up to the limit or the end, which is included.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(texts)))
    rng = Generator(prompts[0].device).manual_seed(0) if rng is None else rng
    steps, ended = decoder.decode(list(prompts), limit, rng), dict[int, None]()
    while open_rows and (step := next_step(steps, ended)) is not None:
        watch(step, open_rows)
        ended = {}
        for row in tuple(open_rows):
            new = step.tokens[row][: limit - len(texts[row])]
            end = next((place + 1 for place, token in enumerate(new) if token in eos_ids), None)
            texts[row] += new[:end]
            if end is not None or len(texts[row]) == limit:
                open_rows.remove(row)
                ended[row] = None
    return texts


def next_step(steps: Iterator[Step], changes: RowChanges) -> Step | None:
    """The next step of a decode after sending it what changed; None at its end. Only a generator receives it."""
    if not (changes and isinstance(steps, abc.Generator)):
        return next(steps, None)
    try:
        step: Step = steps.send(changes)
    except StopIteration:
        return None
    return step


class Refillable(ABC):
    """Mix-in: rows can be given a new prompt while others continue (continuous batching, Orca, Yu et al. 2022).

    ``Decoder.continuous_batching`` says whether a class that inherits this supports it.
    """

    @abstractmethod
    def decode_refilled(self, prompts: list[Int[Tensor, "T"]], limit: int, rng: Generator, longest: int) -> Rounds:
        """As ``Decoder.decode``, but new prompts may be sent in place of ``next``: each replaces the text of its row.

        They are read at once, in a step of their own (``Step.admitted``) that commits their first tokens. The text of a
        row does not depend on what it or any other row held before. A row whose text was said to have ended, as with
        ``Decoder.decode``, takes no prompt any more.

        Args:
            prompts: the first prompt of each row.
            limit: most tokens wanted per prompt.
            rng: see ``Decoder.decode``.
            longest: tokens of the longest prompt that will be sent; the method sizes its buffers by it.
        """


class PrefixCaching:
    """Mix-in: the last text is kept, and a prompt that begins like it is read from where the two differ.

    So a turn of a conversation costs what is new in it. Servers keep the texts of many users so (RadixAttention, Zheng
    et al. 2024, arXiv 2312.07104); here it is one text, of a batch of one row.

    Attributes:
        keeps_prefix: whether it is kept; ``Step.kept`` says how much of it a prompt used.
    """

    keeps_prefix: bool = False


def common_prefix(text: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of a prompt, at most all but its last one, that a kept text begins with."""
    most = min(len(text), len(prompt) - 1)
    return next((place for place in range(most) if text[place] != prompt[place]), most)


class Rehearsed(ABC):
    """Mix-in: a decoder that may see the prompts before the clock starts; a measuring device, not a method."""

    @abstractmethod
    def rehearse(self, prompts: Sequence[Int[Tensor, "T"]], limit: int) -> None:
        """Prepare to decode these prompts; ``decode`` does so itself where it was not called."""


class Calibrator(ABC):
    """Chooses a threshold by the losses of texts on calibration prompts.

    Attributes:
        risk_target: settings; the run reads ``against``, ``metric``, ``corpus``, ``prompts``, ``seed``.
        thresholds: tried in this order, the safest first; all below 1, which is the full model.
        fewest: least number of prompts.
        tolerance: allowed expected loss.
        error_rate: allowed probability of missing it.
    """

    risk_target: Any
    thresholds: Sequence[float]
    fewest: int
    tolerance: float
    error_rate: float

    @abstractmethod
    def planned(self) -> int:
        """How many prompts to take if the settings leave it open."""

    @abstractmethod
    def complete(self, losses: Float[np.ndarray, "prompts tried"]) -> bool:
        """Whether the losses at the thresholds tried so far suffice for a choice."""

    @abstractmethod
    def choose(self, losses: Float[np.ndarray, "prompts tried"]) -> dict[str, Any]:
        """Plain JSON values for the record, among them ``threshold``, the choice, and ``explanation``, a sentence."""

    @abstractmethod
    def naive(self, losses: Float[np.ndarray, "prompts tried"]) -> float:
        """The lowest threshold down to which the mean loss is within the tolerance: a control without a guarantee."""

    @abstractmethod
    def promising(self, tolerance: float) -> Calibrator:
        """The same for another tolerance."""


class Calibrated(ABC):
    """Mix-in: a decoder with a threshold that the benchmark finds before the run, if ``calibrator`` is not None."""

    calibrator: Calibrator | None = None

    @abstractmethod
    def set_threshold(self, threshold: float) -> None:
        """Decode with this threshold from now on, as if the decoder had been made with it; 1 is the full model."""


class CostAware(ABC):
    """Mix-in: a decoder that sizes its drafts by the times of passes, which are measured before it is used."""

    @property
    @abstractmethod
    def costs_wanted(self) -> int:
        """Most nodes per row of a pass whose time it wants to know; 0: none, or it knows them."""

    @abstractmethod
    def use_costs(self, costs: Sequence[Sequence[int | float]]) -> None:
        """Size drafts by these from now on: pairs of nodes per row and time, see ``methods.speculative.budget.Costs``.

        The pair of 0 nodes is the time of drafting, with the settings that the decoder had until now.
        """

    @abstractmethod
    def forget_costs(self) -> None:
        """Want to know them again, and draft all nodes until then; a tree that was chosen by them stays."""
