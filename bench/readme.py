"""Write the generated tables of README.md and docs/, and RESULTS.md, from the committed records: ``make readme``.

A test compares the files with the output of this module, so no figure in them can be out of date.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.analysis import ranking
from bench.config import compose, instantiate
from bench.config.schema import checkout
from bench.report import collect, leaderboard, league, markdown, plots, series, tables, terminal

_FOLDER = Path("results", "reference")  # in a checkout: the committed records
BLOCK = re.compile(
    r"<!-- (short: [^ ]+|(?:leaderboard|series): [^>]+|(?:lossless|packages): \w+|promises|league|methods) -->\n"
    r".*?<!-- end -->",
    re.DOTALL,
)
FIGURE = Path("docs/figures/speedup_mtbench.svg")
PROMISES = Path("docs/figures/promises.svg")
LEAGUE = Path("docs/figures/league.svg")
_WORDS = re.compile(r"<text[^>]*>([^<]*)</text>")
_SHORT = ("speed-up", "novel text", "conversations", "tokens/step", "tokens/s", "memory", "agreement", "RESULT")
_FAMILIES = (
    "baseline",
    "speculative",
    "early_exit",
    "non_autoregressive",
    "external",
)  # their order in the table
_ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")


def written(text: str, results: Path) -> str:
    """A page with its blocks filled from the records in ``results``."""
    return BLOCK.sub(lambda found: _block(found.group(1), results), text)


def _block(what: str, results: Path) -> str:
    kind, _, words = what.partition(": ")
    tables_of = {
        "methods": _methods,
        "packages": _packages,
        "promises": _promises,
        "league": _league,
        "series": _series,
    }
    if kind in tables_of:
        return f"<!-- {what} -->\n{tables_of[kind](results, words)}\n<!-- end -->"
    body = {"lossless": _lossless, "short": _short, "leaderboard": _leaderboard}[kind](results, words)
    lines = "\n".join(f"    {line}".rstrip() for line in body)
    return f"<!-- {what} -->\n{lines}\n<!-- end -->"


def _leaderboard(results: Path, words: str) -> list[str]:
    """``best=N``: the N fastest ranked methods of each guarantee among the runs that ``collect`` selects; all: all
    of these runs, with a rank or without.
    """
    *filters, best = words.split()
    groups = _groups(results, filters)
    assert len(groups) == 1, f"{words} selects {len(groups)} tables"
    if best == "best=all":
        every = [entry.summary | {"method": entry.label} for entry in groups[0].rows]
        return [line for line in terminal.leaderboard(every).splitlines() if line]
    kept: dict[tuple[str, str], Any] = {}
    for entry in groups[0].ranked:  # the fastest first within each guarantee
        kept.setdefault((entry.guarantee, entry.method), entry.summary | {"method": entry.label})
    most = int(best.removeprefix("best="))
    chosen = [
        run for guarantee in leaderboard.GUARANTEES for run in [kept[key] for key in kept if key[0] == guarantee][:most]
    ]
    return [line for line in terminal.leaderboard(chosen).splitlines() if line]


def _series(results: Path, words: str) -> str:
    """``over=AXIS``: speed-ups over one of ``series.AXES``, of the runs that ``collect`` selects."""
    *filters, over = words.split()
    found = [table for _, table in series.markdown(_groups(results, filters), series.AXES[over.removeprefix("over=")])]
    assert len(found) == 1, f"{words} selects {len(found)} tables"
    return found[0]


def _groups(results: Path, filters: Sequence[str]) -> list[leaderboard.ComparisonGroup]:
    """The runs that ``collect`` selects, by what makes them comparable."""
    rows = [collect.row(record) | {"record": record} for record in collect.read(results)]
    return leaderboard.groups(row["record"] for row in collect.select(rows, filters))


def _short(results: Path, prefix: str) -> list[str]:
    """The main lines of one run's table."""
    (folder,) = (file.parent for file in results.glob(f"{prefix}*/summary.json"))
    lines = terminal.render(json.loads((folder / "summary.json").read_text()), _FOLDER / folder.name).splitlines()
    return [lines[0], *(line for line in lines[1:] if line.strip().startswith(_SHORT))]


