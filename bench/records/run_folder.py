"""The folder of a run: manifest.json, config.yaml, samples.jsonl and the summary derived from them.

The samples of a finished run may be packed, as samples.jsonl.gz, which every command reads too; a resumed run unpacks
its own.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from bench.errors import RunFailed, UserError, explain
from bench.records import schemas
from bench.utils import files

SCHEMA_VERSION = 1

Arm = Literal["method", "baseline"]


@dataclass(slots=True)
class Sample:
    """One prompt decoded once by one arm: a line of samples.jsonl. Counters and raw times, no rates.

    The ``step_*`` lists cover every step, the first one included: step 0 is the prefill, its time is
    ``prefill_ns`` and it commits the first token(s). ``step_tokens`` counts what was kept after cutting at
    the end-of-sequence token and at the limit, so it sums to ``n_output_tokens``; a batched row that has
    finished has no further entries. ``step_drafted``, ``step_accepted``, ``step_depth``, ``step_layers`` and
    ``step_nodes`` are as the method reported them, before the cut.

    Attributes:
        prompt_id: example id and turn, ``"81/1"``.
        batch: index of the batch the prompt ran in; at batch size 1 the running number of the prompt.
        batch_size: rows at a time.
        queue: prompts that were decoded in one go, each in the place of one that had ended; ``batch`` is then that of
            the queue, and steps in which the row waited for the prompt of another have no token and no target pass.
            None: one prompt per row, in lockstep.
        admitted: the step of the queue in which the prompt was read, its own step 0; None without a queue.
        order: 0 if this arm ran first on this prompt, else 1.
        phase: ``"stalled"`` if the machine stalled or the process was stopped, so that the pair was measured again.
        n_kept_tokens: tokens of the prompt that were not read again, as the text before it began with them.
        finish: ``"eos"`` or ``"length"``.
        batch_ns: request start to the moment the last row of the batch, or of the queue, had finished.
        step_rows: rows that each step's pass computed, those included that have finished and are still in the batch;
            None where the method does not say, and in older records.
        step_pass_ns: time of each step's passes of the target and of the rule; None where the method does not say, and
            in older records.
        jump_ns: by how much the system's clock moved against the monotonic one meanwhile; None in older records.
        peak_bytes: peak memory while this sample ran; None where it was not measured.
        quality: scores of the text against the reference, by metric name.
    """

    prompt_id: str
    category: str
    turn: int
    repeat: int
    order: int
    arm: Arm
    phase: Literal["warmup", "measure", "stalled"]
    seed: int
    batch: int
    batch_size: int
    n_prompt_tokens: int
    n_output_tokens: int
    finish: Literal["eos", "length"]
    prefill_ns: int
    batch_ns: int
    step_ns: list[int]
    step_tokens: list[int]
    step_drafted: list[int]
    step_accepted: list[int]
    step_depth: list[int]
    step_nodes: list[int]
    step_layers: list[float]
    step_draft_ns: list[int | None]
    step_target_passes: list[int]
    step_draft_passes: list[int]
    output_ids: list[int]
    text: str
    prompt_ids: list[int] = field(default_factory=list)
    peak_bytes: int | None = None
    energy_j: float | None = None
    cpu_ns: int | None = None
    jump_ns: int | None = None
    quality: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    queue: int | None = None
    admitted: int | None = None
    step_rows: list[int] | None = None
    step_pass_ns: list[int] | None = None
    n_kept_tokens: int = 0
    schema_version: int = SCHEMA_VERSION
    extra: dict[str, Any] = field(default_factory=dict)


_FIELDS = tuple(field.name for field in fields(Sample))
MANIFEST, CONFIG, SAMPLES, SUMMARY = "manifest.json", "config.yaml", "samples.jsonl", "summary.json"
PACKED = f"{SAMPLES}.gz"
CALIBRATION = "calibration.json"  # the losses that a threshold was chosen by
TRACE = "trace_{arm}.json.gz"  # rounds of an arm, where ``measure.profile`` is set, see ``bench.measure.profiling``
DIGEST = "digest"  # in the manifest, see ``bench.records.digests``
PAIRS = "pairs.json.gz"  # what ``bench.analysis.pairs.condense`` keeps of the samples
REPEATED, REPLACED = ".new", ".old"  # endings of folders: a repetition until it is complete, and what it replaces
_LOCK = ".lock"


class RunFolder:
    """``<results>/<run_id>/`` while a run writes it; one process at a time.

    Attributes:
        path: the folder.
        manifest: what manifest.json holds; change it through ``update``.
        samples: everything recorded so far, as read back or appended.
    """

    def __init__(self, path: Path, lock: ExitStack, manifest: dict[str, Any], samples: list[Sample]) -> None:
        self.path, self.manifest, self.samples = path, manifest, samples
        self._lock, self._done = lock, _keys(samples)
        self._open()

    @classmethod
    def create(
        cls,
        root: Path,
        run_id: str,
        manifest: Mapping[str, Any],
        config_yaml: str,
        *,
        fresh: bool = False,
        beside: bool = False,
    ) -> RunFolder:
        """Claim the folder of a run and write its manifest with status "running".

        What an earlier, cut run left is kept: a torn last line and the rows of batches that are not complete in
        both arms are removed, for a pair counts only when it was measured side by side.

        Args:
            root: the results folder.
            run_id: name of the folder below it.
            manifest: facts of this run; they replace those of an earlier attempt, other keys stay.
            config_yaml: the composed configuration.
            fresh: forget what an earlier attempt recorded.
            beside: write beside the finished record of this run; ``put_in_place`` replaces it afterwards.

        Raises:
            UserError: another process writes this folder, or a record in its middle cannot be read.
            RunFailed: the folder cannot be written.
        """
        path = root / (run_id + REPEATED if beside else run_id)
        with machine_failures(), ExitStack() as lock:
            path.mkdir(parents=True, exist_ok=True)
            lock.enter_context(claimed(path))
            for name in (MANIFEST, SUMMARY, SAMPLES, PACKED, PAIRS) if fresh else ():  # the manifest first
                (path / name).unlink(missing_ok=True)
            _unpack(path)
            folder = cls(path, lock, read_manifest(path) or {}, _recover(path / SAMPLES))
            files.atomic_write(path / CONFIG, config_yaml)
            folder.manifest.pop(DIGEST, None)
            folder.update(**manifest, run_id=run_id, schema_version=SCHEMA_VERSION, status="running", error=None)
            folder._lock = lock.pop_all()
        return folder

    def _open(self) -> None:
        self._file = os.open(self.path / SAMPLES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        now = os.fstat(self._file)
        self._inode, self._size = (now.st_dev, now.st_ino), now.st_size

    def append(self, samples: Sequence[Sample]) -> None:
        """Write the rows of one batch, both arms, and wait until they are on the disk.

        Raises:
            RunFailed: they could not be written, and the file is as it was before; or the file is another one.
        """
        self.require_samples()
        lines, size = "".join(map(_line, samples)).encode(), self._size
        with machine_failures(kept=len(self._done)):
            try:
                _write_all(self._file, lines)
                os.fsync(self._file)
                self._size += len(lines)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, size)
                raise
        self.samples.extend(samples)
        self._done |= _keys(samples)

    def replace(self, samples: Sequence[Sample]) -> None:
        """Put the rows of one batch, measured again, in the place of those recorded, which are kept as stalled.

        Raises:
            RunFailed: they could not be written; the file is as it was before.
        """
        self.require_samples()
        again = {_unit(sample) for sample in samples}
        kept = [replace(s, phase="stalled") if _unit(s) in again else s for s in self.samples]
        _replace(self.path / SAMPLES, "".join(map(_line, [*kept, *samples])))
        os.close(self._file)  # of the file that was replaced
        self._open()
        self.samples = [*kept, *samples]

    def require_samples(self) -> None:
        """Notice that the samples on the disk are no longer those that were written.

        Raises:
            RunFailed: they were removed, replaced or cut meanwhile.
        """
        try:
            there = (self.path / SAMPLES).stat()
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != self._inode or there.st_size != self._size:
            how = "removed" if there is None else "replaced or changed"
            raise RunFailed(
                f"{self.path / SAMPLES} was {how} while the run wrote it. What is left of it is kept; run the same "
                "command to measure the rest."
            )

    def done_keys(self) -> set[tuple[str, int]]:
        """``(prompt_id, repeat)`` of every measured pair."""
        return set(self._done)

    def update(self, **facts: Any) -> None:
        """Change the manifest; a reader sees the old one or the new one, never a half."""
        self.manifest |= facts
        _replace(self.path / MANIFEST, files.entry_per_line(self.manifest))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json; it derives from the samples and can be made again."""
        write_summary(self.path, summary)

    def close(self) -> None:
        """Let other processes write the folder again."""
        if self._file >= 0:
            os.close(self._file)
            self._lock.close()
            self._file = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def put_in_place(path: Path) -> None:
    """Let the complete repetition of a run replace its record, if there is one."""
    new, old = path.with_name(path.name + REPEATED), path.with_name(path.name + REPLACED)
    if new.is_dir() and (read_manifest(new) or {}).get("status") == "finished":
        with machine_failures(), claimed(path):
            os.replace(path, old)
            os.replace(new, path)
        shutil.rmtree(old)


