"""Tokenizers of model directories: their special tokens, their ends, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from jrlhf.data.chat import render_chat
from jrlhf.data.encode import encode_continuation
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.tokenizer_files import NEUTRAL, check_vocabulary, load_tokenizer, other_token
from jrlhf.errors import UserError

from .conftest import FAMILIES, FAMILY, GOLDEN


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FAMILIES / "qwen", tmp_path / "qwen"))


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def change(path: Path, **settings: object) -> None:
    write(path, json.loads(path.read_text()) | settings)


def test_plain_text_has_the_ids_of_transformers():
    """Against the committed ids of transformers (tokenizers/make.py), the beginning of text included."""
    for name, tokenizer in FAMILY.items():
        assert tokenizer.special_tokens == GOLDEN[name]["special_tokens"], name
        for row in GOLDEN[name]["texts"]:
            assert tokenizer.encode_prompt(row["text"]) == row["ids"], name
            assert tokenizer.decode(row["ids"]) == row["text"]


def test_what_the_files_say_of_special_tokens():
    def names(tokenizer: Tokenizer, ids) -> list[str | None]:
        return [None if index is None else tokenizer.backend.id_to_token(index) for index in ids]

    qwen, llama, gemma, mistral = FAMILY.values()
    ends = ["<|im_end|>", "<|endoftext|>"]
    assert names(qwen, (qwen.bos_id, qwen.pad_id, *qwen.eos_ids)) == [None, "<|endoftext|>", *ends]
    # The tokenizer's own end is written, whatever the order in generation_config.json.
    assert names(llama, (*llama.eos_ids, llama.bos_id)) == ["<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>"]
    assert llama.pad_id is None
    assert names(gemma, gemma.eos_ids) == ["<eos>", "<end_of_turn>"]
    assert gemma.chat_template is not None and "start_of_turn" in gemma.chat_template  # "default" of two
    assert names(mistral, (*mistral.eos_ids, *mistral.prefix_ids)) == ["</s>", "<s>"]
    assert qwen.vocab_size == 333 and qwen.directory == FAMILIES / "qwen"


def test_a_continuation_has_no_blank_of_its_own():
    mistral = FAMILY["mistral"]
    assert mistral.decode(mistral.encode("How") + mistral.encode("ever")) == "How ever"
    for tokenizer in FAMILY.values():
        for first in ("How", "16 -", "a ", "b\n", "", "[INST] x [/INST]"):
            for second in ("ever", " many", "\n3", "", "\n\nb", " 3", "é"):
                begun, joined = tokenizer.encode(first), tokenizer.encode(first + second)
                ids = [*begun, *encode_continuation(tokenizer, first, begun, second)]
                assert ids == joined if joined[: len(begun)] == begun else tokenizer.decode(ids) == first + second


def test_tokens_end_where_their_characters_do():
    for tokenizer in FAMILY.values():
        for text in ("How many eggs?", "é 日本 🎈", "a<|im_end|>\n <eos>b", " 16 -  3"):
            ids, ends = tokenizer.encode_with_ends(text)
            assert ids == tokenizer.encode(text) and ends == sorted(ends) and ends[-1] == len(text)
            for place in range(1, len(text)):
                before = sum(end <= place for end in ends)
                begun = tokenizer.encode(text[:place])
                if ids[: len(begun)] == begun:
                    assert before == len(begun)


def test_what_a_file_was_saved_with_changes_no_prompt(qwen: Path):
    """Padding and truncation are off, and an end of text that the tokenizer adds is left out."""
    backend = tokenizers.Tokenizer.from_file(str(qwen / "tokenizer.json"))
    end, expected = backend.token_to_id("<|endoftext|>"), load_tokenizer(qwen).encode("How many eggs?")
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    backend.save(str(qwen / "tokenizer.json"))
    tokenizer = load_tokenizer(qwen)
    assert tokenizer.encode("How many eggs?") == expected
    assert tokenizer.encode_prompt("How many eggs?") == [end, *expected]


def test_where_the_ends_of_a_response_come_from(qwen: Path):
    end, text = 332, 330
    assert load_tokenizer(qwen).eos_ids == (end, text)
    assert load_tokenizer(qwen, eos=["<|endoftext|>"]).eos_ids == (text,)
    (qwen / "generation_config.json").unlink()
    assert load_tokenizer(qwen).eos_ids == (end,)
    write(qwen / "config.json", {"eos_token_id": text})
    assert load_tokenizer(qwen).eos_ids == (end, text)
    write(qwen / "config.json", {"text_config": {"eos_token_id": [text]}})
    change(qwen / "tokenizer_config.json", eos_token=None)
    assert load_tokenizer(qwen).eos_ids == (text,)
    write(qwen / "generation_config.json", {"eos_token_id": 5000})
    with pytest.raises(UserError, match="generation_config.json ends a response at id 5000, which the tokenizer"):
        load_tokenizer(qwen)
    write(qwen / "generation_config.json", {"eos_token_id": "<|im_end|>"})
    with pytest.raises(UserError, match="is '<|im_end|>', not an id or a list of ids"):
        load_tokenizer(qwen)
    (qwen / "generation_config.json").unlink()
    (qwen / "config.json").unlink()
    with pytest.raises(UserError, match="nothing in .* says which token ends a text: set eos_token"):
        load_tokenizer(qwen)
    change(qwen / "tokenizer_config.json", eos_token="<|finis|>")
    with pytest.raises(UserError, match="has no token '<|finis|>' to end a text with"):
        load_tokenizer(qwen)


def test_a_template_file_goes_before_the_settings(qwen: Path):
    assert "im_start" in (load_tokenizer(qwen).chat_template or "")
    (qwen / "chat_template.jinja").write_text("é {{ messages }}", encoding="utf-8")
    assert load_tokenizer(qwen).chat_template == "é {{ messages }}"
    (qwen / "chat_template.jinja").unlink()
    change(qwen / "tokenizer_config.json", chat_template=None)
    assert load_tokenizer(qwen).chat_template is None
    write(qwen / "chat_template.json", {"chat_template": "{{ tools }}"})
    assert load_tokenizer(qwen).chat_template == "{{ tools }}"


TOOL = [{"type": "function", "function": {"name": "add"}}]


def test_rows_with_tools_are_written_by_the_models_template_for_tools(qwen: Path):
    def written(**variables: object) -> str:
        return render_chat(load_tokenizer(qwen), [{"role": "user", "content": "2?"}], variables=variables)

    named = [{"name": name, "template": f"{name}: {{{{ messages[0].content }}}}"} for name in ("default", "tool_use")]
    change(qwen / "tokenizer_config.json", chat_template=named)
    assert (written(), written(tools=TOOL), written(tools=[])) == ("default: 2?", "tool_use: 2?", "tool_use: 2?")
    (qwen / "additional_chat_templates").mkdir()
    (qwen / "additional_chat_templates" / "tool_use.jinja").write_text("from the folder")
    assert written(tools=TOOL) == "from the folder"  # files replace all that tokenizer_config.json has
    with pytest.raises(UserError, match="has no chat template"):
        written()
    (qwen / "chat_template.jinja").write_text("{{ documents is not none }}{{ tools is not none }}")
    assert (written(), written(tools=TOOL)) == ("FalseFalse", "from the folder")
    assert load_tokenizer(qwen).templates == ("{{ documents is not none }}{{ tools is not none }}", "from the folder")
    (qwen / "additional_chat_templates" / "tool_use.jinja").unlink()
    assert written(tools=TOOL) == "FalseTrue"
    for wrong in (3, [{"name": "default"}], {"default": 3}, ["x"]):
        (qwen / "chat_template.jinja").unlink(missing_ok=True)
        change(qwen / "tokenizer_config.json", chat_template=wrong)
        with pytest.raises(UserError, match="chat_template is neither a template nor a list of objects with name"):
            load_tokenizer(qwen)


def test_a_class_builds_its_own_pipeline(tmp_path: Path):
    """Llama 2's class: `legacy` says whether each text after a special token begins with a blank. By hand."""
    directory = Path(shutil.copytree(FAMILIES / "mistral", tmp_path / "llama"))
    write(directory / "config.json", {"model_type": "llama"})

    def pieces(**settings: object) -> list[str]:
        change(directory / "tokenizer_config.json", **settings)
        return load_tokenizer(directory).backend.encode("the[INST] the", add_special_tokens=False).tokens

    as_it_is, first = ["▁the", "[INST]", "▁▁", "the"], ["▁the", "[INST]", "▁the"]
    assert pieces() == as_it_is  # PreTrainedTokenizerFast
    assert pieces(tokenizer_class="LlamaTokenizer") == pieces(legacy=False) == pieces(legacy=True) == first
    assert load_tokenizer(directory).backend.encode("[INST]the", add_special_tokens=False).tokens[1] == "▁the"
    change(directory / "tokenizer_config.json", legacy=False)
    assert load_tokenizer(directory).backend.encode("[INST]the", add_special_tokens=False).tokens[1] != "▁the"
    assert pieces(add_prefix_space=False)[-1] == "▁the" != pieces(add_prefix_space=False)[0]
    with pytest.raises(
        UserError, match="tokenizer_class CodeLlamaTokenizer is not supported: .*PreTrainedTokenizerFast"
    ):
        pieces(tokenizer_class="CodeLlamaTokenizer")


