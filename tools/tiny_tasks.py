"""Tasks of the shipped model: prompts with one right answer, and which of them are never trained on. Knows no model."""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (PAD, EOS, UNK, *" +=", *"0123456789", *LETTERS)
TOKEN_IDS = {token: token_id for token_id, token in enumerate(VOCABULARY)}


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and the only completion that is right (EOS follows it)."""

    prompt: str
    answer: str


def add(rng: random.Random) -> Example:
    a, b = (rng.randrange(10 ** rng.randint(1, 2)) for _ in range(2))
    return Example(f"add {a}+{b}=", str(a + b))


def sort(rng: random.Random) -> Example:
    word = _word(rng, longest=8)
    return Example(f"sort {word}=", "".join(sorted(word)))


def rev(rng: random.Random) -> Example:
    word = _word(rng, longest=10)
    return Example(f"rev {word}=", word[::-1])


def count(rng: random.Random) -> Example:
    first = rng.randrange(900)
    last = first + rng.randint(1, 9)
    return Example(f"count {first} {last}=", " ".join(str(n) for n in range(first, last + 1)))


TASKS: dict[str, Callable[[random.Random], Example]] = {"add": add, "sort": sort, "rev": rev, "count": count}


def is_held_out(prompt: str) -> bool:
    """Say whether a prompt belongs to the twentieth of all prompts that training never sees."""
    return zlib.crc32(prompt.encode()) % 20 == 0


def draw(task: str, rng: random.Random, *, held_out: bool) -> Example:
    """Draw one example from one side of the split."""
    while is_held_out((example := TASKS[task](rng)).prompt) != held_out:
        pass
    return example


def held_out_examples(task: str, num: int, seed: int) -> list[Example]:
    """Return held-out examples, no prompt twice; a smaller `num` gives the head of the same list.

    The smallest task, counting, has about 400 of them.
    """
    return list(islice(_distinct(task, random.Random(f"{task}-{seed}")), num))


def write_prompts(path: Path, num_per_task: int, seed: int) -> None:
    """Write a job's input from held-out prompts, and their answers by id beside it (`.answers.json`)."""
    chosen = {
        f"{task}-{number}": example
        for task in TASKS
        for number, example in enumerate(held_out_examples(task, num_per_task, seed), start=1)
    }
    lines = [json.dumps({"id": id_, "prompt": example.prompt}) + "\n" for id_, example in chosen.items()]
    path.write_text("".join(lines), encoding="utf-8")
    answers = {id_: example.answer for id_, example in chosen.items()}
    path.with_suffix(".answers.json").write_text(json.dumps(answers, indent=2) + "\n", encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character: a BPE without merges. A chat is its last message."""
    tokenizer = Tokenizer(models.BPE(vocab=TOKEN_IDS, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        chat_template="{{ messages[-1]['content'] }}",
    )


def _distinct(task: str, rng: random.Random) -> Iterator[Example]:
    seen: set[str] = set()
    while True:
        example = draw(task, rng, held_out=True)
        if example.prompt not in seen:
            seen.add(example.prompt)
            yield example


def _word(rng: random.Random, longest: int) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(2, longest)))
