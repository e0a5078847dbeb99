# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Writes the data of the local tasks: `python -m depthroute.evaluation.make_tasks [FOLDER]`.

Everything is derived from the source files of the running Python's standard library (read, never imported) and from a
seeded generator, so the same Python writes the same bytes. The data in `tasks/` were made with CPython 3.11; see `NOTICE`
there.

    choice.jsonl       {"signature", "choices": 4 docstring first lines, "label": index of the right one}
    perplexity.jsonl   {"module", "text"}: the beginning of a module's source file
    generation.jsonl   {"kind", "prompt", "answer"}: copying, counting, alternating, adding, two examples given
"""

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .catalog import HELD_OUT_MODULES, TASK_FOLDER


CHOICE_ITEMS = 100
ITEMS_PER_KIND = 15
TEXT_CHARACTERS = 1200
SEED = 0

_WORDS = "lamp river stone apple cloud chair window garden bread horse train paper glass music ocean table".split()


def held_out_sources() -> dict[str, str]:
    """Source text of every module in `HELD_OUT_MODULES`, by name.

    Raises:
        FileNotFoundError: this Python's standard library lacks one.
    """
    library = Path(sysconfig.get_path("stdlib"))
    sources = {}
    for name in HELD_OUT_MODULES:
        package = library / name / "__init__.py"
        file = package if package.is_file() else library / f"{name}.py"
        sources[name] = file.read_text(encoding="utf-8")
    return sources


def _documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """Signature and docstring's first line of each public function whose first line is one plain sentence."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        lines = (ast.get_docstring(node) or "").splitlines()
        if lines and 25 <= len(lines[0]) <= 80 and lines[0].endswith(".") and lines[0].isascii():
            yield f"def {node.name}({ast.unparse(node.args)}):", lines[0]


def choice_documents(sources: dict[str, str]) -> list[dict[str, Any]]:
    """Multiple choice: which of four first lines documents this function? The wrong ones are other functions' of the
    held-out modules."""
    lines: dict[str, str] = {}
    for source in sources.values():
        for signature, line in _documented_functions(source):
            if len(signature) <= 90 and line not in lines.values():
                lines.setdefault(signature, line)
    rng = random.Random(SEED)
    documents = []
    for signature in sorted(rng.sample(sorted(lines), CHOICE_ITEMS)):
        wrong = rng.sample(sorted(line for other, line in lines.items() if other != signature), 3)
        choices = [lines[signature], *wrong]
        rng.shuffle(choices)
        documents.append({"signature": signature, "choices": choices, "label": choices.index(lines[signature])})
    return documents


def perplexity_documents(sources: dict[str, str]) -> list[dict[str, Any]]:
    """Running text: the first whole lines of each module, about `TEXT_CHARACTERS` characters."""
    documents = []
    for module, source in sources.items():
        head = source[:TEXT_CHARACTERS].encode("ascii", "ignore").decode()
        documents.append({"module": module, "text": head[: head.rfind("\n") + 1]})
    return documents


def _copy(rng: random.Random) -> tuple[str, str]:
    words = " ".join(rng.sample(_WORDS, 3))
    return f"{words} ->", words


def _count(rng: random.Random) -> tuple[str, str]:
    first = rng.randint(1, 90)
    return ", ".join(str(first + i) for i in range(5)) + ",", str(first + 5)


def _alternate(rng: random.Random) -> tuple[str, str]:
    one, other = rng.sample(_WORDS, 2)
    return f"{one} {other} {one} {other} {one}", other


def _add(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randint(1, 9), rng.randint(1, 9)
    return f"{left} + {right} =", str(left + right)


def generation_documents() -> list[dict[str, Any]]:
    """Short generation with one right answer: two solved examples of a kind, then a third to solve."""
    rng = random.Random(SEED)
    documents = []
    for kind in (_copy, _count, _alternate, _add):
        for _ in range(ITEMS_PER_KIND):
            solved = [kind(rng) for _ in range(3)]
            shots = "".join(f"{prompt} {answer}\n" for prompt, answer in solved[:2])
            prompt, answer = solved[2]
            documents.append({"kind": kind.__name__.strip("_"), "prompt": shots + prompt, "answer": answer})
    return documents


def write_tasks(folder: Path) -> None:
    """Write the three data files into `folder`, which exists."""
    sources = held_out_sources()
    files = {
        "choice": choice_documents(sources),
        "perplexity": perplexity_documents(sources),
        "generation": generation_documents(),
    }
    for name, documents in files.items():
        text = "".join(json.dumps(document) + "\n" for document in documents)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]) if len(sys.argv) > 1 else TASK_FOLDER)
