"""Clauses of a contract as records: each fits a schema, and one that was filled in shows how."""

import json

from ridgeline import LLM, SamplingParams

kinds = ["delivery", "payment", "termination", "confidentiality", "warranty"]
schema = {
    "type": "object",
    "properties": {
        "kind": {"enum": kinds},
        "bound": {"enum": ["customer", "supplier", "both"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 3650},
    },
    "required": ["kind", "bound", "days"],
    "additionalProperties": False,
}
shown = {
    "Delivery: the Supplier shall deliver within 10 days.": ("delivery", "supplier", 10),
}
clauses = {
    "Payment: the Customer shall pay each invoice within 30 days.": ("payment", "customer", 30),
    "Confidentiality: both parties keep secrets for 730 days.": ("confidentiality", "both", 730),
    "Warranty: the Supplier shall repair a defect within 14 days.": ("warranty", "supplier", 14),
}
params = SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json": schema})
asked = f"Answer as JSON: kind ({', '.join(kinds)}), bound (customer, supplier or both), days."
before = [{"role": "system", "content": asked}]
for clause, record in shown.items():
    answer = json.dumps(dict(zip(schema["required"], record, strict=True)))
    before += [{"role": "user", "content": clause}, {"role": "assistant", "content": answer}]

chats = [[*before, {"role": "user", "content": clause}] for clause in clauses]
with LLM("qwen2.5-coder:0.5b") as llm:
    outputs = llm.chat(chats, params)
for (clause, right), out in zip(clauses.items(), outputs, strict=True):
    found = json.loads(out.outputs[0].text)
    print(f"{clause}\n  {found}")
    assert tuple(found.values()) == right
