"""What mkdocs does to the pages: those made from files at the root, links to files of the repository, public names."""

import ast
import posixpath
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from griffe import Docstring, Extension  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md"} | {
    f"{name.upper()}.md": f"{name}.md" for name in ("changelog", "contributing", "security")
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")


def on_files(files: Any, config: Any) -> None:
    """Adds pages for files at the root, and the other files of the repository to which pages link."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            path = _in_the_repository(page.src_uri, link)
            if path not in PAGES and not path.startswith("docs/") and (ROOT / path).is_file():
                if files.get_file_from_path(path) is None:
                    files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns a page whose links lead to the site's files, and where `::: PACKAGE` stands for each public name."""
    here = page.file.src_uri

    def relinked(link: re.Match[str]) -> str:
        path = _in_the_repository(here, link[1])
        target = PAGES.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(here))

    markdown = LINK.sub(relinked, markdown)
    shown = set(re.findall(r"^::: (jrlhf\.[\w.]+)$", markdown, re.MULTILINE))  # the names that a page puts first
    return re.sub(
        r"^::: jrlhf\.([\w.]+)$", lambda name: "\n".join(_names(name[1], shown)), markdown, flags=re.MULTILINE
    )


def _in_the_repository(page: str, link: str) -> str:
    folder = "" if page in PAGES.values() else posixpath.join("docs", posixpath.dirname(page))
    return posixpath.normpath(posixpath.join(folder, link))


def _names(package: str, shown: Collection[str]) -> Iterator[str]:
    """Yields the names that a package's __init__.pyi lists and that are not `shown`, under their modules."""
    file = ROOT / package.replace(".", "/") / "__init__.pyi"
    if not file.is_file():  # a module, or one name: mkdocstrings knows what to do
        yield f"::: jrlhf.{package}"
        return
    modules: dict[str, list[str]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            modules.setdefault(str(node.module), []).extend(alias.name for alias in node.names)
    for module, names in modules.items():
        names = [name for name in names if f"jrlhf.{package}.{name}" not in shown]
        if not names:
            continue
        path = ROOT / module.removeprefix("jrlhf.").replace(".", "/")
        source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        about = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        yield f"\n## {module.removeprefix('jrlhf.')}\n\n{about}\n"
        for name in names:
            yield f"\n::: jrlhf.{package}.{name}\n"


def with_sections(text: str, parameters: Collection[str]) -> str:
    """Returns a docstring in Google's style, so that its arguments become a table.

    Docstrings here describe arguments in paragraphs such as "data: rows of text. seed: of the order; None: 0.", and
    errors in one that begins with "Raises ValueError if". parameters: the function's.
    """
    head, *paragraphs = text.split("\n\n")
    names = "|".join(map(re.escape, parameters))
    if not names or "\nArgs:\n" in text:
        return text
    start = re.compile(rf"(?:^|(?<=[.)] ))((?:{names})(?:, (?:{names}))*): ")
    arguments, errors, rest = list[str](), list[str](), list[str]()
    for paragraph in paragraphs:
        words = " ".join(paragraph.split())
        if start.match(words):
            _, *parts = start.split(words)
            for named, about in zip(parts[::2], parts[1::2], strict=True):
                arguments += [f"    {name}: {about.strip()}" for name in named.split(", ")]
        elif (raised := re.fullmatch(r"Raises (\w+) (.*)", words)) and not paragraph.startswith(" "):
            parts = re.split(r"[;,] (?:and )?(\w+(?:Error|Failure)) ", f"; {raised[1]} {raised[2]}")[1:]
            errors += [f"    {error}: {about.strip()}" for error, about in zip(parts[::2], parts[1::2], strict=True)]
        else:
            rest.append(paragraph)
    sections = ["\n".join([title, *lines]) for title, lines in (("Args:", arguments), ("Raises:", errors)) if lines]
    return "\n\n".join([head, *rest, *sections])


class FieldComments(Extension):
    """Takes the comment at the end of a field, or those above it, as the field's description."""

    def on_attribute_instance(self, *, attr: Any, **_: Any) -> None:
        if attr.docstring is None and attr.parent.is_class and attr.lineno:
            lines = attr.filepath.read_text(encoding="utf-8").splitlines()
            above = attr.lineno - 1
            while lines[above - 1].lstrip().startswith("# "):
                above -= 1
            at_the_end = re.search(r"  # (.*)", lines[attr.endlineno - 1])
            comments = [at_the_end[1]] if at_the_end else [line.strip("# ") for line in lines[above : attr.lineno - 1]]
            if comments:
                attr.docstring = Docstring(" ".join(comments), parent=attr)


class Sections(Extension):
    """Shows the arguments of functions as tables; see `with_sections`."""

    def on_function_instance(self, *, func: Any, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = with_sections(
                func.docstring.value, [parameter.name.lstrip("*") for parameter in func.parameters]
            )
