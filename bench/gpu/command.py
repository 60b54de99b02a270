"""``python -m bench gpu pack|run|probe|import``: one pack, one run on a machine with a GPU."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.config import compose, options
from bench.config.typecheck import did_you_mean
from bench.errors import BAD_INPUT, FAILED, OK, UserError

_SUMMARY = """\
pack collects what a bare machine lacks (code, wheels, data sets, model, checkpoints) into pieces below a size; each
piece has a start.py that takes it in there and starts the job. run is that job: the stages of conf/gpu.yaml, one after
another, resumable. import lays the records that came back beside the project's own. See docs/gpu.md."""
_EXAMPLES = (
    "python -m bench gpu pack limit_mib=64                            build/gpu/a, b, c, ...",
    "python3 build/gpu/a/start.py wait=540 out=FOLDER                 on the other machine, for each piece in turn",
    "python -m bench gpu run                                          the same stages, where everything is installed",
    "python -m bench gpu run stage=cost,large home=results/gpu        some stages",
    "python -m bench gpu import FOLDER/results.tar.gz                 into results/reference",
)


@dataclass(frozen=True)
class PackOptions:
    """Options of ``gpu pack``.

    Attributes:
        out: folder of the pieces
        limit_mib: most MiB of a piece, all its files together
        python: version of the other machine's Python
        model_wheel: the wheel of the embedded model, where it was downloaded by other means
    """

    out: Path = Path("build/gpu")
    limit_mib: float = 64.0
    python: str = "3.12"
    model_wheel: Path | None = None

    def __post_init__(self) -> None:
        if self.limit_mib <= 0:
            raise UserError(f"limit_mib must be above 0, got {self.limit_mib:g}. Set limit_mib=64.")


@dataclass(frozen=True)
class RunOptions:
    """Options of ``gpu run``.

    Attributes:
        stage: stages or groups of them (measure, train)
        home: folder of logs, states and records; a job there resumes
        out: folder of the archive, which is written after each stage
        hardware: of all runs, a choice of conf/hardware
        extra: further settings of the runs of methods, separated by spaces; not of costs, laboratory and trainings
        limits: factor on the time limits of the stages
        patience_s: how long a stage waits for what has not arrived
    """

    stage: tuple[str, ...] | None = None
    home: Path = Path("build/gpu-run")
    out: Path | None = None
    hardware: str = "cuda_bf16"
    extra: str = ""
    limits: float = 1.0
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        if self.limits <= 0:
            raise UserError(f"limits must be above 0, got {self.limits:g}. Set limits=1.")
        if self.patience_s < 0:
            raise UserError(f"patience_s must be at least 0, got {self.patience_s:g}. Set patience_s=300.")


@dataclass(frozen=True)
class ProbeOptions:
    """Options of ``gpu probe``.

    Attributes:
        out: file to write, .json
        hardware: a choice of conf/hardware
    """

    out: Path | None = None
    hardware: str = "cuda_bf16"


@dataclass(frozen=True)
class ImportOptions:
    """Options of ``gpu import``.

    Attributes:
        to: folder of the records; unless given, that of the project's
        condense: keep only the times of each prompt, not its steps and texts
        invalid: take INVALID runs too
    """

    to: Path | None = None
    condense: bool = False
    invalid: bool = False


def help_text() -> str:
    kinds = {"pack": PackOptions, "run": RunOptions, "probe": ProbeOptions, "import": ImportOptions}
    usage = "gpu pack|run|probe [key=value ...]\n       python -m bench gpu import FILE ... [key=value ...]"
    return options.help_text(usage, _SUMMARY, _EXAMPLES, {f"Options of {name}": kind for name, kind in kinds.items()})


def main(argv: Sequence[str] | None = None) -> int:
    """Pack, run, probe or import; returns the exit code."""
    return options.command(_main, help_text, argv, measures=False)


def _main(words: list[str]) -> int:
    if not words or words[0] not in _COMMANDS:
        hint = did_you_mean(words[0], _COMMANDS) if words else ""
        raise UserError(f"gpu needs one of {', '.join(_COMMANDS)}.{hint} (python -m bench gpu --help)")
    return _COMMANDS[words[0]](words[1:])


def _pack(words: list[str]) -> int:
    asked, rest = options.parse(PackOptions, words)
    options.refuse(rest, "gpu pack", options.keys(PackOptions))
    from bench.gpu import pack, plan

    most_bytes = int(asked.limit_mib * 2**20)
    contents = plan.read(values(RunOptions())).contents
    pieces = pack.pack(contents, asked.out, most_bytes, asked.python, asked.model_wheel)
    print(pack.summary(pieces, most_bytes))
    return OK


