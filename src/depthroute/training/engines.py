# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Ready-made configurations of the engines that train on several devices: accelerate's as YAML, DeepSpeed's as JSON."""

from pathlib import Path

from ..errors import Refused
from ..modeling.configuration_depthroute import nearest_names


ENGINE_FOLDER = Path(__file__).parent / "engines"


def engine_files() -> dict[str, Path]:
    """The packaged configurations by name: `ddp`, `fsdp2` (for `accelerate launch --config_file`), `zero3` and
    `zero3-offload` (for `--deepspeed`)."""
    return {file.stem: file for file in sorted(ENGINE_FOLDER.iterdir()) if file.suffix in (".yaml", ".json")}


def engine_file(name: str) -> Path:
    """The file of one configuration.

    Raises:
        Refused: an unknown name, with the nearest ones.
    """
    files = engine_files()
    if name not in files:
        raise Refused(f"print_engine: got {name!r}, allowed: {', '.join(files)}; nearest: {nearest_names(name, files)}")
    return files[name]
