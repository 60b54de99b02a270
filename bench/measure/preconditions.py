"""Why a run cannot be measured: ``check`` before anything is loaded, ``check_loaded`` with the model at hand.

A decoder class says what it needs (``methods.decoder.Decoder``); data sets and sources of models say their ``kind``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from bench.config import compose, instantiate, league
from bench.config.schema import RunConfig, parallel_of
from bench.errors import UserError
from bench.models import artifacts, in_memory, loading
from bench.models.architectures import ARCHITECTURES
from bench.models.source import Loaded
from bench.scoring import sandbox
from methods.decoder import Calibrated, Decoder, PrefixCaching

_KINDS = {"causal": "a causal model", "seq2seq": "an encoder-decoder model", "masked": "a masked diffusion model"}
_HUB = "bench.models.hub.HubModel"
_CAUSAL_SOURCES = ("bench.models.embedded.", "bench.models.random_weights.")
_OTHER_KIND = "Choose another data set (python -m bench list datasets), or a model with model=hf model.name=HUB_ID."
Known = dict[str, str | None]
T = TypeVar("T")


def check(cfg: RunConfig, known: Known | None = None, *, speed_only: bool = False) -> list[str]:
    """What speaks against a configuration on this machine; needs neither model nor data.

    Args:
        cfg: the run.
        known: findings about configurations with the same parts; pass one dictionary for all runs of a sweep.
        speed_only: only times are reported, so the weights of the model may be random.
    """
    known = {} if known is None else known
    groups = cfg.to_dict()
    reasons: list[str] = []
    for look, reads in _LOOKS.items():
        if (speed_only and look is _weights) or (reasons and look is _checkpoint):
            continue
        key = json.dumps([look.__name__, *(groups[name] for name in reads)], sort_keys=True)
        if key not in known:
            known[key] = look(cfg)
        if (found := known[key]) is not None:
            reasons.append(found)
    return reasons


def check_prompts(cfg: RunConfig, count: int) -> list[str]:
    """Whether there are enough prompts for continuous batching."""
    if not cfg.measure.refill:
        return []
    rows, queue = cfg.batch_size, cfg.measure.refill_queue
    if count <= rows:
        return [
            f"measure.refill=true needs more prompts than rows, got {count} prompts for batch_size={rows}. Raise "
            "dataset.limit, lower batch_size, or set measure.refill=false."
        ]
    if queue is not None and queue <= rows:
        return [
            f"measure.refill_queue must be larger than batch_size={rows}, got {queue}; several times as many keep the "
            "share of its end small. Raise it, or leave it out for one queue of all prompts."
        ]
    return []


def check_loaded(cfg: RunConfig, task: Any, loaded: Loaded) -> list[str]:
    """What speaks against a run with this model, where only its files tell."""
    kind = "masked" if loaded.denoises else loaded.kind
    found = _mismatches(cfg, getattr(task, "kind", "any"), kind, loaded.data_kind, loaded.name)
    return [*found, _read_whole(cfg)] if cfg.measure.prefix_cache and kind != "causal" else found


def require(reasons: Iterable[str]) -> None:
    """Refuse a run.

    Raises:
        UserError: there are reasons to.
    """
    if text := " ".join(reasons):
        raise UserError(text)


def by_reason(refused: Iterable[tuple[str, str, T]]) -> Iterator[tuple[str, list[T]]]:
    """What is refused for one reason together; a reason that names the method is one for all methods it holds for.

    Args:
        refused: name of the method, reason, and what is to be listed.
    """
    groups: dict[str, list[tuple[str, T]]] = {}
    for method, reason, item in refused:
        groups.setdefault(reason.replace(f"method={method}", "method=..."), []).append((reason, item))
    for shared, alike in groups.items():
        same = len({reason for reason, _ in alike}) == 1
        yield alike[0][0] if same else shared, [item for _, item in alike]


# -------------------------------------------------------------------------------------------------- before loading


def _folder(cfg: RunConfig) -> str | None:
    """Where the results go: a folder, or a place where one can be made."""
    place = Path(cfg.paths.results).absolute()
    above = next(path for path in (place, *place.parents) if path.exists() or path.is_symlink())
    if above.is_dir() and os.access(above, os.W_OK) and not str(above).startswith("/proc"):
        return None
    return f"paths.results must be a folder that can be written, got {cfg.paths.results}. Set paths.results=FOLDER."


def _method(cfg: RunConfig) -> type[Decoder]:
    return instantiate.method_class(cfg.method)


def _module(cfg: RunConfig) -> str | None:
    """Models of the project ship no module; of others the files tell, when they are loaded."""
    if _method(cfg).needs != "a module in the model" or cfg.model["_target_"] == _HUB:
        return None
    return (
        f"method={cfg.method['name']} needs a model that ships a module for multi-token prediction, got "
        f"{cfg.model['name']}. Choose one, such as model=hf model.name=zai-org/GLM-4.5-Air."
    )


def _batch(cfg: RunConfig) -> str | None:
    method = _method(cfg)
    most = method.most_rows(cfg.method)
    if most is None or cfg.batch_size <= most:
        return None
    why = " That is due to its other settings." if method.max_batch is None else ""
    return f"batch_size must be at most {most} for method={cfg.method['name']}, got {cfg.batch_size}.{why}"


def _refill(cfg: RunConfig) -> str | None:
    if not cfg.measure.refill:
        return None
    if cfg.batch_size == 1:
        return "measure.refill=true needs a batch_size of at least 2, got 1. Raise it, or set measure.refill=false."
    if _method(cfg).continuous_batching:
        return None
    able = [name for name in compose.groups()["method"] if _can_refill(compose.config_file("method", name))]
    return (
        f"method={cfg.method['name']} does not support continuous batching. Choose one of {', '.join(able)}, or set "
        "measure.refill=false."
    )


@cache
def _can_refill(method: Path) -> bool:
    group = yaml.safe_load(method.read_text(encoding="utf-8"))
    return instantiate.method_class(group).continuous_batching


def _prefix_cache(cfg: RunConfig) -> str | None:
    """One row has one last text."""
    if not cfg.measure.prefix_cache:
        return None
    instead = "or set measure.prefix_cache=false."
    if cfg.batch_size > 1:
        return f"measure.prefix_cache=true needs batch_size=1, got {cfg.batch_size}. Set it, {instead}"
    keeps = issubclass(_method(cfg), PrefixCaching) and _kind_of_model(cfg.model) in ("causal", None)
    return None if keeps else _read_whole(cfg)


def _read_whole(cfg: RunConfig) -> str:
    what = f"method={cfg.method['name']} with model={cfg.model['name']}"
    return f"{what} reads every prompt whole, and measure.prefix_cache must be false, got true. Leave it out."


def _parallel(cfg: RunConfig) -> str | None:
    size = parallel_of(cfg.model)
    if size == 1 or _method(cfg).parallel:
        return None
    return (
        f"method={cfg.method['name']} runs parts of passes, or passes of its own, and needs a target on one device, "
        f"got model.parallel={size}. Set model.parallel=1, or choose a speculative method."
    )


def _device(cfg: RunConfig) -> str | None:
    try:
        device, _ = loading.resolve_hardware(cfg.to_dict()["hardware"])
    except UserError as error:
        return str(error)
    if _method(cfg).needs_gpu and device.type != "cuda":
        return (
            f"method={cfg.method['name']} needs a GPU, got device {device.type}. Use a machine with an NVIDIA GPU, or "
            "another method."
        )
    return None


def _libraries(cfg: RunConfig) -> str | None:
    missing = _method(cfg).missing_library()
    return missing and f"method={cfg.method['name']} cannot run here. {missing}"


def _kind(cfg: RunConfig) -> str | None:
    kind = text_kind = _kind_of_model(cfg.model)
    if getattr(instantiate.locate(cfg.model["_target_"]), "denoises", False):
        kind = "masked"
    elif kind == "masked":
        text_kind = None  # whether it translates is in its card, which is read with it
    wanted = getattr(instantiate.locate(cfg.dataset["_target_"]), "kind", "any")
    found = _mismatches(cfg, wanted, kind, text_kind, str(cfg.model["name"]))
    return " ".join(found) or None


def _mismatches(cfg: RunConfig, data_kind: str, kind: str | None, text_kind: str | None, model: str) -> list[str]:
    """Of model and data set, and of model and method.

    Args:
        data_kind: which models the data set is for.
        kind: what the model is; None: unknown.
        text_kind: the same for the data set, to which a diffusion model is like a causal one, or, where it translates,
            like an encoder-decoder.
    """
    found = []
    if text_kind is not None and data_kind not in ("any", text_kind):
        name = cfg.dataset["name"]
        found.append(f"dataset={name} needs {_KINDS[data_kind]}, and {model} is {_KINDS[text_kind]}. {_OTHER_KIND}")
    wanted = _method(cfg).model_kind
    if (wanted == "masked") != (kind == "masked"):
        needed = _KINDS["masked"] if wanted == "masked" else "a model that writes from left to right"
        found.append(
            f"method={cfg.method['name']} needs {needed}, got model={model}. Use method=diffusion with diffusion "
            "models (model=llada_8b, dream_7b, multi30k_masked_diffusion_distilled), and with no others."
        )
    elif kind is not None and wanted not in ("any", kind):
        found.append(f"method={cfg.method['name']} needs {_KINDS[wanted]}, and {model} is {_KINDS[kind]}.")
    return found


def _kind_of_model(model: Mapping[str, Any]) -> str | None:
    """None where only the model's own files tell and they are not on this machine."""
    source = str(model.get("_target_", _HUB))  # a draft model may be a name alone
    if source.startswith(_CAUSAL_SOURCES):
        return "causal"
    if source != _HUB:
        return getattr(instantiate.locate(source), "kind", None)
    from transformers import AutoConfig

    from bench.models.hub import is_seq2seq
    from methods.engine.masked_lm import is_masked

    try:
        config = AutoConfig.from_pretrained(model["name"], revision=model.get("revision"), local_files_only=True)
    except Exception:  # not here, or damaged: loading it will say so
        return None
    if is_masked(config):
        return "masked"
    return "seq2seq" if is_seq2seq(config) else "causal"


