"""JSON that fits a schema, a regular expression, and one of three words.

python examples/structured_output.py

Needs an engine that takes ``SamplingParams(structured=...)``. The checkpoint is the one that DEEPINFER_HF_MODEL_DIR
names, or the small default model.
"""

from __future__ import annotations

import json
import os
import sys

from deepinfer import LLM, SamplingParams
from deepinfer.entrypoints.default_model import default_model
from deepinfer.structured.spec import Choice, JsonSchema, Regex

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "water"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}

REQUESTS = [
    ("Describe a person as JSON: ", JsonSchema(PERSON, whitespace="spaced")),
    ("A date in the next century: ", Regex(r"21\d\d-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])")),
    ("Is water wet? ", Choice(["yes", "no", "it depends"])),
]


def main() -> int:
    model = os.environ.get("DEEPINFER_HF_MODEL_DIR") or default_model()
    with LLM(model=model) as llm:
        params = [SamplingParams(temperature=0.8, seq_seed=1, max_tokens=200, structured=spec) for _, spec in REQUESTS]
        outputs = llm.generate([prompt for prompt, _ in REQUESTS], params)
    for output in outputs:
        answer = output.outputs[0]
        print(f"{output.prompt}{answer.text}  ({answer.finish_reason})")
    person = json.loads(outputs[0].outputs[0].text)
    print(f"parsed: {person['name']!r}, {person['age']} years, likes {person['likes']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
