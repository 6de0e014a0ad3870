"""Make a random model of two layers whose tokens are characters, and forty prompts: no download is needed."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

words = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
characters = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
characters.decoder = decoders.Fuse()
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained("model")
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes)).save_pretrained("model")
prompts = [{"prompt": f"{n}+5=", "reward_model": {"ground_truth": str(n + 5)}} for n in range(40)]
Path("math.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
