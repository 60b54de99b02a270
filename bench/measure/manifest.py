"""What a run is made of, and what its manifest says of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch
import yaml

from bench.config.schema import RunConfig, parallel_of
from bench.measure.interleave import Settings
from bench.measure.memory_plan import Plan, plan
from bench.measure.threshold_calibration import CalibrationSet, Choice
from bench.models.artifacts import Prepared
from bench.models.source import Loaded
from bench.records import lookup
from bench.records.run_folder import Sample
from bench.utils import machine, redact
from methods.decoder import Decoder
from methods.engine.attention_kernels import attention_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import GraphedLM


@dataclass(frozen=True, slots=True)
class Shared:
    """What a configuration becomes, but for the method.

    Attributes:
        loaded: the target with its tokenizer and revision.
        lengths: tokens of every prompt; of later turns the most they can have.
        floor_bytes: memory of the process before the model was loaded.
        gpu_busy: percent, before the model was loaded.
    """

    task: Any
    examples: list[Any]
    loaded: Loaded
    baseline: Decoder
    settings: Settings
    lengths: list[int]
    floor_bytes: int | None
    gpu_busy: float | None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a configuration becomes.

    Attributes:
        shared: with the other methods that are measured in the same go.
        prepared: the trained checkpoint or datastore that the method uses.
        calibration: prompts by which the method's threshold is chosen.
        files: sha256 of files that the method's settings name by a path.
        held_bytes: memory that the method took when it was made.
    """

    shared: Shared
    method: Decoder
    prepared: Prepared | None = None
    calibration: CalibrationSet | None = None
    files: dict[str, str] | None = None
    held_bytes: int = 0


def settings(cfg: RunConfig, loaded: Loaded) -> Settings:
    """What the measuring loop needs to know."""
    end = getattr(loaded.tokenizer, "eos_token_id", None)
    return Settings(
        seed=cfg.seed,
        limit=cfg.max_new_tokens,
        context=min(loaded.lm.max_positions, cfg.max_context or loaded.lm.max_positions),
        apart=loaded.kind == "seq2seq",
        eos_ids=() if cfg.measure.ignore_eos else tuple(loaded.lm.eos_ids) or (() if end is None else (end,)),
        batch_size=cfg.batch_size,
        repeats=cfg.measure.repeats,
        warmup=cfg.measure.warmup,
        refill=cfg.measure.refill,
        refill_queue=cfg.measure.refill_queue,
        prefix_cache=cfg.measure.prefix_cache,
    )


def resolved(parts: Parts) -> dict[str, Any]:
    """Values resolved on this machine that are part of the identity; ``lookup.resolved`` reads them from a manifest."""
    shared = parts.shared
    lm = shared.loaded.lm
    return {
        "part": parts.prepared.sha256 if parts.prepared else None,
        "calibration": parts.calibration.sha256 if parts.calibration else None,
        "files": parts.files,
        "model_revision": shared.loaded.revision,
        "data_revision": shared.task.revision["content"],
        **lookup.machine_of(machine.facts(lm.device)),
        "dtype": str(lm.dtype).removeprefix("torch."),
    }


def manifest(
    cfg: RunConfig, parts: Parts, choice: Choice | None = None, together: Sequence[RunConfig] = ()
) -> dict[str, Any]:
    """All facts that are known before the measurement.

    Args:
        together: the runs that are measured in one go, this one among them.
    """
    shared = parts.shared
    loaded, chosen = shared.loaded, shared.settings
    return redact.tree(
        {
            "started_at": now(),
            "ended_at": None,
            "argv": redact.argv(["bench", *sys.argv[1:]]),
            "environment": redact.environment(os.environ),
            "method": cfg.method,
            **({"measured_with": [other.method["name"] for other in together]} if len(together) > 1 else {}),
            **({"part": parts.prepared.facts()} if parts.prepared else {}),
            **({"calibration": choice.record} if choice else {}),
            **({"files": parts.files} if parts.files else {}),
            "guarantee": parts.method.guarantee.value,
            "family": parts.method.family,
            "one_pass": parts.method.one_pass,
            "model": {
                "name": cfg.model["name"],
                "revision": loaded.revision,
                "sha256": loaded.sha256,
                "weight_bytes": loaded.lm.weight_bytes,
                **_quantised(loaded.lm),
                **({"parallel": size} if (size := parallel_of(cfg.model)) > 1 else {}),
            },
            "dataset": {"name": cfg.dataset["name"], "revision": shared.task.revision},
            "dtype": str(loaded.lm.dtype).removeprefix("torch."),
            "linear": loaded.lm.linear_form,
            **({"draft_weights": form} if (form := parts.method.draft_weights) else {}),
            "attention": attention_kernels(loaded.lm),
            "bytes_read": None,
            **({"kernels": loaded.lm.kernels} if loaded.lm.kernels != "torch" else {}),
            **({"graphs_left": True} if loaded.graphs_left else {}),
            "batch_invariant": loaded.lm.batch_invariant,
            "sampling": asdict(cfg.sampling),
            "measure": asdict(cfg.measure),
            "eos_ids": list(chosen.eos_ids),
            "seed": cfg.seed,
            "max_new_tokens": chosen.limit,
            "context": chosen.context,
            "batch_size": chosen.batch_size,
            "n_prompts": len(shared.lengths),
            "n_pairs": len(shared.lengths) * chosen.repeats,
            "hardware": machine.facts(loaded.lm.device),
            "memory_plan": memory_planned(parts, rows(shared), max(shared.lengths)).to_dict() | {"measured": None},
            "load_average": {"start": machine.load_average(), "end": None},
            "gpu_utilisation": {"start": shared.gpu_busy},
            "gpu_state": {"start": machine.gpu_state(loaded.lm.device), "end": None},
            "versions": machine.versions(parts.method.libraries),
            "git": machine.git_state(),
        }
    )


