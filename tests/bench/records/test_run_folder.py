"""Run folders: what survives a torn write, a full disk, a second process, and what never gets into them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.errors import RunFailed, UserError
from bench.measure import instruments
from bench.records.run_folder import RunFolder, Sample, device_name, pack, read_manifest, read_samples, validate
from bench.utils import machine, redact


def sample(prompt: str = "a/1", arm: str = "method", batch: int = 0, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "prompt_id": prompt, "category": "any", "turn": 1, "repeat": 0, "order": int(arm == "method"), "arm": arm,
        "phase": "measure", "seed": 1, "batch": batch, "batch_size": 1, "n_prompt_tokens": 2, "n_output_tokens": 3,
        "finish": "length", "prefill_ns": 10, "batch_ns": 30, "step_ns": [10, 20], "step_tokens": [1, 2],
        "step_drafted": [0, 4], "step_accepted": [0, 1], "step_depth": [0, 4], "step_nodes": [1, 5],
        "step_layers": [1.0, 1.0], "step_draft_ns": [None, 2], "step_target_passes": [1, 1],
        "step_draft_passes": [0, 0], "output_ids": [5, 6, 7], "text": "öß \u2028 zeile", "prompt_ids": [1, 2],
    }  # fmt: skip
    return Sample(**values | changes)


def pair(prompt: str, batch: int) -> list[Sample]:
    return [sample(prompt, "baseline", batch), sample(prompt, "method", batch)]


def make(root: Path, **manifest: Any) -> RunFolder:
    return RunFolder.create(root, "run", manifest, "seed: 0\n")


def finished(root: Path) -> Path:
    with make(root) as folder:
        folder.append(pair("a/1", 0))
        folder.write_summary({})
        folder.update(status="finished", eos_ids=[0])
    return root / "run"


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.append(pair("a/1", 0))
        folder.append(pair("b/1", 1))
        assert folder.done_keys() == {("a/1", 0), ("b/1", 0)}
    assert read_samples(tmp_path / "run") == [*pair("a/1", 0), *pair("b/1", 1)]
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"config.yaml", "manifest.json", "samples.jsonl"}


def test_manifest_is_there_before_the_first_sample_and_keeps_facts_of_an_earlier_attempt(tmp_path: Path) -> None:
    with make(tmp_path, seed=3) as folder:
        assert read_manifest(folder.path) == {
            "seed": 3, "run_id": "run", "schema_version": 1, "status": "running", "error": None,
        }  # fmt: skip
        folder.update(status="failed", error="x", cost_curve={"nodes": [1]})
    with make(tmp_path, seed=3) as folder:
        assert folder.manifest["status"] == "running" and folder.manifest["cost_curve"] == {"nodes": [1]}
        assert folder.manifest["error"] is None


@pytest.mark.parametrize("cut", [1, 2, 40, 400])
def test_a_torn_last_line_is_left_out_and_its_pair_measured_anew(tmp_path: Path, cut: int) -> None:
    with make(tmp_path) as folder:
        folder.append(pair("a/1", 0))
        folder.append(pair("b/1", 1))
    file = tmp_path / "run" / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    assert len(read_samples(file)) == (4 if cut == 1 else 3)
    with make(tmp_path) as folder:
        assert folder.done_keys() == ({("a/1", 0), ("b/1", 0)} if cut == 1 else {("a/1", 0)})
        folder.append(pair("c/1", 2))
    lines = file.read_bytes().split(b"\n")
    assert lines.pop() == b"" and all(json.loads(line) for line in lines)


def test_packed_samples_are_read_like_others_and_unpacked_to_go_on(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    before = (folder / "samples.jsonl").read_bytes()
    assert pack(folder) and not pack(folder)
    assert {file.name for file in folder.iterdir()} >= {"samples.jsonl.gz"} and not (folder / "samples.jsonl").exists()
    assert read_samples(folder) == pair("a/1", 0) and validate(folder) == []
    with make(tmp_path) as again:
        assert again.done_keys() == {("a/1", 0)}
        assert (folder / "samples.jsonl").read_bytes() == before and not (folder / "samples.jsonl.gz").exists()
        again.append(pair("b/1", 1))
    assert len(read_samples(folder)) == 4


def test_only_finished_runs_are_packed_and_damage_is_named(tmp_path: Path) -> None:
    make(tmp_path).close()
    for folder in (tmp_path / "run", tmp_path / "nowhere"):
        with pytest.raises(UserError, match="holds no finished run"):
            pack(folder)
    packed = finished(tmp_path) / "samples.jsonl.gz"
    pack(packed.parent)
    packed.write_bytes(packed.read_bytes()[:-9])
    assert "is damaged" in validate(packed.parent)[0]
    with RunFolder.create(tmp_path, "run", {}, "seed: 0\n", fresh=True) as folder:
        assert folder.samples == [] and not packed.exists()


def test_an_orphan_is_dropped_because_a_pair_is_measured_side_by_side(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.append([*pair("a/1", 0), sample("b/1", "baseline", 1)])
    with make(tmp_path) as folder:
        assert folder.done_keys() == {("a/1", 0)} and folder.samples == pair("a/1", 0)
    assert read_samples(tmp_path / "run") == pair("a/1", 0)


def test_a_batch_with_a_missing_row_is_dropped_whole(tmp_path: Path) -> None:
    rows = [sample(name, arm, 0, batch_size=2) for arm in ("baseline", "method") for name in ("a/1", "b/1")]
    with make(tmp_path) as folder:
        folder.append(rows[:3])
    with make(tmp_path) as folder:
        assert folder.samples == []


def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.append(pair("a/1", 0))
    file = tmp_path / "run" / "samples.jsonl"
    good = file.read_text().splitlines()
    file.write_text("\n".join([good[0], good[1][:50], good[1], ""]))
    with pytest.raises(UserError, match=r"samples\.jsonl, line 2 cannot be read"):
        read_samples(file)
    with pytest.raises(UserError, match="line 2"):
        make(tmp_path)
    assert not (tmp_path / "run" / ".lock").exists(), "a refused folder must not stay locked"


def test_another_schema_version_is_refused_even_on_the_last_line(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.append([sample(schema_version=99)])
    with pytest.raises(UserError, match="schema version 99.*schema version 1"):
        read_samples(tmp_path / "run")


def test_two_writers_of_one_folder_are_refused(tmp_path: Path) -> None:
    with make(tmp_path), pytest.raises(UserError, match="being written by another process"):
        make(tmp_path)
    make(tmp_path).close()


def test_fresh_forgets_what_was_recorded(tmp_path: Path) -> None:
    finished(tmp_path)
    with RunFolder.create(tmp_path, "run", {}, "", fresh=True) as folder:
        assert folder.samples == [] and "eos_ids" not in folder.manifest
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_one_clear_message_and_keeps_the_pairs_before(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.append(pair("a/1", 0))
        os.dup2(os.open("/dev/full", os.O_WRONLY), folder._file)
        with pytest.raises(RunFailed, match=r"The disk is full.*1 prompt is kept; run the same command to resume"):
            folder.append(pair("b/1", 1))
        assert folder.done_keys() == {("a/1", 0)}
    assert read_samples(tmp_path / "run") == pair("a/1", 0)


def test_a_disk_that_fills_within_a_pair_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(file: int, data: bytes) -> None:
        os.write(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with make(tmp_path) as folder:
        folder.append(pair("a/1", 0))
        size = (folder.path / "samples.jsonl").stat().st_size
        monkeypatch.setattr("bench.records.run_folder._write_all", half)
        with pytest.raises(RunFailed, match="disk is full"):
            folder.append(pair("b/1", 1))
        assert (folder.path / "samples.jsonl").stat().st_size == size


def test_a_manifest_that_cannot_be_replaced_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with make(tmp_path, seed=1) as folder:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunFailed):
            folder.update(seed=2)
        monkeypatch.undo()
        assert (read_manifest(folder.path) or {})["seed"] == 1
        assert not list(folder.path.glob(".*.tmp"))


# ---------------------------------------------------------------------------------------------------- validating


def test_a_sound_folder_has_no_problems(tmp_path: Path) -> None:
    assert validate(finished(tmp_path)) == []


def test_no_folder_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        validate(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_output_tokens": 4}, "n_output_tokens is 4, but there are 3 ids"),
        ({"step_ns": [10]}, r"step lists have lengths \[1, 2\]"),
        ({"prefill_ns": 9}, "prefill_ns is 9, the first step took 10"),
        ({"batch_ns": 29}, "do not fit into the batch's 29 ns"),
        ({"step_accepted": [0, 5]}, "more tokens accepted than drafted"),
        ({"output_ids": [5, 0, 7]}, "after the end-of-sequence token"),
    ],
)
def test_inconsistent_rows_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = finished(tmp_path)
    with make(tmp_path) as run:
        run.append([sample("b/1", "baseline", 1), sample("b/1", "method", 1, **changes)])
        run.update(status="finished")
    with pytest.raises(AssertionError, match=rf"prompt b/1, repeat 0, method: .*{words}"):
        assert not validate(folder), "; ".join(validate(folder))


def test_missing_halves_and_unfinished_runs_are_named(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.append([*pair("a/1", 0), *pair("a/1", 0), sample("b/1", "baseline", 1)])
    problems = "\n".join(validate(tmp_path / "run"))
    assert "not finished: status 'running'" in problems and "summary.json is missing" in problems
    assert "prompt a/1, repeat 0, arm method is recorded 2 times" in problems
    assert "batch 1, repeat 0 is not complete" in problems


# ------------------------------------------------------------------------------------------- secrets and the machine


@pytest.mark.parametrize(
    "word",
    [
        "tracker.api_key=s3cretvalue",
        "hub_token=s3cretvalue",
        "model.password='s3cretvalue'",
        "--token=s3cretvalue",
        "Authorization: Bearer s3cretvalue",
        "https://user:s3cretvalue@host.example/x",
        "model.name=hf_s3cretvalueABCDEFGHIJ",
    ],
)
def test_secrets_do_not_reach_the_disk(word: str) -> None:
    assert "s3cretvalue" not in " ".join(redact.argv(["bench", word]))
    assert redact.HIDDEN in redact.text(word)


def test_a_secret_in_the_next_word_is_hidden() -> None:
    assert redact.argv(["--token", "s3cret", "seed=1"]) == ["--token", redact.HIDDEN, "seed=1"]


@pytest.mark.parametrize(
    "word",
    ["max_new_tokens=128", "num_draft_tokens=5", "eos_token=null", "tokenizer=gpt2", "model.name=Qwen/Qwen3-0.6B",
     "https://huggingface.co/a/b", "7 tokens accepted", "and/or", "method.gamma=10"],
)  # fmt: skip
def test_what_is_no_secret_stays(word: str) -> None:
    assert redact.text(word) == word


def test_paths_of_the_machine_are_cut(tmp_path: Path) -> None:
    assert redact.text("paths.results=/home/alice/work/results") == "paths.results=.../results"
    assert redact.text('File "/opt/app/bench/measure/run.py", line 3') == 'File ".../run.py", line 3'
    assert redact.text("in /home/alice now") == "in ... now"
    assert redact.text("model.name=../alice/mymodel ./x/y") == "model.name=.../mymodel .../y"
    assert redact.text(redact.text("~/alice/mymodel")) == ".../mymodel"
    assert redact.tree({"tracker": {"api_key": "abc", "n": 1}, "data": ["/a/b/c"]}) == {
        "tracker": {"api_key": redact.HIDDEN, "n": 1}, "data": [".../c"],
    }  # fmt: skip


def test_only_variables_that_change_numbers_are_recorded() -> None:
    given = {"OMP_NUM_THREADS": "2", "WANDB_API_KEY": "k", "HOME": "/home/alice", "LD_PRELOAD": "/x/y.so"}
    given |= {"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_alice", "CUDA_HOME": "/opt/alice"}
    assert redact.environment(given) == {"OMP_NUM_THREADS": "2", "LD_PRELOAD": ".../y.so"}


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"cpu": "AMD EPYC", "gpu": None}, "AMD EPYC"),
        ({"cpu": "AMD EPYC", "gpu": None, "vectors": "AVX512 BF16"}, "AMD EPYC"),
        ({"cpu": "AMD EPYC", "gpu": None, "vectors": "AVX2"}, "AMD EPYC with AVX2"),
        ({"cpu": "AMD EPYC", "gpu": {"name": "NVIDIA H200"}, "vectors": "AVX2"}, "NVIDIA H200"),
        ({}, "unknown processor"),
    ],
)
def test_processors_with_other_instructions_are_other_devices(facts: dict[str, Any], name: str) -> None:
    assert device_name(facts) == name


def test_the_vectors_of_this_processor_are_known() -> None:
    import torch

    facts = machine.facts(torch.device("cpu"))
    assert facts["vectors"].split(" BF16")[0] == torch.backends.cpu.get_cpu_capability()
    assert facts["vectors"].endswith("BF16") == machine.multiplies_bfloat16()


def test_facts_name_neither_host_nor_user_nor_path() -> None:
    import platform

    import torch

    facts = json.dumps([machine.facts(torch.device("cpu")), machine.versions(), machine.git_state()])
    assert platform.node() not in facts and str(Path.home()) not in facts and str(Path.cwd()) not in facts
    assert machine.versions()["torch"] == torch.__version__


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert machine.git_state(tmp_path) == {"sha": None, "dirty": None}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_peak_memory_is_that_of_the_section_and_not_of_an_earlier_one() -> None:
    import torch

    meter, mib = instruments.MemoryMeter(torch.device("cpu"), 0), 1 << 20
    meter.reset()
    before = meter.peak_bytes()
    if before is None:
        pytest.skip("this system does not let a process reset its peak")
    large = torch.ones(256 * mib // 4)
    del large
    big = meter.peak_bytes()
    meter.reset()
    small = meter.peak_bytes()
    assert big is not None and small is not None
    assert big >= before + 250 * mib and small <= big - 200 * mib


# --------------------------------------------------------------------------------------------- files that others change


def cut(file: Path) -> None:
    os.truncate(file, 10)


def replaced(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


@pytest.mark.parametrize(("act", "how"), [(Path.unlink, "removed"), (cut, "changed"), (replaced, "replaced")])
def test_samples_that_others_change_are_noticed_while_running(tmp_path: Path, act: Any, how: str) -> None:
    with RunFolder.create(tmp_path, "run", {}, "") as folder:
        folder.append(pair("a/1", 0))
        act(folder.path / "samples.jsonl")
        for write in (lambda: folder.append(pair("b/1", 1)), lambda: folder.replace(pair("a/1", 0))):
            with pytest.raises(RunFailed, match=f"samples.jsonl was .*{how}.* while the run wrote it"):
                write()
    with RunFolder.create(tmp_path, "run", {}, "") as folder:
        folder.append(pair("b/1", 1))
    assert ("b/1", 0) in folder.done_keys()


def test_a_folder_that_is_removed_is_noticed(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "run", {}, "") as folder:
        shutil.rmtree(folder.path)
        with pytest.raises(RunFailed, match="run was removed while it was written"):
            folder.update(status="finished")
