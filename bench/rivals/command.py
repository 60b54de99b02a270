"""``python -m bench rivals import FILE ... [baseline=FILE]``"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.config import compose, options
from bench.errors import OK, UserError
from bench.records import rivals
from bench.records.rivals import Row
from bench.report import rivals as report
from bench.report import terminal
from bench.rivals import comparison, formats
from bench.rivals.formats import Entry, Given
from bench.utils import files, stats

_SUMMARY = """\
import reads what the benchmarks of vLLM and SGLang write, prints a table, and keeps the figures below results/rivals/
for python -m bench report. Known are vllm bench serve (--save-result), latency and throughput (--output-json), and
sglang.bench_serving (--output-file) and bench_one_batch_server (--result-filename). With --save-detailed (vLLM) or
--output-details (SGLang) a speed-up has an interval. show prints what was imported.

Imported figures have no rank and no verdict: this suite did not measure them. Against the baseline, per token is the
ratio of mean TPOT, or of mean latency where a file has no TPOT; throughput is that of output tokens per second, and of
vllm bench throughput that of all tokens. Entries of other models, requests, rates or lengths are not compared."""
_EXAMPLES = (
    "python -m bench rivals import eagle.json baseline=plain.json",
    "python -m bench rivals import latency.json baseline=plain.json model=Qwen/Qwen3-8B batch_size=8 output_len=128",
    "python -m bench rivals show",
)


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """Options of ``rivals show``.

    Attributes:
        results: folder of the results, where the figures are in rivals/
    """

    results: Path | None = field(default=None, metadata={"key": "paths.results"})

    @property
    def folder(self) -> Path:
        return self.results or Path(compose.compose([]).paths.results)


@dataclass(frozen=True, slots=True)
class ImportOptions(ShowOptions):
    """Options of ``rivals import``.

    Attributes:
        baseline: file of the same benchmark without speculative decoding; default: no speed-ups
        model: of files that do not name it: latency, throughput, older SGLang
        batch_size: of vllm bench latency, whose files do not say it
        output_len: output tokens of a request of vllm bench latency and throughput, whose files do not say it
    """

    baseline: Path | None = None
    model: str | None = None
    batch_size: int | None = None
    output_len: int | None = None


def help_text() -> str:
    return options.help_text(
        "rivals import FILE ... [baseline=FILE]\n       python -m bench rivals show",
        _SUMMARY,
        _EXAMPLES,
        {"Options": ImportOptions},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Import or show; returns the exit code."""
    return options.command(_main, help_text, argv, measures=False)


def _main(words: list[str]) -> int:
    work, *others = words or [""]
    if work == "import":
        return _import(others)
    if work == "show":
        return _show(others)
    raise UserError(f"rivals must be followed by import or show, got '{work}'. (python -m bench rivals --help)")


def _import(words: list[str]) -> int:
    asked, others = options.parse(ImportOptions, words)
    known = options.keys(ImportOptions)
    named = [word for word in others if "=" not in word or Path(word).is_file()]
    options.refuse([word for word in others if word not in named], "rivals", known)
    if not named and not asked.baseline:
        raise UserError("rivals import needs a file of a benchmark, as in: python -m bench rivals import result.json")
    for name in ("batch_size", "output_len"):
        if (value := getattr(asked, name)) is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}.")
    given = Given(asked.model, asked.batch_size, asked.output_len)
    places = list(dict.fromkeys([*([asked.baseline] if asked.baseline else []), *map(Path, named)]))
    found = {place: formats.read(place, given) for place in places}
    base = found[asked.baseline] if asked.baseline else []
    stored, shown = [], []
    for place, entries in found.items():
        rows = _rows(entries, base, asked.baseline, is_baseline=place == asked.baseline)
        stored.append(rivals.write(asked.folder, place, files.file_sha256(place), rows))
        shown += rows
    print(_text(shown))
    print(f"\nstored   {', '.join(map(str, stored))}")
    return OK


def _rows(entries: Sequence[Entry], base: Sequence[Entry], file: Path | None, *, is_baseline: bool) -> list[Row]:
    if file is None or is_baseline:
        return [Row(entry.figures, is_baseline=is_baseline) for entry in entries]
    return [Row(entry.figures, comparison.against(entry, base, file.name)) for entry in entries]


def _show(words: list[str]) -> int:
    asked, others = options.parse(ShowOptions, words)
    options.refuse(others, "rivals show", options.keys(ShowOptions))
    rows, problems = rivals.read_all(asked.folder)
    for problem in problems:
        print(problem)
    print(_text(rows) if rows else "Nothing was imported. Import: python -m bench rivals import FILE")
    return OK


def _text(rows: Sequence[Row]) -> str:
    compared = [row.against for row in rows if row.against and not row.against.reasons]
    of = sorted({each.of for each in compared if each.of})
    notes = [f"per token: ratio of {' or '.join(of)}, baseline / row."] if of else []
    if any(each.per_token and each.per_token.low is None for each in compared):
        notes.append(f"An interval takes the times of at least {stats.FEWEST_PAIRS} requests in both files.")
    notes.append("Times: median / 99th percentile, measured by the engines' own benchmarks: no rank, no verdict.")
    return "\n".join([report.text(rows), "", textwrap.fill(" ".join(notes), terminal.width())])