def test_settings_that_are_not_applied_are_refused_by_name(qwen: Path):
    for key, values in NEUTRAL.items():
        for value in values:
            change(qwen / "tokenizer_config.json", **{key: value})
            assert load_tokenizer(qwen).vocab_size == 333
        change(qwen / "tokenizer_config.json", **{key: ["x"]})
        with pytest.raises(UserError, match=f"tokenizer_config.json: {key} .'x'. is not supported"):
            load_tokenizer(qwen)
        change(qwen / "tokenizer_config.json", **{key: values[0]})
    for key, value, sentence in (
        ("pad_token", 3, "pad_token 3 is no token: correct it"),
        ("extra_special_tokens", "<x>", "extra_special_tokens or additional_special_tokens '<x>' must be a list"),
    ):
        change(qwen / "tokenizer_config.json", **{key: value})
        with pytest.raises(UserError, match=sentence):
            load_tokenizer(qwen)
        change(qwen / "tokenizer_config.json", **{key: None})
    write(qwen / "added_tokens.json", {"<tool>": 333, "<|im_end|>": 332})
    with pytest.raises(UserError, match="added_tokens.json has '<tool>', which tokenizer.json lacks: add it there"):
        load_tokenizer(qwen)


def test_tokens_that_only_the_settings_list_are_added(qwen: Path):
    listed = {"333": {"content": "<tool>", "special": False}, "330": {"content": "<|endoftext|>", "special": True}}
    change(qwen / "tokenizer_config.json", added_tokens_decoder=listed)
    tokenizer = load_tokenizer(qwen)
    assert tokenizer.encode("a<tool>")[-1] == 333 and tokenizer.vocab_size == 334
    change(qwen / "tokenizer_config.json", added_tokens_decoder={"500": {"content": "<tool>"}})
    with pytest.raises(UserError, match="gives '<tool>' the id 500, but by tokenizer.json it is 333"):
        load_tokenizer(qwen)