def restore(path: Path) -> None:
    """Undo ``put_in_place`` where it was killed between its two steps."""
    old = path.with_name(path.name + REPLACED)
    if old.is_dir() and not path.is_dir():
        os.replace(old, path)


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Replace the summary of a run folder, which need not be the run being written, and its digest if it has one."""
    content = files.entry_per_line(summary)
    _replace(path / SUMMARY, content)
    manifest = read_manifest(path) or {}
    if DIGEST in manifest:
        manifest[DIGEST] |= {SUMMARY: files.sha256(content)}
        _replace(path / MANIFEST, files.entry_per_line(manifest))


@contextmanager
def machine_failures(where: str = "", kept: int | None = None) -> Iterator[None]:
    """Turn out-of-memory, a full disk and the like into the message a user can act on.

    Raises:
        RunFailed: in their place; everything else passes through.
    """
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if failed := explain(error, where, kept):
            raise failed from error
        raise


# ------------------------------------------------------------------------------------------------------- reading


def device_name(facts: Mapping[str, Any]) -> str:
    """The GPU or the processor of a manifest's ``hardware``, by which results are compared.

    Processors of several generations may share a name, so one that does not multiply bfloat16 is named with its
    instructions: ``AMD EPYC with AVX2``.
    """
    if facts.get("gpu"):
        return str(facts["gpu"]["name"])
    cpu, known = facts.get("cpu") or "unknown processor", facts.get("vectors")
    return f"{cpu} with {known}" if known and not known.endswith("BF16") else str(cpu)


def folders(results: Path) -> list[Path]:
    """The run folders of a results folder, by name, without repetitions that are not complete."""
    found = sorted(file.parent for file in results.glob(f"*/{MANIFEST}"))
    return [folder for folder in found if folder.suffix not in (REPEATED, REPLACED)]


def samples_file(folder: Path) -> Path:
    """Where the samples of a run are: samples.jsonl, or the packed one where there is no other."""
    packed = folder / PACKED
    return packed if packed.is_file() and not (folder / SAMPLES).is_file() else folder / SAMPLES


def read_lines(file: Path) -> list[bytes]:
    """The lines of a samples.jsonl, packed or not.

    Raises:
        UserError: what is packed is damaged.
    """
    return unpacked(file).split(b"\n")


def unpacked(file: Path) -> bytes:
    """The content of a file, packed or not.

    Raises:
        UserError: what is packed is damaged.
    """
    data = file.read_bytes()
    if file.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file} is damaged ({error}). Restore it, or delete the folder and run again.") from error
    return data


def read_samples(path: Path) -> list[Sample]:
    """All samples of a samples.jsonl, packed or not, or of the folder that holds it; a torn last line is left out.

    Raises:
        UserError: no such file, or a line that is not the last one cannot be read.
    """
    file = samples_file(path) if path.is_dir() else path
    if not file.is_file():
        if (path / PAIRS).is_file():
            raise UserError(
                f"The samples of {path.name} are not kept, only times and lengths of each prompt ({PAIRS}). Repeat the "
                "run with --fresh to get its texts and steps."
            )
        raise UserError(f"{file} does not exist; a run folder holds {SAMPLES}. Name the folder of a run.")
    return _parse(file)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """manifest.json of a run folder, or None where there is none yet.

    Raises:
        UserError: it cannot be read.
    """
    file = path / MANIFEST
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no JSON ({error}). Restore it, or delete the folder and run again.") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no JSON object. Restore it, or delete the folder and run again.")
    if wrong := schemas.problem("manifest", found):
        raise UserError(f"{file} is damaged: {wrong}. Restore it, or delete the folder and run again.")
    return found


def _parse(file: Path) -> list[Sample]:
    lines = read_lines(file)
    while lines and not lines[-1]:
        lines.pop()
    samples = []
    for number, line in enumerate(lines, start=1):
        try:
            samples.append(_sample(line))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not isinstance(error, _NotOurs):
                break  # torn: the process was killed, or the machine lost power, while it was written
            raise UserError(
                f"{file}, line {number} cannot be read: {error}. Every line must be a sample of schema version "
                f"{SCHEMA_VERSION}. Remove the line, or delete the folder and run again."
            ) from error
    return samples


class _NotOurs(ValueError):
    """A whole line that is no sample, unlike one that a crash tore."""


def _sample(line: bytes) -> Sample:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if row.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise _NotOurs(f"it has schema version {row['schema_version']}")
    if wrong := schemas.problem("sample", row):
        raise _NotOurs(wrong)
    return Sample(**row)


def _recover(file: Path) -> list[Sample]:
    """Samples of complete batches; the file is rewritten where it held anything else."""
    if not file.is_file():
        return []
    found = _parse(file)
    whole = _complete(found)
    if len(whole) != len(found) or not _clean(file, len(found)):
        _replace(file, "".join(map(_line, whole)))
    return whole


def pack(folder: Path) -> bool:
    """Put samples.jsonl.gz in place of the samples.jsonl of a finished run: a tenth of the bytes.

    Returns:
        Whether there was anything to pack.

    Raises:
        UserError: no finished run, or another process writes it.
    """
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest is None or manifest.get("status") != "finished":
        raise UserError(f"{folder} holds no finished run; only those are packed. Name the folder of one.")
    with claimed(folder):
        if not (folder / SAMPLES).is_file():
            return False
        _replace(folder / PACKED, gzip.compress((folder / SAMPLES).read_bytes(), mtime=0))
        (folder / SAMPLES).unlink()
    return True


def _unpack(folder: Path) -> None:
    if (file := samples_file(folder)).name == PACKED:
        _replace(folder / SAMPLES, b"\n".join(read_lines(file)))
    (folder / PACKED).unlink(missing_ok=True)


def _clean(file: Path, rows: int) -> bool:
    data = file.read_bytes()
    return data.count(b"\n") == rows and (not data or data.endswith(b"\n"))


def _keys(samples: Sequence[Sample]) -> set[tuple[str, int]]:
    return {(sample.prompt_id, sample.repeat) for sample in samples if sample.phase == "measure"}


def _unit(sample: Sample) -> tuple[str, int, int]:
    return sample.phase, sample.batch, sample.repeat


def _complete(samples: Sequence[Sample]) -> list[Sample]:
    """The rows of batches that hold every row of both arms; a batch may have stalled more than once."""
    rows = Counter(map(_unit, samples))
    return [sample for sample in samples if rows[_unit(sample)] % (2 * (sample.queue or sample.batch_size)) == 0]


# ---------------------------------------------------------------------------------------------------- validating


def validate(folder: Path) -> list[str]:
    """Everything that is wrong with the records of a run, in plain words; empty if nothing is.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; validate wants the folder of a run. See results/.")
    try:
        manifest, samples = read_manifest(folder), [] if (folder / PAIRS).is_file() else read_samples(folder)
    except UserError as error:
        return [str(error)]
    return [*manifest_problems(folder, manifest), *_pair_problems(samples), *_row_problems(samples, manifest or {})]


