# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Where the local tasks' documents come from. lm-eval loads this file by its path: it knows nothing of the package."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict


def load(file: str, **metadata: Any) -> DatasetDict:
    """The documents of a `.jsonl` file beside this one, as the split `test`. `metadata` is what lm-eval adds; not used."""
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    return DatasetDict(test=Dataset.from_list([json.loads(line) for line in text.splitlines()]))
