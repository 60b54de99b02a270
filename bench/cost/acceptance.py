"""Accepted lengths as files: ``python -m bench acceptance export|import``, for and from other engines.

Engines count differently. A file therefore names its convention, which is that of its *lengths*:

- ``with_bonus``: a round that accepts no drafted token has length 1, since the target adds a token of its own. SGLang's
  accept_length, vLLM's mean_acceptance_length and synthetic_acceptance_length, the golden lengths of InferenceX.
- ``without_bonus``: that round has length 0. Histograms of vLLM and SGLang, TensorRT-LLM's forced number.

Counts (``num_...``) and acceptance by position are of drafted tokens in every convention. As in vLLM, a round without a
draft is no draft; ``num_rounds`` counts it too, because it costs a pass.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.config import compose, options
from bench.cost.settings import WhatIfQuery
from bench.cost.what_if import Chain, Drafting, Forecast, chain_forecast, read_curve, read_run, table
from bench.errors import OK, UserError
from bench.records.run_folder import Sample
from bench.utils import files

Convention = Literal["with_bonus", "without_bonus"]
FORMAT = "decodebench acceptance"
SUFFIXES = (".json", ".csv", ".jsonl")
_CSV = ("convention", "draft_length", "accepted_length", "rounds")
_SUMMARY = """\
export writes the accepted lengths of a recorded run: .json with the counts and the names that vLLM and SGLang give
them, .csv with a histogram, .jsonl with every round of every prompt.
import reads such a file, or what an engine wrote: metrics.speculative_decoding of vLLM, spec_... fields of SGLang (one
JSON object, or one per line), counters named num_drafts and num_accepted_tokens, a mean length with the draft length,
or the golden lengths of InferenceX (.yaml). python -m bench cost what-if then prices it."""
_EXAMPLES = (
    "python -m bench acceptance export results/RUN out=accepted.json convention=with_bonus",
    "python -m bench acceptance import accepted.json name=theirs convention=with_bonus",
    "python -m bench acceptance import golden.yaml entry=MODEL.MODE name=golden convention=with_bonus context=2048",
    "python -m bench cost what-if results/acceptance/theirs.json curve=results/costs/ID gamma=2,4 draft_ms=1.5",
)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of ``acceptance export``.

    Attributes:
        out: file to write, .json, .csv or .jsonl
        convention: whether lengths count the target's own token: with_bonus or without_bonus
    """

    run: Path
    out: Path
    convention: Convention


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of ``acceptance import``.

    Attributes:
        name: of the imported record
        convention: whether lengths in the file count the target's own token: with_bonus or without_bonus
        context: mean committed tokens of a row; default: as the file says
        batch_size: rows in lockstep; default: as the file says, else 1
        entry: in a .yaml file, the path to the lengths, as in MODEL.thinking_on
        results: folder of the results, where the record goes into acceptance/
    """

    file: Path
    name: str
    convention: Convention
    context: int | None = None
    batch_size: int | None = None
    entry: str | None = None
    results: Path | None = field(default=None, metadata={"key": "paths.results"})


def help_text() -> str:
    return options.help_text(
        "acceptance export RUN out=FILE convention=with_bonus|without_bonus\n"
        "       python -m bench acceptance import FILE name=NAME convention=with_bonus|without_bonus",
        _SUMMARY,
        _EXAMPLES,
        {"Options of export": ExportOptions, "Options of import": ImportOptions},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Export or import; returns the exit code."""
    return options.command(_main, help_text, argv, measures=False)


def _main(words: list[str]) -> int:
    work = words[0] if words else ""
    if work not in ("export", "import"):
        raise UserError(f"acceptance must be followed by export or import, got '{work}'. (acceptance --help)")
    places = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    if len(places) != 1:
        what = "the folder of one run" if work == "export" else "one file"
        raise UserError(f"acceptance {work} needs {what}, got {len(places)}. (python -m bench acceptance --help)")
    others = [word for word in words[1:] if word not in places]
    if not any(word.startswith("convention=") for word in others):
        raise UserError(
            "convention is needed, since engines count differently: with_bonus if a round that accepts nothing has "
            "length 1, without_bonus if it has length 0. Set convention=with_bonus or convention=without_bonus."
        )
    print(_export(Path(places[0]), others) if work == "export" else _import(Path(places[0]), others))
    return OK


