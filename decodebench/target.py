"""Models ready to decode."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.config import compose, instantiate, overrides
from bench.config.schema import HardwareConfig, RunConfig
from bench.errors import UserError
from bench.measure import instruments, run
from bench.models import in_memory, loading
from bench.models.source import Loaded
from bench.tasks import given
from bench.utils import machine
from methods.decoder import Decoder
from methods.engine.causal_lm import CausalLM


@dataclass(eq=False)
class Target:
    """A model with its tokenizer, made by ``load``.

    Attributes:
        loaded: the model in the form of the engine, and what identifies it.
        group: the ``model`` group of its configuration.
        hardware: the ``hardware`` group.
        model_bytes: memory that loading it took.
    """

    loaded: Loaded
    group: dict[str, Any]
    hardware: HardwareConfig
    model_bytes: int = 0
    _last: tuple[Any, Decoder] | None = field(default=None, repr=False)  # the decoder of the last generation

    @property
    def model(self) -> CausalLM:
        """The model in the form of the engine; its ``hf`` is the one of transformers if that was in memory before."""
        return self.loaded.lm

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.loaded.tokenizer

    @property
    def name(self) -> str:
        """As passed to ``load``; ``module`` for a model in memory."""
        return self.loaded.name

    @property
    def revision(self) -> str | None:
        """Commit of the hub, or digest of the weights."""
        return self.loaded.revision

    def __repr__(self) -> str:
        kind = str(self.model.dtype).removeprefix("torch.")
        return f"Target({self.name!r}, revision={self.revision!r}, {kind} on {self.model.device})"


DraftModels = dict[str, Target]


def load(
    target: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int | None = None,
) -> Target:
    """Load a model for ``generate`` and ``benchmark``.

    Args:
        target: a name (``python -m bench list models``), a hub id, a folder, or a language model of transformers. The
            latter is used in its own type and place, is put into evaluation mode and stays usable; load it again after
            you change its weights.
        tokenizer: of a model in memory, and of no other.
        dtype: type of the weights, as torch's or its name; ``auto`` is 16 bit where the processor calculates in it.
        threads: of a CPU; None: one per physical core.

    Raises:
        UserError: no such model, a family that is not proven, no tokenizer, or hardware that is not here.
    """
    name = os.fspath(target) if isinstance(target, str | os.PathLike) else None
    words = [f"hardware.device={device}", f"hardware.dtype={str(dtype).removeprefix('torch.')}"]
    words += [] if threads is None else [f"hardware.threads={threads}"]
    cfg = compose.compose(words if name is None else [*words, *_model_words(name)])
    instantiate.check(cfg)
    if name is not None and tokenizer is not None:
        raise UserError(f"tokenizer is for a model in memory, and {name} has its own. Leave it out.")
    if name is None and (device, dtype) != ("auto", "auto"):
        raise UserError("A model in memory keeps its device and dtype. Convert it before: model.to(...).")
    machine.set_threads(cfg.hardware.threads)
    hardware = asdict(cfg.hardware)
    loading.settle_libraries(hardware)
    before = instruments.settled_bytes() or 0
    if name is None:
        loaded = loading.load_module(target, tokenizer, hardware)
        lm, size = loaded.lm, _grown(before) + _size(loaded.lm.hf)
        found: Any = {"device": lm.device.type, "dtype": str(lm.dtype).removeprefix("torch.")}  # a draft model's, too
        return Target(loaded, dict(in_memory.GROUP), replace(cfg.hardware, **found), size)
    loaded = loading.load(cfg.model, hardware, cfg.paths)
    return Target(loaded, cfg.model, cfg.hardware, _grown(before))


def _grown(before: int) -> int:
    """Bytes by which this process has grown; 0 where the system does not report it."""
    return (instruments.settled_bytes() or before) - before


def _size(module: PreTrainedModel | None) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters()) if module else 0


def as_target(target: Any) -> Target:
    """A target as it is, or a name loaded with the defaults."""
    return target if isinstance(target, Target) else load(target)


def _model_words(name: str) -> list[str]:
    if name in compose.groups()["model"]:
        return [f"model={name}"]
    return ["model=hf", f"model.name={overrides.written(name)}"]


def configure(
    target: Target, method: str, options: Mapping[str, Any], words: list[str]
) -> tuple[RunConfig, DraftModels]:
    """The checked configuration of a run, and the draft models in it that are loaded already.

    Args:
        options: settings of the method.
        words: other settings, as on the command line.

    Raises:
        UserError: an unknown method or setting, or a value of the wrong type.
    """
    cfg = compose.compose([f"method={overrides.written(method)}", *words, *_method_words(options)])
    cfg = replace(cfg, model=target.group, hardware=target.hardware)
    if not any(word.startswith("dataset=") for word in words):
        cfg = replace(cfg, dataset=dict(given.GROUP))
    instantiate.check(cfg)
    machine.set_threads(cfg.hardware.threads)
    drafts = {_draft_name(value): value for value in options.values() if isinstance(value, Target)}
    if instantiate.needs_hf(cfg.method):  # the others are loaded again, by their name
        drafts = {name: draft for name, draft in drafts.items() if draft.model.hf is not None}
    return cfg, drafts


def with_hf(target: Target, cfg: RunConfig) -> Loaded:
    """The model; loaded again where the method needs that of transformers beside it."""
    if not instantiate.needs_hf(cfg.method) or target.model.hf is not None:
        return target.loaded
    return loading.load(cfg.model, asdict(cfg.hardware), cfg.paths, keep_hf=True)


def decoder(target: Target, cfg: RunConfig, drafts: DraftModels) -> Decoder:
    """The decoder of a configuration; that of the last call if nothing but the prompts has changed."""
    key = (cfg.method, cfg.sampling, cfg.paths, {name: draft.revision for name, draft in drafts.items()})
    if target._last is None or target._last[0] != key:
        loaded = {name: draft.loaded for name, draft in drafts.items()}
        target._last = key, run.build_method(cfg, with_hf(target, cfg), loaded)[0]
    return target._last[1]


def _method_words(options: Mapping[str, Any], prefix: str = "method") -> Iterator[str]:
    """Settings as on the command line, those of groups by dotted keys."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _method_words(value, f"{prefix}.{key}")
        else:
            shown = _draft_name(value) if isinstance(value, Target) else value
            shown = os.fspath(shown) if isinstance(shown, os.PathLike) else shown
            yield f"{prefix}.{key}={overrides.written(shown)}"


def _draft_name(draft: Target) -> str:
    """Models in memory share one name, so that they are named by their digest, too."""
    return f"{draft.name}-{draft.revision}" if draft.name == in_memory.NAME else draft.name
