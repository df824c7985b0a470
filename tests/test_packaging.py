"""The folders stand at the top level and are imported as `jrlhf.*`: by setuptools' mapping in a wheel, by links here.

Three places must then agree: the list in pyproject.toml, the links in jrlhf/, and the tree.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from jrlhf import __version__

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configs", "kernels", "meshes", "models", "ppo")


PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def setuptools() -> dict[str, Any]:
    return PROJECT["tool"]["setuptools"]


def test_a_build_installs_setuptools_alone():
    assert [name.partition(">")[0] for name in PROJECT["build-system"]["requires"]] == ["setuptools"]


def packages_in_tree() -> dict[str, str]:
    """Package name -> folder, for every folder of the project that holds Python files."""
    packages = {}
    for name, top in [("jrlhf", ROOT / "jrlhf"), *((f"jrlhf.{folder}", ROOT / folder) for folder in FOLDERS)]:
        # Path.rglob does not follow links, so jrlhf/models is not seen twice.
        for file in top.rglob("*.py"):
            parts = file.parent.relative_to(top).parts
            packages[".".join([name, *parts])] = file.parent.relative_to(ROOT).as_posix()
    return packages


def test_commits_are_formatted_by_the_same_ruff():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pinned = re.findall(r'"ruff==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert {f"v{version}" for version in pinned} == {hook["rev"]}


def test_the_list_of_packages_is_the_tree(setuptools: dict[str, Any]):
    in_tree = packages_in_tree()
    assert {"jrlhf", *(f"jrlhf.{folder}" for folder in FOLDERS), "jrlhf.kernels.logprob"} <= in_tree.keys()
    assert sorted(setuptools["packages"]) == sorted(in_tree)
    assert setuptools["package-dir"] == in_tree


def test_every_package_has_an_init():
    assert [path for path in packages_in_tree().values() if not (ROOT / path / "__init__.py").is_file()] == []


def test_the_links_are_relative_and_lead_to_the_folders(setuptools: dict[str, Any]):
    links = {path.name: path.readlink().as_posix() for path in (ROOT / "jrlhf").iterdir() if path.is_symlink()}
    assert links == {folder: f"../{folder}" for folder in FOLDERS}
    mapped = {
        name.removeprefix("jrlhf."): path for name, path in setuptools["package-dir"].items() if name.count(".") == 1
    }
    assert {name: path for name, path in mapped.items() if name in FOLDERS} == {folder: folder for folder in FOLDERS}


def test_data_files_are_packaged(setuptools: dict[str, Any]):
    """Whatever is no Python file in a package must be listed, or it silently leaves the wheel."""
    unlisted = []
    for package, folder in packages_in_tree().items():
        patterns = [*setuptools["package-data"]["*"], *setuptools["package-data"].get(package, [])]
        for file in (ROOT / folder).iterdir():
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                if not any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns):
                    unlisted.append(file.relative_to(ROOT).as_posix())
    assert unlisted == []


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


@pytest.mark.full
def test_distributions_hold_the_project_and_the_wheel_runs_elsewhere(tmp_path):
    """The wheel is built from the unpacked source distribution, without a network, and used far from the checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("only a checkout says which files are the project's")
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    files = {name for name in names if (ROOT / name).is_file()}  # not the links
    source = tmp_path / "source"
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-c", BUILD, "build_sdist", tmp_path, cwd=source)
    title = f"jrlhf-{__version__}"
    with tarfile.open(tmp_path / f"{title}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / title
    contents = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    made_by_setuptools = {name for name in contents if name.startswith("jrlhf.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert contents - made_by_setuptools == files - {".gitignore"}

    run(sys.executable, "-c", BUILD, "build_wheel", tmp_path, cwd=unpacked)
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    with zipfile.ZipFile(tmp_path / f"{title}-py3-none-any.whl") as wheel:
        wheel.extractall(installed)
    folders = {file.split("/")[0] for file in os.listdir(installed)}
    assert folders == {"jrlhf", f"{title}.dist-info"}  # no folder that a user's own package may be called
    elsewhere.mkdir()
    location = run(
        sys.executable, "-c", "import jrlhf.configs as c; print(c.__file__)", cwd=elsewhere, PYTHONPATH=str(installed)
    )
    assert Path(location.strip()) == installed / "jrlhf" / "configs" / "__init__.py"
    command = [sys.executable, "-m", "jrlhf"]
    assert run(*command, "--version", cwd=elsewhere, PYTHONPATH=str(installed)) == f"jrlhf {__version__}\n"
    dry = ["train", "--config", "quickstart", "--dry-run"]
    assert "  actor " in run(*command, *dry, cwd=elsewhere, PYTHONPATH=str(installed))
