"""transformers as the reference for greedy decoding of the default model, and the prompts to compare on."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmserve.runtime.models import hub

_STORY = "Once upon a time in a small village by the sea there lived a fisherman who had three daughters. "

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Hello",
    "A",
    "1, 2, 3, 4, 5,",
    "2 + 2 =",
    "Water boils at a temperature of",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def fibonacci(n):\n    if n <",
    "import numpy as np\n\nx = np.",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n<title>",
    '{"name": "Ada", "born": 1815, "field":',
    "for (int i = 0; i < n; i++) {\n",
    "#!/bin/bash\nset -e\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is photosynthesis?\nA:",
    "Translate to French: Good morning ->",
    "La capitale de l'Italie est",
    "Die Hauptstadt von Österreich ist",
    "El perro de mi vecino",
    "Привет, как",
    "日本の首都は",
    "你好,我",
    "Grüße aus München! 😀",
    "😀😀😀",
    "   leading spaces and   gaps",
    "trailing newline\n",
    "\n\n\n",
    "\t\tTabs",
    "ALL CAPITALS SENTENCE ABOUT",
    "The three laws of robotics are:\n1.",
    "- apples\n- pears\n-",
    "In 1969, the first humans landed on",
    "The derivative of x^2 is",
    "Roses are red,\nViolets are",
    "To be, or not to be, that is",
    "<|im_start|>user\nWhat is the largest planet?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs ice cold?<|im_end|>\n<|im_start|>assistant\n",
    _STORY * 4,
    _STORY * 20 + "The eldest daughter",
)


@functools.cache
def model() -> Any:
    """The default model in fp32, read from its GGUF by transformers itself. Takes six seconds and 600 MB."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(hub.default_model())
    # transformers makes the same table of names anew for each of the model's 397 modules, half of its time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return read.eval()


@functools.cache
def tokenizer() -> Any:
    """The default model's, read from its GGUF by transformers itself."""
    from transformers import AutoTokenizer

    path = Path(hub.default_model())
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def generate(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What transformers' own loop generates greedily."""
    import torch

    ids = torch.tensor([list(prompt)])
    out = model().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


def greedy_choices(prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """The likeliest token at each place of `output`, given all before it.

    It equals `output` if and only if greedy decoding from `prompt` gives `output`: by induction over its tokens, in one
    forward pass instead of one for each of them.
    """
    import torch

    ids = torch.tensor([[*prompt, *output[:-1]]])
    with torch.inference_mode():
        logits = model()(ids, logits_to_keep=len(output)).logits[0]
    choices: list[int] = logits.argmax(-1).tolist()
    return choices
