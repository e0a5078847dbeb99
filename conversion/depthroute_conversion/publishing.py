# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`push`: a finished folder to the hub, through huggingface_hub, once it is fit to be published."""

import glob
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthroute.errors import Refused, one_line
from depthroute.files import HUB_ERRORS

from .card import card_problems, current_card, refresh_card
from .hashes import hashes_of_weights
from .keys import listed
from .publishable import check_whole, files_of, needed_files, paths_in, secrets_in, unfit_files
from .record import CARD, Facts, read_facts


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NOTHING_TO_LOSE = (".gitattributes",)
_REPLACED = ["*.safetensors", "*.safetensors.index.json"]
"""What `overwrite` deletes where the new folder has no file of that name: weights of two models must not lie side by side."""


@dataclass(frozen=True)
class PushReport:
    """What was, or with `dry_run` would be, published.

    Attributes:
        repo_id: the repository.
        files: size in bytes by name.
        excluded: names that stay here, as asked.
        message: of the commit.
        revision: the branch; None: the main one.
        private: visibility of a new repository; None: what is usual for its owner.
        create_pr: as a pull request.
        url: of the commit or pull request; None where nothing was sent.
    """

    repo_id: str
    files: dict[str, int]
    excluded: list[str]
    message: str
    revision: str | None = None
    private: bool | None = None
    create_pr: bool = False
    url: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        """Label and value, for printing."""
        total = sum(self.files.values())
        visibility = {None: "as usual for its owner", True: "private", False: "public"}[self.private]
        sizes = [(name, f"{size:,} bytes") for name, size in self.files.items()]
        return [
            *sizes,
            *(("excluded", name) for name in self.excluded),
            ("files", f"{len(self.files)}, {total:,} bytes"),
            ("repository", f"{self.repo_id} ({visibility}, if it is new)"),
            (
                "commit",
                f"{self.message!r} {'as a pull request' if self.create_pr else 'on ' + (self.revision or 'main')}",
            ),
            *([("url", self.url)] if self.url else []),
        ]


@dataclass(frozen=True)
class PushOptions:
    """How to publish.

    Attributes:
        private: whether a new repository is; None: what is usual for its owner. An existing one stays as it is.
        revision: a branch, made where there is none.
        message: of the commit.
        create_pr: as a pull request, which changes nothing until it is merged.
        overwrite: write to a repository that has files already: those of the same name are replaced, and weights that the
            folder does not have are deleted. Its history keeps them.
        allow_unverified: publish a folder of which no verification is known.
        exclude: patterns of files or folders that stay here.
        token: of the hub; default: the one that is logged in.
    """

    private: bool | None = None
    revision: str | None = None
    message: str | None = None
    create_pr: bool = False
    overwrite: bool = False
    allow_unverified: bool = False
    exclude: Sequence[str] = field(default_factory=tuple)
    token: str | None = None


def push(
    folder: str | Path,
    repo_id: str,
    options: PushOptions | None = None,
    *,
    results: Sequence[str | Path] = (),
    dry_run: bool = False,
    api: Any = None,
) -> PushReport:
    """Publish a DepthRoute folder as a model of the hub.

    Its card is brought up to date first (`refresh_card`).

    Args:
        folder: what to publish.
        repo_id: owner/name.
        options: how.
        results: as for `refresh_card`; not with `dry_run`, which writes nothing.
        dry_run: check all that can be checked here and say what would be sent. Needs no network and no token.
        api: in place of `huggingface_hub.HfApi()`.

    Raises:
        Refused: the folder is not whole, not verified, has a card that lacks something, or files that are not to be published;
            the repository holds files already; or the hub refuses. One line each.
    """
    how = options or PushOptions()
    path = Path(folder)
    if _HUB_ID.fullmatch(repo_id) is None:
        raise Refused(f"repository: got {repo_id!r}, allowed: owner/name")
    if how.create_pr and how.revision not in (None, "main"):
        raise Refused(
            f"revision: got {how.revision!r} with a pull request, which goes to main; allowed: one of the two"
        )
    if dry_run and results:
        raise Refused(
            "results: got files in a dry run, which writes nothing; allowed: `depthroute card DIR --results FILE` first"
        )
    facts = read_facts(path)
    check_whole(path, facts)
    check_verified(path, facts, how.allow_unverified)
    names = files_of(path, how.exclude)
    check_kept(path, how.exclude, names)
    check_fit(path, names)
    if not dry_run:
        refresh_card(path, results)
    card = current_card(path)
    check_card(path, card, repo_id)
    names = sorted({*files_of(path, how.exclude), CARD})
    sizes = {name: len(card.encode()) if name == CARD else (path / name).stat().st_size for name in names}
    excluded = collapsed(set(files_of(path)) - set(names), names)
    message = (
        how.message or f"{facts.config.preset_name} of {facts.hub.get('base_model') or facts.name}, by depthroute push"
    )
    report = PushReport(repo_id, sizes, excluded, message, how.revision, how.private, how.create_pr)
    return report if dry_run else _upload(path, report, how, api)