def manifest_problems(folder: Path, manifest: Mapping[str, Any] | None) -> Iterator[str]:
    """What is wrong with a manifest, and files that are missing beside it."""
    if manifest is None:
        yield f"{MANIFEST} is missing"
        return
    if manifest.get("schema_version") != SCHEMA_VERSION:
        yield f"{MANIFEST} has schema version {manifest.get('schema_version')}, not {SCHEMA_VERSION}"
    if manifest.get("status") != "finished":
        yield f"the run is not finished: status {manifest.get('status')!r}; run the same command to resume it"
    if manifest.get("run_id") != folder.resolve().name:
        yield f"{MANIFEST} is of run {manifest.get('run_id')!r}, the folder is called {folder.resolve().name!r}"
    yield from (f"{name} is missing" for name in (CONFIG, SUMMARY) if not (folder / name).is_file())


def _pair_problems(samples: Sequence[Sample]) -> Iterator[str]:
    arms = Counter((s.phase, s.prompt_id, s.repeat, s.arm) for s in samples)
    for (phase, prompt, repeat, arm), count in arms.items():
        if count > 1 and phase == "measure":
            yield f"prompt {prompt}, repeat {repeat}, arm {arm} is recorded {count} times"
    whole = {id(sample) for sample in _complete(samples)}
    for batch in sorted({(s.batch, s.repeat) for s in samples if id(s) not in whole and s.phase == "measure"}):
        yield f"batch {batch[0]}, repeat {batch[1]} is not complete in both arms"


