"""A process for each rank of a model that is divided among GPUs (``ranks``).

All execute the same steps, and draw the same tokens from the same logits, so that nothing below
knows of them. ``runner`` is that of the first rank, ``backends.step_codec`` writes steps short,
``watch`` starts the other processes and watches them, and ``rank`` is what these run.
"""
