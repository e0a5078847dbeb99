# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Whether a folder may be published: it is whole, what is in it was checked, and nothing in it is private or runs code."""

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import depthroute
from depthroute import DepthRoutePreTrainedModel, modeling
from depthroute.errors import Refused

from .keys import KeyRules, listed, plan_keys
from .record import CARD, Facts, read_mapping
from .routing import meta_model
from .weights import INDEX, PICKLES, read_headers


@dataclass(frozen=True)
class Unfit:
    """A file that is not to be published.

    Attributes:
        name: relative to the folder.
        reason: why, in a few words.
        exclude: the pattern that leaves it, and its like, out.
    """

    name: str
    reason: str
    exclude: str


_NEVER = (".git", ".cache")
"""Folders at the top that the hub's own client leaves out: a version control's, and a download's notes."""

_PRIVATE_NAMES = (".env*", "*.pem", "*.key", "*.pfx", ".netrc", ".git-credentials", "id_rsa*", "id_ed25519*", "token", "*credentials*",
                  "*secrets*")  # fmt: skip
_STATES = (
    "optimizer*",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
    "training_args.*",
    "checkpoint-*",
    "global_step*",
)
_MORE_PICKLES = (*PICKLES, ".joblib", ".dill", ".npy", ".npz")
_TEXTS = (".json", ".jsonl", ".md", ".txt", ".jinja", ".yaml", ".yml", ".cfg", ".ini", ".toml", ".log", "")
# tokens of a vocabulary are text of the world: some look like paths
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "tekken.json")
_SECRETS = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}\b|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_\w{40,}|\bAKIA[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_PATH = re.compile(r"(?<![\w.:/~<-])/[\w.][^\s\"'`,;()<>|\\]+|file:///[^\s\"'`]+|\b[A-Za-z]:\\[^\s\"'`]+")
_HOME = re.compile(r"/home/[^/]+/.|/Users/[^/]+/.|/root/.|file://|[A-Za-z]:\\")
_OF_ANY_SYSTEM = ("/usr/", "/bin/", "/etc/", "/dev/", "/proc/", "/sys/", "/opt/homebrew/")


def files_of(folder: Path, exclude: Sequence[str] = ()) -> list[str]:
    """Names of all files that would be published, relative to the folder, sorted.

    Args:
        exclude: patterns of names, or of folders, to leave out.

    Raises:
        Refused: a pattern that nothing matches, or a link that leads nowhere.
    """
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name.split("/")[0] in _NEVER:
            continue
        if not path.exists():
            raise Refused(f"{path}: got a link to {path.readlink()}, which does not exist; allowed: a whole folder")
        names.append(name)
    for pattern in exclude:
        if not any(_matches(name, pattern) for name in names):
            raise Refused(f"exclude: got {pattern!r}, which no file matches; allowed: one of {listed(names)}")
    return [name for name in names if not any(_matches(name, pattern) for pattern in exclude)]


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a file: by its name, by a part of its path, or by the whole."""
    return fnmatch.fnmatch(name, pattern) or any(fnmatch.fnmatch(part, pattern.rstrip("/")) for part in name.split("/"))


def unfit_files(folder: Path, names: Sequence[str]) -> list[Unfit]:
    """Those of a folder's files that are not to be published: pickles and foreign code, states of training, secrets, hidden
    files, and text that names paths of this machine. The card is not among them: it is checked as it will be (`paths_in`)."""
    return [unfit for name in names if (unfit := _unfit(folder, name)) is not None]


def _unfit(folder: Path, name: str) -> Unfit | None:
    path = folder / name
    parts = name.split("/")
    for part in parts:
        if pattern := next((pattern for pattern in _PRIVATE_NAMES if fnmatch.fnmatch(part.lower(), pattern)), None):
            return Unfit(name, "private by its name", part)
        if pattern := next((pattern for pattern in _STATES if fnmatch.fnmatch(part, pattern)), None):
            return Unfit(name, "state of a training run", pattern if pattern.endswith(("-*", "step*")) else part)
        if part.startswith(".") and name != ".gitattributes":
            return Unfit(name, "hidden", part)
    if path.suffix in _MORE_PICKLES:
        return Unfit(name, "pickle, which runs code when read", name)
    if path.suffix == ".py":
        ours = len(parts) == 1 and (Path(modeling.__path__[0]) / name).is_file()
        return None if ours else Unfit(name, "code that is not this package's", name)
    if path.suffix.lower() in _TEXTS and name != CARD and parts[-1] not in _VOCABULARIES:
        text = path.read_text(encoding="utf-8", errors="replace")
        if _SECRETS.search(text):
            return Unfit(name, "holds a secret token or key", name)
        if found := paths_in(text, folder):
            return Unfit(name, f"names {found[0]}, a path of this machine", name)
    return None


def secrets_in(text: str) -> bool:
    """Whether a text holds what looks like an access token or a private key."""
    return _SECRETS.search(text) is not None


def paths_in(text: str, folder: Path) -> list[str]:
    """Paths that a text names: in anyone's home, where this process works, where the folder lies, or whatever exists on this
    machine and not on every other."""
    here = [
        Path.home(),
        Path.cwd(),
        folder.resolve(),
        folder.resolve().parent,
        Path(os.environ.get("HF_HOME", Path.home())),
    ]
    named = {match.group().rstrip(".:") for match in _PATH.finditer(text)}
    return sorted(path for path in named if _HOME.match(path) or _is_here(path, here))


def _is_here(path: str, here: Sequence[Path]) -> bool:
    if any(Path(path).is_relative_to(place) for place in here if len(place.parts) > 1):
        return True
    return path.count("/") > 1 and not path.startswith(_OF_ANY_SYSTEM) and os.path.exists(path)


def check_whole(folder: Path, facts: Facts) -> None:
    """
    Raises:
        Refused: weights that are missing, damaged or of another model than the configuration's, or code that it names and
            that is not there.
    """
    stored = {key: item.shape for key, item in read_headers(folder).items()}
    ours = getattr(depthroute, facts.architecture, None)
    if not (isinstance(ours, type) and issubclass(ours, DepthRoutePreTrainedModel)):
        raise Refused(
            f"{folder / 'config.json'}: architectures: got {facts.architecture}, allowed: a class of depthroute"
        )
    shapes = {key: tuple(tensor.shape) for key, tensor in meta_model(facts.config, ours).state_dict().items()}
    plan_keys(str(folder), stored, shapes, [], KeyRules(), bool(facts.config.tie_word_embeddings))
    for name in sorted(set(_code_files(folder))):
        if not (folder / name).is_file():
            raise Refused(
                f"{folder / 'config.json'}: auto_map: names {name}, which is missing; allowed: a whole folder"
            )


def needed_files(folder: Path) -> set[str]:
    """Those of a folder's files without which the others are no model: its weights, its configuration, its code, and the card."""
    weights = {item.file.name for item in read_headers(folder).values()}
    index = {INDEX} if (folder / INDEX).is_file() else set()
    code = {path.name for path in folder.glob("*.py") if (Path(modeling.__path__[0]) / path.name).is_file()}
    return {"config.json", *weights, *index, *code, *({CARD} if (folder / CARD).is_file() else ())}


def _code_files(folder: Path) -> Iterator[str]:
    for entry in read_mapping(folder / "config.json").get("auto_map", {}).values():
        for reference in entry if isinstance(entry, list) else [entry]:
            if isinstance(reference, str) and "--" not in reference:
                yield f"{reference.partition('.')[0]}.py"