def _export(run: Path, words: list[str]) -> str:
    asked, others = options.parse(ExportOptions, words, run=run)
    options.refuse(others, "acceptance", options.keys(ExportOptions))
    if asked.out.suffix not in SUFFIXES:
        raise UserError(f"out must end in {', '.join(SUFFIXES)}, got {asked.out}. Set out=FILE.json.")
    manifest, samples = read_run(run)
    rows = recorded(samples)
    files.write_output(asked.out, _written(asked, manifest, rows))
    found = Acceptance.of(histogram(rows), _context(rows), int(manifest["batch_size"]))
    return f"{found.line(asked.convention)}: {asked.out}"


def _import(file: Path, words: list[str]) -> str:
    asked, others = options.parse(ImportOptions, words, file=file)
    options.refuse(others, "acceptance", options.keys(ImportOptions))
    if "/" in asked.name or asked.name.startswith("."):
        raise UserError(f"name must be the name of a file, got {asked.name}. Set name=NAME.")
    found = read(asked)
    out = (asked.results or Path(compose.compose([]).paths.results)) / "acceptance" / f"{asked.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    stored = {"format": FORMAT, "stored": 1, "name": asked.name, "convention": asked.convention, **asdict(found)}
    files.write_json(out, stored | {"file": asked.file.name})
    return f"{found.line(asked.convention)}: {out}"


# ---------------------------------------------------------------------------------------------------------- the figures


Histogram = Counter[tuple[int, int]]
"""Rounds by draft length and number of accepted drafted tokens."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a method that drafts chains, or of the path that a tree's rounds accepted.

    Attributes:
        reach: share of the rounds that accepted at least 1, 2, ... drafted tokens.
        had: share of the rounds whose draft had at least 1, 2, ... tokens.
        alpha: probability that a judged token is accepted.
        context: mean committed tokens of a row.
        batch_size: rows in lockstep.
        rounds: number of them; None if the file tells only means.
    """

    reach: tuple[float, ...]
    had: tuple[float, ...]
    alpha: float
    context: int
    batch_size: int
    rounds: int | None = None

    @staticmethod
    def of(found: Histogram, context: int, batch_size: int) -> Acceptance:
        """From counted rounds.

        Raises:
            UserError: no round.
        """
        total = sum(found.values())
        if not total:
            raise UserError("The run or file must have a round after the prefill, got none. Name another.")
        places = range(1, max(length for length, _ in found) + 1)
        judged = sum(count * (accepted + (accepted < length)) for (length, accepted), count in found.items())
        taken = sum(count * accepted for (_, accepted), count in found.items())
        return Acceptance(
            reach=tuple(sum(n for (_, accepted), n in found.items() if accepted >= place) / total for place in places),
            had=tuple(sum(n for (length, _), n in found.items() if length >= place) / total for place in places),
            alpha=taken / judged if judged else 0.0,
            context=context,
            batch_size=batch_size,
            rounds=total,
        )

    @property
    def accepted(self) -> float:
        """Mean accepted drafted tokens of a round."""
        return sum(self.reach)

    def chain(self) -> Chain:
        """For ``what_if.chain_forecast``."""
        return Chain(self.reach, self.had, self.alpha, None, float(self.context), self.batch_size)

    def line(self, convention: Convention) -> str:
        counted = "bonus token counted" if convention == "with_bonus" else "bonus token not counted"
        rounds = "" if self.rounds is None else f" over {self.rounds:,} rounds"
        return f"accepted length {self.accepted + bonus(convention):.3f} ({counted}){rounds}"


def bonus(convention: Convention) -> int:
    """What the convention adds to the number of accepted drafted tokens."""
    return 1 if convention == "with_bonus" else 0


Rows = list[tuple[str, int, list[int], list[int]]]
"""By prompt: its id, committed tokens at the middle of the text, draft lengths and accepted tokens by round."""


