import sysconfig
from pathlib import Path

import pytest

from jrlhf.docstrings import read_examples
from jrlhf.tokenizer import Tokenizer, encode_pairs, load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def texts() -> list[str]:
    examples = read_examples(Path(sysconfig.get_path("stdlib")) / "asyncio")
    return [text for example in examples for text in (example.prompt, example.summary)]


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Tokenizer:
    return train_tokenizer(texts, 512)


def test_vocabulary_and_special_tokens(tokenizer: Tokenizer):
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id) == (512, 0, 1)
    assert tokenizer.decode([0, 1]) == ""


def test_every_text_comes_back(tokenizer: Tokenizer, texts: list[str]):
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
    ids = tokenizer.encode("def f():\n") + tokenizer.encode("Return it.") + [tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(ids) == "def f():\nReturn it."


def test_a_word_has_the_same_tokens_in_an_identifier_and_in_prose(tokenizer: Tokenizer):
    for word in ("future", "timeout", "zebra"):
        prose = tokenizer.encode(f" {word}")
        for identifier in (f"x_{word}", f"x.{word}", f"x({word}", f"*{word}"):
            assert tokenizer.encode(identifier)[-len(prose) :] == prose
    assert tokenizer.encode("getFuture")[-len(tokenizer.encode(" Future")) :] == tokenizer.encode(" Future")


def test_names_of_special_tokens_in_a_text_are_plain_text(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for each in (tokenizer, load_tokenizer(tmp_path / "tokenizer.json")):
        ids = each.encode("Stop at <eos> and <pad>.")
        assert each.eos_id not in ids and each.pad_id not in ids
        assert each.decode(ids) == "Stop at <eos> and <pad>."


def test_batch_equals_single(tokenizer: Tokenizer, texts: list[str]):
    assert tokenizer.encode_batch(texts[:50]) == [tokenizer.encode(text) for text in texts[:50]]
    assert tokenizer.encode_batch([]) == []


def test_same_texts_give_the_same_file(tokenizer: Tokenizer, texts: list[str], tmp_path: Path):
    assert train_tokenizer(iter(texts), 512).to_json() == tokenizer.to_json()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    assert loaded.to_json() == path.read_text(encoding="utf-8") == tokenizer.to_json()
    assert (loaded.pad_id, loaded.eos_id, loaded.vocab_size) == (0, 1, 512)
    assert loaded.encode_batch(texts) == tokenizer.encode_batch(texts)


def test_a_vocabulary_that_cannot_be_is_refused(texts: list[str]):
    with pytest.raises(ValueError, match="vocab_size=257 is too small: .* 258"):
        train_tokenizer(texts, 257)
    with pytest.raises(ValueError, match="vocab_size=1024 is too large for these texts: they give 2"):
        train_tokenizer(["a", "b"], 1024)


def test_a_file_that_is_no_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="cannot be read as a tokenizer.json"):
        load_tokenizer(path)
    path.write_text(tokenizer.to_json()[:-20], encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read as a tokenizer.json"):
        load_tokenizer(path)
    path.write_text(tokenizer.to_json().replace("<eos>", "<end>"), encoding="utf-8")
    with pytest.raises(ValueError, match="lacks <pad> or <eos>"):
        load_tokenizer(path)


def test_pairs_that_do_not_fit_are_left_out(tokenizer: Tokenizer):
    prompts = ["a", "a a a", "a a", "a"]
    responses = ["b b", "b", "b b b", "b"]
    lengths = [
        (len(tokenizer.encode(p)), len(tokenizer.encode(r)) + 1) for p, r in zip(prompts, responses, strict=True)
    ]
    assert lengths == [(1, 3), (3, 2), (2, 4), (1, 2)]
    fitting = encode_pairs(tokenizer, prompts, responses, max_prompt=2, max_response=3)
    assert fitting.index == (0, 3)
    for row, prompt, response in zip(fitting.index, fitting.prompts, fitting.responses, strict=True):
        assert list(prompt) == tokenizer.encode(prompts[row])
        assert list(response) == [*tokenizer.encode(responses[row]), tokenizer.eos_id]
    assert encode_pairs(tokenizer, prompts, responses, 3, 4).index == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="4 prompts for 1 responses"):
        encode_pairs(tokenizer, prompts, ["b"], 2, 3)
