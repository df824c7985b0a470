# pyright: reportMissingImports=false
"""Writes a GGUF file's model as a Hugging Face directory, in float32. Runs in an environment that has gguf and torch.

python benchmarks/peers/gguf_to_hf.py FILE DIRECTORY
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def convert(file: Path, directory: Path) -> None:
    folder, name = str(file.parent), file.name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    numbers = read.config.to_dict()
    del numbers["quantization_config"]  # else the files would say that they hold four bits
    model = LlamaForCausalLM(LlamaConfig(**numbers))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
