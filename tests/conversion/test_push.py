# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute push`: what it sends, in which calls of huggingface_hub, and what it refuses. The hub's client is replaced by one
that records; no test needs a network."""

import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from conversion_helpers import edit_json, edit_weights
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from depthroute import convert, push, refresh_card
from depthroute.errors import Refused
from depthroute_conversion import PushOptions


def response(code: int) -> SimpleNamespace:
    """As much of an answer as the hub's errors look at; the HTTP client's own class changed between its releases."""
    return SimpleNamespace(status_code=code, headers={}, request=None)


class RecordingHub:
    """Stands where `huggingface_hub.HfApi` does: every call has to fit the real one's signature, and is kept."""

    def __init__(
        self, files: list[str] | None = None, branches: tuple[str, ...] = ("main",), error: Exception | None = None
    ):
        self.files, self.branches, self.error = files, branches, error
        self.calls: list[tuple[str, dict]] = []
        self.sent: list[str] = []

    def _record(self, method: str, *arguments, **options) -> dict:
        bound = inspect.signature(getattr(HfApi, method)).bind(self, *arguments, **options).arguments
        bound.pop("self")
        self.calls.append((method, bound))
        return bound

    def repo_info(self, *arguments, **options):
        revision = self._record("repo_info", *arguments, **options).get("revision") or "main"
        if self.error is not None:
            raise self.error
        if self.files is None:
            raise RepositoryNotFoundError("404\n\nRepository not found", response=response(404))
        if revision not in self.branches:
            raise RevisionNotFoundError("404 Invalid rev id", response=response(404))
        return SimpleNamespace(sha="abc123", siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def create_repo(self, *arguments, **options):
        self._record("create_repo", *arguments, **options)

    def create_branch(self, *arguments, **options):
        self._record("create_branch", *arguments, **options)

    def upload_folder(self, *arguments, **options):
        asked = self._record("upload_folder", *arguments, **options)
        names = [
            p.relative_to(asked["folder_path"]).as_posix() for p in Path(asked["folder_path"]).rglob("*") if p.is_file()
        ]
        self.sent = sorted(filter_repo_objects(names, allow_patterns=asked["allow_patterns"]))
        return SimpleNamespace(commit_url="https://hub.invalid/commit/1", pr_url="https://hub.invalid/discussions/1")

    def called(self, method: str) -> list[dict]:
        return [arguments for name, arguments in self.calls if name == method]


@pytest.fixture
def folder(converted, tmp_path) -> Path:
    """A converted folder that may be published, and changed."""
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "my-delta"))
    assert refresh_card(folder, base_model="owner/tiny") == []
    return folder


@pytest.fixture
def no_hub(monkeypatch):
    """Any attempt to speak to the hub fails, and there is no token."""

    def fail(*arguments, **options):
        raise AssertionError("spoke to the hub")

    monkeypatch.setattr(huggingface_hub, "HfApi", fail)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_lists_every_file_and_does_nothing(folder, no_hub, run_cli):
    (folder / "README.md").unlink()
    before = contents(folder)
    code, out, err = run_cli("push", folder, "me/my-delta", "--dry-run", "--private", "--message", "the first")
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    listed = {line[0]: line[1].replace(",", "") for line in lines if line[-1] == "bytes" and line[0] != "files"}
    sizes = {name: str(len(data)) for name, data in before.items()}
    assert {name: size for name, size in listed.items() if name != "README.md"} == sizes
    assert int(listed["README.md"]) > 1000  # the card that would be written
    assert "me/my-delta (private, if it is new)" in out and "'the first' on main" in out and "nothing was sent" in out
    assert contents(folder) == before


def test_a_new_repository_gets_exactly_what_the_dry_run_listed(folder):
    planned = push(folder, "me/my-delta", dry_run=True)
    hub = RecordingHub()
    report = push(folder, "me/my-delta", PushOptions(private=True), api=hub)
    assert [name for name, _ in hub.calls] == ["repo_info", "create_repo", "upload_folder"]
    assert hub.called("create_repo") == [{"repo_id": "me/my-delta", "private": True, "repo_type": "model"}]
    (upload,) = hub.called("upload_folder")
    assert (upload["repo_id"], upload["create_pr"], upload["revision"]) == ("me/my-delta", False, None)
    assert upload["commit_message"] == "delta-block of owner/tiny, by depthroute push" == report.message
    assert upload["delete_patterns"] is None and upload["parent_commit"] is None
    assert hub.sent == sorted(planned.files) == sorted(report.files) == sorted(contents(folder))
    assert {
        "config.json",
        "model.safetensors",
        "README.md",
        "LICENSE",
        "tokenizer.json",
        "modeling_depthroute.py",
    } <= set(hub.sent)
    assert report.url == "https://hub.invalid/commit/1" and planned.url is None
    assert report.files == {name: len(data) for name, data in contents(folder).items()}


