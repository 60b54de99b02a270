"""Every YAML file composes and fits the class it names; what defines a run is in its identity; types are checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import yaml

from bench.config import compose, instantiate
from bench.config.identity import OUTSIDE, fingerprint, run_id, strip
from bench.config.schema import PathsConfig, RunConfig, SamplingConfig, conf_dir, sanitise
from bench.config.typecheck import check_arguments, describe, fits
from bench.errors import UserError
from bench.models import loading, source
from methods.decoder import Decoder, Guarantee

CHOICES = [(group, choice) for group, choices in compose.groups().items() for choice in choices]
NAMES = [f"{group}/{choice}" for group, choice in CHOICES]
MANDATORY = {
    ("dataset", "jsonl"): ["dataset.path=prompts.jsonl"],
    ("dataset", "hub_pairs"): ["dataset.repo=some/pairs"],
    ("dataset", "hub"): ["dataset.name=some/prompts"],
    ("model", "hf"): ["model.name=some/model"],
}


def run_config(**changes: Any) -> RunConfig:
    base: dict[str, Any] = {"method": {"name": "m"}, "model": {"name": "org/Model-1"}, "dataset": {"name": "d"}}
    return RunConfig.from_dict(base | changes)


# ---------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=NAMES)
def test_yaml_composes_and_its_arguments_fit(group: str, choice: str) -> None:
    cfg = compose.compose([f"{group}={choice}", *MANDATORY.get((group, choice), [])])
    instantiate.check(cfg)
    assert RunConfig.from_dict(cfg.to_dict()) == cfg


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=NAMES)
def test_yaml_starts_with_a_sentence_and_avoids_yaml_booleans(group: str, choice: str) -> None:
    text = compose.config_file(group, choice).read_text()
    assert text.startswith("# ")
    assert not any(isinstance(key, bool) for key in yaml.safe_load(text))


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=NAMES)
def test_name_in_yaml_is_the_file_name(group: str, choice: str) -> None:
    loaded = yaml.safe_load(compose.config_file(group, choice).read_text())
    if group in ("method", "dataset", "tracker", "measure", "hardware"):
        assert loaded.get(group, loaded)["name"] == ("???" if (group, choice) == ("dataset", "hub") else choice)


def test_defaults_give_a_run_without_account_gpu_or_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECODEBENCH_DATA", raising=False)
    cfg = compose.compose([])
    assert (cfg.model["name"], cfg.dataset["name"], cfg.tracker["name"]) == ("smollm2", "demo", "none")
    assert cfg.paths.data is None
    assert Path(cfg.paths.results).is_absolute() and Path(cfg.paths.cache).is_absolute()


def test_quick_limits_the_run_and_the_command_line_has_the_last_word() -> None:
    assert compose.compose(["measure=quick"]).dataset["limit"] == 10
    cfg = compose.compose(["dataset.limit=3", "measure=quick", "max_new_tokens=7"])
    assert (cfg.dataset["limit"], cfg.max_new_tokens) == (3, 7)


def test_own_defaults_are_read_from_local_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in conf_dir().iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    (tmp_path / "local.yaml").unlink(missing_ok=True)
    (tmp_path / "local.yaml").write_text("seed: 5\nmeasure: {repeats: 4}\n")
    monkeypatch.setattr(compose, "conf_dir", lambda: tmp_path)
    assert compose.compose([]).seed == 5
    assert compose.compose(["seed=6", "measure=full"]).measure.repeats == 4


# -------------------------------------------------------------------------------------------------- the identity


@pytest.mark.parametrize(
    "override",
    [
        "method=autoregressive",
        "method.gamma=9",
        "dataset.limit=3",
        "sampling=sample",
        "sampling.top_k=5",
        "measure=full",
        "measure.repeats=2",
        "hardware=cpu_fp32",
        "hardware.threads=3",
        "seed=1",
        "max_new_tokens=5",
        "batch_size=2",
        "max_context=100",
    ],
)
def test_what_defines_a_run_changes_its_id(override: str) -> None:
    assert fingerprint(compose.compose([override]).to_dict(), {}) != fingerprint(compose.compose([]).to_dict(), {})


@pytest.mark.parametrize(
    "override", ["paths.results=/x", "paths.cache=/x", "paths.data=/x", "tracker=wandb", "hydra.verbose=true"]
)
def test_what_does_not_define_a_run_leaves_its_id(override: str) -> None:
    assert fingerprint(compose.compose([override]).to_dict(), {}) == fingerprint(compose.compose([]).to_dict(), {})


def test_every_field_is_identity_but_paths_and_tracker() -> None:
    cfg = run_config()
    changed = {key: {"name": "changed"} if isinstance(value, dict) else 99 for key, value in cfg.to_dict().items()}
    found = {key for key in changed if strip(cfg.to_dict() | {key: changed[key]}) != strip(cfg.to_dict())}
    assert found == set(changed) - OUTSIDE - {"measure", "hardware"}, "their names are labels"


def test_id_is_readable_stable_and_depends_on_revisions() -> None:
    cfg = run_config()
    first = run_id(cfg, {})
    assert first == run_id(RunConfig.from_dict(cfg.to_dict()), {}) == "m-d-org_Model_1-" + first[-12:]
    both = {"model": "a", "data": "b"}
    assert run_id(cfg, both) == run_id(cfg, dict(reversed(both.items()))) != run_id(cfg, both | {"data": "c"})


@pytest.mark.parametrize(
    ("name", "clean"), [("a/b-c", "a_b_c"), ("../..", "unnamed"), ("x" * 99, "x" * 48), ("ü.5", "5")]
)
def test_names_are_safe_in_paths(name: str, clean: str) -> None:
    assert sanitise(name) == clean


# ---------------------------------------------------------------------------------------------------- the types


class Colour(Enum):
    RED = "r"


@pytest.mark.parametrize(
    ("expected", "good", "bad"),
    [
        (int, [1, -1], [1.0, True, "1", None, [1]]),
        (float, [1, 1.5], [True, "1", None]),
        (bool, [True, False], [1, 0, "true"]),
        (str, ["", "x"], [1, None, ["x"]]),
        (Literal["a", 1], ["a", 1], ["b", True, None]),
        (Optional[int], [None, 1], ["x", 1.5, True]),  # noqa: UP045  both spellings occur
        (Union[int, str], [1, "x"], [None, 1.5]),  # noqa: UP007
        (int | None, [None, 2], [False]),
        (list[int], [[], [1, 2]], [1, "12", [1, "x"], {"a": 1}]),
        (Sequence[float], [[1, 2.5], (1,)], ["12", [None]]),
        (Collection[int], [[3, 7]], ["3", ["3"]]),
        (tuple[int, str], [[1, "x"]], [[1], [1, 2], ["x", 1]]),
        (tuple[int, ...], [[], [1, 2, 3]], [["x"]]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "x"}, [1]]),
        (Mapping[str, Any], [{"a": None}], ["a"]),
        (Path, ["a/b", Path("a")], [1, None]),
        (Colour, ["RED", "r", Colour.RED], ["blue", 1]),
        (SamplingConfig, [{"_target_": "bench.config.schema.SamplingConfig"}, SamplingConfig()], [{"top_k": 1}, "x"]),
        (Any, [1, None, {}], []),
    ],
    ids=str,
)
def test_values_fit_their_hints(expected: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not fits(value, expected)] == []
    assert [value for value in bad if fits(value, expected)] == []
    assert describe(expected)


@dataclass
class Method:
    """A stand-in for a decoder's constructor."""

    target: object
    gamma: int
    pick: Literal["first", "last"] = "first"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gama": 3, "gamma": 3}, ["method.gama", "Did you mean 'gamma'", "method.pick"]),
        ({"gamma": "three"}, ["method.gamma", "'three'", "a whole number", "method.gamma=VALUE"]),
        ({"gamma": 3, "pick": "lst"}, ["method.pick", "'lst'", "one of first, last"]),
        ({}, ["method.gamma must be set"]),
        ({"gamma": 3, "target": 1}, ["method.target"]),
    ],
)
def test_arguments_are_checked_against_the_signature(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_arguments(Method, given, "method", provided={"target"})
    assert [word for word in words if word not in str(caught.value)] == []


def test_right_arguments_pass() -> None:
    check_arguments(Method, {"gamma": 3, "pick": "last"}, "method", provided={"target"})
    check_arguments(lambda **options: None, {"anything": 1})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sed": 1}, "Did you mean 'seed'"),
        ({"seed": True}, "whole number"),
        ({"seed": -1}, "at least 0"),
        ({"batch_size": 0}, "at least 1"),
        ({"max_context": 1}, "at least 2"),
        ({"sampling": {"top_p": 0}}, "above 0 and at most 1"),
        ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
        ({"measure": {"repeats": 0}}, "measure.repeats"),
        ({"hardware": {"device": "tpu"}}, "one of auto, cpu, cuda"),
        ({"hardware": {"threads": 0}}, "hardware.threads"),
        ({"method": {"name": 3}}, "method.name"),
        ({"sampling": None}, "sampling"),
    ],
)
def test_run_config_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_config(**changes)


