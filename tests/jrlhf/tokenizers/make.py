"""Rewrites golden.json: what transformers makes of its conversations and texts.

    python tests/jrlhf/tokenizers/make.py

The model directories next to it are data. They hold small vocabularies of the four kinds that are in use, with the
special tokens of Qwen 2.5, Llama 3, Gemma 2 and Mistral, and chat templates of the same form as those models'.
"""

import json
from pathlib import Path

import transformers

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.json"


def golden(name: str, conversations: list[list[dict[str, str]]], texts: list[str]) -> dict:
    """Returns the ids of conversations and of plain texts; None for a conversation that the template refuses."""
    theirs = transformers.AutoTokenizer.from_pretrained(HERE / name)
    chats: list[dict | None] = []
    for messages in conversations:
        own = messages[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not own, "continue_final_message": own}
        try:
            ids = theirs.apply_chat_template(messages, return_dict=False)
            prompt_ids = theirs.apply_chat_template(messages, **options, return_dict=False)
            chats.append({"ids": ids, "prompt_ids": prompt_ids})
        except Exception:
            chats.append(None)
    rows = [{"text": text, "ids": theirs(text)["input_ids"]} for text in texts]
    return {"conversations": chats, "texts": rows, "special_tokens": theirs.special_tokens_map}


if __name__ == "__main__":
    content = json.loads(GOLDEN.read_text(encoding="utf-8"))
    content["transformers"] = transformers.__version__
    for name in ("qwen", "llama", "gemma", "mistral"):
        texts = [row["text"] for row in content[name]["texts"]]
        content[name] = golden(name, content["conversations"], texts)
    GOLDEN.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
