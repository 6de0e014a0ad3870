"""A stand-in for the Qwen3 folder that xtuner's checkpoint tests name: a config, and a tokenizer of single bytes."""

from __future__ import annotations

import sys
from pathlib import Path

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """Write it; needs transformers, which xtuner brings along."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast, Qwen3Config  # type: ignore[import-not-found]

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=_TEMPLATE,
    )
    fast.save_pretrained(folder)
    config = Qwen3Config(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=1, head_dim=16)
    config.num_attention_heads = config.num_key_value_heads = 4
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