def collapsed(excluded: set[str], names: Sequence[str]) -> list[str]:
    """Names that stay here; a folder of which nothing is sent is one name that ends with a slash."""
    sent = {name.partition("/")[0] for name in names}
    tops = {name: name.partition("/")[0] for name in excluded}
    return sorted({f"{top}/" if top != name and top not in sent else name for name, top in tops.items()})


def check_verified(folder: Path, facts: Facts, allow_unverified: bool) -> None:
    """
    Raises:
        Refused: no verification is known, it failed, or weights have changed since with no training on record.
    """
    if allow_unverified:
        return
    allowed = f"`depthroute verify SOURCE {folder.name} --json FILE` and `depthroute card {folder.name} --verification FILE`, or --allow-unverified"
    if facts.verification is None:
        raise Refused(f"{folder}: got no verification, allowed: {allowed}")
    if failure := facts.verification.get("failure"):
        raise Refused(f"{folder}: its verification failed: {failure}; allowed: {allowed}")
    if facts.runs:
        return  # trained since, as its card says
    recorded, found = facts.record.get("weights", {}), hashes_of_weights(folder)
    if changed := sorted(name for name in {*recorded, *found} if recorded.get(name) != found.get(name)):
        raise Refused(f"{folder}: {listed(changed)}: got other weights than were verified, allowed: {allowed}")


def check_kept(folder: Path, exclude: Sequence[str], names: Sequence[str]) -> None:
    """
    Raises:
        Refused: files are to stay here without which the rest is no model.
    """
    if lacking := sorted(needed_files(folder) - set(names)):
        raise Refused(
            f"exclude: got {', '.join(map(repr, exclude))}, which leaves out {listed(lacking)}; allowed: files that loading the "
            "model does not need"
        )


def check_fit(folder: Path, names: Sequence[str]) -> None:
    """
    Raises:
        Refused: files that are not to be published, with the options that leave them here.
    """
    unfit = unfit_files(folder, names)
    if unfit:
        reasons = {item.exclude: item.reason for item in unfit}
        raise Refused(
            f"{folder}: not to be published: {', '.join(f'{pattern} ({reason})' for pattern, reason in reasons.items())}; "
            f"allowed: a folder without them, or {' '.join(f'--exclude {shlex.quote(pattern)}' for pattern in reasons)}"
        )


def check_card(folder: Path, card: str, repo_id: str) -> None:
    """
    Raises:
        Refused: the card lacks what the hub needs, names paths of this machine or a secret, or the repository is that of the
            base model.
    """
    found = card_problems(folder, card)
    if paths := paths_in(card, folder):
        found.append(f"names {paths[0]}, a path of this machine")
    if secrets_in(card):
        found.append("holds a secret token or key")
    if found:
        raise Refused(f"{folder / CARD}: {'; '.join(found)}")
    if repo_id == read_facts(folder).hub.get("base_model"):
        raise Refused(f"repository: got {repo_id!r}, the base model itself; allowed: another name")


def _upload(folder: Path, report: PushReport, how: PushOptions, api: Any) -> PushReport:
    from huggingface_hub import HfApi

    api = api or HfApi(token=how.token)
    with _hub_errors(report.repo_id):
        parent = _present(api, report, how)
        done = api.upload_folder(
            repo_id=report.repo_id,
            folder_path=folder,
            commit_message=report.message,
            revision=None if report.create_pr else report.revision,
            create_pr=report.create_pr,
            parent_commit=parent,
            # these files and no others: what was checked
            allow_patterns=[glob.escape(name) for name in report.files],
            delete_patterns=_REPLACED if how.overwrite else None,
        )
    url = done.pr_url if report.create_pr else done.commit_url
    return PushReport(**{**vars(report), "url": str(url)})


def _present(api: Any, report: PushReport, how: PushOptions) -> str | None:
    """Make sure of repository and branch; returns the commit that the upload comes after, None where that is new.

    Raises:
        Refused: there are files already, and neither `overwrite` nor `create_pr` was asked for.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = api.repo_info(report.repo_id, revision=None if report.create_pr else report.revision)
    except RevisionNotFoundError:
        api.create_branch(report.repo_id, branch=report.revision, exist_ok=True)
        return None
    except RepositoryNotFoundError:  # or one that may not be seen, which making it finds out
        api.create_repo(report.repo_id, private=report.private, repo_type="model")
        if report.revision not in (None, "main"):
            api.create_branch(report.repo_id, branch=report.revision, exist_ok=True)
        return None
    held = sorted(item.rfilename for item in info.siblings or [] if item.rfilename not in _NOTHING_TO_LOSE)
    if held and not (how.overwrite or report.create_pr):
        raise Refused(
            f"repository: got {report.repo_id!r}, which holds {len(held)} files: {listed(held)}; "
            "allowed: a new one, --overwrite (also to go on with a push that was cut short), --create-pr or another --branch"
        )
    return None if report.create_pr else info.sha


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """The hub's errors in one line."""
    try:
        yield
    except Refused:
        raise
    except (*HUB_ERRORS, ValueError, RuntimeError) as error:
        raise Refused(f"{repo_id}: the hub: {type(error).__name__}: {one_line(error)}") from error
