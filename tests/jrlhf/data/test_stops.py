"""Stop strings of tokenizers: the bytes of tokens, where responses end, and what their texts are then."""

import random

import numpy as np
import pytest

from jrlhf.data.batches import to_response
from jrlhf.data.stops import shown, token_bytes, with_stop
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Ids
from jrlhf.errors import UserError

from .conftest import FAMILY, QWEN


def some_ids(tokenizer: Tokenizer, count: int, draw: random.Random) -> Ids:
    """Ids of whole characters: their decoders write bytes that are no UTF-8 in ways of their own."""
    own = [token for token, content in enumerate(token_bytes(tokenizer)) if content.decode(errors="replace").isascii()]
    whole = tokenizer.encode(" é\n€ 😀 ##\n")
    return tuple(token for _ in range(count) for token in (whole if draw.random() < 0.1 else [draw.choice(own)]))


@pytest.mark.parametrize("name", FAMILY)
def test_the_bytes_of_tokens_are_those_of_the_decoders_text(name):
    tokenizer, draw = FAMILY[name], random.Random(0)
    content = token_bytes(tokenizer)
    assert len(content) == tokenizer.vocab_size and content[tokenizer.eos_id] == b""
    begun = tokenizer.encode("a")
    for _ in range(300):
        ids = some_ids(tokenizer, 12, draw)
        text = b"".join(content[token] for token in ids).decode()
        assert text == tokenizer.continuation(begun, ids)
    parts = tokenizer.encode("😀")  # each token has a part of the character
    assert b"".join(content[token] for token in parts).decode() in ("😀", " 😀") and len(parts) > 1


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("stops", [("##",), ("\n", "e a"), ("€ ", "é\n")])
def test_a_response_ends_where_its_text_first_has_a_stop_string(name, stops):
    """The table says so after the same token at which a search of the decoded text finds it; the text ends before."""
    draw, plain, ended = random.Random(1), FAMILY[name], 0
    tokenizer, keeping = (with_stop(plain, stops, keep=keep) for keep in (False, True))
    assert tokenizer.stop is not None
    prompt = plain.encode("Name it: a")
    for _ in range(60):
        ids = some_ids(plain, 30, draw)
        texts = [plain.continuation(prompt, ids[: end + 1]) for end in range(len(ids))]
        first = next((place for place, text in enumerate(texts) if any(stop in text for stop in stops)), None)
        states = np.zeros(1, np.int32)
        for place, token in enumerate(ids):
            states, completed = tokenizer.stop.table.advance(states, np.array([token]))  # pyright: ignore
            assert completed[0] == (place == first)
            if completed[0]:
                break
        if first is None:
            continue
        ended += 1
        drawn = ids[: first + 1]
        response, whole = to_response(tokenizer, prompt, drawn, True), texts[first]
        assert response.text == whole[: min(whole.index(stop) for stop in stops if stop in whole)]
        assert response.ids == drawn and to_response(keeping, prompt, drawn, True).text == whole
    assert ended > 10


def test_only_the_string_that_ended_a_response_is_cut():
    tokenizer = with_stop(QWEN, ["##", "b#"], keep=False)
    prompt, ids = QWEN.encode("a"), lambda text: tuple(QWEN.encode(text))
    early = ids("a## b")  # before `min_new_tokens` tokens, which does not end a response
    assert to_response(tokenizer, prompt, early, False).text == "a## b"
    assert to_response(tokenizer, prompt, (*early, *ids("#")), True).text == "a## "
    assert to_response(tokenizer, prompt, (*early, QWEN.eos_id), True).text == "a## b"
    assert to_response(tokenizer, prompt, (*early, *ids("#")), True).finished
    mark = next(iter(QWEN.marks))
    marked = to_response(tokenizer, prompt, (mark, *ids("c"), *ids("##")), True)
    assert marked.text == "c" and marked.marked == QWEN.decode([mark], special=True) + "c"
    # A character of which the last token brings the rest is longer before it than after it.
    parts = tuple(QWEN.encode("😀"))
    assert to_response(with_stop(QWEN, ["😀"], keep=False), prompt, (*ids("c"), *parts), True).text == "c"


def test_no_beginning_of_a_stop_string_is_shown():
    stop = with_stop(QWEN, ["\n\n", "#a#"], keep=False).stop
    for text, expected in (("x", "x"), ("x\n", "x"), ("x#", "x"), ("x#a", "x"), ("x#b", "x#b"), ("#a", "")):
        assert shown(stop, text) == expected and shown(None, text) == text
    assert shown(with_stop(QWEN, ["\n\n"], keep=True).stop, "x\n") == "x\n"


def test_a_special_token_is_no_part_of_a_text():
    with pytest.raises(UserError, match=r"^stop='.<\|im_end\|>' holds the special token '<\|im_end\|>'"):
        with_stop(QWEN, ["a", "b<|im_end|>"], keep=False)
    assert with_stop(with_stop(QWEN, ["a"], keep=False), [], keep=False).stop is None
