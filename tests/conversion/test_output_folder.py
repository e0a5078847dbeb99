# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The output folder appears whole or not at all, and never costs a folder that was there."""

import os
import signal
import time
from pathlib import Path

import pytest

from depthroute import DepthRouteConfig, convert
from depthroute.errors import Refused
from depthroute_conversion.folder import whole_folder


@pytest.fixture
def old(tmp_path) -> Path:
    """An output folder that exists already."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "stale.txt").write_text("old")
    return folder


def test_existing_output_needs_overwrite(old, originals):
    with pytest.raises(Refused, match=r"out: got an existing folder, allowed: a new one, or this one with --overwrite"):
        convert(originals["qwen3"], old)
    assert sorted(os.listdir(old)) == ["config.json", "stale.txt"]
    convert(originals["qwen3"], old, overwrite=True, verify=False)
    assert not (old / "stale.txt").exists() and DepthRouteConfig.from_pretrained(old).preset_name == "delta-block"
    assert os.listdir(old.parent) == ["out"]


def test_overwrite_takes_model_folders_only(originals, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "love.txt").write_text("dear")
    with pytest.raises(Refused, match="letters: overwrite: got a folder that holds no model"):
        convert(originals["qwen3"], tmp_path / "letters", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refused, match="file: got an existing file, allowed: a new folder"):
        convert(originals["qwen3"], tmp_path / "file", overwrite=True)
    assert (tmp_path / "letters" / "love.txt").exists() and (tmp_path / "file").read_text() == "x"


def test_the_source_is_never_the_output(copy_of, tmp_path):
    source = copy_of("qwen3")
    link = tmp_path / "link"
    link.symlink_to(source)
    for out in (source, link):
        with pytest.raises(Refused, match="the output is the source, or holds it"):
            convert(source, out, overwrite=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match="the output is the source, or holds it"):
        convert(source, tmp_path, overwrite=True)
    assert (source / "model.safetensors").is_file()


@pytest.mark.parametrize("stage", ["save", "tokenizer", "verify", "card"])
@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupted_conversion_leaves_what_it_can_go_on_from(
    stage, exists, monkeypatch, originals, tmp_path, request, capsys
):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    out = request.getfixturevalue("old") if exists else tmp_path / "a" / "b"
    target = {
        "save": "depthroute_conversion.writing.write_shard",
        "tokenizer": "depthroute_conversion.side_files.copy_tokenizer",
        "verify": "depthroute_conversion.conversion.compare",
        "card": "depthroute_conversion.conversion.write_card",
    }[stage]
    with monkeypatch.context() as patch:
        patch.setattr(target, interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(originals["qwen3"], out, overwrite=exists, verify=stage == "verify")
    work = out.with_name(f".{out.name}.unfinished")
    assert not exists or (out / "stale.txt").read_text() == "old"
    if stage == "save":  # nothing is finished: there is nothing to go on from
        assert os.listdir(tmp_path) == (["out"] if exists else [])
    else:
        assert sorted(os.listdir(out.parent)) == [work.name, *(["out"] if exists else [])]
        assert f"what is finished is kept in {work}: the same command goes on from there" in capsys.readouterr().err
        monkeypatch.setattr("depthroute_conversion.writing.write_shard", lambda *a: pytest.fail("written again"))
    convert(originals["qwen3"], out, overwrite=exists, verify=False)
    assert os.listdir(out.parent) == [out.name] and not (out / "stale.txt").exists()


def test_a_command_that_is_terminated_leaves_what_it_can_go_on_from(originals, tmp_path, monkeypatch, run_cli):
    def wait(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr("depthroute_conversion.conversion.compare", wait)
    start, handler = time.monotonic(), signal.getsignal(signal.SIGTERM)
    code, _, err = run_cli("convert", originals["qwen3"], tmp_path / "deep" / "out")
    assert code == 128 + signal.SIGTERM and time.monotonic() - start < 60
    assert "the same command goes on from there" in err
    assert os.listdir(tmp_path / "deep") == [".out.unfinished"]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_failed_rename_brings_the_old_folder_back(old, monkeypatch):
    rename = Path.rename

    def fail_on_work(self, target):
        if "unfinished" in self.name:
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_on_work)
    with pytest.raises(OSError, match="no"), whole_folder(old) as work:
        (work / "new.txt").write_text("new")
    assert os.listdir(old.parent) == ["out"] and (old / "stale.txt").exists()


def test_the_folder_has_the_usual_permissions(tmp_path):
    with whole_folder(tmp_path / "made") as work:
        (work / "x").write_text("x")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "plain").stat().st_mode
