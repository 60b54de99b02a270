"""What a source of models yields, and a model ready to decode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from methods.engine.causal_lm import CausalLM
    from methods.engine.compiled_layers import Compiled


class Read(NamedTuple):
    """What a source yields: a model on the CPU, its tokenizer, and what identifies the two."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    revision: str | None
    sha256: str | None
    languages: tuple[str, str] | None = None


@runtime_checkable
class Source(Protocol):
    """One way to get a model; the ``model`` group of the config names a class of this kind."""

    def read(self, dtype: torch.dtype, cache: Path) -> Read:
        """Read weights and tokenizer.

        Args:
            dtype: type of the weights.
            cache: root of what was fetched earlier.

        Raises:
            UserError: they are not here and not to be had, or are no model this suite can stand for.
        """
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to decode, and what identifies it.

    Attributes:
        revision: commit of the hub, hash of the files of a folder, or seed of random weights.
        sha256: of the weights where they are files we have; None where the hub's commit says it all.
        languages: what a translation model reads and writes (``en``, ``de``), where its card or its tokenizer tells.
        compiled: what was compiled of it, if anything was.
        graphs_left: CUDA graphs are not used, as the method runs layers in portions and both arms are to be alike.
    """

    lm: CausalLM
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str | None
    sha256: str | None
    languages: tuple[str, str] | None = None
    compiled: Compiled | None = None
    graphs_left: bool = False

    @property
    def kind(self) -> Literal["causal", "seq2seq"]:
        """Whether it continues its prompt, or reads it and writes something else."""
        from methods.engine.seq2seq_lm import Seq2SeqLM

        return "seq2seq" if isinstance(self.lm, Seq2SeqLM) else "causal"

    @property
    def data_kind(self) -> Literal["causal", "seq2seq"]:
        """Whose data sets it is measured on: a diffusion model that translates reads what an encoder would."""
        return "seq2seq" if self.denoises and self.languages else self.kind

    @property
    def denoises(self) -> bool:
        """Whether it fills in masks, instead of writing from left to right."""
        from methods.engine.masked_lm import MaskedLM

        return isinstance(self.lm, MaskedLM)
