"""Signatures of finished runs by OpenSSH keys, so that a record made elsewhere says who vouches for it.

``manifest.json.sig`` signs ``manifest.json``, whose digests cover the other files of the run. OpenSSH alone checks it::

    ssh-keygen -Y verify -f ALLOWED_SIGNERS -I NAME -n decodebench -s manifest.json.sig < manifest.json
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UserError
from bench.records import digests, run_folder
from bench.utils import files

SIGNATURE = f"{run_folder.MANIFEST}.sig"
NAMESPACE = "decodebench"  # what a signature is for; one made for something else does not count


@dataclass(frozen=True, slots=True)
class Signature:
    """Whose signature a run has.

    Attributes:
        key: type and fingerprint of the public key; empty where the signature does not fit the manifest.
        name: of the owner, by a file of allowed signers; empty where it has not this key.
        problem: why the signature counts for nothing; empty if it is right.
    """

    key: str
    name: str = ""
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'an unknown key'} ({self.key})"


def sign(folder: Path, key: Path) -> Signature:
    """Sign a finished run; an earlier signature is replaced.

    Args:
        folder: of the run.
        key: private key, or the public key of one that an ssh-agent holds.

    Raises:
        UserError: no finished run with digests, files that were changed since, or ssh-keygen does not sign.
    """
    manifest = run_folder.read_manifest(folder) if folder.is_dir() else None
    if not manifest or manifest.get("status") != "finished" or run_folder.DIGEST not in manifest:
        raise UserError(f"{folder} must be the folder of a finished run with digests (python -m bench pack adds them).")
    if wrong := digests.changed(folder, manifest):
        raise UserError(f"{folder} cannot be signed: {wrong[0]}.")
    if not key.is_file():
        raise UserError(f"key must be the file of an OpenSSH key, got {key}. Make one: ssh-keygen -t ed25519 -f {key}")
    with run_folder.claimed(folder):
        made = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, read=folder / run_folder.MANIFEST)
        if made.returncode or not made.stdout:
            raise UserError(f"ssh-keygen does not sign with {key}: {_said(made)}")
        files.atomic_write(folder / SIGNATURE, made.stdout)
    found = read(folder)
    assert found is not None
    return found


def read(folder: Path, allowed: Path | None = None) -> Signature | None:
    """The signature of a run; None if it has none.

    Args:
        folder: of the run.
        allowed: file of allowed signers (``man ssh-keygen``): a line for each, ``NAME ssh-ed25519 AAAA...``.

    Raises:
        UserError: there is no such file, or no ssh-keygen.
    """
    if allowed and not allowed.is_file():
        raise UserError(f"signers must be a file of allowed signers (man ssh-keygen), got {allowed}.")
    file, manifest = folder / SIGNATURE, folder / run_folder.MANIFEST
    if not file.is_file():
        return None
    done = _ssh_keygen("check-novalidate", "-n", NAMESPACE, "-s", str(file), read=manifest)
    found = re.search(r"with (\S+) key (\S+)", done.stdout)
    if done.returncode or not found:
        said = f"{SIGNATURE} is no signature of this {run_folder.MANIFEST} ({_said(done)}). Have it signed again"
        return Signature("", problem=said)
    key = " ".join(found.groups())
    if allowed is None:
        return Signature(key)
    names = _ssh_keygen("find-principals", "-s", str(file), "-f", str(allowed), read=manifest).stdout.split()
    for name in names:
        words = ("-f", str(allowed), "-I", name, "-n", NAMESPACE, "-s", str(file))
        if not _ssh_keygen("verify", *words, read=manifest).returncode:
            return Signature(key, name)
    return Signature(key)


def _ssh_keygen(what: str, *words: str, read: Path) -> subprocess.CompletedProcess[str]:
    try:
        with read.open("rb") as content:
            return subprocess.run(
                ["ssh-keygen", "-Y", what, *words], stdin=content, capture_output=True, text=True, errors="replace"
            )
    except FileNotFoundError as error:
        raise UserError("Signatures need ssh-keygen of OpenSSH 8.1 or later. Install OpenSSH.") from error


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in f"{done.stderr}\n{done.stdout}".splitlines() if line.strip()]
    return lines[0] if lines else f"exit code {done.returncode}"