def test_settings_of_another_form_are_one_sentence(qwen: Path):
    wrong = [
        "<tool>",
        ["<tool>"],
        3,
        {"500": None},
        {"500": "<tool>"},
        {"500": {}},
        {"500": {"content": 3}},
        {"x": {"content": "<tool>"}},
        {"500": {"content": "a", "special": "yes"}},
    ]
    for listed in wrong:
        change(qwen / "tokenizer_config.json", added_tokens_decoder=listed)
        with pytest.raises(UserError, match="tokenizer_config.json: added_tokens_decoder is no object of tokens"):
            load_tokenizer(qwen)
    for listed in (None, {}):
        change(qwen / "tokenizer_config.json", added_tokens_decoder=listed)
        assert load_tokenizer(qwen).vocab_size == FAMILY["qwen"].vocab_size
    for stops in (-1, 2**40, [1, -5], [[1]], "1", True, {"a": 1}):
        write(qwen / "generation_config.json", {"eos_token_id": stops})
        with pytest.raises(UserError, match="eos_token_id in .*generation_config.json is .*: correct it"):
            load_tokenizer(qwen)
    (qwen / "generation_config.json").unlink()
    write(qwen / "config.json", {"text_config": "text"})
    assert load_tokenizer(qwen).eos_ids == (FAMILY["qwen"].eos_ids[0],)