def _run(words: list[str]) -> int:
    asked, rest = options.parse(RunOptions, words)
    options.refuse(rest, "gpu run", options.keys(RunOptions))
    known = compose.every_group()["hardware"]
    if asked.hardware not in known:
        hint = did_you_mean(asked.hardware, known)
        raise UserError(f"hardware must be one of {', '.join(known)}, got '{asked.hardware}'.{hint}")
    from bench.gpu import plan, start
    from bench.gpu.runner import Job

    home = asked.home.absolute()
    stages = plan.read(values(asked)).chosen(asked.stage)
    packed = (home / start.PIECES).is_file()
    outcomes = Job(stages, home, asked.out, asked.limits, asked.patience_s, packed).run()
    print(f"logs, states and records: {home}")
    return OK if all(outcome.state == "done" for outcome in outcomes.values()) else FAILED


def values(asked: RunOptions) -> dict[str, str]:
    """What stands for the names in braces of ``conf/gpu.yaml``."""
    from bench.gpu import start
    from bench.gpu.pack import MODEL_WHEEL

    home = asked.home.absolute()
    hardware, results = f"hardware={asked.hardware}", shlex.quote(f"paths.results={home / 'results'}")
    packed = (home / start.PIECES).is_file()
    train = f"{hardware} force=true {asked.extra}"
    return {
        "home": shlex.quote(str(home)),
        "hardware": hardware,
        "run": f"{hardware} measure=quick {results} {asked.extra}",
        "cost": f"{hardware} {results}",
        "lossless": f"{hardware} {results}",
        "model_wheel": shlex.quote(f"wheel={home / 'model' / MODEL_WHEEL}") if packed else "",
        "trained": shlex.quote(str(home / "trained")),
        "heads": f"model=smollm2 corpus=dolly,gsm8k train.answers.tokens=2000000 train.answers.limit=512 "
        f"train.answers.batch=256 train.features=live train.recipe.batch_size=64 train.recipe.steps=6000 {train}",
        "exits": f"model=smollm2 corpus=dolly:2200,gsm8k:800 train.answers.tokens=450000 train.answers.batch=256 "
        f"train.tokens=393216 {train}",
        "exit_model": f"model=smollm2 corpus=dolly,gsm8k,own_requests,multi30k_requests train.rank=32 train.interval=4 "
        f"train.recipe.tokens=16384 train.recipe.steps=6000 {train}",
        "pairs": f"corpus=multi30k {train}",
        "students": f"model=multi30k_4_4 train.recipe.tokens=8192 train.recipe.steps=12000 corpus=multi30k {train}",
    }


def _probe(words: list[str]) -> int:
    asked, rest = options.parse(ProbeOptions, words)
    options.refuse(rest, "gpu probe", options.keys(ProbeOptions))
    from dataclasses import asdict

    from bench.gpu import probe
    from bench.models import loading
    from bench.utils import files, machine

    hardware = asdict(compose.compose([f"hardware={asked.hardware}"]).hardware)
    machine.set_threads(hardware["threads"])
    found = probe.Probing(*loading.resolve_hardware(hardware)).run()
    if asked.out:
        files.write_output(asked.out, probe.dumped(found))
    print(probe.text(found))
    return OK


def _import(words: list[str]) -> int:
    asked, archives = options.parse(ImportOptions, words)
    if not archives:
        raise UserError(f"import needs the files that came back, as in: {_EXAMPLES[-1].split('   ')[0]}")
    options.refuse([word for word in archives if "=" in word], "gpu import", options.keys(ImportOptions))
    from bench.gpu import bring_back

    reference = compose.compose([]).paths.reference
    target = asked.to or Path(reference or "results/reference")
    with tempfile.TemporaryDirectory() as scratch:
        bring_back.unpack([Path(name) for name in archives], Path(scratch))
        found = list(bring_back.bring_back(Path(scratch), target, condense=asked.condense, invalid=asked.invalid))
    print("\n".join(each.line() for each in found) or "no records in the archive")
    print(
        f"{sum(each.state == 'new' for each in found)} new records in {target}. Next: make readme, then git add them."
    )
    return BAD_INPUT if any(each.state == "refused" for each in found) else OK


_COMMANDS: dict[str, Callable[[list[str]], int]] = {"pack": _pack, "run": _run, "probe": _probe, "import": _import}
