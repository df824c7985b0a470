"""The folders stand at the top level and are imported as `jrlhf.*`: by setuptools' mapping in a wheel, by links here.

Three places must then agree: the list in pyproject.toml, the links in jrlhf/, and the tree.
"""

import fnmatch
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configs", "kernels", "meshes", "models", "ppo")


@pytest.fixture(scope="module")
def setuptools() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_in_tree() -> dict[str, str]:
    """Package name -> folder, for every folder of the project that holds Python files."""
    packages = {}
    for name, top in [("jrlhf", ROOT / "jrlhf"), *((f"jrlhf.{folder}", ROOT / folder) for folder in FOLDERS)]:
        # Path.rglob does not follow links, so jrlhf/models is not seen twice.
        for file in top.rglob("*.py"):
            parts = file.parent.relative_to(top).parts
            packages[".".join([name, *parts])] = file.parent.relative_to(ROOT).as_posix()
    return packages


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
        patterns = setuptools["package-data"].get(package, [])
        for file in (ROOT / folder).iterdir():
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                if not any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns):
                    unlisted.append(file.relative_to(ROOT).as_posix())
    assert unlisted == []
