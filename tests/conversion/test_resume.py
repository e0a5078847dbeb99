# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A conversion that is stopped, by a kill, a full disk or a second process, goes on from its finished shards."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import tiny_qwen3_config
from safetensors import safe_open
from transformers import Qwen3ForCausalLM

import depthroute_conversion.writing as writing
from depthroute import convert, revert
from depthroute.errors import Refused, Unfinished
from depthroute_conversion.unfinished import unfinished_folder


def tree(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# -- kill -9 ----------------------------------------------------------------------------------------------------------

KILLS = textwrap.dedent(
    """
    # forks of one process that has imported everything: ten starts from nothing would take a minute
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    import depthroute_conversion.unfinished as unfinished
    from depthroute import convert
    from depthroute.errors import Refused

    source, root = Path(sys.argv[1]), Path(sys.argv[2])

    def begin(out, verify=False):
        child = os.fork()
        if child:
            return child
        convert(source, out, max_shard_size="500kB", verify=verify, layerwise=verify)
        os._exit(0)

    def shards(out):
        return len(list(out.parent.glob(f".{out.name}.unfinished/{out.name}/*.safetensors")))

    def ended(child):
        return os.waitpid(child, os.WNOHANG)[0] == child

    durations = {}
    for verify in (False, True):
        start = time.monotonic()
        assert os.waitpid(begin(root / f"whole-{verify}" / "out", verify), 0)[1] == 0
        durations[verify] = time.monotonic() - start
    rng = random.Random(0)
    for number in range(10):
        out, verify = root / str(number) / "out", number > 7
        child = begin(out, verify)
        if number % 2:  # at a time
            time.sleep(durations[verify] * rng.uniform(0.05, 0.7))
        else:  # while a shard is written
            wanted = rng.randrange(1, 12)
            while shards(out) < wanted:
                assert not ended(child)
        alive = not ended(child)
        if alive:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        left = sorted(os.listdir(out.parent)) if out.parent.exists() else []
        # on a machine that is slow for a moment the kill can come when the folder is in its place already
        state = "ended" if not alive else "late" if out.exists() else "killed"
        print(state, shards(out), *left, flush=True)
        if alive:
            assert (os.waitpid(begin(out, verify), 0)[1] == 0) == (state == "killed")

    # the last moment: the folder is in its place, what is beside it is about to be removed
    out = root / "last" / "out"
    remove = unfinished._remove

    def kill_instead(path):
        if path == out.with_name(".out.unfinished"):
            os.kill(os.getpid(), signal.SIGKILL)
        remove(path)

    unfinished._remove = kill_instead
    child = begin(out)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    unfinished._remove = remove
    print("last", *sorted(os.listdir(out.parent)), flush=True)
    try:
        convert(source, out)
    except Refused as error:
        print("refused", error, flush=True)
    print("then", *sorted(os.listdir(out.parent)), flush=True)
    """
)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """About 8 MB, of which a conversion makes 18 shards."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 32}
    folder = tmp_path_factory.mktemp("large") / "source"
    Qwen3ForCausalLM(tiny_qwen3_config(**sizes, initializer_range=0.02)).save_pretrained(folder, max_shard_size="2MB")
    return folder


def test_ten_kills_and_the_same_bytes(large, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(large), str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *kills, last, refused, then = [line.split() for line in done.stdout.splitlines()]
    assert len(kills) == 10
    # most of them hit, and some in the middle of the shards
    assert sum(kill[0] == "killed" for kill in kills) >= 7, kills
    assert sum(0 < int(kill[1]) < 13 for kill in kills) >= 4, kills
    expected = [tree(tmp_path / f"whole-{verify}" / "out") for verify in (False, True)]
    assert sum(name.endswith(".safetensors") for name in expected[0]) >= 13
    for number, (state, _, *left) in enumerate(kills):
        # a killed process leaves its folder alone, and never a part of the target
        allowed = {
            "killed": ([], [".out.unfinished"]),
            "late": (["out"], [".out.unfinished", "out"]),
            "ended": (["out"],),
        }
        assert left in allowed[state], (number, state, left)
        assert os.listdir(tmp_path / str(number)) == ["out"]
        assert tree(tmp_path / str(number) / "out") == expected[number > 7], number
    # nothing is missing, so that the same command has nothing to do: it says so, and clears up
    assert last == ["last", ".out.unfinished", "out"] and then == ["then", "out"]
    assert refused[:1] == ["refused"] and "got an existing folder" in " ".join(refused)
    assert f"{tmp_path / 'last' / 'out'}: whole: an earlier run finished it" in done.stderr
    assert tree(tmp_path / "last" / "out") == expected[False]


# -- going on ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stop_at(monkeypatch):
    """Fail at the n-th shard from now on: `stop_at(3)`; `stop_at(None)` counts only. The list has the shards written."""
    write, written = writing.write_shard, []

    def install(number: int | None, error: BaseException | None = None) -> list[str]:
        written.clear()

        def write_or_fail(file, *rest):
            if len(written) + 1 == number:
                raise error or KeyboardInterrupt
            digest = write(file, *rest)
            written.append(file.name)
            return digest

        monkeypatch.setattr(writing, "write_shard", write_or_fail)
        return written

    return install


OPTIONS = {"verify": False, "max_shard_size": "40kB"}


@pytest.fixture
def stopped(originals, tmp_path, stop_at):
    """A conversion of "sharded" that was interrupted in its fourth shard: the source, the target, and what it left."""
    out = tmp_path / "out"
    stop_at(4)
    with pytest.raises(KeyboardInterrupt):
        convert(originals["sharded"], out, **OPTIONS)
    return originals["sharded"], out, tmp_path / ".out.unfinished"


@pytest.mark.smoke
def test_finished_shards_are_verified_and_not_written_again(stopped, stop_at, tmp_path, monkeypatch):
    source, out, work = stopped
    before = {name: os.stat(work / "out" / name).st_ino for name in os.listdir(work / "out")}
    assert len([name for name in before if name.endswith(".safetensors")]) == 3
    read = []
    hash_file = writing.UnfinishedFolder.is_finished.__globals__["hash_file"]
    monkeypatch.setattr(
        "depthroute_conversion.unfinished.hash_file", lambda f, p: read.append(f.name) or hash_file(f, p)
    )
    written = stop_at(None)
    convert(source, out, **OPTIONS)
    assert sorted([*read, *written]) == sorted(file.name for file in out.glob("*.safetensors")) and len(read) == 3
    assert all(os.stat(out / name).st_ino == before[name] for name in read)
    convert(source, tmp_path / "again", **OPTIONS)
    first, again = tree(out), tree(tmp_path / "again")
    # cards and records name the folder
    assert {k: v for k, v in first.items() if "safetensors" in k} == {
        k: v for k, v in again.items() if "safetensors" in k
    }


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_finished_shard_that_is_damaged_is_written_again(damage, stopped, stop_at, capsys):
    source, out, work = stopped
    file = sorted((work / "out").glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-1])
    written = stop_at(None)
    convert(source, out, **OPTIONS)
    assert file.name in written and len(written) == len(list(out.glob("*.safetensors"))) - 2
    if damage != "gone":
        assert f"{file}: damaged since it was written; writing it again" in capsys.readouterr().err
    with (
        safe_open(out / file.name, framework="pt") as tensors,
        safe_open(
            next(f for f in source.glob("*.safetensors") if next(iter(tensors.keys())) in _keys(f)), framework="pt"
        ) as theirs,
    ):
        key = next(key for key in tensors.keys() if key in theirs.keys())
        assert torch.equal(tensors.get_tensor(key), theirs.get_tensor(key))


def _keys(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as tensors:
        return set(tensors.keys())


@pytest.mark.parametrize(
    "change, named",
    [
        ({"dtype": "bfloat16"}, "configuration, layout of shards"),
        ({"max_shard_size": "50kB"}, "layout of shards"),
        ({"preset": "attnres"}, "configuration, layout of shards"),
    ],
)
def test_another_request_starts_afresh(change, named, stopped, stop_at, capsys):
    source, out, work = stopped
    written = stop_at(None)
    convert(source, out, **{**OPTIONS, **change})
    assert f"{work}: begun with another {named}; starting afresh" in capsys.readouterr().err
    assert sorted(written) == sorted(file.name for file in out.glob("*.safetensors"))
    assert not work.exists()


def test_another_source_starts_afresh(copy_of, tmp_path, stop_at, capsys):
    source, out = copy_of("sharded"), tmp_path / "out"
    stop_at(4)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, **OPTIONS)
    # same sizes, same headers, another number in it
    file = sorted(source.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    written = stop_at(None)
    convert(source, out, **OPTIONS)
    assert "begun with another source; starting afresh" in capsys.readouterr().err
    assert len(written) == len(list(out.glob("*.safetensors")))


def test_a_journal_that_cannot_be_read_starts_afresh(stopped, stop_at, capsys):
    source, out, work = stopped
    (work / "journal.json").write_text("{")
    written = stop_at(None)
    convert(source, out, **OPTIONS)
    assert "its journal cannot be read; starting afresh" in capsys.readouterr().err
    assert len(written) == len(list(out.glob("*.safetensors")))


def test_a_refusal_removes_what_was_kept(stopped, stop_at, monkeypatch, tmp_path):
    source, out, _ = stopped
    stop_at(None)

    def refuse(*arguments):
        raise Refused("no")

    monkeypatch.setattr("depthroute_conversion.conversion.leave_way_back", refuse)
    with pytest.raises(Refused, match="no"):
        convert(source, out, **OPTIONS)
    assert os.listdir(tmp_path) == []


# -- one process at a time --------------------------------------------------------------------------------------------


# as `unfinished_folder` takes it, without the seconds that importing this project takes
HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_write_the_same_folder(originals, tmp_path, run_cli):
    out, work = tmp_path / "out", tmp_path / ".out.unfinished"
    with unfinished_folder(out, {}) as folder:
        (folder.files / "config.json").write_text("{}")
        code, _, err = run_cli("convert", originals["qwen3"], out)
        assert code == 2 and f"{out}: another process is writing it" in err.splitlines()[-1]
        assert (folder.files / "config.json").exists()
    assert os.listdir(tmp_path) == ["out"]
    (out / "config.json").unlink()
    out.rmdir()
    work.mkdir()
    command = [sys.executable, "-c", HOLD, str(work / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(Refused, match="out: another process is writing it"):
            convert(originals["qwen3"], out)
        other.stdin.close()
        assert other.wait(30) == 0
    # a process that ends, however it does, gives the lock back
    convert(originals["qwen3"], out, verify=False)
    assert os.listdir(tmp_path) == ["out"]


# -- a folder that is replaced ----------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    return tmp_path / "out"


@pytest.mark.parametrize("failing", [["out"], ["out", "replaced"]])
def test_a_failed_rename_never_costs_the_old_folder(failing, old, monkeypatch):
    rename = Path.rename

    def fail(self, target):
        if self.parent.name == ".out.unfinished" and self.name in failing:
            raise PermissionError(errno.EACCES, "no", str(self))
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises((OSError, Unfinished), match="no"), unfinished_folder(old, {}, overwrite=True) as work:
            (work.files / "new.txt").write_text("new")
    if failing == ["out"]:
        assert (old / "config.json").exists() and os.listdir(old.parent) == ["out"]
    # it could not even be put back: then the next run does
    with unfinished_folder(old, {}, overwrite=True) as work:
        assert (old / "config.json").exists()
        (work.files / "new.txt").write_text("new")
    assert os.listdir(old) == ["new.txt"]


def test_a_kill_between_the_two_renames_loses_nothing(old):
    # what it leaves: the old folder is aside, the new one not there yet
    work = old.with_name(".out.unfinished")
    (work / "out").mkdir(parents=True)
    old.rename(work / "replaced")
    with pytest.raises(Refused, match="got an existing folder"), unfinished_folder(old, {}):
        pass
    assert (old / "config.json").exists()
    old.rename(work / "replaced")
    with unfinished_folder(old, {}, overwrite=True) as folder:
        (folder.files / "new.txt").write_text("new")
    assert os.listdir(old) == ["new.txt"] and os.listdir(old.parent) == ["out"]


def what_is_left_at_the_end(out: Path, replaced: bool = False) -> Path:
    """A run was killed when its folder was in its place and nothing beside it was removed yet."""
    work = out.with_name(".out.unfinished")
    work.mkdir()
    (work / "lock").touch()
    (work / "journal.json").write_text(json.dumps({"request": {}, "hashes": {"model.safetensors": "0" * 64}}))
    if replaced:
        (work / "replaced").mkdir()
        (work / "replaced" / "config.json").write_text("{}")
    return work


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("way", ["convert", "revert", "overwrite"])
def test_what_a_finished_run_left_is_cleared(way, replaced, originals, old, capsys, monkeypatch, request):
    """Whatever is asked for next, and before a source is opened."""
    work = what_is_left_at_the_end(old, replaced)
    source = originals["qwen3"]
    if way == "overwrite":
        convert(source, old, overwrite=True, verify=False)
        assert (old / "model.safetensors").is_file()
    else:
        if way == "revert":
            source = request.getfixturevalue("converted")("qwen3")
        monkeypatch.setattr("depthroute_conversion.conversion.open_source", lambda *a: pytest.fail("opened"))
        with pytest.raises(Refused, match="got an existing folder, allowed: a new one, or this one with --overwrite"):
            {"convert": convert, "revert": revert}[way](source, old)
        assert (old / "config.json").read_text() == "{}"
    assert os.listdir(old.parent) == ["out"]
    errors = capsys.readouterr().err
    assert f"{old}: whole: an earlier run finished it, and was stopped before it removed {work}" in errors
    assert "starting afresh" not in errors


def test_what_can_be_gone_on_from_is_not_cleared(stopped, stop_at):
    source, out, _ = stopped
    out.mkdir()
    with pytest.raises(Refused, match="got an existing folder"):
        convert(source, out, **OPTIONS)
    out.rmdir()
    written = stop_at(None)
    convert(source, out, **OPTIONS)
    assert len(written) == len(list(out.glob("*.safetensors"))) - 3


def test_a_refusal_under_the_lock_leaves_nothing(old):
    with pytest.raises(Refused, match="got an existing folder"), unfinished_folder(old, {}):
        pass
    assert os.listdir(old.parent) == ["out"]


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_that_says_how_to_go_on(originals, tmp_path, monkeypatch, run_cli):
    """A real one: the limit of a file's size makes the kernel refuse to write beyond it. The third shard is larger."""
    resource = pytest.importorskip("resource")
    source, out = originals["moe-fused"], tmp_path / "out"
    write, before = writing.write_shard, resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_limited(file, *rest):
        if "00003" in file.name:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        try:
            return write(file, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    command = ["convert", source, out, "--max-shard-size", "30kB"]
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_shard", write_limited)
        code, _, err = run_cli(*command)
    line = err.splitlines()[-1]
    assert code == 3 and line.startswith("depthroute: unfinished: [Errno 27] File too large"), err
    assert "model-00003-of" in line and "the same command goes on from there" in line
    assert os.listdir(tmp_path) == [".out.unfinished"]
    assert not list(tmp_path.rglob("*.partial"))
    assert run_cli(*command)[0] == 0
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("number, kept", [(1, False), (3, True)])
def test_no_space_left(number, kept, originals, tmp_path, stop_at):
    stop_at(number, OSError(errno.ENOSPC, "No space left on device", "a file"))
    with pytest.raises(Unfinished if kept else OSError, match="No space left on device: 'a file'"):
        convert(originals["sharded"], tmp_path / "out", **OPTIONS)
    # without a finished shard there is nothing to go on from
    assert os.listdir(tmp_path) == ([".out.unfinished"] if kept else [])


def test_a_failing_write_names_its_file(tmp_path):
    class Full:
        def write(self, block):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*model.safetensors.partial'"):
        with writing._naming(tmp_path / "model.safetensors.partial"):
            Full().write(b"")


def test_an_output_that_may_not_be_written(originals, tmp_path, run_cli):
    (tmp_path / "closed").mkdir(mode=0o500)
    if os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write everywhere")
    code, _, err = run_cli("convert", originals["qwen3"], tmp_path / "closed" / "out")
    assert code == 2 and "Permission denied" in err.splitlines()[-1]
