"""A fault in the middle of a sweep: the other runs are measured, finished prompts are kept, and what failed is told."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cli, errors
from bench.records import run_folder
from bench.records.run_folder import read_manifest, read_samples, validate
from methods.speculative.prompt_lookup import PromptLookup

ROWS = (1, 2, 4)
PROMPTS = 8


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    lines = [{"question_id": i, "category": "chat", "turns": [f"Say {i} {i} {i} again."]} for i in range(PROMPTS)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batches = f"batch_size={','.join(map(str, ROWS))}"
    quick = ["measure.warmup=0", "measure.cost_curve=false", "measure.agreement=false", "measure.bootstrap_samples=100"]
    data = ["model=random", "dataset=jsonl", f"dataset.path={file}", "hardware=cpu_fp32", "hardware.threads=1"]
    return [
        "-m",
        "method=prompt_lookup",
        "method.costs=null",  # no passes before the prompts
        batches,
        *data,
        *quick,
        "max_new_tokens=5",
        f"paths.results={tmp_path}/results",
    ]


def folders(words: Sequence[str]) -> dict[int, Path]:
    """Of the runs, by batch size."""
    results = Path(words[-1].partition("=")[2])
    return {(read_manifest(path.parent) or {})["batch_size"]: path.parent for path in results.glob("*/manifest.json")}


def measured(folder: Path) -> set[str]:
    return {sample.prompt_id for sample in read_samples(folder) if sample.phase == "measure"}


def out_of_memory(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Two rows of prompt lookup fit twice, and not for a third time."""
    decode, calls = PromptLookup.decode, []

    def decoding(self: PromptLookup, prompts: list[torch.Tensor], *rest: Any) -> Any:
        if len(prompts) == 2:
            calls.append(1)
            if len(calls) > 2:
                raise error
        return decode(self, prompts, *rest)

    monkeypatch.setattr(PromptLookup, "decode", decoding)


def full_disk(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """The disk has room for two batches of two rows, and for half of the next one."""
    write, calls = run_folder._write_all, []

    def writing(file: int, data: bytes) -> None:
        if b'"batch_size": 2' in data:
            calls.append(1)
            if len(calls) > 2:
                write(file, data[: len(data) // 2])
                raise error
        write(file, data)

    monkeypatch.setattr(run_folder, "_write_all", writing)


@pytest.mark.parametrize(
    ("break_it", "error", "said"),
    [
        (
            out_of_memory,
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            "Out of memory at prompt 4",
        ),
        (
            out_of_memory,
            RuntimeError("DefaultCPUAllocator: can't allocate memory: error code 12"),
            "Out of memory at prompt 4",
        ),
        (full_disk, OSError(errno.ENOSPC, "No space left on device"), "The disk is full"),
    ],
    ids=["gpu", "cpu", "disk"],
)
def test_the_others_go_on_and_nothing_finished_is_lost(
    break_it: Callable[[pytest.MonkeyPatch, Any], None],
    error: Exception,
    said: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        break_it(patch, error)
        assert cli.main(words) == errors.FAILED
    told = capsys.readouterr().err
    assert "1 of 3 runs failed:" in told and "Traceback" not in told
    (line,) = (line for line in told.splitlines() if line.startswith("  ") and "batch_size=2" in line)
    assert said in line and "4 prompts are kept; run the same command to resume" in line
    found = folders(words)
    assert {rows: (read_manifest(path) or {})["status"] for rows, path in found.items()} == {
        1: "finished",
        2: "failed",
        4: "finished",
    }
    assert validate(found[1]) == validate(found[4]) == []
    kept = (found[2] / "samples.jsonl").read_bytes()
    assert len(measured(found[2])) == 4 and kept.endswith(b"\n")
    before = {rows: (found[rows] / "samples.jsonl").read_bytes() for rows in (1, 4)}
    assert cli.main([*words, "resume=unfinished"]) in (errors.OK, errors.INVALID)  # other programs make a run INVALID
    told = capsys.readouterr()
    assert re.search(r"3 jobs: 1 failed, (2 done|2 invalid|1 done, 1 invalid)\.", told.out)
    assert "runs failed" not in told.err
    assert {rows: (found[rows] / "samples.jsonl").read_bytes() for rows in (1, 4)} == before
    assert (found[2] / "samples.jsonl").read_bytes().startswith(kept) and validate(found[2]) == []
    assert len(measured(found[2])) == PROMPTS
