"""The vocabulary that the docstring task trains: every text comes back, and equal texts give equal tokens."""

import sysconfig
from pathlib import Path

import pytest
import tokenizers

from jrlhf.config.schema import DataConfig
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.tasks.docstrings.corpus import DocumentedFunction, read_examples
from jrlhf.tasks.docstrings.vocabulary import encode_examples, encode_split, train_tokenizer, wrap


@pytest.fixture(scope="module")
def texts() -> list[str]:
    examples = read_examples(Path(sysconfig.get_path("stdlib")) / "asyncio")
    return [text for example in examples for text in (example.prompt, example.summary)]


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Tokenizer:
    return train_tokenizer(texts, 512)


def test_every_text_comes_back(tokenizer: Tokenizer, texts: list[str]):
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id, tokenizer.eos_ids) == (512, 0, 1, (1,))
    assert tokenizer.prefix_ids == () and tokenizer.encode_prompt("a b") == tokenizer.encode("a b")
    strange = [
        "def HTTPServer.handle_IMAP4(x=None, *a):\n",
        "don't  (e.g.) 'x'\t\n",
        "é — 日本語 🎈 \x00",
        " ",
        "",
        "a_bC.d",
    ]
    for text in texts + strange:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("def f():\n") + tokenizer.encode("Return it.") + [tokenizer.eos_id, tokenizer.pad_id or 0]
    assert tokenizer.decode(ids) == "def f():\nReturn it." and tokenizer.decode([0, 1]) == ""
    assert tokenizer.encode_batch(texts[:50]) == [tokenizer.encode(text) for text in texts[:50]]
    assert tokenizer.encode_batch([]) == []
    ids = tokenizer.encode("Stop at <eos> and <pad>.")  # in a text these names are plain characters
    assert tokenizer.eos_id not in ids and tokenizer.pad_id not in ids
    assert tokenizer.decode(ids) == "Stop at <eos> and <pad>."


def test_a_word_has_the_same_tokens_in_an_identifier_and_in_prose(tokenizer: Tokenizer):
    for word in ("future", "timeout", "zebra"):
        prose = tokenizer.encode(f" {word}")
        for identifier in (f"x_{word}", f"x.{word}", f"x({word}", f"*{word}"):
            assert tokenizer.encode(identifier)[-len(prose) :] == prose
    assert tokenizer.encode("getFuture")[-len(tokenizer.encode(" Future")) :] == tokenizer.encode(" Future")


def test_same_texts_give_the_same_vocabulary(tokenizer: Tokenizer, texts: list[str]):
    assert train_tokenizer(iter(texts), 512).to_json() == tokenizer.to_json()
    again = wrap(tokenizers.Tokenizer.from_str(tokenizer.to_json()))
    assert again.to_json() == tokenizer.to_json()
    assert again.encode_batch(texts) == tokenizer.encode_batch(texts)


def test_a_vocabulary_that_cannot_be_is_refused(texts: list[str]):
    with pytest.raises(ValueError, match="vocab_size=257 is too small: .* 258"):
        train_tokenizer(texts, 257)
    with pytest.raises(ValueError, match="vocab_size=1024 is too large for these texts: they give 2"):
        train_tokenizer(["a", "b"], 1024)
    with pytest.raises(ValueError, match="lacks <pad> or <eos>"):
        wrap(tokenizers.Tokenizer(tokenizers.models.BPE()))
    with pytest.raises(ValueError, match="needs an end-of-text id"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), ())


def test_examples_that_do_not_fit_are_left_out(tokenizer: Tokenizer):
    # A prompt is its signature and a line break; a response ends with <eos>.
    texts = [("a", "b b"), ("a a a", "b"), ("a a", "b b b"), ("a", "b")]
    examples = [DocumentedFunction("m", "f", signature, summary) for signature, summary in texts]
    ids = encode_examples(tokenizer, examples)
    assert [(len(prompt), len(response)) for prompt, response in ids] == [(2, 3), (4, 2), (3, 4), (2, 2)]
    split = encode_split(tokenizer, examples, DataConfig(max_prompt=3, max_response=3))
    assert split.examples == (examples[0], examples[3]) and split.dropped == 2
    assert list(zip(split.prompts, split.responses, strict=True)) == [ids[0], ids[3]]
    assert list(split.prompts[0]) == tokenizer.encode("a\n")
    assert list(split.responses[0]) == [*tokenizer.encode("b b"), tokenizer.eos_id]
    assert encode_split(tokenizer, examples, DataConfig(max_prompt=4, max_response=4)).examples == tuple(examples)
