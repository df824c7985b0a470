import ast
from pathlib import Path

import numpy as np
import pytest

from jrlhf.config import load_config
from jrlhf.errors import UserError
from jrlhf.tasks.docstrings.corpus import (
    Corpus,
    DocumentedFunction,
    is_heldout,
    load_corpus,
    read_examples,
    signature_text,
)
from jrlhf.tasks.docstrings.task import load_task


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def library(root: Path, files: dict[str, str]) -> list[DocumentedFunction]:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return list(read_examples(root))


def signature(source: str, name: str = "f", *, method: bool = False) -> str:
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    return signature_text(name, function.args, method=method)


def test_signature_is_one_short_line():
    name = "A" * 50
    for source, expected in [
        ("def f(): pass", "def f():"),
        ("def f(a: int, b: str = 'x', *args: int, c=None, **kw): pass", "def f(a, b='x', *args, c=None, **kw):"),
        ("def f(a, /, b, *, c): pass", "def f(a, b, *, c):"),
        ("def f(a=1.5, b=(), c='long default', d=-1): pass", "def f(a=1.5, b=..., c=..., d=...):"),
        ("def f(self, a): pass", "def f(self, a):"),
        ("def f(first_parameter, second_parameter, third_one): pass", "def f(first_parameter, ...):"),
    ]:
        assert signature(source) == expected and len(expected) <= 40
    assert signature("def f(self, a): pass", "Box.put", method=True) == "def Box.put(a):"
    assert signature("def f(cls): pass", "Box.make", method=True) == "def Box.make():"
    assert signature("def f(this, a): pass", "Box.put", method=True) == "def Box.put(this, a):"
    assert signature("def f(a, b): pass", name) == f"def {name}(...):"  # a long name is never cut
    assert signature("def f(): pass", name) == f"def {name}():"


def test_every_documented_function_is_found_once_and_in_order(tmp_path: Path):
    examples = library(
        tmp_path,
        {
            "b/__init__.py": 'def first():\n    """  First  line. \n\n    Second.\n    """\n',
            "a.py": (
                "class Box:\n"
                '    def put(self, item):\n        """Put an item in."""\n'
                "        def inner(x):\n"
                '            """Do inner things."""\n'
                "    def silent(self): pass\n"
                "    class Lid:\n"
                '        def open(self):\n            """Open the lid."""\n'
                "try:\n    import missing\n"
                'except ImportError:\n    async def fallback():\n        """Fall back."""\n'
                'def empty():\n    """\n    """\n'
            ),
        },
    )
    assert [(e.module, e.name, e.signature, e.summary) for e in examples] == [
        ("a", "Box.put", "def Box.put(item):", "Put an item in."),
        ("a", "inner", "def inner(x):", "Do inner things."),
        ("a", "Lid.open", "def Lid.open():", "Open the lid."),
        ("a", "fallback", "def fallback():", "Fall back."),
        ("b", "first", "def first():", "First line."),
    ]
    assert examples[0].prompt == "def Box.put(item):\n"


def test_files_are_parsed_and_never_run(tmp_path: Path):
    witness = tmp_path / "witness"
    source = f'open({str(witness)!r}, "w").close()\nraise SystemExit\ndef f():\n    """Run away."""\n'
    assert [example.summary for example in library(tmp_path, {"module.py": source})] == ["Run away."]
    assert not witness.exists()


def test_tests_packages_and_broken_files_are_passed_over(tmp_path: Path):
    documented = 'def f():\n    """Say so."""\n'
    skipped = ["test/a.py", "x/tests/a.py", "site-packages/a.py", "config-3.11-linux/a.py", "pydoc_data/topics.py"]
    files = {name: documented for name in skipped} | {
        "broken.py": "def f(:\n",
        "null.py": "def f(): pass\0",
        "test.py": documented,
    }
    (tmp_path / "latin.py").write_bytes(b'def f():\n    """\xe9"""\n')
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    assert [example.module for example in library(tmp_path, files)] == ["test"]


def test_modules_are_held_out_with_what_belongs_to_them(tmp_path: Path):
    assert is_heldout("mailbox") and is_heldout("wsgiref.headers") and is_heldout("wsgiref")
    assert not is_heldout("tkinter.ttk") and not is_heldout("asyncio")
    assert is_heldout("_pydatetime") == is_heldout("datetime")
    assert is_heldout("_strptime") == is_heldout("strptime")
    with pytest.raises(ValueError, match="holds 0 documented functions to train on and 0 to hold out.*as .py") as error:
        load_corpus(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.full
def test_the_split_of_the_library_leaks_less_than_a_random_one(corpus: Corpus):
    assert len(corpus.train) > 3000 and len(corpus.heldout) > 500
    for example in corpus.train + corpus.heldout:
        assert example.signature.startswith("def ") and example.signature.endswith("):")
        assert example.summary and "\n" not in example.signature + example.summary
    everything = [*corpus.train, *corpus.heldout]
    tops = [{example.module.partition(".")[0] for example in part} for part in (corpus.train, corpus.heldout)]
    assert tops[0].isdisjoint(tops[1])
    signatures = [example.signature for example in corpus.heldout]
    assert len(set(signatures)) == len(signatures)
    assert set(signatures).isdisjoint(example.signature for example in corpus.train)
    assert len({(example.signature, example.summary) for example in everything}) == len(everything)

    def recurring(train, heldout) -> float:
        names = {example.name.rpartition(".")[2] for example in train}
        return float(np.mean([example.name.rpartition(".")[2] in names for example in heldout]))

    order = [everything[i] for i in np.random.default_rng(0).permutation(len(everything))]
    count = len(corpus.heldout)
    assert recurring(corpus.train, corpus.heldout) < recurring(order[count:], order[:count]) - 0.05
    summaries = {example.summary for example in corpus.train}
    assert np.mean([example.summary in summaries for example in corpus.heldout]) < 0.05
    with pytest.raises(UserError, match="vocab_size=100 is too small"):
        load_task(load_config("quickstart", ["model.vocab_size=100"]))
