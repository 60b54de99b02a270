"""A SLURM of its own in a folder: a controller and two nodes with one make-believe GPU each, all on this machine.

Jobs on the partition `urgent` have those on `debug` killed and put back into the queue.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PATIENCE = 60.0  # seconds; 2 are usual until both nodes are idle
_NODES = ("n1", "n2")


@contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """The daemons, and SLURM_CONF set for everything started meanwhile. They need to be started by root."""
    _munge(folder)
    configuration = _configure(folder)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(configuration)
    try:
        subprocess.run(["slurmctld"], check=True, timeout=_PATIENCE)
        for node in _NODES:
            subprocess.run(["slurmd", "-N", node], check=True, timeout=_PATIENCE)
        if not _wait_until(
            lambda: _said("sinfo", "-h", "-N", "-p", "debug", "-o", "%t").split() == ["idle"] * len(_NODES)
        ):
            raise RuntimeError(f"SLURM did not come up, see {folder}/log")
        yield
    finally:
        _end(folder)
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


def _end(folder: Path) -> None:
    """Jobs first, then the daemons, and last the one by which they know each other."""
    subprocess.run(["scancel", "--user=root"], check=False, timeout=_PATIENCE, capture_output=True)
    _wait_until(lambda: not _said("squeue", "--noheader"))
    for file in folder.glob("*.pid"):  # each daemon removes its own when it ends
        os.kill(int(file.read_text()), signal.SIGTERM)
    _wait_until(lambda: not list(folder.glob("*.pid")))
    os.kill(int((folder / "munge" / "pid").read_text()), signal.SIGTERM)


def _munge(folder: Path) -> None:
    place = folder / "munge"
    place.mkdir(mode=0o700)
    key = place / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = [f"--{name}={place / name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    subprocess.run(["munged", "--force", f"--key-file={key}", *files], check=True, timeout=_PATIENCE)


def _configure(folder: Path) -> Path:
    for name in ("state", "log", *(f"spool/{node}" for node in _NODES)):
        (folder / name).mkdir(parents=True)
    host, ports = socket.gethostname().split(".")[0], _free_ports(1 + len(_NODES))
    gpus = {node: folder / f"gpu-{node}" for node in _NODES}
    for device in gpus.values():
        os.mknod(device, 0o600 | 0o020000, os.makedev(1, 3))  # SLURM takes none but character devices: /dev/null
    lines = [f"NodeName={node} Name=gpu Type=fake File={device}" for node, device in gpus.items()]
    (folder / "gres.conf").write_text("\n".join(lines) + "\n")
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Gres=gpu:fake:1 State=UNKNOWN"
        for node, port in zip(_NODES, ports[1:], strict=True)
    ]
    # cred_expire: else a job that was put back waits two minutes.
    text = f"""\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=1
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=9 State=UP
"""
    file = folder / "slurm.conf"
    file.write_text(text + "\n".join(nodes) + "\n")
    return file


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE).stdout.strip()


def _wait_until(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + _PATIENCE
    while not (found := true()) and time.monotonic() < until:
        time.sleep(0.2)
    return found
