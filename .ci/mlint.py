# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""transformers-mlinter over model files that live outside transformers: `python .ci/mlint.py FILES`. Exit code 1 on findings.

Every rule that is on by default runs, but for those below, which are about transformers' own repository.
"""

import sys
from pathlib import Path

import mlinter
import rich


NOT_APPLICABLE = {
    "TRF014": "any mention of trust_remote_code: the one here switches it off (tests/packaging sees that it stays so)",
    "TRF028": "the licence paragraph in every file: here it is one SPDX line, and the text is in LICENSE",
    "TRF057": "@auto_docstring fills in transformers' own documentation pages; these classes write out their docstrings",
}


def main(files: list[str]) -> int:
    """Print what the linter finds in `files`."""
    rules = set(mlinter.DEFAULT_ENABLED_TRF_RULES) - NOT_APPLICABLE.keys()
    found = [
        violation
        for file in map(Path, files)
        for violation in mlinter.analyze_file(file, file.read_text(encoding="utf-8"), rules)
    ]
    for violation in found:
        rich.print(mlinter.format_violation(violation))
    print(f"mlinter: {len(files)} files, {len(rules)} rules, {len(found)} findings")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
