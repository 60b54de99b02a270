"""Runs are signed with OpenSSH keys, and ``validate`` says whose signature is right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import cli, validate
from bench.errors import UserError
from bench.records import run_folder, signatures
from tests.helpers.records import with_samples

RUN = with_samples("suffix-mtbench-*")

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen (OpenSSH) is not installed")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "results" / RUN.name))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(file)], check=True)
    return file


def signers(key: Path, name: str) -> Path:
    file = key.with_name("allowed")
    file.write_text(f"{name} {key.with_suffix('.pub').read_text()}")
    return file


def test_validate_names_who_signed(run: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sign", str(run), f"key={key}"]) == 0
    assert capsys.readouterr().out.startswith(f"{run}: signed with ED25519 SHA256:")
    assert cli.main(["validate", str(run.parent), f"signers={signers(key, 'ada@lab.org')}"]) == 0
    assert ": 1 run: ok, 1 signed by ada@lab.org (ED25519 SHA256:" in capsys.readouterr().out
    assert cli.main(["validate", str(run.parent)]) == 0
    assert "1 signed by an unknown key (ED25519 SHA256:" in capsys.readouterr().out


def test_openssh_alone_checks_it(run: Path, key: Path) -> None:
    signatures.sign(run, key)
    words = ["ssh-keygen", "-Y", "verify", "-f", str(signers(key, "ada")), "-I", "ada", "-n", "decodebench"]
    with (run / run_folder.MANIFEST).open("rb") as manifest:
        done = subprocess.run([*words, "-s", str(run / signatures.SIGNATURE)], stdin=manifest, capture_output=True)
    assert done.returncode == 0 and b"Good" in done.stdout


def test_a_changed_manifest_is_no_longer_signed(run: Path, key: Path) -> None:
    signatures.sign(run, key)
    manifest = json.loads((run / run_folder.MANIFEST).read_text())
    (run / run_folder.MANIFEST).write_text(json.dumps(manifest))  # other spaces, the same digests
    found = validate.check_one(run)
    assert found.signature and not found.signature.key
    assert found.problems == [found.signature.problem] and "manifest.json.sig" in found.problems[0]


@pytest.mark.parametrize(
    "content", ["", "nothing", "-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"]
)
def test_what_is_no_signature_is_named(run: Path, content: str) -> None:
    (run / signatures.SIGNATURE).write_text(content)
    assert "manifest.json.sig" in validate.check_one(run).problems[0]


def test_a_signature_for_another_purpose_does_not_count(run: Path, key: Path) -> None:
    with (run / run_folder.MANIFEST).open("rb") as manifest:
        words = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", "git"]
        made = subprocess.run(words, stdin=manifest, capture_output=True, check=True)
    (run / signatures.SIGNATURE).write_bytes(made.stdout)
    assert validate.check_one(run, signers=signers(key, "ada")).problems


def test_the_name_is_that_of_the_key(run: Path, key: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    signatures.sign(run, other)
    found = signatures.read(run, signers(key, "ada"))
    assert found and found.key and not found.name


def test_what_was_changed_is_not_signed(run: Path, key: Path) -> None:
    with (run / "config.yaml").open("a") as file:
        file.write("# more\n")
    with pytest.raises(UserError, match=r"cannot be signed: config\.yaml was changed after the run ended"):
        signatures.sign(run, key)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sign"], "sign needs the folder of a finished run"),
        (["sign", "nowhere"], "must be the folder of a finished run with digests"),
        (["sign", str(RUN), "key=nowhere"], "key must be the file of an OpenSSH key, got nowhere"),
        (["validate", str(RUN), "signers=nowhere"], "signers must be a file of allowed signers"),
    ],
)
def test_what_does_not_fit_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


def test_a_key_that_does_not_sign_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    with pytest.raises(UserError, match="ssh-keygen does not sign with"):
        signatures.sign(run, tmp_path / "key")


def test_without_openssh_one_message_says_so(run: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signatures.sign(run, key)
    monkeypatch.setattr(os, "environ", os.environ | {"PATH": "/nowhere"})
    with pytest.raises(UserError, match=r"Signatures need ssh-keygen of OpenSSH 8\.1"):
        signatures.read(run)