def rows(shared: Shared) -> int:
    """Rows of the largest batch."""
    return min(shared.settings.batch_size, len(shared.examples))


def memory_planned(parts: Parts, rows: int, longest: int) -> Plan:
    """Memory of a run with so many rows and prompts of at most so many tokens."""
    shared = parts.shared
    lm, limit, decoders = shared.loaded.lm, shared.settings.limit, (parts.method, shared.baseline)
    drawn = getattr(getattr(shared.baseline, "sampling", None), "greedy", True) is False
    return plan(lm, decoders, parts.held_bytes, rows, longest, limit, drawn=drawn)


def config_yaml(cfg: RunConfig) -> str:
    """The composed configuration without the machine's paths and without secrets."""
    public = {key: value for key, value in cfg.to_dict().items() if key != "paths"}
    return str(yaml.safe_dump(redact.tree(public), sort_keys=False, allow_unicode=True))


def after(parts: Parts, before: dict[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Facts that are known after the measurement.

    Args:
        before: the manifest so far.
        samples: of the run.
    """
    own, stats = parts.method.memory(), parts.method.stats()
    return {
        "memory": _memory(parts, samples) | {"planned": (before.get("memory_plan") or {}).get("total")},
        "bytes_read": bytes_read(parts.shared.loaded.lm, samples),
        **({"memory_plan": planned | {"measured": _peak(samples)}} if (planned := before.get("memory_plan")) else {}),
        **({"own_bytes": own} if own else {}),
        **({"method_facts": stats} if stats else {}),
        "load_average": before["load_average"] | {"end": machine.load_average()},
        "gpu_state": before["gpu_state"] | {"end": machine.gpu_state(parts.shared.loaded.lm.device)},
    }


def made_ahead(shared: Shared) -> dict[str, dict[str, int | float]]:
    """Graphs captured and functions compiled so far, and the time it took; later ones are in the measured times.

    ``missed``: passes without a graph since the graphs of the run were captured.
    """
    lm, compiled, found = shared.loaded.lm, shared.loaded.compiled, {}
    if isinstance(lm, GraphedLM):
        graphs = lm.graphs
        found["graphs"] = {"captured": graphs.captured, "seconds": round(graphs.seconds, 3), "missed": graphs.missed}
    if compiled is not None:
        found["compiled"] = {"functions": compiled.counted, "seconds": round(compiled.seconds, 3)}
    return found


def _quantised(lm: CausalLM) -> dict[str, Any]:
    """The forms of weights that are not as the type of the run says."""
    if lm.weights == "full":
        return {}
    return {"weights": lm.weights, "int4_bytes": lm.int4_bytes}


def _memory(parts: Parts, samples: Sequence[Sample]) -> dict[str, int | None]:
    """Bytes that both arms have in common, and those of the process before, from which a peak on a CPU is counted.

    The cache is that of the target, for as many rows as there were with the longest prompt and the most new tokens.
    """
    shared = parts.shared
    lm, measured = shared.loaded.lm, [s for s in samples if s.phase == "measure"]
    longest = max(s.n_prompt_tokens for s in measured) + shared.settings.limit
    return {
        "weights": lm.weight_bytes + lm.encoder_bytes,
        "cache": max(s.batch_size for s in measured) * longest * lm.token_bytes,
        "floor": shared.floor_bytes,
        **({"reserved": torch.cuda.max_memory_reserved(lm.device)} if lm.device.type == "cuda" else {}),
    }


def bytes_read(lm: CausalLM, samples: Sequence[Sample]) -> dict[str, Any]:
    """What a pass of the target reads: ``weights`` by its number of ``tokens``, and per ``token`` in a row before.

    Weights are those of all its products once (of a mixture of experts the expected ones), without the embedding.
    """
    sizes = {rows * nodes for sample in samples for rows, nodes in _passes(sample)}
    tokens = sorted({1, *sizes})
    weights = [lm.pass_bytes(count) - lm.embedding_bytes for count in tokens]
    return {"token": lm.token_bytes, "tokens": tokens, "weights": weights}


def _passes(sample: Sample) -> set[tuple[int, int]]:
    rows = sample.step_rows or [sample.batch_size] * len(sample.step_nodes)
    return set(zip(rows[1:], sample.step_nodes[1:], strict=True))


def _peak(samples: Sequence[Sample]) -> int | None:
    """Of both arms; None where it was not measured."""
    return max((s.peak_bytes for s in samples if s.phase == "measure" and s.peak_bytes is not None), default=None)


def circumstances(loaded: Loaded, begin: datetime, seconds: float) -> dict[str, Any]:
    """Model, machine, versions and time of an experiment that is no run; without the command."""
    return {
        "model": {"name": loaded.name, "revision": loaded.revision, "sha256": loaded.sha256},
        "dtype": str(loaded.lm.dtype).removeprefix("torch."),
        "hardware": machine.facts(loaded.lm.device),
        "versions": machine.versions(),
        "git": machine.git_state(),
        "started_at": begin.isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }


def now() -> str:
    """Date and time to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
