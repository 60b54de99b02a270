"""The only place where configuration meets classes: ``_target_`` names a class, the other keys are its arguments."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bench.config.schema import PathsConfig, RunConfig, SamplingConfig, parallel_of, weights_of
from bench.config.typecheck import check_arguments, hint_of
from bench.errors import UserError

if TYPE_CHECKING:
    from methods.decoder import Decoder
    from methods.engine.causal_lm import CausalLM
    from methods.training.interface import Trainable

ENTRY_POINTS = "decodebench.methods"  # where an installed package registers its decoders
_OWN = ("methods.", "bench.")
_FROM_RUN = {  # constructor arguments that the run provides: a YAML file may not set them
    "method": frozenset({"target", "sampling", "storage"}),
    "dataset": frozenset({"data", "cache"}),  # paths must not get into the identity of a run
}

ModelLoader = Callable[[str | Mapping[str, Any]], Any]


def locate(target: object) -> type:
    """The class a ``_target_`` names.

    Only classes defined in methods and bench, and those that an installed package registers under the entry
    point group ``decodebench.methods``, can be named: a command line must not be able to call anything else.

    Raises:
        UserError: the name is not allowed, or nothing of that name exists.
    """
    if not isinstance(target, str) or not (target.startswith(_OWN) or target in _registered()):
        raise UserError(
            f"_target_ must be a class of methods, bench or the entry point group '{ENTRY_POINTS}', got {target!r}. "
            f"Choose a config by name instead (python -m bench list)."
        )
    module_name, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not module_name.startswith(error.name or "?"):
            raise  # the module is there, something it imports is not
        raise UserError(f"_target_ {target!r} does not exist. Correct the YAML file that names it.") from error
    if not inspect.isclass(found) or (target.startswith(_OWN) and not found.__module__.startswith(_OWN)):
        raise UserError(f"_target_ {target!r} is no class of this project. Name the class itself.")
    return found


def check(cfg: RunConfig) -> None:
    """Check the arguments of every class the config names, without building any.

    Raises:
        UserError: see ``locate`` and ``bench.config.typecheck.check_arguments``.
    """
    for key in ("method", "model", "dataset", "tracker"):
        _check(getattr(cfg, key), key)


def build_decoder(
    method: Mapping[str, Any],
    target: CausalLM,
    sampling: SamplingConfig,
    load_model: ModelLoader | None = None,
    checkpoint: Path | None = None,
    storage: Path | None = None,
) -> Decoder:
    """The decoder under test, bound to its target.

    Args:
        method: the ``method`` group of the config.
        target: the model whose output is wanted.
        sampling: how its distribution is processed.
        load_model: turns a model's name into a model, for arguments like ``draft_model``; see ``model_loader``.
        checkpoint: what was prepared for this method and model (``bench.models.artifacts``); used where the settings
            name nothing else.
        storage: root of what was fetched or made earlier, for methods that convert the target; None: they keep nothing.

    Raises:
        UserError: arguments the method does not take, or values it refuses.
    """
    from methods.engine.sampling import Sampling

    processed = Sampling(sampling.temperature, sampling.top_k, sampling.top_p)
    provided: dict[str, Any] = {"target": target, "sampling": processed, "storage": storage}
    replaced = ("checkpoint", *method_class(method).instead_of_checkpoint)
    if checkpoint is not None and all(method.get(key) is None for key in replaced):
        provided["checkpoint"] = checkpoint
    return _build(method, "method", provided, load_model)


def method_class(method: Mapping[str, Any]) -> type[Decoder]:
    """The decoder class of a ``method`` group.

    Raises:
        UserError: see ``locate``, or the class is not a decoder.
    """
    from methods.decoder import Decoder

    found = locate(method["_target_"])
    if not issubclass(found, Decoder):
        missing = [name for name in ("guarantee", "decode") if not hasattr(found, name)]
        raise UserError(
            f"_target_ {method['_target_']!r} must be a subclass of methods.decoder.Decoder. Derive it from that class"
            + (f" and define {' and '.join(missing)}." if missing else ".")
        )
    return found


def needs_hf(method: Mapping[str, Any]) -> bool:
    """Whether the Hugging Face model has to stay loaded beside ours."""
    return method_class(method).needs_hf


def build_model(model: Mapping[str, Any]) -> Any:
    """Where the target comes from: a source that reads model and tokenizer, see ``bench.models.loading``."""
    return _build(model, "model")


def build_task(dataset: Mapping[str, Any], paths: PathsConfig | None = None) -> Any:
    """The task: a data set, how its prompts are written and how its answers are scored.

    Args:
        dataset: the ``dataset`` group of the config.
        paths: where data sets lie; None: where the environment says.
    """
    return _build(dataset, "dataset", {"data": paths.data, "cache": paths.cache} if paths else {})


def build_trainable(train: Mapping[str, Any]) -> Trainable:
    """What prepares a method: the ``train`` group of the config.

    Raises:
        UserError: arguments it does not take, or values it refuses.
    """
    from methods.training.interface import Trainable

    trainable = _build(train, "train")
    if not isinstance(trainable, Trainable):
        raise UserError(
            f"_target_ must be a subclass of methods.training.interface.Trainable, got {train['_target_']!r}. Correct "
            "the YAML file that names it."
        )
    return trainable


def arguments(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments a group has for the class it names, checked: ``2`` where a float is wanted is ``2.0``.

    Raises:
        UserError: see ``check``.
    """
    return _check(group, where)[1]