def _row_problems(samples: Sequence[Sample], manifest: Mapping[str, Any]) -> Iterator[str]:
    eos = set(manifest.get("eos_ids") or [])
    for sample in samples:
        for problem in _faults(sample, eos):
            yield f"prompt {sample.prompt_id}, repeat {sample.repeat}, {sample.arm}: {problem}"


def _faults(sample: Sample, eos: set[int]) -> Iterator[str]:
    if not sample.n_output_tokens == len(sample.output_ids) == sum(sample.step_tokens):
        counts = f"{len(sample.output_ids)} ids, {sum(sample.step_tokens)} tokens in steps"
        yield f"n_output_tokens is {sample.n_output_tokens}, but there are {counts}"
    steps = (getattr(sample, name) for name in _FIELDS if name.startswith("step_"))
    lengths = {len(values) for values in steps if values is not None}
    if len(lengths) != 1 or lengths == {0}:
        yield f"the step lists have lengths {sorted(lengths)}; they must be equal and not 0"
    elif sample.prefill_ns != sample.step_ns[0]:
        yield f"prefill_ns is {sample.prefill_ns}, the first step took {sample.step_ns[0]}"
    if sample.step_ns and (min(sample.step_ns) < 0 or sum(sample.step_ns) > sample.batch_ns):
        yield f"steps of {sum(sample.step_ns)} ns do not fit into the batch's {sample.batch_ns} ns"
    if any(a > d for a, d in zip(sample.step_accepted, sample.step_drafted, strict=False)):
        yield "more tokens accepted than drafted"
    if any(token in eos for token in sample.output_ids[:-1]):
        yield "there are tokens after the end-of-sequence token"


