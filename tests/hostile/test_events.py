"""What happens to a process: suspended, killed, its files removed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from bench.records import run_folder
from tests.helpers.pauses import paused_run
from tests.helpers.sweeps import COMMON, outputs, run_folders, start, start_call
from tests.hostile.commands import Shell

PAUSES = int(os.environ.get("DECODEBENCH_PAUSES", "40"))
KILLS = int(os.environ.get("DECODEBENCH_KILLS", "20"))
RUN = [*COMMON, "method=prompt_lookup", "dataset.limit=8"]


@pytest.mark.parametrize("seed", range(PAUSES))
def test_a_suspended_run_does_not_mislead(seed: int, tmp_path: Path) -> None:
    rng = Random(1000 + seed)
    found = paused_run(tmp_path / "run", rng, rng.choice([0.3, 1.0, 3.0, 6.0]))
    assert not found.misleads, (found.result, found.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    """What a run records that nothing disturbs."""
    root = tmp_path_factory.mktemp("whole")
    process = start([*RUN, f"paths.results={root / 'r'}"], root / "said.txt")
    process.join(240)
    return outputs(root / "r")


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_run_goes_on(seed: int, tmp_path: Path, whole: dict[str, list[dict[str, object]]]) -> None:
    rng, results, said = Random(seed), tmp_path / "r", tmp_path / "said.txt"
    process = start([*RUN, f"paths.results={results}"], said)
    deadline = time.monotonic() + 120
    while process.is_alive() and not run_folders(results) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 2.0))
    if process.is_alive():
        process.kill()
    process.join()
    again = start([*RUN, f"paths.results={results}"], said)
    again.join(240)
    assert again.exitcode in (0, 3), said.read_text()[-2000:]
    assert [sorted(map(str, rows)) for rows in outputs(results).values()] == [
        sorted(map(str, rows)) for rows in whole.values()
    ]


@pytest.mark.parametrize("act", ["removed", "emptied", "folder"])
def test_samples_that_go_while_running(act: str, tmp_path: Path) -> None:
    results, said = tmp_path / "r", tmp_path / "said.txt"
    words = [*RUN, "max_new_tokens=200", f"paths.results={results}"]
    process = start(words, said)
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline:
        files = list(results.glob(f"*/{run_folder.SAMPLES}"))
        if files and b'"measure"' in files[0].read_bytes():
            break
        time.sleep(0.005)
    if act == "removed":
        files[0].unlink()
    elif act == "emptied":
        os.truncate(files[0], 0)
    else:
        for file in files[0].parent.iterdir():
            file.unlink()
        files[0].parent.rmdir()
    process.join(240)
    text = said.read_text()
    assert process.exitcode == 1 and "while" in text and "Traceback" not in text, text[-3000:]
    again = start(words, said)
    again.join(240)
    assert again.exitcode in (0, 3) and outputs(results)


TRAINING = ["train", "method=medusa", "model=random", "hardware=cpu_fp32", "corpus=talk.jsonl", "train.recipe.steps=60"]


def _train(folder: str, said: str) -> None:
    import sys

    from bench import cli

    os.chdir(folder)
    with open(said, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(cli.main([*TRAINING, "out=made"]))


def _taught(folder: Path, kill_after_s: float | None = None) -> dict[str, torch.Tensor]:
    """The weights that a training ends with, one that was killed and begun again too."""
    folder.mkdir(exist_ok=True)
    lines = [{"prompt": f"Say {i} {i}.", "answer": f"{i} {i} {i} and {i + 1} and then {i + 2}."} for i in range(80)]
    (folder / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = folder / "said.txt"
    process = start_call(_train, str(folder), str(said))
    if kill_after_s is not None:
        process.join(kill_after_s)
        process.kill()
        process.join()
        process = start_call(_train, str(folder), str(said))
    process.join(300)
    assert process.exitcode == 0, said.read_text()[-3000:]
    (file,) = (folder / "made").glob("*.safetensors")
    assert (folder / "made" / "card.json").is_file()
    return load_file(file)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], float]:
    """What a training ends with that nothing disturbs, and how long it takes."""
    begin = time.monotonic()
    return _taught(tmp_path_factory.mktemp("taught")), time.monotonic() - begin


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_training_goes_on(seed: int, tmp_path: Path, taught: tuple[dict[str, torch.Tensor], float]) -> None:
    whole, seconds = taught
    found = _taught(tmp_path, Random(seed).uniform(0, seconds))
    assert found.keys() == whole.keys() and all(found[name].equal(whole[name]) for name in whole)


def test_a_closed_standard_output_keeps_the_verdict(shell: Shell) -> None:
    """As after ``>&-``."""
    import subprocess
    import sys

    words = [*RUN, f"paths.results={shell.folder}/r"]
    command = f'exec "{sys.executable}" -m bench {" ".join(words)} >&-'
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode in (0, 3) and "Traceback" not in done.stderr
