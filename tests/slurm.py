"""A real Slurm on this machine for the tests: munged, slurmctld and one slurmd a node, all state in one directory.

Needs Slurm's daemons (Debian: slurm-wlm, slurm-wlm-basic-plugins, munge) and root. Nodes are virtual: each is a slurmd
with its own name and port. Nothing of a Slurm that the machine may already run is read, used or ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NEEDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")

# Preemption requeues the lower tier after a grace time, and tells it first with the signal it asked for. A requeued job
# waits for the credential's life (120 s by default). A node that was set down stays down.
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=pmi2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=10
MinJobAge=600
FirstJobId={first_job}
ReturnToService=1
SlurmdTimeout=10
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
"""
PARTITIONS = """\
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def why_not() -> str | None:
    """Why no Slurm can be started here; None if it can."""
    missing = [name for name in NEEDS if _find(name) is None]
    if missing:
        return f"no Slurm here: {', '.join(missing)} not found"
    return None if os.geteuid() == 0 else "Slurm's daemons want root"


class Cluster:
    """A running Slurm; `stop` ends its daemons and jobs. `root` is for its state alone."""

    def __init__(self, root: Path, nodes: dict[str, int]) -> None:
        """Start the daemons, with `nodes` of so many CPUs each, and wait until every node is idle."""
        self.root = root
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        for directory in ("state", "munge", *(f"spool-{name}" for name in nodes)):
            (root / directory).mkdir()
        self.first_job = random.randrange(1, 2**25)  # MPICH names shared memory by the job: not as an earlier cluster's
        ports = _free_ports(len(nodes) + 1)
        self._configure(nodes, ports)
        try:
            self._start_munge()
            self.run("slurmctld", "-c")
            for name in nodes:
                self.run("slurmd", "-N", name)
            eventually(lambda: self.run("sinfo", "-hN", "-plow", "-tidle", "-o%N").split() == sorted(nodes), 20)
        except BaseException:
            self.stop()
            raise

    def _configure(self, nodes: dict[str, int], ports: list[int]) -> None:
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000\n"
            for (name, cpus), port in zip(nodes.items(), ports[1:], strict=True)
        ]
        conf = (
            CONF.format(host=host, port=ports[0], root=self.root, first_job=self.first_job)
            + "".join(lines)
            + PARTITIONS
        )
        (self.root / "slurm.conf").write_text(conf)
        (self.root / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _start_munge(self) -> None:
        home = self.root / "munge"
        home.chmod(0o711)
        key = home / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key": key, "socket": home / "socket", "pid": home / "pid", "log": home / "log", "seed": home / "seed"}
        names = {"pid": "pid-file", "key": "key-file", "log": "log-file", "seed": "seed-file"}
        # --force: the directories above may be writable by a group
        self.run("munged", "--force", *(f"--{names.get(kind, kind)}={path}" for kind, path in files.items()))

    def run(self, program: str, *arguments: str, timeout: float = 20) -> str:
        """The output of one of Slurm's programs. Raises AssertionError when it fails."""
        command = [_find(program) or program, *arguments]
        with tempfile.TemporaryFile("w+") as output:  # not a pipe: a daemon keeps what it inherits
            status = subprocess.run(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode
            output.seek(0)
            text = output.read()
        assert status == 0, f"{' '.join(command)}: status {status}\n{text}"
        return text

    def submit(self, *command: str, cwd: Path, **knobs: str) -> list[str]:
        """The ids of the jobs that `command` (sbatch, or what calls it) submits, with `knobs` in its environment."""
        environment = {**self.env, **knobs}
        outcome = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=20, check=False
        )
        assert outcome.returncode == 0, outcome.stderr
        return re.findall(r"Submitted batch job (\d+)", outcome.stdout)

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, NodeList, ExitCode, ..."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, job: str) -> bool:
        return self.show(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

    def ranks(self, job: str) -> list[int]:
        """The process ids of the job's ranks of the training program that run now."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    is_rank = b"python" in command[0] and b"mpi_ckpt.train" in command
                    ours = f"SLURM_CONF={self.env['SLURM_CONF']}".encode() in variables
                    if is_rank and ours and f"SLURM_JOB_ID={job}".encode() in variables:
                        found.append(int(entry.name))
        return sorted(found)

    def stop(self) -> None:
        """End all jobs, then the daemons, by the process ids in their own files."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            jobs = self.run("squeue", "-ho%A").split()
            for job in jobs:
                for pid in self.ranks(job):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if jobs:
                self.run("scancel", "--signal=KILL", "--full", *jobs)
                self.run("scancel", *jobs)
                eventually(lambda: not self.run("squeue", "-ho%A").split(), 15)
        files = [*self.root.glob("slurmd-*.pid"), self.root / "slurmctld.pid", self.root / "munge/pid"]
        daemons = [pid for file in files if (pid := _pid_in(file)) is not None]
        for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            daemons = [pid for pid in daemons if _send(pid, sign)]
            with contextlib.suppress(AssertionError):
                eventually(lambda left=daemons: not any(_send(pid, 0) for pid in left), patience)
        self._remove_shared_memory()

    def _remove_shared_memory(self) -> None:
        """What killed ranks have left: MPICH names it by a hash of Slurm's JOB.STEP, and the number of the node."""
        for job in range(self.first_job, self.first_job + 50):
            for step in range(3):
                for file in Path("/dev/shm").glob(f"mpich_shm_{_fnv1a(f'{job}.{step}'):x}_*"):
                    file.unlink(missing_ok=True)


def eventually(is_true: Callable[[], object], timeout: float, what: Callable[[], str] = lambda: "") -> None:
    """Wait until `is_true()`. Raises AssertionError, with `what()`, when it is not so after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not is_true():
        assert time.monotonic() < deadline, f"not so after {timeout} s\n{what()}"
        time.sleep(0.05)


def _find(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"]))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _pid_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _send(pid: int, number: int) -> bool:
    """Whether the process was there to be sent the signal; 0 only asks."""
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def _fnv1a(text: str) -> int:
    """The 32-bit hash of http://www.isthe.com/chongo/tech/comp/fnv."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value