# ------------------------------------------------------------------------------------------- names and classes


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.Popen",
        "bench.config.instantiate.importlib",
        "bench.config.identity.run_id",
        "bench.config.schema.Path",
        "bench",
        3,
    ],
)
def test_only_classes_of_the_project_can_be_named(target: Any) -> None:
    with pytest.raises(UserError, match="_target_"):
        instantiate.locate(target)


@pytest.mark.parametrize("target", ["bench.nowhere.Thing", "bench.config.schema.Nothing"])
def test_a_class_that_does_not_exist_is_reported(target: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        instantiate.locate(target)


def test_registered_classes_of_other_packages_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instantiate, "_registered", lambda: {"fractions.Fraction"})
    assert instantiate.locate("fractions.Fraction").__name__ == "Fraction"
    with pytest.raises(UserError):
        instantiate.locate("fractions.Decimal")


def test_what_a_method_refuses_is_a_user_error() -> None:
    class Refuses:
        def __init__(self, gamma: int) -> None:
            raise ValueError("gamma=0: gamma >= 1 is needed.")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="gamma=0"):
        patch.setattr(instantiate, "locate", lambda target: Refuses)
        instantiate.build_task({"name": "x", "_target_": "methods.x.Refuses", "gamma": 0})


def test_a_task_is_told_where_data_lies_and_yaml_may_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        def __init__(self, data: str | None = None, limit: int | None = None) -> None:
            self.data, self.limit = data, limit

    monkeypatch.setattr(instantiate, "locate", lambda target: Task)
    group = {"name": "x", "_target_": "bench.tasks.Task", "limit": 2}
    made = instantiate.build_task(group, PathsConfig(data="/d"))
    assert (made.data, made.limit) == ("/d", 2)
    with pytest.raises(UserError, match=r"dataset\.data"):
        instantiate.build_task(group | {"data": "/d"}, PathsConfig())