def test_a_directory_without_a_tokenizer_is_refused(qwen: Path):
    with pytest.raises(UserError, match="nowhere is not a directory"):
        load_tokenizer(qwen / "nowhere")
    with pytest.raises(UserError, match="is not a directory: name the directory that holds tokenizer.json"):
        load_tokenizer(qwen / "tokenizer.json")
    text = (qwen / "tokenizer.json").read_text()
    (qwen / "tokenizer.json").write_text(text[:-20])
    with pytest.raises(UserError, match="tokenizer.json (fails|cannot be read)"):
        load_tokenizer(qwen)
    (qwen / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer.json"):
        load_tokenizer(qwen)
    (qwen / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(UserError, match="has tokenizer.model but no tokenizer.json: convert it once with transformers"):
        load_tokenizer(qwen)
    (qwen / "tokenizer.json").write_text(text)
    for content in ("{", "[]", "\udcff"):
        (qwen / "tokenizer_config.json").write_text(content, errors="surrogateescape")
        with pytest.raises(UserError, match="tokenizer_config.json (is not JSON|holds a list)"):
            load_tokenizer(qwen)


def test_two_tokenizers_differ_by_the_first_token_that_is_another(qwen: Path):
    mine, path = load_tokenizer(qwen), qwen / "tokenizer.json"
    original = json.loads(path.read_text())
    size = mine.vocab_size
    padding = {"content": "<|one more|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    more = [*original["added_tokens"], {**padding, "id": size, "special": True}]
    write(path, original | {"added_tokens": more})
    longer = load_tokenizer(qwen)
    assert longer.vocab_size == size + 1 and other_token(mine, longer) is other_token(longer, mine) is None
    first, second = sorted(original["model"]["vocab"], key=original["model"]["vocab"].__getitem__)[40:42]
    swapped = original["model"]["vocab"] | {first: 41, second: 40}
    write(path, original | {"model": original["model"] | {"vocab": swapped}})
    assert other_token(load_tokenizer(qwen), mine) == (40, second, first)
    assert other_token(mine, FAMILY["llama"]) is not None


def test_a_vocabulary_larger_than_the_model_is_refused():
    qwen = FAMILY["qwen"]
    assert check_vocabulary(qwen, 333) is qwen and check_vocabulary(qwen, 400) is qwen
    with pytest.raises(UserError, match="qwen has ids up to 332, but the model's embedding has 332 rows"):
        check_vocabulary(qwen, 332)
    with pytest.raises(UserError, match="has ids up to 332, but the model's embedding has 256 rows"):
        check_vocabulary(replace(qwen, directory=None), 256)


def test_added_tokens_beyond_the_model_are_refused_where_a_text_has_them(qwen: Path):
    backend = tokenizers.Tokenizer.from_file(str(qwen / "tokenizer.json"))
    backend.add_special_tokens(["<image>"])
    backend.save(str(qwen / "tokenizer.json"))
    change(qwen / "tokenizer_config.json", pad_token="<image>")
    tokenizer = load_tokenizer(qwen)
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (334, 333)
    narrowed = check_vocabulary(tokenizer, 333)
    assert (narrowed.vocab_size, narrowed.pad_id) == (333, None)
    assert narrowed.encode("eggs") == tokenizer.encode("eggs")
    for encode in (narrowed.encode, narrowed.encode_prompt, lambda text: narrowed.encode_batch([text])):
        with pytest.raises(UserError, match="the text holds the token '<image>' \\(id 333\\)"):
            encode("an <image>")