def recorded(samples: Iterable[Sample]) -> Rows:
    """Rounds after the prefill of the method's measured samples, first repeat.

    Raises:
        UserError: it took no round that could accept anything.
    """
    mine = [s for s in samples if s.phase == "measure" and s.arm == "method" and s.repeat == 0 and not s.error]
    found = [
        (s.prompt_id, s.n_prompt_tokens + s.n_output_tokens // 2, list(s.step_depth[1:]), list(s.step_accepted[1:]))
        for s in mine
    ]
    if not any(any(lengths) for _, _, lengths, _ in found):
        raise UserError("The run must have drafted tokens, got none. Name the run of a speculative method.")
    return found


def histogram(rows: Rows) -> Histogram:
    return Counter(pair for _, _, lengths, taken in rows for pair in zip(lengths, taken, strict=True))


def _context(rows: Rows) -> int:
    """Committed tokens, averaged over the rounds."""
    rounds = sum(len(lengths) for _, _, lengths, _ in rows)
    return round(sum(tokens * len(lengths) for _, tokens, lengths, _ in rows) / max(1, rounds))


# --------------------------------------------------------------------------------------------------------------- export


def _written(asked: ExportOptions, manifest: Mapping[str, Any], rows: Rows) -> str:
    found, add = histogram(rows), bonus(asked.convention)
    if asked.out.suffix == ".json":
        return json.dumps(exported(found, manifest, _context(rows), asked), indent=1) + "\n"
    if asked.out.suffix == ".csv":
        text = io.StringIO()
        sheet = csv.writer(text, lineterminator="\n")
        sheet.writerow(_CSV)
        for (length, accepted), count in sorted(found.items()):
            sheet.writerow([asked.convention, length, accepted + add, count])
        return text.getvalue()
    lines = [
        {
            "id": name,
            "convention": asked.convention,
            "context": context,
            "draft_lengths": lengths,
            "accepted_lengths": [accepted + add for accepted in taken],
        }
        for name, context, lengths, taken in rows
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def exported(found: Histogram, manifest: Mapping[str, Any], context: int, asked: ExportOptions) -> dict[str, Any]:
    """The content of the JSON file.

    ``accepted_length_...`` follow the convention; ``vllm`` and ``sglang`` have the names and the meanings of these
    engines, over rounds with a draft, as they count.
    """
    drafts = Counter({pair: count for pair, count in found.items() if pair[0]})
    number, longest = sum(drafts.values()), max(length for length, _ in found)
    drafted = sum(length * count for (length, _), count in drafts.items())
    taken = sum(accepted * count for (_, accepted), count in drafts.items())
    by_count = [sum(n for (_, accepted), n in drafts.items() if accepted == j) for j in range(longest + 1)]
    by_length = {
        str(k): [drafts[k, j] for j in range(k + 1)]
        for k in range(1, longest + 1)
        if any(k == key for key, _ in drafts)
    }
    per_position = [sum(by_count[place:]) for place in range(1, longest + 1)]
    add = bonus(asked.convention)
    return {
        "format": FORMAT,
        "convention": asked.convention,
        "run": asked.run.resolve().name,
        "model": manifest["model"]["name"],
        "method": manifest["method"]["name"],
        "dataset": manifest["dataset"]["name"],
        "sampling": manifest.get("sampling"),
        "batch_size": int(manifest["batch_size"]),
        "context": context,
        "num_rounds": sum(found.values()),
        "num_drafts": number,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": taken,
        "num_accepted_tokens_per_pos": per_position,
        "acceptance_rate_per_pos": [count / number for count in per_position],
        "accepted_length_mean": taken / number + add,
        "accepted_length_histogram": {str(j + add): count for j, count in enumerate(by_count)},
        "vllm": {
            "mean_acceptance_length": 1 + taken / number,
            "draft_acceptance_rate": taken / drafted,
            "acceptance_histogram": by_count,
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": number,
            "num_accepted_draft_tokens": taken,
            "num_draft_tokens": drafted,
            "num_spec_tokens": longest,
        },
        "sglang": {
            "spec_accept_length": 1 + taken / number,
            "spec_accept_rate": taken / drafted,
            "spec_verify_ct": number,
            "spec_num_correct_drafts": taken,
            "spec_num_proposed_drafts": drafted,
            "spec_correct_drafts_histogram": by_count,
        },
    }


# --------------------------------------------------------------------------------------------------------------- import


def read(asked: ImportOptions) -> Acceptance:
    """The acceptance in a file of this suite or of an engine.

    Raises:
        UserError: it cannot be read, contradicts itself or the convention, or lacks what a prediction needs.
    """
    try:
        text = asked.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{asked.file} cannot be read ({type(error).__name__}). Name a text file.") from error
    try:
        return _READERS.get(asked.file.suffix, _from_json)(text, asked)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _bad(asked, f"is damaged ({type(error).__name__}: {error})") from error


def _bad(asked: ImportOptions, what: str) -> UserError:
    return UserError(f"{asked.file} {what}. See python -m bench acceptance --help for what can be read.")


def _check(asked: ImportOptions, named: object) -> None:
    """The convention of the file, where it names one, must be the one asked for."""
    if named not in (None, asked.convention):
        raise UserError(f"{asked.file} counts {named}, got convention={asked.convention}. Set convention={named}.")


def _counted(
    asked: ImportOptions, found: Histogram, context: int | None = None, batch: int | None = None
) -> Acceptance:
    for length, accepted in found:
        if not 0 <= accepted <= length or found[length, accepted] < 0:
            raise _bad(asked, f"has a round that accepts {accepted} of {length} drafted tokens; is it {_other(asked)}?")
    return Acceptance.of(found, _known_context(asked, context), asked.batch_size or batch or 1)


def _other(asked: ImportOptions) -> str:
    return "without_bonus" if asked.convention == "with_bonus" else "with_bonus"


def _known_context(asked: ImportOptions, context: int | None) -> int:
    if not (known := asked.context or context):
        raise UserError(
            f"context is needed, since {asked.file} does not tell how many tokens a row had, and a pass costs more "
            "the more there are. Set context=NUMBER."
        )
    return int(known)


def _from_csv(text: str, asked: ImportOptions) -> Acceptance:
    found: Histogram = Counter()
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or not {"accepted_length", "rounds"} <= set(rows[0]):
        raise _bad(asked, "has no columns accepted_length and rounds")
    taken = [int(row["accepted_length"]) - bonus(asked.convention) for row in rows]
    longest = max(taken)
    for row, accepted in zip(rows, taken, strict=True):
        _check(asked, row.get("convention"))
        found[int(row.get("draft_length") or longest), accepted] += int(row["rounds"])
    return _counted(asked, found)


def _from_jsonl(text: str, asked: ImportOptions) -> Acceptance:
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not lines:
        raise _bad(asked, "is empty")
    found: Histogram = Counter()
    tokens = rounds = 0
    for line in lines:
        if "accepted_lengths" not in line:
            found += _of_engine(line, asked)
            continue
        _check(asked, line.get("convention"))
        taken = [int(length) - bonus(asked.convention) for length in line["accepted_lengths"]]
        lengths = line.get("draft_lengths") or [max(taken, default=0)] * len(taken)
        found += Counter(zip(map(int, lengths), taken, strict=True))
        tokens, rounds = tokens + int(line.get("context", 0)) * len(taken), rounds + len(taken)
    return _counted(asked, found, round(tokens / rounds) if rounds and tokens else None)


def _from_json(text: str, asked: ImportOptions) -> Acceptance:
    content = json.loads(text)
    if isinstance(content, list):
        return _counted(asked, sum((_of_engine(each, asked) for each in content), Counter[tuple[int, int]]()))
    _check(asked, content.get("convention"))
    context, batch = content.get("context"), content.get("batch_size")
    if content.get("format") == FORMAT and "vllm" in content:
        found = _of_engine(content["vllm"], asked, own=True)
        found[0, 0] += int(content["num_rounds"]) - int(content["num_drafts"])
        if abs(float(content["accepted_length_mean"]) - bonus(asked.convention) - _mean(found, drafts=True)) > 1e-6:
            raise _bad(asked, "has an accepted_length_mean that is not the mean of its histogram")
        return _counted(asked, found, context, batch)
    flat = _inner(content)
    if any(name in flat for name in (*_HISTOGRAMS, "per_step_accepted", "acceptance_histogram_by_draft_length")):
        return _counted(asked, _of_engine(flat, asked), context, batch)
    return _of_means(flat, asked, context, batch)


_HISTOGRAMS = ("acceptance_histogram", "spec_correct_drafts_histogram")
_MEANS = ("mean_acceptance_length", "spec_accept_length", "accept_length", "acceptance_length", "accepted_length_mean")
_SPEC_TOKENS = ("num_spec_tokens", "num_speculative_tokens", "spec_num_steps")


def _inner(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part with the figures: a response of vLLM has them in ``metrics``, one of SGLang in ``meta_info``."""
    for names in (("metrics", "speculative_decoding"), ("speculative_decoding",), ("meta_info",)):
        inner: Any = content
        for name in names:
            inner = inner.get(name) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            return inner
    return content


def _of_engine(content: Mapping[str, Any], asked: ImportOptions, *, own: bool = False) -> Histogram:
    """Rounds from a histogram of vLLM or SGLang, which has no bonus tokens; the mean beside it has the convention."""
    flat = _inner(content)
    found: Histogram = Counter()
    if "per_step_accepted" in flat:
        found += Counter(zip(map(int, flat["per_step_drafted"]), map(int, flat["per_step_accepted"]), strict=True))
    elif by_length := flat.get("acceptance_histogram_by_draft_length"):
        for length, counts in by_length.items():
            found += Counter({(int(length), j): int(n) for j, n in enumerate(counts) if n})
    else:
        counts = next((flat[name] for name in _HISTOGRAMS if name in flat), None)
        if counts is None:
            raise _bad(asked, f"has none of {', '.join(_HISTOGRAMS)}")
        longest = len(counts) - 1
        found += Counter({(longest, j): int(n) for j, n in enumerate(counts) if n})
    stated = next((float(flat[name]) for name in _MEANS if flat.get(name) is not None), None)
    if not own and stated is not None and found:
        mean = _mean(found, drafts=False)
        if abs(stated - bonus(asked.convention) - mean) > 0.5:  # the conventions are 1 apart
            raise _bad(
                asked,
                f"states a mean length of {stated:g} where {mean:g} drafted tokens are accepted per round, which is "
                f"not {asked.convention}",
            )
    return found


def _mean(found: Histogram, *, drafts: bool) -> float:
    kept = {pair: count for pair, count in found.items() if pair[0] or not drafts}
    return sum(accepted * count for (_, accepted), count in kept.items()) / max(1, sum(kept.values()))


def _of_means(flat: Mapping[str, Any], asked: ImportOptions, context: int | None, batch: int | None) -> Acceptance:
    """From counters by position, or from a mean and the draft length."""
    size = asked.batch_size or batch or 1
    if "num_drafts" in flat and (per_position := flat.get("num_accepted_tokens_per_pos")):
        drafts = int(flat["num_drafts"])
        exact = [
            int(here) - int(beyond) for here, beyond in zip([drafts, *per_position], [*per_position, 0], strict=True)
        ]
        return _counted(asked, Counter({(len(per_position), j): n for j, n in enumerate(exact) if n}), context, batch)
    length = next((int(flat[name]) for name in _SPEC_TOKENS if flat.get(name)), 0)
    if "num_drafts" in flat and "num_accepted_tokens" in flat:
        drafts = int(flat["num_drafts"])
        accepted = int(flat["num_accepted_tokens"]) / drafts
        length = length or round(int(flat["num_draft_tokens"]) / drafts)
    elif (mean := next((flat[name] for name in _MEANS if flat.get(name) is not None), None)) is not None:
        accepted = float(mean) - bonus(asked.convention)
    else:
        raise _bad(asked, f"has none of num_drafts, {', '.join((*_HISTOGRAMS, *_MEANS))}")
    if not length:
        raise _bad(asked, f"has a mean and no draft length; add one of {', '.join(_SPEC_TOKENS)}")
    if not 0 <= accepted <= length:
        raise _bad(asked, f"accepts {accepted:g} of {length} drafted tokens per round; is it {_other(asked)}?")
    alpha = constant_rate(accepted, length)
    reach = tuple(alpha**place for place in range(1, length + 1))
    return Acceptance(reach, (1.0,) * length, alpha, _known_context(asked, context), size)


def constant_rate(accepted: float, length: int) -> float:
    """The alpha with alpha + alpha^2 + ... + alpha^length = accepted (Leviathan et al. 2023, equation 1)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, length + 1)) < accepted else (low, middle)
    return (low + high) / 2


def _from_yaml(text: str, asked: ImportOptions) -> Acceptance:
    """Golden lengths of InferenceX: a mean length for each draft length from 1 on.

    A chain's first tokens do not depend on the length of the draft, so the mean grows from one draft length to the next
    by the share of the rounds that reach it.
    """
    import yaml

    node: Any = yaml.safe_load(text)
    for name in (asked.entry or "").split(".") if asked.entry else ():
        if not isinstance(node, Mapping) or name not in node:
            known = ", ".join(str(key) for key in node) if isinstance(node, Mapping) else "a value"
            raise UserError(
                f"entry={asked.entry} is not in {asked.file}; instead of {name} there is {known}. Correct it."
            )
        node = node[name]
    if not isinstance(node, Mapping) or not node or list(node) != list(range(1, len(node) + 1)):
        raise _bad(asked, "must have a mean length for each draft length 1, 2, ... (name it with entry=MODEL.MODE)")
    means = [bonus(asked.convention) * 1.0, *(float(node[length]) for length in node)]
    accepted = [mean - bonus(asked.convention) for mean in means]
    for length, mean in enumerate(accepted):
        if not 0 <= mean <= length:
            raise _bad(asked, f"accepts {mean:g} of {length} drafted tokens per round; is it {_other(asked)}?")
    reach = tuple(here - before for before, here in zip(accepted, accepted[1:], strict=False))
    alpha = constant_rate(accepted[-1], len(reach))
    return Acceptance(reach, (1.0,) * len(reach), alpha, _known_context(asked, None), asked.batch_size or 1)


_READERS = {".csv": _from_csv, ".jsonl": _from_jsonl, ".yaml": _from_yaml, ".yml": _from_yaml}


# -------------------------------------------------------------------------------------------------------------- pricing


def answer(asked: WhatIfQuery) -> str:
    """The predictions of ``cost what-if`` for an imported acceptance, as text.

    Raises:
        UserError: no imported acceptance, no curve, or a batch size beyond the curve.
    """
    assert asked.run is not None, "one file"
    content = files.read_json(asked.run) or {}
    if content.get("format") != FORMAT or "stored" not in content:
        raise UserError(
            f"{asked.run} is no imported acceptance. Import it: python -m bench acceptance import FILE name=NAME "
            "convention=with_bonus|without_bonus"
        )
    if asked.curve is None:
        raise UserError("curve is needed, since an imported acceptance has none. Set curve=results/costs/ID.")
    stored: dict[str, Any] = {name: content[name] for name in ("alpha", "context", "batch_size", "rounds")}
    found = Acceptance(tuple(content["reach"]), tuple(content["had"]), **stored)
    curve = read_curve(asked.curve)
    chain, given = found.chain(), None if asked.draft_ms is None else Drafting(asked.draft_ms / 1e3)

    def predicted(size: int, gamma: int | None) -> Forecast:
        return chain_forecast(chain, gamma or 0, curve.price.seconds, size, given)

    head = [f"{content['name']}: {found.line(content['convention'])}", f"curve of {curve.where}", ""]
    lengths = asked.gamma or (len(found.reach),)
    return "\n".join([*head, table(asked.batch or (found.batch_size,), lengths, curve, predicted)])
