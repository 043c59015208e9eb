"""`python -m tests.serve.run_lm_eval KIND URL FOLDER TASK`: a local task of lm-evaluation-harness against a server. Its
last line is JSON: what each request asked for, and what its answer says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

QUESTIONS = (
    ("It is a truth universally", [" acknowledged", " denied", " known"], 0),
    ("A single man in possession of a good", [" fortune", " horse", " house"], 0),
    ("must be in want of a", [" dog", " wife", " b"], 1),
)
_CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""
_GENERATE = """
task: generate
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def write_tasks(folder: Path) -> None:
    """The two tasks, over `QUESTIONS`."""
    rows = [{"question": question, "choices": choices, "answer": at} for question, choices, at in QUESTIONS]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", _CHOICE), ("generate", _GENERATE)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))


def main() -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    kind, url, folder, task = sys.argv[1:]
    found = simple_evaluate(
        model=kind,
        model_args={"model": "tiny", "base_url": url, "tokenizer_backend": "remote", "max_length": 512},
        tasks=[task],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        batch_size=2 if task == "choice" else 1,
        bootstrap_iters=0,
    )
    samples = [(each["arguments"], each["resps"]) for each in found["samples"][task]]
    print(json.dumps({"samples": samples, "results": found["results"][task]}, default=str))


if __name__ == "__main__":
    main()
