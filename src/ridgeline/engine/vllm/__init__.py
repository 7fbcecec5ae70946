"""What vLLM's users type: its options, forms of prompts, beams and tokenizer, over what is here."""
