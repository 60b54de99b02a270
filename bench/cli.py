"""The command line: ``python -m bench <overrides>`` runs, a first word without ``=`` is a sub-command.

Nothing here imports torch before a run starts; what a sub-command needs, it imports itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import __version__
from bench.config import compose
from bench.config.schema import RunConfig
from bench.config.typecheck import did_you_mean
from bench.errors import (
    BAD_INPUT,
    FAILED,
    INVALID,
    OK,
    TRACEBACK,
    UserError,
    _classify,
    report_failure,
)
from bench.sweep.job import Result

if TYPE_CHECKING:
    from bench.sweep.executors import Answers
    from bench.sweep.job import Task


_HELP = """\
Try:
  python -m bench                                            prompt lookup on the demo prompts, embedded model
  python -m bench method=speculative_sampling dataset=mtbench measure=quick
  python -m bench -m 'method=glob(*)' dataset=mtbench measure=quick            compare all methods

Usage: python -m bench [-m] [group=choice ...] [key=value ...]
       python -m bench SUB-COMMAND ...

Sub-commands:
  list [methods|models|datasets|...]   what there is to choose from
  show GROUP/CHOICE                    its settings and what they mean
  validate FOLDER ...                  check the records of finished runs; results/ for all of them
  pack FOLDER ...                      compress the samples of finished runs; everything reads them as before
  doctor                               check this machine and installation
  compare A B                          two runs, by folder or id: what differs, and which is faster
  collect [column=value ...] [out=F]   one table over all runs, filtered; F: .csv .parquet .json .md
  frontier [column=value ...] [out=F]  speed against quality, and which points count; original=MODEL quality=SCORE
  report [column=value ...] [out=F]    a page with a table per group of runs; F: .html .md; rebuild=true
  dashboard [column=value ...]         a view at Weights & Biases for each table; entity= project= out=F.json
  check-method NAME [method.key=value] hold a decoder to the contract, yours too (CONTRIBUTING.md)

Options:
  -m, --multirun   a sweep: key=a,b  key=glob(*)  key=range(1,9,2), every combination one run; a plan comes first
                   resume=auto|never|force|only_failed  shuffle_seed=0  dry_run=true
                   cluster=local|process|slurm|ray  where its jobs run (python -m bench show cluster/slurm)
  sweep=NAME       a sweep from conf/sweep (python -m bench list sweeps); further settings may be added
  --fresh          measure anew what was measured before, and forget the earlier records
  --config         print the composed configuration instead of running it
  --version, -h, --help

Groups:
{groups}