# ------------------------------------------------------------------------------------------------------- writing


def _line(sample: Sample) -> str:
    return json.dumps({name: getattr(sample, name) for name in _FIELDS}) + "\n"  # asdict would copy every list


def _replace(file: Path, content: str | bytes) -> None:
    try:
        with machine_failures():
            files.atomic_write(file, content)
    except FileNotFoundError as error:
        raise RunFailed(
            f"{file.parent} was removed while it was written. Run the same command to measure again."
        ) from error


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def is_noisy(folder: Path) -> bool:
    """Whether a run is INVALID for no other reason than an unsteady machine, so that measuring again may help."""
    summary = files.read_json(folder / SUMMARY)
    if summary is None or schemas.problem("summary", summary):
        return False
    return bool(summary.get("verdict", {}).get("noisy"))


def claimed(folder: Path) -> AbstractContextManager[None]:
    """Be the only writer of a run folder meanwhile.

    Raises:
        UserError: another process is.
    """
    return files.locked(
        folder / _LOCK,
        f"{folder} is being written by another process; one run folder has one writer. Wait for it, or change what "
        "defines the run.",
    )


def left_open(folder: Path) -> bool:
    """Whether the last writer of a run folder is still at work, or was killed."""
    return (folder / _LOCK).exists()


def is_held(folder: Path) -> bool:
    """Whether a living process writes the folder."""
    return files.is_locked(folder / _LOCK)
