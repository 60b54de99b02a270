"""``cluster=ray``: every job of a sweep as a Ray task in its own process."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.sweep.executors import Answers, Pending, at_least, log_file, missing, reported
from bench.sweep.job import Result, Task, killed, perform

_PATIENCE = 5.0  # seconds until an address counts as unreachable
_GRACE = 10.0  # seconds after its time limit until the process of a task ends
_LOOPBACK = "127.0.0.1"
_OWN_HOSTS = (_LOOPBACK, "localhost", "::1")
_WITH_TOKENS = (2, 52)  # version of Ray
_OWN_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its daemons listen on loopback, as on these systems; read on import
    "RAY_worker_niceness": "0",  # 15 by default, which would let other processes disturb the measurement
}


@dataclass(frozen=True, slots=True)
class Ray:
    """Tasks of Ray, see conf/cluster/ray.yaml."""

    address: str | None = None
    cpus: int = 1
    gpus: int = 0
    retries: int = 0
    job_timeout: int | None = 24 * 60 * 60

    one_by_one = False

    def __post_init__(self) -> None:
        at_least("cluster.cpus", self.cpus, 1)
        at_least("cluster.gpus", self.gpus, 0)
        at_least("cluster.retries", self.retries, 0)
        at_least("cluster.job_timeout", self.job_timeout, 1)

    @property
    def here(self) -> bool:
        return self.address is None

    @property
    def threads(self) -> int:
        return self.cpus

    def pending(self, results: Path) -> Pending:
        return {}  # its tasks end with the command that started them

    def run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        return reported(self._run(tasks, folder), tasks, folder)

    def _run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        if self.here:
            for name, value in _OWN_RAY.items():
                os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:
            raise missing("ray", "ray") from error
        self._connect(ray)
        try:
            self._check_room(ray)
            start = ray.remote(
                num_cpus=self.cpus, num_gpus=self.gpus, max_calls=1, max_retries=self.retries, retry_exceptions=False
            )(_perform)
            limited = [replace(task, timeout_s=self.job_timeout) for task in tasks]
            left = {start.remote(task, str(log_file(task, folder))): place for place, task in enumerate(limited)}
            while left:
                (done,), _ = ray.wait(list(left), num_returns=1)
                yield left.pop(done), _answer(ray, done)
        finally:
            ray.shutdown()

    def _connect(self, ray: Any) -> None:
        own: dict[str, Any] = {"include_dashboard": False} if self.here else {}
        if not self.here:
            self._check_tokens(ray.__version__)
            self._check_address()
        try:
            ray.init(self.address, log_to_driver=False, logging_level="ERROR", **own)
        except Exception as error:  # Ray raises plain ones, too
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise self._unreachable(said[0].rstrip(".")) from error
        if self.here:
            places = {node["NodeManagerAddress"] for node in ray.nodes()}
            if places != {_LOOPBACK}:
                ray.shutdown()
                raise UserError(
                    f"The Ray of a sweep must listen on {_LOOPBACK} alone, got {', '.join(sorted(places))}. Unset "
                    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, do not import ray before, or choose cluster=process."
                )
            print(f"Ray of this sweep: listens on {_LOOPBACK} alone.", flush=True)

    def _check_tokens(self, version: str) -> None:
        """Refuse a Ray without tokens, in which any program that reaches it can run code."""
        host = str(self.address).removeprefix("ray://").rpartition(":")[0].strip("[]")
        if host in _OWN_HOSTS or tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= _WITH_TOKENS:
            return
        needed = ".".join(map(str, _WITH_TOKENS))
        raise UserError(
            f"cluster.address={self.address} needs ray {needed} or newer, which asks for a token, got {version}: any "
            f"program that reaches an older one can run code in it. Upgrade it (pip install 'ray>={needed}'), or set "
            "cluster.address=null for a Ray of this machine alone."
        )

    def _check_address(self) -> None:
        """Checked here because Ray would try for a minute and then end the process."""
        host, _, port = str(self.address).removeprefix("ray://").rpartition(":")
        if not port.isdecimal():
            return  # auto, or what Ray checks itself
        try:
            socket.create_connection((host, int(port)), _PATIENCE).close()
        except OSError as error:
            raise self._unreachable(error.strerror or str(error)) from error

    def _unreachable(self, said: str) -> UserError:
        where = f"cluster.address={self.address}" if self.address else "a Ray of its own on this machine"
        return UserError(
            f"cluster=ray could not reach {where}: {said}. cluster.address must be null, auto, HOST:PORT or "
            "ray://HOST:PORT of a Ray that runs. Start one (ray start --head) and set cluster.address=auto, or choose "
            "cluster=process."
        )

    def _check_room(self, ray: Any) -> None:
        """A task that does not fit would wait forever; a remote Ray may grow, and reports it itself."""
        if not self.here:
            return
        room = ray.cluster_resources()
        for name, wanted in (("CPU", self.cpus), ("GPU", self.gpus)):
            if wanted > (found := int(room.get(name, 0))):
                setting = f"cluster.{name.lower()}s"
                raise UserError(
                    f"{setting} must be at most {found} on this machine, got {wanted}. Set {setting}={found}, or the "
                    "cluster.address of a Ray that has more."
                )


def _perform(task: Task, log: str) -> Result:
    """Redirect the output of the task's process to the log and run the task.

    A task that its alarm does not end, as it hangs outside of Python, ends with its process.
    """
    if task.timeout_s is not None:
        (last := threading.Timer(task.timeout_s + _GRACE, os._exit, (1,))).daemon = True
        last.start()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return perform(task)


def _answer(ray: Any, done: Any) -> Result:
    try:
        result: Result = ray.get(done)
    except ray.exceptions.RayError as error:
        return killed(f"Ray lost the job: {str(error).strip().splitlines()[0].rstrip('.')}")
    return result
