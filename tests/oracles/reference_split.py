"""The `reference` model's own greedy run at the split of a handoff: no engine thread, page or batch. Same form as its
peers, whose processes hold no line of Crossfill; this one holds only the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, ".")

from pipeline.engines.reference.model import Model
from pipeline.engines.reference.oracle import split_run


def main() -> None:
    task = json.load(sys.stdin)
    model = Model.load(Path(task["model"]))
    runs = [split_run(model, prompt, task["max_tokens"]) for prompt in task["prompts"]]
    outputs = [{"tokens": list(run.tokens), "margins": list(run.margins)} for run in runs]
    json.dump({"outputs": outputs}, sys.stdout)


if __name__ == "__main__":
    main()
