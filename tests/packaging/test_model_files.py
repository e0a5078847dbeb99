# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The files that travel with a checkpoint, as `trust_remote_code` reads them: by pattern, one flat folder, no package."""

import ast
import re
import sys
from pathlib import Path

import pytest


FOLDER = Path(__file__).parents[2] / "src" / "depthroute" / "modeling"
FILES = sorted(FOLDER.glob("*.py"))
ALLOWED = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names} - {"importlib"}


def read(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """Every import of a file, also those inside functions."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def tried(tree: ast.Module) -> set[ast.AST]:
    """What stands in a `try` that has an answer to an ImportError: the loader does not ask for that."""
    return {
        inside
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any(isinstance(one.type, ast.Name) and one.type.id == "ImportError" for one in node.handlers)
        for statement in node.body
        for inside in ast.walk(statement)
    }


def test_the_folder_is_flat():
    assert {"configuration_depthroute.py", "modeling_depthroute.py"} <= {file.name for file in FILES}
    assert [entry.name for entry in FOLDER.iterdir() if entry.is_dir() and entry.name != "__pycache__"] == []
    assert [file.name for file in FOLDER.iterdir() if file.is_file() and file.suffix not in (".py", ".pyc")] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_imports(file):
    """torch, transformers, the standard library, and `from .sibling import name`; nothing else is there, or copied. And where
    it can be done without them, the fast implementations."""
    tree = read(file)
    for node in imports(tree):
        where = f"{file.name}:{node.lineno}"
        if file.stem == "depth_backend" and getattr(node, "module", None) == "depthroute_kernels.dispatch":
            assert node in tried(tree), where
        elif isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= ALLOWED, where
        elif node.level == 0:
            assert node.module.partition(".")[0] in ALLOWED, where
        else:
            assert node.level == 1 and node.module and "." not in node.module, where
            assert (FOLDER / f"{node.module}.py").is_file(), where


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_text_reads_as_a_relative_import(file):
    """The loader finds siblings by pattern, inside strings too: a line of prose that starts with `from .` is followed."""
    text = file.read_text(encoding="utf-8")
    pattern = r"^\s*(?:import\s+\.(\S+)\s*$|from\s+\.(\S*)\s+import)"
    seen = [first or second for first, second in re.findall(pattern, text, re.MULTILINE)]
    assert sorted(seen) == sorted(node.module for node in imports(read(file)) if getattr(node, "level", 0))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_remote_code_is_trusted(file):
    for node in ast.walk(read(file)):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant) and node.value.value is False, (
                f"{file.name}:{node.value.lineno}"
            )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_header(file):
    first, second = file.read_text(encoding="utf-8").splitlines()[:2]
    assert re.fullmatch(r"# Copyright \d{4} The DepthRoute Authors\. All rights reserved\.", first)
    assert second == "# SPDX-License-Identifier: Apache-2.0"
