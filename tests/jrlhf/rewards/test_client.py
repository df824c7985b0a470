"""The chat client of reward functions, against a server on this machine: what it sends, repeats, stores and refuses."""

import asyncio
import json
import os
import re
import sys
import time
from email.utils import formatdate

import pytest

from jrlhf.errors import UserError
from jrlhf.rewards import client as module
from jrlhf.rewards.client import ChatClient, StoredAnswers, check_endpoint
from jrlhf.rewards.failure import Failure
from tests.support.judges import DROPPED, MODEL, SILENT, completion, serving

KEY = "sk-secret-0123"
SETTINGS = {"model": None, "key_env": None, "timeout": 5.0}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", KEY)


def run(use, url: str, **settings):
    """Returns what the coroutine function `use` returns, called with a client."""

    async def main():
        client = ChatClient(url, MODEL, **settings)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(main())


def failure(answer, attempts: int = 1, **settings) -> Failure:
    """The failure that an endpoint's answers give, after this number of requests."""
    with serving(answer=lambda body: answer) as endpoint:
        with pytest.raises(Failure) as caught:
            run(lambda client: client.chat("?"), endpoint.url, **settings)
        assert len(endpoint.requests) == attempts
    return caught.value


def test_a_request_has_the_settings_and_the_options_of_the_call():
    with serving(key=KEY, answer=lambda body: json.dumps({"a": len(body["messages"])})) as endpoint:
        talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "\ud800u"}]

        async def use(client):
            return await client.chat("u"), await client.json(talk, seed=3, max_tokens=None, temperature=1)

        assert run(use, endpoint.url, key_env="JUDGE_KEY", max_tokens=9) == ('{"a": 1}', {"a": 2})
    user = {"role": "user", "content": "u"}
    assert endpoint.requests == [
        {"model": MODEL, "temperature": 0, "max_tokens": 9, "messages": [user]},
        {"model": MODEL, "temperature": 1, "seed": 3, "messages": talk, "response_format": {"type": "json_object"}},
    ]


REFUSED = [
    ({"choices": []}, "bad_json", "gave no chat completion"),
    ((200, {}, "<html>proxy</html>"), "bad_json", "<html>proxy</html>"),
    ({"choices": [{"message": {"content": 7}}]}, "bad_json", "no chat completion"),
    ({"error": "none"}, "bad_json", "none"),
    ((200, {"Content-Encoding": "gzip"}, "{}"), "bad_json", "unreadable"),
    (completion(" \n"), "empty", "without text"),
    (completion(None), "empty", "without text"),
    (completion(None, refusal="I must not"), "refusal", "I must not"),
    (completion("some", "content_filter"), "refusal", "some"),
    (completion("a long", "length"), "cut", "raise client.max_tokens"),
    ((404, {}, "no model"), "refused", "status 404: no model"),
    ((302, {"Location": "/"}, ""), "refused", "status 302"),
]


@pytest.mark.parametrize(("answer", "kind", "detail"), REFUSED)
def test_an_answer_that_cannot_be_used_is_not_asked_for_again(answer, kind, detail):
    error = failure(answer)
    assert error.kind == kind and detail in error.detail


RETRIED = [
    (DROPPED, "connection", "cannot be reached"),
    (SILENT, "timeout", "no answer within 0.1 s"),
    ((429, {"Retry-After": "0"}, "slow down"), "rate_limit", "status 429: slow down"),
    ((503, {}, "loading"), "server", "status 503: loading"),
]


@pytest.mark.parametrize(("answer", "kind", "detail"), RETRIED)
def test_a_passing_failure_is_repeated_and_counted_at_the_end(answer, kind, detail):
    error = failure(answer, attempts=3, retries=2, timeout=0.1 if answer == SILENT else 5.0)
    assert error.kind == kind and detail in error.detail
    with serving(script=[answer, answer, "yes"]) as endpoint:
        settings = {"retries": 2, "timeout": 0.1 if answer == SILENT else 5.0}
        assert run(lambda client: client.chat("?"), endpoint.url, **settings) == "yes"


def test_an_endpoint_that_is_gone_is_a_failed_connection():
    with serving() as endpoint:
        pass
    with pytest.raises(Failure, match="connection: .*cannot be reached"):
        run(lambda client: client.chat("?"), endpoint.url, retries=1)


