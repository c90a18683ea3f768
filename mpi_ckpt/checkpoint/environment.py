"""What the last bits of a result depend on beside the program: recorded with each step, compared at its restore."""

from __future__ import annotations

import platform
import sys
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np


@cache
def environment() -> dict[str, Any]:
    """**Local.** Versions and processor of this process, as plain JSON."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": _blas(),
        "mpi4py": _version("mpi4py"),
        "mpi": _mpi_library(),
        "h5py": _version("h5py"),
        "mpi_ckpt": _version("mpi_ckpt"),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def differences(saved: dict[str, Any]) -> list[str]:
    """**Local.** One line for each recorded fact that is another one now: results may then differ in the last bits."""
    now = environment()
    return [
        f"{name}: {saved[name]} then, {now[name]} now" for name in now if name in saved and saved[name] != now[name]
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _blas() -> str:
    build = np.show_config(mode="dicts")
    blas = build.get("Build Dependencies", {}).get("blas", {}) if isinstance(build, dict) else {}
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def _mpi_library() -> str:
    module = sys.modules.get("mpi4py.MPI")  # never imported from here: that would start MPI
    return module.Get_library_version().splitlines()[0].strip("\0 ") if module else "none"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
