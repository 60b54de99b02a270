"""What defines a run, as plain dataclasses: usable without Hydra, checked before any model loads."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.config.typecheck import check_arguments
from bench.errors import UserError

_COLDEST = 1e-6  # of ``methods.engine.sampling``, which would import torch
_MOST_THREADS, _LARGEST_SEED, _LONGEST_NAME = 4096, 2**63 - 1, 1000
DEFAULT_CORPUS = "dolly,gsm8k"  # of a preparation

WEIGHTS = ("full", "int4", "fp8")  # of a model: as hardware.dtype says, or its layers rounded to 4 or 8 bits


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How a token is drawn; see ``methods.engine.sampling.Sampling`` for the meaning."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _within("sampling.temperature", self.temperature, low=0)
        if 0 < self.temperature < _COLDEST or not math.isfinite(self.temperature):
            raise UserError(
                f"sampling.temperature must be 0 (greedy) or a number from {_COLDEST} on, got {self.temperature}. Set "
                "sampling.temperature=VALUE."
            )
        _within("sampling.top_k", self.top_k, low=0)
        _within("sampling.top_p", self.top_p, low=0, high=1, open_low=True)


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """How thoroughly a run measures.

    Attributes:
        repeats: how often each prompt is decoded by each arm.
        warmup: prompts decoded by both arms before the measurement.
        cost_curve: measure the time of target passes over 1..64 tokens.
        agreement: score the outputs with the target afterwards.
        bootstrap_samples: resamples of the prompts behind each interval.
        near_tie_gap: difference of log-probability up to which another token than the target's first choice counts
            as a near-tie; None is the rounding of the model's type.
        refill: of more prompts than ``batch_size``, one that waits takes the place of a row that has ended.
        refill_queue: with ``refill``, the fewest prompts that are measured in one go; None: all.
        sort_by_length: batches of conversations of similar length, the shortest first, in place of the data set's
            order, for all arms alike; not with ``refill``.
        prefix_cache: before a later turn of a conversation baseline and methods hold what came before it, and read of
            the prompt only what is new; for single rows.
        ignore_eos: an end-of-sequence token does not end a text, so that all arms write exactly ``max_new_tokens``: for
            speed alone, as the texts go on behind their ends.
        profile: trace ten rounds of each arm after the measurement, and measure the bandwidth of the memory on a CPU
            too.
        energy_block_s: where the device counts energy, seconds that each arm decodes for it after the measurement; its
            counter is too slow for sections of one prompt. 0: not measured.
    """

    name: str = "default"
    repeats: int = 1
    warmup: int = 2
    cost_curve: bool = True
    agreement: bool = True
    bootstrap_samples: int = 10_000
    near_tie_gap: float | None = None
    refill: bool = False
    refill_queue: int | None = None
    prefix_cache: bool = False
    ignore_eos: bool = False
    sort_by_length: bool = False
    profile: bool = False
    energy_block_s: float = 5.0

    def __post_init__(self) -> None:
        _within("measure.repeats", self.repeats, low=1)
        _within("measure.warmup", self.warmup, low=0)
        _within("measure.bootstrap_samples", self.bootstrap_samples, low=100)
        _within("measure.near_tie_gap", self.near_tie_gap, low=0)
        _within("measure.energy_block_s", self.energy_block_s, low=0, high=3600)
        _within("measure.refill_queue", self.refill_queue, low=1)
        if self.refill_queue is not None and not self.refill:
            raise UserError(
                f"measure.refill_queue needs measure.refill=true, got {self.refill_queue} without it. Set both, or "
                "neither."
            )
        if self.sort_by_length and self.refill:
            raise UserError(
                "measure.sort_by_length must be false with measure.refill=true, which forms no batches, got true. Set "
                "one of the two."
            )


@dataclass(frozen=True, slots=True)
class HardwareConfig:
    """Where the model runs and in which type; ``auto`` is decided when the model is loaded.

    Attributes:
        threads: CPU threads; None is one per physical core.
        linear: form of the matrix products, see ``methods.engine.linear``.
        draft_weights: of trained networks that draft: those of the target's type, or rounded to numbers of 8 or 4 bits,
            which costs acceptance, and never the text of an exact method; ``auto`` is int8 for bfloat16 on a CPU, else
            full.
        graphs: replay passes as CUDA graphs where there is CUDA, for baseline and methods alike; or never.
        compile: let torch.compile join the operations between matrix products, for baseline and methods alike.
        kernels: of what is between the matrix products in passes over few nodes: those of torch, or ours in Triton, for
            baseline and methods alike; ``auto`` is Triton where passes in 16 bit are CUDA graphs, else torch.
        batch_invariant: refuse a model whose bits depend on the number of tokens or rows of a pass.
    """

    name: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int | None = None
    linear: Literal["auto", "plain", "packed", "panels"] = "auto"
    draft_weights: Literal["auto", "full", "int8", "int4"] = "auto"
    graphs: Literal["auto", "off"] = "auto"
    compile: bool = False
    kernels: Literal["auto", "torch", "triton"] = "auto"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        _within("hardware.threads", self.threads, low=1, high=_MOST_THREADS)
        if self.kernels == "triton" and self.compile:
            raise UserError(
                "hardware.compile must be false with hardware.kernels=triton, which replaces the same operations, got "
                "true. Set one of the two."
            )


@dataclass(frozen=True, slots=True)
class PathsConfig:
    """Folders; none of them changes what is measured.

    Attributes:
        results: the user's runs, one folder each.
        reference: records of the project, which are only read; None for none.
        data: folder with data sets, or None.
        cache: converted models and fetched data.
    """

    results: str = "results"
    reference: str | None = None
    data: str | None = None
    cache: str = "data/cache"

    def __post_init__(self) -> None:
        if not self.results:
            raise UserError("paths.results must name a folder, got nothing. Set paths.results=FOLDER.")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run. ``method``, ``model``, ``dataset`` and ``tracker`` keep the arguments of their own classes."""

    method: dict[str, Any]
    model: dict[str, Any]
    dataset: dict[str, Any]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    tracker: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    paths: PathsConfig = field(default_factory=PathsConfig)
    seed: int = 0
    max_new_tokens: int = 256
    batch_size: int = 1
    max_context: int | None = None

    def __post_init__(self) -> None:
        _within("seed", self.seed, low=0, high=_LARGEST_SEED)
        _within("max_new_tokens", self.max_new_tokens, low=1)
        _within("batch_size", self.batch_size, low=1)
        _within("max_context", self.max_context, low=2)

    @classmethod
    def from_dict(cls, resolved: Mapping[str, Any]) -> RunConfig:
        """Build from a plain dictionary of the composed config's shape (interpolations resolved).

        Raises:
            UserError: an unknown key, a missing group, a value of the wrong type or out of range.
        """
        values = dict(resolved)
        for key, group in _TYPED_GROUPS.items():
            if isinstance(given := values.get(key), Mapping):
                values[key] = group(**check_arguments(group, given, key))
        values = check_arguments(cls, values)
        for key in ("method", "model", "dataset", "tracker"):
            name = values[key].get("name") if key in values else ""
            if not isinstance(name, str):
                raise UserError(f"{key}.name must be text, got {name!r}. Set {key}.name=NAME.")
            if key in values and not 0 < len(name) <= _LONGEST_NAME:
                raise UserError(
                    f"{key}.name must have 1 to {_LONGEST_NAME:,} characters, got {len(name):,}. Set {key}.name=NAME."
                )
        for key, name in (("model", "name"), ("method", "draft_model")):
            if name in values.get(key, ()):
                values[key] = values[key] | {name: _anchored(values[key][name])}
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, the inverse of ``from_dict``."""
        return asdict(self)


def _anchored(value: Any) -> Any:
    """A model whose name looks like an id on the hub and is a folder begins with ``./``: records keep its last part."""
    if isinstance(value, Mapping):
        return {key: _anchored(each) for key, each in value.items()}
    if isinstance(value, str) and "/" in value and not value.startswith(("/", "~", ".")) and _is_folder(value):
        return f"./{value}"
    return value


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of ``python -m bench train``, besides those of the method, the model and the machine.

    Attributes:
        corpus: dolly, dolly_15k, gsm8k (its train split), multi30k, own_requests, shakespeare, FILE.jsonl or
            FILE.jsonl.gz, separated by commas; NAME:COUNT takes COUNT of one; default: what the method declares
        corpus_limit: maximum number of dialogues, drawn with the seed
        out: folder of the result; default: where the method finds it
        force: train again in place of a finished result, or of one with other settings
        publish: int8, int6, int5 or int4: store the weights in fewer bits and measure the quality before and after
        without: with publish, prefixes of tensor names to leave out, separated by commas
    """

    method: str
    corpus: str | None = None
    corpus_limit: int | None = None
    out: str | None = None
    force: bool = False
    publish: Literal["int8", "int6", "int5", "int4"] | None = None
    without: str = ""

    def __post_init__(self) -> None:
        _within("corpus_limit", self.corpus_limit, low=1)


