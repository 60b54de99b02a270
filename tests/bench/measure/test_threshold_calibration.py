"""A promise from the command line to the record: prompts, losses, choice, cache, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import cli
from bench.config import compose
from bench.config.schema import PathsConfig, RunConfig
from bench.contract import checks
from bench.errors import UserError
from bench.measure import threshold_calibration
from bench.measure.run import run
from bench.models import loading
from bench.models.artifacts import Prepared
from bench.records import run_folder
from bench.records.run_folder import CALIBRATION
from bench.scoring.rouge import common_subsequence, rouge_l
from bench.sweep.history import Archive
from bench.tasks import corpus
from bench.utils.files import json_sha256
from methods.autoregressive import Autoregressive
from methods.decoder import Calibrated, Guarantee
from methods.early_exit.calibrator import GRID, RiskTarget
from methods.early_exit.calm import Calm
from methods.early_exit.confidence_timing import confidence_share
from methods.early_exit.exits import Exits
from methods.early_exit.free import Free
from methods.early_exit.free_threshold import BetaMixture
from methods.early_exit.hash_ee import HashEE
from methods.early_exit.hash_tables import HashTable
from methods.early_exit.risk_control import calibrate, fewest_prompts, naive_threshold, prompts_needed, redraw
from methods.early_exit.static_depth import StaticDepth
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import MissingPart
from methods.engine.sampling import Sampling
from tests.early_exit.test_risk_control import at_most, more_than

GREEDY = Sampling()
PROMPTS = 40
TOLERANCE = "method.calibration.tolerance=0.3"


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four prompts of a run, and forty others, one of which the run asks, too."""
    folder = tmp_path_factory.mktemp("promise")
    asked = [{"question_id": i, "category": "x", "turns": [f"Say {i} {i} again."]} for i in range(4)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    others = [{"prompt": f"Tell me of {i}", "answer": f"{i} is a number"} for i in range(PROMPTS - 1)]
    others.append({"prompt": "Say 2 2 again.", "answer": "2 2"})
    (folder / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    return folder


@pytest.fixture(scope="module")
def words(files: Path) -> list[str]:
    small = ["model=random", "hardware=cpu_fp32", "hardware.threads=1", "max_new_tokens=8", "method.head=lens"]
    quick = ["measure.bootstrap_samples=100", "measure.warmup=1", "measure.cost_curve=false", "dataset=jsonl"]
    corpus = [f"method.calibration.corpus={files / 'others.jsonl'}", "method.calibration.prompts=20"]
    grid = "method.calibration.thresholds=[0.9,0.7,0.5,0.3,0.1]"
    return ["method=calm", *small, *quick, f"dataset.path={files / 'asked.jsonl'}", *corpus, grid, TOLERANCE]


@pytest.fixture(scope="module")
def cfg(files: Path, words: list[str]) -> RunConfig:
    paths = PathsConfig(results=str(files / "results"), cache=str(files / "cache"))
    return replace(compose.compose(words), paths=paths)


@pytest.fixture(scope="module")
def loaded(cfg: RunConfig) -> Any:
    return loading.load(cfg.model, cfg.to_dict()["hardware"], cfg.paths)


ASKED: list[Any] = [type("Asked", (), {"turns": (f"Say {i} {i} again.",)})() for i in range(4)]
Chosen = tuple[threshold_calibration.CalibrationSet, threshold_calibration.Choice, Any]


def chosen(
    cfg: RunConfig, loaded: Any, cache: Path, make: Any = Calm, limit: int = 8, batch: int = 4, **promise: Any
) -> Chosen:
    """Draw and choose as a run does, without the run; the texts of the cache are the folder's own."""
    settings = {k: v for k, v in cfg.method["calibration"].items() if k != "_target_"} | promise
    method = make(loaded.lm, GREEDY, head="lens", calibration=RiskTarget(**settings))
    own = replace(cfg, paths=replace(cfg.paths, cache=str(cache)), max_new_tokens=limit, batch_size=batch)
    drawn_set = threshold_calibration.draw(own, method, loaded, ASKED, None, 512)
    assert drawn_set is not None
    writer = threshold_calibration.Writer(loaded, limit, loaded.lm.eos_ids, batch)
    return (
        drawn_set,
        threshold_calibration.choose(drawn_set, own, Autoregressive(loaded.lm, GREEDY), method, writer, None),
        method,
    )


# ------------------------------------------------------------------------------------------------- from run to record


def test_a_calibrated_run_has_the_choice_and_all_it_rests_on_in_its_record(
    cfg: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(cfg)
    manifest = run_folder.read_manifest(outcome.path) or {}
    found = manifest["calibration"]
    stored = json.loads((outcome.path / CALIBRATION).read_text())
    losses = np.array(stored["losses"]).T
    again = calibrate(losses, found["thresholds"], tolerance=0.3, seed=found["seed"])
    assert json.loads(json.dumps(again.record())).items() <= found.items(), "the choice cannot be made again"
    assert losses.shape == (20, len(found["thresholds"])) and len(found["layer_equivalents"]) == losses.shape[1]
    assert all(found["passed"][:-1]), "it went on behind the first failure"
    assert found["corpus"]["prompts"] == 20 and found["corpus"]["also_asked"] == 1
    captured = capsys.readouterr()
    assert found["explanation"] in captured.err and "promise" in captured.out
    summed, here = outcome.summary["calibration"], outcome.summary["calibration"]["measured"]
    assert {k: v for k, v in summed.items() if k != "measured"} == found and run_folder.validate(outcome.path) == []
    samples = [s for s in run_folder.read_samples(outcome.path) if s.phase == "measure"]
    texts = {arm: {s.prompt_id: s.output_ids for s in samples if s.arm == arm} for arm in ("baseline", "method")}
    lost = [1 - rouge_l(full, texts["method"][name]) for name, full in texts["baseline"].items()]
    assert here["value"] == pytest.approx(np.mean(lost)) and here["n"] == 4 and here["tolerance"] == 0.3
    assert f"loss on these prompts {here['value']:.3f}, promised at most 0.3" in " ".join(captured.out.split())
    assert (manifest["guarantee"] == "EXACT") == (found["threshold"] == 1)
    assert Archive.read(Path(cfg.paths.results), here=True).state(cfg)[0] in ("done", "noisy"), (
        "a sweep would not find it"
    )


@pytest.mark.parametrize("make", [Calm, Free, StaticDepth])
def test_the_losses_are_those_of_decoding_by_hand(make: Any, cfg: RunConfig, loaded: Any, tmp_path: Path) -> None:
    """Against texts of decoders that were made with the threshold, one prompt at a time and not four."""
    grid: dict[str, Any] = {"thresholds": None} if make is StaticDepth else {}
    drawn_set, choice, method = chosen(cfg, loaded, tmp_path, make, whole_grid=True, **grid)
    thresholds = choice.record["thresholds"]
    assert thresholds == ([3 / 4, 2 / 4, 1 / 4] if make is StaticDepth else [0.9, 0.7, 0.5, 0.3, 0.1])
    ends, some = loaded.lm.eos_ids, 0.0
    for place in (3, 17):
        prompt = torch.tensor(drawn_set.rows[place])
        full = _cut(checks.outputs(Autoregressive(loaded.lm, GREEDY), [prompt], 8)[0], ends)
        for column in (0, 2, -1):
            option = {"depth": 3 - column % 3} if make is StaticDepth else {"threshold": thresholds[column]}
            left = _cut(checks.outputs(make(loaded.lm, GREEDY, head="lens", **option), [prompt], 8)[0], ends)
            assert choice.losses[column][place] == pytest.approx(1 - rouge_l(full, left))
            some += choice.losses[column][place]
    assert some > 0, "nothing was lost, so nothing was compared"
    wanted = make(loaded.lm, GREEDY, head="lens", **({"depth": 3} if make is StaticDepth else {"threshold": 0.9}))
    method.set_threshold(thresholds[0])
    assert checks.outputs(method, [prompt], 8) == checks.outputs(wanted, [prompt], 8)


def _cut(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids)) + 1]


def test_what_was_decoded_once_is_not_decoded_again(
    cfg: RunConfig, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = threshold_calibration.Writer.write

    def noted(self: threshold_calibration.Writer, decoder: Any, rows: Any, label: str) -> list[list[int]]:
        written.append(label)
        return write(self, decoder, rows, label)

    monkeypatch.setattr(threshold_calibration.Writer, "write", noted)
    _, first, _ = chosen(cfg, loaded, tmp_path, tolerance=0.2)
    assert len(written) == len(first.losses) + 1
    _, again, method = chosen(cfg, loaded, tmp_path, tolerance=0.2)
    assert len(written) == len(first.losses) + 1 and again == first
    assert method.policy.threshold.value == first.record["threshold"], "chosen, and not used"
    _, wider, _ = chosen(cfg, loaded, tmp_path, tolerance=0.6)
    assert len(written) == len(wider.losses) + 1 > len(first.losses) + 1, "what a tolerance has in common was kept"
    chosen(cfg, loaded, tmp_path, limit=4)
    assert written.count("calibration: full model") == 2, "shorter texts lose other things"


def test_a_seed_draws_the_prompts(cfg: RunConfig, loaded: Any) -> None:
    def drawn(seed: int) -> str:
        promise = RiskTarget(tolerance=0.3, corpus=cfg.method["calibration"]["corpus"], prompts=30, seed=seed)
        drawn_set = threshold_calibration.draw(
            cfg, Calm(loaded.lm, GREEDY, head="lens", calibration=promise), loaded, [], None, 512
        )
        assert drawn_set is not None
        return drawn_set.sha256

    assert drawn(0) == drawn(0) != drawn(1)


def test_nothing_certified_says_so_and_is_the_full_model(
    cfg: RunConfig, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threshold_calibration, "rouge_l", lambda *_: 0.0)  # every text is lost
    _, choice, method = chosen(cfg, loaded, tmp_path)
    assert (choice.record["threshold"], choice.record["certified"]) == (1.0, False)
    assert method.guarantee is Guarantee.EXACT and len(choice.losses) == 1
    assert "no threshold passed" in capsys.readouterr().err


def test_conformal_is_labelled_as_what_it_is(cfg: RunConfig, loaded: Any, tmp_path: Path) -> None:
    found = chosen(cfg, loaded, tmp_path, procedure="conformal")[1].record
    assert found["threshold"] < 1 and not found["certified"]
    assert found["error_rate"] is None and not found["p_values"] and "in expectation" in found["explanation"]


def test_risk_counts_what_is_lost_against_references_and_no_gain(
    cfg: RunConfig, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = chosen(cfg, loaded, tmp_path, against="risk")[1].record
    assert (found["against"], found["metric"]) == ("risk", "rougeL")

    class Scorer:
        def score(self, reference: str, answer: str) -> dict[str, float]:
            return {"rougeL": float(len(answer)) * 10}

    monkeypatch.setattr(threshold_calibration, "_scorer", lambda metric: Scorer())
    monkeypatch.setattr(threshold_calibration.Writer, "text", lambda self, ids: "x" * len(ids))
    writer = threshold_calibration.Writer(loaded, 8, (), 4)
    lost = threshold_calibration.loss_of(
        RiskTarget(against="risk"), ["a", "b", "c"], [[1] * 5, [1] * 2, [1] * 6], writer
    )
    assert lost([[1] * 3, [1] * 4, [1] * 6]) == pytest.approx([0.2, 0.0, 0.0])


def test_prompts_that_the_exits_learnt_from_are_left_out(
    cfg: RunConfig, loaded: Any, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(files / "others.jsonl")
    learnt = corpus.read(name, 8, 5)
    promise = RiskTarget(tolerance=0.3, corpus=name, prompts=30)

    def drawn(asked: str, limit: int | None) -> threshold_calibration.CalibrationSet:
        facts = {"asked": asked, "limit": limit, "sha256": corpus.read(name, limit, 5).sha256}
        method = Calm(loaded.lm, GREEDY, head="lens", calibration=promise)
        part = Prepared(files, "trained", {"seed": 5, "corpus": facts})
        found = threshold_calibration.draw(cfg, method, loaded, [], part, 512)
        assert found is not None
        return found

    apart = drawn(name, 8)
    assert apart.facts["apart_from_training"] and not {d.answer for d in learnt.dialogues} & set(apart.references)
    assert not capsys.readouterr().err
    assert drawn(name, None).facts["apart_from_training"] is False, "it learnt from all of them"
    assert "may have been trained on some calibration prompts" in capsys.readouterr().err
    assert drawn("gone.jsonl", 8).facts["apart_from_training"] is None


@pytest.mark.parametrize(("chosen_by", "apart"), [(10, True), (None, False)])
def test_prompts_that_chose_the_model_are_left_out(
    chosen_by: int | None,
    apart: bool,
    cfg: RunConfig,
    loaded: Any,
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The card of a model says by which pairs the best of its checkpoints were chosen."""
    name, learnt = str(files / "others.jsonl"), tmp_path / "learnt.jsonl"
    learnt.write_text(json.dumps({"prompt": "Hello", "answer": "hello"}) + "\n")
    asked = f"{name}:{chosen_by}" if chosen_by else name
    selection, texts = corpus.read(asked), corpus.read(str(learnt))
    definition = {"train": {"validation": asked}, "validation": json_sha256(corpus.pairs(selection))}
    facts = {"asked": str(learnt), "names": [learnt.name], "limit": None, "sha256": texts.sha256}
    (tmp_path / "card.json").write_text(json.dumps({"definition": definition, "corpus": facts, "seed": 0}))
    own = replace(cfg, model={"name": str(tmp_path)})
    promise = RiskTarget(tolerance=0.3, corpus=name, prompts=30)
    found = threshold_calibration.draw(
        own, Calm(loaded.lm, GREEDY, head="lens", calibration=promise), loaded, [], None, 512
    )
    assert found is not None
    assert (found.facts["apart_from_training"], found.facts["apart_from_selection"]) == (True, apart)
    assert bool({d.answer for d in selection.dialogues} & set(found.references)) != apart
    assert ("Checkpoints of the model were chosen by the calibration prompts" in capsys.readouterr().err) != apart


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("method.calibration.prompts=5", r"must be at least \d+ for .*got 5.*Set method\.calibration\.prompts=\d+"),
        ("method.calibration.prompts=200", "must have at least 200 prompts .*, got 39"),
        ("method.calibration.p_value=wald", "hoeffding_bentkus"),
        ("method.threshold=1.5", "0 <= threshold <= 1"),
        ("method.exits=[2,9]", "from 1 to 3"),
        ("method.head=trained", r"python -m bench train method=calm"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    change: str, message: str, files: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rest = [word for word in words if word.partition("=")[0] != change.partition("=")[0]]
    results = files / "refused"
    assert cli.main([*rest, f"paths.results={results}", f"paths.cache={files / 'cache'}", change]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err) and "Traceback" not in err and not results.exists()


@pytest.mark.parametrize(
    ("settings", "sampling", "message"),
    [
        ({"tolerance": 1.5}, GREEDY, r"method\.calibration: expected above 0 and below 1, got tolerance=1\.5"),
        ({"tolerance": 0.1, "error_rate": 0.0}, GREEDY, "error_rate=0"),
        ({"tolerance": 0.1, "thresholds": [0.5, 0.9]}, GREEDY, "a falling sequence"),
        ({"tolerance": 0.1, "thresholds": [1.0, 0.9]}, GREEDY, "starts below 1"),
        ({"tolerance": 0.1, "prompts": 0}, GREEDY, "at least 1"),
        ({"tolerance": 0.1, "metric": "rougeL"}, GREEDY, "against=risk"),
        ({"tolerance": 0.1}, Sampling(temperature=1.0), "Set sampling=greedy"),
    ],
)
def test_a_promise_refuses(settings: dict[str, Any], sampling: Sampling, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RiskTarget(**settings).over(GRID, sampling)


def test_a_metric_that_nothing_computes_is_refused() -> None:
    with pytest.raises(UserError, match="metric must be one of rouge1"):
        threshold_calibration._scorer("wit")


@pytest.mark.parametrize("options", [{"accept": "verify"}, {"adaptive": BetaMixture(0.9)}])
def test_free_refuses_a_promise_for_what_has_no_fixed_threshold(options: dict[str, Any], target: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"method\.calibration\.tolerance=null"):
        Free(target, GREEDY, depth=2, head="lens", calibration=RiskTarget(tolerance=0.1), **options)


def test_static_depth_may_not_slip_in_an_untrained_lens(target: CausalLM) -> None:
    with pytest.raises(MissingPart):
        StaticDepth(target, GREEDY, depth=4, calibration=RiskTarget(tolerance=0.1))


def test_a_corpus_like_the_runs_own_prompts_is_found_or_asked_for(cfg: RunConfig) -> None:
    def found(kind: str, **dataset: Any) -> str:
        return threshold_calibration._corpus_of(replace(cfg, dataset=dataset), kind)

    assert found("seq2seq", name="multi30k", source="de", target="en") == "multi30k_de_en_val"
    assert found("causal", name="gsm8k") == "gsm8k" and found("causal", name="xsum") == "dolly"
    with pytest.raises(UserError, match=r"method\.calibration\.corpus must be set"):
        found("seq2seq", name="wmt14", source="en", target="fr")


# ------------------------------------------------------------------------------------------------------- the planner


def test_the_plan_certifies_what_it_was_made_for() -> None:
    found = RiskTarget(tolerance=0.1, p_value="hoeffding_bentkus").over(GRID, GREEDY)
    assert found is not None and found.fewest == fewest_prompts(0.1, 0.05, "hoeffding_bentkus")
    assert found.planned() == prompts_needed(0.05, 0.1, 0.05, "hoeffding_bentkus", 0.9, 0.2) > found.fewest
    assert RiskTarget().over(GRID, GREEDY) is None, "nothing is promised"


def test_a_sequence_is_over_at_its_first_failure() -> None:
    found = RiskTarget(tolerance=0.1).over([0.9, 0.8, 0.7], GREEDY)
    whole = RiskTarget(tolerance=0.1, whole_grid=True).over([0.9, 0.8, 0.7], GREEDY)
    assert found is not None and whole is not None
    good, bad = np.zeros((60, 1)), np.ones((60, 1))
    assert [found.complete(np.hstack(c)) for c in ([good], [good, bad], [good, good, good])] == [False, True, True]
    assert not found.complete(np.zeros((60, 0))) and not whole.complete(np.hstack([good, bad]))
    assert found.choose(np.hstack([good, bad]))["threshold"] == whole.choose(np.hstack([good, bad, good]))["threshold"]


# ------------------------------------------------------------------------------------------------ the promise, as such


@pytest.fixture(scope="module")
def recorded() -> np.ndarray:
    """Losses of real early exits: a tiny model whose upper layers matter little, decoded at every threshold."""
    model = checks.tiny_target(layers=4, seed=3)
    with torch.no_grad():
        for index in (2, 3):
            layer = model.layers[index]
            for linear in (layer.attention.out, layer.mlp.down):
                linear.dense.mul_(0.35)
    rng = random.Random(0)
    prompts = [torch.tensor([rng.randrange(61) for _ in range(6)]) for _ in range(96)]
    full = checks.outputs(Calm(model, GREEDY, 1.0, head="lens"), prompts, 12)
    columns = []
    for threshold in GRID:
        texts = checks.outputs(Calm(model, GREEDY, threshold, exits=[1, 2, 3], head="lens"), prompts, 12)
        columns.append([1 - rouge_l(ours, theirs) for ours, theirs in zip(full, texts, strict=True)])
    return np.array(columns).T


def test_over_1000_draws_of_recorded_losses_the_promise_is_kept_and_naive_selection_breaks_it(
    recorded: np.ndarray,
) -> None:
    means = recorded.mean(axis=0)
    place = int(np.argmax(means >= means.max() / 2))
    tolerance = 0.99 * float(means[place])  # this threshold is wrong by a hair: as hard to tell as it gets

    def promised(losses: np.ndarray) -> float:
        return calibrate(losses, GRID, tolerance=tolerance).threshold

    kept = redraw(recorded, GRID, promised, tolerance=tolerance, prompts=60, draws=1000)
    naive = redraw(
        recorded, GRID, lambda x: naive_threshold(x, GRID, tolerance), tolerance=tolerance, prompts=60, draws=1000
    )
    assert at_most(kept.broken, 1000, 0.05), f"broken in {kept.broken} of 1000"
    assert more_than(naive.broken, 1000, 0.1), f"naive selection broke it in {naive.broken} of 1000 only"
    assert min(kept.thresholds) < 1, "nothing was ever certified, so nothing could break"


# ---------------------------------------------------------------------------------------------- thresholds and probes


def decoders(target: CausalLM, folder: Path) -> Iterator[Calibrated]:
    depths = np.array([1 + token % 4 for token in range(61)], dtype=np.int32)
    HashTable(depths, 4).save(folder)
    Exits((1, 2, 3)).save(folder, target)
    yield Calm(target, GREEDY, head="lens")
    yield Free(target, GREEDY, depth=2, head="lens")
    yield StaticDepth(target, GREEDY, head="lens")
    yield HashEE(target, GREEDY, head="lens", checkpoint=folder)


def untimed(decoder: Any) -> dict[str, Any]:
    return {key: value for key, value in decoder.stats().items() if key != "confidence_share"}


def test_a_threshold_is_used_as_if_the_decoder_had_been_made_with_it(target: CausalLM, tmp_path: Path) -> None:
    prompts = checks.prompts(61, (5, 8))
    made: list[Any] = [
        Calm(target, GREEDY, 0.25, head="lens"),
        Free(target, GREEDY, depth=2, threshold=0.25, head="lens"),
        StaticDepth(target, GREEDY, depth=1, head="lens"),
    ]
    for used, wanted in zip(decoders(target, tmp_path), [*made, None], strict=True):
        plain: Any = used
        checks.outputs(plain, prompts, 9)
        used.set_threshold(1.0)
        assert plain.guarantee is Guarantee.EXACT and plain.counters.steps == 0, "earlier steps are counted on"
        own = checks.outputs(plain, prompts, 9)
        assert own == [checks.greedy_reference(target, prompt, 9) for prompt in prompts]
        used.set_threshold(0.25)
        assert plain.guarantee is Guarantee.RELAXED
        found = checks.outputs(plain, prompts, 9)
        if wanted is not None:
            assert found == checks.outputs(wanted, prompts, 9) and untimed(plain) == untimed(wanted)


def test_least_depths_raise_the_table(target: CausalLM, tmp_path: Path) -> None:
    decoder: Any = list(decoders(target, tmp_path))[-1]
    decoder.set_threshold(0.5)
    assert set(decoder.table.depths.tolist()) == {2, 3, 4} and decoder.stats()["least_depth"] == 2
    decoder.set_threshold(0.25)
    assert set(decoder.table.depths.tolist()) == {1, 2, 3, 4}, "a raised table must not be raised again"


@pytest.mark.parametrize("threshold", [0.05, 1.0])
def test_the_probe_times_what_decides_and_leaves_no_trace(threshold: float, target: CausalLM) -> None:
    prompts = checks.prompts(61, (5, 8))
    for decoder in (
        Calm(target, GREEDY, threshold, exits=[1, 3], head="lens"),
        Free(target, GREEDY, 2, threshold, head="lens"),
    ):
        before = checks.outputs(decoder, prompts, 12)
        facts = decoder.stats()
        found = confidence_share(decoder, prompts, 12, torch.Generator())
        assert decoder.stats() == facts and decoder.target is target and checks.outputs(decoder, prompts, 12) == before
        if threshold == 1:
            assert found == {"confidence_share": 0.0, "looks_per_step": 0.0}, "nothing is decided"
        else:
            assert 0.05 < found["confidence_share"] < 0.95 and found["looks_per_step"] > 0


@pytest.mark.parametrize("method", ["calm", "free"])
def test_layers_in_the_record_are_those_that_ran(
    method: str, files: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where layers run, over a whole run of both arms, against what samples and summary claim."""
    plain = [word for word in words if not word.startswith(("method=", "method.calibration"))]
    more = [f"method={method}", "method.threshold=0.3", "measure.agreement=false", "dataset.limit=2"]
    more.append("hardware.linear=plain")  # the C++ kernels run layers and exits in one call
    own = replace(compose.compose([*plain, *more]), paths=PathsConfig(str(tmp_path), None, str(files / "cache")))
    ran: list[int] = []
    as_written = CausalLM.run

    def counted(lm: CausalLM, state: Any, layers: Iterable[int], *rest: Any) -> dict[int, torch.Tensor]:
        ran.extend(order := list(layers))
        return as_written(lm, state, order, *rest)

    monkeypatch.setattr(CausalLM, "run", counted)
    outcome = run(own)
    samples = run_folder.read_samples(outcome.path)
    passes = [zip(s.step_target_passes, s.step_layers, strict=True) for s in samples]  # those of the warm-up ran, too
    assert round(sum(4 * count * share for steps in passes for count, share in steps)) == len(ran)
    facts = outcome.summary["method_facts"]
    steps = [share for s in samples if s.arm == "method" for share in s.step_layers[1:]]
    assert facts["layers_per_token"] == pytest.approx(4 * sum(steps) / len(steps)) and sum(steps) < len(steps)
    assert sum(facts["exits"].values()) == facts["tokens"] == len(steps)
    assert {"heads_per_token", "layer_equivalents_per_token"} <= facts.keys()


# ---------------------------------------------------------------------------------------------------------- ROUGE-L


def test_common_subsequences_equal_the_textbook_table() -> None:
    rng = random.Random(1)
    for _ in range(200):
        a, b = ([rng.randrange(4) for _ in range(rng.randrange(12))] for _ in range(2))
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
        assert common_subsequence(a, b) == table[-1][-1]


def test_rouge_l_by_hand_and_as_the_package_has_it() -> None:
    from rouge_score import rouge_scorer

    assert rouge_l([1, 2, 3, 4], [1, 3, 4, 9]) == pytest.approx(0.75)
    assert rouge_l([], []) == 1.0 and rouge_l([1], []) == rouge_l([], [1]) == 0.0 and rouge_l([1], [2]) == 0.0
    rng = random.Random(2)
    package = rouge_scorer.RougeScorer(["rougeL"])
    for _ in range(20):
        a, b = ([rng.randrange(9) for _ in range(rng.randrange(1, 20))] for _ in range(2))
        theirs = package.score(*(" ".join(f"w{token}" for token in text) for text in (a, b)))["rougeL"].fmeasure
        assert rouge_l(a, b) == pytest.approx(theirs)
