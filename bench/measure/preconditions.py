"""Why a configuration cannot run on this machine, found without loading a model: what a sweep drops and explains.

A class says what it needs: ``max_batch`` (most rows), ``needs_gpu``, a constructor argument ``part``, sampling it
refuses; a data set and a source of models say their ``kind``. What only loading shows, only the run itself finds out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from bench.config import compose, instantiate
from bench.config.schema import RunConfig, SamplingConfig
from bench.errors import UserError
from bench.models import artifacts, loading
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import MissingPart
from methods.engine.seq2seq_lm import Seq2SeqLM

_KINDS = {"causal": "a causal model", "seq2seq": "an encoder-decoder model"}
_CAUSAL_SOURCES = ("bench.models.embedded.", "bench.models.random_weights.")


class Obstacles:
    """Looks at one configuration after another and remembers what it found about their parts."""

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def of(self, cfg: RunConfig) -> str | None:
        """The first reason why this cannot run, or None where none is known."""
        groups = cfg.to_dict()
        for look, reads in _LOOKS.items():
            key = json.dumps([look.__name__, *(groups[name] for name in reads)], sort_keys=True)
            if key not in self._known:
                self._known[key] = look(cfg)
            if found := self._known[key]:
                return found
        return None


def _batch(cfg: RunConfig) -> str | None:
    most = getattr(_method(cfg), "max_batch", None)
    if most is None or cfg.batch_size <= most:
        return None
    return f"batch_size={cfg.batch_size}, and {cfg.method['name']} takes {most} row{'' if most == 1 else 's'} at a time"


def refilling(cfg: RunConfig) -> str | None:
    """Why rows cannot be refilled as asked, and what to change."""
    if not cfg.measure.refill:
        return None
    if cfg.batch_size == 1:
        return "measure.refill=true came with batch_size=1; there must be rows that go on beside one. Raise batch_size."
    if getattr(_method(cfg), "refills", False):
        return None
    able = [name for name in compose.groups()["method"] if _refills(name)]
    return (
        f"measure.refill=true came with method={cfg.method['name']}, whose rows cannot begin a new text while others "
        f"go on. Choose a method that can: {', '.join(able)}."
    )


def _refills(method: str) -> bool:
    group = yaml.safe_load(compose.config_file("method", method).read_text(encoding="utf-8"))
    return bool(getattr(instantiate.locate(group["_target_"]), "refills", False))


def _device(cfg: RunConfig) -> str | None:
    try:
        device, _ = loading.resolve_hardware(cfg.to_dict()["hardware"])
    except UserError as error:
        return str(error)
    if getattr(_method(cfg), "needs_gpu", False) and device.type != "cuda":
        return f"{cfg.method['name']} needs a GPU, and this would run on {device.type}"
    return None


def _kind(cfg: RunConfig) -> str | None:
    wanted, found = getattr(instantiate.locate(cfg.dataset["_target_"]), "kind", "any"), _kind_of_model(cfg.model)
    if found is None or wanted in ("any", found):
        return None
    return f"{cfg.dataset['name']} is written for {_KINDS[wanted]}, and {cfg.model['name']} is {_KINDS[found]}"


def _made(cfg: RunConfig) -> str | None:
    """A model of our own that is not trained yet, or one that would draft for itself."""
    from bench.models.trained import TrainedModel

    draft = cfg.method.get("draft_model")
    if draft is not None and draft == cfg.model["name"]:
        return f"{draft} would draft for itself"
    for group in (cfg.model, loading.named(draft) if isinstance(draft, str) else {}):
        if group.get("_target_") == f"{TrainedModel.__module__}.{TrainedModel.__name__}":
            try:
                instantiate.build_model(group).find(Path(cfg.paths.cache))
            except UserError as error:
                return str(error)
    return None


def _order(cfg: RunConfig) -> str | None:
    """Diffusion models and what decodes them go together only."""
    fills, masked = (
        getattr(instantiate.locate(part["_target_"]), "denoises", False) for part in (cfg.method, cfg.model)
    )
    if fills == masked:
        return None
    verb = "fills in masks" if fills else "writes from left to right"
    return f"{cfg.method['name']} {verb}, and {cfg.model['name']} is {'a' if masked else 'no'} diffusion model"


def _kind_of_model(model: dict[str, Any]) -> str | None:
    """None where only the model's own files tell and they are not on this machine."""
    if str(model["_target_"]).startswith(_CAUSAL_SOURCES):
        return "causal"
    if model["_target_"] != "bench.models.hub.HubModel":
        return getattr(instantiate.locate(model["_target_"]), "kind", None)
    from transformers import AutoConfig

    from bench.models.hub import is_seq2seq

    try:
        config = AutoConfig.from_pretrained(model["name"], revision=model.get("revision"), local_files_only=True)
    except (OSError, ValueError):
        return None
    return "seq2seq" if is_seq2seq(config) else "causal"


def _part(cfg: RunConfig) -> str | None:
    """Asks the class itself, for some do with their settings what others need a part for."""
    if artifacts.find(cfg.method, str(cfg.model["name"]), None, cfg.paths) is not None:
        return None
    kind = Seq2SeqLM if getattr(instantiate.locate(cfg.dataset["_target_"]), "kind", "any") == "seq2seq" else CausalLM
    error = _refusal(cfg, cfg.sampling, kind.__new__(kind))  # a target that nothing else is known of
    return str(error) if error is not None and isinstance(error.__cause__, MissingPart) else None


def _sampling(cfg: RunConfig) -> str | None:
    """Refuses at this temperature, on a tiny model, what it takes greedily."""
    if cfg.sampling.temperature == 0:
        return None
    from bench.contract import checks

    target = checks.tiny_target()
    error = _refusal(cfg, cfg.sampling, target)
    return str(error) if error and _refusal(cfg, SamplingConfig(), target) is None else None


def _refusal(cfg: RunConfig, sampling: SamplingConfig, target: CausalLM) -> UserError | None:
    """What the method says to being built; other errors than its own are of the stand-in, and say nothing."""
    try:
        instantiate.build_decoder(cfg.method, target, sampling, lambda _: target, None)
    except UserError as error:
        return error
    except Exception:
        return None
    return None


def _method(cfg: RunConfig) -> type:
    return instantiate.locate(cfg.method["_target_"])


_LOOKS: dict[Callable[[RunConfig], str | None], tuple[str, ...]] = {  # and what each of them reads
    _batch: ("method", "batch_size"),
    refilling: ("method", "batch_size", "measure"),
    _device: ("method", "hardware"),
    _kind: ("dataset", "model"),
    _made: ("method", "model", "paths"),
    _order: ("method", "model"),
    _part: ("method", "model", "paths"),
    _sampling: ("method", "sampling"),
}