def build_tracker(tracker: Mapping[str, Any]) -> Any:
    """What follows the run from outside, Weights & Biases or nothing."""
    return _build(tracker, "tracker")


def build_cluster(cluster: Mapping[str, Any]) -> Any:
    """Where the jobs of a sweep run, a ``bench.sweep.executors.Cluster``."""
    return _build(cluster, "cluster")


def _build(
    group: Mapping[str, Any],
    where: str,
    provided: Mapping[str, Any] | None = None,
    load_model: ModelLoader | None = None,
) -> Any:
    provided = provided or {}
    target, given = _check(group, where)
    built = {key: _value(value, f"{where}.{key}", hint_of(target, key), load_model) for key, value in given.items()}
    accepted = inspect.signature(target).parameters
    built |= {key: value for key, value in provided.items() if key in accepted}
    try:
        return target(**built)
    except ValueError as error:
        raise UserError(str(error)) from error


def _value(value: Any, where: str, hint: Any, load_model: ModelLoader | None) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return _build(value, where, load_model=load_model)
    if value is not None and load_model is not None and _is_model(hint):
        return load_model(value)
    return value


def _check(group: Mapping[str, Any], where: str) -> tuple[type, dict[str, Any]]:
    """The class of a group and the arguments for it, checked, nested groups included."""
    if "_target_" not in group:
        raise UserError(f"{where} names no class: its YAML file has no _target_. Add it.")
    target = locate(group["_target_"])
    given = {key: value for key, value in group.items() if key != "_target_"}
    if where == "model":
        weights_of(given)
        parallel_of(given)
        for key in ("weights", "parallel"):  # of every model, not of its source
            given.pop(key, None)
    if "name" not in inspect.signature(target).parameters:
        given.pop("name", None)  # the label of the group, in every YAML
    named = {key for key, value in given.items() if _is_model(hint_of(target, key)) and _names_model(value)}
    built_later = {key: {"_target_": "a model"} for key in named}
    checked = check_arguments(target, {**given, **built_later}, where, _FROM_RUN.get(where, ()))
    for key, value in given.items():
        if isinstance(value, Mapping) and "_target_" in value:
            _check(value, f"{where}.{key}")
    return target, {key: given[key] if key in named else value for key, value in checked.items()}


def _is_model(hint: Any) -> bool:
    """Whether a constructor argument is a language model, which a config gives by name."""
    return any(getattr(kind, "__name__", "") == "CausalLM" for kind in (hint, *get_args(hint)))


def _names_model(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("name"), str))


def _registered() -> set[str]:
    return {point.value.replace(":", ".") for point in entry_points(group=ENTRY_POINTS)}
