"""Models that judge texts: guard models, by the logits of their verdicts."""
