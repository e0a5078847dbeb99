# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What travels with the weights, byte for byte, and what stays behind, by name.

Kept: tokenizer and chat templates (`tokenizer.py`), generation configuration, licence and policies, and of embedding models
the modules of sentence-transformers. Only what is known is kept, so that code, pickles and states of an optimizer never
travel.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from transformers import GenerationConfig

from depthroute.errors import Refused, one_line

from .tokenizer import copy_file, copy_tokenizer, tokenizer_warnings
from .weights import PICKLES


GENERATION = "generation_config.json"
MODULES = "modules.json"
LEGAL_PATTERNS = ["*[Ll][Ii][Cc][Ee][Nn]*", "*[Nn][Oo][Tt][Ii][Cc][Ee]*", "*[Pp][Oo][Ll][Ii][Cc][Yy]*", "COPYING*"]
SIDE_FILE_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "README.md", *LEGAL_PATTERNS]
"""Of a hub model: everything that may travel, and the card, whose licence and languages are carried on."""

_LEGAL = re.compile(
    r"(.*[ _-])?(licen[cs]e|notices?|copying|copyright|attribution|(use|usage|acceptable[ _-]use)[ _-]policy|terms[ _-]of[ _-]use)"
    r"([ _-].*)?(\.(txt|md|rst|pdf|html))?",
    re.IGNORECASE,
)
_SENTENCE_SETTINGS = ("config_sentence_transformers.json", "sentence_*config.json")
_SENTENCE_TYPES = "sentence_transformers."


@dataclass(frozen=True)
class SideFiles:
    """What became of the files beside the weights.

    Attributes:
        kept: names of what was copied, relative to the folder.
        left: names of what stayed behind; a folder of which nothing was kept is one name that ends with a slash.
        warnings: one line each, beginning with the file's name.
    """

    kept: list[str]
    left: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def copy_side_files(source: Path, out: Path, embedding_rows: int) -> SideFiles:
    """Copy everything that travels from one model folder to another. Links, as in the hub's cache, become files.

    Args:
        embedding_rows: of the model: tokens beyond them are kept, with a warning.

    Raises:
        Refused: a tokenizer that cannot be loaded or runs code of its own, a link that leads nowhere, or modules of
            sentence-transformers that are code, pickles, or outside the folder.
        CheckFailed: the output's tokenizer differs from the source's.
    """
    modules = list(_sentence_files(source))  # refused before anything is written
    kept = copy_tokenizer(source, out)
    for name in (*_named(source, GENERATION), *legal_files(source), *modules):
        copy_file(source / name, out / name)
        kept.append(name)
    warnings = tokenizer_warnings(out, embedding_rows)
    if (warning := generation_warning(source)) is not None:
        warnings.append(warning)
    return SideFiles(kept, left_behind(source, kept), warnings)


def legal_files(folder: Path) -> list[str]:
    """Names of licences, notices and policies of use, directly in the folder."""
    return sorted(path.name for path in folder.iterdir() if not path.is_dir() and _LEGAL.fullmatch(path.name))


def left_behind(source: Path, kept: list[str]) -> list[str]:
    """What of the folder is not among `kept`, weights last. A version control's or a download's own folder does not count."""
    names = []
    for path in sorted(source.iterdir()):
        if path.name in (".git", ".cache", ".gitattributes"):
            continue
        inside = [name for name in kept if name.startswith(f"{path.name}/")]
        if path.is_dir() and not inside and path.name not in kept:
            names.append(f"{path.name}/")
        elif path.is_dir():
            files = (item.relative_to(source).as_posix() for item in sorted(path.rglob("*")) if not item.is_dir())
            names += [name for name in files if inside and name not in inside]
        elif path.name not in kept:
            names.append(path.name)
    return sorted(names, key=lambda name: ".safetensors" in name)


def generation_warning(folder: Path) -> str | None:
    """Why transformers does not save this folder's generation configuration once it was changed; None where it would.

    transformers drops nothing: loading and saving a model gives the same values back. But values that contradict each other,
    such as a temperature without `do_sample`, it refuses to save: with ValueError up to some release of 5.x always, after
    that as soon as one value was changed (as its Trainer does with a tokenizer's special tokens).
    """
    if not (folder / GENERATION).is_file():
        return None
    try:
        GenerationConfig.from_pretrained(folder, local_files_only=True).validate(strict=True)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        named = re.findall(r"^- `(\w+)`:", str(error), re.MULTILINE)
        values = json.loads((folder / GENERATION).read_text(encoding="utf-8")) if named else {}
        cause = ", ".join(f"{name} = {json.dumps(values.get(name))}" for name in named) or one_line(error)
        extra = " without do_sample" if named and values.get("do_sample") is not True else ""
        return f"{GENERATION}: kept as it is; transformers may refuse to save it again: {cause}{extra}"
    return None


def _named(folder: Path, *patterns: str) -> list[str]:
    """Names directly in the folder, of links that lead nowhere too."""
    files = [path.name for path in folder.iterdir() if not path.is_dir()]
    return sorted(name for name in files if any(fnmatch(name, pattern) for pattern in patterns))


def _sentence_files(source: Path) -> Iterator[str]:
    """The files that make an embedding model of sentence-transformers: settings, and the modules that its list names."""
    yield from _named(source, *_SENTENCE_SETTINGS)
    if not (source / MODULES).exists():
        return
    yield MODULES
    for kind, place in _modules(source / MODULES):
        if not kind.startswith(_SENTENCE_TYPES):
            raise Refused(
                f"{source / MODULES}: type: got {kind!r}, which is code of its own; allowed: {_SENTENCE_TYPES}… modules"
            )
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise Refused(f"{source / MODULES}: path: got {place!r}, allowed: a folder inside the model's")
        folder = source / place
        if place in ("", ".") or not folder.is_dir():
            continue  # the model itself, or a module without settings
        for path in sorted(folder.rglob("*")):
            if path.suffix in PICKLES and not path.with_name("model.safetensors").exists():
                raise Refused(f"{path}: got a pickle file, allowed: safetensors only (pickle files run code)")
            if path.suffix in (".json", ".safetensors"):
                yield path.relative_to(source).as_posix()


def _modules(file: Path) -> list[tuple[str, str]]:
    try:
        return [(str(module["type"]), str(module["path"])) for module in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{file}: {type(error).__name__}, allowed: a list of modules with type and path") from error