def _methods(results: Path, _: str) -> str:
    """The methods of conf/method with their papers, by family, exactness and what they need."""
    guarantees: dict[str, set[str]] = {}
    for record in collect.read(results):
        if record.summary:
            target = str(record.manifest["method"].get("_target_")).rpartition(".")[2]
            guarantees.setdefault(target, set()).add(record.summary["guarantee"])
    texts = {
        name: compose.config_file("method", name).read_text(encoding="utf-8")
        for name in compose.every_group()["method"]
    }
    classes = {name: instantiate.method_class(yaml.safe_load(text)) for name, text in texts.items()}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, method in classes.items():
        found = guarantees.get(method.__name__) or {method.guarantee.value}
        key = method.family, " or ".join(g for g in leaderboard.GUARANTEES if g in found), method.needs
        rows.setdefault(key, []).append(_with_paper(name, method.paper))
    ordered = sorted(rows.items(), key=lambda row: (_FAMILIES.index(row[0][0]), row[0][1], row[0][2]))
    cells = [[family.replace("_", "-"), *others, ", ".join(names)] for (family, *others), names in ordered]
    return tables.markdown(["family", "exactness", "needs", "methods"], cells)


def _with_paper(name: str, paper: str) -> str:
    source = _ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", paper)
    return f"`{name}` ({source})" if source else f"`{name}`"


def _packages(_: Path, top: str) -> str:
    """The packages of bench or methods, each with the first line of its docstring and its modules."""
    root, cells = Path(__file__).resolve().parents[1], []
    for file in sorted(root.glob(f"{top}/**/__init__.py")):
        name = ".".join(file.parent.relative_to(root).parts)
        sentence = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        modules = sorted(module.stem for module in file.parent.glob("*.py") if module != file)
        cells.append([f"`{name}`", sentence.replace("``", "`").rstrip("."), " ".join(f"`{each}`" for each in modules)])
    return tables.markdown(["package", "what it does", "modules"], cells)


def _promises(results: Path, _: str) -> str:
    """The tested promises: a row for each loss and tolerance of a record."""
    from bench.promise import records

    found = records.read(results)
    rows = [[record.manifest["model"]["name"], *cells] for record in found for cells in records.cells(record)]
    return tables.markdown(("model", *records.HEADER), rows)


def _league(results: Path, _: str) -> str:
    """The league's drafters with each budget."""
    return league.by_budget(_standings(results))


def _standings(results: Path) -> league.Standings:
    (found,) = league.standings(collect.read(results))
    return found


def _lossless(results: Path, experiment: str) -> list[str]:
    from bench.lossless import report

    table = {"sampling": report.rules_table, "rounds": report.rounds_table}[experiment]
    found = min((results / "lossless").glob(f"{experiment}-*/result.json"))
    return list(table(json.loads(found.read_text(encoding="utf-8"))))


def results_page(results: Path) -> str:
    """RESULTS.md: every run of the committed records, by what may stand in one table, and the laboratory's."""
    found = collect.read(results)
    body = markdown.to_markdown(leaderboard.groups(found), markdown.unfinished(found), _FOLDER.as_posix())
    title, _, tables = body.partition("\n\n")
    limits = {"speed": 100 * ranking.SPEED_RANGE, "score": 100 * ranking.SCORE_LOSS, "text": 1 - ranking.TEXT_LOSS}
    limits |= {"scored": 100 * ranking.SCORED_SHARE}
    preface = _PREFACE.format(**limits, nats=ranking.LOGPROB_LOSS)
    return f"{title}\n\n{preface}\n\n{tables}{_laboratory(results)}"


_PREFACE = """\
Made by `make readme` from the records in [results/reference/](results/reference/); do not edit. `python -m bench
validate results` checks the records, `python -m bench report` makes a page of them to sort, filter and open, and
[notebooks/leaderboard.ipynb](notebooks/leaderboard.ipynb) draws them.

Each table holds runs that share model, data, machine, number type, sampling, batch size and limit; nothing is ranked
across tables. Ranks count within one guarantee: EXACT methods write the target's own text, RELAXED ones may change it,
INDEPENDENT_MODEL ones are models of their own. Speed-ups are over a baseline that was measured interleaved in the
same run, per token, of one-pass methods in total time, with 95 % intervals over the conversations; after a score is
the baseline's. **novel** counts only conversations in which the baseline repeats at most a tenth of its tokens,
**worst** is the slowest conversation, **slower** the share of those below 1, **identical** the share of texts that
equal the baseline's; **tie** marks an interval that overlaps that of the rank above.

A run has no rank if it is INVALID or INCONCLUSIVE, if its baseline was more than {speed:.0f} % faster or slower than
the table's median, or if the method may change the text and quality is unknown or lost: more than {score:.0f} % of
the baseline's score; without a score of at least {scored:.0f} % of the prompts, a ROUGE-L to the baseline's text below
{text:.2f}, a log-probability per token that is {nats} lower; or more repetition (`bench/analysis/ranking.py`). Below a
table: whether its ranks hold over texts of equal length; at the end: from which batch size on a method is no longer
faster."""