def test_the_time_that_an_endpoint_asks_for_is_kept():
    waits, sleep = [], asyncio.sleep

    async def use(client):
        return await client.chat("?")

    async def noted(seconds, *rest):
        waits.append(seconds)
        await sleep(0)

    limits = [(429, {"Retry-After": "3"}, ""), (503, {"Retry-After": formatdate(time.time() + 4, usegmt=True)}, "")]
    with serving(script=[*limits, "yes"]) as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", noted)
        assert run(use, endpoint.url, timeout=5.0) == "yes"
    asked = [wait for wait in waits if wait > 1]
    assert asked[0] == 3 and 2 < asked[1] <= 4
    error = failure((429, {"Retry-After": "3600"}, ""), attempts=1, timeout=5.0)  # longer than a request may take
    assert error.kind == "rate_limit" and "asked again in 3600 s" in error.detail
    assert [module._retry_after(text) for text in ("", "soon", "nan", "-1", "1.5")] == [0, 0, 0, 0, 1.5]


def test_requests_in_flight_are_bounded():
    with serving(seconds=0.02) as endpoint:

        async def use(client):
            return await asyncio.gather(*(client.chat(str(number)) for number in range(12)))

        assert run(use, endpoint.url, concurrent=3) == ["Score: 7"] * 12
        assert len(endpoint.requests) == 12 and endpoint.most == 3


def test_equal_requests_in_flight_are_one_and_end_with_the_last_who_waits():
    with serving(script=[SILENT]) as endpoint:

        async def use(client):
            first, second = (asyncio.ensure_future(client.chat("same")) for _ in range(2))
            while not endpoint.requests:
                await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled() and not second.done() and client._calls
            second.cancel()
            await asyncio.wait([second])
            assert not client._calls
            texts = await asyncio.gather(client.chat("same"), client.chat("same"))
            left = asyncio.ensure_future(client.chat("left"))
            await asyncio.sleep(0)
            await client.settle()
            await asyncio.wait([left])
            assert left.cancelled()
            return texts

        assert run(use, endpoint.url, concurrent=1) == ["Score: 7"] * 2
        assert [body["messages"][0]["content"] for body in endpoint.requests][:2] == ["same", "same"]


def test_requests_that_a_call_has_left_free_their_places():
    with serving(script=[SILENT, SILENT]) as endpoint:

        async def use(client):
            left = [asyncio.ensure_future(client.chat("same")) for _ in range(3)]
            while len(endpoint.requests) < 2:
                await asyncio.sleep(0.01)
            await client.settle()
            await asyncio.wait(left)
            assert all(task.cancelled() for task in left) and not client._calls
            return await client.chat("same")

        assert run(use, endpoint.url, concurrent=2, cache=None) == "Score: 7"
        assert len(endpoint.requests) == 3


def test_the_cache_answers_equal_requests_after_a_resume(tmp_path):
    file = tmp_path / "answers.jsonl"

    def use(*texts, **options):
        async def ask(client):
            return [await client.chat(text, **options) for text in texts]

        return ask

    with serving(answer=lambda body: f"{len(endpoint.requests)}\n\ud83d\ude00") as endpoint:
        emoji = "\n\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")
        assert run(use("a", "b", "a"), endpoint.url, cache=str(file)) == [f"{n}{emoji}" for n in (1, 2, 1)]
        with open(file, "ab") as half:  # a process was killed while it wrote, and the disk was at fault elsewhere
            half.write(
                b'[1]\nnull\n{"key": ["x"], "text": "", "asked": "", "answered": ""}\n{"key": "\xff\n{"key": "ab'
            )
        assert run(use("c", "b"), endpoint.url, cache=str(file)) == [f"{n}{emoji}" for n in (3, 2)]
        assert run(use("c", "a"), endpoint.url, cache=str(file)) == [f"{n}{emoji}" for n in (3, 1)]
        # Whatever may change an answer is in the key: the options, and the address.
        assert run(use("a", seed=1), endpoint.url, cache=str(file)) == [f"4{emoji}"]
        assert run(use("a"), f"{endpoint.url}/x", cache=str(file)) == [f"5{emoji}"]
        assert run(use("d", "d"), endpoint.url, cache=None) == [f"{n}{emoji}" for n in (6, 7)]
        assert run(use("d", "d"), endpoint.url, cache="") == [f"8{emoji}"] * 2
    assert len(endpoint.requests) == 8 and sorted(os.listdir(tmp_path)) == ["answers.jsonl"]


def test_a_file_of_answers_is_read_late_and_takes_no_failures(tmp_path):
    file = tmp_path / "answers.jsonl"
    answers = StoredAnswers(file)
    StoredAnswers(file).add("k", "text", "m", "m-1")
    assert answers.get("k") == "text" and answers.first == {"m": "m-1"}
    answers.add("l", "in memory", "m", "m-1")
    answers.close()
    answers.close()
    full = StoredAnswers(tmp_path / "no folder" / "file")
    full.add("k", "text", "m", "m")
    assert full.get("k") == "text"
    with serving(script=[completion("cut of", "length"), "whole"]) as endpoint:

        async def use(client):
            with pytest.raises(Failure, match="cut"):
                await client.chat("?")
            return await client.chat("?")

        assert run(use, endpoint.url, cache=str(file)) == "whole"