def test_nested_groups_are_checked_and_built(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = {"_target_": "bench.config.schema.SamplingConfig", "top_k": 3}
    monkeypatch.setattr(instantiate, "_registered", lambda: {f"{__name__}.Method"})
    group = {"name": "x", "_target_": f"{__name__}.Method", "target": nested, "gamma": 1}
    assert instantiate.build_tracker(group).target == SamplingConfig(top_k=3)
    with pytest.raises(UserError, match=r"tracker\.target\.top_k"):
        instantiate.build_tracker(group | {"target": nested | {"top_k": "x"}})


def test_a_whole_number_becomes_a_float_where_one_is_wanted() -> None:
    whole, broken = (run_config(sampling={"temperature": value}) for value in (1, 1.0))
    assert type(whole.sampling.temperature) is float and run_id(whole, {}) == run_id(broken, {})


class NeedsModel(Decoder):
    """A stand-in for a method with a draft model."""

    guarantee = Guarantee.EXACT

    class CausalLM:
        """Known to the config by its name."""

    def decode(self, prompts: Any, limit: int, rng: Any) -> Any:
        raise NotImplementedError

    def __init__(self, draft_model: CausalLM | None = None) -> None:
        self.draft_model = draft_model


def test_a_model_is_given_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instantiate, "_registered", lambda: {f"{__name__}.NeedsModel"})
    monkeypatch.setattr(instantiate, "hint_of", lambda target, key: NeedsModel.CausalLM | None)
    group = {"name": "x", "_target_": f"{__name__}.NeedsModel", "draft_model": "org/small"}
    cfg = run_config(method=group)
    instantiate.check(replace(cfg, model=group, dataset=group, tracker=group))
    made = instantiate.build_decoder(group, None, SamplingConfig(), load_model=lambda name: f"loaded {name}")  # type: ignore[arg-type]
    assert made.draft_model == "loaded org/small"  # type: ignore[attr-defined]


class Tokenizer:
    """A tokenizer that is nothing but its vocabulary."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}


@pytest.mark.parametrize(("words", "fits_target"), [(("a", "b"), True), (("b", "a"), False), (("a",), True)])
def test_a_draft_model_must_read_the_tokens_of_the_target(
    words: tuple[str, ...], fits_target: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(model: Mapping[str, Any], hardware: Mapping[str, Any], paths: PathsConfig, *, keep_hf: bool) -> Any:
        assert (model, hardware["device"], keep_hf) == ({"name": "org/small"}, "auto", True)
        return source.Loaded("the draft", Tokenizer(*words), "org/small", None, None)  # type: ignore[arg-type]

    monkeypatch.setattr("bench.models.loading.load", load)
    monkeypatch.setattr(instantiate, "needs_hf", lambda method: True)
    loader = loading.draft_loader(run_config(), Tokenizer("a", "b"))
    if fits_target:
        assert loader("org/small") == "the draft"
    else:
        with pytest.raises(UserError, match="'org/small' and target 'org/Model-1' read different tokens"):
            loader("org/small")


def test_methods_say_whether_they_need_the_hugging_face_model() -> None:
    methods = [cfg.method for cfg in compose.compose_each([[f"method={name}"] for name in compose.groups()["method"]])]
    needs = {method["name"]: instantiate.needs_hf(method) for method in methods}
    peers = {name for name in needs if name.startswith("hf_")} | {"flashspec", "ctranslate2"}
    assert {name for name in needs if needs[name]} == peers
