"""Builds the native kernels while the package is built, with the C compiler at hand or, where there is none, Zig's.

The library uses no Python API, so one build serves every Python version. It is built twice, for the x86-64 baseline and
for AVX2 machines; `penstock.kernels.native` picks one when it loads.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

KERNELS = Path("src/penstock/kernels")
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=default", "-Wall", "-Werror"]


def compiler() -> list[str] | None:
    """The command of a C compiler: $CC, cc, gcc, clang; None where the machine has none."""
    named = os.environ.get("CC", "").split()
    if named:
        return named
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return None


def zig() -> list[str]:
    """Zig's C compiler. Naming a target keeps it from compiling for this very processor."""
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-gnu"]


def variants() -> dict[str, list[str]]:
    """Library name to the flags for its instruction set."""
    if platform.machine() == "x86_64":
        return {"_native.so": [], "_native_avx2.so": ["-march=haswell"]}
    return {"_native.so": []}


def build(root: Path, command: list[str]) -> list[Path]:
    """Compile every variant, each replaced atomically; returns the libraries."""
    sources = sorted(str(path) for path in (root / KERNELS / "native").glob("*.c"))
    targets = []
    for library, flags in variants().items():
        target = root / KERNELS / library
        fresh = target.with_suffix(f".{os.getpid()}.tmp")
        subprocess.run([*command, *FLAGS, *flags, "-o", str(fresh), *sources, "-lm", "-ldl"], check=True)
        fresh.rename(target)
        targets.append(target)
    return targets


if TYPE_CHECKING or importlib.util.find_spec("hatchling"):  # `python hatch_build.py` does without
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class CustomBuildHook(BuildHookInterface[Any]):
        """Hatch calls this for wheels and editable installs."""

        def dependencies(self) -> list[str]:
            """Zig brings a C compiler from the package index to machines that have none."""
            return [] if compiler() else ["ziglang>=0.13"]

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Compile, and mark the wheel as one for this platform and any Python 3."""
            if self.target_name != "wheel":
                return
            if sys.platform != "linux":
                raise RuntimeError(f"penstock runs on Linux (it needs memfd and pidfd); this is {sys.platform}")
            command = compiler()
            if command is None:
                assert importlib.util.find_spec("ziglang"), "hatch installs what dependencies() names"
                command = zig()
            for target in build(Path(self.root), command):
                build_data["force_include"][str(target)] = f"penstock/kernels/{target.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    build(Path(__file__).parent, compiler() or zig())