def test_the_command_uses_huggingface_hub(folder, monkeypatch, run_cli):
    hub, made = RecordingHub(files=[".gitattributes"]), []
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **options: (made.append(options), hub)[1])
    code, out, err = run_cli("push", folder, "me/my-delta")
    assert code == 0, err
    assert made == [{"token": None}] and "published as me/my-delta" in out and "https://hub.invalid/commit/1" in out
    (upload,) = hub.called("upload_folder")
    assert upload["parent_commit"] == "abc123" and not hub.called("create_repo")


def test_a_repository_with_files_is_left_alone_unless_asked(folder):
    hub = RecordingHub(files=[".gitattributes", "README.md", "model-00001-of-00002.safetensors"])
    with pytest.raises(
        Refused, match=r"holds 2 files: README.md, model-00001-of-00002.safetensors; allowed: .*--overwrite"
    ):
        push(folder, "me/my-delta", api=hub)
    assert [name for name, _ in hub.calls] == ["repo_info"]

    push(folder, "me/my-delta", PushOptions(overwrite=True), api=hub)
    (upload,) = hub.called("upload_folder")
    # nothing that came in between is lost, and no weights of another model are left beside
    assert upload["parent_commit"] == "abc123"
    assert upload["delete_patterns"] == ["*.safetensors", "*.safetensors.index.json"]


def test_a_pull_request_changes_nothing_and_may_go_to_a_full_repository(folder):
    hub = RecordingHub(files=["README.md"])
    report = push(folder, "me/my-delta", PushOptions(create_pr=True), api=hub)
    (upload,) = hub.called("upload_folder")
    assert upload["create_pr"] is True and upload["revision"] is None and upload["parent_commit"] is None
    assert report.url == "https://hub.invalid/discussions/1"
    with pytest.raises(Refused, match="revision: got 'dev' with a pull request"):
        push(folder, "me/my-delta", PushOptions(create_pr=True, revision="dev"), api=hub)


def test_a_branch_is_made_where_there_is_none(folder, monkeypatch, run_cli):
    hub = RecordingHub(files=["README.md"])
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **options: hub)
    code, _, err = run_cli("push", folder, "me/my-delta", "--branch", "dev")
    assert code == 0, err
    assert hub.called("create_branch") == [{"repo_id": "me/my-delta", "branch": "dev", "exist_ok": True}]
    assert hub.called("upload_folder")[0]["revision"] == "dev"
    # a branch that is there holds files, like the main one
    existing = RecordingHub(files=["README.md"], branches=("main", "dev"))
    with pytest.raises(Refused, match="holds 1 files"):
        push(folder, "me/my-delta", PushOptions(revision="dev"), api=existing)
    new = RecordingHub()
    push(folder, "me/my-delta", PushOptions(revision="dev"), api=new)
    assert [name for name, _ in new.calls] == ["repo_info", "create_repo", "create_branch", "upload_folder"]


def test_errors_of_the_hub_are_one_line(folder, monkeypatch, run_cli):
    error = HfHubHTTPError("403 Forbidden:\n\nyou need a token\nthat may write.", response=response(403))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **options: RecordingHub(error=error))
    code, out, err = run_cli("push", folder, "me/my-delta")
    assert code == 2 and err.count("\n") == 1 and "published" not in out
    assert "me/my-delta: the hub: HfHubHTTPError: 403 Forbidden: you need a token that may write." in err


def test_without_a_network_the_real_client_fails_in_one_line(folder, run_cli):
    """HF_HUB_OFFLINE is set for all tests."""
    code, _, err = run_cli("push", folder, "me/my-delta")
    assert code == 2 and err.count("\n") == 1 and "me/my-delta: the hub: " in err