def _filled(cfg: RunConfig) -> str | None:
    """Whether prompts that are filled to a length leave room for the answer."""
    if (length := cfg.dataset.get("fill_to")) is None:
        return None
    known = ARCHITECTURES.get(str(cfg.model.get("like") or cfg.model["name"]))
    limits = [cfg.max_context, known.max_positions if known else None]
    context = min((limit for limit in limits if limit is not None), default=None)
    if context is None or length + cfg.max_new_tokens <= context:
        return None
    return (
        f"dataset.fill_to={length} and max_new_tokens={cfg.max_new_tokens} need a context of "
        f"{length + cfg.max_new_tokens:,} tokens, and model={cfg.model['name']} has {context:,}. Lower dataset.fill_to "
        f"to {max(1, context - cfg.max_new_tokens)}, or choose a model with a longer context."
    )


def _models(cfg: RunConfig) -> str | None:
    """A model of this project that is not trained yet, or a draft model that is missing or does not fit."""
    from bench.models.trained import is_trained

    draft = cfg.method.get("draft_model")
    if _method(cfg).needs_draft_model(cfg.method):
        return (
            f"method={cfg.method['name']} needs a draft model with the vocabulary of {cfg.model['name']}, got none. "
            "Set method.draft_model=HUB_ID_OR_FOLDER."
        )
    if draft is not None and draft == cfg.model["name"]:
        return f"method.draft_model must differ from the target, got {draft} for both."
    for group in (cfg.model, loading.named(draft) if isinstance(draft, str) else {}):
        if is_trained(group):
            try:
                instantiate.build_model(group).find(Path(cfg.paths.cache))
            except UserError as error:
                return str(error)
    if not isinstance(draft, str):
        return None
    own, other = _kind_of_model(cfg.model), _kind_of_model(loading.named(draft))
    if own and other and own != other:
        return f"method.draft_model={draft} is {_KINDS[other]}, and {cfg.model['name']} is {_KINDS[own]}."
    return None


