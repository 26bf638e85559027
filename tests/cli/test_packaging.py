"""What `pip install .` would install: the wheel made from the sdist, and the wheel made from the tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CONTRIBUTING.md", "Makefile", "constraints.txt"]
TREES = ["src", "cli", "runtime", "completions", "man"]


def build(directory: Path, tree: Path, hook: str) -> Path:
    """Runs one PEP 517 hook of the project's backend in `tree`, with what is installed here (no network)."""
    code = f"import setuptools.build_meta as backend; backend.{hook}({str(directory)!r})"
    directory.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = directory.iterdir()
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone has, so that building leaves nothing in the working tree."""
    copy = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in TREES:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in TOP:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel_of_sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("dist")
    sdist = build(base / "sdist", tree, "build_sdist")
    shutil.unpack_archive(sdist, base / "unpacked")
    (unpacked,) = (base / "unpacked").iterdir()
    return build(base / "wheel", unpacked, "build_wheel")


@pytest.fixture(scope="module")
def wheel_of_tree(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("direct"), tree, "build_wheel")


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_module_and_kernel_source(wheel_of_sdist: Path) -> None:
    wanted = {
        f"llmserve/{path.relative_to(ROOT)}"
        for part in ("cli", "runtime")
        for path in (ROOT / part).rglob("*")
        if path.suffix in (".py", ".cpp", ".h") and "__pycache__" not in path.parts
    } | {"llmserve/__init__.py", "llmserve/py.typed"}
    inside = {name for name in names(wheel_of_sdist) if name.startswith("llmserve/")}
    assert inside == wanted
    assert "llmserve/runtime/messages.py" in inside


def test_wheel_holds_license_completions_and_man_pages(wheel_of_sdist: Path) -> None:
    inside = names(wheel_of_sdist)
    info = "llmserve-0.1.0.dist-info"
    share = "llmserve-0.1.0.data/data/share"
    assert f"{info}/licenses/LICENSE" in inside
    for path in ("bash-completion/completions/llmserve.bash", "zsh/site-functions/_llmserve"):
        assert f"{share}/{path}" in inside
    assert f"{share}/fish/vendor_completions.d/llmserve.fish" in inside
    assert {f"{share}/man/man1/{page.name}" for page in (ROOT / "man").iterdir()} <= inside


def test_sdist_and_tree_give_the_same_wheel(wheel_of_sdist: Path, wheel_of_tree: Path) -> None:
    assert names(wheel_of_sdist) == names(wheel_of_tree)


def test_installed_wheel_runs(wheel_of_sdist: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed"]
    subprocess.run([*pip, "--prefix", str(tmp_path), str(wheel_of_sdist)], check=True, capture_output=True)
    paths = {"base": str(tmp_path), "platbase": str(tmp_path)}
    site = sysconfig.get_path("purelib", scheme="posix_prefix", vars=paths)
    code = "import llmserve.cli.main, sys; print(llmserve.cli.main.__file__); llmserve.cli.main.main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        env=os.environ | {"PYTHONPATH": site},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines() == [f"{site}/llmserve/cli/main.py", "llmserve 0.1.0"]
    assert (tmp_path / "bin" / "llmserve").exists()
    assert (tmp_path / "share" / "man" / "man1" / "llmserve.1").exists()


def test_editable_install_is_the_one_under_test() -> None:
    run = subprocess.run(
        [Path(sys.executable).with_name("llmserve"), "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout == "llmserve 0.1.0\n"