Settings: seed, max_new_tokens, batch_size, max_context, and every key of a group as group.key=value.
Exit codes: 0 fine, 1 the run failed, 2 bad input, 3 finished but INVALID. {traceback}=1 shows tracebacks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of a pipe went away, as in `python -m bench list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error)


def _dispatch(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        return _print(_HELP.format(groups=_group_lines(), traceback=TRACEBACK))
    if "--version" in words:
        return _print(f"decodebench {__version__}")
    if words and _is_command(words[0]):
        return _sub_command(words[0], words[1:])
    flags = {word for word in words if word.startswith("-")}
    if unknown := sorted(flags - _FLAGS):
        raise UserError(f"Unknown option '{unknown[0]}'.{did_you_mean(unknown[0], _FLAGS)} (python -m bench --help)")
    overrides = [word for word in words if word not in flags]
    if "--config" in flags:
        return _print_config(overrides)
    start = _sweep if flags & {"-m", "--multirun"} or any(map(_is_of_sweeps, overrides)) else _run
    return start(overrides, "--fresh" in flags)


_FLAGS = {"-m", "--multirun", "--fresh", "--config", "-h", "--help", "--version"}


def _is_of_sweeps(word: str) -> bool:
    """Names a sweep, or where to run it, which may have a single job."""
    key = word.lstrip("+").partition("=")[0]
    return key == compose.SWEEP or key.split(".")[0] == compose.CLUSTER


def _is_command(word: str) -> bool:
    return "=" not in word and word[:1] not in ("-", "+", "~") and word not in compose.groups()


def _sub_command(name: str, arguments: list[str]) -> int:
    if name not in _COMMANDS:
        hint = did_you_mean(name, _COMMANDS) or f" Sub-commands: {', '.join(_COMMANDS)}."
        raise UserError(f"Unknown sub-command '{name}'.{hint} (python -m bench --help)")
    return _COMMANDS[name](arguments)


# ------------------------------------------------------------------------------------------------------- running


def _run(overrides: list[str], fresh: bool) -> int:
    return _execute(compose.compose(overrides), fresh)


def _execute(cfg: RunConfig, fresh: bool | datetime) -> int:
    from bench.config import instantiate

    instantiate.check(cfg)
    from bench.measure.run import run

    outcome = run(cfg, fresh=fresh)
    return OK if outcome.verdict.valid else INVALID


def _print_config(overrides: list[str]) -> int:
    import yaml

    return _print(yaml.safe_dump(compose.compose(overrides).to_dict(), sort_keys=False).rstrip())


def attempt(words: Sequence[str], fresh: bool | datetime) -> Result:
    """A run as a job of a sweep: a failure is reported, and told instead of raised.

    Args:
        words: its command line.
        fresh: see ``bench.measure.run.run``.
    """
    try:
        return Result(_execute(compose.compose(words), fresh))
    except Exception as error:
        return Result(report_failure(error), _classify(error)[1])


def _sweep(overrides: list[str], fresh: bool) -> int:
    """The plan, and then every job of it that is to run, where ``cluster=...`` says."""
    from bench.config import instantiate
    from bench.records import tracking
    from bench.sweep import plan as sweep

    options, words = sweep.read_words(overrides, fresh=fresh)
    cluster = instantiate.build_cluster(compose.compose_cluster(options.cluster))
    plan = sweep.make(words, options, cluster)
    print(plan.text(every=options.dry_run), flush=True)
    if options.dry_run or not plan.to_run:
        return BAD_INPUT if all(job.state == "incompatible" for job in plan.jobs) else OK
    with tracking.grouped(overrides):
        tasks = sweep.tasks(plan, fresh=options.fresh)
        return _close_sweep(tasks, cluster.run(tasks, sweep.folder(plan)))


def _close_sweep(tasks: Sequence[Task], answers: Answers) -> int:
    """The table of failures, and the exit code that says most; of jobs that were left running nothing is known."""
    results = dict(answers)
    failed = [
        f"  {' '.join(task.words)}: {results[place].message}"
        for place, task in enumerate(tasks)
        if place in results and results[place].message
    ]
    if failed:
        print("\n".join([f"\n{len(failed)} of {len(tasks)} runs failed:", *failed]), file=sys.stderr)
    codes = {result.code for result in results.values()}
    return next((code for code in (FAILED, BAD_INPUT, INVALID) if code in codes), OK)


# -------------------------------------------------------------------------------------------------- sub-commands


def _list(arguments: list[str]) -> int:
    groups = compose.every_group()
    if not arguments:
        return _print(_group_lines())
    named = {compose.plural(group): group for group in groups} | {group: group for group in groups}
    if (name := arguments[0]) not in named:
        raise UserError(f"Unknown group '{name}'.{did_you_mean(name, named)} Groups: {', '.join(groups)}.")
    group = named[name]
    width = max(map(len, groups[group]))
    lines = (f"{choice:{width}}  {_summary(group, choice)}".rstrip() for choice in groups[group])
    return _print("\n".join(lines))


def _show(arguments: list[str]) -> int:
    if not arguments or arguments[0].count("/") != 1:
        raise UserError("show needs GROUP/CHOICE, as in: python -m bench show method/prompt_lookup")
    file = compose.config_file(*arguments[0].split("/"))
    text = file.read_text(encoding="utf-8").rstrip()
    documentation = _documentation(text)
    return _print(text + (f"\n\n{documentation}" if documentation else ""))


def _validate(arguments: list[str]) -> int:
    from bench import validate

    if not arguments:
        raise UserError(
            "validate needs the folder of a run, or that of all, as in: python -m bench validate results/RUN_ID, or "
            "python -m bench validate results"
        )
    bad = 0
    for folder in map(Path, arguments):
        kept = list(validate.check(folder) if validate.is_shelf(folder) else [validate.check_one(folder)])
        print(*(each.line() for each in kept if each.problems), f"{folder}: {validate.counted(kept)}", sep="\n")
        bad += sum(bool(each.problems) for each in kept)
    return BAD_INPUT if bad else OK


def _pack(arguments: list[str]) -> int:
    from bench.records import run_folder

    if not arguments:
        raise UserError("pack needs the folder of a finished run, as in: python -m bench pack results/RUN_ID")
    for folder in arguments:
        print(f"{folder}: {'packed' if run_folder.pack(Path(folder)) else 'packed already'}")
    return OK


def _doctor(arguments: list[str]) -> int:
    from bench.doctor import examine

    findings = examine(compose.compose([]))
    for finding in findings:
        print(finding.line())
    return FAILED if any(finding.state == "fail" for finding in findings) else OK


def _compare(arguments: list[str]) -> int:
    names, options = _split(arguments, "paths.results")
    if len(names) != 2:
        raise UserError("compare needs two runs, by folder or id, as in: python -m bench compare results/A results/B")
    from bench.report import compare

    results = _results(options)
    a, b = (compare.Run.read(compare.find(name, results)) for name in names)
    return _print(compare.compare(a, b))


def _collect(arguments: list[str]) -> int:
    filters, options = _split(arguments, "out", "paths.results")
    from bench.report import collect

    rows = collect.select([collect.row(record) for record in collect.read(_results(options))], filters)
    if out := options.get("out"):
        collect.write(rows, Path(out))
        return _print(f"{len(rows)} runs: {out}")
    return _print(collect.text(rows) if rows else "No run.")


def _report(arguments: list[str]) -> int:
    filters, options = _split(arguments, "out", "rebuild", "paths.results")
    from bench.report import collect, leaderboard, markdown

    results = _results(options)
    if (again := options.get("rebuild", "false")) not in ("true", "false"):
        raise UserError(
            f"rebuild came as '{again}'; it must be true or false. Set rebuild=true to make summaries anew."
        )
    found, problems = markdown.rebuild(collect.read(results), everything=again == "true")
    rows = [collect.row(record) | {"record": record} for record in found]
    kept = [row["record"] for row in collect.select(rows, filters)]
    boards, file = leaderboard.boards(kept), Path(options.get("out", results / "report.html"))
    markdown.write(boards, [*problems, *markdown.unfinished(kept)], file)
    for problem in problems:
        print(problem, file=sys.stderr)
    return _print(f"{sum(len(board.entries) for board in boards)} runs in {len(boards)} tables: {file}")


def _dashboard(arguments: list[str]) -> int:
    filters, options = _split(arguments, "out", "entity", "project", "paths.results")
    from bench.report import collect, leaderboard, wandb_views

    rows = [collect.row(record) | {"record": record} for record in collect.read(_results(options))]
    boards = leaderboard.boards(row["record"] for row in collect.select(rows, filters))
    if not boards:
        raise UserError("No finished run to show; a dashboard needs one or more. Run: python -m bench")
    project = options.get("project", wandb_views.PROJECT)
    if out := options.get("out"):
        wandb_views.write(wandb_views.views(boards, options.get("entity", ""), project), Path(out))
        return _print(f"{len(boards)} views: {out}")
    return _print("\n".join(wandb_views.push(boards, options.get("entity"), project)))


def _frontier(arguments: list[str]) -> int:
    filters, options = _split(arguments, "out", "original", "quality", "paths.results")
    from bench.records import run_folder
    from bench.report import collect, frontier

    rows = [collect.row(record) | {"record": record} for record in collect.read(_results(options))]
    kept = [row["record"] for row in collect.select(rows, filters)]
    found = frontier.frontiers(kept, options.get("original"), options.get("quality"))
    if not (out := options.get("out")):
        return _print(frontier.text(found))
    if Path(out).suffix != ".md":
        raise UserError(f"out={out} came; it must end in .md. Set out=FILE.md.")
    with run_folder.machine_failures():
        Path(out).write_text(frontier.markdown(found), encoding="utf-8")
    return _print(f"{sum(len(each.points) for each in found)} runs in {len(found)} tables: {out}")


def _split(arguments: list[str], *names: str) -> tuple[list[str], dict[str, str]]:
    """Words of a sub-command, and those of its own options, ``name=value``."""
    options = dict(word.split("=", 1) for word in arguments if word.split("=", 1)[0] in names and "=" in word)
    return [word for word in arguments if "=" not in word or word.split("=", 1)[0] not in names], options


def _results(options: dict[str, str]) -> Path:
    """The folder with the runs, as a run would find it."""
    given = options.get("paths.results")
    return Path(given) if given else Path(compose.compose([]).paths.results)


def _check_method(arguments: list[str]) -> int:
    if not arguments:
        raise UserError("check-method needs the name of a method, as in: python -m bench check-method prompt_lookup")
    from bench.contract.check_method import check_method

    failed = 0
    for check in check_method(arguments[0], arguments[1:]):
        print(check.line(), flush=True)  # some take seconds
        failed += check.state == "FAIL"
    return FAILED if failed else OK


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "list": _list,
    "show": _show,
    "validate": _validate,
    "pack": _pack,
    "doctor": _doctor,
    "compare": _compare,
    "collect": _collect,
    "frontier": _frontier,
    "report": _report,
    "dashboard": _dashboard,
    "check-method": _check_method,
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