def _weights(cfg: RunConfig) -> str | None:
    """A model with the shape of a public architecture and random weights has a speed, and nothing else."""
    if not (like := cfg.model.get("like")):
        return None
    if not _method(cfg).speed_only:
        return random_weights(like, f"method={cfg.method['name']} reports acceptance")
    if scores := instantiate.build_task(cfg.dataset, cfg.paths).scorers:
        return random_weights(like, f"dataset={cfg.dataset['name']} scores answers ({', '.join(scores)})")
    return None


def random_weights(like: str, reason: str) -> str:
    """Why a model with random weights is refused."""
    return (
        f"model.like={like} has random weights, and {reason}. Use it with python -m bench cost, or with "
        "method=autoregressive, oracle or hf_generate on a data set without scores (dataset=demo, dataset=mtbench); "
        "otherwise choose a model with weights."
    )


def _sampling(cfg: RunConfig) -> str | None:
    method, name, sampling = _method(cfg), cfg.method["name"], cfg.sampling
    calibrated = issubclass(method, Calibrated) and (cfg.method.get("calibration") or {}).get("tolerance") is not None
    if sampling.temperature and (method.greedy_only or calibrated):
        what = f"method={name}" + (" with a calibration" if not method.greedy_only else "")
        return f"{what} needs sampling=greedy, got sampling.temperature={sampling.temperature:g}."
    if sampling.top_k and not method.supports_top_k:
        return f"sampling.top_k must be 0 for method={name}, got {sampling.top_k}."
    return None