def _laboratory(results: Path) -> str:
    """The experiments on losslessness, which are no runs and have no speed."""
    cells = []
    for file in sorted((results / "lossless").glob("*/result.json")):
        manifest = json.loads((file.parent / "manifest.json").read_text(encoding="utf-8"))
        result = json.loads(file.read_text(encoding="utf-8"))
        name = f"[{file.parent.name}]({_FOLDER}/lossless/{file.parent.name}/)"
        facts = [
            manifest["experiment"],
            manifest["config"]["method"]["name"],
            manifest["model"]["name"],
            manifest["dtype"],
        ]
        cells.append([*facts, _found(manifest, result), "yes" if result["passed"] else "no", name])
    if not cells:
        return ""
    header = ["experiment", "method", "model", "type", "found", "as promised", "record"]
    return f"\n## Losslessness laboratory\n\n{_EXPERIMENTS}\n\n{tables.markdown(header, cells)}\n"


_EXPERIMENTS = """\
[docs/lossless.md](docs/lossless.md) explains the experiments. Where a greedy text is not identical, rounding decided
between two tokens at some place. A violation is a token whose log-probability is further below that of the target's
choice than the near-tie gap. The decoder's passes and the check round independently, so a violation in 16 bit has to be
looked at in float32, where all texts must be identical. Smallest p: of all tests of exact rules, which pass above the
level that keeps false alarms of all of them together at 1 %."""


def _found(manifest: dict[str, Any], result: dict[str, Any]) -> str:
    """What an experiment counted, in one cell of a table."""
    if "identical" in result:
        texts = len(result["prompts"])
        return f"{result['identical']} of {texts} texts identical, violations: {result['violations']}"
    if not (cells := result.get("cells")):
        return ""
    exact = [cell["p_value"] for cell in cells if cell.get("exact", True)]
    draws = f"{manifest['lab'].get('draws', 0):,} draws each"
    if not exact:
        rule = cells[0]["rule"]
        return f"{len(cells)} tests, {draws}; wrong rule {rule}, largest p {max(c['p_value'] for c in cells):.1e}"
    wrong = len(cells) - len(exact)
    return f"{len(exact)} tests{f' and {wrong} of wrong rules' if wrong else ''}, {draws}; smallest p {min(exact):.1e}"


def pages(root: Path) -> list[Path]:
    """The files that contain generated blocks or commands."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def figure(results: Path) -> str:
    """README's picture: the fastest run of each method over the most conversations of MT-bench, one at a time."""
    wanted, found = ("smollm2", "mtbench", 1), leaderboard.groups(collect.read(results, "reference"))
    chat = [group for group in found if tuple(group.first[key] for key in ("model", "dataset", "batch_size")) == wanted]
    largest = max(chat, key=lambda group: (group.first["n_prompts"], len(group.ranked)))
    return plots.speedup_svg(leaderboard.fastest(largest))


def promises_figure(results: Path) -> str:
    """The picture of docs/early_exit.md: shares of broken promises."""
    from bench.promise import records

    found = records.read(results)
    return plots.svg(lambda _, ax: records.figure(ax, found), (8, 4.5), (0.08, 0.12, 0.6, 0.84))


def league_figure(results: Path) -> str:
    """The picture of docs/training.md: speed-up against minutes of training."""
    return league.svg(_standings(results))


def facts(file: Path, text: str) -> str | list[str]:
    """What must not be out of date: the text; of a picture its words, as versions of the library draw differently."""
    return _WORDS.findall(text) if file.suffix == ".svg" else text


def main(words: list[str] | None = None) -> int:
    """Name the pages that are out of date; with ``--write``, rewrite their blocks and RESULTS.md."""
    parser = argparse.ArgumentParser("python -m bench.readme", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="write README.md and its figure, RESULTS.md and docs/")
    write = parser.parse_args(words).write
    os.environ["COLUMNS"] = "100"  # whatever the terminal
    root = checkout()
    if root is None:
        raise SystemExit("README.md and RESULTS.md belong to a checkout of the repository. Run this inside one.")
    made = {page: written(page.read_text(encoding="utf-8"), root / _FOLDER) for page in pages(root)}
    made[root / "RESULTS.md"] = results_page(root / _FOLDER)
    made[root / FIGURE] = figure(root / _FOLDER)
    made[root / PROMISES] = promises_figure(root / _FOLDER)
    made[root / LEAGUE] = league_figure(root / _FOLDER)
    known = {page: page.read_text(encoding="utf-8") if page.is_file() else "" for page in made}
    differ = [page for page, text in made.items() if known[page] != text]
    stale = [page for page in differ if write or facts(page, known[page]) != facts(page, made[page])]
    for page in stale:
        print(f"{page.relative_to(root)}: {'written' if write else 'out of date'}")
        if write:
            page.write_text(made[page], encoding="utf-8")
    return int(bool(stale) and not write)


if __name__ == "__main__":
    sys.exit(main())