_TYPED_GROUPS: dict[str, Callable[..., Any]] = {
    "sampling": SamplingConfig,
    "measure": MeasureConfig,
    "hardware": HardwareConfig,
    "paths": PathsConfig,
}


def weights_of(model: Mapping[str, Any]) -> str:
    """How the weights of a model are held: the setting ``weights`` of a ``model`` group, of target or draft.

    Raises:
        UserError: an unknown one.
    """
    found = model.get("weights", WEIGHTS[0])
    if found not in WEIGHTS:
        raise UserError(f"model.weights must be one of {', '.join(WEIGHTS)}, got {found}. Set model.weights=VALUE.")
    return str(found)


def parallel_of(model: Mapping[str, Any]) -> int:
    """On how many devices a target is: the setting ``parallel`` of a ``model`` group.

    Raises:
        UserError: it is no whole number of at least 1.
    """
    found = model.get("parallel", 1)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UserError(f"model.parallel must be a whole number of at least 1, got {found}. Set model.parallel=2.")
    return found


def sanitise(name: str) -> str:
    """A name as part of a folder name: letters, digits, dots and underscores; ``a/b-c`` becomes ``a_b_c``."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", name).strip("._")[:48] or "unnamed"


# ---------------------------------------------------------------------------------------------- where things lie


def checkout() -> Path | None:
    """The source checkout this package runs from, or None for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "conf" / "config.yaml").is_file() and (root / "pyproject.toml").is_file() else None


def conf_dir() -> Path:
    """The folder with config.yaml: conf/ of the checkout, or the copy inside an installed package."""
    root = checkout()
    return root / "conf" if root else Path(__file__).resolve().parents[1] / "conf"


def set_path_defaults() -> None:
    """Give the two environment variables that conf/paths reads a value, unless the user did."""
    root = checkout()
    cache = root / "data" / "cache" if root else Path.home() / ".cache" / "decodebench"
    os.environ.setdefault("DECODEBENCH_HOME", str(root or Path.cwd()))
    os.environ.setdefault("DECODEBENCH_CACHE", str(cache))


def _within(key: str, value: int | float | None, low: int, high: int | None = None, *, open_low: bool = False) -> None:
    if value is None or (low <= value and not (open_low and value == low) and (high is None or value <= high)):
        return
    bounds = f"above {low}" if open_low else f"at least {low}"
    bounds += f" and at most {high}" if high is not None else ""
    raise UserError(f"{key} must be {bounds}, got {value}. Set {key}=VALUE.")