@pytest.mark.parametrize("name", ["my-delta", "me/my/delta", "me/", "", "me/my delta"])
def test_a_name_that_is_none_is_refused(name, folder, no_hub):
    with pytest.raises(Refused, match=f"repository: got '{name}', allowed: owner/name"):
        push(folder, name, dry_run=True)


def test_the_base_model_is_not_overwritten(folder, no_hub):
    with pytest.raises(Refused, match="repository: got 'owner/tiny', the base model itself"):
        push(folder, "owner/tiny", dry_run=True)


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


def cut_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-8])


def one_layer_more(folder):
    edit_json(folder / "config.json", num_hidden_layers=9, layer_types=None)


def remove_code(folder):
    (folder / "depth_ops.py").unlink()
    (folder / "modeling_depthroute.py").unlink()


@pytest.mark.parametrize(
    "damage, message",
    [
        (remove_weights, "weights: got none"),
        (cut_weights, "model.safetensors"),
        (one_layer_more, "missing keys: "),
        (remove_code, "auto_map: names modeling_depthroute.py, which is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(damage, message, folder, no_hub):
    damage(folder)
    with pytest.raises(Refused, match=message):
        push(folder, "me/my-delta", dry_run=True)


def test_an_unverified_folder_is_refused_until_it_is_verified(originals, tmp_path, no_hub, run_cli):
    out = tmp_path / "out"
    convert(originals["qwen3"], out, verify=False)
    run_cli("card", out, "--base-model", "owner/tiny")
    code, _, err = run_cli("push", out, "me/out", "--dry-run")
    assert code == 2 and "got no verification" in err and "--allow-unverified" in err
    assert run_cli("push", out, "me/out", "--dry-run", "--allow-unverified")[0] == 0
    assert "was not verified" in (out / "README.md").read_text()

    assert run_cli("verify", originals["qwen3"], out, "--json", tmp_path / "figures.json")[0] == 0
    assert run_cli("card", out, "--verification", tmp_path / "figures.json")[0] == 0
    text = (out / "README.md").read_text()
    assert "was not verified" not in text and "bitwise equal to the source" in text
    assert run_cli("push", out, "me/out", "--dry-run")[0] == 0


def test_a_failed_verification_is_refused(folder, no_hub):
    record = json.loads((folder / "depthroute_conversion.json").read_text())
    record["verification"]["failure"] = "number-1: not equal"
    (folder / "depthroute_conversion.json").write_text(json.dumps(record))
    with pytest.raises(Refused, match="its verification failed: number-1: not equal"):
        push(folder, "me/my-delta", dry_run=True)


def test_weights_that_changed_since_their_verification_are_refused(folder, no_hub):
    push(folder, "me/my-delta", dry_run=True)
    edit_weights(folder, lambda tensors: tensors["model.norm.weight"].zero_())
    with pytest.raises(Refused, match=r"model\.safetensors: got other weights than were verified"):
        push(folder, "me/my-delta", dry_run=True)
    push(folder, "me/my-delta", PushOptions(allow_unverified=True), dry_run=True)


# built here, so that this file itself holds nothing that looks like one
TOKEN = "hf_" + "a1B2" * 9
UNFIT = {
    "training_args.bin": ("x", "state of a training run"),
    "pytorch_model.bin": ("x", "pickle"),
    "checkpoint-20/optimizer.pt": ("x", "state of a training run"),
    "optimizer.safetensors": ("x", "state of a training run"),
    ".env": ("A=1", "private by its name"),
    "aws_credentials": ("x", "private by its name"),
    "server.pem": ("x", "private by its name"),
    ".DS_Store": ("x", "hidden"),
    "notes.txt": (f"my token is {TOKEN} .", "holds a secret token or key"),
    "key.md": ("-----BEGIN RSA PRIVATE KEY-----", "holds a secret token or key"),
    "custom.py": ("print()", "code that is not this package's"),
    "sub/modeling_depthroute.py": ("print()", "code that is not this package's"),
    "results.json": ('{"model": "/home/ann/models/a"}', "names /home/ann/models/a, a path of this machine"),
    "other.json": ('{"model": "C:\\\\Users\\\\ann\\\\a"}', "a path of this machine"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_not_to_be_published_is_refused_and_can_be_excluded(name, folder, no_hub, run_cli):
    text, reason = UNFIT[name]
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    code, _, err = run_cli("push", folder, "me/my-delta", "--dry-run")
    assert code == 2 and err.count("\n") == 1 and reason in err and "not to be published" in err
    advice = err.rsplit("--exclude ", 1)[1].strip().strip("'")
    code, out, err = run_cli("push", folder, "me/my-delta", "--dry-run", "--exclude", advice)
    assert code == 0, err
    assert f"{name}  " not in out and "excluded" in out
    hub = RecordingHub()
    push(folder, "me/my-delta", PushOptions(exclude=[advice]), api=hub)
    assert name not in hub.sent and "model.safetensors" in hub.sent


def test_a_path_that_exists_here_is_one_of_this_machine(folder, tmp_path, no_hub):
    (tmp_path / "data").mkdir()
    edit_json(folder / "generation_config.json", note=f"from {tmp_path / 'data'}.")
    with pytest.raises(Refused, match=f"generation_config.json \\(names {tmp_path / 'data'}, a path of this machine"):
        push(folder, "me/my-delta", dry_run=True)
    # web addresses, hub ids, markup and what every system has are no paths of this machine
    edit_json(
        folder / "generation_config.json", note="https://a.b/home/c/d owner/name </think> /usr/bin/env /no/such/place"
    )
    push(folder, "me/my-delta", dry_run=True)


@pytest.mark.parametrize("pattern", ["*.safetensors", "config.json", "README.md", "*_base.py"])
def test_what_makes_the_model_cannot_be_excluded(pattern, folder, no_hub, run_cli):
    code, _, err = run_cli("push", folder, "me/my-delta", "--dry-run", "--exclude", pattern)
    assert code == 2 and f"exclude: got {pattern!r}, which leaves out " in err
    assert err.count("\n") == 1


def test_patterns_of_exclude_have_to_mean_something(folder, no_hub):
    with pytest.raises(Refused, match="exclude: got '\\*.onnx', which no file matches"):
        push(folder, "me/my-delta", PushOptions(exclude=["*.onnx"]), dry_run=True)


def test_a_folder_with_a_link_that_leads_nowhere_is_refused(folder, no_hub):
    (folder / "figure.png").symlink_to("absent.png")
    with pytest.raises(Refused, match="figure.png: got a link to absent.png"):
        push(folder, "me/my-delta", dry_run=True)


def test_a_version_control_and_a_download_cache_stay_without_a_word(folder, no_hub):
    for name in (".git/config", ".cache/huggingface/download/a.lock"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(TOKEN)
    assert not {name for name in push(folder, "me/my-delta", dry_run=True).files if name.startswith(".")}


def test_a_card_that_lacks_something_is_refused(converted, tmp_path, no_hub):
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "bare"))
    with pytest.raises(Refused, match=r"README.md: base_model: missing, allowed: .*--base-model ORG/NAME"):
        push(folder, "me/bare", dry_run=True)
    assert refresh_card(folder, base_model="none") == []  # said to be on no hub
    push(folder, "me/bare", dry_run=True)


def test_a_card_with_a_path_or_a_secret_is_refused(folder, no_hub):
    card = folder / "README.md"
    text = card.read_text()
    card.write_text(text + f"\n## Notes\n\nIt lies in {folder.resolve()}/here.\n")
    with pytest.raises(Refused, match=r"README.md: names .*my-delta/here, a path of this machine"):
        push(folder, "me/my-delta", dry_run=True)
    card.write_text(text + f"\n## Notes\n\n{TOKEN}\n")
    with pytest.raises(Refused, match="README.md: holds a secret token or key"):
        push(folder, "me/my-delta", dry_run=True)


def test_the_card_that_is_sent_is_the_renewed_one(folder):
    card = folder / "README.md"
    card.write_text(card.read_text().replace("| bitwise equal | yes |", "| bitwise equal | perhaps |"))
    push(folder, "me/my-delta", api=RecordingHub())
    assert "perhaps" not in card.read_text() and ModelCard.load(card).data.base_model == "owner/tiny"


def test_files_whose_names_are_patterns_are_sent_as_they_are(folder):
    (folder / "figure[1].png").write_text("x")
    (folder / "figure1.png").write_text("y")
    hub = RecordingHub()
    push(folder, "me/my-delta", PushOptions(exclude=["figure1.png"]), api=hub)
    assert "figure[1].png" in hub.sent and "figure1.png" not in hub.sent
