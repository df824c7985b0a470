"""Texts of a pretrained chat model: greedy ones are transformers', drawn ones follow from transformers' logits."""

import io
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jrlhf import generate
from jrlhf.data.batches import key_for, pad_rows, put_rows, row_keys
from jrlhf.data.encode import Encoding
from jrlhf.data.types import Example
from jrlhf.models import SamplingConfig, Schedule
from jrlhf.roles.generating import engine_of
from tests.real.conftest import CHATS, QUESTIONS, TEXTS, VOCABULARY, chosen, log_softmax, logits_of

pytestmark = [
    pytest.mark.proof("real"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # the peers' own
]
END, NEW = 2, 64


@pytest.fixture(scope="module")
def generator(peer):
    """The model as a user's command loads it, on three devices that share the nine heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "select", lambda config: jax.devices()[:3])
        greedy = {"temperature": 0.0, "max_new_tokens": NEW}
        loaded = generate.load(str(peer.directory), greedy, batch=12)
    assert dict(loaded.mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 3}
    return loaded


@pytest.fixture(scope="module")
def greedy(peer):
    """transformers' greedy answers to all conversations, [prompt ids, answer ids with the end]."""
    prompts = [peer.chat(messages) for messages in CHATS]
    return list(zip(prompts, peer.greedy(prompts, NEW), strict=True))


def test_conversations_have_the_tokens_of_transformers(peer, generator):
    """Prompts, and what a model learns of whole conversations: everything up to the last answer's end."""
    prompts = generator.encode([Example(prompt=messages) for messages in CHATS])
    assert list(prompts.ids) == [tuple(peer.chat(messages)) for messages in CHATS]
    answers = [{"role": "assistant", "content": QUESTIONS[row % 18]} for row in range(len(CHATS))]
    whole = [(*messages, answer) for messages, answer in zip(CHATS, answers, strict=True)]
    sequences = Encoding(generator.tokenizer).sequences([Example(prompt=messages) for messages in whole], 500)
    for messages, ids, learn in zip(whole, sequences.ids, sequences.learn, strict=True):
        theirs = peer.tokenizer.apply_chat_template([*messages], return_dict=False)
        assert list(ids) == theirs[: len(ids)] and ids[-1] == END
        assert peer.tokenizer.decode(theirs[len(ids) :]) == "\n"
        asked = peer.chat(messages[:-1])
        if len(messages) == 2:  # no earlier answer is learned
            assert learn == (False,) * len(asked) + (True,) * (len(ids) - len(asked))


def test_greedy_texts_are_those_of_transformers(peer, generator, greedy):
    """35 conversations, 64 tokens: every token, the end included, and the text."""
    prompts = generator.encode([Example(prompt=messages) for messages in CHATS])
    with jax.set_mesh(generator.mesh):
        answers = list(generator.answer(prompts, key_for(0, "generate")))
    for (_, expected), answer in zip(greedy, answers, strict=True):
        assert answer.ids == expected
        assert answer.finished == (expected[-1] == END)
        assert answer.text == peer.tokenizer.decode(expected, skip_special_tokens=True)
    lengths = np.array([len(expected) for _, expected in greedy])
    assert (lengths < NEW).sum() >= 10 and (lengths == NEW).sum() >= 10 and len({*lengths}) >= 8


def test_slots_chunks_and_a_shared_prefill_draw_the_same(generator, greedy):
    """Slots are refilled when rows end; the two answers to a prompt share its prefill."""
    samples = 2
    rows = [prompt for prompt, _ in greedy][:33]
    tokens, lengths = put_rows(pad_rows(rows, 128), generator.mesh)
    run = engine_of(*generator.place, generator.sampling, Schedule(slots=12, chunk=8, buckets=2), samples)
    with jax.set_mesh(generator.mesh):
        keys = row_keys(key_for(0, "generate"), len(rows) * samples, generator.mesh)
        result = jax.device_get(run(generator.model.params, tokens, lengths, keys))
    for row, (_, expected) in enumerate(expected for expected in greedy[:33] for _ in range(samples)):
        start = result.prompt_lengths[row]
        assert tuple(result.tokens[row, start : start + result.response_lengths[row]]) == expected
        assert result.finished[row] == (expected[-1] == END)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.5, "top_k": 50},
    "both": {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_new_tokens": 8},
    "sure": {"temperature": 0.2, "top_p": 0.9999},
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drawn_tokens_follow_from_the_logits_of_transformers(peer, generator, name):
    """transformers' logits of the finished texts, its filters and our noise give every token again.

    Log-probabilities are those of the whole softmax at the temperature. A row ends with its first end of text.
    """
    sampling = SamplingConfig(max_new_tokens=40, stop_ids=(END,), **SAMPLINGS[name])
    rows = [peer.chat(messages) for messages in CHATS[:33]]
    tokens, lengths = put_rows(pad_rows(rows, 128), generator.mesh)
    with jax.set_mesh(generator.mesh):
        keys = row_keys(key_for(1, "generate"), len(rows), generator.mesh)
        run = engine_of(*generator.place, sampling, Schedule(chunk=sampling.max_new_tokens))
        drawn = jax.device_get(run(generator.model.params, tokens, lengths, keys))
    again, ended, logprobs = 0, 0, []
    for row, key in enumerate(jax.device_get(keys)):
        start, count = drawn.prompt_lengths[row], drawn.response_lengths[row]
        text = drawn.tokens[row, : start + count]
        assert list(text[:start]) == rows[row]
        assert drawn.finished[row] == (text[-1] == END) and END not in text[start:-1]
        assert drawn.finished[row] or count == sampling.max_new_tokens
        ended += drawn.finished[row]
        logits = logits_of(peer.model, text[None])[:, start - 1 :]
        every = log_softmax(logits, sampling.temperature)
        own = chosen(every, text[None, start - 1 :])[0]
        np.testing.assert_allclose(drawn.logprobs[row, start : start + count], own, atol=3e-4)
        logprobs += own.tolist()
        allowed = filtered(logits[0, :-1], sampling)
        scores = allowed + noise(key, np.arange(start, start + count))
        short = scores.max(-1) - scores[np.arange(count), text[start:]]
        assert short.max() < 1e-3, "another token was drawn"
        again += (short == 0).sum()
    assert again > 0.998 * len(logprobs) and (ended > 3 or name == "hot")
    assert max(logprobs) > -1e-4 if name == "sure" else min(logprobs) < -4


def noise(key: Any, places: np.ndarray) -> np.ndarray:
    """Standard Gumbel numbers [R, V] for the tokens at these places of a row."""
    own = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, places)
    return np.asarray(jax.vmap(lambda one: jax.random.gumbel(one, (VOCABULARY,)))(own))