def _checkpoint(cfg: RunConfig) -> str | None:
    method, name, model = _method(cfg), cfg.method["name"], str(cfg.model["name"])
    if head := league.untrained(cfg.method.get("checkpoint"), cfg.paths.cache):
        return (
            f"The league's {head} is not trained for model={model}. Train it: python -m bench train league only={head}."
        )
    if not method.needs_checkpoint(cfg.method) or artifacts.find(cfg.method, model, None, cfg.paths) is not None:
        return None
    owner = str(cfg.method[method.checkpoint_of])
    shipped = artifacts.shipped(owner)
    hint = f" The project has one for model={', model='.join(shipped)}." if shipped else ""
    unnamed = "hf model.name=FOLDER" if cfg.model == in_memory.GROUP else f"hf model.name={model}"
    chosen = model if model in compose.groups()["model"] else unnamed
    return (
        f"method={name} has no checkpoint for model={model}. Make one: python -m bench train method={owner} "
        f"model={chosen}; or set method.checkpoint=FOLDER.{hint}"
    )


def _code(cfg: RunConfig) -> str | None:
    """Answers that are to be executed need a sandbox."""
    if not cfg.dataset.get("allow_code_execution"):
        return None
    try:
        sandbox.isolation()
    except UserError as error:
        return str(error)
    return None


_LOOKS: dict[Callable[[RunConfig], str | None], tuple[str, ...]] = {  # and the settings that each of them reads
    _folder: ("paths",),
    _module: ("method", "model"),
    _batch: ("method", "batch_size"),
    _refill: ("method", "batch_size", "measure"),
    _prefix_cache: ("method", "model", "batch_size", "measure"),
    _parallel: ("method", "model"),
    _device: ("method", "hardware"),
    _libraries: ("method",),
    _kind: ("method", "dataset", "model"),
    _code: ("dataset",),
    _filled: ("dataset", "model", "max_new_tokens", "max_context"),
    _models: ("method", "model", "paths"),
    _weights: ("method", "dataset", "model", "paths"),
    _sampling: ("method", "sampling"),
    _checkpoint: ("method", "model", "paths"),
}
