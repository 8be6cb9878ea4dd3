"""Measure `baton-tiny` with plain `transformers`, greedily: `python tools/eval_tiny.py --model DIRECTORY`.

Theory. What counts is what a test of a serving engine relies on: that the code word is found in a long
prompt (and thus that a lost or swapped KV block is seen), that short answers are right, that the model
stops by itself. Every prompt is fresh: its seed is none of training's (those are named "seed/step/row"),
and code words are drawn from more than a thousand million. An answer counts only if it is exactly the
sentence expected, closed by <|im_end|>. With `--text FILE` the filler is that file instead of the
generator's: text of a kind never trained on.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_corpus import END, Message, recall_messages, reply
from tiny_model import TinyConfig, TinyModel
from tiny_talk import arithmetic, code_word, copying, fact, listing

SAMPLES: list[list[str]] = [
    ["Hello!", "Who are you?", "What is 7 + 5?", "Thank you."],
    [
        "Name three fruits.",
        "Count from 3 to 12.",
        "What is the opposite of hot?",
        "Which day comes after Monday?",
    ],
    ["My code word is tiger-9054.", "What is 12 - 4?", "What is the code word?", "Goodbye."],
    ["Repeat after me: the blue bird sings at noon.", "What colour is the sky?", "Tell me a story."],
]


@torch.inference_mode()
def measure_agreement(directory: str, vocab: int, length: int) -> None:
    """Print how far the logits of the training model and of `transformers` are apart, in float32."""
    ours = TinyModel(TinyConfig())
    ours.load_hf(load_file(f"{directory}/model.safetensors"))
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(0))
    mine = F.linear(ours(ids, torch.float32), ours.embed.weight)
    apart = (mine - theirs(ids).logits).abs().max().item()
    print(f"training model and transformers: logits at most {apart:.1e} apart (of {mine.abs().max():.1f})")


class Chat:
    """The model and its tokenizer, one prompt at a time."""

    def __init__(self, directory: str, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self.end = self.tokenizer.convert_tokens_to_ids(END)

    def count(self, text: str) -> int:
        """How many tokens `text` has."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation, ready for the assistant's turn."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()
    def complete(self, ids: list[int], limit: int) -> tuple[str, bool]:
        """The greedy continuation, and whether it closed its turn."""
        given = torch.tensor([ids])
        made = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=limit, do_sample=False
        )
        new = made[0, len(ids) :].tolist()
        return self.tokenizer.decode(new, skip_special_tokens=True), bool(new) and new[-1] == self.end

    def say(self, messages: list[Message], limit: int = 64) -> str:
        """The answer, marked if it did not end."""
        text, ended = self.complete(self.prompt(messages), limit)
        return text if ended else text + " [not ended]"


def recall_prompt(chat: Chat, rng: Random, low: int, high: int, text: str) -> tuple[list[int], str]:
    """A fresh prompt of `low` to `high` tokens and its expected answer."""
    while True:
        code, size = code_word(rng), rng.randint(low, high)
        if text:
            start = rng.randint(0, max(0, len(text) - 4 * size))
            words = text[start : start + 8 * size].split()
            while (tokens := chat.count(" ".join(words))) > size - 40:
                words = words[: min(len(words) - 1, len(words) * (size - 40) // tokens)]
            words.insert(rng.randint(0, len(words)), f"The code word is {code}.")
            content = " ".join(words) + "\n\nWhat is the code word?"
            messages = [{"role": "user", "content": content}]
        else:
            messages = recall_messages(rng, size, chat.count, [("code word", code)], "code word")
        ids = chat.prompt(messages)
        if low <= len(ids) <= high:
            return ids, reply("code word", code)


def measure_recall(chat: Chat, options: argparse.Namespace) -> None:
    """Print the share of long prompts whose code word is found."""
    right, lengths = 0, []
    text = options.text.read_text(encoding="utf-8") if options.text else ""
    for index in range(options.prompts):
        rng = Random(f"eval recall/{options.seed}/{index}")
        ids, expected = recall_prompt(chat, rng, options.low, options.high, text)
        answer, ended = chat.complete(ids, 32)
        good = answer == expected and ended
        right += good
        lengths.append(len(ids))
        if not good:
            print(f"  wrong at {len(ids)} tokens: {answer!r} for {expected!r}")
    mean = sum(lengths) / len(lengths)
    print(
        f"recall: {right}/{options.prompts} = {right / options.prompts:.1%} "
        f"(prompts of {min(lengths)} to {max(lengths)} tokens, {mean:.0f} on average)"
    )


Maker = Callable[[Random], tuple[str, str]]


def measure(chat: Chat, name: str, make: Maker, options: argparse.Namespace) -> None:
    """Print the share of short questions answered as expected."""
    right, wrong = 0, []
    for index in range(options.prompts):
        ask, expected = make(Random(f"eval {name}/{options.seed}/{index}"))
        answer = chat.say([{"role": "user", "content": ask}], chat.count(expected) + 8)
        if answer == expected:
            right += 1
        else:
            wrong.append(f"  {ask!r} -> {answer!r}, not {expected!r}")
    print(f"{name}: {right}/{options.prompts} = {right / options.prompts:.1%}")
    print("\n".join(wrong[:3]))


def counting(rng: Random) -> tuple[str, str]:
    """Only those lists that have one right answer."""
    while True:
        ask, answer = listing(rng)
        if ask.startswith("Count"):
            return ask, answer


def small_sums(rng: Random) -> tuple[str, str]:
    """Sums of numbers up to twenty."""
    while True:
        ask, answer = arithmetic(rng)
        if all(int(number) <= 20 for number in re.findall(r"\d+", answer)):
            return ask, answer


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="src/baton/assets/baton-tiny")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--low", type=int, default=1000, help="the fewest tokens of a recall prompt")
    parser.add_argument("--high", type=int, default=1950, help="the most tokens of a recall prompt")
    parser.add_argument("--text", type=Path, help="a file to take the filler from")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only-recall", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    chat = Chat(options.model, getattr(torch, options.dtype))
    measure_agreement(options.model, len(chat.tokenizer), 512)
    measure_recall(chat, options)
    if not options.only_recall:
        measure(chat, "sums and differences up to 20", small_sums, options)
        measure(chat, "sums and differences up to 99", arithmetic, options)
        measure(chat, "copying", copying, options)
        measure(chat, "counting", counting, options)
        measure(chat, "facts", fact, options)
        for asks in SAMPLES:
            messages: list[Message] = []
            print()
            for ask in asks:
                messages.append({"role": "user", "content": ask})
                messages.append({"role": "assistant", "content": chat.say(messages, 160)})
                print(f"user: {ask}\nassistant: {messages[-1]['content']}")
        print("\ncompletion: " + chat.complete(chat.tokenizer.encode("Once upon a time"), 60)[0])
    print(f"({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