def filtered(logits: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    """Logits [R, V] of a whole answer at the temperature, -inf where transformers' filters exclude a word."""
    import torch
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores: Any = torch.tensor(logits)
    no_ids: Any = None
    scores[: sampling.min_new_tokens, END] = -torch.inf
    filters = [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else []
    filters += [] if sampling.top_k is None else [TopKLogitsWarper(sampling.top_k)]
    filters += [] if sampling.top_p is None else [TopPLogitsWarper(sampling.top_p)]
    for change in filters:
        scores = change(no_ids, scores)
    return scores.numpy()


def test_a_long_prompt_is_continued_as_by_transformers(peer, generator):
    """1,500 tokens, of which most repeat earlier ones."""
    ids = np.resize(peer.rows(width=192).ravel(), 1500).tolist()
    expected = peer.greedy([ids], 24)[0]
    tokens, lengths = put_rows(pad_rows([ids] * 3, 1536), generator.mesh)
    run = engine_of(*generator.place, replace(generator.sampling, max_new_tokens=24), Schedule())
    with jax.set_mesh(generator.mesh):
        keys = row_keys(key_for(0, "generate"), 3, generator.mesh)
        result = jax.device_get(run(generator.model.params, tokens, lengths, keys))
    for row in range(3):
        assert tuple(result.tokens[row, 1500 : 1500 + result.response_lengths[row]]) == expected


def test_a_conversation_shows_whole_characters_and_remembers_its_turns(peer, generator, monkeypatch, capsys):
    """What grows on the screen is the text of transformers' greedy answers, each to all that was said before."""
    lines = [QUESTIONS[12], "请用中文说：你好，世界！😀", "Repeat what I said first."]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    talk, expected = [], []
    for line in lines:
        talk.append({"role": "user", "content": line})
        (answer,) = peer.greedy([peer.chat(talk)], NEW)
        expected.append(peer.tokenizer.decode(answer, skip_special_tokens=True))
        talk.append({"role": "assistant", "content": expected[-1]})
    shown: list[str] = []
    with jax.set_mesh(generator.mesh):
        alone = replace(generator, batch=generator.mesh.size)
        monkeypatch.setattr("builtins.print", lambda text="", **options: shown.append(text + options.get("end", "\n")))
        generate.converse(alone, "smollm2", 0, terminal=False)
    assert "".join(shown) == "".join(f"{answer}\n" for answer in expected)
    assert len(shown) > 12 and any(ord(letter) > 0x2FFF for letter in "".join(shown))
    assert all("\ufffd" not in piece for piece in shown)


def test_pieces_of_characters_are_never_shown(peer, generator):
    """Every prefix of the tokens of emoji and of other scripts, after every other one: bytes of a character are held
    back until all of them are there."""
    for text in TEXTS:
        ids = peer.tokenizer(text, add_special_tokens=False).input_ids[:60]
        assert generator.tokenizer.encode(text)[:60] == ids
        for start in range(0, len(ids), 7):
            whole = generator.tokenizer.continuation(ids[:start], ids[start:])
            for end in range(start, len(ids)):
                part = generator.tokenizer.continuation(ids[:start], ids[start:end]).rstrip("\ufffd")
                assert whole.startswith(part), (text, start, end)
        spoken = peer.tokenizer.decode(ids, skip_special_tokens=True)
        assert generator.tokenizer.continuation([], ids) == spoken
