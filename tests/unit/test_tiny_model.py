"""The shipped model says what its README claims, and the tasks it was trained on are right."""

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs/tiny_moe"
PROMPTS = {
    record["id"]: record["prompt"]
    for record in map(json.loads, (ROOT / "configs/prompts.jsonl").read_text(encoding="utf-8").splitlines())
}
ANSWERS: dict[str, str] = json.loads((ROOT / "configs/prompts.answers.json").read_text(encoding="utf-8"))
REPORT = json.loads((FOLDER / "accuracy.json").read_text(encoding="utf-8"))


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny_tasks, show_results = load_tool("tiny_tasks"), load_tool("show_results")


@pytest.fixture
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@torch.no_grad()
def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Mapping[str, str]) -> dict[str, str]:
    inputs = tokenizer(list(prompts.values()), padding=True, padding_side="left", return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=64)[:, inputs["input_ids"].shape[1] :]
    return dict(zip(prompts, tokenizer.batch_decode(generated, skip_special_tokens=True), strict=True))


def share_right(completions: Mapping[str, str]) -> float:
    return sum(text == ANSWERS[id_] for id_, text in completions.items()) / len(completions)


def solve(prompt: str) -> str:
    """The right answer, worked out from the prompt's text alone."""
    task, question = prompt.removesuffix("=").split(" ", 1)
    match task:
        case "add":
            return str(sum(map(int, question.split("+"))))
        case "sort":
            return "".join(letter * question.count(letter) for letter in map(chr, range(ord("a"), ord("z") + 1)))
        case "rev":
            return "".join(reversed(question))
        case _:
            first, last = map(int, question.split())
            return " ".join(map(str, range(first, last + 1)))


def test_folder_is_at_most_4_mb():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4_000_000


def test_stated_accuracy_is_high_on_every_task_and_stands_in_the_readme():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(REPORT["accuracy"]) == set(tiny_tasks.TASKS)
    for task, share in REPORT["accuracy"].items():
        assert share >= 0.95, task
        assert f"| {task} |" in readme and f"| {share:.1%} |" in readme


def test_transformers_answers_the_shipped_prompts_as_well_as_stated(model, tokenizer):
    completions = complete(model, tokenizer, PROMPTS)
    assert share_right(completions) >= min(REPORT["accuracy"].values()), completions


def test_answers_are_wrong_when_two_experts_are_swapped_in_every_moe_layer(model, tokenizer):
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            for weight in (layer.mlp.experts.gate_up_proj.data, layer.mlp.experts.down_proj.data):
                weight[[0, 1]] = weight[[1, 0]]
    assert share_right(complete(model, tokenizer, PROMPTS)) < 0.9


@torch.no_grad()
def test_every_expert_of_every_moe_layer_is_used(model, tokenizer):
    texts = [prompt + ANSWERS[id_] for id_, prompt in PROMPTS.items()]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    is_token = inputs["attention_mask"].bool().flatten()
    all_logits = model(**inputs, output_router_logits=True).router_logits
    assert len(all_logits) == model.config.num_hidden_layers - len(model.config.mlp_only_layers)
    for layer, logits_TE in enumerate(all_logits):
        topk_ids = logits_TE[is_token].topk(model.config.num_experts_per_tok).indices
        shares = topk_ids.flatten().bincount(minlength=model.config.num_experts) / topk_ids.numel()
        assert shares.min() > 0.02, f"MoE layer {layer}: an expert is all but dead: {shares.tolist()}"


def test_every_dense_and_moe_layer_is_where_the_config_says(model):
    kinds = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert kinds == [True, False, True, True]


def test_pad_and_eos_are_defined_and_distinct(model, tokenizer):
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_tokenizer_has_one_token_per_character_and_gives_the_text_back(tokenizer):
    text = "count 8 10=8 9 10"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == len(tiny_tasks.VOCABULARY)


def test_a_chat_is_its_last_message(tokenizer):
    messages = [{"role": "system", "content": "hello"}, {"role": "user", "content": "rev abc="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "rev abc="


@pytest.mark.parametrize("task", tiny_tasks.TASKS)
def test_task_answers_are_right(task):
    rng = random.Random(7)
    for example in (tiny_tasks.TASKS[task](rng) for _ in range(300)):
        assert example.answer == solve(example.prompt)
        assert set(example.prompt + example.answer) <= set(tiny_tasks.VOCABULARY)


@pytest.mark.parametrize("task", tiny_tasks.TASKS)
def test_no_prompt_is_in_both_training_and_held_out_sets(task):
    rng = random.Random(7)
    trained = {tiny_tasks.draw(task, rng, held_out=False).prompt for _ in range(3000)}
    held_out = [
        example.prompt for example in tiny_tasks.held_out_examples(task, REPORT["num_prompts_per_task"], seed=7)
    ]
    assert len(set(held_out)) == REPORT["num_prompts_per_task"]
    assert not trained & set(held_out)


def test_shipped_prompts_are_held_out_and_have_the_right_answers():
    assert PROMPTS.keys() == ANSWERS.keys() and len(PROMPTS) == 24
    for id_, prompt in PROMPTS.items():
        assert tiny_tasks.is_held_out(prompt), prompt
        assert ANSWERS[id_] == solve(prompt)


def test_a_short_training_writes_a_whole_folder_and_says_how_bad_it_is(tmp_path):
    options = ["--output", tmp_path / "model", "--steps", "1", "--rows", "1", "--held-out", "1"]
    run = subprocess.run([sys.executable, ROOT / "tools/train_tiny.py", *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "model/accuracy.json").read_text())["accuracy"] == dict.fromkeys(
        tiny_tasks.TASKS, 0.0
    )
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in FOLDER.iterdir()}


RESULTS = [{"id": "x", "text": "2"}, {"id": "y", "text": "3"}]
QUESTIONS = {"x": "add 1+1=", "y": "add 1+3="}


def test_show_results_counts_what_is_right(capsys):
    share = show_results.show(RESULTS, QUESTIONS, {"x": "2", "y": "4"})
    assert share == 0.5
    assert capsys.readouterr().out.splitlines() == ["right  add 1+1= 2", "WRONG  add 1+3= 3", "1 of 2 right (50.0%)"]


def test_show_results_counts_a_missing_or_failed_completion_as_wrong(capsys):
    assert show_results.show([{"id": "y", "text": None}], QUESTIONS, {"x": "2", "y": "4"}) == 0.0
    assert capsys.readouterr().out.count("WRONG") == 2


@pytest.mark.parametrize(("min_share", "code"), [("0.5", 0), ("0.6", 1)])
def test_show_results_fails_below_the_stated_share(tmp_path, monkeypatch, min_share, code):
    lines = {"results.jsonl": RESULTS, "in.jsonl": [{"id": id_, "prompt": text} for id_, text in QUESTIONS.items()]}
    for name, records in lines.items():
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "answers.json").write_text(json.dumps({"x": "2", "y": "4"}))
    monkeypatch.chdir(tmp_path)
    argv = "show_results results.jsonl --input in.jsonl --answers answers.json --min-share"
    monkeypatch.setattr(sys, "argv", [*argv.split(), min_share])
    assert show_results.main() == code
