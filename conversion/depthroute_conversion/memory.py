# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""How much memory there is, for the machine and for the container that this process may be in."""

from pathlib import Path

import psutil


CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be used without swapping, and without being ended for it."""
    limits = [psutil.virtual_memory().available]
    if (left := _left_in_container(CGROUP)) is not None:
        limits.append(left)
    return max(0, min(limits))


def _left_in_container(cgroup: Path) -> int | None:
    """What is left of a container's limit; cached files, which give way, are not counted as used. None without a limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:  # no container, or one of another kind
        return None
    if limit == "max":
        return None
    return int(limit) - used + int(counts["inactive_file"]) + int(counts["active_file"])
