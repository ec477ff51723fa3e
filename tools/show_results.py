"""Print a job's prompts and completions, and the share of them that is right.

    python tools/show_results.py results.jsonl --input configs/prompts.jsonl --answers configs/prompts.answers.json

With --min-share the exit code is 1 if fewer are right; a prompt without a completion counts as wrong.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def show(results: Iterable[Mapping], prompts: Mapping[str, str], answers: Mapping[str, str]) -> float:
    """Print a line per completion, in the order of the prompts; return the share that is right, of all expected."""
    texts: dict[str, list[str | None]] = {}
    for record in results:
        texts.setdefault(record["id"], []).append(record["text"])
    width = max(map(len, prompts.values()), default=0)
    num_right = num_judged = 0
    for id_, prompt in prompts.items():
        for text in texts.get(id_, [None]):
            verdict = "" if id_ not in answers else "right" if text == answers[id_] else "WRONG"
            num_judged += bool(verdict)
            num_right += verdict == "right"
            print(f"{verdict:5}  {prompt:>{width}} {'(no completion)' if text is None else text}")
    share = num_right / num_judged if num_judged else 0.0
    print(f"{num_right} of {num_judged} right ({share:.1%})")
    return share


def main() -> int:
    args = _parse_args()
    try:
        answers = json.loads(args.answers.read_text(encoding="utf-8"))
        prompts = {_id(place, record): _prompt(record) for place, record in enumerate(_read_lines(args.input))}
        results = _read_lines(args.results)
    except (OSError, ValueError) as error:
        sys.exit(f"show_results: {error}")
    return int(show(results, prompts, answers) < args.min_share)


def _id(place: int, record: Mapping) -> str:
    """Return the id that the job gave a line: its own, or its place."""
    return str(record.get("id", record.get("custom_id", place)))


def _prompt(record: Mapping) -> str:
    """Return what was asked, in whichever form it was."""
    asked = record.get("body", record)
    messages = asked.get("messages")
    if messages:
        return str(messages[-1].get("content"))
    return str(asked.get("prompt", asked.get("prompt_token_ids")))


def _read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the job's output")
    parser.add_argument("--input", type=Path, required=True, help="the job's input: lines with id and prompt")
    parser.add_argument("--answers", type=Path, required=True, help="JSON object: the right completion by id")
    parser.add_argument("--min-share", type=float, default=0.0, help="exit with 1 below this share (default 0)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