def test_another_model_under_the_same_name_is_a_failure_also_after_a_resume(tmp_path):
    file, changed = tmp_path / "answers.jsonl", completion("b", model="judge-8b")

    async def use(client):
        assert await client.chat("1") == "a"
        with pytest.raises(Failure, match="model_changed: judge-8b answered, and judge-7b before"):
            await client.chat("2")

    with serving(script=["a", changed]) as endpoint:
        run(use, endpoint.url, cache=str(file))
    with serving(script=[changed]) as endpoint:
        with pytest.raises(Failure, match="model_changed"):
            run(lambda client: client.chat("3"), endpoint.url, cache=str(file))
    with serving(script=[completion("a", model=None)] * 2) as endpoint:  # it does not say
        assert run(lambda client: client.chat("4"), endpoint.url, cache=None) == "a"


def test_an_answer_that_is_no_json_object_is_unparsable():
    for text in ("no", "[1]", "[" * 100_000):
        with serving(script=[text]) as endpoint, pytest.raises(Failure, match="unparsable: .*no JSON object"):
            run(lambda client: client.json("?"), endpoint.url)


def test_an_answer_that_is_no_json_object_is_asked_for_again(tmp_path):
    file = str(tmp_path / "answers.jsonl")
    with serving(script=["no", "no", '{"score": 7}']) as endpoint:

        async def use(client):
            for _ in range(2):
                with pytest.raises(Failure, match="unparsable"):
                    await client.json("?")

        run(use, endpoint.url, cache=file)
        for _ in range(2):  # the second is stored
            assert run(lambda client: client.json("?"), endpoint.url, cache=file) == {"score": 7}
    assert len(endpoint.requests) == 3


def test_the_endpoint_is_checked():
    with serving(key=KEY) as endpoint:
        keyed = {**SETTINGS, "url": endpoint.url, "key_env": "JUDGE_KEY"}
        assert check_endpoint(keyed, "reward 'r'") == MODEL
        assert check_endpoint({**keyed, "model": MODEL}, "reward 'r'") == MODEL
        wrong = [
            ({"model": "other"}, f"client.model=other of reward 'r' is none of .* lists: {MODEL}"),
            ({"key_env": None}, r"refuses the key \(status 401\): give the name of its variable as client.key_env"),
            ({"key_env": "UNSET"}, "the environment variable that client.key_env of reward 'r' names is not set"),
        ]
        for settings, sentence in wrong:
            with pytest.raises(UserError, match=sentence):
                check_endpoint({**keyed, **settings}, "reward 'r'")
        os.environ["JUDGE_KEY"] = "another"  # restored by monkeypatch
        with pytest.raises(UserError, match="status 401.: correct the variable's value"):
            check_endpoint(keyed, "reward 'r'")
        endpoint.key, endpoint.models = None, ["a", "b"]
        with pytest.raises(UserError, match=r"lists 2 models \(a, b\): name one as client.model"):
            check_endpoint({**SETTINGS, "url": endpoint.url}, "reward 'r'")
        for listing, sentence in (
            ((404, {}, ""), "/models answers with status 404: an address usually ends in /v1"),
            ((200, {}, "hello"), "/models lists no models"),
            ({"data": [1]}, "/models lists no models"),
            (SILENT, r"cannot be reached \(no answer within 0.1 s\)"),
        ):
            endpoint.listing = listing
            with pytest.raises(UserError, match=sentence):
                check_endpoint({**SETTINGS, "url": endpoint.url, "timeout": 0.1}, "reward 'r'")
    for url in (endpoint.url, "http://127.0.0.1:99999/v1", "http://[/v1"):
        with pytest.raises(UserError, match=f"client.url={re.escape(url)} of reward 'r' cannot be reached"):
            check_endpoint({**SETTINGS, "url": url}, "reward 'r'")


def test_the_key_is_in_no_message():
    with serving(answer=lambda body: (400, {}, f"the key {KEY} is wrong")) as endpoint:
        with pytest.raises(Failure, match=r"refused: .*the key \*\*\* is wrong"):
            run(lambda client: client.chat("?"), endpoint.url, key_env="JUDGE_KEY")
    for key in ("sk secret", "sk-s\u00e9cret", "sk\nsecret"):
        os.environ["JUDGE_KEY"] = key
        with pytest.raises(UserError, match="has a blank or no ASCII in it") as caught:
            check_endpoint({**SETTINGS, "url": endpoint.url, "key_env": "JUDGE_KEY"}, "reward 'r'")
        assert "cret" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx2", None)
    monkeypatch.delitem(sys.modules, "jrlhf.rewards.client")
    with pytest.raises(UserError, match=r"client needs its extra: pip install 'jrlhf\[judge\]'"):
        __import__("jrlhf.rewards.client")
